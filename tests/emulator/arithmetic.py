"""What instructions compute from the registers of one lane (PTX ISA, sections 9.7.1 to 9.7.9)."""

import numpy as np

from .parse import Pair, Vector
from .values import UNSIGNED, WIDTHS, fused_multiply_add, is_float, lift, lower

ROUNDED = ("rn", "ftz", "sat", "approx", "full", "relu", "NaN", "noftz")
SMALLEST_NORMAL = np.float32(2.0**-126)


def unknown(instruction, modifiers, accepted):
    for modifier in modifiers:
        if modifier not in accepted and modifier not in WIDTHS and modifier != "pred":
            raise NotImplementedError(f"modifier .{modifier} of {instruction}")


def flush(numbers):
    """Subnormal float32 numbers become zeros of their sign."""
    if numbers.dtype != np.float32:
        return numbers
    return np.where(np.abs(numbers) < SMALLEST_NORMAL, np.copysign(np.float32(0), numbers), numbers)


def arithmetic(blocks, instruction, active):
    """d = f(a, b, c), all of one type."""
    function, accepted = OPERATIONS[instruction.opcode]
    unknown(instruction, instruction.modifiers, accepted)
    kind = instruction.types[-1]
    operands = [blocks.read(operand, kind) for operand in instruction.operands[1:]]
    flushing = "ftz" in instruction.modifiers
    if flushing:
        operands = [flush(operand) for operand in operands]
    result = function(instruction, kind, *operands)
    if is_float(kind):
        if flushing:
            result = flush(result)
        if "sat" in instruction.modifiers:
            result = np.fmax(np.fmin(result, result.dtype.type(1)), result.dtype.type(0))
        if "relu" in instruction.modifiers:
            result = np.where(np.isnan(result), result, np.fmax(result, result.dtype.type(0)))
    blocks.write(instruction.operands[0], result, kind, active)


def simple(function):
    return lambda instruction, kind, *operands: function(*operands)


def multiply(instruction, kind, x, y):
    return high_product(x, y) if "hi" in instruction.modifiers else x * y


def multiply_add(instruction, kind, x, y, z):
    if is_float(kind):
        return fused_multiply_add(x, y, z, kind)
    return (high_product(x, y) if "hi" in instruction.modifiers else x * y) + z


def high_product(x, y):
    width = 8 * x.itemsize
    if width < 64:
        wide = np.int64 if x.dtype.kind == "i" else np.uint64
        return ((x.astype(wide) * y.astype(wide)) >> wide(width)).astype(x.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = x.view(np.uint64), y.view(np.uint64)
    middle = (a >> half) * (b & low) + (((a & low) * (b & low)) >> half)
    other = (a & low) * (b >> half) + (middle & low)
    high = (a >> half) * (b >> half) + (middle >> half) + (other >> half)
    if x.dtype.kind == "i":
        high = high - np.where(x < 0, b, 0) - np.where(y < 0, a, 0)
    return high.view(x.dtype)


def wide_product(blocks, instruction, active):
    """mul.wide, mad.wide: the product has twice the width of the factors."""
    kind = instruction.types[-1]
    wide = f"{kind[0]}{16 * WIDTHS[kind]}"
    dtype = lift(np.zeros(1, UNSIGNED[WIDTHS[wide]]), wide).dtype
    x, y = (blocks.read(operand, kind).astype(dtype) for operand in instruction.operands[1:3])
    product = x * y
    if instruction.opcode == "mad":
        product = product + blocks.read(instruction.operands[3], wide)
    blocks.write(instruction.operands[0], product, wide, active)


def multiply_or_wide(blocks, instruction, active):
    wide = "wide" in instruction.modifiers
    (wide_product if wide else arithmetic)(blocks, instruction, active)


def divide(instruction, kind, x, y):
    # Exact after the remainder is gone; NumPy's own division of integers rounds down.
    return x / y if is_float(kind) else (x - np.fmod(x, y)) // y


def extremum(instruction, kind, x, y):
    """A NaN loses against a number (unless .NaN), and -0 is less than +0."""
    largest = instruction.opcode == "max"
    if not is_float(kind):
        return np.maximum(x, y) if largest else np.minimum(x, y)
    result = np.fmax(x, y) if largest else np.fmin(x, y)
    zeros = (x == 0) & (y == 0)
    if zeros.any():
        negative = np.signbit(x) & np.signbit(y) if largest else np.signbit(x) | np.signbit(y)
        zero = np.where(negative, -0.0, 0.0).astype(result.dtype)
        result = np.where(zeros, zero, result)
    if "NaN" in instruction.modifiers:
        result = np.where(np.isnan(x) | np.isnan(y), result.dtype.type(np.nan), result)
    return result


def reciprocal(x):
    return x.dtype.type(1) / x


def bit_rows(x):
    """(lanes, bits) of each word, the most significant bit first."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)[:, ::-1]
    return np.unpackbits(octets, axis=1)


def reverse_bits(x):
    octets = np.packbits(bit_rows(x)[:, ::-1], axis=1)[:, ::-1]
    return np.ascontiguousarray(octets).view(x.dtype).reshape(-1)


def leading_zeros(x):
    rows = bit_rows(x)
    return np.where(rows.any(1), rows.argmax(1), rows.shape[1]).astype(np.uint32)


def count_bits(blocks, instruction, active):
    """popc, clz: the result is always 32 bits wide."""
    unknown(instruction, instruction.modifiers, ())
    x = blocks.read(instruction.operands[1], "b" + instruction.types[-1][1:])
    count = bit_rows(x).sum(1) if instruction.opcode == "popc" else leading_zeros(x)
    blocks.write(instruction.operands[0], count.astype(np.uint32), "u32", active)


def find_highest_bit(blocks, instruction, active):
    """bfind: the position of the highest bit that differs from the sign, all ones if none."""
    unknown(instruction, instruction.modifiers, ("shiftamt",))
    x = blocks.read(instruction.operands[1], instruction.types[-1])
    x = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    zeros, width = leading_zeros(x), 8 * x.itemsize
    found = zeros if "shiftamt" in instruction.modifiers else np.uint32(width - 1) - zeros
    found = np.where(zeros == width, np.uint32(0xFFFFFFFF), found)
    blocks.write(instruction.operands[0], found.astype(np.uint32), "u32", active)


def low_mask(length, dtype):
    """`length` ones at the low end; all ones from the width on."""
    width = 8 * np.dtype(dtype).itemsize
    ones = (np.ones(1, dtype) << np.minimum(length, width - 1).astype(dtype)) - dtype(1)
    return np.where(length >= width, ~dtype(0), ones)


def extract_field(blocks, instruction, active):
    """bfe.{u,s}{32,64}."""
    kind = instruction.types[-1]
    dtype, width = UNSIGNED[WIDTHS[kind]], 8 * WIDTHS[kind]
    x = blocks.read(instruction.operands[1], "b" + kind[1:])
    start, length = (blocks.read(o, "u32") & np.uint32(0xFF) for o in instruction.operands[2:])
    field = np.where(start < width, x >> np.minimum(start, width - 1).astype(dtype), dtype(0))
    length = (
        np.minimum(length, np.where(start < width, width - start, 0)) if kind[0] == "s" else length
    )
    mask = low_mask(length, dtype)
    result = field & mask
    if kind[0] == "s":
        asked = blocks.read(instruction.operands[3], "u32") & np.uint32(0xFF)
        top = np.minimum(start.astype(np.int64) + asked - 1, width - 1).clip(0).astype(dtype)
        negative = ((x >> top) & dtype(1)).astype(bool) & (asked > 0)
        result = np.where(negative, result | ~mask, result)
    blocks.write(instruction.operands[0], result, "b" + kind[1:], active)


def insert_field(blocks, instruction, active):
    """bfi: the low bits of a, `length` of them, into b at `start`."""
    kind = instruction.types[-1]
    dtype, width = UNSIGNED[WIDTHS[kind]], 8 * WIDTHS[kind]
    x, base = (blocks.read(operand, kind) for operand in instruction.operands[1:3])
    start, length = (blocks.read(o, "u32") & np.uint32(0xFF) for o in instruction.operands[3:])
    shift = np.minimum(start, width - 1).astype(dtype)
    mask = np.where(start < width, low_mask(length, dtype) << shift, dtype(0))
    result = (base & ~mask) | ((x << shift) & mask)
    blocks.write(instruction.operands[0], result, kind, active)


def shift(blocks, instruction, active):
    """shl, shr: amounts are clamped at the width."""
    kind = instruction.types[-1]
    x, amount = (
        blocks.read(instruction.operands[1], kind),
        blocks.read(instruction.operands[2], "u32"),
    )
    width = 8 * x.itemsize
    within = np.minimum(amount, width - 1).astype(x.dtype)
    result = x << within if instruction.opcode == "shl" else x >> within
    if x.dtype.kind != "i" or instruction.opcode == "shl":
        result = np.where(amount < width, result, x.dtype.type(0))
    blocks.write(instruction.operands[0], result, kind, active)


def funnel_shift(instruction, kind, low, high, amount):
    unlimited = "wrap" in instruction.modifiers
    amount = amount & np.uint32(31) if unlimited else np.minimum(amount, np.uint32(32))
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    if "l" in instruction.modifiers:
        # A shift by 32 in two steps, for NumPy shifts 64-bit words by at most 63.
        return ((both << amount.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return (both >> amount.astype(np.uint64)).astype(np.uint32)


def permute_bytes(instruction, kind, low, high, selector):
    octets = np.stack([low, high], axis=1).view(np.uint8)
    result = np.zeros(len(low), np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        octet = np.take_along_axis(octets, (nibble & 7).astype(np.int64)[:, None], 1)[:, 0]
        octet = np.where(nibble & 8, np.where(octet & 0x80, 0xFF, 0), octet)
        result |= octet.astype(np.uint32) << np.uint32(8 * i)
    return result


def lookup_logic(instruction, kind, a, b, c, table):
    """lop3: bit (4 a + 2 b + c) of the table."""
    result, table = np.zeros_like(a), int(table[0])
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def move(blocks, instruction, active):
    """mov, with packing `{a, b} -> d` and unpacking `a -> {d, e}`."""
    unknown(instruction, instruction.modifiers, ())
    kind = instruction.types[-1]
    target, source = instruction.operands
    vector = next((o for o in instruction.operands if isinstance(o, Vector)), None)
    if vector is None:
        blocks.write(target, blocks.read(source, kind), kind, active)
        return
    part = f"b{8 * WIDTHS[kind] // len(vector.parts)}"
    if vector is source:
        parts = [lower(blocks.read(operand, part), part) for operand in source.parts]
        packed = np.ascontiguousarray(np.stack(parts, axis=1))
        blocks.write(
            target, packed.view(UNSIGNED[WIDTHS[kind]]).reshape(-1), "b" + kind[1:], active
        )
    else:
        whole = np.ascontiguousarray(blocks.read(source, "b" + kind[1:]))
        split = whole.view(UNSIGNED[WIDTHS[part]]).reshape(len(whole), -1)
        for i, operand in enumerate(target.parts):
            blocks.write(operand, split[:, i], part, active)


COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal},
    **{"hi": np.greater, "hs": np.greater_equal},
}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare(name, x, y):
    if x.dtype.kind != "f":
        return COMPARISONS[name](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    if name[-1] == "u" and name[:-1] in COMPARISONS:
        return COMPARISONS[name[:-1]](x, y) | unordered
    return COMPARISONS[name](x, y) & ~unordered


def comparison(blocks, instruction):
    """The comparison of setp and set, and what .and, .or, .xor combine it with."""
    name, *modifiers = instruction.modifiers
    unknown(instruction, modifiers, ("ftz", *COMBINATIONS))
    kind = instruction.types[-1]
    x, y = (blocks.read(operand, kind) for operand in instruction.operands[1:3])
    if "ftz" in modifiers:
        x, y = flush(x), flush(y)
    return compare(name, x, y)


def set_predicate(blocks, instruction, active):
    result = comparison(blocks, instruction)
    target = instruction.operands[0]
    parts = target.parts if isinstance(target, Pair) else (target,)
    if instruction.types[-1].endswith("x2"):
        results = [result[0::2], result[1::2]]
    else:
        results = [result, ~result]
    combine = next((COMBINATIONS[m] for m in instruction.modifiers if m in COMBINATIONS), None)
    if combine:
        third = blocks.read(instruction.operands[3], "pred")
        results = [combine(result, third) for result in results]
    for operand, result in zip(parts, results, strict=False):
        blocks.write(operand, result, "pred", active)


def set_number(blocks, instruction, active):
    """set: 1.0 or all ones where the comparison holds."""
    result = comparison(blocks, instruction)
    target, source = instruction.types[-2:]
    if len(instruction.operands) > 3:
        raise NotImplementedError(f"operands of {instruction}")
    if is_float(target):
        number = result.astype(np.float32)
    elif source.endswith("x2"):
        number = (result.astype(np.uint16) * np.uint16(0xFFFF)).view(np.uint32)
    else:
        number = result.astype(UNSIGNED[WIDTHS[target]]) * ~UNSIGNED[WIDTHS[target]](0)
    blocks.write(instruction.operands[0], number, target if is_float(target) else "b32", active)


def select(blocks, instruction, active):
    """selp (by a predicate) and slct (by the sign of the third operand)."""
    target, x, y, chooser = instruction.operands
    kind = instruction.types[0]
    if instruction.opcode == "selp":
        first = blocks.read(chooser, "pred")
    else:
        first = blocks.read(chooser, instruction.types[1]) >= 0
    x, y = (lower(blocks.read(operand, kind), kind) for operand in (x, y))
    blocks.write(target, np.where(first, x, y), "b" + str(8 * WIDTHS[kind]), active)


def logic(function):
    """and, or, xor, not: of predicates too."""

    def run(blocks, instruction, active):
        unknown(instruction, instruction.modifiers, ())
        kind = instruction.types[-1]
        operands = (blocks.read(operand, kind) for operand in instruction.operands[1:])
        blocks.write(instruction.operands[0], function(*operands), kind, active)

    return run


OPERATIONS = {
    "add": (simple(np.add), ROUNDED),
    "sub": (simple(np.subtract), ROUNDED),
    "mul": (multiply, (*ROUNDED, "lo", "hi")),
    "mad": (multiply_add, (*ROUNDED, "lo", "hi")),
    "fma": (multiply_add, ROUNDED),
    "div": (divide, ROUNDED),
    "rem": (simple(np.fmod), ()),
    "neg": (simple(np.negative), ROUNDED),
    "abs": (simple(np.abs), ROUNDED),
    "min": (extremum, ROUNDED),
    "max": (extremum, ROUNDED),
    "copysign": (lambda instruction, kind, x, y: np.copysign(y, x), ()),
    # The approximations are as exact as NumPy: a GPU may differ in the last bits.
    "rcp": (simple(reciprocal), ROUNDED),
    "sqrt": (simple(np.sqrt), ROUNDED),
    "rsqrt": (simple(lambda x: reciprocal(np.sqrt(x))), ROUNDED),
    "ex2": (simple(np.exp2), ROUNDED),
    "lg2": (simple(np.log2), ROUNDED),
    "sin": (simple(np.sin), ROUNDED),
    "cos": (simple(np.cos), ROUNDED),
    "tanh": (simple(np.tanh), ROUNDED),
    "brev": (simple(reverse_bits), ()),
    "shf": (funnel_shift, ("l", "r", "wrap", "clamp")),
    "prmt": (permute_bytes, ()),
    "lop3": (lookup_logic, ()),
}
PER_LANE = {
    **dict.fromkeys(OPERATIONS, arithmetic),
    **dict.fromkeys(("mul", "mad"), multiply_or_wide),
    **dict.fromkeys(("popc", "clz"), count_bits),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("selp", "slct"), select),
    "and": logic(np.bitwise_and),
    "or": logic(np.bitwise_or),
    "xor": logic(np.bitwise_xor),
    "not": logic(np.invert),
    "bfind": find_highest_bit,
    "bfe": extract_field,
    "bfi": insert_field,
    "mov": move,
    "setp": set_predicate,
    "set": set_number,
}
