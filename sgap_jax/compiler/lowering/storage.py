"""The levels of a sparse tensor, as the lowering sees them: arrays, positions, coordinates."""

from __future__ import annotations

from collections.abc import Sequence

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, multiply
from sgap_jax.compiler.loop_ir.loopir import Array, Expr, Int, Load
from sgap_jax.compiler.notation.cin import Relation, Split
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton


def capacities(format: Format, sizes: Sequence[int], counts: Sequence[int]) -> tuple[int, ...]:
    """Positions that each level has room for: `sizes` of the modes in stored order, `counts` the
    lengths of the coordinate arrays."""
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
    """Of the numbers of an operand, or of the output."""
    return f"{access.tensor}_vals" if access == expression.sparse else access.tensor


class Storage:
    """A sparse access, level by level (numbered from 0; array names count from 1, as in TACO).

    An index with a trailing block is two: of the blocks and within the block, as if it were split
    by the block's size. Where the schedule splits it so, these are the schedule's variables.
    """

    def __init__(
        self,
        access: Access,
        sizes: dict[str, int],
        positions: tuple[int, ...],
        relations: tuple[Relation, ...],
        repeated: tuple[int, ...] = (),
    ):
        assert access.format is not None
        format = access.format
        self.name = access.tensor
        self.access = access
        self.levels = format.levels
        self.positions = positions
        if len(positions) != len(self.levels):
            raise ValueError(
                f"lower: positions: expected one capacity for each of the {len(self.levels)} "
                f"levels of {access}, got {positions}"
            )
        self.splits: list[Split] = []
        self.ragged: list[IndexVar] = []  # whose last block is partly outside: nothing of it counts
        self.modes = [access.indices[mode] for mode in format.modes]  # in stored order
        outer = list(self.modes)
        self.extents = [sizes[var.name] for var in outer]
        inner = []
        for level, size in enumerate(format.block_shape):
            split = self._split(outer[level], size, relations)
            if self.extents[level] % size:
                self.ragged.append(split.outer)
            self.extents[level] = -(-self.extents[level] // size)
            self.extents.append(size)
            outer[level] = split.outer
            inner.append(split.inner)
        self.variables = (*outer, *inner)
        # Coordinates of a level may come more than once under one parent.
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
        names = (IndexVar(f"{var}_block"), IndexVar(f"{var}_within"))
        self.splits.append(Split(var, *names, size))
        return self.splits[-1]

    def offsets(self, level: int) -> str:
        return f"{self.name}{level + 1}_pos"

    def coordinates(self, level: int) -> str:
        return f"{self.name}{level + 1}_crd"

    @property
    def values(self) -> str:
        return f"{self.name}_vals"

    def is_dense(self, level: int) -> bool:
        return isinstance(self.levels[level], Dense)

    def is_compressed(self, level: int) -> bool:
        return isinstance(self.levels[level], Compressed)

    def descend(self, parent: Expr, first: int, last: int) -> Expr:
        """The first position at level `last` below position `parent` of level `first` - 1."""
        for level in range(first, last + 1):
            if isinstance(self.levels[level], Dense):
                parent = multiply(parent, Int(self.extents[level]))
            elif isinstance(self.levels[level], Compressed) and parent != ZERO:
                parent = Load(self.offsets(level), parent)
        return parent

    def arrays(self, dtype: str) -> list[Array]:
        arrays, parents = [], 1
        for number, level in enumerate(self.levels):
            if isinstance(level, Compressed):
                arrays.append(Array(self.offsets(number), "int32", parents + 1))
            if isinstance(level, Compressed | Singleton):
                arrays.append(Array(self.coordinates(number), "int32", self.positions[number]))
            parents = self.positions[number]
        return (
            arrays
            if self.access.pattern
            else [*arrays, Array(self.values, dtype, parents, numbers=True)]
        )
