"""`RowStatistics`: how unequal the rows of a pattern are, as far as the choice of a schedule needs
it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

_LONG = 256  # entries of the longest row: shorter ones are walked in microseconds
_UNEQUAL = 8  # times the mean: the longest row of a pattern that counts as skewed


@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """Statistics of the lengths of a pattern's rows, each rounded to a power of 2.

    They are static: part of what `jax.jit` compares, so that a program is compiled for skewed rows.
    The rounding lets similar patterns share programs. Patterns without a long row, and traced ones,
    have none.

    Attributes:
      mean: stored entries (or vectors) of a row.
      deviation: the standard deviation of that.
      longest: entries of the longest row.
    """

    mean: float
    deviation: float
    longest: int

    def __post_init__(self) -> None:
        for name in ("mean", "deviation", "longest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(
                    f"RowStatistics: {name}: expected a number from 0 on, got {value!r}"
                )


def of_offsets(offsets: Any) -> RowStatistics | None:
    """The statistics of the rows with these concrete NumPy offsets, None unless the longest one is
    8 times the mean and has 256 entries."""
    if offsets.shape[0] < 2:
        return None
    lengths = offsets[1:] - offsets[:-1]
    longest, mean = int(lengths.max()), float(lengths.mean())
    if longest < max(_LONG, _UNEQUAL * mean):
        return None
    rounded = RowStatistics(_rounded(mean), _rounded(float(lengths.std())), 0)
    return dataclasses.replace(rounded, longest=int(_rounded(longest)))


def of_pattern(offsets: Any, transposed: Any) -> tuple[RowStatistics | None, ...] | None:
    """The statistics of rows and of columns, in the order of the arrays; None if neither has any.

    `transposed` are the offsets of the other orientation, or None."""
    found = of_offsets(offsets), None if transposed is None else of_offsets(transposed)
    return None if found == (None, None) else found


def _rounded(value: float) -> float:
    """The nearest power of 2, by ratio."""
    return 2.0 ** round(math.log2(value)) if value > 0 else 0.0
