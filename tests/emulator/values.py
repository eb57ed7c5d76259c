"""PTX types in NumPy, and the roundings that NumPy lacks.

A register holds bits (uint16, uint32, uint64, or bool for a predicate). `lift` turns bits into
values of a type, `lower` turns values into bits. Packed types (f16x2, bf16x2) lift into arrays of
twice the length, so that NumPy computes on the halves as on any other values.
"""

from fractions import Fraction

import numpy as np

WIDTHS = {
    **{f"{kind}{8 * width}": width for kind in "usb" for width in (1, 2, 4, 8)},
    "b128": 16,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "tf32": 4,
    "f64": 8,
    "f16x2": 4,
    "bf16x2": 4,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOATS = {"f16": np.float16, "f16x2": np.float16, "f32": np.float32, "f64": np.float64}
LIFTED = {
    name: FLOATS.get(name, (SIGNED if name[0] == "s" else UNSIGNED).get(width))
    for name, width in WIDTHS.items()
}


def is_float(kind):
    return "f" in kind


def bits(number, kind):
    """The bits of an immediate or argument `number` of type `kind`, as an array of one element."""
    if kind in ("bf16", "f16") and isinstance(number, float):
        return lower(np.array([number], np.float32), kind)
    if kind in FLOATS and isinstance(number, float):
        return np.array([number], FLOATS[kind]).view(UNSIGNED[WIDTHS[kind]])
    width = WIDTHS[kind]
    return np.array([int(number) & ((1 << 8 * width) - 1)], UNSIGNED[width])


def lift(storage, kind):
    """Bits -> values. bfloat16 becomes float32, which holds it exactly."""
    if kind in ("bf16", "bf16x2"):
        halves = storage.view(np.uint16).astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32)
    return storage.view(LIFTED[kind])


def lower(numbers, kind):
    """Values -> bits, rounded to nearest even. float64 values may have been rounded to odd
    before."""
    if kind in ("bf16", "bf16x2"):
        stored = round_bfloat16(numbers)
    else:
        stored = np.ascontiguousarray(numbers, LIFTED[kind])
    return stored.view(UNSIGNED[WIDTHS[kind]])


def round_bfloat16(numbers):
    """float32 or float64 -> bfloat16 bits, to nearest even, in one rounding."""
    single = numbers.astype(np.float32)
    if numbers.dtype == np.float64:
        single = keep_inexact(single, numbers)
    word = single.view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint16(0x7FFF), rounded.astype(np.uint16))


def keep_inexact(single, exact):
    """Round to odd: `single` (the nearest to `exact`) with the last bit set if it is not exact."""
    word = single.view(np.uint32).copy()
    inexact = (single != exact) & np.isfinite(exact)
    # The nearest may lie beyond the exact value: step back towards zero before setting the bit.
    beyond = inexact & (np.abs(single.astype(np.float64)) > np.abs(exact))
    word -= beyond.astype(np.uint32)
    return (word | inexact.astype(np.uint32)).view(np.float32)


def round_mantissa(numbers, kept_bits, ties_away=False):
    """float32 -> float32 with `kept_bits` mantissa bits (10: tf32, as cvt.rn or cvt.rna say)."""
    word, drop = numbers.view(np.uint32), np.uint32(23 - kept_bits)
    half = np.uint32(1 << (int(drop) - 1))
    bias = half if ties_away else half - np.uint32(1) + ((word >> drop) & np.uint32(1))
    rounded = ((word + bias) >> drop) << drop
    return np.where(np.isfinite(numbers), rounded, word).astype(np.uint32).view(np.float32)


def sum_to_odd(x, y):
    """float64 x + y, rounded to odd: a second rounding to a narrower type is then exact.

    Boldo and Melquiond, Emulation of FMA and correctly rounded sums, IEEE TC 57(4), section 3.
    """
    total = x + y
    back = total - x
    error = (x - (total - back)) + (y - back)
    word = np.atleast_1d(total).view(np.int64)
    fix = (error != 0) & ((word & 1) == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (word + np.where(fix, step, 0)).view(np.float64)


def towards(exact, dtype, mode):
    """Rounds float64 values, possibly rounded to odd before, to `dtype` by mode .rz, .rm or .rp."""
    nearest = exact.astype(dtype)
    near, exact = nearest.astype(np.float64), exact.astype(np.float64)
    if mode == "rz":
        wrong, target = np.abs(near) > np.abs(exact), dtype(0)
    elif mode == "rm":
        wrong, target = near > exact, dtype(-np.inf)
    else:
        wrong, target = near < exact, dtype(np.inf)
    return np.where(wrong, np.nextafter(nearest, target), nearest)


def fused_multiply_add(x, y, z, kind, mode="rn"):
    """x y + z in one rounding."""
    if mode != "rn":
        return fma_directed(x, y, z, mode)
    if kind == "f64":
        return fma_float64(x, y, z)
    if kind != "f32":
        return sum_to_odd(x.astype(np.float64) * y, z.astype(np.float64))
    product = x.astype(np.float64) * y
    total = product + z
    # Two roundings differ from one only if the first lands on a midpoint of float32.
    if ((total.view(np.uint64) & np.uint64(0xFFFFFFF)) == 0).any():
        total = sum_to_odd(product, z.astype(np.float64))
    return total.astype(np.float32)


def fma_directed(x, y, z, mode):
    """A directed-rounding float32 fma, which accurate exponentials need."""
    product = x.astype(np.float64) * y
    total = sum_to_odd(product, z.astype(np.float64))
    if mode == "rm":  # the zero of two opposite numbers is negative
        positive = ~np.signbit(product) & ~np.signbit(z)
        total = np.where((total == 0) & ~positive, -0.0, total)
    return towards(total, np.float32, mode)


def split_product(x, y):
    """x y = high + low exactly (Dekker, with Veltkamp's splitting)."""
    high = x * y
    parts = []
    for value in (x, y):
        scaled = value * 134217729.0  # 2^27 + 1
        upper = scaled - (scaled - value)
        parts.append((upper, value - upper))
    (a, b), (c, d) = parts
    return high, ((a * c - high) + a * d + b * c) + b * d


def fma_float64(x, y, z):
    """fma in float64 (Boldo and Melquiond, section 5); near overflow or underflow by exact
    fractions."""
    x, y, z = np.broadcast_arrays(x, y, z)
    high, low = split_product(x, y)
    upper = z + low
    back = upper - z
    lower_part = (z - (upper - back)) + (low - back)
    total = high + upper
    back = total - high
    rest = (high - (total - back)) + (upper - back)
    result = total + sum_to_odd(rest, lower_part)
    plain = x * y + z
    zero = (x == 0) | (y == 0)
    extreme = (np.abs(plain) > 1e290) | (np.abs(high) > 1e290) | (np.abs(high) < 1e-270)
    extreme |= (np.abs(x) > 1e290) | (np.abs(y) > 1e290)
    result = np.where(extreme | zero | ~np.isfinite(plain), plain, result)
    extreme &= ~zero & np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    for i in np.flatnonzero(extreme):
        result[i] = exact_fma(float(x[i]), float(y[i]), float(z[i]))
    return result


def exact_fma(x, y, z):
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return x * y + z
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
