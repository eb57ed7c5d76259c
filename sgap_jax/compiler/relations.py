"""What the relations of a statement mean: which loops an index comes from, and which of its
variables run over stored positions."""

from __future__ import annotations

from sgap_jax.compiler.cin import (
    Bound,
    Coord,
    Divide,
    Fuse,
    Pos,
    Precompute,
    Relation,
    Split,
)
from sgap_jax.compiler.expr import IndexVar
from sgap_jax.compiler.storage import Storage
from sgap_jax.schedules.schedule import ScheduleError


class Relations:
    """The relations of one statement, and the storage of its sparse factor."""

    def __init__(self, relations: tuple[Relation, ...], storage: Storage | None):
        self.storage = storage
        self.all = (*relations, *(storage.splits if storage else ()))
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
        for relation in self.all:
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
        for relation in self.all:
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
        for relation in self.all:
            match relation:
                case Pos(coordinate=coordinate) if coordinate == var:
                    return relation
        return None

    def add(self, relation: Relation) -> None:
        self.all = (*self.all, relation)
