"""Graphs from lists of edges, and the subgraph of some nodes."""

from __future__ import annotations

from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from sgap_jax.formats import checks, construct, row_statistics, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR

Duplicates = Literal["sum", "keep", "error"]
DUPLICATES: tuple[str, ...] = get_args(Duplicates)


@overload
def from_edges(
    edge_index: ArrayLike,
    values: ArrayLike | None = ...,
    *,
    num_nodes: int | tuple[int, int] | None = ...,
    duplicates: Duplicates = ...,
    return_perm: Literal[False] = ...,
    dtype: DTypeLike | None = ...,
) -> SparseArray: ...
@overload
def from_edges(
    edge_index: ArrayLike,
    values: ArrayLike | None = ...,
    *,
    num_nodes: int | tuple[int, int] | None = ...,
    duplicates: Duplicates = ...,
    return_perm: Literal[True],
    dtype: DTypeLike | None = ...,
) -> tuple[SparseArray, np.ndarray]: ...
def from_edges(
    edge_index: ArrayLike,
    values: ArrayLike | None = None,
    *,
    num_nodes: int | tuple[int, int] | None = None,
    duplicates: Duplicates = "sum",
    return_perm: bool = False,
    dtype: DTypeLike | None = None,
) -> SparseArray | tuple[SparseArray, np.ndarray]:
    """The matrix of a list of edges, as PyG and DGL keep graphs.

        A[target, source] = value     for each edge (source, target)

    so that row i has the edges that arrive at i, and `gspmm(A, X)` passes messages along them.

    Args:
      edge_index: [2, E] integers, concrete: sources, then targets, in any order. Such edges from
        Python belong outside jit.
      values: [E], one for each edge, may be traced; None: ones. Vectors of edges stay beside the
        graph: see `return_perm`.
      num_nodes: of the graph, or (sources, targets) of one between two kinds of nodes; None: what
        the edges need.
      duplicates: of several edges from one node to another, "sum" makes one entry with the sum of
        the values; "keep" an entry for each, so that a mean is one over edges, and each may have a
        vector; "error" refuses them.
      return_perm: also return, as int32 [nnz], the edge that each entry is (the first of those that
        were summed): `edge_features[perm]` are in the order of the entries.
      dtype: of the result.

    Returns:
      A SparseArray [targets, sources] in CSR, or with `return_perm` (A, perm). If edges repeat in
      it (`is_checked` is then False), what works on entries takes each edge for itself: message
      passing, softmax, `aggregate`, `gsddmm`, `row_sum`, `A.rows`. What works on elements, as the
      algebra of matrices does, sees the sum of repeated edges. See docs/formats.md.

    Raises:
      ValueError: edge_index is traced, not [2, E] or out of range; duplicates with "error".
      NotImplementedError: more nodes than int32 counts.
    """
    what = "from_edges"
    if duplicates not in DUPLICATES:
        raise ValueError(f"{what}: duplicates: expected one of {DUPLICATES}, got {duplicates!r}")
    checks.check_concrete(edge_index, "edge_index", what, "make the graph outside jit")
    edges = checks.check_indices(edge_index, "edge_index", 2, what)
    if edges.shape[0] != 2:
        hint = "; of pairs [E, 2] it is np.transpose(edges)" * (edges.shape[1] == 2)
        raise ValueError(
            f"{what}: edge_index: expected shape [2, E], got {list(edges.shape)}{hint}"
        )
    sources, targets = edges
    shape = _shape_of(sources, targets, num_nodes, what)
    given = np.ones(sources.shape, np.float32) if values is None else values
    if getattr(given, "ndim", 1) > 1 and np.shape(given)[0] == sources.shape[0]:
        raise ValueError(
            f"{what}: values: expected shape [{sources.shape[0]}], a number for each edge, got "
            f"{list(np.shape(given))}; vectors stay beside the graph, in the order of its entries: "
            "A, perm = from_edges(edge_index, return_perm=True, ...), then edge_attr[perm]"
        )
    given = checks.check_values(given, sources.shape[0], what)
    given = checks.to_jax_values(given, dtype, what)
    A, perm = from_pairs(targets, sources, given, shape, duplicates, what)
    return (A, perm) if return_perm else A


def _shape_of(sources: Any, targets: Any, num_nodes: Any, what: str) -> tuple[int, int]:
    if num_nodes is None:
        least = max(int(x.max()) + 1 if x.size else 0 for x in (sources, targets))
        least = max(least, 0)  # check_range names a negative one
        checks.check_shape((least, least), what)
        return (least, least)
    sizes = tuple(num_nodes) if np.ndim(num_nodes) == 1 else (num_nodes, num_nodes)
    if len(sizes) != 2:
        raise ValueError(f"{what}: num_nodes: expected n or (sources, targets), got {num_nodes!r}")
    m, k = (checks.check_count(size, "num_nodes", what) for size in (sizes[1], sizes[0]))
    checks.check_shape((m, k), what)
    return (m, k)


def from_pairs(
    rows: np.ndarray,
    columns: np.ndarray,
    values: Any,
    shape: tuple[int, int],
    duplicates: str,
    what: str,
) -> tuple[SparseArray, np.ndarray]:
    """(A, perm): the matrix of concrete coordinates in any order, and which of them each entry
    is."""
    order = np.arange(rows.shape[0], dtype=np.int32)
    for index, size, name in ((rows, shape[0], "targets"), (columns, shape[1], "sources")):
        checks.check_range(index, size, name, what)
    levels = [np.asarray(index).astype(np.int32, copy=False) for index in (rows, columns)]
    if not construct.strictly_sorted(levels):
        order = construct.lexicographic_order(levels, shape)
        levels = [index[order] for index in levels]
    first = np.ones(order.shape, bool)
    first[1:] = (levels[0][1:] != levels[0][:-1]) | (levels[1][1:] != levels[1][:-1])
    if duplicates != "keep" and not first.all():
        p = int(np.flatnonzero(~first)[0])
        if duplicates == "error":
            raise ValueError(
                f"{what}: expected each edge once, got the one from {levels[1][p]} to "
                f"{levels[0][p]} more than once ({int((~first).sum())} duplicates in all); "
                "duplicates='sum' adds their values, 'keep' keeps each"
            )
        run = np.cumsum(first, dtype=np.int32) - 1
        wide = jnp.dtype(construct.accumulator(values.dtype))
        summed = jax.ops.segment_sum(values[order].astype(wide), run, int(run[-1]) + 1)
        values, order = summed.astype(values.dtype), order[first]
        levels = [index[first] for index in levels]
    else:
        values = structure.moved(values, order)
    offsets = construct.count_offsets(levels[0], shape[0])
    transposed = construct.transpose_structure(offsets, levels[1], shape[1])
    # Of a checked structure other operations take for granted that no entry repeats.
    once = duplicates != "keep" or bool(first.all())
    fields = structure.as_fields(((), (offsets, levels[1])), transposed, checked=once, valid=True)
    statistics = row_statistics.of_pattern(offsets, transposed[0])
    with structure.concrete():  # the structure is concrete under jit too
        fields = structure.placed(fields) | {"statistics": statistics}
    return SparseArray(values=values, **fields, shape=shape, format=CSR), order


def rows_on_host(A: Any, what: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets [m + 1], columns, entries) of a concrete matrix by rows, in NumPy and without
    padding; an entry is its position in A's values. Entries may repeat where A is unchecked."""
    if not isinstance(A, SparseArray):
        raise TypeError(f"{what}: expected a SparseArray, got {type(A).__name__}")
    if A.ndim != 2 or A.format.block_shape:
        raise ValueError(f"{what}: expected a matrix in CSR, CSC or COO, got {A.format}")
    checks.check_concrete(A.index_arrays, "the graph", what, "call it outside jit")
    if A.format == CSR and A.is_checked:
        offsets, columns = np.asarray(A.row_offsets), np.asarray(A.column_indices)
        return offsets, columns[: offsets[-1]], np.arange(offsets[-1], dtype=np.int32)
    S = A.with_values(np.arange(A.nnz, dtype=np.int32)).asformat(CSR)
    if not A.is_checked:
        S = S.checked(sorted=False)
    offsets = np.asarray(S.row_offsets)
    used = int(offsets[-1])
    return offsets, np.asarray(S.column_indices)[:used], np.asarray(S.values)[:used]


def values_on_host(A: SparseArray, what: str) -> np.ndarray:
    """The values of a concrete array, in NumPy."""
    checks.check_concrete(A.values, "values", what, "call it outside jit")
    return np.asarray(A.values)


def of_capacity(
    values: Any,
    offsets: np.ndarray,
    columns: np.ndarray,
    shape: tuple[int, int],
    nse: int,
    transposed: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    *,
    checked: bool = True,
) -> SparseArray:
    """A matrix in CSR from NumPy arrays that are valid, with room for `nse` entries. `transposed`
    is its `construct.transpose_structure`, if known; `checked` is False where entries may repeat.
    It has no statistics of its pattern: all of these sizes are one type to jit."""
    used = columns.shape[0]
    columns = padded(columns.astype(np.int32, copy=False), nse)
    if transposed is None:
        transposed = construct.transpose_structure(offsets, columns, shape[1])
    else:
        across, rows, own = transposed
        permutation = padded(own, nse)
        permutation[used:] = np.arange(used, nse, dtype=np.int32)
        transposed = across, padded(rows, nse), permutation
    values = padded(np.asarray(values), nse)
    with structure.concrete():
        arrays = values, np.array(offsets), columns, *transposed
        arrays = jax.device_put(arrays)  # what is padded is not copied
        values, offsets, columns, *transposed = structure.placed(arrays)
    levels = ((), (offsets, columns))
    fields = structure.as_fields(levels, tuple(transposed), checked=checked, valid=True)
    return SparseArray(
        values=values,
        **fields,
        statistics=row_statistics.PatternStatistics(),
        shape=shape,
        format=CSR,
    )


def padded(array: np.ndarray, size: int) -> np.ndarray:
    """`array`, and zeros up to `size`; new memory, that JAX does not copy."""
    found = structure.aligned(size, array.dtype, zeros=True)
    found[: array.shape[0]] = array
    return found


def check_capacity(nse: Any, needed: int, name: str, what: str) -> int:
    """`nse` as an int that is not less than `needed`; None: `needed`."""
    size = needed if nse is None else checks.check_count(nse, name, what)
    if size < needed:
        raise ValueError(f"{what}: {name}: expected at least {needed}, got {size}")
    return size


def check_nodes(nodes: Any, size: int, name: str, what: str) -> np.ndarray:
    """`nodes`, or those that a mask [size] marks, as a concrete integer array [n] with numbers in
    0 .. size-1."""
    checks.check_concrete(nodes, name, what, "call it outside jit")
    if getattr(nodes, "dtype", None) == np.bool_:
        if nodes.shape != (size,):
            got = list(nodes.shape)
            raise ValueError(f"{what}: {name}: expected a mask of shape [{size}], got {got}")
        nodes = np.flatnonzero(np.asarray(nodes))
    chosen: np.ndarray = checks.check_indices(nodes, name, 1, what)
    checks.check_range(chosen, size, name, what)
    return chosen


def induced_subgraph(
    A: SparseArray, nodes: ArrayLike, *, nse: int | None = None
) -> tuple[SparseArray, np.ndarray]:
    """The subgraph of some nodes: B[a, b] = A[nodes[a], nodes[b]], with the edges between them.

    Runs on the host, in time linear in the nodes of A and the edges of `nodes`.

    Args:
      A: square, in CSR, CSC or COO; concrete.
      nodes: [n] integers, each node once, or a mask of all nodes; `X[nodes]` are their features.
      nse: room for so many entries, so that subgraphs of one n compile once; None: as many as there
        are.

    Returns:
      (B, entries): B [n, n] in CSR, and for each entry of B its position in A's values, int32
      [nse]; 0 in the padding.

    Raises:
      ValueError: A is traced or not square, nodes are out of range or repeat, or there are more
        entries than nse.
    """
    what = "induced_subgraph"
    offsets, columns, entries = rows_on_host(A, what)
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"{what}: A must be square, got shape {A.shape}")
    chosen = check_nodes(nodes, A.shape[0], "nodes", what)
    local = np.full(A.shape[0], -1, np.int32)
    local[chosen] = np.arange(chosen.shape[0], dtype=np.int32)
    if not np.array_equal(local[chosen], np.arange(chosen.shape[0])):
        raise ValueError(f"{what}: nodes: expected each node once")
    lengths = (offsets[1:] - offsets[:-1])[chosen]
    row = np.repeat(np.arange(chosen.shape[0], dtype=np.int32), lengths)
    start = np.repeat(offsets[chosen] - np.cumsum(lengths) + lengths, lengths)
    place = start + np.arange(row.shape[0])
    column = local[columns[place]]
    inside = column >= 0
    nse = check_capacity(nse, int(np.count_nonzero(inside)), "nse", what)
    n = chosen.shape[0]
    own = construct.count_offsets(row[inside], n)
    order, column, transposed = construct.sort_rows(own, column[inside], n)
    entry = entries[place[inside][order]]
    values, once = values_on_host(A, what)[entry], A.is_checked
    B = of_capacity(values, own, column, (n, n), nse, transposed, checked=once)
    return B, np.pad(entry, (0, nse - entry.shape[0]))
