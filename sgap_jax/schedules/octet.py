"""Tiles of column vectors on tensor cores: the 1-D octet tiling of vectorSparse."""

from __future__ import annotations

import dataclasses

from sgap_jax.schedules.octet_sddmm import check_sddmm, explain_sddmm
from sgap_jax.schedules.octet_spmm import check_spmm, explain_spmm
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import ScheduleError
from sgap_jax.schedules.vector_tile import VectorTile

_DTYPES = ("float16", "bfloat16", "float32")
_CHECKS = {"spmm": check_spmm, "sddmm": check_sddmm}


@dataclasses.dataclass(frozen=True)
class OctetTile(VectorTile):
    """One warp multiplies tiles of column vectors by gathered rows, on tensor cores.

    Operands are swapped and transposed: the gathered dense rows are the 16-row operand of an mma
    and the vectors the 8-column one, so V = 8 wastes nothing, V = 16 and 32 share what was
    gathered among 2 and 4 of them, and V < 8 leaves columns idle. float16 and bfloat16 use
    m16n8k16, float32 m16n8k8 in tf32; sums are carried in float32.

    Attributes:
      vector_length: V of the format, 2, 4, 8, 16 or 32.
      tile_n: what a warp computes for a block row: dense columns (spmm, a multiple of 64) or
        vectors (sddmm, a multiple of 16).
      tile_k: of the reduction in one step, a multiple of 16: vectors (spmm), features (sddmm; a
        lane loads 16 bytes of a row at once where 64 divide the bytes of a step, else 8).
      stages: steps whose loads are under way at once, 1 to 4.
      row_warps: warps that share a block row, each taking every row_warps-th step (spmm); their
        sums are added in order, so the bits are the same at each call. 1, 2, 4, 8 or 16.
      swizzle: block rows are taken longest first (spmm), for patterns with a few long ones; costs a
        sort of the block rows at each call, and changes no bit of the result.
      tf32: float32 operands may be rounded to 10 bits of mantissa; without it float32 is refused.

    Raises:
      ScheduleError: a field is out of its range.

    Source: vectorSparse, sections 5.3 and 6.3 (there m8n8k4 of sm_70), re-derived for the mma of
    sm_80 and later.
    """

    tile_n: int = 64
    tile_k: int = 16
    stages: int = 1
    row_warps: int = 1
    swizzle: bool = False
    tf32: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("vector_length", (2, 4, 8, 16, 32)),
            ("tile_n", range(16, 513, 16)),
            ("tile_k", range(16, 129, 16)),
            ("stages", range(1, 5)),
            ("row_warps", (1, 2, 4, 8, 16)),
        ):
            self.check_field(name, allowed)
        for name in ("swizzle", "tf32"):
            value = getattr(self, name)
            if type(value) is not bool:
                raise ScheduleError(f"OctetTile: {name} must be a bool, got {value!r}")

    def check(self, problem: Problem) -> None:
        self.check_vectors(problem)
        if problem.dtype not in _DTYPES:
            raise NotImplementedError(
                f"{problem.op}: {self}: tensor cores have no {problem.dtype} with float32 sums; "
                f"cast to one of {', '.join(_DTYPES)} or leave the schedule out"
            )
        if problem.dtype == "float32" and not self.tf32:
            raise ScheduleError(
                f"{problem.op}: {self} would round float32 to the 10 bits of tf32; allow it with "
                "tf32=True, or leave the schedule out"
            )
        _CHECKS[problem.op](self, problem)

    def transposed(self) -> None:
        """The transpose of column vectors is row vectors, which share no gathered row."""
        return None

    def explain(self, problem: Problem) -> str:
        explain = explain_sddmm if problem.op == "sddmm" else explain_spmm
        return explain(self, problem)
