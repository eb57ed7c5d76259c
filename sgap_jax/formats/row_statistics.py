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

    Rounded, they let similar patterns share programs. Patterns without a long row, and traced ones,
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


@dataclasses.dataclass(frozen=True, eq=False)
class PatternStatistics:
    """The statistics of a pattern's rows and of its columns, None where there are none.

    Static data of a pytree, of which all are equal: they choose a schedule and change no result, so
    that patterns of one shape and capacity can be stacked, carried and selected whatever they
    store. Where such patterns share a compiled program, those of the first one have chosen.
    """

    rows: RowStatistics | None = None
    columns: RowStatistics | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PatternStatistics)

    def __hash__(self) -> int:
        return hash(PatternStatistics)

    @property
    def T(self) -> PatternStatistics:
        return PatternStatistics(self.columns, self.rows)


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


def of_pattern(offsets: Any, transposed: Any) -> PatternStatistics:
    """The statistics by the offsets over the outer dimension, and those over the inner one."""
    return PatternStatistics(of_offsets(offsets), of_offsets(transposed))


def _rounded(value: float) -> float:
    """The nearest power of 2, by ratio."""
    return 2.0 ** round(math.log2(value)) if value > 0 else 0.0
