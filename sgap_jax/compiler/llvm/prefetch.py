"""Prefetches of what a loop gathers, in LLVM IR.

A CPU does not foresee which rows of a table a loop reads at stored coordinates. Where the table is
beyond a cache, the loop reads the coordinate of a later iteration too and prefetches the row there.
"""

from __future__ import annotations

from sgap_jax.compiler.llvm import memory
from sgap_jax.compiler.llvm.builder import Builder
from sgap_jax.compiler.llvm.instructions import INDEX
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.loop_ir.loopir import Binary, For, Int, Load
from sgap_jax.compiler.loop_ir.patterns import gathers, replaced

# Larger arrays are beyond a cache, and a loop over entries prefetches for this many entries later:
# both as in cpu/spmm/spmm_kernel.cc, where they were measured.
_FAR_BYTES = 1 << 20
ENTRIES_LATER = 32

# In a nest over fibers, rows of fewer vectors are not prefetched. Measured on short fibers and
# tables of 1 to 64 MB: prefetches cost 5% with rows of one or two vectors and gain 5% with four.
_VECTORS_OF_LONG_ROWS = 4

# The loop over fibers prefetches for this many fibers later. On fibers of two entries in the mean:
# 0.95x of the time with tables of 3 MB, 0.93x of 16 and 64 MB, 0.7x where rows have eight vectors
# (Zen 5, one thread).
_FIBERS_LATER = 8


def is_far(array: Elements) -> bool:
    """Whether an array, or each part of it, is beyond a cache."""
    return array.count // array.parts * array.bytes > _FAR_BYTES


def prefetch_gathers(builder: Builder, loop: For, later: int) -> None:
    """Prefetches what the body gathers `later` iterations from now; what loops in the body gather
    is left to them."""
    for load, inner in gathers(loop).items():
        array, places = builder.arrays[load.array], builder.arrays[inner.array]
        if not is_far(array) or places.kind != INDEX:
            continue
        place = Binary("+", inner.index, Int(later))
        there = Load(inner.array, Binary("min", place, Int(places.count - 1)))
        index = builder.value(replaced(load.index, inner, there))
        if index.stride == 1:
            memory.prefetch(builder, array, index)


def prefetched_nest(builder: Builder, loop: For) -> bool:
    """Takes a loop around another loop, in lanes: one over fibers. It is written as a scalar loop,
    which prefetches if rows are long; otherwise neither it nor the loops in it prefetch."""
    if builder.width == 1 or not any(isinstance(s, For) for s in loop.body):
        return False
    begin, end = builder.bounds(loop)
    before = builder.prefetches
    builder.prefetches = builder.width >= _VECTORS_OF_LONG_ROWS * builder.native_lanes

    def body() -> None:
        if builder.prefetches:
            prefetch_gathers(builder, loop, _FIBERS_LATER)
        builder.statements(loop.body)

    try:
        builder.scalar_loop(loop, begin, end, body)
    finally:
        builder.prefetches = before
    return True
