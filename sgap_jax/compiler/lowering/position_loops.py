"""A form of a statement in which each stored level is iterated by a position variable.

A loop over an index of a sparse level becomes one over its positions, a loop over one that is
stored in blocks becomes two, `coord` undoes its `pos`, and a sum through one scalar is a sum.
"""

from __future__ import annotations

import dataclasses
from typing import Any

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
from sgap_jax.compiler.notation.nest import paths


def positions_explicit(statement: SuchThat, storage: Storage | None) -> tuple[Body, Relations]:
    body, relations = _without_coord(_without_scalars(statement.body), statement.relations)
    graph = Relations(relations, storage)
    return _explicit(body, graph, ()), graph


def _without_scalars(body: Body) -> Body:
    """A sum that goes through one scalar is a sum: lowering keeps it in a scalar by itself, and
    knows where the scalar must be emptied."""
    match body:
        case Assignment():
            return body
        case Forall():
            return dataclasses.replace(body, body=_without_scalars(body.body))
        case Where(Assignment(target, (scalar,), op) as whole, producer):
            producer = _without_scalars(producer)  # one may be the sum of another
            (_, part), *others = paths(producer)
            same = part.op in (op, None) and part.target == scalar and not scalar.indices
            if same and not others:
                return _with_assignment(producer, Assignment(target, part.factors, whole.op))
            return Where(whole, producer)
        case Where():
            return Where(_without_scalars(body.consumer), _without_scalars(body.producer))
    return _without_scalars(body.body)


def _with_assignment(body: Body, assignment: Assignment) -> Body:
    match body:
        case Forall():
            return dataclasses.replace(body, body=_with_assignment(body.body, assignment))
        case Assignment():
            return assignment
    raise AssertionError(body)


def _without_coord(body: Body, relations: tuple[Relation, ...]) -> tuple[Body, tuple]:
    for coord in [relation for relation in relations if isinstance(relation, Coord)]:
        pos = next(
            (r for r in relations if isinstance(r, Pos) and r.position == coord.position), None
        )
        made = [r for r in relations if r != coord and coord.coordinate in _mentioned(r)]
        if pos is None or not made:
            # The coordinates of the positions that a loop runs over, one by one: the same loop.
            if made:
                raise NotImplementedError(
                    f"{coord}: {made[0]}: coordinates are tiled where they are all those of a "
                    "segment, not of a tile of its positions"
                )
            relations = tuple(relation for relation in relations if relation != coord)
            body = _rename_loop(body, coord.coordinate, coord.position)
            continue
        used = [r for r in relations if r not in (coord, pos) and pos.position in _mentioned(r)]
        if used:
            raise NotImplementedError(f"{coord}: {used[0]} is over the positions")
        relations = tuple(
            _renamed(relation, coord.coordinate, pos.coordinate)
            for relation in relations
            if relation not in (coord, pos)
        )
        body = _rename_loop(body, coord.coordinate, pos.coordinate)
    return body, relations


def _mentioned(relation: Relation) -> list[object]:
    return [getattr(relation, field.name) for field in dataclasses.fields(relation)]


def _renamed(relation: Relation, old: IndexVar, new: IndexVar) -> Relation:
    changed: dict[str, Any] = {
        field.name: new
        for field in dataclasses.fields(relation)
        if getattr(relation, field.name) == old
    }
    return dataclasses.replace(relation, **changed)


def _rename_loop(body: Body, old: IndexVar, new: IndexVar) -> Body:
    match body:
        case Forall():
            var = new if body.var == old else body.var
            return dataclasses.replace(body, var=var, body=_rename_loop(body.body, old, new))
        case Where():
            return Where(
                _rename_loop(body.consumer, old, new), _rename_loop(body.producer, old, new)
            )
    return body


def _explicit(body: Body, graph: Relations, above: tuple[IndexVar, ...]) -> Body:
    match body:
        case Where():
            return Where(
                _explicit(body.consumer, graph, above),
                _explicit(body.producer, graph, above),
            )
        case Forall():
            return _explicit_loop(body, graph, above)
        case Assignment():
            return body
    return _explicit(body.body, graph, above)


def _explicit_loop(loop: Forall, graph: Relations, above: tuple[IndexVar, ...]) -> Forall:
    storage, var = graph.storage, loop.var
    inside = (*above, var)
    if storage is None:
        return dataclasses.replace(loop, body=_explicit(loop.body, graph, inside))
    for split in storage.splits:
        if split.parent == var and graph.is_stored(split.outer):
            blocks = dataclasses.replace(loop, var=split.outer, body=Forall(split.inner, loop.body))
            return _explicit_loop(blocks, graph, above)
    position = IndexVar(f"{var}_pos")
    if _is_singleton(var, graph):
        pass  # its position is its parent's: lowering finds the coordinate known
    elif graph.is_stored(var) or _is_sparse_fusion(var, graph):
        if graph.pos_of(var) is None:
            graph.add(Pos(var, position, storage.access))
        loop = dataclasses.replace(loop, var=position)
    elif (root := _tiled(var, graph)) is not None:
        if _is_singleton(root, graph):
            raise NotImplementedError(
                f"{root} has one coordinate at each position of {storage.access}: its coordinates "
                "are not tiled; fuse the indices, and pos(...) tiles their positions"
            )
        if _is_last(var, root, graph, above):
            position = IndexVar(f"{root}_pos")
            if graph.pos_of(root) is None:
                graph.add(Pos(root, position, storage.access))
            graph.tiles[position] = var
            loop = dataclasses.replace(loop, var=position)
    return dataclasses.replace(loop, body=_explicit(loop.body, graph, (*above, loop.var)))


def _is_singleton(var: IndexVar, graph: Relations) -> bool:
    if not graph.is_stored(var) or graph.storage is None:
        return False
    return not graph.storage.is_compressed(graph.levels.index(var))


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
    """Whether the loops above know all of the tile but this variable, which steps by one."""
    while var != root:
        match graph.source(var):
            case Split(parent, outer, inner):
                if var == outer:
                    if inner in above:
                        raise NotImplementedError(
                            f"{root}: its coordinates are tiled, and {inner} is above {outer}; "
                            f"pos({root}, ...) before the split allows it"
                        )
                    return False
                if not _all_above(outer, graph, above):
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
