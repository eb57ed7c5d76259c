"""Merge loops: over an index whose coordinates several operands store (Kjolstad et al., OOPSLA
2017, section 5; Senanayake et al., OOPSLA 2020, section 6).

The iteration space of a loop is a union of intersections of operands (notation/spaces.py), of which
the lattice has what may be left when some have no coordinates any more. For each point there is a
loop while all of its operands have some. It goes to the next coordinate that any of them stores,
and computes the terms whose factors all store it; C(i,j) = A(i,j) + B(i,j) in CSR:

    while (A2_p < A2_end && B2_p < B2_end) {
      const int A2_j = A2_crd[A2_p]; ...
      const int j = min(A2_j, B2_j);
      if (A2_j == j && B2_j == j) ... else if (A2_j == j) ... else ...
      A2_p += A2_j == j ? 1 : 0; ...
    }
    for (A2_rest = A2_p; A2_rest < A2_end; A2_rest++) ...
    for (B2_rest = B2_p; B2_rest < B2_end; B2_rest++) ...

Where a term needs all coordinates, the loop counts them. With pos(j, jp, A) the loop goes over what
A stores, and searches for each coordinate in the others: for intersections with a short A.

Whatever the index arrays hold, positions stay within those that the offsets give, and coordinates
that are counted within the dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from sgap_jax.compiler.loop_ir.arithmetic import ONE, ZERO, add, both, least, multiply
from sgap_jax.compiler.loop_ir.loopir import (
    Binary,
    Expr,
    Float,
    For,
    If,
    Int,
    Let,
    Load,
    Select,
    Set,
    Stmt,
    Store,
    Var,
    While,
)
from sgap_jax.compiler.lowering.assignments import declare_temporaries
from sgap_jax.compiler.lowering.context import Context, Range
from sgap_jax.compiler.lowering.derived_variables import define_derived
from sgap_jax.compiler.lowering.ranges import lower_bound, range_of, value_of
from sgap_jax.compiler.notation.cin import (
    Assignment,
    Body,
    Divide,
    Forall,
    Pos,
    Precompute,
    Relation,
    Split,
    SuchThat,
    Where,
    children,
    parents,
)
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar, Term
from sgap_jax.compiler.notation.nest import over_variable, paths, with_variable
from sgap_jax.compiler.notation.spaces import Part, part_of, space_of, stored_indices
from sgap_jax.schedules.schedule import ScheduleError

Lower = Callable[[Context, Body], None]

# Bodies that the cases of all loops may make. The union of three tensors in CSF(3) has 127 stores,
# for which LLVM takes a second; that of four matrices in CSF(2) is refused.
MOST_CASES = 256


@dataclasses.dataclass(frozen=True)
class Iterator:
    """The positions of an operand under the known position of the level above."""

    access: Access
    level: int
    coordinates: str  # the array
    begin: Expr
    end: Expr
    position: str = ""  # a mutable scalar, where there is more than one loop over them

    @property
    def prefix(self) -> str:
        return f"{self.access.tensor}{self.level + 1}"

    @property
    def left(self) -> Expr:
        """Whether there is a position left."""
        return Binary("<", Var(self.position), self.end)


def merged_index(ctx: Context, var: IndexVar) -> IndexVar | None:
    """The index whose coordinates a loop merges: its own, or that of which it is a tile."""
    made = ctx.relations.source(var)
    index = made.parent if isinstance(made, Split) and made.inner == var else var
    return index if index in stored_indices(ctx.expression) else None


def with_sized_tiles(statement: SuchThat, expression: Assign, sizes: dict[str, int]) -> SuchThat:
    """The statement with tiles of a fixed size of merged coordinates in place of a fixed number of
    tiles."""
    stored = stored_indices(expression)

    def sized(made: Relation) -> Relation:
        if not isinstance(made, Divide) or made.parent not in stored:
            return made
        size = max(1, -(-sizes[made.parent.name] // made.parts))
        return Split(made.parent, made.outer, made.inner, size)

    return SuchThat(statement.body, tuple(map(sized, statement.relations)))


def without_positions(statement: SuchThat) -> tuple[SuchThat, dict[IndexVar, Access]]:
    """The statement with loops over coordinates, in a workspace's producer by the same variable as
    in its consumer, also where either is tiled; and the operand over whose positions the loop of an
    index goes, where the schedule gives one."""
    leaders: dict[IndexVar, Access] = {}
    body, relations = statement.body, statement.relations
    for made in reversed(relations):  # a variable that is made of another one goes first
        if not isinstance(made, Pos | Precompute):
            continue
        (old,), (new,) = children(made), parents(made)
        if isinstance(made, Pos):
            leaders[new] = made.access
        body = with_variable(body, old, new)
        relations = tuple(over_variable(r, old, new) for r in relations if r != made)
    return SuchThat(body, relations), leaders


def alive_terms(ctx: Context, body: Body) -> list[Term]:
    """The terms that a body adds up here. One that reads a temporary which the body fills needs no
    coordinates beside those of its own operands."""
    leaves = [leaf for _, leaf in paths(body)]
    filled = {leaf.target for leaf in leaves}
    return [
        term
        for leaf in leaves
        for term in leaf.products
        if term.factors in ctx.scope.alive
        and (filled.isdisjoint(term.factors) or any(x.format is not None for x in term.factors))
    ]


def lower_where_terms(ctx: Context, where: Where, lower: Lower) -> None:
    """The producer and the consumer, as far as any of their terms is alive."""
    temporaries = {leaf.target for _, leaf in paths(where.producer)}
    alive = bool(alive_terms(ctx, where.producer))
    terms = {t.factors for _, leaf in paths(where.consumer) for t in leaf.products}
    if not alive:
        ctx.scope.alive -= {factors for factors in terms if temporaries & set(factors)}
    if not terms & ctx.scope.alive:
        return
    if alive:
        reads = _reads_stored(ctx, where)
        declare_temporaries(ctx, where, filled=reads is None)
        if reads is not None:
            lower_merge(ctx, reads, reads.var, _start_element)
        with ctx.block() as producer, ctx.adding_to(None):
            lower(ctx, where.producer)
        ctx.emit(*producer.close())
    lower(ctx, where.consumer)


def _reads_stored(ctx: Context, where: Where) -> Forall | None:
    """The consumer, if it is a loop that reads a workspace only at coordinates that operands store:
    then those elements alone have to start as the workspace's initial value, and a row costs what
    it stores, not what it could. What the producer adds elsewhere is never read."""
    loop, filled = where.consumer, {leaf.target for _, leaf in paths(where.producer)}
    if not isinstance(loop, Forall) or not isinstance(loop.body, Assignment) or len(filled) != 1:
        return None
    (workspace,) = filled
    if workspace.indices != (loop.var,) or merged_index(ctx, loop.var) != loop.var:
        return None
    return None if space_of(alive_terms(ctx, loop.body), loop.var).whole else loop


def _start_element(ctx: Context, body: Body) -> None:
    """In place of an assignment that reads an element of a workspace."""
    assert isinstance(body, Assignment)
    for factor in body.factors:
        place = ctx.scope.temporaries.get(factor.tensor)
        if isinstance(place, tuple):
            (index,) = factor.indices
            ctx.emit(Store(place[0], value_of(ctx, index), Float(0.0)))


def lower_merge(ctx: Context, loop: Forall, index: IndexVar, lower: Lower) -> None:
    """The loops that the loop of `index`, or of a tile of it, becomes."""
    if loop.unit is not None or loop.unroll:
        raise ScheduleError(
            f"{loop.var} ({loop.unit or 'unroll'}): the coordinates of {index} are merged one "
            f"after the other; split({index}, ...) makes tiles of them, which are independent"
        )
    terms = alive_terms(ctx, loop.body)
    space = space_of(terms, index)
    points = space.points()
    several = len(points) > 1 or len(space.operands) > 1
    if (leader := ctx.leaders.get(index)) is not None:
        _lower_search(
            ctx, index, leader, points, functools.partial(_case, ctx, loop, index, terms, lower)
        )
        return
    taken: set[str] = set()
    with ctx.block() as around:
        low, high = _coordinates(ctx, loop.var, index)
        every = [
            _iterator(ctx, access, index, (low, high), several)
            for access in ctx.merged
            if access in space.operands
        ]
        counter = ""
        if several and space.whole:
            counter = ctx.fresh(index.name)
            ctx.emit(Let(counter, low, mutable=True))
        for point in points:
            iterators = [iterator for iterator in every if iterator.access in point]
            case = functools.partial(_case, ctx, loop, index, terms, lower)
            with ctx.reusable_names() as names:
                if space.whole and not iterators:
                    begin = Var(counter) if counter else low
                    ctx.emit(_rest_of_dimension(ctx, index, begin, high, case))
                elif len(iterators) == 1 and not space.whole:
                    ctx.emit(_rest(ctx, index, iterators[0], case))
                else:
                    within = [p for p in points if p <= point]
                    end = high if space.whole else None
                    ctx.emit(_merge(ctx, index, iterators, within, counter, end, case))
            taken |= names
    ctx.names |= taken
    ctx.emit(*around.close())


Case = Callable[[Expr, dict[Access, Expr]], tuple[Stmt, ...]]


def _lower_search(
    ctx: Context, index: IndexVar, leader: Access, points: list[Part], case: Case
) -> None:
    """A loop over the positions of one operand, which every point has; the coordinate's position in
    the others is searched for."""
    whole = (ZERO, Int(ctx.sizes[index.name]))
    taken: set[str] = set()
    with ctx.block() as around:
        own = _iterator(ctx, leader, index, whole, several=False)
        others = [x for x in ctx.merged if x != leader and any(x in point for point in points)]
        segments = {}
        for access in others:
            found = _iterator(ctx, access, index, whole, several=False)
            begin = ctx.let(f"{found.prefix}_begin", found.begin)
            segments[access] = dataclasses.replace(found, begin=begin)
        name = ctx.fresh(f"{own.prefix}_p")
        with ctx.block() as turn:
            coordinate = ctx.let(index.name, Load(own.coordinates, Var(name)))
            positions: dict[Access, Expr] = {leader: Var(name)}
            here: dict[Access, Expr] = {}
            for access, found in segments.items():
                first = lower_bound(found.coordinates, Range(found.begin, found.end), coordinate)
                place = positions[access] = ctx.let(f"{found.prefix}_p", first)
                same = Binary("==", Load(found.coordinates, place), coordinate)
                here[access] = Binary("and", Binary("<", place, found.end), same)
            branches = []
            for point in points:
                test = functools.reduce(both, (here[x] for x in others if x in point), None)
                with ctx.reusable_names() as names:
                    inside = {x: positions[x] for x in positions if x in point}
                    branches.append((test, case(coordinate, inside)))
                taken |= names
            ctx.emit(*_chain(branches))
        ctx.emit(For(name, own.begin, own.end, turn.close()))
    ctx.names |= taken
    ctx.emit(*around.close())


def _case(
    ctx: Context,
    loop: Forall,
    index: IndexVar,
    terms: Sequence[Term],
    lower: Lower,
    coordinate: Expr,
    positions: dict[Access, Expr],
) -> tuple[Stmt, ...]:
    """The body of a loop at a coordinate that some operands store, at `positions`."""
    dead = {term.factors for term in terms if not part_of(term, index) <= positions.keys()}
    with ctx.block(alive=ctx.scope.alive - dead) as inner:
        inner.known[index] = coordinate
        for access, position in positions.items():
            inner.located[access, ctx.merged[access].level_of(index)] = position
        define_derived(ctx, loop)
        lower(ctx, loop.body)
    ctx.cases += 1
    if ctx.cases > MOST_CASES:
        raise NotImplementedError(
            f"{ctx.expression}: more than {MOST_CASES} cases of which operands store a coordinate; "
            "add up fewer of them at once"
        )
    return inner.close()


def _merge(
    ctx: Context,
    index: IndexVar,
    iterators: list[Iterator],
    points: list[Part],
    counter: str,
    end: Expr | None,
    case: Case,
) -> Stmt:
    """The loop of a lattice point. `points`: it and those below it; `counter`: the coordinate that
    is counted up to `end`, where a term needs all."""
    more = [iterator.left for iterator in iterators]
    condition: Expr | None = None if end is None else Binary("<", Var(counter), end)
    for left in more:
        condition = both(condition, left)
    assert condition is not None
    taken: set[str] = set()
    with ctx.block() as turn:
        stored: dict[Access, Expr] = {}
        for iterator in iterators:
            load = Load(iterator.coordinates, Var(iterator.position))
            stored[iterator.access] = ctx.let(f"{iterator.prefix}_{index}", load)
        coordinate: Expr = Var(counter)
        if end is None:
            coordinate = ctx.let(index.name, functools.reduce(least, stored.values()))
        here = {access: Binary("==", value, coordinate) for access, value in stored.items()}
        branches = []
        for point in points:
            test: Expr | None = None
            for iterator in iterators:
                if iterator.access in point:
                    test = both(test, here[iterator.access])
            positions: dict[Access, Expr] = {
                x.access: Var(x.position) for x in iterators if x.access in point
            }
            with ctx.reusable_names() as names:
                branches.append((test, case(coordinate, positions)))
            taken |= names
        ctx.names |= taken
        # Some operand stores the coordinate: the last one where all others do not.
        if all(frozenset([access]) in points for access in stored):
            branches[-1] = (None, branches[-1][1])
        ctx.emit(*_chain(branches))
        for iterator in iterators:
            step = Select(here[iterator.access], ONE, ZERO)
            ctx.emit(Set(iterator.position, Binary("+", Var(iterator.position), step)))
        if end is not None:
            ctx.emit(Set(counter, add(Var(counter), ONE)))
    return While(condition, turn.close())


def _chain(branches: list[tuple[Expr | None, tuple[Stmt, ...]]]) -> tuple[Stmt, ...]:
    """if ... else if ... else ..."""
    (condition, body), *others = branches
    if condition is None:
        return body
    return (If(condition, body, _chain(others) if others else ()),)


def _rest(ctx: Context, index: IndexVar, iterator: Iterator, case: Case) -> Stmt:
    """All positions that are left of the only operand that is."""
    begin: Expr = Var(iterator.position) if iterator.position else iterator.begin
    name = ctx.fresh(f"{iterator.prefix}_rest" if iterator.position else f"{iterator.prefix}_p")
    with ctx.block() as turn:
        coordinate = ctx.let(index.name, Load(iterator.coordinates, Var(name)))
        ctx.emit(*case(coordinate, {iterator.access: Var(name)}))
    return For(name, begin, iterator.end, turn.close())


def _rest_of_dimension(ctx: Context, index: IndexVar, begin: Expr, high: Expr, case: Case) -> Stmt:
    """All coordinates that are left where no operand stores any."""
    name = ctx.fresh(f"{index}_rest" if isinstance(begin, Var) else index.name)
    return For(name, begin, high, case(Var(name), {}))


def _coordinates(ctx: Context, var: IndexVar, index: IndexVar) -> tuple[Expr, Expr]:
    """The coordinates that a loop goes over: all, or those of a tile."""
    whole = Int(ctx.sizes[index.name])
    made = ctx.relations.source(var)
    if not isinstance(made, Split):
        return ZERO, whole
    base = multiply(value_of(ctx, made.outer), Int(made.size))
    end = add(base, Int(made.size))
    if not range_of(ctx, index).fits(made.size):
        end = least(end, whole)
    return ctx.let(f"{index}_begin", base), ctx.let(f"{index}_end", end)


def _iterator(
    ctx: Context, access: Access, index: IndexVar, tile: tuple[Expr, Expr], several: bool
) -> Iterator:
    """The positions of an operand in a tile of coordinates; `several` loops go over them."""
    storage = ctx.merged[access]
    level = storage.level_of(index)
    parent = ctx.located(access, level - 1)
    array, prefix = storage.coordinates(level), f"{access.tensor}{level + 1}"
    begin = storage.descend(parent, level, level)
    end = storage.descend(add(parent, ONE), level, level)
    if tile != (ZERO, Int(ctx.sizes[index.name])):  # two searches
        segment = Range(ctx.let(f"{prefix}_first", begin), ctx.let(f"{prefix}_last", end))
        begin, end = (lower_bound(array, segment, coordinate) for coordinate in tile)
    position = ""
    if several:
        position = ctx.fresh(f"{prefix}_p")
        ctx.emit(Let(position, begin, mutable=True))
    return Iterator(access, level, array, begin, ctx.let(f"{prefix}_end", end), position)
