"""cvt: conversions between types, with their roundings (PTX ISA, section 9.7.9.21)."""

import numpy as np

from .arithmetic import DIRECTED, flush
from .values import LIFTED, is_float, round_mantissa, towards

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(blocks, instruction, active):
    modifiers = instruction.modifiers
    instruction.allow(*TO_INTEGER, *DIRECTED, "rn", "rna", "ftz", "sat", "relu")
    target, source = instruction.types[-2:]
    register, *operands = instruction.operands
    numbers = [blocks.read(operand, source) for operand in operands]
    if "ftz" in modifiers:
        numbers = [flush(number) for number in numbers]
    if target.endswith("x2"):
        # The first operand goes to the upper half.
        upper, lower_half = (limit(number, modifiers) for number in numbers)
        both = np.stack([lower_half, upper], axis=1).reshape(-1)
        blocks.write(register, round_to(both, target, modifiers, instruction), target, active)
        return
    (number,) = numbers
    if not is_float(target):
        if is_float(source):
            result = float_to_integer(number, target, modifiers)
        else:
            result = resize(number, target, "sat" in modifiers)
    elif is_float(source) and any(name in TO_INTEGER for name in modifiers):
        result = TO_INTEGER[next(m for m in modifiers if m in TO_INTEGER)](number)
    else:
        if not is_float(source) and (number.itemsize < 8 or target in ("bf16", "f16")):
            number = number.astype(np.float64)  # exact, so that only one rounding follows
        result = round_to(limit(number, modifiers), target, modifiers, instruction)
    if "ftz" in modifiers and is_float(target):
        result = flush(result)
    blocks.write(register, result, target, active)


def limit(number, modifiers):
    """Applies .sat (to [0, 1], NaN to 0) and .relu (negative to 0) to floating-point values."""
    if number.dtype.kind == "f" and "sat" in modifiers:
        number = np.fmin(np.fmax(number, number.dtype.type(0)), number.dtype.type(1))
    if "relu" in modifiers:
        number = np.where(number < 0, number.dtype.type(0), number)
    return number


def round_to(number, target, modifiers, instruction):
    """Rounds to the target: returns its lifted type, or values that `lower` rounds to nearest."""
    mode = next((name for name in modifiers if name in DIRECTED), None)
    if target == "tf32":
        rounded = round_mantissa(number, 10, ties_away="rna" in modifiers)
        return rounded.view(np.uint32)
    if mode is None or number.dtype == LIFTED[target]:
        return number
    if target.startswith("bf16") and mode == "rz":
        return (number.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if target.startswith("bf16") or number.dtype.kind != "f":
        raise NotImplementedError(f"rounding of {instruction}")
    return towards(number, LIFTED[target], mode)


def float_to_integer(number, target, modifiers):
    """Rounds and clamps to the integer range; NaN gives 0."""
    mode = next((m for m in modifiers if m in TO_INTEGER), None)
    if mode is None:
        raise NotImplementedError("cvt from float to integer without a rounding")
    rounded = TO_INTEGER[mode](number.astype(np.float64))
    limits = np.iinfo(LIFTED[target])
    low, high = rounded <= limits.min, rounded >= limits.max
    inside = np.where(low | high | np.isnan(rounded), 0, rounded)
    result = inside.astype(LIFTED[target])
    result = np.where(low, LIFTED[target](limits.min), result)
    return np.where(high, LIFTED[target](limits.max), result)


def resize(number, target, saturate):
    if saturate:
        limits, own = np.iinfo(LIFTED[target]), np.iinfo(number.dtype)
        number = np.clip(number, max(limits.min, own.min), min(limits.max, own.max))
    return number.astype(LIFTED[target])
