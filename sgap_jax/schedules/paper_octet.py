"""Tiles of column vectors by octets of lanes, to the letter of vectorSparse."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sgap_jax.schedules.paper_tile import LENGTHS, PaperTile
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import ScheduleError

_PARTIALS = ("registers", "shuffle")


@dataclasses.dataclass(frozen=True)
class PaperOctetTile(PaperTile):
    """The octet tiling as the paper has it, on mma.m8n8k4: a warp computes V rows x 64 columns.

    Operands are exchanged: gathered rows are the left one, loaded as they come, 16 bytes a lane and
    eight lanes a line of 128 bytes; vectors are the right one, of which V < 8 leaves a part idle.
    float16, sums in float32, the same bits at each call. The instruction is Volta's: for sm_80 and
    later it compiles to shuffles and multiply-adds, and no tensor core works. A row to compare
    with, to repeat the paper's figures: `choose_schedule` never picks it, and `OctetTile` is the
    same idea for the mma of sm_80 and later.

    Attributes:
      vector_length: V of the format, 2, 4 or 8.
      tile_k: vectors of a tile of spmm, a multiple of 4 from 4 to 64. sddmm takes 64 features a
        step.
      partials: what sddmm does about half of the products, which come with the lanes of low and
        high groups inverted. "registers": sums of their own, exchanged at the end, "mma (reg)" of
        the paper's Figure 19. "shuffle": the lanes exchange the operands before, "mma (shfl)".
        The third, "mma (arch)", needs a tensor core that was never built.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.3, 5.4, 6.3 and 6.4 (TCU-based 1-D octet tiling).
    """

    tile_k: int = 32
    partials: str = "registers"

    dtypes: ClassVar[tuple[str, ...]] = ("float16",)

    def __post_init__(self) -> None:
        self.check_field("vector_length", LENGTHS)
        self.check_field("tile_k", range(4, 65, 4))
        if self.partials == "arch":
            raise ScheduleError(
                "PaperOctetTile: partials='arch' needs the switch within a tensor core that "
                "vectorSparse, section 6.3, proposes and nobody built; there are "
                "'registers' and 'shuffle'"
            )
        self.check_field("partials", _PARTIALS)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.op != "sddmm":
            self.check_default(problem, "partials", "only sddmm has inverted products")

    def explain(self, problem: Problem) -> str:
        self.check(problem)
        heading = self.heading(problem)
        loops = self._sampled() if problem.op == "sddmm" else self._product()
        return "\n".join([*heading, *loops])

    def _product(self) -> list[str]:
        return [
            "lane:  columns 8g..8g + 7 of every 4th row of B from t on (g = lane / 4, t = lane % "
            "4); at the end of 2 rows of C",
            "write: every lane, plain stores",
            *self.product_loops(),
            "    AS, columns = values[p], column_indices[p]  # in shared memory, zeros where none",
            "    for s in range(0, len(AS), 4):              # 2 mma.m8n8k4; all loads first",
            "      acc[v, j].T += B[columns[s : s + 4], j].T @ AS[s : s + 4, v]",
            "  C[rows, j] = acc[v, j]",
        ]

    def _sampled(self) -> list[str]:
        remedy = {
            "registers": "acc[1] of l in 32..63, exchanged between lanes l and l + 16 at the end",
            "shuffle": "lanes l and l + 16 exchange their features 32..63 of X and Y before",
        }[self.partials]
        return [
            "lane:  features 8g..8g + 7 of row t, and 8g'..8g' + 7 of row t + 4, g' = (g + 4) % 8 "
            "(g = lane / 4, t = lane % 4); one vector at the end",
            "write: every lane, its vector, a plain store; zeros in the padding",
            *self.sampled_loops(),
            "    for s in range(0, 32, 8):  # 4 mma.m8n8k4, of 16 features in each octet",
            "      acc[v, s : s + 8].T += Y[columns[s : s + 8], l] @ X[rows, l].T",
            f"      # {remedy}",
            "  values[q, v] = (sum over 4 octets of acc[v, q]) * weights[q, v]"
            " * scale  # where given",
        ]
