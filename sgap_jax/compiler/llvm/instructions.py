"""Instructions of LLVM IR, as text: arithmetic of scalars and of vectors, branches, stack slots.

`Instructions` holds the text of one function while it is written, and in how many lanes it is
written at the moment. Mutable scalars are stack slots, which LLVM's first passes turn into
registers. Pointers are opaque.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import struct
from collections.abc import Iterator

from sgap_jax.compiler.loop_ir.loopir import INTEGERS
from sgap_jax.compiler.loop_ir.widths import integer

# Kinds of values: coordinates and positions, as wide as `Function.index`; elements and sums of the
# type of `Function.accumulator`; conditions.
INDEX, NUMBER, TRUTH = "index", "number", "truth"

# The types of array elements in memory. The 16-bit floats have integer types: they are converted
# as they are loaded and stored, and no arithmetic is done in them.
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

# Metadata nodes, and below the suffixes that attach them to an instruction: UNROLLED and ROLLED go
# after a loop's last branch (LLVM unrolls the loop fully, or never), NONTEMPORAL after a store,
# which then bypasses the caches.
METADATA = """\
!0 = distinct !{!0, !1}
!1 = !{!"llvm.loop.unroll.full"}
!2 = distinct !{!2, !3}
!3 = !{!"llvm.loop.unroll.disable"}
!4 = !{i32 1}
"""
UNROLLED, ROLLED = ", !llvm.loop !0", ", !llvm.loop !2"
NONTEMPORAL = ", !nontemporal !4"

# A loop that LLVM must not vectorize, and the nodes that this takes.
SERIAL = ", !llvm.loop !5"
SERIAL_NODES = """\
!5 = distinct !{!5, !6}
!6 = !{!"llvm.loop.vectorize.enable", i1 false}"""

_INDEX_OPS = {"+": "add nsw", "-": "sub nsw", "*": "mul nsw", "//": "udiv", "%": "urem"}
_NUMBER_OPS = {"+": "fadd", "-": "fsub", "*": "fmul"}
_WRAPPING_OPS = {"+": "add", "-": "sub", "*": "mul"}
_INDEX_TESTS = {"<": "slt", "<=": "sle", ">": "sgt", ">=": "sge", "==": "eq", "!=": "ne"}
_NUMBER_TESTS = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}


@dataclasses.dataclass(frozen=True)
class Value:
    """An operand: a constant or the name of a result.

    Attributes:
      kind: INDEX, NUMBER or TRUTH.
      text: as it stands in instructions.
      lanes: of a vector, how many it has; of a scalar, 1.
      stride: of a scalar that differs from lane to lane: in lane l it is `text` plus l * `stride`.
    """

    kind: str
    text: str
    lanes: int = 1
    stride: int = 0

    @property
    def uniform(self) -> bool:
        """Whether it is a scalar that all lanes share."""
        return self.lanes == 1 and self.stride == 0


@dataclasses.dataclass(frozen=True)
class Cell:
    """A mutable scalar in a stack slot, or a vector with one for each lane."""

    kind: str
    pointer: str
    lanes: int


class Instructions:
    """The text of one function, and where it is being written.

    Attributes:
      lines: the instructions so far; `slots` (the stack slots) stand before them.
      declared: the intrinsics that they call, as declarations.
      block: the label of the basic block that is being written.
      width: how many lanes what is written runs in.
      mask: a vector of truth values: the lanes that take part, at least one. None: all do.
      native_lanes: numbers in a vector register.
      wrapping: the accumulator's dtype, where it is an integer dtype: arithmetic wraps.
    """

    def __init__(self, index: str, accumulator: str, vector_bytes: int) -> None:
        self.index = {"int32": "i32", "int64": "i64"}[index]
        self.number = MEMORY[accumulator]
        self.wrapping = accumulator if accumulator in INTEGERS else None
        # Narrower integers have lanes as wide as those of indices.
        self.number_bytes = 8 if accumulator in ("float64", "int64") else 4
        self._types = {INDEX: self.index, NUMBER: self.number, TRUTH: "i1"}
        self.vector_bytes = vector_bytes
        self.native_lanes = vector_bytes // self.number_bytes
        self.lines: list[str] = []
        self.slots: list[str] = []
        self.declared: set[str] = set()
        self.block = "entry"
        self.width = 1
        self.mask: str | None = None
        self._names = 0

    @contextlib.contextmanager
    def in_lanes(self, width: int, mask: str | None = None) -> Iterator[None]:
        """What is written within runs in `width` lanes, of which those of `mask` take part."""
        before = self.width, self.mask
        self.width, self.mask = width, mask
        try:
            yield
        finally:
            self.width, self.mask = before

    # Text.

    def fresh(self, stem: str = "v") -> str:
        """A name that the function does not have yet."""
        self._names += 1
        return f"{stem}{self._names}"

    def emit(self, text: str) -> None:
        self.lines.append("  " + text)

    def op(self, text: str) -> str:
        """An instruction with a result; returns its name."""
        self._names += 1
        name = f"%v{self._names}"
        self.lines.append(f"  {name} = {text}")
        return name

    def start_block(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def branch(self, label: str, metadata: str = "") -> None:
        self.emit(f"br label %{label}{metadata}")

    def branch_if(self, truth: str, yes: str, no: str, metadata: str = "") -> None:
        self.emit(f"br i1 {truth}, label %{yes}, label %{no}{metadata}")

    def slot(self, type: str, count: int = 1) -> str:
        """The pointer to a new stack slot."""
        name = "%" + self.fresh("slot")
        size = "" if count == 1 else f", i64 {count}"
        self.slots.append(f"  {name} = alloca {type}{size}, align 64")
        return name

    def call(self, result: str, name: str, *arguments: tuple[str, str]) -> str:
        """Calls an intrinsic with arguments (type, text); returns the name of the result."""
        types = ", ".join(type for type, _ in arguments)
        self.declared.add(f"declare {result} @{name}({types})")
        text = f"call {result} @{name}({', '.join(' '.join(a) for a in arguments)})"
        if result != "void":
            return self.op(text)
        self.emit(text)
        return ""

    # Values.

    def as_index(self, text: str) -> str:
        """An i64 as a value of kind INDEX."""
        return text if self.index == "i64" else self.op(f"trunc i64 {text} to i32")

    def type(self, kind: str, lanes: int = 1) -> str:
        scalar = self._types[kind]
        return scalar if lanes == 1 else f"<{lanes} x {scalar}>"

    def literal(self, value: float) -> Value:
        if self.wrapping is not None:
            return Value(NUMBER, str(integer(value, self.wrapping)))
        if self.number == "float":
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        bits = struct.unpack("<Q", struct.pack("<d", value))[0]
        return Value(NUMBER, f"0x{bits:016X}")

    def neutral(self, op: str, kind: str) -> Value:
        """The value with which a reduction by `op` starts."""
        if kind == NUMBER:
            return self.literal({"+": -0.0, "max": -math.inf, "min": math.inf}[op])
        end = 1 << (31 if self.index == "i32" else 63)
        return Value(INDEX, str({"+": 0, "max": -end, "min": end - 1}[op]))

    def splat(self, type: str, text: str, lanes: int) -> str:
        """A vector with a scalar in all lanes."""
        if lanes == 1:
            return text
        vector = f"<{lanes} x {type}>"
        one = self.op(f"insertelement {vector} poison, {type} {text}, i64 0")
        return self.op(
            f"shufflevector {vector} {one}, {vector} poison, <{lanes} x i32> zeroinitializer"
        )

    def spread(self, value: Value) -> str:
        """The operand as a vector, where more than one lane is written."""
        if self.width == 1 or value.lanes > 1:
            return value.text
        text = self.splat(self.type(value.kind), value.text, self.width)
        if value.stride == 0:
            return text
        type = self.type(INDEX, self.width)
        steps = ", ".join(f"{self.index} {lane * value.stride}" for lane in range(self.width))
        return self.op(f"add nsw {type} {text}, <{steps}>")

    def binary(self, op: str, left: Value, right: Value) -> Value:
        """`left op right`, both of one kind; `op` is one of the loop IR other than `and`, `or`."""
        kind = left.kind
        affine = left.lanes == right.lanes == 1
        if kind == INDEX and affine and not (left.uniform and right.uniform):
            if op in ("+", "-"):
                text = self.op(f"{_INDEX_OPS[op]} {self.index} {left.text}, {right.text}")
                stride = left.stride + (right.stride if op == "+" else -right.stride)
                return Value(INDEX, text, stride=stride)
            for one, other in ((left, right), (right, left)):
                if op == "*" and other.uniform and other.text.lstrip("-").isdigit():
                    text = self.op(f"mul nsw {self.index} {one.text}, {other.text}")
                    return Value(INDEX, text, stride=one.stride * int(other.text))
        lanes = 1 if left.uniform and right.uniform else self.width
        a, b = (left.text, right.text) if lanes == 1 else (self.spread(left), self.spread(right))
        type = self.type(kind, lanes)
        if op in _INDEX_TESTS:
            return Value(TRUTH, self.op(f"{self._test(op, kind)} {type} {a}, {b}"), lanes)
        if op in ("min", "max"):
            return Value(kind, self._extreme(op, kind, type, a, b, lanes), lanes)
        if kind == NUMBER:
            floats = f"{_NUMBER_OPS[op]} contract"
            how = floats if self.wrapping is None else _WRAPPING_OPS[op]
            return Value(NUMBER, self.op(f"{how} {type} {a}, {b}"), lanes)
        if op in ("//", "%") and lanes > 1 and self.mask is not None:  # no lane divides by zero
            b = self.choose(self.mask, type, b, self.splat(self.index, "1", lanes), lanes)
        return Value(INDEX, self.op(f"{_INDEX_OPS[op]} {type} {a}, {b}"), lanes)

    def _test(self, op: str, kind: str) -> str:
        if kind == NUMBER and self.wrapping is None:
            return f"fcmp {_NUMBER_TESTS[op]}"
        unsigned = kind == NUMBER and self.wrapping == "uint8"
        return f"icmp {_INDEX_TESTS[op].replace('s', 'u') if unsigned else _INDEX_TESTS[op]}"

    def _extreme(self, op: str, kind: str, type: str, a: str, b: str, lanes: int) -> str:
        if kind == INDEX or self.wrapping is not None:
            test = self._test(">" if op == "max" else "<", kind)
            first = self.op(f"{test} {type} {a}, {b}")
        else:  # a NaN on either side is the result
            more = self.op(f"fcmp {'ogt' if op == 'max' else 'olt'} {type} {a}, {b}")
            nan = self.op(f"fcmp uno {type} {a}, {a}")
            first = self.op(f"or {self.type(TRUTH, lanes)} {more}, {nan}")
        return self.choose(first, type, a, b, lanes)

    def choose(self, test: str, type: str, yes: str, no: str, lanes: int) -> str:
        return self.op(f"select {self.type(TRUTH, lanes)} {test}, {type} {yes}, {type} {no}")

    def fold(self, op: str, value: Value) -> Value:
        """The reduction of a vector's lanes that take part: of its halves, of their halves, ..."""
        text, lanes = self.spread(value), self.width
        if self.mask is not None:
            none = self.splat(self.type(value.kind), self.neutral(op, value.kind).text, lanes)
            text = self.choose(self.mask, self.type(value.kind, lanes), text, none, lanes)
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
            with self.in_lanes(lanes):
                text = self.binary(op, *(Value(value.kind, half, lanes) for half in halves)).text
        return Value(value.kind, text)

    def fold_each(self, op: str, values: list[Value]) -> Value:
        """A vector of the reductions of several vectors, none of which has fewer lanes than there
        are vectors. Takes fewer instructions than to reduce one vector after another: halves of two
        vectors are combined side by side, then quarters of four."""
        kind, lanes, count = values[0].kind, self.width, len(values)
        type, part = self.type(kind, lanes), lanes

        def shuffled(one: str, two: str, picks: list[int]) -> str:
            indices = ", ".join(f"i32 {lane}" for lane in picks)
            vectors = f"{type} {one}, {type} {two}, <{len(picks)} x i32> <{indices}>"
            return self.op(f"shufflevector {vectors}")

        def combined(one: str, two: str) -> str:
            return self.binary(op, Value(kind, one, lanes), Value(kind, two, lanes)).text

        vectors = [value.text for value in values]
        while len(vectors) > 1:  # each `part` lanes in a row belong to one of `values`
            low = [at + lane for at in range(0, 2 * lanes, part) for lane in range(part // 2)]
            high = [lane + part // 2 for lane in low]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [combined(shuffled(*pair, low), shuffled(*pair, high)) for pair in pairs]
            part //= 2
        (text,) = vectors
        while part > 1:
            part //= 2
            text = combined(text, shuffled(text, "poison", [lane ^ part for lane in range(lanes)]))
        picks = list(range(0, lanes, lanes // count))
        return Value(kind, shuffled(text, "poison", picks), count)

    def first_lanes(self, count: Value) -> str:
        """The mask of the first `count` lanes."""
        return self.binary("<", Value(INDEX, "0", stride=1), count).text

    def any_lane(self, mask: str) -> str:
        """Whether any lane is in a mask."""
        bits = self.op(f"bitcast {self.type(TRUTH, self.width)} {mask} to i{self.width}")
        return self.op(f"icmp ne i{self.width} {bits}, 0")

    def both(self, first: str | None, second: str) -> str:
        """The lanes that are in two masks; None has all lanes."""
        if first is None:
            return second
        return self.op(f"and {self.type(TRUTH, self.width)} {first}, {second}")

    def invert(self, truth: Value) -> Value:
        ones = self.splat("i1", "true", truth.lanes)
        text = self.op(f"xor {self.type(TRUTH, truth.lanes)} {truth.text}, {ones}")
        return Value(TRUTH, text, truth.lanes)

    # Mutable scalars.

    def cell(self, kind: str, value: Value, wide: bool = False) -> Cell:
        """A new one with its initial value; `wide`: one for each lane."""
        lanes = self.width if wide else 1
        pointer = self.slot(self.type(kind, lanes))
        text = self.spread(value) if wide else value.text
        self.emit(f"store {self.type(kind, lanes)} {text}, ptr {pointer}")
        return Cell(kind, pointer, lanes)

    def read(self, cell: Cell) -> Value:
        type = self.type(cell.kind, cell.lanes)
        return Value(cell.kind, self.op(f"load {type}, ptr {cell.pointer}"), cell.lanes)

    def write(self, cell: Cell, value: Value) -> None:
        text = value.text if cell.lanes == 1 else self.spread(value)
        type = self.type(cell.kind, cell.lanes)
        if cell.lanes > 1 and self.mask is not None:
            text = self.choose(self.mask, type, text, self.read(cell).text, cell.lanes)
        self.emit(f"store {type} {text}, ptr {cell.pointer}")


def constant(value: int) -> Value:
    """An index that is known."""
    return Value(INDEX, str(value))
