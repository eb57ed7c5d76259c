"""How `for` loops of the loop IR are written in LLVM IR: the strategies, in order.

Each is a function (builder, loop) -> bool, which writes the loop and returns True, or writes
nothing and returns False. A builder has each loop, also one in the body of another, written by the
first strategy that takes it. They do not rely on each other: with any of them but `scalar` left
out, loops are slower and compute the same.
"""

from __future__ import annotations

from sgap_jax.compiler.llvm.accumulators import accumulators_in_lanes
from sgap_jax.compiler.llvm.builder import Builder, Strategy
from sgap_jax.compiler.llvm.flatten_fibers import flatten_fibers
from sgap_jax.compiler.llvm.prefetch import prefetched_nest
from sgap_jax.compiler.llvm.separate_sums import separate_sums
from sgap_jax.compiler.llvm.stream_fill import stream_fill
from sgap_jax.compiler.llvm.unroll_and_jam import unroll_and_jam
from sgap_jax.compiler.llvm.vectorize import vectorize
from sgap_jax.compiler.loop_ir.loopir import For


def scalar(builder: Builder, loop: For) -> bool:
    """Takes any loop: one iteration after another."""
    builder.scalar_loop(loop, *builder.bounds(loop))
    return True


STRATEGIES: tuple[Strategy, ...] = (
    # CPUVector loops that are in no other one.
    stream_fill,  # clear a large array: stores that bypass the caches
    separate_sums,  # each lane stores a sum over lanes: the sums are added up together
    vectorize,  # all others, unless they need lanes one by one
    # Serial loops outside of lanes.
    unroll_and_jam,  # each iteration stores a sum over lanes: four iterations at a time
    flatten_fibers,  # a nest over short fibers: one loop over their positions
    # Loops in lanes, where they begin and end alike in all of them.
    prefetched_nest,  # a loop over fibers: prefetches rows if these are long
    accumulators_in_lanes,  # sums of each lane: several accumulators
    # The rest.
    scalar,
)
