"""A point of the atomic-parallelism space as SDDMM, in words and loops."""

from sgap_jax.schedules.point import Point
from sgap_jax.schedules.problem import Problem


def explain_sddmm(point: Point, problem: Problem, kernel: str) -> str:
    """What a block, a group and a lane own, which lanes write, and the equivalent loops."""
    (m, k), c, r, share = problem.shape, int(point.col), point.group, point.workers_in_row
    groups = point.block_size // r
    lanes = f"{r} lanes share each nonzero of" if r > 1 else "one lane has each nonzero of"
    walk = f", {point.walk} in turn" if point.walk > 1 else ""
    if kernel == "nnz":
        along, owned = "nonzeros", int(point.nnz or 1) * point.walk
        block = f"{groups * owned} nonzeros"
        group = f"{lanes} a window of {point.nnz}{walk}"
    else:
        along, owned = "rows", max(int(point.row or 1), 1) * point.walk
        block = f"{groups * owned / share:g} rows' worth of work"
        group = f"{lanes} a row, {owned} rows in turn" if owned > 1 else f"{lanes} a row"
        group += f"; {share} groups share each row" if share > 1 else ""
    features = f"{c} features of every {r * c}" if r > 1 else f"all features, {c} at a time"
    lines = [
        f"{point}: sddmm of [{m}, {k}] with {problem.nnz} nonzeros, d = {problem.n}",
        f"grid:  {point.blocks(problem)} blocks along the {along}"
        + (f", for each of {problem.batch} products" if problem.batch > 1 else ""),
        f"block: {point.block_size} threads, {groups} groups: {block}",
        f"group: {group}",
        f"lane:  {features}" + ("" if kernel == "nnz" else "; those of X[i], where they fit, kept"),
        "write: one lane for each nonzero, a plain store; all threads, zeros in the padding",
        *(_of_windows(owned) if kernel == "nnz" else _of_rows(owned, share)),
        *(f"    {line}" if kernel == "nnz" else f"      {line}" for line in _dot(c, r)),
    ]
    return "\n".join(lines)


def _of_windows(owned: int) -> list[str]:
    return [
        f"parallel for p0 in range(0, nnz, {owned}):  # groups",
        f"  for p in range(p0, min(p0 + {owned}, nnz)):  # of row i",
    ]


def _of_rows(owned: int, share: int) -> list[str]:
    together = f", {share} for each row's nonzeros" if share > 1 else ""
    return [
        f"parallel for i0 in range(0, m, {owned}):  # groups{together}",
        f"  for i in range(i0, min(i0 + {owned}, m)):",
        "    for p in range(row_offsets[i], row_offsets[i + 1]):",
    ]


def _dot(c: int, r: int) -> list[str]:
    return [
        f"parallel for lane in range({r}):",
        "  acc[lane] = 0",
        f"  for l0 in range({c} * lane, d, {r * c}):  # l = l0..l0 + {c - 1}, below d",
        "    acc[lane] += X[i, l] * Y[column_indices[p], l]",
        f"values[p] = (sum over {r} lanes of acc[lane]) * weights[p] * scale  # where given",
    ]
