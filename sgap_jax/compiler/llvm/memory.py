"""Elements of arrays in LLVM IR: where they are, loads, stores, prefetches, conversions.

An index that lanes share is a scalar access; one that grows by 1 from lane to lane, a vector access
to neighbours; any other, a gather or a scatter. Lanes out of the mask are neither read nor written.
"""

from __future__ import annotations

import dataclasses

from sgap_jax.compiler.llvm.instructions import INDEX, MEMORY, NUMBER, TRUTH, Instructions, Value

_BYTES = {"i32": 4, "float": 4, "double": 8, "i64": 8, "i16": 2, "i8": 1}
_IN_INTRINSICS = {"float": "f32", "double": "f64"}  # how their names abbreviate a type

_CACHE_LINE = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Elements:
    """An array in memory.

    Attributes:
      count: its elements, in `parts` of one size, one after another.
      is_index: whether they are coordinates or positions.
    """

    pointer: str
    dtype: str
    count: int
    is_index: bool = False
    parts: int = 1

    @property
    def memory(self) -> str:
        """The LLVM type of an element."""
        return MEMORY[self.dtype]

    @property
    def bytes(self) -> int:
        """Of one element."""
        return _BYTES[self.memory]

    @property
    def kind(self) -> str:
        return INDEX if self.is_index else NUMBER


def load(code: Instructions, array: Elements, index: Value) -> Value:
    memory, lanes = array.memory, code.width
    if index.uniform:
        raw, lanes = code.op(f"load {memory}, ptr {address(code, array, index)}"), 1
    elif index.stride == 1:
        place = address(code, array, index)
        if code.mask is None:
            raw = code.op(f"load <{lanes} x {memory}>, ptr {place}, align {array.bytes}")
        else:
            raw = _masked_load(code, "load", ("ptr", place), array)
    elif code.mask is None:
        raw = _gather(code, array, index)
    else:
        raw = _masked_load(code, "gather", _addresses(code, array, index), array)
    return Value(array.kind, widen(code, raw, array, lanes), lanes)


def store(
    code: Instructions, array: Elements, index: Value, value: Value, op: str | None, atomic: bool
) -> None:
    """array[index] = value, or array[index] op= value where `op` is given."""
    if index.uniform:
        if op is not None and code.width > 1:
            value = code.fold(op, value)
        _store_one(code, array, address(code, array, index), value, op, atomic)
    elif op is not None and (atomic or index.stride != 1):
        _store_lane_by_lane(code, array, index, value, op, atomic)
    else:
        if op is not None:
            value = code.binary(op, load(code, array, index), value)
        _store_vector(code, array, index, value)


def prefetch(code: Instructions, array: Elements, index: Value) -> None:
    """The cache lines of neighbours from `index` on, which may be out of bounds."""
    for begin in range(0, code.width, _CACHE_LINE // array.bytes):
        place = code.op(
            f"getelementptr {array.memory}, ptr {array.pointer}, {code.index} {index.text}"
        )
        place = code.op(f"getelementptr {array.memory}, ptr {place}, i64 {begin}")
        hints = (("i32", "0"), ("i32", "3"), ("i32", "1"))  # for reads, into all caches, data
        code.call("void", "llvm.prefetch.p0", ("ptr", place), *hints)


def address(code: Instructions, array: Elements, index: Value) -> str:
    """Of an element, or of the first of neighbours, which may be out of bounds under a mask."""
    bounds = "inbounds " if code.mask is None else ""
    return code.op(
        f"getelementptr {bounds}{array.memory}, ptr {array.pointer}, {code.index} {index.text}"
    )


def _addresses(code: Instructions, array: Elements, index: Value) -> tuple[str, str]:
    """The type of a vector of addresses, and that vector."""
    type = code.type(INDEX, code.width)
    text = code.op(
        f"getelementptr {array.memory}, ptr {array.pointer}, {type} {code.spread(index)}"
    )
    return f"<{code.width} x ptr>", text


def _gather(code: Instructions, array: Elements, index: Value) -> str:
    """One load for each lane, which is faster than the gather instruction (cpu/simd/simd.h)."""
    vector, raw = f"<{code.width} x {array.memory}>", "poison"
    for lane, place in enumerate(_places_of_lanes(code, index)):
        at = code.op(f"getelementptr inbounds {array.memory}, ptr {array.pointer}, {place}")
        one = code.op(f"load {array.memory}, ptr {at}")
        raw = code.op(f"insertelement {vector} {raw}, {array.memory} {one}, i64 {lane}")
    return raw


def _places_of_lanes(code: Instructions, index: Value) -> list[str]:
    """The index of each lane, none negative, with its type. A vector of i32 is split into pairs:
    where the vector comes from memory, LLVM then loads two indices at a time instead of one. Beside
    the loads of a gather, those of its indices count (0.87x of the time of a long sum, Zen 5)."""
    lanes, type = range(code.width), code.type(INDEX, code.width)
    if index.lanes == 1:
        steps = (f"add nsw {code.index} {index.text}, {lane * index.stride}" for lane in lanes)
        return [f"{code.index} {code.op(step)}" for step in steps]
    if code.index == "i64":
        parts = (f"extractelement {type} {index.text}, i64 {lane}" for lane in lanes)
        return [f"i64 {code.op(part)}" for part in parts]
    pairs = f"<{code.width // 2} x i64>"
    both, places = code.op(f"bitcast {type} {index.text} to {pairs}"), []
    for pair in lanes[: code.width // 2]:
        two = code.op(f"extractelement {pairs} {both}, i64 {pair}")
        for half in (f"and i64 {two}, {(1 << 32) - 1}", f"lshr i64 {two}, 32"):
            places.append(f"i64 {code.op(half)}")
    return places


def _masked_load(
    code: Instructions, operation: str, places: tuple[str, str], array: Elements
) -> str:
    vector = f"<{code.width} x {array.memory}>"
    rest = (vector, "zeroinitializer")  # of the lanes out of the mask
    name = _masked_name(code, operation, array)
    return code.call(vector, name, places, ("i32", str(array.bytes)), _mask(code), rest)


def _masked_name(code: Instructions, operation: str, array: Elements) -> str:
    type = _IN_INTRINSICS.get(array.memory, array.memory)
    places = f"v{code.width}p0" if operation in ("gather", "scatter") else "p0"
    return f"llvm.masked.{operation}.v{code.width}{type}.{places}"


def _mask(code: Instructions) -> tuple[str, str]:
    mask = code.splat("i1", "true", code.width) if code.mask is None else code.mask
    return code.type(TRUTH, code.width), mask


def _store_vector(code: Instructions, array: Elements, index: Value, value: Value) -> None:
    vector = f"<{code.width} x {array.memory}>"
    text = narrow(code, code.spread(value), array, code.width)
    if index.stride != 1:
        operation, places = "scatter", _addresses(code, array, index)
    else:
        operation, places = "store", ("ptr", address(code, array, index))
        if code.mask is None:
            code.emit(f"store {vector} {text}, ptr {places[1]}, align {array.bytes}")
            return
    name, align = _masked_name(code, operation, array), ("i32", str(array.bytes))
    code.call("void", name, (vector, text), places, align, _mask(code))


def _store_lane_by_lane(
    code: Instructions, array: Elements, index: Value, value: Value, op: str, atomic: bool
) -> None:
    """One lane after another, in a loop, as two lanes may have one element."""
    lanes, mask = code.width, code.mask
    saved = []  # (type of a lane, pointer) of the index, the value and the mask
    vectors = [(index.kind, code.spread(index)), (value.kind, code.spread(value))]
    for kind, text in (*vectors, *(((TRUTH, mask),) if mask is not None else ())):
        type, one = code.type(kind, lanes), code.type(kind)
        if kind == TRUTH:  # which has a bit for each lane in memory
            text = code.op(f"zext {type} {text} to <{lanes} x i8>")
            type, one = f"<{lanes} x i8>", "i8"
        saved.append((one, code.slot(type)))
        code.emit(f"store {type} {text}, ptr {saved[-1][1]}")
    head, body, after, end = (code.fresh("lane") for _ in range(4))
    before = code.block
    with code.in_lanes(1):
        code.branch(head)
        code.start_block(head)
        lane, following = "%" + code.fresh(), "%" + code.fresh()
        code.emit(f"{lane} = phi i64 [ 0, %{before} ], [ {following}, %{after} ]")
        parts = []
        for type, pointer in saved:
            place = code.op(f"getelementptr inbounds {type}, ptr {pointer}, i64 {lane}")
            parts.append(code.op(f"load {type}, ptr {place}"))
        if mask is None:
            code.branch(body)
        else:
            code.branch_if(code.op(f"icmp ne i8 {parts[2]}, 0"), body, after)
        code.start_block(body)
        place = address(code, array, Value(INDEX, parts[0]))
        _store_one(code, array, place, Value(value.kind, parts[1]), op, atomic)
        code.branch(after)
        code.start_block(after)
        code.emit(f"{following} = add nuw nsw i64 {lane}, 1")
        code.branch_if(code.op(f"icmp ult i64 {following}, {lanes}"), head, end)
        code.start_block(end)


def _store_one(
    code: Instructions, array: Elements, place: str, value: Value, op: str | None, atomic: bool
) -> None:
    memory = array.memory
    if op is None or not atomic:
        if op is not None:
            old = widen(code, code.op(f"load {memory}, ptr {place}"), array, 1)
            value = _scalar_binary(code, op, Value(array.kind, old), value)
        code.emit(f"store {memory} {narrow(code, value.text, array, 1)}, ptr {place}")
        return
    # Compare-and-swap of integers of that size: their loads are atomic too.
    bits = f"i{8 * array.bytes}"
    again, done = code.fresh("swap"), code.fresh("swapped")
    first = code.op(f"load atomic {bits}, ptr {place} monotonic, align {array.bytes}")
    before, seen = code.block, "%" + code.fresh()
    code.branch(again)
    code.start_block(again)
    now = "%" + code.fresh()
    code.emit(f"{now} = phi {bits} [ {first}, %{before} ], [ {seen}, %{again} ]")
    raw = now if bits == memory else code.op(f"bitcast {bits} {now} to {memory}")
    old = widen(code, raw, array, 1)
    new = _scalar_binary(code, op, Value(array.kind, old), value)
    text = narrow(code, new.text, array, 1)
    text = text if bits == memory else code.op(f"bitcast {memory} {text} to {bits}")
    pair = code.op(f"cmpxchg weak ptr {place}, {bits} {now}, {bits} {text} monotonic monotonic")
    code.emit(f"{seen} = extractvalue {{ {bits}, i1 }} {pair}, 0")
    code.branch_if(code.op(f"extractvalue {{ {bits}, i1 }} {pair}, 1"), done, again)
    code.start_block(done)


def _scalar_binary(code: Instructions, op: str, left: Value, right: Value) -> Value:
    with code.in_lanes(1):
        return code.binary(op, left, right)


def _typed(scalar: str, lanes: int) -> str:
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


def widen(code: Instructions, raw: str, array: Elements, lanes: int) -> str:
    """What was loaded, in the type that is computed with."""
    if array.is_index:
        if code.index == "i32":
            return raw
        return code.op(f"sext {_typed('i32', lanes)} {raw} to {_typed('i64', lanes)}")
    if code.wrapping is not None:
        return raw
    type = "float"
    if array.dtype == "bfloat16":  # the upper half of a float32
        i32 = _typed("i32", lanes)
        bits = code.op(f"zext {_typed('i16', lanes)} {raw} to {i32}")
        sixteen = code.splat("i32", "16", lanes)
        bits = code.op(f"shl {i32} {bits}, {sixteen}")
        raw = code.op(f"bitcast {i32} {bits} to {_typed('float', lanes)}")
    elif array.dtype == "float16":
        type = "half"
        raw = code.op(f"bitcast {_typed('i16', lanes)} {raw} to {_typed('half', lanes)}")
    elif array.dtype == "float64":
        type = "double"
    if type == code.number:
        return raw
    if type == "double":
        raise NotImplementedError("llvm: a float64 array takes a float64 accumulator")
    return code.op(f"fpext {_typed(type, lanes)} {raw} to {_typed(code.number, lanes)}")


def narrow(code: Instructions, text: str, array: Elements, lanes: int) -> str:
    """A result, in the type that is stored: rounded once, to nearest, ties to even."""
    dtype, float32 = array.dtype, _typed("float", lanes)
    if array.is_index:
        if code.index == "i32":
            return text
        return code.op(f"trunc {_typed('i64', lanes)} {text} to {_typed('i32', lanes)}")
    if code.wrapping is not None or array.memory == code.number:
        return text
    if dtype == "float32":
        return code.op(f"fptrunc {_typed('double', lanes)} {text} to {float32}")
    if code.number != "float":  # by way of float32 it would round twice
        raise NotImplementedError(f"llvm: a {dtype} output takes a float32 accumulator")
    if dtype == "float16":
        half = code.op(f"fptrunc {float32} {text} to {_typed('half', lanes)}")
        return code.op(f"bitcast {_typed('half', lanes)} {half} to {_typed('i16', lanes)}")
    return _bfloat16(code, text, lanes)


def _bfloat16(code: Instructions, text: str, lanes: int) -> str:
    """A float32, rounded in integer arithmetic, which any CPU has; a NaN stays one."""
    i32, float32 = _typed("i32", lanes), _typed("float", lanes)

    def number(value: int) -> str:
        return code.splat("i32", str(value), lanes)

    bits = code.op(f"bitcast {float32} {text} to {i32}")
    high = code.op(f"lshr {i32} {bits}, {number(16)}")
    odd = code.op(f"and {i32} {high}, {number(1)}")
    up = code.op(f"add {i32} {bits}, {number(0x7FFF)}")
    near = code.op(f"lshr {i32} {code.op(f'add {i32} {up}, {odd}')}, {number(16)}")
    quiet = code.op(f"or {i32} {high}, {number(0x40)}")
    nan = code.op(f"fcmp uno {float32} {text}, {text}")
    near = code.choose(nan, i32, quiet, near, lanes)
    return code.op(f"trunc {i32} {near} to {_typed('i16', lanes)}")
