"""The dtypes of a function's accumulator and indices."""

from __future__ import annotations

import math

import numpy as np

from sgap_jax.compiler.loop_ir.loopir import INTEGERS


def accumulator_of(dtype: str) -> str:
    """The dtype in which values of a dtype are summed."""
    return dtype if dtype in ("float64", *INTEGERS) else "float32"


def integer(value: float, dtype: str) -> int:
    """The integer that a Float stands for in an integer dtype; infinities are its limits."""
    limits = np.iinfo(dtype)
    if math.isinf(value):
        return int(limits.max if value > 0 else limits.min)
    return int(value)


def index_dtype(largest: int) -> str:
    """`Function.index`, from the largest size or product of sizes."""
    return "int64" if largest >= 2**31 - 2**12 else "int32"
