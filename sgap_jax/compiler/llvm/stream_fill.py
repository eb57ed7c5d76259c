"""Loops that clear a large array, in LLVM IR: with stores that bypass the caches.

A store to a cache line that is in no cache reads it first. Whole vectors of an array that no cache
holds are stored without (nontemporal): 220 MB take 0.6x of the time (Zen 5, 2 threads). Not in
pages that the process has not touched yet: the system clears them at the first store, and what it
wrote is still in a cache (1.1x). So the kernel asks first whether its pages are present.
"""

from __future__ import annotations

import dataclasses
import sys

from sgap_jax.compiler.llvm import memory
from sgap_jax.compiler.llvm.builder import Builder
from sgap_jax.compiler.llvm.instructions import INDEX, NONTEMPORAL, ROLLED, Value, constant
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.llvm.vectorize import last_lanes
from sgap_jax.compiler.loop_ir.loopir import Float, For, Store, Var

_STREAMED_BYTES = 64 << 20

_PAGE = 64 << 10  # no system has larger ones

_PRESENT = "%there"  # whether the kernel's pages are present, as far as one of them tells


def stream_fill(builder: Builder, loop: For) -> bool:
    """Takes a CPUVector loop that stores a constant in neighbouring elements of a large array, and
    that `loop.stream` says is not used soon. Where the pages are not present, it runs as any
    CPUVector loop."""
    array = _cleared(builder, loop) if builder.vectorizable(loop) else None
    if array is None:
        return False
    builder.streamed = array
    stream, plain, done = (builder.fresh(name) for name in ("stream", "plain", "filled"))
    builder.branch_if(_PRESENT, stream, plain)
    builder.start_block(stream)
    _stream(builder, loop, array)
    builder.branch(done)
    builder.start_block(plain)
    builder.loop(dataclasses.replace(loop, stream=False))
    builder.branch(done)
    builder.start_block(done)
    return True


def _cleared(builder: Builder, loop: For) -> Elements | None:
    if not loop.stream or loop.step != 1 or not sys.platform.startswith("linux"):
        return None
    match loop.body:
        case (Store(name, place, Float(), None, False),) if place == Var(loop.var):
            array = builder.arrays[name]
            if array.count * array.bytes > _STREAMED_BYTES:
                return array
    return None


def _stream(builder: Builder, loop: For, array: Elements) -> None:
    """Plain stores up to a boundary of vectors, whole vectors from there on, and plain stores of
    what is left."""
    begin, end = builder.bounds(loop)
    lanes, bytes = builder.native_lanes, builder.native_lanes * array.bytes
    address = builder.op(f"ptrtoint ptr {memory.address(builder, array, begin)} to i64")
    before = builder.op(f"and i64 {builder.op(f'sub i64 0, {address}')}, {bytes - 1}")
    skipped = Value(INDEX, builder.as_index(builder.op(f"udiv i64 {before}, {array.bytes}")))
    first = builder.binary("min", builder.binary("+", begin, skipped), end)
    full = builder.binary("-", end, constant(lanes - 1))
    rest = builder.cell(INDEX, first)
    (store,) = loop.body
    assert isinstance(store, Store)
    with builder.in_lanes(lanes):
        last_lanes(builder, loop, begin, first, always=False)
        value = builder.spread(builder.value(store.value))
        text = memory.narrow(builder, value, array, lanes)

    def whole() -> None:
        now = builder.value(Var(loop.var))
        place = memory.address(builder, array, now)
        vector = f"<{lanes} x {array.memory}>"
        builder.emit(f"store {vector} {text}, ptr {place}, align {bytes}{NONTEMPORAL}")
        builder.write(rest, builder.binary("+", now, constant(lanes)))

    builder.count(loop.var, first, full, lanes, whole, ROLLED)
    with builder.in_lanes(lanes):
        last_lanes(builder, loop, builder.read(rest), end, always=False)


def page_check(builder: Builder, array: Elements, iterations: int) -> list[str]:
    """For the start of a kernel that runs [first, last) of so many iterations: whether the page in
    the middle of what it clears is present."""
    bytes = array.count * array.bytes
    builder.declared.add("declare i32 @mincore(ptr, i64, ptr)")
    return [
        "  %there.byte = alloca i8",
        "  store i8 1, ptr %there.byte",
        "  %there.sum = add i64 %first, %last",
        f"  %there.part = mul i64 %there.sum, {bytes // (2 * iterations)}",
        f"  %there.place = getelementptr i8, ptr {array.pointer}, i64 %there.part",
        f"  %there.page = call ptr @llvm.ptrmask.p0.i64(ptr %there.place, i64 {-_PAGE})",
        "  %there.done = call i32 @mincore(ptr %there.page, i64 1, ptr %there.byte)",
        "  %there.found = load i8, ptr %there.byte",
        f"  {_PRESENT} = trunc i8 %there.found to i1",
    ]
