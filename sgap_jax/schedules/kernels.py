"""Which points of the atomic-parallelism space have a kernel, operation by operation."""

from fractions import Fraction

from sgap_jax.schedules.point import Point
from sgap_jax.schedules.problem import ROW_OPS

COLUMNS = (1, 2, 4)  # dense columns (features) of a lane that kernels exist for


def algorithm(point: Point, op: str) -> str | None:
    """The kernel of `op` for a legal point, or None where there is none.

    spmm    row        {<x row, c col>, 1}      a lane owns x rows
            row_group  {<1/g row, c col>, r}    a parallel reduction
            nnz        {<g nnz, c col>, 1}      a lane owns g consecutive nonzeros
            nnz_group  {<g nnz, c col>, r}      the same, and a segment reduction
    gspmm   row, row_group as above with g = r (a maximum has no atomic that keeps its place)
    sddmm   nnz        {<g nnz, c col>, r}      r lanes share the features of g nonzeros
            row        {<x row, c col>, r}, {<1/g row, c col>, r}: of a row's nonzeros
    on rows row        {<x row, 1 col>, 1}
            row_group  {<1/r row, 1 col>, r}
    """
    if point.col not in COLUMNS:
        return None
    if op == "spmm":
        return _product(point)
    if op == "sddmm":
        return "nnz" if point.row is None else "row"
    alone = op == "gspmm" or (op in ROW_OPS and point.col == 1)
    found = _product(point) if alone else None
    return found if found in ("row", "row_group") and point.deterministic else None


def _product(point: Point) -> str | None:
    if point.row is not None:
        return "row_group" if point.row < 1 else "row" if point.group == 1 else None
    return "nnz" if point.group == 1 else "nnz_group"


def side_by_side(length: int, group: int) -> int:
    """Rows of a vector that groups of a warp take side by side (cuda/row_reduce/row_reduce.cuh)."""
    side = 1
    while 2 * side * group <= 32 and length % (2 * side) == 0:
        side *= 2
    return side


def nearest(point: Point, op: str) -> str:
    """A point near a legal one that has a kernel of `op`."""
    col = max(c for c in COLUMNS if c <= max(point.col, 1)) if op not in ROW_OPS else 1
    if op not in ("spmm", "sddmm"):
        whole = point.row is not None and point.row >= 1
        return f"{{<{point.row} row, {col} col>, 1}}" if whole else _shared(point.group, col)
    if point.row is not None and point.col < 1:
        return _shared(Fraction(point.col).denominator, col)
    if point.row is None:
        return f"{{<{point.nnz} nnz, {col} col>, {point.group}}}"
    alone = op == "spmm" and point.row >= 1
    return f"{{<{point.row} row, {col} col>, {1 if alone else point.group}}}"


def _shared(lanes: int, col: int) -> str:
    group = max(r for r in (1, 2, 4, 8, 16, 32) if lanes % r == 0)
    return f"{{<1/{group} row, {col} col>, {group}}}" if group > 1 else f"{{<1 row, {col} col>, 1}}"
