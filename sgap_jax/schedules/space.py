"""The legal points of a problem, enumerated."""

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction

from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.kernels import COLUMNS
from sgap_jax.schedules.point import GROUPS
from sgap_jax.schedules.problem import TILED, Problem
from sgap_jax.schedules.schedule import ScheduleError


def legal_points(problem: Problem, *, tunables: bool = False) -> Iterator[AtomicParallelism]:
    """The points that have a kernel for a problem: powers of two, from the narrowest columns on.

    Args:
      problem: on any platform; points with more columns per lane than it has are left out.
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
                    continue  # no kernel, or too many tiles or blocks for one launch
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
