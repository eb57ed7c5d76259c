"""Tiles of column vectors as vectorSparse computes them with wmma: its baseline on tensor cores."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sgap_jax.schedules.paper_tile import LENGTHS, PaperTile
from sgap_jax.schedules.problem import Problem


@dataclasses.dataclass(frozen=True)
class WarpTile(PaperTile):
    """The classic tiling on tensor cores: a warp computes V rows x 64 columns by wmma m8n32k16.

    Vectors are the left operand and gathered rows the right one, both through shared memory; with
    V < 8 rows of the tile are zeros. float16 and bfloat16, sums in float32, the same bits at each
    call. A row to compare with, to repeat the paper's figures: `choose_schedule` never picks it.

    Attributes:
      vector_length: V of the format, 2, 4 or 8.
      tile_k: vectors of a step of spmm, 16, 32, 48 or 64. sddmm takes 64 features a step.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.2 and 6.2 (TCU-based 1-D warp tiling).
    """

    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def __post_init__(self) -> None:
        self.check_field("vector_length", LENGTHS)
        self.check_field("tile_k", range(16, 65, 16))

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        if problem.op == "sddmm":
            return "\n".join(
                [
                    *self.heading(problem),
                    "lane:  loads 16 bytes of 2 rows of X and 8 of Y; one vector at the end",
                    "write: every lane, its vector, a plain store; zeros in the padding",
                    *self.sampled_loops(),
                    "    XS, YS = X[rows, l], Y[columns, l]  # in shared memory, zeros where none",
                    "    for s in range(0, 64, 16):          # wmma m8n32k16",
                    "      acc[v, q] += XS[v, s : s + 16] @ YS[q, s : s + 16].T",
                    "  values[q, v] = acc[v, q] * weights[q, v] * scale  # where given",
                ]
            )
        return "\n".join(
            [
                *self.heading(problem),
                f"lane:  loads 8 columns of {self.tile_k // 4} rows of B; stores 8 columns of 2 "
                "rows of C",
                "write: every lane, plain stores",
                *self.product_loops(),
                "    AS, BS = values[p], B[column_indices[p], j]  # in shared memory, zeros where "
                "none",
                f"    for s in range(0, {self.tile_k}, 16):  # wmma m8n32k16, for both halves of j",
                "      acc[v, j] += AS[s : s + 16, v].T @ BS[s : s + 16, j]",
                "  C[rows, j] = acc[v, j]",
            ]
        )
