"""The relations between index variables (the provenance graph; Senanayake et al., OOPSLA 2020,
section 4), with the storage of the sparse operand that its position variables refer to."""

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
    """The relations of one statement, and the storage of its sparse operand."""

    def __init__(self, relations: tuple[Relation, ...], storage: Storage):
        self.storage = storage
        self.all = (*relations, *storage.splits)
        # Position variable: the innermost tile variable, where a loop over positions stands for one
        # over a tile of coordinates.
        self.tiles: dict[IndexVar, IndexVar] = {}

    @property
    def levels(self) -> tuple[IndexVar, ...]:
        return self.storage.variables

    def is_stored(self, var: IndexVar) -> bool:
        """Whether it is the variable of a level that stores its coordinates."""
        return var in self.levels and not self.storage.is_dense(self.levels.index(var))

    def source(self, var: IndexVar) -> Relation | None:
        """The relation that derives a variable."""
        return next((relation for relation in self.all if var in children(relation)), None)

    def derived(self, var: IndexVar) -> list[IndexVar]:
        """The variables that are derived from one."""
        return [child for made in self.all if var in parents(made) for child in children(made)]

    def loops_of(self, var: IndexVar, loops: set[IndexVar]) -> set[IndexVar]:
        """Those of `loops` that the value of a variable comes from."""
        if var in loops:
            return {var}
        return {loop for below in self.derived(var) for loop in self.loops_of(below, loops)}

    def unit_steps(self, var: IndexVar, position: IndexVar) -> list[IndexVar]:
        """The variables from the one to the other, if each steps by one as that before does.

        For split(p, p0, p1, 16): [p1, p] from p1 to p; [] from p0, which steps by 16.
        """
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

    def fused(self, var: IndexVar) -> tuple[IndexVar, ...]:
        """The variables that are fused in one, from the outermost on; without fusion, itself."""
        match self.source(var):
            case Fuse(outer, inner):
                return (*self.fused(outer), *self.fused(inner))
        return (var,)

    def is_sparse(self, fused: IndexVar) -> bool:
        return any(self.is_stored(var) for var in self.fused(fused))

    def levels_of(self, pos: Pos) -> tuple[int, int]:
        """The first and the last level that a position variable runs over."""
        variables = self.fused(pos.coordinate)
        if all(var in self.levels for var in variables):
            positions = [self.levels.index(var) for var in variables]
            first, last = positions[0], positions[-1]
            if positions == list(range(first, last + 1)) and not self.storage.is_dense(last):
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
