"""A point of the atomic-parallelism space in words and loops, for an operation on rows."""

from sgap_jax.schedules.kernels import side_by_side
from sgap_jax.schedules.point import Point
from sgap_jax.schedules.problem import Problem


def explain_rows(point: Point, problem: Problem) -> str:
    """What a block, a group and a lane own, which lanes write, and the equivalent loops. A lane
    that has whole rows is a group of its own."""
    if problem.vector_length is not None:
        return _explain_vectors(point, problem, problem.vector_length)
    r, rows = point.group, max(int(point.row or 1), 1) * point.walk
    groups = point.block_size // r
    turns = f", {rows} rows in turn" if rows > 1 else ""
    whole = problem.op in ("row_sum", "row_max")
    lines = [
        f"{point}: {problem.op} of {problem.shape[0]} rows with {problem.nnz} nonzeros",
        f"grid:  {point.blocks(problem)} blocks along the rows"
        + (f", for each of {problem.batch} products" if problem.batch > 1 else ""),
        f"block: {point.block_size} threads, {groups} groups: {groups * rows} rows",
        f"group: {f'{r} lanes share a row' if r > 1 else 'one lane has a row'}{turns}",
        f"lane:  {f'every {r}-th nonzero' if r > 1 else 'all nonzeros'} of the row",
        "write: lane 0 of each group, a plain store"
        if whole
        else "write: every lane, its own nonzeros, plain stores; all threads, zeros in the padding",
        f"parallel for i0 in range(0, m, {rows}):  # groups",
        f"  for i in range(i0, min(i0 + {rows}, m)):",
        f"    parallel for lane in range({r}):",
        *(f"      {line}" for line in _ROW_LANE[problem.op].format(r=r).splitlines()),
        *(f"    {line}" for line in _ROW_GROUP[problem.op].format(r=r).splitlines()),
    ]
    return "\n".join(lines)


def _explain_vectors(point: Point, problem: Problem, length: int) -> str:
    """The same where a row is number i % V of the vectors of a block row."""
    r, rows = point.group, max(int(point.row or 1), 1) * point.walk
    side, whole = side_by_side(length, r), problem.op in ("row_sum", "row_max")
    turns = f", {rows} such sets in turn" if rows > 1 else ""
    lines = [
        f"{point}: {problem.op} of {problem.shape[0]} rows with {problem.nnz} nonzeros in vectors "
        f"of {length}",
        f"group: {f'{r} lanes share a row' if r > 1 else 'one lane has a row'}; {side} rows of a "
        f"vector lie side by side, in {side * r} lanes of a warp{turns}",
        f"lane:  one number of {f'every {r}-th' if r > 1 else 'each'} vector",
        "write: lane 0 of each group, a plain store"
        if whole
        else "write: every lane, its own numbers, plain stores; all threads, zeros in the padding",
        "parallel for i in range(m):  # groups; b, v = divmod(i, V)",
        f"  parallel for lane in range({r}):",
        *(f"    {_of_vectors(line)}" for line in _ROW_LANE[problem.op].format(r=r).splitlines()),
        *(f"  {_of_vectors(line)}" for line in _ROW_GROUP[problem.op].format(r=r).splitlines()),
    ]
    return "\n".join(lines)


def _of_vectors(line: str) -> str:
    line = line.replace("values[p]", "values[p, v]").replace("out[p]", "out[p, v]")
    return line.replace("row_offsets[i", "row_offsets[b")


_ENTRIES = "for p in range(row_offsets[i] + lane, row_offsets[i + 1], {r}):\n"
_ROW_LANE = {
    "row_sum": "acc[lane] = 0\n" + _ENTRIES + "  acc[lane] += values[p]",
    "row_max": "acc[lane] = -inf\n" + _ENTRIES + "  acc[lane] = max(acc[lane], values[p])",
    "row_broadcast": _ENTRIES + "  values[p] = rows[i]",
    "sparse_softmax": "peak[lane], acc[lane] = -inf, 0\n"
    + _ENTRIES
    + "  old, peak[lane] = peak[lane], max(peak[lane], scale * values[p])\n"
    "  acc[lane] = acc[lane] * exp(old - peak[lane]) + exp(scale * values[p] - peak[lane])",
}
_ROW_GROUP = {
    "row_sum": "rows[i] = sum over {r} lanes of acc[lane]",
    "row_max": "rows[i] = max over {r} lanes of acc[lane]",
    "row_broadcast": "",
    "sparse_softmax": "greatest = max over {r} lanes of peak[lane]\n"
    "total = sum over {r} lanes of acc[lane] * exp(peak[lane] - greatest)\n"
    "parallel for lane in range({r}):\n"
    "  "
    + _ENTRIES
    + "    out[p] = exp(scale * values[p] - greatest) / total  # values kept in registers if few",
}
