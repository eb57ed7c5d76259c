"""Instructions whose operands and result are of one type (PTX ISA, sections 9.7.1 to 9.7.5)."""

import numpy as np

from .bitwise import WORD_OPERATIONS
from .values import LIFTED, WIDTHS, fused_multiply_add, is_float

ROUNDED = ("rn", "ftz", "sat", "approx", "full", "relu", "NaN", "noftz")
DIRECTED = ("rz", "rm", "rp")
SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(numbers):
    """Flushes subnormal float32 values to zeros of their sign."""
    if numbers.dtype != np.float32:
        return numbers
    return np.where(np.abs(numbers) < SMALLEST_NORMAL, np.copysign(np.float32(0), numbers), numbers)


def arithmetic(blocks, instruction, active):
    """d = f(a, b, c), all of one type."""
    function, accepted = OPERATIONS[instruction.opcode]
    instruction.allow(*accepted)
    kind = instruction.types[-1]
    if not is_float(kind) and "sat" in instruction.modifiers:
        raise NotImplementedError(f"saturation of {instruction}")
    operands = [blocks.read(operand, kind) for operand in instruction.operands[1:]]
    flushing = "ftz" in instruction.modifiers
    if flushing:
        operands = [flush(operand) for operand in operands]
    result = function(instruction, kind, *operands)
    if is_float(kind):
        if flushing:
            result = flush(result)
        if "sat" in instruction.modifiers:
            zero, one = result.dtype.type(0), result.dtype.type(1)
            result = np.fmin(np.fmax(result, zero), one)  # NaN becomes zero
        if "relu" in instruction.modifiers:
            result = np.where(np.isnan(result), result, np.fmax(result, result.dtype.type(0)))
    blocks.write(instruction.operands[0], result, kind, active)


def simple(function):
    return lambda instruction, kind, *operands: function(*operands)


def multiply(instruction, kind, x, y):
    return high_product(x, y) if "hi" in instruction.modifiers else x * y


def multiply_add(instruction, kind, x, y, z):
    if is_float(kind):
        mode = next((name for name in instruction.modifiers if name in DIRECTED), "rn")
        if mode != "rn" and kind != "f32":
            raise NotImplementedError(f"rounding of {instruction}")
        return fused_multiply_add(x, y, z, kind, mode)
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
    x, y = (
        blocks.read(operand, kind).astype(LIFTED[wide]) for operand in instruction.operands[1:3]
    )
    product = x * y
    if instruction.opcode == "mad":
        product = product + blocks.read(instruction.operands[3], wide)
    blocks.write(instruction.operands[0], product, wide, active)


def multiply_or_wide(blocks, instruction, active):
    wide = "wide" in instruction.modifiers
    (wide_product if wide else arithmetic)(blocks, instruction, active)


def divide(instruction, kind, x, y):
    # Exact once the remainder is subtracted; NumPy's own integer division rounds down.
    return x / y if is_float(kind) else (x - np.fmod(x, y)) // y


def extremum(instruction, kind, x, y):
    """min and max: the other operand wins against a NaN (unless .NaN), and -0 is less than +0."""
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


OPERATIONS = {
    "add": (simple(np.add), ROUNDED),
    "sub": (simple(np.subtract), ROUNDED),
    "mul": (multiply, (*ROUNDED, "lo", "hi")),
    "mad": (multiply_add, (*ROUNDED, "lo", "hi")),
    "fma": (multiply_add, (*ROUNDED, *DIRECTED)),
    "div": (divide, ROUNDED),
    "rem": (simple(np.fmod), ()),
    "neg": (simple(np.negative), ROUNDED),
    "abs": (simple(np.abs), ROUNDED),
    "min": (extremum, ROUNDED),
    "max": (extremum, ROUNDED),
    "copysign": (lambda instruction, kind, x, y: np.copysign(y, x), ()),
    # Approximate instructions are as exact as NumPy here: a GPU may differ in the last bits.
    "rcp": (simple(reciprocal), ROUNDED),
    "sqrt": (simple(np.sqrt), ROUNDED),
    "rsqrt": (simple(lambda x: reciprocal(np.sqrt(x))), ROUNDED),
    "ex2": (simple(np.exp2), ROUNDED),
    "lg2": (simple(np.log2), ROUNDED),
    "sin": (simple(np.sin), ROUNDED),
    "cos": (simple(np.cos), ROUNDED),
    "tanh": (simple(np.tanh), ROUNDED),
    **WORD_OPERATIONS,
}
