"""Runs one PTX instruction in a kernel of its own; exact arithmetic to compare the result with."""

import math
from fractions import Fraction

import numpy as np

LANES = 96
CONSTRAINTS = {"uint16": "h", "uint32": "r", "int32": "r", "uint64": "l", "int64": "l"}
CONSTRAINTS |= {"float32": "f", "float64": "d"}
C_TYPES = {"uint16": "unsigned short", "uint32": "unsigned", "int32": "int", "float32": "float"}
C_TYPES |= {"uint64": "unsigned long long", "int64": "long long", "float64": "double"}


def one_instruction(launch, instruction, inputs, result):
    """Runs one instruction: "opcode", or text with $0 for the result and $1, $2, ... for the
    inputs."""
    if "$" not in instruction:
        slots = ", ".join(f"${i}" for i in range(len(inputs) + 1))
        instruction = f"{instruction} {slots};"
    text = instruction.replace("%", "%%").replace("$", "%")
    pointers = ", ".join(f"const {C_TYPES[x.dtype.name]}* x{i}" for i, x in enumerate(inputs))
    bound = ", ".join(f'"{CONSTRAINTS[x.dtype.name]}"(x{i}[t])' for i, x in enumerate(inputs))
    source = f"""
    extern "C" __global__ void one({pointers}, {C_TYPES[result]}* out) {{
      int t = blockIdx.x * blockDim.x + threadIdx.x;
      {C_TYPES[result]} r;
      asm volatile("{text}" : "={CONSTRAINTS[result]}"(r) : {bound});
      out[t] = r;
    }}"""
    return launch(source, LANES // 32, 32, *inputs, np.zeros(LANES, result))[-1]


def words(dtype, seed):
    """Random bits, with the extreme values of the type among them."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng(seed)
    numbers = np.frombuffer(random.bytes(LANES * dtype.itemsize), dtype).copy()
    limits = np.iinfo(dtype)
    numbers[:6] = [0, 1, limits.max, limits.min, limits.max - 1, 2]
    small = random.integers(0, 70, LANES // 3)
    numbers[LANES // 3 : LANES // 3 * 2] = small
    return random.permutation(numbers)


def reals(dtype, seed, special=True):
    """Floats of many magnitudes and near ties; with `special` also infinities, NaN, zeros and
    subnormals."""
    random = np.random.default_rng(seed)
    info = np.finfo(dtype)
    numbers = random.standard_normal(LANES) * 2.0 ** random.integers(-12, 12, LANES)
    numbers[::3] = random.integers(-64, 64, len(numbers[::3]))
    numbers[1::9] = 1 + float(info.eps) * random.integers(0, 4, len(numbers[1::9]))
    numbers = numbers.astype(dtype)
    if special:
        corners = [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            info.max,
            info.tiny,
            -info.tiny / 4,
            info.eps,
        ]
        numbers[: len(corners)] = np.array(corners).astype(dtype)
    return random.permutation(numbers)


# (bits of the significand, exponent of the least normal number, largest finite number)
BINARY = {
    "float16": (11, -14, Fraction(65504)),
    "bfloat16": (8, -126, Fraction(255 * 2**120)),
    "float32": (24, -126, Fraction(2**128 - 2**104)),
    "float64": (53, -1022, Fraction(2**1024 - 2**971)),
}


def rounded(number, name, mode="rn"):
    """Rounds the exact `number` to a binary format: to nearest even, or as mode rz, rm or rp."""
    bits, least, largest = BINARY[name]
    if number == 0:
        return 0.0
    exponent = least
    while abs(number) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - bits + 1)
    down = number / quantum // 1
    rest = number / quantum - down
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2)
    else:
        up = rest > 0 and (mode == "rp" or (mode == "rz" and number < 0))
    result = (down + (1 if up else 0)) * quantum
    if abs(result) > largest:
        away = mode == "rn" or (mode == "rp") == (result > 0) and mode != "rz"
        return (float("inf") if away else float(largest)) * (1 if result > 0 else -1)
    return math.copysign(float(result), number)


def exactly(function, name, mode="rn"):
    """Wraps a function of exact numbers: its result is rounded once; non-finite operands follow
    float64."""

    def run(*numbers):
        numbers = [float(number) for number in numbers]
        if all(np.isfinite(numbers)):
            exact = function(*map(Fraction, numbers))
            if exact == 0:  # the sign of zero comes from IEEE arithmetic
                return float(function(*map(np.float64, numbers)))
            return rounded(exact, name, mode)
        with np.errstate(all="ignore"):
            return float(function(*map(np.float64, numbers)))

    return run


def same_floats(computed, expected):
    expected = np.asarray(expected, computed.dtype)
    np.testing.assert_array_equal(np.isnan(computed), np.isnan(expected))
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(computed[real], expected[real])
    np.testing.assert_array_equal(np.signbit(computed[real]), np.signbit(expected[real]))
