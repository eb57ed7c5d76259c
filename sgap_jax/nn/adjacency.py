"""Adjacency matrices for graph layers (self-loops, normalization), and checks of node features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from sgap_jax.formats import convert, interop, structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag, is_traced
from sgap_jax.formats.levels import CSC, CSR
from sgap_jax.graphs.edges import from_pairs
from sgap_jax.primitives._define import accumulator, as_numbers, check_sparse, entries_that_count
from sgap_jax.primitives._incidence import as_given, entries_by_rows
from sgap_jax.primitives.row_reduce import row_sum


@overload
def add_self_loops(
    A: SparseArray, *, remaining: bool = ..., return_perm: Literal[False] = ...
) -> SparseArray: ...
@overload
def add_self_loops(
    A: SparseArray, *, remaining: bool = ..., return_perm: Literal[True]
) -> tuple[SparseArray, Any]: ...
def add_self_loops(
    A: SparseArray, *, remaining: bool = False, return_perm: bool = False
) -> SparseArray | tuple[SparseArray, Any]:
    """A + I in CSR: every node also receives its own message. Of a block [m, n] of
    `graphs.NeighborSampler`, whose targets are the first of its sources, I has the first m rows of
    the identity. A diagonal value that is stored already gets 1 added (in a bool matrix it becomes
    True). Edges that repeat (`graphs.from_edges(..., duplicates="keep")`) do so in the result; of
    loops that repeat the first one gets it.

    Differentiable in A's values. Works under jit too: where the structure is traced, its diagonal
    entries cannot be counted, so the result has a capacity of A.nnz + m, with the padding last: one
    program for all samples.

    Args:
      A: [m, n] of any format, m <= n; values and structure may be traced.
      remaining: only nodes that store no loop get one, and stored loops stay as they are: PyG's
        `add_remaining_self_loops`.
      return_perm: also return, as int32 [nnz], the entry of A that each entry of the result is, and
        A.nnz + i for the loop that node i got: with vectors of the edges [A.nnz, d] and of the
        loops [m, d], `jnp.concatenate([of_edges, of_loops])[perm]` are in the order of the result.
        PyG's `fill_value="mean"` are loops of `aggregate(A, of_edges, "mean")`, in a graph that
        stores no loops (its layers take those out first).

    Returns:
      A SparseArray in CSR of A's dtype, or with `return_perm` (A, perm). Of padding perm is 0.

    Raises:
      TypeError: A is not a SparseArray. ValueError: A has more rows than columns.

    Source: Kipf and Welling, ICLR 2017, section 2.
    """
    check_sparse("add_self_loops", "A", A)
    if A.shape[0] > A.shape[1]:
        raise ValueError(
            "add_self_loops: A: expected a square graph, or a block with fewer nodes that receive "
            f"than that send, got shape {A.shape}"
        )
    remaining = check_flag(remaining, "remaining", "add_self_loops")
    return_perm = check_flag(return_perm, "return_perm", "add_self_loops")
    (m, n), positions = A.shape, np.arange(A.values.size, dtype=np.int32)
    own = structure.whole(A.values).reshape(-1)
    if is_traced(*jax.tree.leaves((A.index_arrays, A.transposed))):
        S = replace(A, values=jnp.asarray(positions).reshape(A.values.shape)).asformat(CSR)
        if not A.is_checked:  # sort by columns, then by rows: entries that take part come first
            T = S.asformat(CSC)
            S = SparseArray.from_arrays(T.values, *T.index_arrays[1], shape=(m, n), format=CSC)
            S = S.asformat(CSR)
        offsets, columns, entry, loop, missing = _with_diagonal(*convert.compressed(S))
        values = jnp.zeros(columns.shape, A.dtype)
        values = values.at[entry].set(own[S.values], mode="drop")
        at, one = values.at[loop], jnp.ones((), A.dtype)
        one = missing.astype(A.dtype) if remaining else one
        values = at.max(one) if A.dtype == bool else at.add(one)
        found = SparseArray.from_arrays(values, offsets, columns, shape=(m, n))
        if not return_perm:
            return found
        perm = jnp.zeros(columns.shape, jnp.int32).at[entry].set(S.values, mode="drop")
        new = jnp.where(missing > 0, own.size + structure.positions(m), perm[loop])
        return found, perm.at[loop].set(new)
    # The values may be traced: the conversion gets their positions as values instead.
    with jax.core.eval_context():
        places = replace(A, values=positions.reshape(A.values.shape))
        entry, (rows, columns) = interop.to_numpy(places, "add_self_loops")
    (loops,) = np.nonzero(rows == columns)
    nodes, first = np.unique(rows[loops], return_index=True)
    missing = np.setdiff1d(np.arange(m), nodes)
    values, one = own[entry], jnp.ones((), A.dtype)
    if not remaining:
        at = values.at[loops[first]]
        values = at.max(one) if A.dtype == bool else at.add(one)
    values = jnp.append(values, jnp.ones(len(missing), A.dtype))
    rows, columns = (np.append(x, missing) for x in (rows, columns))
    found, order = from_pairs(rows, columns, values, (m, n), "keep", "add_self_loops")
    sources = np.append(entry, own.size + missing).astype(np.int32)
    return (found, sources[order]) if return_perm else found


@jax.jit
def _with_diagonal(offsets: Any, columns: Any) -> tuple[Any, Any, Any, Any, Any]:
    """(offsets, columns, entry, loop, missing): the CSR arrays with the diagonal, the new position
    of each entry (of padding: past the end), the position of each row's diagonal entry, and 1 where
    that is new."""
    m, count = offsets.shape[0] - 1, columns.shape[0]
    place, row = structure.positions(count), structure.segment_of_entry(offsets, count)
    stored, zeros = place < offsets[-1], jnp.zeros(m, jnp.int32)
    times = lambda seen: zeros.at[row].add((stored & seen).astype(jnp.int32))  # noqa: E731
    missing = (times(columns == row) == 0).astype(jnp.int32)
    before = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(missing, dtype=jnp.int32))
    entry = place + before[row] + jnp.where(columns > row, missing[row], 0)
    entry = jnp.where(stored, entry, count + m)
    loop = offsets[:-1] + before[:-1] + times(columns < row)
    whole = jnp.zeros(count + m, jnp.int32).at[entry].set(columns, mode="drop")
    return offsets + before, whole.at[loop].set(structure.positions(m)), entry, loop, missing


def normalize_adjacency(
    A: SparseArray,
    *,
    self_loops: bool | Literal["remaining"] = True,
    degrees: Literal["both", "rows"] = "both",
) -> SparseArray:
    """The propagation matrix of a graph convolution, to be computed once for a graph.

        D^-1/2 (A + I) D^-1/2,   D = diag of the row sums of A + I

    A directed graph has the row sums on the left and the column sums on the right, unless `degrees`
    says otherwise. A node whose sum is not positive gets zeros. PyG's `gcn_norm` is
    `normalize_adjacency(A, self_loops="remaining", degrees="rows")`; the two agree on undirected
    graphs without loops.

    Args:
      A: square, of any format; entries are edge weights (1 for an edge) of a floating dtype. Row i
        stores an entry (i, j) for each edge along which j sends to i. Values and structure may be
        traced.
      self_loops: add I; without it, D^-1/2 A D^-1/2. "remaining": only nodes that store no loop
        get one.
      degrees: "both": D of the rows on the left, of the columns on the right; "rows": that of the
        rows (of the edges that arrive) on both sides.

    Returns:
      A SparseArray in CSR of A's dtype; sums and roots in float32 at least. Differentiable in A's
      values.

    Raises:
      TypeError: A is not a SparseArray. ValueError: A is not square or has integer entries; another
        self_loops or degrees.

    Source: Kipf and Welling, ICLR 2017, equation 2 and section 2.
    """
    op = "normalize_adjacency"
    check_square(op, A)
    if not jnp.issubdtype(A.dtype, jnp.floating):
        raise ValueError(f"{op}: A: expected a floating dtype, got {A.dtype}; A.astype(...)")
    if not isinstance(self_loops, bool | np.bool_) and self_loops != "remaining":
        raise ValueError(
            f"{op}: self_loops: expected True, False or 'remaining', got {self_loops!r}"
        )
    if degrees not in ("both", "rows"):
        raise ValueError(f"{op}: degrees: expected 'both' or 'rows', got {degrees!r}")
    remaining = isinstance(self_loops, str)
    A = add_self_loops(A, remaining=remaining) if self_loops else A.asformat(CSR)
    wide = A.astype(accumulator(A.dtype))
    rows, columns = wide.coordinates()
    left = _inverse_root(row_sum(wide))
    right = left if degrees == "rows" else _inverse_root(row_sum(wide.T))
    # Padding has coordinates past the end: clipped, it gets any value.
    scaled = left.at[rows].get(mode="clip") * wide.values * right.at[columns].get(mode="clip")
    return A.with_values(scaled.astype(A.dtype))


def _inverse_root(x: jax.Array) -> jax.Array:
    # The inner where keeps zeros from the root: its derivative there would make gradients NaN.
    return jnp.where(x > 0, jax.lax.rsqrt(jnp.where(x > 0, x, jnp.ones_like(x))), 0)


def check_square(op: str, A: Any, name: str = "A") -> None:
    check_sparse(op, name, A)
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"{op}: {name} must be square, got shape {A.shape}")


def check_graph(op: str, graph: Any, x: Any) -> None:
    """TypeError unless `graph` is a SparseArray: of PyG's calls layer(x, edge_index) it says what
    to write."""
    if not isinstance(graph, SparseArray):
        if isinstance(x, SparseArray):
            raise TypeError(f"{op}: expected the graph first, as in layer(graph, x)")
        for given in (graph, x):
            if not isinstance(given, np.ndarray | jax.Array):
                continue
            pairs = np.ndim(given) == 2 and np.shape(given)[0] == 2
            if pairs and jnp.issubdtype(jnp.result_type(given), jnp.integer):
                raise TypeError(
                    f"{op}: expected layer(graph, x) with a SparseArray of the edges; "
                    "graphs.from_edges(edge_index, num_nodes=n) makes one"
                )
    check_sparse(op, "graph", graph)


def check_features(op: str, graph: Any, x: Any, in_features: int | None = None) -> Any:
    """Returns x as an array after a check of its shape: [..., n, in_features], dense or sparse, for
    a graph [m, n]. `in_features` None allows any number of features."""
    check_graph(op, graph, x)
    if scipy.sparse.issparse(x):
        raise TypeError(f"{op}: x: expected an array; SparseArray.from_scipy(x) is one")
    x = x if isinstance(x, SparseArray) else jnp.asarray(x)
    nodes = graph.shape[1]
    if x.ndim < 2 or x.shape[-2] != nodes or in_features not in (None, x.shape[-1]):
        want = f"[..., {nodes}, {'features' if in_features is None else in_features}]"
        raise ValueError(f"{op}: x must have shape {want}, got {list(x.shape)}")
    return x


def check_edges(op: str, graph: SparseArray, edges: Any, kernel: Any) -> Any:
    """The vectors of the edges as an array [..., nnz, features], for a layer whose kernel of them
    is [features, ...]; None where neither is given."""
    if (edges is None) != (kernel is None):
        raise ValueError(f"{op}: edges and edge_features: expected both or none")
    if edges is None:
        return None
    check_format_of_edges(op, graph, "edges")
    edges = as_numbers(op, "edges", edges)
    wanted = graph.nnz, kernel.shape[0]
    if edges.shape == (graph.nnz,) and wanted[1] == 1:
        edges = edges[:, None]
    if edges.shape[-2:] != wanted:
        raise ValueError(
            f"{op}: edges must have shape [..., {wanted[0]}, {wanted[1]}], got {list(edges.shape)}"
        )
    return edges


def check_format_of_edges(op: str, graph: SparseArray, name: str) -> None:
    if graph.format.block_shape:
        raise NotImplementedError(
            f"{op}: {name}: vectors of edges need a graph in CSR, CSC or COO, got {graph.format}; "
            "use graph.asformat(CSR)"
        )


def edge_features(op: str, graph: SparseArray, edges: Any) -> int:
    """How many features the vectors of the edges have, for a layer that learns it from a call."""
    shape = jnp.shape(edges)
    if not shape:
        raise ValueError(f"{op}: edges must have shape [..., {graph.nnz}, d], got a number")
    return 1 if len(shape) == 1 else shape[-1]


def stored_edges(graph: SparseArray, edges: jax.Array) -> jax.Array:
    """Vectors [..., nnz, d] with zeros for the padding, since what it holds must not reach
    gradients."""
    S, _, order = entries_by_rows(graph)
    stored = as_given(entries_that_count(S), order)[:, None]
    with jax.numpy_rank_promotion("allow"):
        return jnp.where(stored, edges, jnp.zeros((), edges.dtype))


def stored_values(x: Any) -> Any:
    """The array that dropout and casts apply to: the stored values of a sparse x, or a dense x."""
    return x.values if isinstance(x, SparseArray) else x


def with_stored_values(x: Any, values: Any) -> Any:
    return x.with_values(values) if isinstance(x, SparseArray) else values
