"""Explains points of the atomic-parallelism space, in words and as equivalent loops: for SpMM,
SDDMM and the operations on rows."""

import dataclasses
import math

from sgap_jax.schedules.point import Point, algorithm, for_kernels, side_by_side
from sgap_jax.schedules.problem import ROW_OPS, Problem
from sgap_jax.schedules.schedule import Schedule


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
        *notes(point, problem),
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


def explain_rows(point: Point, problem: Problem) -> str:
    """As `explain_point`, for the operations on rows. A lane that has whole rows is explained as a
    group of one lane."""
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
    """As `explain_rows`, for vectors of V: row i is row i % V of the vectors in block row
    i // V."""
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


# The most of a matrix that may be stored for a sparse product to be faster than a dense one, by
# vector length (1 for entries), as predicted for an H100 and 128 to 256 columns or features; not
# measured. benchmarks/gpu/dense.py derives it: the model's times of default kernels, against the
# best dense tiling times a factor from published crossings on a V100 (vectorSparse, Figure 4 and
# section 7.2.1). Dense products in float32 are those in full precision, not TF32.
MOST_STORED = {
    ("spmm", True): {1: 0.09, 2: 0.06, 4: 0.18, 8: 0.37, 16: 0.56},
    ("spmm", False): {1: 0.09, 8: 0.2},
    ("sddmm", True): {1: 0.02, 4: 0.16, 8: 0.23},
    ("sddmm", False): {1: 0.06},
}
# The same for up to _FEW columns, whose dense product takes as long as the matrix takes to be read.
MOST_STORED_OF_FEW = {("spmm", False): {1: 0.3}}
_FEW = 31


def notes(schedule: Schedule, problem: Problem) -> list[str]:
    """What the statistics of a problem say of a schedule on CUDA: of skewed rows, and whether a
    dense product is expected to be faster."""
    if problem.platform != "cuda" or problem.symbolic:
        return []
    lines = []
    if (rows := problem.rows) is not None:
        share = "lanes have equal shares of the nonzeros, however long a row is"
        if (chunk := getattr(schedule, "chunk", None)) is not None:
            share = (
                f"it is cut into {-(-rows.longest // chunk)} pieces, and no lanes walk more than "
                f"{chunk} entries"
            )
        elif getattr(schedule, "nnz", None) is None:
            share = "its own lanes walk the longest row, however long it is"
        lines.append(
            f"skew:  rows of about {rows.mean:g} entries, deviation {rows.deviation:g}, the "
            f"longest {rows.longest}: {share}"
        )
    if dense := dense_is_faster(problem):
        lines.append(f"dense: {dense}")
    return lines


def dense_is_faster(problem: Problem) -> str:
    """A sentence, where a dense product on CUDA is expected to be faster; else empty."""
    size, most = math.prod(problem.shape), _most_stored(problem)
    if most is None or not problem.nnz > most * size > 0:
        return ""
    return (
        f"{problem.nnz / size:.2g} of the matrix is stored: a dense product (A.todense() @ B) is "
        f"likely faster; sparse ones are predicted to be faster from {1 - most:.0%} of zeros on "
        "(on an H100; docs/predicted.md)"
    )


def _most_stored(problem: Problem) -> float | None:
    """The most of the matrix that may be stored for a sparse product to pay; None if nothing is
    predicted."""
    half = problem.dtype in ("float16", "bfloat16")
    if not half and problem.dtype != "float32":
        return None
    known = (MOST_STORED_OF_FEW if problem.n <= _FEW else MOST_STORED).get((problem.op, half), {})
    lengths = [length for length in known if length <= (problem.vector_length or 1)]
    return known[max(lengths)] if lengths else None


def explain_point(point: Point, problem: Problem) -> str:
    """What a block, a group and a lane own, which lanes write, and the equivalent loops."""
    kernel = algorithm(point, problem.op)
    if kernel is None:
        return f"{point}: a legal point that no kernel of {problem.op} implements"
    if (run := for_kernels(point, problem.op)) != point:
        return f"{point}: the same lanes as\n{explain_point(run, problem)}"
    if point.chunk is not None and not problem.symbolic and problem.nnz <= point.chunk:
        whole = dataclasses.replace(point, chunk=None)
        return f"{point}: no row is longer than a piece, so as\n{explain_point(whole, problem)}"
    if problem.op in ROW_OPS:
        return explain_rows(point, problem)
    if problem.op == "sddmm":
        return explain_sddmm(point, problem, kernel)
    m, n = problem.shape[0], problem.n
    tile = point.columns_of_block(n)
    groups = point.block_size // point.group
    chunks = tile // int(point.col)
    tiles = max(-(-n // tile), 1)
    lines = [
        f"{point}: {problem.op} of [{m}, {problem.shape[1]}] with {problem.nnz} nonzeros, n = {n}",
        f"grid:  {point.blocks(problem)} x {tiles} blocks: sparse operand x tiles of {tile} columns"
        + (f", for each of {problem.batch} products" if problem.batch > 1 else ""),
        f"block: {point.block_size} threads, {groups} groups; {chunks} groups side by side cover "
        f"{tile} columns of {_of_block(point, groups, chunks)}",
        f"group: {_of_group(point, kernel)}",
        f"lane:  {_of_lane(point, kernel)}",
        f"write: {_write(point, kernel, problem.op)}",
        *notes(point, problem),
        _loops(point, kernel, problem.op, tile, n),
    ]
    return "\n".join(lines)


def _of_block(point: Point, groups: int, chunks: int) -> str:
    workers = groups / chunks
    if point.chunk is not None:
        return f"{workers:g} pieces of rows"
    if point.row is not None:
        each = max(int(point.row), 1) * point.walk
        return f"{workers * each / point.workers_in_row:g} rows' worth of work"
    return f"{workers * int(point.nnz or 1) * point.group * point.walk:g} nonzeros"


def _of_group(point: Point, kernel: str) -> str:
    columns = f"x {point.col} columns"
    walk = f", {point.walk} of them in turn" if point.walk > 1 else ""
    return {
        "row": f"one lane: {point.row} rows {columns}",
        "row_pieces": f"{'one lane has' if point.group == 1 else f'{point.group} lanes share'} a "
        f"row, or a piece of {point.chunk} nonzeros of a longer one, {columns}",
        "nnz": f"one lane: {point.nnz} consecutive nonzeros {columns}",
        "row_group": f"{point.group} lanes share a row {columns}{walk}"
        + (f"; {point.workers_in_row} groups share each row" if point.workers_in_row > 1 else ""),
        "nnz_group": f"{point.group} lanes share a window of "
        f"{int(point.nnz or 1) * point.group} nonzeros {columns}{walk}",
    }[kernel]


def _of_lane(point: Point, kernel: str) -> str:
    share = point.workers_in_row * point.group
    return {
        "row": f"all nonzeros of its {point.row} rows",
        "row_pieces": f"every {share}-th nonzero of the piece" if share > 1 else "all of the piece",
        "nnz": f"its {point.nnz} nonzeros, over every row that they touch",
        "row_group": f"every {share}-th nonzero of the row" if share > 1 else "all of the row",
        "nnz_group": f"{point.nnz} consecutive nonzeros of each window"
        if point.nnz != 1
        else "one nonzero of each window",
    }[kernel]


def _write(point: Point, kernel: str, op: str) -> str:
    shared = "atomic add where a row reaches beyond, else a plain store; C starts as zeros"
    if op == "gspmm":
        shared = (
            "a plain store, of a row that reaches beyond to partial results, which a second launch "
            "combines"
        )
    return {
        "row": "every lane, plain stores",
        "row_pieces": "lane 0 of each group, a plain store: of whole rows to C, of pieces to "
        "partial sums, which a second launch adds in their order",
        "nnz": f"every lane, at each end of a row: {shared}",
        "row_group": "lane 0 of each group, "
        + ("a plain store" if point.deterministic else "atomic add; C starts as zeros"),
        "nnz_group": f"the first lane of each row in a window: {shared}"
        + ("" if point.nnz == 1 else "; rows within one lane: that lane, a plain store"),
    }[kernel]


def _loops(point: Point, kernel: str, op: str, tile: int, n: int) -> str:
    c, r, share = point.col, point.group, point.workers_in_row * point.group
    g = int(point.nnz or 1)
    head = (
        f"parallel for k0 in range(0, {n}, {tile}):  # blocks\n"
        f"  parallel for kc in range(k0, k0 + {tile}, {c}):  # groups; k = kc..kc + {c - 1}\n"
    )
    product = "values[p] * B[column_indices[p], k]"
    add, total, to = (f"+= {product}", "sum", "C[i, k] +=")
    start, merge = "acc[k] = 0", ""
    if op == "gspmm":
        add, total = "= the better of it and X[column_indices[p], k] op values[p]", "best"
        to, start = "C[i, k], or partial[window of p, k] =", "acc[k] = none"
        merge = (
            "\n  parallel for i in rows of several windows, or of none:  # the second launch\n"
            "    C[i, k] = best over its windows w of partial[w, k]"
        )
    body = {
        "row": (
            f"    parallel for i0 in range(0, m, {point.row}):  # lanes\n"
            f"      for i in range(i0, min(i0 + {point.row}, m)):\n"
            "        acc[k] = 0\n"
            "        for p in range(row_offsets[i], row_offsets[i + 1]):\n"
            f"          acc[k] {add}\n"
            "        C[i, k] = acc[k]"
        ),
        "row_group": (
            f"    parallel for i in range(m):  # {share // r} groups a row, "
            f"{point.walk} rows a group\n"
            f"      parallel for lane in range({share}):\n"
            "        acc[lane, k] = 0\n"
            f"        for p in range(row_offsets[i] + lane, row_offsets[i + 1], {share}):\n"
            f"          acc[lane, k] {add}\n"
            f"      C[i, k] {'=' if share == r else '+='} {total} over {r} lanes of acc[lane, k]"
        ),
        "row_pieces": (
            "    parallel for (i, first, last, place) in pieces:  # made of the row offsets\n"
            f"      parallel for lane in range({r}):\n"
            "        acc[lane, k] = 0\n"
            f"        for p in range(first + lane, last, {r}):\n"
            f"          acc[lane, k] {add}\n"
            f"      C[i, k], or partial[place, k] = sum over {r} lanes of acc[lane, k]\n"
            "    parallel for (i, first, last) in rows of several pieces:  # the second launch\n"
            "      C[i, k] = sum over first <= place < last of partial[place, k]"
        ),
        "nnz": (
            f"    parallel for p0 in range(0, nnz, {point.nnz}):  # lanes\n"
            f"      for p in range(p0, min(p0 + {point.nnz}, nnz)):\n"
            f"        acc[k] {add}\n"
            "        where the row i of p ends, or at the last p:\n"
            f"          {to} acc[k];  {start}{merge}"
        ),
        "nnz_group": (
            f"    parallel for w0 in range(0, nnz, {g * r}):  # windows, {point.walk} a group\n"
            f"      parallel for p0 in range(w0, min(w0 + {g * r}, nnz), {g}):  # lanes\n"
            f"        for p in range(p0, min(p0 + {g}, nnz)):\n"
            f"          acc[p0, row of p, k] {add}\n"
            "      for each row i in the window:  # segment reduction\n"
            f"        {to} {total} over the lanes p0 of acc[p0, i, k]{merge}"
        ),
    }[kernel]
    return head + body
