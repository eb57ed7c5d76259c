"""Graphs of which each process makes or reads its own rows, in parts and normalized for GCN."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.sharding import Mesh

import sgap_jax
from sgap_jax import SparseArray, parallel

CHUNK = 1 << 20  # edges that are drawn at once


def rmat(scale: int, degree: int = 8, seed: int = 0) -> tuple[int, Callable]:
    """An R-MAT graph of 2^scale vertices and `degree` edges for each, both ways, with the
    parameters of Graph500 (0.57, 0.19, 0.19, 0.05).

    Returns (vertices, rows) where rows(begin, end) is the matrix of those rows. It draws all edges,
    CHUNK at a time, and keeps those of its rows: every process draws the same ones.

    Source: Chakrabarti, Zhan and Faloutsos, SDM 2004.
    """
    size = 1 << scale

    def rows(begin: int, end: int) -> scipy.sparse.csr_array:
        found = []
        for first in range(0, degree * size, CHUNK):
            rng = np.random.default_rng((seed, first))
            count = min(CHUNK, degree * size - first)
            source, target = np.zeros(count, np.int32), np.zeros(count, np.int32)
            for _ in range(scale):
                u = rng.random(count, dtype=np.float32)
                source = 2 * source + (u >= 0.76)
                target = 2 * target + (((u >= 0.57) & (u < 0.76)) | (u >= 0.95))
            ends = _scattered(source, scale), _scattered(target, scale)
            for a, b in (ends, ends[::-1]):
                here = (a >= begin) & (a < end)
                found.append(np.stack([a[here] - begin, b[here]]))
        a, b = np.concatenate(found, axis=1)
        return _pattern(a, b, (end - begin, size))

    return size, rows


def _scattered(vertex: np.ndarray, scale: int) -> np.ndarray:
    """A permutation of the vertices: R-MAT gives small numbers many edges."""
    mask, x = (1 << scale) - 1, vertex.astype(np.uint64)
    for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):
        x = (x * np.uint64(factor)) & np.uint64(mask)
        x ^= x >> np.uint64(max(scale // 2, 1))
    return x.astype(np.int32)


def stored(path: str | Path) -> tuple[int, Callable]:
    """The graph of a file that `sgap_jax.read` reads by rows, .npz or .mtx, with ones for its
    entries: (vertices, rows) as of `rmat`."""
    if str(path).endswith(".npz"):
        with np.load(path) as file:
            shape = tuple(file["shape"].tolist())
    else:
        shape = sgap_jax.read(path, rows=(0, 0)).shape
    if shape[0] != shape[1]:
        raise ValueError(f"{os.fspath(path)}: expected a square matrix, got {list(shape)}")

    def rows(begin: int, end: int) -> scipy.sparse.csr_array:
        found = sgap_jax.read(path, rows=(begin, end)).to_scipy().tocoo()
        return _pattern(*found.coords, found.shape)

    return int(shape[0]), rows


def _pattern(rows: np.ndarray, columns: np.ndarray, shape: tuple) -> scipy.sparse.csr_array:
    ones = np.ones(len(rows), np.float32)
    matrix = scipy.sparse.coo_array((ones, (rows, columns)), shape=shape).tocsr()
    matrix.data[:] = 1
    return matrix


def in_parts(
    size: int, rows: Callable, mesh: Mesh, axis: str, order: str = "given"
) -> parallel.PartitionedArray:
    """D^-1/2 (A + I) D^-1/2 over the devices, where D has the row sums of A + I: the propagation
    matrix of GCN (Kipf and Welling, ICLR 2017, equation 2) of a symmetric A.

    With `order="metis"` every process reads the whole matrix; else only the rows of its parts."""
    parts = mesh.shape[axis]
    cuts = [p * size // parts for p in range(parts + 1)]

    def with_loops(begin: int, end: int) -> scipy.sparse.csr_array:
        matrix = rows(begin, end)
        loops = scipy.sparse.eye_array(*matrix.shape, k=begin, dtype=np.float32)
        matrix = (matrix + loops).tocsr()
        matrix.data[:] = 1
        return matrix

    if order == "metis":
        whole = SparseArray.from_scipy(with_loops(0, size))
        graph = parallel.partition(whole, mesh, axis, order="metis")
    else:
        graph = parallel.from_parts(lambda p: with_loops(cuts[p], cuts[p + 1]), mesh, axis)

    @jax.jit
    def normalized(graph):
        degree = parallel.row_sum(graph)[..., None]
        factor = jnp.where(degree > 0, jax.lax.rsqrt(jnp.maximum(degree, 1)), 0)
        return parallel.gsddmm(graph, factor, factor, op="mul")

    return normalized(graph)
