"""A form of the statement in which loops over stored levels run over positions.

A loop over an index whose coordinates are stored becomes one over its positions; for
y(i) += A(i,j) * x(j) with A in CSR:

    forall(i, forall(j, ...))  ->  forall(i, forall(j_pos, ...)) with pos(j, j_pos, A(i,j))

A loop over an index that is stored in blocks becomes two loops; `coord` cancels its `pos`; and a
`where` that passes a sum on through a scalar becomes the sum itself.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.lowering.relations import Relations
from sgap_jax.compiler.lowering.storage import Storage
from sgap_jax.compiler.notation.cin import (
    Assignment,
    Body,
    Bound,
    Coord,
    Divide,
    Forall,
    Fuse,
    Pos,
    Precompute,
    Relation,
    Split,
    SuchThat,
    Where,
)
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.nest import (
    mentioned,
    paths,
    with_variable,
    without_pair,
    wrap,
)


def with_position_loops(statement: SuchThat, storage: Storage) -> tuple[Body, Relations]:
    """The loops in that form, and their relations with those of the new loops."""
    body, relations = _without_coord(_without_scalars(statement.body), statement.relations)
    graph = Relations(relations, storage)
    return _over_positions(body, graph, ()), graph


def _without_scalars(body: Body) -> Body:
    """where(y = s, forall(j, s += A * x)) becomes forall(j, y += A * x): lowering has a scalar for
    the sum anyway, and knows where the sum starts again."""
    match body:
        case Assignment():
            return body
        case Forall():
            return dataclasses.replace(body, body=_without_scalars(body.body))
        case Where(Assignment(target, (scalar,), op) as whole, producer):
            producer = _without_scalars(producer)  # one may be the sum of another
            (loops, part), *others = paths(producer)
            same = part.op in (op, None) and part.target == scalar and not scalar.indices
            if same and not others:
                return wrap(loops, dataclasses.replace(part, target=target, op=whole.op))
            return Where(whole, producer)
        case Where():
            return Where(_without_scalars(body.consumer), _without_scalars(body.producer))
    return _without_scalars(body.body)


def _without_coord(
    body: Body, relations: tuple[Relation, ...]
) -> tuple[Body, tuple[Relation, ...]]:
    """coord(p, c) of pos(j, p, A) cancels it: loops over c, or tiles of it, are over j. Where no
    relation derives anything from c, its loop takes one position after the other: it is that of p.
    """
    for coord in [relation for relation in relations if isinstance(relation, Coord)]:
        pos = next(
            (r for r in relations if isinstance(r, Pos) and r.position == coord.position), None
        )
        made = [r for r in relations if r != coord and coord.coordinate in mentioned(r)]
        if pos is None or not made:
            if made:
                raise NotImplementedError(
                    f"{coord}: {made[0]}: coordinates are tiled where they are all those of a "
                    "segment, not of a tile of its positions"
                )
            relations = tuple(relation for relation in relations if relation != coord)
            body = with_variable(body, coord.coordinate, coord.position)
            continue
        used = [r for r in relations if r not in (coord, pos) and pos.position in mentioned(r)]
        if used:
            raise NotImplementedError(f"{coord}: {used[0]} is over the positions")
        body, relations = without_pair(body, relations, pos, coord)
    return body, relations


def _over_positions(body: Body, graph: Relations, above: tuple[IndexVar, ...]) -> Body:
    """`above`: the variables of the loops around."""
    match body:
        case Where(consumer, producer):
            consumer = _over_positions(consumer, graph, above)
            return Where(consumer, _over_positions(producer, graph, above))
        case Forall():
            return _loop_over_positions(body, graph, above)
        case Assignment():
            return body
    return _over_positions(body.body, graph, above)


def _loop_over_positions(loop: Forall, graph: Relations, above: tuple[IndexVar, ...]) -> Forall:
    storage, var = graph.storage, loop.var
    for split in storage.splits:
        if split.parent == var and graph.is_stored(split.outer):
            blocks = dataclasses.replace(loop, var=split.outer, body=Forall(split.inner, loop.body))
            return _loop_over_positions(blocks, graph, above)
    if _is_singleton(var, graph):
        pass  # its position is its parent's: lowering finds the coordinate known
    elif graph.is_stored(var) or _is_sparse_fusion(var, graph):
        loop = dataclasses.replace(loop, var=_position_of(var, graph))
    elif (root := _tiled(var, graph)) is not None:
        if _is_singleton(root, graph):
            raise NotImplementedError(
                f"{root} has one coordinate at each position of {storage.access}: its coordinates "
                "are not tiled; fuse the indices, and pos(...) tiles their positions"
            )
        if _is_last(var, root, graph, above):
            position = _position_of(root, graph)
            graph.tiles[position] = var
            loop = dataclasses.replace(loop, var=position)
    body = _over_positions(loop.body, graph, (*above, loop.var))
    return dataclasses.replace(loop, body=body)


def _position_of(var: IndexVar, graph: Relations) -> IndexVar:
    """A variable over the positions of a stored index, with its relation."""
    position = IndexVar(f"{var}_pos")
    if graph.pos_of(var) is None:
        graph.add(Pos(var, position, graph.storage.access))
    return position


def _is_singleton(var: IndexVar, graph: Relations) -> bool:
    stored = graph.is_stored(var)
    return stored and not graph.storage.is_compressed(graph.levels.index(var))


def _is_sparse_fusion(var: IndexVar, graph: Relations) -> bool:
    return isinstance(graph.source(var), Fuse) and graph.is_sparse(var)


def _tiled(var: IndexVar, graph: Relations) -> IndexVar | None:
    """The stored index whose coordinates (not positions) a variable is a tile of."""
    while True:
        match graph.source(var):
            case Split(parent=parent) | Divide(parent=parent) | Bound(parent=parent):
                var = parent
            case Precompute(var=parent):
                var = parent
            case Fuse(outer, inner) if any(_tiled(v, graph) for v in (outer, inner)):
                raise NotImplementedError(
                    f"{var}: a fusion with a stored index is not tiled by its coordinates; "
                    f"pos({var}, ...) tiles its positions"
                )
            case _:
                return var if graph.is_stored(var) else None


def _is_last(var: IndexVar, root: IndexVar, graph: Relations, above: tuple[IndexVar, ...]) -> bool:
    """Whether the loops above say which tile of `root` it is, and `var` steps by one in it."""
    while var != root:
        match graph.source(var):
            case Split(parent, outer, inner):
                if var == outer and inner not in above:
                    return False
                if var == outer or not _all_above(outer, graph, above):
                    raise NotImplementedError(
                        f"{root}: its coordinates are tiled, and {inner} is above {outer}; "
                        f"pos({root}, ...) before the split allows it"
                    )
                var = parent
            case Bound(parent=parent):
                var = parent
            case other:
                raise NotImplementedError(
                    f"{root}: the coordinates of a stored index are split and bounded only, "
                    f"not {other}"
                )
    return True


def _all_above(var: IndexVar, graph: Relations, above: tuple[IndexVar, ...]) -> bool:
    if var in above:
        return True
    below = graph.derived(var)
    return bool(below) and all(_all_above(child, graph, above) for child in below)
