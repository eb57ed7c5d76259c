"""Loops that clear a large array, in LLVM IR: past the caches, where its pages are there.

A store to a line that is in no cache reads it first. Of an array that no cache holds, whole vectors
are stored without: 220 MB take 0.6x the time (Zen 5, 2 threads). Not in fresh pages: the system has
just cleared them, and what it wrote is still in a cache (1.1x).
"""

from __future__ import annotations

import sys

from sgap_jax.compiler.llvm.instructions import INT, Value
from sgap_jax.compiler.llvm.memory import Elements
from sgap_jax.compiler.llvm.separate_sums import SumsApart
from sgap_jax.compiler.llvm.statements import ROLLED
from sgap_jax.compiler.loop_ir.loopir import Float, For, Store, Var

_STREAMED_BYTES = 64 << 20

_PAGE = 64 << 10  # no system has larger ones

_THERE = "%there"  # whether the pages are, as far as one of them tells


class Fills(SumsApart):
    streamed: Elements | None = None  # what a kernel clears so

    def vector_loop(self, loop: For) -> None:
        array = self._streamed(loop)
        if array is None:
            return super().vector_loop(loop)
        self.streamed = array
        stream, plain, done = (self.fresh(name) for name in ("stream", "plain", "filled"))
        self.branch_if(_THERE, stream, plain)
        self.place(stream)
        self._stream(loop, array)
        self.branch(done)
        self.place(plain)
        super().vector_loop(loop)
        self.branch(done)
        self.place(done)

    def _streamed(self, loop: For) -> Elements | None:
        """The array that a loop clears, if it is of this kind."""
        if not loop.stream or not sys.platform.startswith("linux"):
            return None
        match loop.body:
            case (Store(name, Var(place), Float(), None, False),) if place == loop.var:
                array = self.arrays[name]
                if array.count * array.size > _STREAMED_BYTES:
                    return array
        return None

    def _stream(self, loop: For, array: Elements) -> None:
        """Up to a boundary of vectors, whole ones from there on, and what is left."""
        begin, end = self.value(loop.begin), self.value(loop.end)
        lanes, bytes = self.native_lanes, self.native_lanes * array.size
        address = self.op(f"ptrtoint ptr {self._at(array, begin)} to i64")
        before = self.op(f"and i64 {self.op(f'sub i64 0, {address}')}, {bytes - 1}")
        skipped = Value(INT, self.as_index(self.op(f"udiv i64 {before}, {array.size}")))
        first = self.binary("min", self.binary("+", begin, skipped), end)
        full = self.binary("-", end, Value(INT, str(lanes - 1)))
        rest = self.cell(INT, first)
        (store,) = loop.body
        assert isinstance(store, Store)
        self.width = lanes
        self._last(loop, begin, first, always=False)
        text = self._narrow(self.spread(self.value(store.value)), array, lanes)

        def whole() -> None:
            now = self.value(Var(loop.var))
            self.emit(
                f"store <{lanes} x {array.memory}> {text}, ptr {self._at(array, now)}, "
                f"align {bytes}, !nontemporal !4"
            )
            self.write(rest, self.binary("+", now, Value(INT, str(lanes))))

        self.width = 1
        self.count(loop.var, first, full, lanes, whole, ROLLED)
        self.width = lanes
        self._last(loop, self.read(rest), end, always=False)
        self.width = 1

    def asked(self, array: Elements, iterations: int) -> list[str]:
        """For the start of a kernel that runs [first, last) of so many iterations: whether the page
        in the middle of what it clears is there."""
        bytes = array.count * array.size
        self.declared.add("declare i32 @mincore(ptr, i64, ptr)")
        return [
            "  %there.byte = alloca i8",
            "  store i8 1, ptr %there.byte",
            "  %there.sum = add i64 %first, %last",
            f"  %there.part = mul i64 %there.sum, {bytes // (2 * iterations)}",
            f"  %there.place = getelementptr i8, ptr {array.pointer}, i64 %there.part",
            f"  %there.page = call ptr @llvm.ptrmask.p0.i64(ptr %there.place, i64 {-_PAGE})",
            "  %there.done = call i32 @mincore(ptr %there.page, i64 1, ptr %there.byte)",
            "  %there.found = load i8, ptr %there.byte",
            f"  {_THERE} = trunc i8 %there.found to i1",
        ]
