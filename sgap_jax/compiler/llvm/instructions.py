"""Instructions of LLVM IR, as text: what print_llvm.py writes, statement by statement.

Mutable scalars are stack slots, which LLVM's first passes turn into registers. Pointers are opaque.
"""

from __future__ import annotations

import dataclasses
import math
import struct

from sgap_jax.compiler.loop_ir.loopir import INTEGERS
from sgap_jax.compiler.loop_ir.widths import integer

INT, NUMBER, TRUTH = "int", "number", "truth"

# How the elements of arrays lie in memory. The 16-bit types are converted bit by bit or by a
# conversion alone: no arithmetic is done in them.
MEMORY = {
    "int8": "i8",
    "uint8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float32": "float",
    "float64": "double",
    "bfloat16": "i16",
    "float16": "i16",
}

_INT_OPS = {"+": "add nsw", "-": "sub nsw", "*": "mul nsw", "//": "udiv", "%": "urem"}
_NUMBER_OPS = {"+": "fadd", "-": "fsub", "*": "fmul"}
_WRAPPING_OPS = {"+": "add", "-": "sub", "*": "mul"}
_INT_TESTS = {"<": "slt", "<=": "sle", ">": "sgt", ">=": "sge", "==": "eq", "!=": "ne"}
_NUMBER_TESTS = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}


class NotVector(Exception):
    """A loop over lanes has something that only a lane by itself can do."""


@dataclasses.dataclass(frozen=True)
class Value:
    """An operand. Of a scalar (`lanes` 1), lane l is `text` plus l * `stride`."""

    kind: str
    text: str
    lanes: int = 1
    stride: int = 0

    @property
    def uniform(self) -> bool:
        return self.lanes == 1 and self.stride == 0


@dataclasses.dataclass(frozen=True)
class Cell:
    """A mutable scalar, or one of each lane."""

    kind: str
    pointer: str
    lanes: int


class Code:
    """The text of one function, and where it is being written: `width` lanes, of which those of
    `mask` (None: all) take part; at least one does."""

    def __init__(self, index: str, accumulator: str, vector_bytes: int) -> None:
        self.index = {"int32": "i32", "int64": "i64"}[index]
        self.number = MEMORY[accumulator]
        # Numbers that are integers wrap, in a dtype of their own.
        self.wrapping = accumulator if accumulator in INTEGERS else None
        self.number_bytes = 8 if accumulator in ("float64", "int64") else 4  # of a lane at least
        self.native_lanes = vector_bytes // self.number_bytes
        self.lines: list[str] = []
        self.slots: list[str] = []
        self.declared: set[str] = set()
        self.block = "entry"
        self.width = 1
        self.mask: str | None = None
        self._names = 0

    # Text.

    def fresh(self, stem: str = "v") -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def emit(self, text: str) -> None:
        self.lines.append("  " + text)

    def op(self, text: str) -> str:
        name = "%" + self.fresh()
        self.emit(f"{name} = {text}")
        return name

    def place(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def branch(self, label: str, note: str = "") -> None:
        self.emit(f"br label %{label}{note}")

    def branch_if(self, truth: str, yes: str, no: str, note: str = "") -> None:
        self.emit(f"br i1 {truth}, label %{yes}, label %{no}{note}")

    def slot(self, type: str, count: int = 1) -> str:
        name = "%" + self.fresh("slot")
        size = "" if count == 1 else f", i64 {count}"
        self.slots.append(f"  {name} = alloca {type}{size}, align 64")
        return name

    def call(self, result: str, name: str, *arguments: tuple[str, str]) -> str:
        """An intrinsic; (type, text) of each argument."""
        types = ", ".join(type for type, _ in arguments)
        self.declared.add(f"declare {result} @{name}({types})")
        text = f"call {result} @{name}({', '.join(' '.join(a) for a in arguments)})"
        if result != "void":
            return self.op(text)
        self.emit(text)
        return ""

    # Values.

    def as_index(self, text: str) -> str:
        """An i64."""
        return text if self.index == "i64" else self.op(f"trunc i64 {text} to i32")

    def type(self, kind: str, lanes: int = 1) -> str:
        scalar = {INT: self.index, NUMBER: self.number, TRUTH: "i1"}[kind]
        return scalar if lanes == 1 else f"<{lanes} x {scalar}>"

    def literal(self, value: float) -> Value:
        if self.wrapping is not None:
            return Value(NUMBER, str(integer(value, self.wrapping)))
        if self.number == "float":
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return Value(NUMBER, f"0x{bits:016X}")

    def neutral(self, op: str, kind: str) -> Value:
        if kind == NUMBER:
            return self.literal({"+": -0.0, "max": -math.inf, "min": math.inf}[op])
        end = 1 << (31 if self.index == "i32" else 63)
        return Value(INT, str({"+": 0, "max": -end, "min": end - 1}[op]))

    def splat(self, type: str, text: str, lanes: int) -> str:
        if lanes == 1:
            return text
        vector = f"<{lanes} x {type}>"
        one = self.op(f"insertelement {vector} poison, {type} {text}, i64 0")
        return self.op(
            f"shufflevector {vector} {one}, {vector} poison, <{lanes} x i32> zeroinitializer"
        )

    def spread(self, value: Value) -> str:
        """The operand of all lanes."""
        if self.width == 1 or value.lanes > 1:
            return value.text
        text = self.splat(self.type(value.kind), value.text, self.width)
        if value.stride == 0:
            return text
        type = self.type(INT, self.width)
        steps = ", ".join(f"{self.index} {lane * value.stride}" for lane in range(self.width))
        return self.op(f"add nsw {type} {text}, <{steps}>")

    def binary(self, op: str, left: Value, right: Value) -> Value:
        """Of one kind; not `and`, `or`."""
        kind = left.kind
        affine = left.lanes == right.lanes == 1
        if kind == INT and affine and not (left.uniform and right.uniform):
            if op in ("+", "-"):
                text = self.op(f"{_INT_OPS[op]} {self.index} {left.text}, {right.text}")
                stride = left.stride + (right.stride if op == "+" else -right.stride)
                return Value(INT, text, stride=stride)
            for one, other in ((left, right), (right, left)):
                if op == "*" and other.uniform and other.text.lstrip("-").isdigit():
                    text = self.op(f"mul nsw {self.index} {one.text}, {other.text}")
                    return Value(INT, text, stride=one.stride * int(other.text))
        lanes = 1 if left.uniform and right.uniform else self.width
        a, b = (left.text, right.text) if lanes == 1 else (self.spread(left), self.spread(right))
        type = self.type(kind, lanes)
        if op in _INT_TESTS:
            return Value(TRUTH, self.op(f"{self._test(op, kind)} {type} {a}, {b}"), lanes)
        if op in ("min", "max"):
            return Value(kind, self._extreme(op, kind, type, a, b, lanes), lanes)
        if kind == NUMBER:
            floats = f"{_NUMBER_OPS[op]} contract"
            how = floats if self.wrapping is None else _WRAPPING_OPS[op]
            return Value(NUMBER, self.op(f"{how} {type} {a}, {b}"), lanes)
        if op in ("//", "%") and lanes > 1 and self.mask is not None:
            b = self.choose(TRUTH, self.mask, type, b, self.splat(self.index, "1", lanes), lanes)
        return Value(INT, self.op(f"{_INT_OPS[op]} {type} {a}, {b}"), lanes)

    def _test(self, op: str, kind: str) -> str:
        if kind == NUMBER and self.wrapping is None:
            return f"fcmp {_NUMBER_TESTS[op]}"
        unsigned = kind == NUMBER and self.wrapping == "uint8"
        return f"icmp {_INT_TESTS[op].replace('s', 'u') if unsigned else _INT_TESTS[op]}"

    def _extreme(self, op: str, kind: str, type: str, a: str, b: str, lanes: int) -> str:
        if kind == INT or self.wrapping is not None:
            test = self._test(">" if op == "max" else "<", kind)
            first = self.op(f"{test} {type} {a}, {b}")
        else:  # a NaN of either side stays
            more = self.op(f"fcmp {'ogt' if op == 'max' else 'olt'} {type} {a}, {b}")
            nan = self.op(f"fcmp uno {type} {a}, {a}")
            first = self.op(f"or {self.type(TRUTH, lanes)} {more}, {nan}")
        return self.choose(TRUTH, first, type, a, b, lanes)

    def choose(self, kind: str, test: str, type: str, yes: str, no: str, lanes: int) -> str:
        return self.op(f"select {self.type(kind, lanes)} {test}, {type} {yes}, {type} {no}")

    def fold(self, op: str, value: Value) -> Value:
        """All lanes as one, halves by halves; those out of the mask do not count."""
        text, lanes = self.spread(value), self.width
        if self.mask is not None:
            none = self.splat(self.type(value.kind), self.neutral(op, value.kind).text, lanes)
            text = self.choose(TRUTH, self.mask, self.type(value.kind, lanes), text, none, lanes)
        width, mask = self.width, self.mask
        self.mask = None
        while lanes > 1:
            type = self.type(value.kind, lanes)
            lanes //= 2
            halves = []
            for begin in (0, lanes):
                picks = ", ".join(f"i32 {begin + i}" for i in range(lanes))
                of = f"{type} {text}, {type} poison, <{lanes} x i32> <{picks}>"
                if lanes == 1:
                    halves.append(self.op(f"extractelement {type} {text}, i64 {begin}"))
                else:
                    halves.append(self.op(f"shufflevector {of}"))
            self.width = lanes
            parts = [Value(value.kind, half, lanes) for half in halves]
            text = self.binary(op, *parts).text
        self.width, self.mask = width, mask
        return Value(value.kind, text)

    def fold_each(self, op: str, values: list[Value]) -> Value:
        """All lanes of each of several vectors as a lane of one, in fewer steps than one by one:
        halves of two vectors side by side, then of four. Vectors have a lane for each at least."""
        kind, lanes, count = values[0].kind, self.width, len(values)
        type, part = self.type(kind, lanes), lanes

        def shuffled(one: str, two: str, picks: list[int]) -> str:
            mask = ", ".join(f"i32 {lane}" for lane in picks)
            vectors = f"{type} {one}, {type} {two}, <{len(picks)} x i32> <{mask}>"
            return self.op(f"shufflevector {vectors}")

        def added(one: str, two: str) -> str:
            return self.binary(op, Value(kind, one, lanes), Value(kind, two, lanes)).text

        found = [value.text for value in values]
        while len(found) > 1:  # runs of `part` lanes are of one vector
            low = [run + lane for run in range(0, 2 * lanes, part) for lane in range(part // 2)]
            high = [lane + part // 2 for lane in low]
            pairs = zip(found[::2], found[1::2], strict=True)
            found = [added(shuffled(*pair, low), shuffled(*pair, high)) for pair in pairs]
            part //= 2
        (text,) = found
        while part > 1:
            part //= 2
            text = added(text, shuffled(text, "poison", [lane ^ part for lane in range(lanes)]))
        picks = list(range(0, lanes, lanes // count))
        return Value(kind, shuffled(text, "poison", picks), count)

    def any_lane(self, mask: str) -> str:
        bits = self.op(f"bitcast {self.type(TRUTH, self.width)} {mask} to i{self.width}")
        return self.op(f"icmp ne i{self.width} {bits}, 0")

    def both(self, first: str | None, second: str) -> str:
        if first is None:
            return second
        return self.op(f"and {self.type(TRUTH, self.width)} {first}, {second}")

    def invert(self, truth: Value) -> Value:
        ones = self.splat("i1", "true", truth.lanes)
        text = self.op(f"xor {self.type(TRUTH, truth.lanes)} {truth.text}, {ones}")
        return Value(TRUTH, text, truth.lanes)

    # Cells.

    def read(self, cell: Cell) -> Value:
        type = self.type(cell.kind, cell.lanes)
        return Value(cell.kind, self.op(f"load {type}, ptr {cell.pointer}"), cell.lanes)

    def write(self, cell: Cell, value: Value) -> None:
        text = value.text if cell.lanes == 1 else self.spread(value)
        type = self.type(cell.kind, cell.lanes)
        if cell.lanes > 1 and self.mask is not None:
            text = self.choose(TRUTH, self.mask, type, text, self.read(cell).text, cell.lanes)
        self.emit(f"store {type} {text}, ptr {cell.pointer}")
