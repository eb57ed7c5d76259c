"""The schedule of the CPU kernels."""

import dataclasses

from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Schedule, ScheduleError


@dataclasses.dataclass(frozen=True)
class CpuTile(Schedule):
    """Dense columns in tiles, nonzeros in chunks; a chunk of one tile is the unit of parallel work.

    Attributes:
      columns: dense columns of one pass over the sparse operand; 0 takes all of them in one pass.
        A narrower tile keeps its k x columns slab of the dense operand in cache; a wider one reads
        the sparse operand fewer times. Only spmm tiles its columns.
      nonzeros: nonzeros (and rows) of one task; a row of two tasks' worth is split. Task
        boundaries depend on this and on the structure, never on the number of threads, so results
        are the same bits for any number of threads.
      packed: copy each slab of the dense operand to memory of its own first (as much as that
        operand, for the time of the call; XLA's memory analysis does not count it). Rows of a slab
        that follow each other use all of a cache, rows a power of two apart a few of its sets; the
        copy pays where each row is used some 40 times.
    """

    columns: int = 0
    nonzeros: int = 8192
    packed: bool = False

    def __post_init__(self) -> None:
        for field, least in (("columns", 0), ("nonzeros", 1)):
            value = getattr(self, field)
            # Index arrays are int32, so no more can be meant; larger ones overflow in the kernels.
            if type(value) is not int or not least <= value < 2**31:
                raise ScheduleError(
                    f"CpuTile: {field} must be an int in [{least}, 2**31), got {value!r}"
                )
        if type(self.packed) is not bool:
            raise ScheduleError(f"CpuTile: packed must be a bool, got {self.packed!r}")
        if self.packed and self.columns == 0:
            raise ScheduleError("CpuTile: packed=True copies tiles; say how wide, e.g. columns=32")

    def check(self, problem: Problem) -> None:
        if problem.op != "spmm" and self.columns != 0:
            raise ScheduleError(
                f"CpuTile: only spmm has dense columns to tile; use columns=0 for {problem.op}"
            )
        self.check_kernel(problem, "cpu")

    def explain(self, problem: Problem) -> str:
        if problem.format.startswith("CVS") and problem.op in ("spmm", "sddmm"):
            return self._explain_vectors(problem)
        if problem.op == "spmm":
            tile = self.columns if 0 < self.columns < problem.n else problem.n
            pack = f"parallel: copy B to slabs of {tile} columns\n" if self.packed else ""
            return (
                f"{pack}for j0 in range(0, {problem.n}, {tile}):          # slab of B in cache\n"
                f"  parallel for chunk of {self.nonzeros} nonzeros:\n"
                "    for i in rows of chunk:               # a split row is summed in order\n"
                f"      acc[0:{tile}] = 0                     # registers\n"
                "      for p in range(row_offsets[i], row_offsets[i + 1]):\n"
                f"        acc[:] += values[p] * B[column_indices[p], j0:j0+{tile}]\n"
                f"      C[i, j0:j0+{tile}] = acc"
            )
        if problem.op == "sddmm":
            return (
                f"parallel for chunk of {self.nonzeros} nonzeros:\n"
                "  for p in chunk:                         # row i of p by binary search\n"
                f"    values[p] = dot(X[i, 0:{problem.n}], Y[column_indices[p], 0:{problem.n}])"
            )
        return (
            f"parallel for chunk of {self.nonzeros} nonzeros:\n"
            f"  for i in rows of chunk: {problem.op}"
        )

    def _explain_vectors(self, problem: Problem) -> str:
        V = int(problem.format[4:-1])
        chunk = f"parallel for chunk of {max(self.nonzeros // V, 1)} vectors:"
        if problem.op == "sddmm":
            return (
                f"{chunk}\n"
                f"  for p in chunk:                         # of block row b, several at once\n"
                f"    for v in range({V}):\n"
                f"      values[p, v] = dot(X[{V} * b + v, 0:{problem.n}], "
                f"Y[column_indices[p], 0:{problem.n}])"
            )
        tile = self.columns if 0 < self.columns < problem.n else problem.n
        pack = f"parallel: copy B to slabs of {tile} columns\n" if self.packed else ""
        head = f"{pack}for j0 in range(0, {problem.n}, {tile}):\n  {chunk}\n"
        if problem.permuted:
            return (
                f"{head}    for i in columns of chunk:            # split ones summed in order\n"
                f"      acc[0:{tile}] = 0                     # registers\n"
                "      for q in range(column_offsets[i], column_offsets[i + 1]):\n"
                f"        for v in range({V}):\n"
                f"          acc[:] += values[permutation[q], v] * "
                f"B[{V} * row_indices[q] + v, j0:j0+{tile}]\n"
                f"      C[i, j0:j0+{tile}] = acc"
            )
        return (
            f"{head}    for b in block rows of chunk:         # a split one is summed in order\n"
            f"      acc[0:{V}, 0:{tile}] = 0                # registers, up to 8 rows a pass\n"
            "      for p in range(row_offsets[b], row_offsets[b + 1]):\n"
            f"        for v in range({V}):\n"
            f"          acc[v, :] += values[p, v] * B[column_indices[p], j0:j0+{tile}]\n"
            f"      C[{V} * b : {V} * (b + 1), j0:j0+{tile}] = acc"
        )

    def __str__(self) -> str:
        packed = ", packed=True" if self.packed else ""
        return f"CpuTile(columns={self.columns}, nonzeros={self.nonzeros}{packed})"
