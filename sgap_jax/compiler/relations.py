"""What the relations of a statement mean: which loops an index comes from, and which loops run over
stored positions.

Before lowering, a statement is brought to a form in which each stored level is iterated by a
position variable (`positions_explicit`): a loop over an index of a sparse level becomes one over
its positions, a loop over one block size of a blocked index becomes two, `coord` undoes its `pos`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from sgap_jax.compiler.cin import (
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
from sgap_jax.compiler.expr import IndexVar
from sgap_jax.compiler.storage import Storage
from sgap_jax.schedules import ScheduleError

Path = tuple[Forall, ...]


def paths(body: Body, above: Path = ()) -> Iterator[tuple[Path, Assignment]]:
    """Each assignment with the loops around it, from the outermost on."""
    match body:
        case Assignment():
            yield above, body
        case Forall():
            yield from paths(body.body, (*above, body))
        case Where():
            yield from paths(body.consumer, above)
            yield from paths(body.producer, above)
        case _:  # what is bound to an intrinsic computes the same
            yield from paths(body.body, above)


class Provenance:
    """The relations of one statement, and the storage of its sparse factor."""

    def __init__(self, relations: tuple[Relation, ...], storage: Storage | None):
        self.storage = storage
        self.relations = (*relations, *(storage.splits if storage else ()))
        self.tiles: dict[IndexVar, IndexVar] = {}  # position variable: innermost coordinate tile

    @property
    def levels(self) -> tuple[IndexVar, ...]:
        return () if self.storage is None else self.storage.variables

    def is_stored(self, var: IndexVar) -> bool:
        """Whether it is an index of a level that stores its coordinates."""
        return (
            self.storage is not None
            and var in self.levels
            and not self.storage.is_dense(self.levels.index(var))
        )

    def source(self, var: IndexVar) -> Relation | None:
        """The relation that makes a variable."""
        for relation in self.relations:
            match relation:
                case Split(outer=a, inner=b) | Divide(outer=a, inner=b):
                    found = var in (a, b)
                case Fuse(fused=a) | Pos(position=a) | Coord(coordinate=a):
                    found = var == a
                case Bound(bounded=a) | Precompute(fresh=a):
                    found = var == a
            if found:
                return relation
        return None

    def derived(self, var: IndexVar) -> list[IndexVar]:
        """The variables that one is made into."""
        found: list[IndexVar] = []
        for relation in self.relations:
            match relation:
                case Split(parent, a, b) | Divide(parent, a, b) if parent == var:
                    found += [a, b]
                case Fuse(a, b, fused) if var in (a, b):
                    found.append(fused)
                case Pos(a, b) | Coord(a, b) | Bound(a, b) | Precompute(a, b) if a == var:
                    found.append(b)
        return found

    def leaves(self, var: IndexVar, loops: set[IndexVar]) -> set[IndexVar]:
        """The loops that a variable's value comes from."""
        if var in loops:
            return {var}
        return {leaf for below in self.derived(var) for leaf in self.leaves(below, loops)}

    def flat(self, var: IndexVar) -> tuple[IndexVar, ...]:
        """The variables that are fused in one, from the outermost on."""
        match self.source(var):
            case Fuse(outer, inner):
                return (*self.flat(outer), *self.flat(inner))
        return (var,)

    def is_sparse(self, fused: IndexVar) -> bool:
        return any(self.is_stored(var) for var in self.flat(fused))

    def levels_of(self, pos: Pos) -> tuple[int, int]:
        """The first and the last level that a position variable runs over."""
        variables = self.flat(pos.coordinate)
        if self.storage is not None and all(var in self.levels for var in variables):
            numbers = [self.levels.index(var) for var in variables]
            first, last = numbers[0], numbers[-1]
            if numbers == list(range(first, last + 1)) and not self.storage.is_dense(last):
                return first, last
        raise ScheduleError(
            f"pos({pos.coordinate}, {pos.position}, {pos.access}): {pos.coordinate} is not made of "
            f"consecutive levels of {pos.access} of which the last is stored: an index with a "
            "block is split by the size of the block first"
        )

    def pos_of(self, var: IndexVar) -> Pos | None:
        for relation in self.relations:
            match relation:
                case Pos(coordinate=coordinate) if coordinate == var:
                    return relation
        return None

    def add(self, relation: Relation) -> None:
        self.relations = (*self.relations, relation)


def positions_explicit(statement: SuchThat, storage: Storage | None) -> tuple[Body, Provenance]:
    body, relations = _without_coord(_without_scalars(statement.body), statement.relations)
    provenance = Provenance(relations, storage)
    return _explicit(body, provenance, ()), provenance


def _without_scalars(body: Body) -> Body:
    """A sum that goes through one scalar is a sum: lowering keeps it in a scalar by itself, and
    knows where the scalar must be emptied."""
    match body:
        case Assignment():
            return body
        case Forall():
            return dataclasses.replace(body, body=_without_scalars(body.body))
        case Where(Assignment(target, (scalar,), op) as whole, producer):
            (_, part), *others = paths(producer)
            same = part.op in (op, None) and part.target == scalar and not scalar.indices
            if same and not others:
                return _without_scalars(
                    _with_assignment(producer, Assignment(target, part.factors, whole.op))
                )
            return Where(whole, _without_scalars(producer))
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
        if pos is None:
            raise NotImplementedError(
                f"coord({coord.position}, {coord.coordinate}): only of a variable that pos made, "
                "before it is split"
            )
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
    changed = {
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


def _explicit(body: Body, provenance: Provenance, above: tuple[IndexVar, ...]) -> Body:
    match body:
        case Where():
            return Where(
                _explicit(body.consumer, provenance, above),
                _explicit(body.producer, provenance, above),
            )
        case Forall():
            return _explicit_loop(body, provenance, above)
        case Assignment():
            return body
    return _explicit(body.body, provenance, above)


def _explicit_loop(loop: Forall, provenance: Provenance, above: tuple[IndexVar, ...]) -> Forall:
    storage, var = provenance.storage, loop.var
    inside = (*above, var)
    if storage is None:
        return dataclasses.replace(loop, body=_explicit(loop.body, provenance, inside))
    for split in storage.splits:
        if split.parent == var and provenance.is_stored(split.outer):
            blocks = dataclasses.replace(
                loop, var=split.outer, body=Forall(split.inner, loop.body)
            )
            return _explicit_loop(blocks, provenance, above)
    position = IndexVar(f"{var}_pos")
    if _is_singleton(var, provenance):
        pass  # its position is its parent's: lowering finds the coordinate known
    elif provenance.is_stored(var) or _is_sparse_fusion(var, provenance):
        if provenance.pos_of(var) is None:
            provenance.add(Pos(var, position, storage.access))
        loop = dataclasses.replace(loop, var=position)
    elif (root := _tiled(var, provenance)) is not None:
        if _is_singleton(root, provenance):
            raise NotImplementedError(
                f"{root} has one coordinate at each position of {storage.access}: its coordinates "
                "are not tiled; fuse the indices, and pos(...) tiles their positions"
            )
        if _is_last(var, root, provenance, above):
            position = IndexVar(f"{root}_pos")
            if provenance.pos_of(root) is None:
                provenance.add(Pos(root, position, storage.access))
            provenance.tiles[position] = var
            loop = dataclasses.replace(loop, var=position)
    return dataclasses.replace(loop, body=_explicit(loop.body, provenance, (*above, loop.var)))


def _is_singleton(var: IndexVar, provenance: Provenance) -> bool:
    if not provenance.is_stored(var) or provenance.storage is None:
        return False
    return not provenance.storage.is_compressed(provenance.levels.index(var))


def _is_sparse_fusion(var: IndexVar, provenance: Provenance) -> bool:
    return isinstance(provenance.source(var), Fuse) and provenance.is_sparse(var)


def _tiled(var: IndexVar, provenance: Provenance) -> IndexVar | None:
    """The stored index whose coordinates (not positions) a variable is a tile of."""
    while True:
        match provenance.source(var):
            case Split(parent=parent) | Divide(parent=parent) | Bound(parent=parent):
                var = parent
            case Precompute(var=parent):
                var = parent
            case Fuse(outer, inner) if any(_tiled(v, provenance) for v in (outer, inner)):
                raise NotImplementedError(
                    f"{var}: a fusion with a stored index is not tiled by its coordinates; "
                    f"pos({var}, ...) tiles its positions"
                )
            case _:
                return var if provenance.is_stored(var) else None


def _is_last(
    var: IndexVar, root: IndexVar, provenance: Provenance, above: tuple[IndexVar, ...]
) -> bool:
    """Whether the loops above know all of the tile but this variable, which steps by one."""
    while var != root:
        match provenance.source(var):
            case Split(parent, outer, inner):
                if var == outer:
                    if inner in above:
                        raise NotImplementedError(
                            f"{root}: its coordinates are tiled, and {inner} is above {outer}; "
                            f"pos({root}, ...) before the split allows it"
                        )
                    return False
                if not _all_above(outer, provenance, above):
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


def _all_above(var: IndexVar, provenance: Provenance, above: tuple[IndexVar, ...]) -> bool:
    if var in above:
        return True
    below = provenance.derived(var)
    return bool(below) and all(_all_above(child, provenance, above) for child in below)
