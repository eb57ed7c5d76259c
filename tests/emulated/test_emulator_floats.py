"""Floating-point instructions of the emulator against exact arithmetic, rounded once."""

from fractions import Fraction

import numpy as np
import pytest
from one_instruction import BINARY, LANES, exactly, one_instruction, reals, rounded, same_floats

ROUNDED = [
    *[("add.rn", 2, lambda a, b: a + b), ("sub.rn", 2, lambda a, b: a - b)],
    *[("mul.rn", 2, lambda a, b: a * b), ("fma.rn", 3, lambda a, b, c: a * b + c)],
]


@pytest.mark.parametrize("suffix, dtype", [("f32", "float32"), ("f64", "float64")])
@pytest.mark.parametrize("opcode, count, function", ROUNDED, ids=[case[0] for case in ROUNDED])
def test_one_rounding(launch, opcode, count, function, suffix, dtype):
    inputs = [reals(dtype, seed) for seed in range(count)]
    computed = one_instruction(launch, f"{opcode}.{suffix}", inputs, dtype)
    reference = exactly(function, dtype)
    same_floats(computed, [reference(*(x[i] for x in inputs)) for i in range(LANES)])


# x y = 1 + half a unit in the last place, exactly: 2^24 + 1 = 24929 x 673, 2^53 + 1 = 321 x ...
MIDPOINTS = {"float32": (24929, 673, 24), "float64": (321, 28059810762433, 53)}


@pytest.mark.parametrize("dtype", MIDPOINTS)
def test_fma_where_two_roundings_differ_from_one(launch, dtype):
    """x y + z just beside a midpoint: rounded twice, in any type, it would tie to even."""
    x, y, bits = MIDPOINTS[dtype]
    sign, scale = np.where(np.arange(LANES) % 2, 1, -1), 2.0 ** -(np.arange(LANES) + bits)
    x = np.full(LANES, x, dtype)
    y = (y * 2.0**-bits * sign).astype(dtype)
    z = (scale * np.where(np.arange(LANES) // 2 % 2, 1, -1)).astype(dtype)
    computed = one_instruction(launch, f"fma.rn.f{8 * x.itemsize}", [x, y, z], dtype)
    reference = exactly(lambda a, b, c: a * b + c, dtype)
    same_floats(computed, [reference(x[i], y[i], z[i]) for i in range(LANES)])
    assert len(np.unique(np.abs(computed))) == 2  # both neighbours of the midpoint


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_fma_rounded_towards_one_side(launch, mode):
    x, y, z = (reals("float32", seed) for seed in range(3))
    x[:4], y[:4], z[:4] = [1, 1, 3e38, -3e38], [1, -1, 2, 2], [-1, 1, 1, 1]  # zeros, overflows
    z[4:40] = 2.0 ** -np.arange(36) * np.where(np.arange(36) % 2, 1, -1)
    computed = one_instruction(launch, f"fma.{mode}.f32", [x, y, z], "float32")
    expected = [
        exactly(lambda a, b, c: a * b + c, "float32", mode)(*n) for n in zip(x, y, z, strict=True)
    ]
    if mode == "rm":
        expected[:2] = [-0.0, -0.0]
    same_floats(computed, expected)


BITS = {"float16": "uint16", "float32": "uint32", "float64": "uint64"}


def to_bits(numbers, name):
    """Converts float64 values that the format represents exactly to its bits."""
    if name == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return numbers.astype(name).view(BITS[name])


def from_bits(bits, name):
    if name == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view(name).astype(np.float64)


def halves(name, seed):
    """Random values of a 16-bit format, as float64."""
    numbers = reals("float32", seed).astype(np.float64)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(numbers), numbers, 0)
    held = np.array([rounded(Fraction(number), name) for number in finite])
    return np.where(np.isfinite(numbers), held, numbers)


HALF_TYPES = [("f16", "float16"), ("bf16", "bfloat16")]
HALVES = [
    *[("add", 2, lambda a, b: a + b), ("mul", 2, lambda a, b: a * b)],
    *[("sub", 2, lambda a, b: a - b), ("fma.rn", 3, lambda a, b, c: a * b + c)],
]


@pytest.mark.parametrize("packed", [False, True], ids=["scalar", "x2"])
@pytest.mark.parametrize("suffix, name", HALF_TYPES)
@pytest.mark.parametrize("opcode, count, function", HALVES, ids=[case[0] for case in HALVES])
def test_halves(launch, opcode, count, function, suffix, name, packed):
    if name == "bfloat16" and "fma" not in opcode and launch.architecture == "compute_80":
        pytest.skip("before sm_90, bfloat16 has fma only")
    low = [halves(name, seed) for seed in range(count)]
    high = [halves(name, seed + 10) for seed in range(count)]
    reference = exactly(function, name)
    if packed:
        both = [np.stack(pair, axis=1).reshape(-1) for pair in zip(low, high, strict=True)]
        inputs = [to_bits(x, name).view(np.uint32) for x in both]
        computed = one_instruction(launch, f"{opcode}.{suffix}x2", inputs, "uint32")
        computed = from_bits(computed.view(np.uint16), name)
    else:
        both = low
        inputs = [to_bits(x, name) for x in both]
        computed = from_bits(one_instruction(launch, f"{opcode}.{suffix}", inputs, "uint16"), name)
    expected = [reference(*(x[i] for x in both)) for i in range(len(both[0]))]
    same_floats(computed, expected)


def least(a, b):
    """PTX min: NaN loses against the other operand, and -0 is less than 0."""
    if np.isnan(a) or np.isnan(b):
        return b if np.isnan(a) else a
    return min(a, b, key=lambda x: (x, not np.signbit(x)))


@pytest.mark.parametrize("opcode", ["min", "max", "min.NaN", "max.NaN"])
@pytest.mark.parametrize("suffix, dtype", [("f32", "float32"), ("f64", "float64")])
def test_extrema(launch, opcode, suffix, dtype):
    if opcode.endswith("NaN") and suffix == "f64":
        pytest.skip("no .NaN for f64")
    x, y = reals(dtype, 1), reals(dtype, 2)
    x[:8] = [0, -0.0, np.nan, 1, np.nan, -0.0, 0, -1]
    y[:8] = [-0.0, 0, 1, np.nan, np.nan, -0.0, 0, 1]
    computed = one_instruction(launch, f"{opcode}.{suffix}", [x, y], dtype)
    sign = 1 if opcode.startswith("min") else -1
    expected = [sign * least(sign * a, sign * b) for a, b in zip(x, y, strict=True)]
    if opcode.endswith("NaN"):
        expected = np.where(np.isnan(x) | np.isnan(y), np.nan, expected)
    same_floats(computed, expected)


ORDERED = {
    **{"eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b},
    **{"le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b},
}


@pytest.mark.parametrize("name", [*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan"])
def test_comparisons_of_floats(launch, name):
    x, y = reals("float32", 1), reals("float32", 2)
    x[:20], y[10:30] = y[:20], np.nan
    text = "{ .reg .pred p, q, r; setp.ge.f32 r, $1, 0f00000000; "
    text += f"setp.{name}.and.f32 p|q, $1, $2, r; selp.b32 $0, 1, 0, p; @q add.s32 $0, $0, 2; }}"
    computed = one_instruction(launch, text, [x, y], "int32")
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        holds = unordered if name == "nan" else ~unordered
    elif name in ORDERED:
        holds = ORDERED[name](x, y) & ~unordered
    else:
        holds = ORDERED[name[:-1]](x, y) | unordered
    np.testing.assert_array_equal(computed, (holds & (x >= 0)) + 2 * (~holds & (x >= 0)))


NARROWING = [
    *[("f16.f32", "float32", "float16"), ("bf16.f32", "float32", "bfloat16")],
    *[("f16.f64", "float64", "float16"), ("f32.f64", "float64", "float32")],
]


@pytest.mark.parametrize("types, source, target", NARROWING, ids=[case[0] for case in NARROWING])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_narrowing(launch, types, source, target, mode):
    if mode in ("rm", "rp") and target == "bfloat16" or (types == "f16.f64" and mode != "rn"):
        pytest.skip("no such conversion")
    x = reals(source, 1)
    x[40:60] = 1 + np.arange(20) * 2.0 ** (-BINARY[target][0] - 1)  # ties and their neighbours
    result = "float32" if target == "float32" else "uint16"
    computed = one_instruction(launch, f"cvt.{mode}.{types}", [x], result)
    computed = computed if target == "float32" else from_bits(computed, target)
    exact = [
        np.copysign(rounded(Fraction(float(number)), target, mode), number)
        if np.isfinite(number)
        else number
        for number in x
    ]
    same_floats(computed, exact)


@pytest.mark.parametrize("suffix, name", HALF_TYPES)
def test_narrowing_of_two(launch, suffix, name):
    x, y = reals("float32", 1), reals("float32", 2)
    x, y = np.nan_to_num(x), np.nan_to_num(y)
    computed = one_instruction(launch, f"cvt.rn.{suffix}x2.f32", [x, y], "uint32")
    pairs = np.stack([y, x], axis=1).reshape(-1)  # the first operand is the upper half
    expected = [np.copysign(rounded(Fraction(float(n)), name), n) for n in pairs]
    same_floats(from_bits(computed.view(np.uint16), name), expected)


def test_tf32(launch):
    x = reals("float32", 1)
    word = x.view(np.uint32).astype(np.uint64)
    rounded_away = ((word + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)
    computed = one_instruction(launch, "cvt.rna.tf32.f32", [x], "uint32").view(np.float32)
    same_floats(computed, np.where(np.isfinite(x), rounded_away, x))


MODES = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target, dtype", [("s32", "int32"), ("u32", "uint32"), ("s64", "int64")])
def test_float_to_integer(launch, mode, target, dtype):
    x = reals("float32", 3)
    x[:4] = [0.5, 1.5, -2.5, 3e38]
    x = x[~np.isnan(x)] if dtype == "int64" else x
    x = np.resize(x, LANES)
    computed = one_instruction(launch, f"cvt.{mode}.{target}.f32", [x], dtype)
    limits = np.iinfo(dtype)
    whole = [0 if np.isnan(n) else n for n in MODES[mode](x.astype(np.float64))]
    expected = [max(limits.min, min(limits.max, int(np.clip(n, -1e30, 1e30)))) for n in whole]
    np.testing.assert_array_equal(computed, np.array(expected, dtype))


@pytest.mark.parametrize("types, source", [("f32.s32", "int32"), ("f32.u64", "uint64")])
def test_integer_to_float(launch, types, source):
    x = np.frombuffer(np.random.default_rng(1).bytes(LANES * np.dtype(source).itemsize), source)
    computed = one_instruction(launch, f"cvt.rn.{types}", [x.copy()], "float32")
    same_floats(computed, [rounded(Fraction(int(number)), "float32") for number in x])


APPROXIMATE = {
    **{"rcp.approx.f32": lambda x: 1 / x, "sqrt.approx.f32": np.sqrt, "ex2.approx.f32": np.exp2},
    **{"lg2.approx.f32": np.log2, "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x)},
    **{"rcp.rn.f32": lambda x: 1 / x, "sqrt.rn.f32": np.sqrt, "tanh.approx.f32": np.tanh},
    **{"abs.f32": np.abs, "neg.f32": np.negative, "cvt.rni.f32.f32": np.rint},
    "ex2.approx.ftz.f32": lambda x: np.where(x < -126, 0, np.exp2(x)),
}


@pytest.mark.parametrize("instruction", APPROXIMATE)
def test_functions(launch, instruction):
    x = reals("float32", 4)
    computed = one_instruction(launch, instruction, [x], "float32")
    with np.errstate(all="ignore"):
        expected = APPROXIMATE[instruction](x.astype(np.float64)).astype(np.float32)
    if "ftz" in instruction:
        expected = np.where(np.abs(expected) < 2.0**-126, np.float32(0), expected)
    np.testing.assert_allclose(computed, expected, rtol=3e-7, atol=1e-44)


def test_division(launch):
    x, y = reals("float32", 1, special=False), reals("float32", 2, special=False)
    y = np.where(y == 0, np.float32(3), y)
    computed = one_instruction(launch, "div.rn.f32", [x, y], "float32")
    quotient = exactly(lambda a, b: a / b, "float32")
    same_floats(computed, [quotient(*pair) for pair in zip(x, y, strict=True)])


def test_saturation_and_flushing(launch):
    x, y = reals("float32", 1), reals("float32", 2)
    x[:2], y[:2] = [1e-30, 3e-39], [1e-10, 1.0]
    with np.errstate(all="ignore"):
        saturated = np.nan_to_num(np.clip(x + y, 0, 1), nan=0)
        product = x * y
    computed = one_instruction(launch, "add.sat.f32", [x, y], "float32")
    np.testing.assert_array_equal(computed, saturated)
    flushed = one_instruction(launch, "mul.rn.ftz.f32", [x, y], "float32")
    subnormal = np.abs(product) < 2.0**-126
    assert (subnormal & (product != 0)).any()
    np.testing.assert_array_equal(flushed, np.where(subnormal, 0, product))
