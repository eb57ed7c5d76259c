"""Lowering of a nest that is bound to octet_mma, where a warp of a GPU runs it.

The tile of the output that the nest adds to stays in registers of the warp across the loops around
the nest that do not move it. Elsewhere a bound nest is lowered as the loops that it is.
"""

from __future__ import annotations

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, add, greatest, least, multiply, subtract
from sgap_jax.compiler.loop_ir.loopir import (
    GPU_BLOCK,
    Expr,
    Int,
    Matrix,
    Mma,
    MmaStore,
    Side,
    Workspace,
)
from sgap_jax.compiler.lowering.derived_variables import Recovery, fits
from sgap_jax.compiler.lowering.ranges import Scope
from sgap_jax.compiler.lowering.reductions import Plan
from sgap_jax.compiler.notation.cin import Forall, Split, SuchThat
from sgap_jax.compiler.notation.expr import Assign, IndexVar
from sgap_jax.compiler.notation.nest import chain, intrinsics

_DTYPES = ("float16", "bfloat16")


def warp_nest(statement: SuchThat) -> tuple[IndexVar, ...]:
    """The loops of a bound nest that a warp runs, from the outermost on; () where there is none:
    only in a loop of blocks there are warps."""
    body = statement.body
    if isinstance(body, Forall) and body.unit == GPU_BLOCK:
        for bound in intrinsics(body):
            assert isinstance(bound.body, Forall)
            return tuple(loop.var for loop in chain(bound.body)[0])
    return ()


class OctetNest:
    """C(i,k) += A(i,j) * B(j,k), or D(i,k) += A(i,k) * B(i,j) * C(j,k), as statements of a warp:
    the nest's loops are over rows of a block row, columns of the tile, steps of the sum.

    Raises:
      NotImplementedError: a dtype that tensor cores do not multiply, or vectors beyond the matrix.
    """

    def __init__(
        self,
        expression: Assign,
        loops: tuple[IndexVar, ...],
        recovery: Recovery,
        plan: Plan,
        dtype: str,
    ):
        if dtype not in _DTYPES:
            raise NotImplementedError(
                f"octet_mma: tensor cores multiply {' and '.join(_DTYPES)} with float32 sums, got "
                f"{dtype}: cast the operands, or leave bind out"
            )
        self.expression, self.recovery, self.plan = expression, recovery, plan
        self.ranges, self.relations = recovery.ranges, recovery.relations
        storage = self.ranges.storage
        if storage is not None and storage.ragged:
            row = storage.modes[0]
            raise NotImplementedError(
                f"octet_mma: a warp takes whole vectors, and the last ones of {storage.access} in "
                f"{storage.access.format} go beyond {row} = {self.ranges.sizes[row.name]}: pad the "
                "matrix with rows, or leave bind out"
            )
        self.first = loops[0]
        self.splits: list[Split] = []
        for loop in loops:
            made = self.relations.source(loop)
            assert isinstance(made, Split)
            self.splits.append(made)
        rows, columns, depth = (split.size for split in self.splits)
        self.shape = rows, columns, depth
        self.names = tuple(recovery.fresh(loop.name) for loop in loops)
        self.tile = recovery.fresh("tile")
        self.columns: tuple[Expr, Expr]  # the first column of the tile, and how many there are

    def declare(self, scope: Scope) -> None:
        """The tile, with nothing in it."""
        self.columns = self._part(self.splits[1], scope)
        scope.emit(Workspace(self.tile, self.shape[0] * self.shape[1]))

    def multiply(self, scope: Scope) -> None:
        """A step: what the nest adds to the tile."""
        columns, (step, depth) = self.columns, self._part(self.splits[2], scope)
        sparse, *dense = self.expression.factors
        storage = self.ranges.storage
        assert storage is not None
        gather, sizes = storage.coordinates(1), self.ranges.sizes
        if len(dense) == 1:
            left = Matrix(storage.values, Side(ZERO, 1), Side(step, self.shape[0]))
            stride = sizes[dense[0].indices[1].name]
            right = Matrix(dense[0].tensor, Side(step, stride, gather), Side(columns[0], 1))
        else:
            x, y = dense
            left = Matrix(x.tensor, Side(self._row(scope), sizes[x.indices[1].name]), Side(step, 1))
            strides = sizes[y.indices[1].name], 1
            if y.indices[0] == sparse.indices[1]:
                strides = 1, strides[0]
            right = Matrix(y.tensor, Side(step, strides[0]), Side(columns[0], strides[1], gather))
        r, c, s = self.names
        scope.emit(Mma(self.tile, left, right, self.shape, columns[1], depth, (r, c, s)))

    def store(self, scope: Scope) -> None:
        """The tile to its place in the output."""
        storage, output, scale = self.ranges.storage, self.expression.output, None
        assert storage is not None
        first, count = self.columns
        if output.format is None:
            stride = self.ranges.sizes[output.indices[1].name]
            target = Matrix(output.tensor, Side(self._row(scope), stride), Side(first, 1))
        else:
            target = Matrix(output.tensor, Side(ZERO, 1), Side(first, self.shape[0]))
            scale = None if storage.access.pattern else storage.values
        r, c, _ = self.names
        scope.emit(
            MmaStore(
                self.tile,
                target,
                self.shape[:2],
                count,
                (r, c),
                self.plan.op,
                self.plan.atomic,
                scale,
            )
        )

    def _row(self, scope: Scope) -> Expr:
        return multiply(self.ranges.value(self.splits[0].outer, scope), Int(self.shape[0]))

    def _part(self, split: Split, scope: Scope) -> tuple[Expr, Expr]:
        """Where the part of a tile that is in range begins, and how much that is."""
        extent = self.ranges.of(split.parent, scope)
        base = multiply(self.ranges.value(split.outer, scope), Int(split.size))
        start = base if extent.low == ZERO else greatest(extent.low, base)
        first = self.recovery.named(f"{split.parent}_first", start, scope)
        if fits(extent, split.size):
            return first, Int(split.size)
        end = least(extent.high, add(base, Int(split.size)))
        return first, self.recovery.named(f"{split.parent}_count", subtract(end, first), scope)
