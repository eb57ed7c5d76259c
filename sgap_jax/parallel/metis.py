"""The order of a graph's vertices in which parts exchange little, by METIS (Karypis and Kumar
1998): a file of its own, since pymetis is an extra."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from sgap_jax.parallel.plan import bounds_of


def by_metis(matrix: Any, parts: int, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """(the permutation, the rows of each part) of the graph of a square matrix in SciPy's CSR.

    An entry in either triangle joins two vertices; parts are balanced by entries."""
    m, k = matrix.shape
    if m != k:
        raise ValueError(f"partition: order: 'metis' cuts a square matrix, got [{m}, {k}]")
    if not (isinstance(rows, str) and rows == "balanced"):
        raise ValueError("partition: rows: 'metis' balances the parts by itself; leave rows out")
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            "partition: order='metis' needs pymetis: pip install 'sgap_jax[metis]'"
        ) from error
    ones = scipy.sparse.csr_array(
        (np.ones(matrix.nnz, np.int8), matrix.indices, matrix.indptr), shape=matrix.shape
    )
    graph = ones + ones.T
    graph.setdiag(0)
    graph.eliminate_zeros()
    weights = np.diff(matrix.indptr) + 1  # a row costs about as much as one entry more
    if parts == 1 or m <= parts or graph.nnz == 0:  # nothing to cut
        return np.arange(m), np.diff(bounds_of("balanced", weights - 1, parts))
    adjacency = pymetis.CSRAdjacency(graph.indptr, graph.indices)
    _, member = pymetis.part_graph(parts, adjacency, vweights=weights)
    member = np.asarray(member)
    return np.argsort(member, kind="stable"), np.bincount(member, minlength=parts)
