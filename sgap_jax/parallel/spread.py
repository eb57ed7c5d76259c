"""Makes a `PartitionedArray`: of a matrix that one process has, or of parts that several have."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.sharding import Mesh

from sgap_jax.formats import checks, io
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import BCSR, CSR, CVS, Format
from sgap_jax.formats.vectors import tile
from sgap_jax.parallel.metis import by_metis
from sgap_jax.parallel.partitioned import PartitionedArray
from sgap_jax.parallel.placement import Placement, from_all, placed
from sgap_jax.parallel.plan import Compressed, bounds_of
from sgap_jax.parallel.plan import rows_of as rows_of_blocks


def partition(
    A: SparseArray,
    mesh: Mesh,
    axis: str,
    *,
    second: str | None = None,
    rows: Literal["balanced", "even"] | Sequence[int] = "balanced",
    order: Literal["given", "metis"] | Callable[[SparseArray], Any] = "given",
) -> PartitionedArray:
    """Spreads the rows of a sparse matrix over the devices along an axis of a mesh.

    Part p has a range of rows. Of a square matrix (a graph) it owns the same range of columns, so
    that a result is the next product's operand; of another one the columns are spread evenly. A
    product sends only those rows of the dense operand that another part has entries for, each once
    to each part, by all_to_all or by rounds of ppermute, whichever sends less with its padding.

    Args:
      A: sparse [m, k] with a concrete structure and concrete values, in any format; entries with
        equal coordinates are summed. CVS(V) and BCSR(r, c) stay what they are if they divide the
        shape (of a square matrix V, or r and c, divide the rows of each part too); every other
        format becomes CSR. Where there are several processes, each has the whole matrix;
        `from_parts` needs less.
      mesh, axis: the mesh, and the name of the axis whose devices get a part each.
      second: another axis of the mesh, whose devices have the same part: they divide the columns of
        dense operands, or share the messages of a product, whichever sends less
        (`PartitionedArray.choose`). Without it the operations divide the columns where it is known
        that the operand is split so: of arrays with a value, [parts, rows, n], and under explicit
        axes.
      rows: "balanced" by entries, "even", or the number of rows of each part, in all m. Vectors and
        blocks are not cut: "balanced" goes by whole ones, and so does "even" if the parts do not
        divide m. If they do, all have as many rows, where need be in shorter vectors: CVS(8) in
        parts of 12 rows becomes CVS(4), in parts of 9 rows CSR.
      order: "given"; or a function of A that gives a permutation of its rows, part by part: row
        order[i] comes i-th; or "metis", which also says how many rows each part of a square matrix
        has: METIS (`pip install 'sgap_jax[metis]'`) cuts the graph so that few vertices have
        neighbours in other parts. Of a square matrix the columns are permuted as the rows. A
        function whose permutation takes the rows of a vector or a block apart makes a CSR matrix of
        it; METIS keeps them together.

    Returns:
      A `PartitionedArray` in A's dtype. `to_parts` and `from_parts` have the given order of rows.

    Raises:
      TypeError: A is not a SparseArray, or mesh not a Mesh.
      ValueError: A is not a concrete matrix, no such axis or twice the same, rows or order that do
        not fit.
      ImportError: `order="metis"` without pymetis.

    Source: the 1D distribution of CAGNET (Tripathy et al., SC 2020), of which only the rows travel
    that are needed; METIS (Karypis and Kumar 1998).
    """
    if not isinstance(A, SparseArray):
        made = "; SparseArray.from_scipy(A) is one" if scipy.sparse.issparse(A) else ""
        raise TypeError(f"partition: A must be a SparseArray, got {type(A).__name__}{made}")
    at = Placement.of("partition", mesh, axis, second)
    parts = at.parts
    if A.ndim != 2 or checks.is_traced(*jax.tree.leaves(A)):
        raise ValueError("partition: expected a concrete matrix; call it outside jit")
    (m, k), permutation = A.shape, None
    format = _stored_format(A)
    if isinstance(rows, str) and rows == "even" and m % parts == 0:
        cut = _format_of(format, (m, k), m // parts)
        A, format = (A, format) if cut == format else (A.asformat(cut), cut)
    if not (isinstance(order, str) and order in ("given", "metis")):
        if not callable(order):
            raise ValueError(
                f"partition: order: expected 'given', 'metis' or a function, got {order!r}"
            )
        permutation = np.asarray(order(A))
        if permutation.shape != (m,) or not np.array_equal(np.sort(permutation), np.arange(m)):
            raise ValueError(f"partition: order: expected a permutation of 0 .. {m - 1}")
        if not _together(permutation, _unit(format, (m, k))):
            format = CSR
    unit, (high, wide) = _unit(format, (m, k)), tile(format)
    # In the grid of vectors or blocks, whose data are their places among the values.
    values, offsets, indices = _arrays(A, format)
    places = values if format == CSR else np.arange(len(values))
    matrix = scipy.sparse.csr_array((places, indices, offsets), shape=(m // high, k // wide))
    if isinstance(order, str) and order == "metis":
        graph = matrix if unit == 1 else _of_units(matrix, unit // high, unit // wide)
        units, counts = by_metis(graph, parts, rows)
        permutation, rows = rows_of_blocks(units, unit), (counts * unit).tolist()
    if permutation is not None:
        matrix = matrix[permutation[::high] // high]
        matrix = matrix[:, permutation[::wide] // wide].tocsr() if m == k else matrix
        matrix.sort_indices()
    bounds = _row_bounds(rows, np.diff(matrix.indptr), parts, m, unit, format)

    def rows_of(p: int) -> Compressed:
        part = matrix[bounds[p] // high : bounds[p + 1] // high]
        data = part.data if format == CSR else values[part.data]
        return Compressed(data, part.indptr, part.indices)

    return placed(rows_of, bounds, k, A.dtype, at, permutation, second, format)


def _stored_format(A: SparseArray) -> Format:
    """The format that A has in parts: its own one of vectors or blocks, if they are of rows and
    divide the shape; else CSR."""
    high, wide = tile(A.format)
    kept = A.format in (CVS(high), BCSR(high, wide)) and A.is_checked
    return A.format if kept and A.shape[0] % high == A.shape[1] % wide == 0 else CSR


def _unit(format: Format, shape: tuple[int, int]) -> int:
    """How many rows stay together: of a square matrix parts own as many columns."""
    high, wide = tile(format)
    return math.lcm(high, wide) if shape[0] == shape[1] else high


def _format_of(format: Format, shape: tuple[int, int], rows: int) -> Format:
    """The format of parts of so many rows: shorter vectors where those or the blocks of `format` do
    not divide them."""
    if rows % _unit(format, shape) == 0:
        return format
    high = math.gcd(tile(format)[0], rows)
    return CVS(high) if high > 1 else CSR


def _together(permutation: np.ndarray, unit: int) -> bool:
    """Whether a permutation of rows is one of groups of `unit` rows that follow each other."""
    groups = permutation.reshape(-1, unit) if len(permutation) % unit == 0 else permutation[:, None]
    first = groups[:, :1]
    return bool((first % unit == 0).all() and (groups == first + np.arange(unit)).all())


def _of_units(matrix: scipy.sparse.csr_array, high: int, wide: int) -> scipy.sparse.csr_array:
    """The pattern of a matrix whose entries are those of high x wide entries each."""
    entries = matrix.tocoo()
    size = (matrix.shape[0] // high, matrix.shape[1] // wide)
    ones = np.ones(matrix.nnz, np.int32)
    where = entries.row // high, entries.col // wide
    return scipy.sparse.coo_array((ones, where), shape=size).tocsr()


def _row_bounds(
    rows: Any, lengths: np.ndarray, parts: int, m: int, unit: int, format: Format
) -> np.ndarray:
    """[parts + 1]: the first row of each part, a multiple of `unit`; `lengths` are the vectors or
    blocks in each row of their grid."""
    if isinstance(rows, str):
        of_units = lengths.reshape(-1, unit // tile(format)[0]).sum(1)
        return bounds_of(rows, of_units, parts) * unit
    bounds = bounds_of(rows, np.zeros(m), parts)
    if (bounds % unit).any():
        raise ValueError(
            f"partition: rows: expected multiples of {unit}, which {format} keeps together, got "
            f"{np.diff(bounds).tolist()}; A.asformat(CSR) can be cut anywhere"
        )
    return bounds


def _arrays(A: SparseArray, format: Format) -> Compressed:
    """The values, row offsets and column indices of A in a format, without padding."""
    if format == CSR:
        matrix = A.to_scipy().tocsr()
        matrix.sum_duplicates()
        return Compressed(matrix.data, matrix.indptr, matrix.indices)
    offsets, indices = (np.asarray(x) for x in A.index_arrays[1])
    used = int(offsets[-1])
    return Compressed(np.asarray(A.values)[:used], offsets, indices[:used])


def from_parts(
    parts: Mapping[int, Any] | Callable[[int], Any],
    mesh: Mesh,
    axis: str,
    *,
    second: str | None = None,
) -> PartitionedArray:
    """A matrix in parts of which each process has only its own: nobody needs the whole one.

    Args:
      parts: for each part whose device belongs to this process, its rows, with the columns of the
        whole matrix: a SparseArray or a SciPy array [rows of the part, k]. A mapping from the
        number of the part, or a function of it, which is called for those parts alone. The parts
        follow each other; they may have different numbers of rows, none too. If all parts are of
        the same vectors or blocks, which divide their rows and columns, so is the result.
      mesh, axis: the mesh, and the name of the axis whose devices get a part each. Every process of
        the program calls this function, since they tell each other how many rows they need, and
        which.
      second: as of `partition`; every process that has a device of a part gives that part.

    Returns:
      A `PartitionedArray` in the promoted dtype of all parts, of a matrix [m, k] where m is the sum
      of the parts' rows, in the given order. If m is k, part p owns the columns of its rows, else
      they are spread evenly, as in `partition`.

    Raises:
      TypeError: `parts` is no mapping and no function, a part no sparse matrix, or mesh no Mesh.
      ValueError: no such axis, a part that is missing, or parts with different numbers of columns.
    """
    at = Placement.of("from_parts", mesh, axis, second)
    mine = at.mine
    found: dict[int, SparseArray] = {}
    try:
        if not (callable(parts) or isinstance(parts, Mapping)):
            raise TypeError(
                "from_parts: parts: expected a mapping from the number of a part, such as "
                f"dict(enumerate(parts)), or a function of it, got a {type(parts).__name__}"
            )
        for p in mine:
            found[p] = _checked_part(p, parts(p) if callable(parts) else parts.get(p), mine)
        table = {
            p: np.array([*part.shape, _code(part.dtype), *_stored_format(part).block_shape, 0, 0])
            for p, part in found.items()
        }
        table = {p: x[:5] for p, x in table.items()}
    except Exception:
        from_all({p: np.full(5, -1) for p in mine}, at.parts)  # the others wait for this process
        raise
    sizes = from_all(table, at.parts)
    if (sizes < 0).any():
        failed = np.flatnonzero((sizes < 0).any(1)).tolist()
        raise ValueError(f"from_parts: the processes of parts {failed} have none; see their errors")
    widths = np.unique(sizes[:, 1])
    if len(widths) > 1:
        raise ValueError(f"from_parts: parts have {widths.tolist()} columns; expected the same")
    dtype = jnp.result_type(*(_DTYPES[code] for code in np.unique(sizes[:, 2])))
    bounds = np.concatenate([[0], np.cumsum(sizes[:, 0])])
    k, format = int(widths[0]), _common_format(sizes[:, 3:])
    if (bounds % _unit(format, (int(bounds[-1]), k))).any():
        format = CSR

    def rows_of(p: int) -> Compressed:
        return _arrays(found.pop(p), format)

    return placed(rows_of, bounds, k, dtype, at, None, second, format)


def _common_format(blocks: np.ndarray) -> Format:
    """Of parts with these vectors (V, 0) or blocks (r, c)."""
    high, wide = (int(x) for x in blocks[0])
    if high == 0 or (blocks != blocks[0]).any():
        return CSR
    return BCSR(high, wide) if wide else CVS(high)


def _checked_part(p: int, part: Any, mine: list[int]) -> SparseArray:
    if part is None:
        raise ValueError(
            f"from_parts: parts: expected one for each of {mine}, which are on devices of this "
            f"process; got none for {p}"
        )
    if scipy.sparse.issparse(part):
        part = SparseArray.from_scipy(part)  # checks its index arrays
    if not isinstance(part, SparseArray):
        raise TypeError(
            f"from_parts: part {p} must be a SparseArray or a SciPy sparse array, got "
            f"{type(part).__name__}"
        )
    if part.ndim != 2 or checks.is_traced(*jax.tree.leaves(part)):
        raise ValueError(f"from_parts: part {p}: expected a concrete matrix")
    return part


def read(
    path: str | os.PathLike[str],
    mesh: Mesh,
    axis: str,
    *,
    second: str | None = None,
    rows: Literal["balanced", "even"] | Sequence[int] = "balanced",
    dtype: Any = None,
) -> PartitionedArray:
    """A matrix in parts from a file, of which each process reads the rows of its own devices.

    Args:
      path: a .mtx file (or .mtx.gz), which each process reads to its end, "balanced" twice, or an
        .npz archive of CSR, as `scipy.sparse.save_npz` writes it, of which it reads its rows.
      mesh, axis, second, rows: as of `partition`.
      dtype: of the values; None keeps the file's as `sgap_jax.read` does.

    Returns:
      The `PartitionedArray` that `partition(sgap_jax.read(path), mesh, axis, rows=rows)` is, where
      no process has more than its rows and the number of entries of each row.

    Raises:
      TypeError, ValueError: as of `partition` and `sgap_jax.read`.
      NotImplementedError: another kind of file.
      OSError: the file cannot be opened.
    """
    at = Placement.of("parallel.read", mesh, axis, second)
    found: dict[int, SparseArray] = {}

    def rows_of(p: int) -> SparseArray:
        if not found:  # at the first part: a failure then reaches the other processes
            found.update(_rows_of_file(path, rows, at.parts, at.mine, dtype))
        return found[p]

    return from_parts(rows_of, mesh, axis, second=second)


def _rows_of_file(
    path: Any, rows: Any, parts: int, mine: list[int], dtype: Any
) -> dict[int, SparseArray]:
    balanced = isinstance(rows, str) and rows == "balanced"
    (m, _), lengths = io.outline(path, "parallel.read", count=balanced)
    bounds = bounds_of(rows, np.zeros(m) if lengths is None else lengths, parts)
    found: dict[int, SparseArray] = {}
    # Of parts that follow each other the file is read once.
    together = mine == list(range(mine[0], mine[-1] + 1))
    for span in [mine] if together else [[p] for p in mine]:
        begin, end = int(bounds[span[0]]), int(bounds[span[-1] + 1])
        read = io.read(path, dtype=dtype, rows=(begin, end))
        found |= {p: read[int(bounds[p]) - begin : int(bounds[p + 1]) - begin] for p in span}
    return found


_DTYPES = tuple(
    np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128".split()
) + (jnp.dtype(jnp.bfloat16),)


def _code(dtype: Any) -> int:
    if np.dtype(dtype) not in _DTYPES:
        raise ValueError(f"from_parts: no arrays of {dtype}")
    return _DTYPES.index(np.dtype(dtype))
