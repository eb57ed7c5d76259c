"""Points {<x nnz|row, y col>, r} of Sgap's space of sparse x dense products on a GPU."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from sgap_jax.schedules import kernels
from sgap_jax.schedules.grid import GRID_X, GRID_Y
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError

GROUPS = (1, 2, 4, 8, 16, 32)  # lanes of a warp that can reduce together
TUNABLES = ("block_size", "tile_size", "worker_dim_r")  # beyond the paper's notation
_TILE_CHUNKS = 32  # at most so many lanes side by side along the dense columns of a block
_MOST_SHARE = 1024  # groups that share a row, and rows or windows that one group takes in turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtomicParallelism(Schedule):
    """A point of the atomic-parallelism space, printed as in the paper: {<1/8 row, 4 col>, 8}.

    Minimal data: one lane works on `nnz` nonzeros (or `row` rows) and `col` dense columns; 1/g of a
    row is a row shared by g lanes. Reduction parallelism: `group` lanes synchronise; they add up
    what belongs to one row (a parallel reduction, where the group shares a row) or to each of
    several rows (a segment reduction, where it shares a window of nonzeros).

    Attributes:
      nnz: nonzeros of a lane, a positive int; either this or row.
      row: rows of a lane, a positive int, or Fraction(1, g).
      col: dense columns of a lane, a positive int (for rows also Fraction(1, c)).
      group: r, the lanes that reduce together: 1, 2, 4, 8, 16 or 32.
      block_size: threads of a block, a multiple of 32 up to 1024.
      tile_size: dense columns of a block, a power of two times `col`; None takes all columns where
        32 lanes side by side reach that far.
      worker_dim_r: share 1/w of the full parallelism over rows (or over windows of `group`
        nonzeros): each group walks w neighbours, one after the other. Points with a group only.

    Raises:
      ScheduleError: not a point of the space, or an illegal one; names the rule and the nearest
        legal point.

    Source: Sgap, sections 3.2 and 3.3; the tunables are those of section 7.2 (groupSz is `group`,
    coarsenSz is `col`, workerSz is g).
    """

    nnz: int | Fraction | None = None
    row: int | Fraction | None = None
    col: int | Fraction = 1
    group: int = 1
    block_size: int = 256
    tile_size: int | None = None
    worker_dim_r: int | Fraction = 1

    def __post_init__(self) -> None:
        if (self.nnz is None) == (self.row is None):
            raise ScheduleError("AtomicParallelism: give either nnz= or row= (Sgap, section 3.2)")
        for name in ("nnz", "row", "col"):
            self._check_amount(name)
        if type(self.group) is not int or self.group not in GROUPS:
            raise ScheduleError(
                f"AtomicParallelism: group must be one of {GROUPS} (lanes of a warp, Sgap section "
                f"3.2), got {self.group!r}"
            )
        self._check_rules()
        self._check_tunables()

    def _check_amount(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "col":
            return
        fits = type(value) in (int, Fraction) and 0 < value < 2**31
        if not fits or (value.numerator != 1 and value.denominator != 1):
            raise ScheduleError(
                f"AtomicParallelism: {name} must be a positive int g or Fraction(1, g) (Sgap, "
                f"section 3.2), got {value!r}"
            )

    def _check_rules(self) -> None:
        """The three rules of section 3.3. Rule 2 as printed, r >= g, contradicts the paper's own
        Table 1 (g = 32, r = 8): r > g or r not dividing g is what mixes rows in one reduction."""
        share, whole_col = self._row_share, max(Fraction(self.col), Fraction(1))
        if self.nnz is not None and (self.nnz < 1 or self.col < 1):
            broken = "rule 1: a nonzero and its product with one dense element cannot be divided"
            nearest = f"<{max(Fraction(self.nnz), Fraction(1))} nnz, {whole_col} col>, {self.group}"
        elif self.row is not None and self.row < 1 and self.col < 1:
            broken = "rule 3: parallel lanes multiply rows or columns, not both"
            nearest = f"<{self.row} row, 1 col>, {math.gcd(share, self.group)}"
        elif self.row is not None and self.row < 1 and share % self.group:
            broken = "rule 2: a group reduces within one row, so r must divide g"
            nearest = f"<{self.row} row, {self.col} col>, {math.gcd(share, self.group)}"
        else:
            return
        raise ScheduleError(
            f"{self._point()} is illegal by {broken} (Sgap, section 3.3); "
            f"nearest legal point: {{{nearest}}}"
        )

    def _check_tunables(self) -> None:
        size, tile, workers = self.block_size, self.tile_size, self.worker_dim_r
        if type(size) is not int or size % 32 or not 32 <= size <= 1024:
            raise ScheduleError(
                f"{self._point()}: block_size must be a multiple of 32 in [32, 1024], got {size!r}"
            )
        chunks = None if tile is None or type(tile) is not int else Fraction(tile) / self.col
        if tile is not None and (chunks is None or not _is_power_of_two(chunks)):
            raise ScheduleError(
                f"{self._point()}: tile_size must be a power of two times col, got {tile!r}"
            )
        if chunks is not None and chunks * self.group > size:
            raise ScheduleError(
                f"{self._point()}: tile_size={tile} takes {chunks} groups of {self.group} lanes, "
                f"more than block_size={size}"
            )
        fits = type(workers) in (int, Fraction) and 0 < workers <= 1
        share = 1 / Fraction(workers) if fits else Fraction(0)
        if not _is_power_of_two(share) or share > _MOST_SHARE:
            raise ScheduleError(
                f"{self._point()}: worker_dim_r must be 1 or Fraction(1, w), w a power of two up "
                f"to {_MOST_SHARE} (Sgap, section 7.2), got {workers!r}"
            )
        if workers != 1 and self.group == 1 and (self.row is None or self.row >= 1):
            raise ScheduleError(
                f"{self._point()}: worker_dim_r={workers} is for points whose lanes share a row or "
                "a window; give each lane more rows or nonzeros instead"
            )

    @property
    def _row_share(self) -> int:
        """g: lanes that share a row."""
        return Fraction(self.row or 1).denominator

    @property
    def deterministic(self) -> bool:
        """Whether a product has the same bits at each call: no output is added to by several
        groups. (The other operations add nothing up across groups: theirs always has.)"""
        return self.row is not None and (self.row >= 1 or self._row_share == self.group)

    @property
    def workers_in_row(self) -> int:
        """g / r: groups that share a row, and add into one output where there is one; else 1."""
        return max(self._row_share // self.group, 1)

    @property
    def walk(self) -> int:
        """Rows (or windows of nonzeros) that a group takes one after the other."""
        return Fraction(self.worker_dim_r).denominator

    def columns_of_block(self, n: int) -> int:
        """Dense columns of a block for a product of n columns."""
        if self.tile_size is not None:
            return self.tile_size
        chunks = -(-max(n, 1) // int(self.col))
        widest = min(_TILE_CHUNKS, 1 << (self.block_size // self.group).bit_length() - 1)
        return min(1 << (chunks - 1).bit_length(), widest) * int(self.col)

    def check(self, problem: Problem) -> None:
        op = problem.op
        if kernels.algorithm(self, op) is None:
            raise NotImplementedError(
                f"{op}: no kernel for the legal point {self._point()}; the nearest that has one "
                f"is {kernels.nearest(self, op)}"
            )
        if self.workers_in_row > _MOST_SHARE:
            raise ScheduleError(
                f"{self}: {self.workers_in_row} groups share a row; kernels go up to {_MOST_SHARE}"
            )
        if self.tile_size is not None and op not in kernels.TILED:
            raise ScheduleError(
                f"{self}: only products have dense columns to tile; leave tile_size out for {op}"
            )
        self.check_kernel(problem, "cuda")
        self._check_grid(problem)

    def _check_grid(self, problem: Problem) -> None:
        tile = self.columns_of_block(problem.n)
        if problem.op in kernels.TILED and -(-problem.n // tile) > GRID_Y:
            raise ScheduleError(
                f"{self}: n = {problem.n} in tiles of {tile} columns exceeds the {GRID_Y} tiles "
                "of a launch; give a wider tile_size"
            )
        if self.blocks(problem) > GRID_X:
            raise ScheduleError(
                f"{self}: {self.blocks(problem)} blocks exceed the {GRID_X} of a launch; give "
                "each lane more rows or nonzeros"
            )

    def blocks(self, problem: Problem) -> int:
        """Blocks along the sparse operand: a function of shapes and capacity only."""
        tiled = problem.op in kernels.TILED
        chunks = self.columns_of_block(problem.n) // int(self.col) if tiled else 1
        if self.row is not None:
            groups = -(-problem.shape[0] // (max(int(self.row), 1) * self.walk))
            groups *= self.workers_in_row
        else:
            # The lanes of a group have nonzeros of their own, or features of the same ones.
            group = self.group if tiled else 1
            groups = -(-problem.nnz // (int(self.nnz or 1) * group * self.walk))
        return max(-(-groups * chunks * self.group // self.block_size), 1)

    def explain(self, problem: Problem) -> str:
        from sgap_jax.schedules.explain import explain_point

        return explain_point(self, problem)

    def _point(self) -> str:
        data = f"{self.nnz} nnz" if self.nnz is not None else f"{self.row} row"
        return f"{{<{data}, {self.col} col>, {self.group}}}"

    def __str__(self) -> str:
        tunables = [
            f" {field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name in TUNABLES and getattr(self, field.name) != field.default
        ]
        return self._point() + "".join(tunables)


def _is_power_of_two(value: Fraction) -> bool:
    return value.denominator == 1 and value > 0 and value.numerator & (value.numerator - 1) == 0
