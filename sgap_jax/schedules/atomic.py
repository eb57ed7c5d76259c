"""Points {<x nnz|row, y col>, r} of Sgap's space of sparse x dense products on a GPU."""

from __future__ import annotations

import dataclasses

from sgap_jax.schedules.explain import explain_point
from sgap_jax.schedules.grid import GRID_X, GRID_Y
from sgap_jax.schedules.kernels import algorithm, nearest
from sgap_jax.schedules.point import MOST_SHARE, Point
from sgap_jax.schedules.problem import TILED, Problem
from sgap_jax.schedules.schedule import ScheduleError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtomicParallelism(Point):
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

    def check(self, problem: Problem) -> None:
        op = problem.op
        if algorithm(self, op) is None:
            raise NotImplementedError(
                f"{op}: no kernel for the legal point {self._point()}; the nearest that has one "
                f"is {nearest(self, op)}"
            )
        if self.workers_in_row > MOST_SHARE:
            raise ScheduleError(
                f"{self}: {self.workers_in_row} groups share a row; kernels go up to {MOST_SHARE}"
            )
        if self.tile_size is not None and op not in TILED:
            raise ScheduleError(
                f"{self}: only products have dense columns to tile; leave tile_size out for {op}"
            )
        self.check_kernel(problem, "cuda")
        self._check_grid(problem)

    def _check_grid(self, problem: Problem) -> None:
        tile = self.columns_of_block(problem.n)
        if problem.op in TILED and -(-problem.n // tile) > GRID_Y:
            raise ScheduleError(
                f"{self}: n = {problem.n} in tiles of {tile} columns exceeds the {GRID_Y} tiles "
                "of a launch; give a wider tile_size"
            )
        if self.blocks(problem) > GRID_X:
            raise ScheduleError(
                f"{self}: {self.blocks(problem)} blocks exceed the {GRID_X} of a launch; give "
                "each lane more rows or nonzeros"
            )

    def explain(self, problem: Problem) -> str:
        return explain_point(self, problem)
