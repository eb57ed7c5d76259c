"""What the relations of a statement mean: which loops an index comes from, and which of its
variables run over stored positions."""

from __future__ import annotations

from sgap_jax.compiler.lowering.storage import Storage
from sgap_jax.compiler.notation.cin import (
    Bound,
    Divide,
    Fuse,
    Pos,
    Precompute,
    Relation,
    Split,
    children,
    parents,
)
from sgap_jax.compiler.notation.expr import IndexVar
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
        return next((relation for relation in self.all if var in children(relation)), None)

    def derived(self, var: IndexVar) -> list[IndexVar]:
        """The variables that one is made into."""
        return [child for made in self.all if var in parents(made) for child in children(made)]

    def leaves(self, var: IndexVar, loops: set[IndexVar]) -> set[IndexVar]:
        """The loops that a variable's value comes from."""
        if var in loops:
            return {var}
        return {leaf for below in self.derived(var) for leaf in self.leaves(below, loops)}

    def steps(self, var: IndexVar, position: IndexVar) -> list[IndexVar]:
        """The variables from the one to the other, if each steps by one with that before; or []."""
        found = [var]
        while var != position:
            match self.source(var):
                case Split(parent, _, inner) | Divide(parent, _, inner) if var == inner:
                    var = parent
                case Bound(parent) | Precompute(parent):
                    var = parent
                case _:
                    return []
            found.append(var)
        return found

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
        found = (r for r in self.all if isinstance(r, Pos) and r.coordinate == var)
        return next(found, None)

    def add(self, relation: Relation) -> None:
        self.all = (*self.all, relation)
