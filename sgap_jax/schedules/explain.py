"""A point of the atomic-parallelism space in words and loops."""

from sgap_jax.schedules.explain_rows import explain_rows
from sgap_jax.schedules.explain_sddmm import explain_sddmm
from sgap_jax.schedules.kernels import algorithm
from sgap_jax.schedules.point import Point
from sgap_jax.schedules.problem import ROW_OPS, Problem


def explain_point(point: Point, problem: Problem) -> str:
    """What a block, a group and a lane own, which lanes write, and the equivalent loops."""
    kernel = algorithm(point, problem.op)
    if kernel is None:
        return f"{point}: a legal point that no kernel of {problem.op} implements"
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
        f"write: {_write(point, kernel)}",
        _loops(point, kernel, problem.op, tile, n),
    ]
    return "\n".join(lines)


def _of_block(point: Point, groups: int, chunks: int) -> str:
    workers = groups / chunks
    if point.row is not None:
        each = max(int(point.row), 1) * point.walk
        return f"{workers * each / point.workers_in_row:g} rows' worth of work"
    return f"{workers * int(point.nnz or 1) * point.group * point.walk:g} nonzeros"


def _of_group(point: Point, kernel: str) -> str:
    columns = f"x {point.col} columns"
    walk = f", {point.walk} of them in turn" if point.walk > 1 else ""
    return {
        "row": f"one lane: {point.row} rows {columns}",
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
        "nnz": f"its {point.nnz} nonzeros, over every row that they touch",
        "row_group": f"every {share}-th nonzero of the row" if share > 1 else "all of the row",
        "nnz_group": f"{point.nnz} consecutive nonzeros of each window"
        if point.nnz != 1
        else "one nonzero of each window",
    }[kernel]


def _write(point: Point, kernel: str) -> str:
    shared = "atomic add where a row reaches beyond, else a plain store"
    return {
        "row": "every lane, plain stores",
        "nnz": f"every lane, at each end of a row: {shared}; C starts as zeros",
        "row_group": "lane 0 of each group, "
        + ("a plain store" if point.deterministic else "atomic add; C starts as zeros"),
        "nnz_group": f"the first lane of each row in a window: {shared}; C starts as zeros"
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
    add, total = (f"+= {product}", "sum")
    if op == "gspmm":
        add, total = "= the better of it and X[column_indices[p], k] op values[p]", "best"
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
        "nnz": (
            f"    parallel for p0 in range(0, nnz, {point.nnz}):  # lanes\n"
            f"      for p in range(p0, min(p0 + {point.nnz}, nnz)):\n"
            f"        acc[k] += {product}\n"
            "        where the row i of p ends, or at the last p:\n"
            "          C[i, k] += acc[k];  acc[k] = 0"
        ),
        "nnz_group": (
            f"    parallel for w0 in range(0, nnz, {g * r}):  # windows, {point.walk} a group\n"
            f"      parallel for p0 in range(w0, min(w0 + {g * r}, nnz), {g}):  # lanes\n"
            f"        for p in range(p0, min(p0 + {g}, nnz)):\n"
            f"          acc[p0, row of p, k] += {product}\n"
            "      for each row i in the window:  # segment reduction\n"
            "        C[i, k] += sum over the lanes p0 of acc[p0, i, k]"
        ),
    }[kernel]
    return head + body
