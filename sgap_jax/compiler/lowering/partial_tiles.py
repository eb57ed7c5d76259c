"""Tiles that may be cut off by the end of a range, with vectors inside.

A guard in each lane would keep a loop from being one of vectors. So where the tile is known, and
before its vectors, one branch takes the whole tiles, with loops of constant extent, and another the
rest, whose loops end earlier; with split(k, k0, k1, 16):

    if (k0 * 16 + 16 <= n) for (k1 < 16) ...
    else                   for (k1 < min(n - k0 * 16, 16)) ...
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.loop_ir.arithmetic import (
    ZERO,
    add,
    both,
    greatest,
    least,
    multiply,
    subtract,
)
from sgap_jax.compiler.loop_ir.loopir import CPU_VECTOR, Binary, Expr, Int
from sgap_jax.compiler.lowering.context import Context, Range
from sgap_jax.compiler.lowering.ranges import range_of, try_value, value_of
from sgap_jax.compiler.notation.cin import Body, Forall, Pos, Precompute, Split, Where
from sgap_jax.compiler.notation.expr import IndexVar
from sgap_jax.compiler.notation.nest import loops


def opened_tile(ctx: Context, loop: Forall) -> tuple[IndexVar, Expr] | None:
    """In a loop: the variable of which a tile is known from here on, and whether that is whole.
    None where no tile may be cut off, or none would be guarded inside of vectors."""
    if ctx.scope.masked:
        return None
    for relation in ctx.relations.all:
        match relation:
            case Split(parent, outer, inner, size) if _opens(ctx, loop, outer, inner):
                positions = isinstance(ctx.relations.source(parent), Pos)
                if parent in ctx.scope.unguarded or (positions and parent not in ctx.scope.ranges):
                    continue
                extent = range_of(ctx, parent)
                base = multiply(value_of(ctx, outer), Int(size))
                whole: Expr | None = None
                if extent.low != ZERO:
                    whole = Binary("<=", extent.low, base)
                if not extent.fits(size):
                    whole = both(whole, Binary("<=", add(base, Int(size)), extent.high))
                if whole is not None:
                    return parent, whole
    return None


def trim(ctx: Context, body: Body, parent: IndexVar) -> bool:
    """Makes the loops over the inside of a cut tile of `parent` end where it ends, in this scope.
    False where the extent of such a loop must be a constant, or is tiled once more."""
    relations = ctx.relations
    split = next(r for r in relations.all if isinstance(r, Split) and r.parent == parent)
    inside = [loop for loop in loops(body) if relations.loops_of(split.inner, {loop.var})]
    if any(loop.unroll or not _is_all_of(ctx, loop.var, split.inner) for loop in inside):
        return False
    extent = range_of(ctx, parent)
    base = multiply(value_of(ctx, split.outer), Int(split.size))
    low = ZERO if extent.low == ZERO else greatest(subtract(extent.low, base), ZERO)
    high = least(subtract(extent.high, base), Int(split.size))
    ctx.scope.ranges[split.inner] = Range(low, high)
    ctx.scope.unguarded |= {parent}
    return True


def _is_all_of(ctx: Context, loop: IndexVar, var: IndexVar) -> bool:
    """Whether a loop goes over all of a variable."""
    while loop != var:
        match ctx.relations.source(loop):
            case Precompute(parent):
                loop = parent
            case _:
                return False
    return True


def _opens(ctx: Context, loop: Forall, outer: IndexVar, inner: IndexVar) -> bool:
    """Whether the tile is known from here on, and its guard would be within a vector loop."""
    if inner in ctx.scope.known or try_value(ctx, outer) is None:
        return False
    loops_of = ctx.relations.loops_of
    return bool(loops_of(outer, {loop.var}) and loops_of(inner, _in_vectors(ctx, loop.body)))


def _in_vectors(ctx: Context, body: Body, within: bool = False) -> set[IndexVar]:
    """The variables of CPUVector loops, and of the loops inside of these; without those that go
    segment by segment, which end where the segment does."""
    match body:
        case Forall(var, inside, unit):
            within = within or unit == CPU_VECTOR and not ctx.nest.segment_steps(body)
            return _in_vectors(ctx, inside, within) | ({var} if within else set())
        case Where():
            parts = (body.consumer, body.producer)
            return {var for part in parts for var in _in_vectors(ctx, part, within)}
    return set()


def without_vectors(body: Body) -> Body:
    match body:
        case Forall():
            unit = None if body.unit == CPU_VECTOR else body.unit
            return dataclasses.replace(body, unit=unit, body=without_vectors(body.body))
        case Where():
            return Where(without_vectors(body.consumer), without_vectors(body.producer))
    return body
