"""Adjacency matrices as graph layers want them, and the features that go with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import interop, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR
from sgap_jax.primitives._define import accumulator, check_sparse
from sgap_jax.primitives.row_reduce import row_sum


def add_self_loops(A: SparseArray) -> SparseArray:
    """A + I in CSR: every node also hears itself. What the diagonal held gets one more.

    Args:
      A: square, of any format, with a concrete structure; its values may be traced.

    Returns:
      A SparseArray in CSR of A's dtype.

    Raises:
      TypeError: A is not a SparseArray. ValueError: A is not square, or its structure is traced.

    Source: Kipf and Welling, ICLR 2017, section 2.
    """
    check_square("add_self_loops", A)
    A = vectors.expand(A) if A.format.block_shape else A
    # The values may be traced, so they are not given to what must see the coordinates.
    places = replace(A, values=np.zeros(A.nnz, np.float32))
    rows, columns = interop.to_numpy(places, "add_self_loops")[1]
    nodes = np.arange(A.shape[0])
    coordinates = np.stack([np.append(rows, nodes), np.append(columns, nodes)], axis=1)
    values = jnp.append(A.values[: len(rows)], jnp.ones(A.shape[0], A.dtype))
    return SparseArray.from_coordinates(coordinates, values, A.shape, format=CSR)


def normalize_adjacency(A: SparseArray, *, self_loops: bool = True) -> SparseArray:
    """The propagation matrix of a graph convolution, to be computed once for a graph.

        D^-1/2 (A + I) D^-1/2,   D = diag of the row sums of A + I

    A directed graph has the row sums on the left and the column sums on the right. A node whose
    sum is not positive gets zeros.

    Args:
      A: square, of any format; entries are edge weights (1 for an edge) of a floating dtype. Row i
        stores an entry (i, j) for each edge along which j sends to i.
      self_loops: add I; without it, D^-1/2 A D^-1/2.

    Returns:
      A SparseArray in CSR of A's dtype; sums and roots in float32 at least.

    Raises:
      TypeError: A is not a SparseArray. ValueError: A is not square or has integer entries, or
        (with self_loops) a structure that is traced.

    Source: Kipf and Welling, ICLR 2017, equation 2 and section 2.
    """
    op = "normalize_adjacency"
    check_square(op, A)
    if not jnp.issubdtype(A.dtype, jnp.floating):
        raise ValueError(f"{op}: A: expected a floating dtype, got {A.dtype}; A.astype(...)")
    A = add_self_loops(A) if self_loops else A.asformat(CSR)
    wide = A.astype(accumulator(A.dtype))
    rows, columns = wide.coordinates()
    left, right = (_inverse_root(row_sum(S)) for S in (wide, wide.T))
    # Padding has coordinates past the end; any number will do there.
    scaled = left.at[rows].get(mode="clip") * wide.values * right.at[columns].get(mode="clip")
    return A.with_values(scaled.astype(A.dtype))


def _inverse_root(x: jax.Array) -> jax.Array:
    # Two wheres: a zero under the root would make gradients NaN.
    return jnp.where(x > 0, jax.lax.rsqrt(jnp.where(x > 0, x, jnp.ones_like(x))), 0)


def check_square(op: str, A: Any) -> None:
    check_sparse(op, "A", A)
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"{op}: A must be square, got shape {A.shape}")


def check_features(op: str, graph: Any, x: Any, in_features: int | None = None) -> Any:
    """x [..., n, in_features], dense or sparse, for a graph [m, n]; None is any number of them."""
    check_sparse(op, "graph", graph)
    x = x if isinstance(x, SparseArray) else jnp.asarray(x)
    nodes = graph.shape[1]
    if x.ndim < 2 or x.shape[-2] != nodes or in_features not in (None, x.shape[-1]):
        want = f"[..., {nodes}, {'features' if in_features is None else in_features}]"
        raise ValueError(f"{op}: x must have shape {want}, got {list(x.shape)}")
    return x


def numbers(x: Any) -> Any:
    """What dropout and casts apply to: the stored values of a sparse x, all of a dense one."""
    return x.values if isinstance(x, SparseArray) else x


def with_numbers(x: Any, values: Any) -> Any:
    return x.with_values(values) if isinstance(x, SparseArray) else values
