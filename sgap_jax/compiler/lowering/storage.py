"""The levels of the sparse operand as lowering sees them: arrays, capacities, index variables.

Level l of an operand A has the arrays of TACO (Kjolstad et al., OOPSLA 2017, section 3), whose
names count from 1. CSR has a dense level and a compressed one, with offsets and coordinates:

    A2_pos[i], A2_pos[i + 1]    the positions of row i in A2_crd and A_vals
    A2_crd[p]                   the column at position p
"""

from __future__ import annotations

from collections.abc import Sequence

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, multiply
from sgap_jax.compiler.loop_ir.loopir import Array, Expr, Int, Load
from sgap_jax.compiler.notation.cin import Relation, Split
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.formats.levels import Compressed, Dense, Format, Level, Singleton


def capacities(format: Format, sizes: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """The number of positions that each level has memory for.

    Args:
      format: of the sparse operand.
      sizes: of the modes, in stored order.
      counts: the lengths of the coordinate arrays.
    """
    sides = (*format.block_shape, *[1] * len(sizes))
    extents = iter([-(-n // side) for n, side in zip(sizes, sides, strict=False)])
    found, lengths, above = [], iter(counts), 1
    for level in format.levels:
        if isinstance(level, Dense):
            above *= next(extents) if level.size is None else level.size
        else:
            above, _ = next(lengths), next(extents)
        found.append(above)
    return tuple(found)


def array_name(access: Access, expression: Assign) -> str:
    """The name of the array with the values of an operand, or of the output."""
    stored = access == expression.sparse or access in expression.merged
    return f"{access.tensor}_vals" if stored else access.tensor


class Storage:
    """A sparse operand, level by level from 0 on; without levels where all operands are dense.

    In CVS(V) and BCSR(r, c) an index has two levels, its block and its place in the block: it is
    split by the size of the block. If the schedule has that split, its variables are those of the
    levels; else new ones are made (`splits`).
    """

    def __init__(
        self,
        access: Access | None,
        sizes: dict[str, int],
        positions: tuple[int, ...],
        relations: tuple[Relation, ...],
        repeated: tuple[int, ...] = (),
    ):
        self._access = access
        self.levels: tuple[Level, ...] = ()
        self.splits: list[Split] = []  # by blocks, where the schedule has no such split
        self.ragged: list[IndexVar] = []  # of blocks whose last one is partly outside the matrix
        self.modes: list[IndexVar] = []  # in stored order
        self.extents: list[int] = []
        self.variables: tuple[IndexVar, ...] = ()  # of the levels
        # By level: whether the same coordinates, of it and all levels above, may be stored twice.
        self.repeats: list[bool] = []
        self.positions = positions
        if access is None:
            return
        assert access.format is not None
        format, self.levels = access.format, access.format.levels
        if len(positions) != len(self.levels):
            raise ValueError(
                f"lower: positions: expected one capacity for each of the {len(self.levels)} "
                f"levels of {access}, got {positions}"
            )
        self.modes = [access.indices[mode] for mode in format.modes]
        self.extents = [sizes[var.name] for var in self.modes]
        outer, inner = list(self.modes), []
        for level, size in enumerate(format.block_shape):
            split = self._split(outer[level], size, relations)
            if self.extents[level] % size:
                self.ragged.append(split.outer)
            self.extents[level] = -(-self.extents[level] // size)
            self.extents.append(size)
            outer[level] = split.outer
            inner.append(split.inner)
        self.variables = (*outer, *inner)
        repeats = [
            isinstance(level, Compressed) and not level.unique or number in repeated
            for number, level in enumerate(self.levels)
        ]
        self.repeats = [any(repeats[: level + 1]) for level in range(len(repeats))]

    def _split(self, var: IndexVar, size: int, relations: tuple[Relation, ...]) -> Split:
        for relation in relations:
            match relation:
                case Split(parent=parent, size=same) if parent == var and same == size:
                    return relation
        self.splits.append(Split(var, IndexVar(f"{var}_block"), IndexVar(f"{var}_within"), size))
        return self.splits[-1]

    @property
    def access(self) -> Access:
        assert self._access is not None
        return self._access

    def offsets(self, level: int) -> str:
        return f"{self.access.tensor}{level + 1}_pos"

    def coordinates(self, level: int) -> str:
        return f"{self.access.tensor}{level + 1}_crd"

    @property
    def values(self) -> str:
        return f"{self.access.tensor}_vals"

    def level_of(self, index: IndexVar) -> int:
        return self.variables.index(index)

    def is_dense(self, level: int) -> bool:
        return isinstance(self.levels[level], Dense)

    def is_compressed(self, level: int) -> bool:
        return isinstance(self.levels[level], Compressed)

    @property
    def sparse_modes(self) -> set[IndexVar]:
        """The indices of which not every coordinate is stored."""
        return {var for level, var in enumerate(self.modes) if not self.is_dense(level)}

    def descend(self, parent: Expr, first: int, last: int) -> Expr:
        """The first position at level `last` below position `parent` of level `first` - 1."""
        for level in range(first, last + 1):
            if self.is_dense(level):
                parent = multiply(parent, Int(self.extents[level]))
            elif self.is_compressed(level) and parent != ZERO:
                parent = Load(self.offsets(level), parent)
        return parent

    def arrays(self, dtype: str) -> list[Array]:
        """Of the levels, then that of the values unless only the pattern is asked for."""
        arrays, parents = [], 1
        for number, level in enumerate(self.levels):
            if isinstance(level, Compressed):
                arrays.append(Array(self.offsets(number), "int32", parents + 1))
            if isinstance(level, Compressed | Singleton):
                arrays.append(Array(self.coordinates(number), "int32", self.positions[number]))
            parents = self.positions[number]
        if not self.access.pattern:
            arrays.append(Array(self.values, dtype, parents, holds_values=True))
        return arrays
