"""The rules for schedules (Senanayake et al., section 5; Sgap, sections 3.3 and 5).

`check_statement` has the rules for every statement; the other checks are for one transformation
each. All raise ScheduleError with only the reason: `Schedule` adds the call and the statement.
"""

from __future__ import annotations

from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.notation import cin
from sgap_jax.compiler.notation.cin import Forall, SuchThat, parents
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.notation.nest import (
    find,
    intrinsics,
    level_indices,
    loops,
    paths,
    perfect,
    without_pairs,
)
from sgap_jax.compiler.notation.provenance import Provenance, block_sides, segment_loops
from sgap_jax.compiler.notation.spaces import part_of, space_of, stored_indices
from sgap_jax.compiler.transform.collectives import check_segments
from sgap_jax.formats.levels import Compressed, Dense, Singleton
from sgap_jax.schedules.schedule import ScheduleError

_GPU = (loopir.GPU_BLOCK, loopir.GPU_WARP, loopir.GPU_THREAD)
# Units whose iterations can reduce together.
_COLLECTIVE = (loopir.CPU_VECTOR, loopir.GPU_WARP, loopir.GPU_THREAD)


def check_statement(expression: Assign, statement: SuchThat) -> None:
    """Checks the rules that every statement obeys, as if no `coord` had undone a `pos`."""
    statement = without_pairs(statement)
    graph = Provenance(expression.indices, statement.relations)
    check_merges(expression, statement)
    operands = (expression.sparse, *expression.merged)
    for around, leaf in paths(statement.body):
        for access in operands:
            check_levels(access, graph, around)
        busy = [x for x in segment_loops(expression, graph, perfect(around), leaf) if x.unit]
        if busy:
            raise ScheduleError(
                f"{leaf.target} is the sum of a run of positions, one after the other: the loop of "
                f"{busy[0].var} cannot run on {busy[0].unit}"
            )
        check_units(around)
        for n, loop in enumerate(around):
            check_race(expression, graph, loop)
            if loop.group is not None and loop.group[1] == cin.SEGMENT:
                check_segments(expression, graph, loop, around[n + 1 :])
    for bound in intrinsics(statement.body):
        if threads := [x for x in loops(statement.body) if x.unit == loopir.GPU_THREAD]:
            raise ScheduleError(
                f"the threads of a warp run {bound.name} together, and the loop of "
                f"{threads[0].var} gives them iterations of their own; give it to "
                f"{loopir.GPU_WARP} or {loopir.GPU_BLOCK}"
            )


def check_merges(expression: Assign, statement: SuchThat) -> None:
    """Checks that the loops over coordinates that are merged go over all of an index, or over a
    tile, one after the other."""
    if not expression.merges:
        return
    stored, tiles = stored_indices(expression), list[IndexVar]()
    for relation in statement.relations:
        if isinstance(relation, cin.Pos):
            _check_leader(expression, statement, relation)
            tiles.append(relation.position)
            continue
        merged = [var for var in parents(relation) if var in (*stored, *tiles)]
        if not merged:
            continue
        index = merged[0]
        if isinstance(relation, cin.Precompute) and index in stored:
            tiles.append(relation.fresh)
            continue
        if index in tiles:
            raise NotImplementedError(
                f"{index} is a tile of merged coordinates, or their positions, already; transform "
                "the loop of the tiles, or bring the coordinates of positions back by coord"
            )
        if not isinstance(relation, cin.Split | cin.Divide):
            raise NotImplementedError(
                f"the coordinates of {index} are merged from what "
                f"{space_of(expression.products, index)} stores; split or divide tiles them, and "
                "the outer part can be transformed further"
            )
        tiles.append(relation.inner)
    place = {loop.var: n for n, loop in enumerate(loops(statement.body))}
    outer = {r.inner: r.outer for r in statement.relations if isinstance(r, cin.Split | cin.Divide)}
    graph = Provenance(expression.indices, statement.relations)
    for loop in loops(statement.body):
        if loop.var not in (*stored, *tiles):
            continue
        if loop.unit is not None or loop.unroll:
            raise ScheduleError(
                f"the coordinates of {loop.var} are merged one after the other: its loop is not "
                f"one for {loop.unit or 'unroll'}; split it, and take the outer part"
            )
        if loop.var in outer:
            made = outer[loop.var]
            above = [v for v in place if v == made or made in _ancestors(graph, v)]
            late = [v for v in above if place[v] > place[loop.var]]
            if late:
                raise ScheduleError(
                    f"the loop of {loop.var} merges the coordinates of a tile, and must be inside "
                    f"the loop of {late[0]}, which says of which one"
                )
    if bound := intrinsics(statement.body):
        raise NotImplementedError(f"{bound[0].name} multiplies what one operand stores, not merged")


def _check_leader(expression: Assign, statement: SuchThat, pos: cin.Pos) -> None:
    """Checks that a loop over the positions of one operand comes to all coordinates of an index
    that its terms need: those of the others are searched for."""
    if pos.coordinate not in stored_indices(expression):
        made = [r for r in statement.relations if isinstance(r, cin.Precompute)]
        if pos.coordinate in [relation.fresh for relation in made]:
            raise NotImplementedError(
                f"{pos.coordinate} is the variable of what fills a workspace; take positions of "
                "an index before its precompute"
            )
        raise NotImplementedError(
            f"{pos.coordinate} is a tile of merged coordinates; take positions of all of an index"
        )
    loop = find(statement.body, pos.position)
    leaves = () if loop is None else paths(loop.body)
    for term in (term for _, leaf in leaves for term in leaf.products):
        own = all(factor in expression.factors for factor in term.factors)
        if own and pos.access not in part_of(term, pos.coordinate):
            raise ScheduleError(
                f"{term} needs coordinates of {pos.coordinate} that {pos.access.tensor} does not "
                "store; loops over the positions of one operand visit no others"
            )


def _ancestors(graph: Provenance, var: IndexVar) -> set[IndexVar]:
    """The variables from which one derives."""
    made = graph.origin(var)
    above = () if made is None else parents(made)
    return {*above, *(further for v in above for further in _ancestors(graph, v))}


def check_levels(access: Access | None, graph: Provenance, around: tuple[Forall, ...]) -> None:
    """Checks that a loop over stored coordinates is inside the loops that determine their parent
    node."""
    if access is None or access.format is None:
        return
    place = {loop.var: n for n, loop in enumerate(around)}
    indices = level_indices(access.format, access.indices)
    of_level = [
        [v for v in place if index in graph.roots(v) and graph.block(v, access) != "inner"]
        for index in indices
    ]
    for depth, level in enumerate(access.format.levels[: len(indices)]):
        if isinstance(level, Dense) or not of_level[depth]:
            continue
        walked = [v for v in of_level[depth] if graph.by_position(v)]
        if walked and not all(of_level[:depth]):
            missing = indices[[bool(v) for v in of_level[:depth]].index(False)]
            named = [r.access for _, r in graph.lineage(walked[0]) if isinstance(r, cin.Pos)]
            if named and named[0] != access:
                raise ScheduleError(
                    f"the loop of {walked[0]} runs over positions of {named[0]}, but {access} has "
                    f"coordinates of {indices[depth]} too, and no loop says of which {missing}"
                )
            raise ScheduleError(
                f"the loop of {walked[0]} runs over positions of level {depth + 1} of {access}, "
                f"but no loop around it says of which {missing}"
            )
        # Loops over tiles of coordinates only filter; the innermost loop goes over stored ones.
        first = min(walked or of_level[depth][-1:], key=place.__getitem__)
        tiles = [v for v in of_level[depth] if walked and v not in walked]
        above = [v for upper in of_level[:depth] for v in upper if v not in of_level[depth]]
        for parent in (*above, *tiles):
            if place[parent] > place[first]:
                raise ScheduleError(
                    f"the loop of {first} runs over what level {depth + 1} of {access} stores "
                    f"({level}) and must be inside the loop of {parent}, which says where"
                )


def check_units(around: tuple[Forall, ...]) -> None:
    """Checks that nested loops have each unit once, do not mix CPU and GPU, and that blocks are
    around warps and warps around threads."""
    units = [loop.unit for loop in around if loop.unit is not None]
    twice = [unit for unit in units if units.count(unit) > 1]
    if twice:
        raise ScheduleError(f"two nested loops run on {twice[0]}; each unit is taken once")
    on_gpu = [unit for unit in units if unit in _GPU]
    if on_gpu and len(on_gpu) < len(units):
        raise ScheduleError(f"loops of {' and '.join(units)} are of two machines")
    if on_gpu != sorted(on_gpu, key=_GPU.index):
        raise ScheduleError(
            f"{on_gpu[0]} around {on_gpu[1]}: blocks go around warps and warps around threads"
        )
    if loopir.GPU_BLOCK in units and around[0].unit != loopir.GPU_BLOCK:
        raise ScheduleError(
            f"the loop of {around[0].var} is around the blocks; the loop of blocks is outermost"
        )


def check_race(expression: Assign, graph: Provenance, loop: Forall) -> None:
    """Checks a claim of NoRaces: no two iterations of the loop store to one element of the
    output."""
    if loop.race != cin.NO_RACES:
        return
    roots = graph.roots(loop.var)
    met = [root for root in roots if root in expression.reduced]
    if met:
        raise ScheduleError(
            f"{loop.var} derives from {met[0]}, over which {expression.output} is reduced: its "
            f"iterations add to one element, so {cin.NO_RACES} does not hold; "
            f"give one of {', '.join(race for race in cin.RACES if race != cin.NO_RACES)}"
        )
    access = expression.sparse
    if access is None or access.format is None or expression.output.format is not None:
        return
    levels = zip(access.format.levels, level_indices(access.format, access.indices), strict=False)
    for level, index in levels:
        if index in roots and (isinstance(level, Singleton) or level == Compressed(unique=False)):
            raise ScheduleError(
                f"{loop.var} derives from {index}, which {access} stores once for each entry "
                f"({level}): iterations meet in one element, so {cin.NO_RACES} does not hold"
            )


def serial_loop(statement: SuchThat, var: IndexVar) -> Forall:
    """The loop of a variable, which must not be parallel or unrolled: it can be transformed."""
    loop = loop_of(statement, var)
    if loop.unit is not None or loop.unroll:
        how = loop.unit or "unrolled"
        raise ScheduleError(f"the loop of {var} is {how} already; transform it before that")
    return loop


def loop_of(statement: SuchThat, var: IndexVar) -> Forall:
    loop = find(statement.body, var)
    if loop is None:
        there = ", ".join(
            dict.fromkeys(str(x.var) for around, _ in paths(statement.body) for x in around)
        )
        raise ScheduleError(f"there is no loop of {var}; there are {there or 'none'}")
    if sum(other.var == var for other in loops(statement.body)) > 1:
        raise ScheduleError(
            f"there are several loops of {var}, one for each sum over it; what is scheduled so is "
            "computed as an expression of its own"
        )
    return loop


def check_fresh(graph: Provenance, *fresh: IndexVar) -> None:
    taken = list(graph.variables)
    for var in fresh:
        if not var.name.isidentifier():
            raise ScheduleError(f"{var.name!r} is not a name")
        if var in taken:
            raise ScheduleError(f"the name {var} is taken; give a new one")
        taken.append(var)


def check_size(what: str, size: int) -> None:
    if type(size) is not int or not 1 <= size < 2**31:
        raise ScheduleError(f"{what} must be a positive int, got {size!r}")


def check_fuse(graph: Provenance, statement: SuchThat, outer: IndexVar, inner: IndexVar) -> None:
    serial_loop(statement, inner)
    body = serial_loop(statement, outer).body
    if not isinstance(body, Forall) or body.var != inner:
        raise ScheduleError(f"{inner} is not directly inside {outer}; reorder first")
    if graph.position(inner):
        raise ScheduleError(
            f"{inner} is in position space, where its extent differs from one {outer} to the next; "
            "fuse the coordinates first, then pos"
        )


def check_pos(expression: Assign, graph: Provenance, var: IndexVar, access: Access) -> None:
    """Checks that `var` derives from consecutive levels of an argument, of which the deepest is a
    stored one (Senanayake et al., section 5)."""
    if access not in expression.factors:
        there = ", ".join(map(str, expression.factors))
        raise ScheduleError(f"{access} is not an argument of the expression; there are {there}")
    if graph.position(var):
        raise ScheduleError(f"{var} is in position space already")
    if graph.fuses_positions(var):
        raise ScheduleError(f"{var} is a fusion of positions; fuse coordinates, then pos once")
    roots = graph.roots(var)
    if absent := [root for root in roots if root not in access.indices]:
        raise ScheduleError(f"{absent[0]}, from which {var} derives, is no index of {access}")
    if access.format is None:
        raise ScheduleError(f"{access} is dense: its positions are its coordinates")
    indices = level_indices(access.format, access.indices)
    first = indices.index(roots[0])
    if roots != indices[first : first + len(roots)]:
        order = ", ".join(map(str, indices))
        raise ScheduleError(
            f"{var} derives from ({', '.join(map(str, roots))}), which are not consecutive levels "
            f"of {access} from the outer to the inner; its levels are ({order})"
        )
    deepest = access.format.levels[first + len(roots) - 1]
    if isinstance(deepest, Dense):
        raise ScheduleError(
            f"level {first + len(roots)} of {access} is {deepest}: its positions are its "
            "coordinates"
        )
    if blocked := [root for root in roots if root in block_sides(access)]:
        if graph.block(var, access) != "outer":
            side = block_sides(access)[blocked[0]]
            raise ScheduleError(
                f"{access} stores blocks of {side} along {blocked[0]}: split it by {side} and take "
                "the positions of the outer part"
            )
    elif not graph.whole(var):
        raise ScheduleError(
            f"{var} is the outer part of a split: a tile of coordinates has no one position"
        )


def check_constant(expression: Assign, graph: Provenance, var: IndexVar, what: str) -> None:
    """Checks that the extent of a loop does not depend on the entries, so that it is known when the
    loops are made."""
    access = expression.sparse
    if access is None or access.format is None:
        return
    indices = level_indices(access.format, access.indices)
    levels = dict(zip(indices, access.format.levels, strict=False))
    stored = [root for root in graph.roots(var) if not isinstance(levels.get(root, Dense()), Dense)]
    fixed = graph.position(var) or graph.block(var, access) == "inner"
    if not stored or fixed and graph.constant(var) is not None:
        return
    if graph.position(var) or not graph.lineage(var):
        # All positions of leading levels: their number is the capacity.
        if graph.roots(var)[0] == indices[0]:
            return
    elif not graph.whole(var):
        return  # tiles of coordinates: their number follows from the dimension
    raise ScheduleError(
        f"{what} needs a loop whose extent is known beforehand; that of {var} depends on what "
        f"{access} stores: pos and split it, and take the inner part"
    )


def check_parallel(
    expression: Assign, graph: Provenance, var: IndexVar, unit: str, race: str
) -> None:
    for word, name, known in (("unit", unit, loopir.UNITS), ("race strategy", race, cin.RACES)):
        if name not in known:
            raise ScheduleError(f"no {word} {name!r}; there are {', '.join(known)}")
    if race == cin.ATOMICS and unit == loopir.CPU_VECTOR:
        raise ScheduleError(
            f"the lanes of a {unit} have no atomic stores; give {cin.PARALLEL_REDUCTION}"
        )
    if race == cin.PARALLEL_REDUCTION and unit not in _COLLECTIVE:
        raise ScheduleError(
            f"iterations on {unit} cannot add up together; give {cin.ATOMICS} or {cin.TEMPORARY}"
        )
    if unit != loopir.CPU_VECTOR:  # a vector loop may have any extent
        check_constant(expression, graph, var, unit)


def check_coord(graph: Provenance, var: IndexVar) -> None:
    pos = graph.position(var)
    if pos is None:
        raise ScheduleError(f"{var} is in coordinate space already")
    if len(graph.roots(pos.coordinate)) > 1:
        raise ScheduleError(
            f"{var} runs over several levels of {pos.access} at once and has no one coordinate"
        )
    if not graph.whole(var):
        raise ScheduleError(
            f"{var} is the outer part of a split: a tile of positions has no one coordinate"
        )
