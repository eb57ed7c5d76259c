"""`AtomicParallelism`: the points {<x nnz|row, y col>, r} of Sgap's space of sparse x dense
products on a GPU, as schedules; and the legal points of a problem.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction

from sgap_jax.schedules.explain import explain_point
from sgap_jax.schedules.point import (
    COLUMNS,
    GROUPS,
    MOST_SHARE,
    Point,
    algorithm,
    for_kernels,
    most_threads,
    nearest,
    unfit,
)
from sgap_jax.schedules.problem import TILED, Problem
from sgap_jax.schedules.schedule import GRID_X, GRID_Y, ScheduleError


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AtomicParallelism(Point):
    """A point of the atomic-parallelism space, printed as in the paper: {<1/8 row, 4 col>, 8}.

    Minimal data: one lane works on `nnz` nonzeros (or `row` rows) and `col` dense columns; 1/g of a
    row is a row shared by g lanes. Reduction parallelism: `group` lanes synchronise to add up their
    sums, in a parallel reduction if the group shares a row, and in a segment reduction, for each of
    several rows, if it shares a window of nonzeros.

    Attributes:
      nnz: nonzeros of a lane, a positive int; either this or row.
      row: rows of a lane, a positive int, or Fraction(1, g).
      col: dense columns of a lane, a positive int (for rows also Fraction(1, c)).
      group: r, the lanes that reduce together: 1, 2, 4, 8, 16 or 32.
      block_size: threads of a block, a multiple of 32 up to 1024.
      tile_size: dense columns of a block, a power of two times `col`; None takes all columns, up to
        what 32 lanes side by side cover.
      worker_dim_r: 1/w of the full parallelism over rows (or over windows of nonzeros): each group
        takes w neighbouring rows (windows), one after the other. Only for points with a group.
      chunk: cut rows of more than so many nonzeros into pieces of so many, for a group each; a
        second launch adds the sums of a row's pieces, in their order. For spmm and the points
        {<1 row, c col>, 1} and {<1/r row, c col>, r}; None walks each row whole.

    Raises:
      ScheduleError: not a point of the space, or an illegal point; the message names the rule and
        the nearest legal point.

    Source: Sgap, sections 3.2 and 3.3; the tunables are those of section 7.2 (groupSz is `group`,
    coarsenSz is `col`, workerSz is g).
    """

    def check(self, problem: Problem) -> None:
        self.check_sizes(problem)
        op = problem.op
        if self.chunk is not None and op != "spmm":
            raise ScheduleError(
                f"{self}: only spmm has kernels for pieces of rows; leave chunk out for {op}"
            )
        if self.chunk is not None and problem.nnz // self.chunk >= 2**30:
            raise ScheduleError(
                f"{self}: pieces of {problem.nnz} nonzeros have more sums than 2^31; give a larger "
                "chunk"
            )
        threads = most_threads(self, op, problem.dtype)
        if algorithm(self, op) is None or not threads:
            why = unfit(self, op) or (
                "" if threads else "what a lane holds does not fit in its registers"
            )
            near = nearest(self, op) + ("" if self.chunk is None else f" chunk={self.chunk}")
            raise NotImplementedError(
                f"{op}: no kernel for the legal point {self}{why and f' ({why})'}; the "
                f"nearest that has one is {near}"
            )
        if self.block_size > threads:
            raise ScheduleError(
                f"{self}: blocks have up to {threads} threads here, so that the sums of "
                f"{self.col} columns stay in registers"
            )
        run = for_kernels(self, op)
        if run != self:
            return run.check(problem)
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


def legal_points(problem: Problem, *, tunables: bool = False) -> Iterator[AtomicParallelism]:
    """The points that have a kernel for a problem, with 1, 2 or 4 columns for a lane and the fewest
    first; all amounts are powers of two. Points that run as another one are left out: those of
    whole rows with a group, and those of parts of columns.

    Args:
      problem: of any platform; points with more columns per lane than its `n` are left out.
      tunables: also every block of 128, 256 and 512 threads, every tile from one lane to all
        columns, and worker_dim_r of 1, 1/2 and 1/4, as Sgap tunes them (section 7.2).
    """
    on_cuda = dataclasses.replace(problem, platform="cuda")
    for col in (c for c in COLUMNS if c == 1 or c <= problem.n):
        pairs = list(itertools.product(GROUPS, GROUPS))
        amounts: list[dict] = [{"row": x, "group": r} for x, r in pairs if x <= 4]
        amounts += [{"nnz": g, "group": r} for g, r in pairs]
        amounts += [{"row": Fraction(1, g), "group": r} for g, r in pairs if g > 1 and g % r == 0]
        for amount in amounts:
            choices = _tunables(problem, col, amount) if tunables else [{}]
            for choice in choices:
                point = AtomicParallelism(col=col, **amount, **choice)
                try:
                    point.check(on_cuda)
                except (NotImplementedError, ScheduleError):
                    continue  # no kernel, or more tiles or blocks than a launch can have
                if for_kernels(point, problem.op) == point:
                    yield point


def _tunables(problem: Problem, col: int, amount: dict) -> Iterator[dict]:
    shared = amount["group"] > 1 or amount.get("row", 1) < 1
    walks = (Fraction(1), Fraction(1, 2), Fraction(1, 4)) if shared else (Fraction(1),)
    for size, walk in itertools.product((128, 256, 512), walks):
        if problem.op not in TILED:
            yield {"block_size": size, "worker_dim_r": walk}
            continue
        for chunks in (1, 2, 4, 8, 16, 32):
            reaches = chunks == 1 or chunks * col < 2 * problem.n
            if reaches and chunks * amount["group"] <= size:
                yield {"block_size": size, "tile_size": chunks * col, "worker_dim_r": walk}
