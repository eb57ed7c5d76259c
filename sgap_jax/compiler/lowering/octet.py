"""A nest that is bound to octet_mma (vectorSparse: Chen et al., SC 2021), in a loop of blocks of a
GPU: statements of a warp.

    C(i,k) += A(i,j) * B(j,k)            a tile of C; each step adds vectors of A times rows of B
    D(i,k) += A(i,k) * B(i,j) * C(j,k)   a tile of D; each step adds a part of the sums over j

The loops of the nest are over rows of a block row, columns of the tile, and steps of the sum. The
tile stays in registers of the warp across the loops around the nest that do not change its place.
Elsewhere, on a CPU, a bound nest is lowered as the loops that it is.
"""

from __future__ import annotations

import dataclasses

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
from sgap_jax.compiler.lowering.context import Context, OctetLoops
from sgap_jax.compiler.lowering.ranges import range_of, value_of
from sgap_jax.compiler.notation.cin import Forall, Split, SuchThat
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.nest import chain, intrinsics

_DTYPES = ("float16", "bfloat16")


def warp_loops(statement: SuchThat) -> tuple[IndexVar, ...]:
    """The loops of a bound nest that a warp runs, from the outermost on; () where there is none:
    only in a loop of blocks there are warps."""
    body = statement.body
    if isinstance(body, Forall) and body.unit == GPU_BLOCK:
        for bound in intrinsics(body):
            assert isinstance(bound.body, Forall)
            return tuple(loop.var for loop in chain(bound.body)[0])
    return ()


def name_tile(ctx: Context, dtype: str) -> None:
    """Names for the tile and for the loops that octet_mma runs.

    Raises NotImplementedError for a dtype that tensor cores do not multiply, and where vectors go
    beyond the matrix.
    """
    if dtype not in _DTYPES:
        raise NotImplementedError(
            f"octet_mma: tensor cores multiply {' and '.join(_DTYPES)} with float32 sums, got "
            f"{dtype}: cast the operands, or leave bind out"
        )
    storage = ctx.storage
    if storage.ragged:
        row = storage.modes[0]
        raise NotImplementedError(
            f"octet_mma: a warp takes whole vectors, and the last ones of {storage.access} in "
            f"{storage.access.format} go beyond {row} = {ctx.sizes[row.name]}: pad the "
            "matrix with rows, or leave bind out"
        )
    loops = tuple(ctx.fresh(loop.name) for loop in ctx.plan.warp)
    ctx.scope.tile = OctetLoops(ctx.fresh("tile"), loops)


def declare_tile(ctx: Context) -> None:
    """The tile, with nothing in it."""
    tile, (rows, columns, _) = _tile(ctx), _splits(ctx)
    first, count = _part(ctx, columns)
    ctx.scope.tile = dataclasses.replace(tile, first=first, count=count)
    ctx.emit(Workspace(tile.name, rows.size * columns.size))


def multiply_tile(ctx: Context) -> None:
    """A step: what the nest adds to the tile."""
    tile, (rows, columns, depth) = _tile(ctx), _splits(ctx)
    step, count = _part(ctx, depth)
    sparse, *dense = ctx.expression.factors
    storage, sizes = ctx.storage, ctx.sizes
    gather = storage.coordinates(1)
    if len(dense) == 1:
        left = Matrix(storage.values, Side(ZERO, 1), Side(step, rows.size))
        stride = sizes[dense[0].indices[1].name]
        right = Matrix(dense[0].tensor, Side(step, stride, gather), Side(tile.first, 1))
    else:
        x, y = dense
        left = Matrix(x.tensor, Side(_first_row(ctx), sizes[x.indices[1].name]), Side(step, 1))
        strides = sizes[y.indices[1].name], 1
        if y.indices[0] == sparse.indices[1]:
            strides = 1, strides[0]
        right = Matrix(y.tensor, Side(step, strides[0]), Side(tile.first, strides[1], gather))
    r, c, s = tile.loops
    shape = rows.size, columns.size, depth.size
    ctx.emit(Mma(tile.name, left, right, shape, tile.count, count, (r, c, s)))


def store_tile(ctx: Context) -> None:
    """The tile to its place in the output."""
    tile, (rows, columns, _) = _tile(ctx), _splits(ctx)
    storage, output, plan, scale = ctx.storage, ctx.expression.output, ctx.plan, None
    if output.format is None:
        stride = ctx.sizes[output.indices[1].name]
        target = Matrix(output.tensor, Side(_first_row(ctx), stride), Side(tile.first, 1))
    else:
        target = Matrix(output.tensor, Side(ZERO, 1), Side(tile.first, rows.size))
        scale = None if storage.access.pattern else storage.values
    r, c, _ = tile.loops
    shape = rows.size, columns.size
    ctx.emit(
        MmaStore(tile.name, target, shape, tile.count, (r, c), plan.op, plan.atomic, scale),
    )


def _tile(ctx: Context) -> OctetLoops:
    assert ctx.scope.tile is not None
    return ctx.scope.tile


def _splits(ctx: Context) -> list[Split]:
    """What makes the loops of the nest: of rows, columns and steps of the sum."""
    made = [ctx.relations.source(loop) for loop in ctx.plan.warp]
    return [split for split in made if isinstance(split, Split)]


def _first_row(ctx: Context) -> Expr:
    rows, _, _ = _splits(ctx)
    return multiply(value_of(ctx, rows.outer), Int(rows.size))


def _part(ctx: Context, split: Split) -> tuple[Expr, Expr]:
    """Where the part of a tile that is in range begins, and how much that is."""
    extent = range_of(ctx, split.parent)
    base = multiply(value_of(ctx, split.outer), Int(split.size))
    start = base if extent.low == ZERO else greatest(extent.low, base)
    first = ctx.let(f"{split.parent}_first", start)
    if extent.fits(split.size):
        return first, Int(split.size)
    end = least(extent.high, add(base, Int(split.size)))
    return first, ctx.let(f"{split.parent}_count", subtract(end, first))
