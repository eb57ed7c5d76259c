"""Elements of arrays in LLVM IR: conversions, vectors of neighbours, gathers, atomics."""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.llvm.instructions import INT, MEMORY, NUMBER, TRUTH, Code, Value

_SIZES = {"i32": 4, "float": 4, "double": 8, "i64": 8, "i16": 2, "i8": 1}
_SHORT = {"float": "f32", "double": "f64", "half": "f16"}


@dataclasses.dataclass(frozen=True)
class Elements:
    """An array: its pointer, its dtype and how many elements there are, in `parts` of one size;
    whether they are coordinates or positions."""

    pointer: str
    dtype: str
    count: int
    is_index: bool = False
    parts: int = 1

    @property
    def memory(self) -> str:
        return MEMORY[self.dtype]

    @property
    def size(self) -> int:
        return _SIZES[self.memory]

    @property
    def kind(self) -> str:
        return INT if self.is_index else NUMBER


class Memory(Code):
    def load(self, array: Elements, index: Value) -> Value:
        memory, lanes = array.memory, self.width
        if index.uniform:
            raw, lanes = self.op(f"load {memory}, ptr {self._at(array, index)}"), 1
        elif index.stride == 1:
            vector, place = f"<{lanes} x {memory}>", self._at(array, index)
            if self.mask is None:
                raw = self.op(f"load {vector}, ptr {place}, align {array.size}")
            else:
                name = f"llvm.masked.load.v{lanes}{_SHORT.get(memory, memory)}.p0"
                raw = self._masked(vector, name, (("ptr", place),), array.size, vector)
        elif self.mask is None:
            raw = self._gathered(array, index)
        else:
            vector, name = f"<{lanes} x {memory}>", _SHORT.get(memory, memory)
            name = f"llvm.masked.gather.v{lanes}{name}.v{lanes}p0"
            raw = self._masked(vector, name, (self._places(array, index),), array.size, vector)
        return Value(array.kind, self._widen(raw, array, lanes), lanes)

    def _gathered(self, array: Elements, index: Value) -> str:
        """One load for each lane, which is faster than the gather instruction (cpu/simd/simd.h)."""
        vector, raw = f"<{self.width} x {array.memory}>", "poison"
        for lane, place in enumerate(self._each(index)):
            at = self.op(f"getelementptr inbounds {array.memory}, ptr {array.pointer}, {place}")
            one = self.op(f"load {array.memory}, ptr {at}")
            raw = self.op(f"insertelement {vector} {raw}, {array.memory} {one}, i64 {lane}")
        return raw

    def _each(self, index: Value) -> list[str]:
        """The lanes of a place, none negative, with their types. Where LLVM finds that it was
        loaded, it takes them from memory two by two: beside the loads of a gather, those of its
        places count (0.87 of the time of a long sum on Zen 5)."""
        lanes, type = range(self.width), self.type(INT, self.width)
        if index.lanes == 1:
            steps = (f"add nsw {self.index} {index.text}, {lane * index.stride}" for lane in lanes)
            return [f"{self.index} {self.op(step)}" for step in steps]
        if self.index == "i64":
            parts = (f"extractelement {type} {index.text}, i64 {lane}" for lane in lanes)
            return [f"i64 {self.op(part)}" for part in parts]
        pairs = f"<{self.width // 2} x i64>"
        both, found = self.op(f"bitcast {type} {index.text} to {pairs}"), []
        for pair in lanes[: self.width // 2]:
            two = self.op(f"extractelement {pairs} {both}, i64 {pair}")
            for half in (f"and i64 {two}, {(1 << 32) - 1}", f"lshr i64 {two}, 32"):
                found.append(f"i64 {self.op(half)}")
        return found

    def prefetch(self, array: Elements, index: Value) -> None:
        """Asks for the lines of neighbours, which may be out of bounds."""
        line, lanes = 64 // array.size, self.width
        for begin in range(0, lanes, line):
            place = self.op(
                f"getelementptr {array.memory}, ptr {array.pointer}, {self.index} {index.text}"
            )
            place = self.op(f"getelementptr {array.memory}, ptr {place}, i64 {begin}")
            hints = (("i32", "0"), ("i32", "3"), ("i32", "1"))  # to read, often, data
            self.call("void", "llvm.prefetch.p0", ("ptr", place), *hints)

    def store(
        self, array: Elements, index: Value, value: Value, op: str | None, atomic: bool
    ) -> None:
        if index.uniform:
            if op is not None and self.width > 1:
                value = self.fold(op, value)
            self._store_one(array, self._at(array, index), value, op, atomic)
        elif op is not None and (atomic or index.stride != 1):
            self._store_lanes(array, index, value, op, atomic)
        else:
            if op is not None:
                value = self.binary(op, self.load(array, index), value)
            self._store_vector(array, index, value)

    def _at(self, array: Elements, index: Value) -> str:
        bounds = "inbounds " if self.mask is None else ""
        return self.op(
            f"getelementptr {bounds}{array.memory}, ptr {array.pointer}, {self.index} {index.text}"
        )

    def _places(self, array: Elements, index: Value) -> tuple[str, str]:
        type = self.type(INT, self.width)
        text = self.op(
            f"getelementptr {array.memory}, ptr {array.pointer}, {type} {self.spread(index)}"
        )
        return f"<{self.width} x ptr>", text

    def _masked(
        self,
        result: str,
        name: str,
        arguments: tuple[tuple[str, str], ...],
        align: int,
        rest: str | None = None,
    ) -> str:
        mask = self.splat("i1", "true", self.width) if self.mask is None else self.mask
        last = () if rest is None else ((rest, "zeroinitializer"),)
        of = (("i32", str(align)), (self.type(TRUTH, self.width), mask))
        return self.call(result, name, *arguments, *of, *last)

    def _store_vector(self, array: Elements, index: Value, value: Value) -> None:
        lanes, memory = self.width, array.memory
        text, vector = self._narrow(self.spread(value), array, lanes), f"<{lanes} x {memory}>"
        name = _SHORT.get(memory, memory)
        if index.stride == 1 and self.mask is None:
            self.emit(f"store {vector} {text}, ptr {self._at(array, index)}, align {array.size}")
        elif index.stride == 1:
            to = ((vector, text), ("ptr", self._at(array, index)))
            self._masked("void", f"llvm.masked.store.v{lanes}{name}.p0", to, array.size)
        else:
            to = ((vector, text), self._places(array, index))
            name = f"llvm.masked.scatter.v{lanes}{name}.v{lanes}p0"
            self._masked("void", name, to, array.size)

    def _store_lanes(
        self, array: Elements, index: Value, value: Value, op: str, atomic: bool
    ) -> None:
        """Lane after lane: two may meet in one element."""
        lanes, mask = self.width, self.mask
        saved = []
        parts = ((index.kind, self.spread(index)), (value.kind, self.spread(value)))
        for kind, text in (*parts, *(((TRUTH, mask),) if mask is not None else ())):
            # A vector of truth values has a bit for each.
            type, one = self.type(kind, lanes), self.type(kind)
            if kind == TRUTH:
                text = self.op(f"zext {type} {text} to <{lanes} x i8>")
                type, one = f"<{lanes} x i8>", "i8"
            saved.append((one, self.slot(type)))
            self.emit(f"store {type} {text}, ptr {saved[-1][1]}")
        head, body, after, end = (self.fresh("lane") for _ in range(4))
        before = self.block
        self.width, self.mask = 1, None
        self.branch(head)
        self.place(head)
        lane, follow = "%" + self.fresh(), "%" + self.fresh()
        self.emit(f"{lane} = phi i64 [ 0, %{before} ], [ {follow}, %{after} ]")
        parts_of_lane = []
        for type, pointer in saved:
            place = self.op(f"getelementptr inbounds {type}, ptr {pointer}, i64 {lane}")
            parts_of_lane.append(self.op(f"load {type}, ptr {place}"))
        if mask is None:
            self.branch(body)
        else:
            self.branch_if(self.op(f"icmp ne i8 {parts_of_lane[2]}, 0"), body, after)
        self.place(body)
        place = self._at(array, Value(INT, parts_of_lane[0]))
        self._store_one(array, place, Value(value.kind, parts_of_lane[1]), op, atomic)
        self.branch(after)
        self.place(after)
        self.emit(f"{follow} = add nuw nsw i64 {lane}, 1")
        self.branch_if(self.op(f"icmp ult i64 {follow}, {lanes}"), head, end)
        self.place(end)
        self.width, self.mask = lanes, mask

    def _store_one(
        self, array: Elements, place: str, value: Value, op: str | None, atomic: bool
    ) -> None:
        memory = array.memory
        if op is None or not atomic:
            if op is not None:
                old = self._widen(self.op(f"load {memory}, ptr {place}"), array, 1)
                value = self._of_one(op, Value(array.kind, old), value)
            self.emit(f"store {memory} {self._narrow(value.text, array, 1)}, ptr {place}")
            return
        # As integers: compare-and-swap, whose loads are atomic too.
        bits = f"i{8 * array.size}"
        again, done = self.fresh("swap"), self.fresh("swapped")
        first = self.op(f"load atomic {bits}, ptr {place} monotonic, align {array.size}")
        before, seen = self.block, "%" + self.fresh()
        self.branch(again)
        self.place(again)
        now = "%" + self.fresh()
        self.emit(f"{now} = phi {bits} [ {first}, %{before} ], [ {seen}, %{again} ]")
        raw = now if bits == memory else self.op(f"bitcast {bits} {now} to {memory}")
        old = self._widen(raw, array, 1)
        text = self._narrow(self._of_one(op, Value(array.kind, old), value).text, array, 1)
        text = text if bits == memory else self.op(f"bitcast {memory} {text} to {bits}")
        pair = self.op(f"cmpxchg weak ptr {place}, {bits} {now}, {bits} {text} monotonic monotonic")
        self.emit(f"{seen} = extractvalue {{ {bits}, i1 }} {pair}, 0")
        self.branch_if(self.op(f"extractvalue {{ {bits}, i1 }} {pair}, 1"), done, again)
        self.place(done)

    def _of_one(self, op: str, left: Value, right: Value) -> Value:
        width, mask = self.width, self.mask
        self.width, self.mask = 1, None
        result = self.binary(op, left, right)
        self.width, self.mask = width, mask
        return result

    def _widen(self, raw: str, array: Elements, lanes: int) -> str:
        dtype = array.dtype

        def typed(scalar: str) -> str:
            return scalar if lanes == 1 else f"<{lanes} x {scalar}>"

        if self.wrapping is not None and not array.is_index:
            return raw
        if array.is_index:
            if self.index == "i32":
                return raw
            return self.op(f"sext {typed('i32')} {raw} to {typed('i64')}")
        type = "float"
        if dtype == "bfloat16":  # the upper half of a float32
            wide = self.op(f"zext {typed('i16')} {raw} to {typed('i32')}")
            shift = self.splat("i32", "16", lanes)
            wide = self.op(f"shl {typed('i32')} {wide}, {shift}")
            raw = self.op(f"bitcast {typed('i32')} {wide} to {typed('float')}")
        elif dtype == "float16":
            raw, type = self.op(f"bitcast {typed('i16')} {raw} to {typed('half')}"), "half"
        elif dtype == "float64":
            type = "double"
        if type == self.number:
            return raw
        if type == "double":
            raise NotImplementedError("llvm: a float64 array takes a float64 accumulator")
        return self.op(f"fpext {typed(type)} {raw} to {typed(self.number)}")

    def _narrow(self, text: str, array: Elements, lanes: int) -> str:
        dtype = array.dtype

        def typed(scalar: str) -> str:
            return scalar if lanes == 1 else f"<{lanes} x {scalar}>"

        if self.wrapping is not None and not array.is_index:
            return text
        if array.is_index:
            if self.index == "i32":
                return text
            return self.op(f"trunc {typed('i64')} {text} to {typed('i32')}")
        if MEMORY[dtype] == self.number:
            return text
        if dtype == "float32":
            return self.op(f"fptrunc {typed('double')} {text} to {typed('float')}")
        if self.number != "float":  # by way of float32 it would round twice
            raise NotImplementedError(f"llvm: a {dtype} output takes a float32 accumulator")
        if dtype == "float16":
            half = self.op(f"fptrunc {typed('float')} {text} to {typed('half')}")
            return self.op(f"bitcast {typed('half')} {half} to {typed('i16')}")
        integer = typed("i32")

        def number(value: int) -> str:
            return self.splat("i32", str(value), lanes)

        bits = self.op(f"bitcast {typed('float')} {text} to {integer}")
        high = self.op(f"lshr {integer} {bits}, {number(16)}")
        odd = self.op(f"and {integer} {high}, {number(1)}")
        up = self.op(f"add {integer} {bits}, {number(0x7FFF)}")  # ties go to even
        near = self.op(f"lshr {integer} {self.op(f'add {integer} {up}, {odd}')}, {number(16)}")
        quiet = self.op(f"or {integer} {high}, {number(0x40)}")
        nan = self.op(f"fcmp uno {typed('float')} {text}, {text}")
        near = self.choose(TRUTH, nan, integer, quiet, near, lanes)
        return self.op(f"trunc {integer} {near} to {typed('i16')}")
