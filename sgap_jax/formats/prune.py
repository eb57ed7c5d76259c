"""Sparse arrays from dense weights: magnitude pruning, and random structure."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from sgap_jax.formats import checks, construct, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format, require_stored


def prune(W: ArrayLike, format: Format | str = CSR, *, sparsity: float) -> SparseArray:
    """The largest entries of a matrix, or its vectors or blocks of largest Euclidean norm.

        keep the round((1 - sparsity) N) groups g of largest norm(W[g]), of N in all

    A group is an entry, for CVS(V) a V x 1 column vector, for BCSR(r, c) an r x c block (groups at
    the end are smaller if V, r or c does not divide the size). Of groups with equal norms the first
    in row-major order are kept.

    Args:
      W: concrete dense [m, k], of a real floating dtype.
      format: of the result; its vectors or blocks are the groups.
      sparsity: share of groups to drop, from 0 to 1.

    Returns:
      A SparseArray of W's shape and dtype.

    Raises:
      ValueError: W is traced, not a matrix or not real, or sparsity is out of range.

    Source: vectorSparse, sections 7.1 (grain V x 1) and 8 (blocks, for training); Gale et al., SC20
    (magnitude pruning).
    """
    checks.check_concrete(
        W, "W", "prune", "what is kept is a static size; nn.magnitude_mask takes a traced W"
    )
    if hasattr(W, "todense"):
        raise ValueError(f"prune: W: expected a dense matrix, got a {type(W).__name__}; todense()")
    W = np.asarray(W)
    if W.ndim != 2 or not jnp.issubdtype(W.dtype, jnp.floating):
        raise ValueError(f"prune: W: expected a real matrix, got shape {W.shape} of {W.dtype}")
    (pruned,) = prune_together("prune", [W], require_stored(format, 2, "prune"), sparsity)
    return pruned


def prune_together(
    op: str, matrices: list[np.ndarray], format: Format, sparsity: Any
) -> list[SparseArray]:
    """The matrices with the largest of all their groups: what `prune` is of one."""
    sizes = [_groups(W.shape, format) for W in matrices]
    kept = round((1 - _share(op, "sparsity", sparsity)) * sum(sizes))
    scale = _scale(matrices)
    norms = [_squared_norms(W, format, scale).reshape(-1) for W in matrices]
    # A stable sort of the negated norms: NaN is sorted last.
    order = np.argsort(-np.concatenate(norms), kind="stable")[:kept]
    pruned = []
    for W, begin, size in zip(matrices, np.cumsum([0, *sizes]), sizes, strict=False):
        own = order[(order >= begin) & (order < begin + size)] - begin
        pruned.append(_of_groups(own, W.shape, format, lambda r, c, W=W: W[r, c]))
    return pruned


def random(
    shape: tuple[int, int],
    *,
    density: float,
    format: Format | str = CSR,
    dtype: DTypeLike = jnp.float32,
    seed: int | np.random.Generator = 0,
) -> SparseArray:
    """A matrix with stored entries (for CVS(V) vectors, for BCSR(r, c) blocks) at random places,
    each equally likely.

    Args:
      shape: (m, k).
      density: share of entries (vectors, blocks) that are stored, from 0 to 1.
      format: of the result.
      dtype: a real floating dtype; the values are standard normal.
      seed: of the random structure and values, an integer or a NumPy Generator.

    Raises:
      ValueError: shape, density, format, dtype or seed is invalid; or the offsets of CSR and others
        would be far more than the entries: COO has none.

    Source: vectorSparse, section 7.1 (a vector at each position of a random pattern).
    """
    sizes = checks.check_shape(shape, "random")
    format = require_stored(format, len(sizes), "random")
    if len(sizes) != 2:
        raise ValueError(f"random: shape: expected (m, k), got {shape}")
    try:
        real = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        rng = np.random.default_rng(seed)
    except TypeError as error:
        raise ValueError(f"random: dtype or seed: {error}") from None
    if not real:
        raise ValueError(f"random: dtype: expected a real floating dtype, got {dtype}")
    groups = _groups(sizes, format)
    count = round(_share("random", "density", density) * groups)
    stored = count * math.prod(format.block_shape)
    construct.check_proportion(sizes, stored, format, "random", "format=COO has none")
    chosen = rng.choice(groups, count, replace=False, shuffle=False) if count else np.zeros(0, int)

    def values(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return rng.standard_normal(len(rows)).astype(jnp.dtype(dtype))

    return _of_groups(chosen, sizes, format, values)


def kept_groups(op: str, shape: tuple[int, ...], format: Format, sparsity: Any) -> int:
    """How many entries (vectors, blocks) of a matrix are kept at this sparsity."""
    return round((1 - _share(op, "sparsity", sparsity)) * _groups(shape, format))


def _share(op: str, name: str, value: Any) -> float:
    checks.check_concrete(value, name, op, "how much is stored is a static size")
    return float(checks.check_share(value, name, op))


def _groups(shape: tuple[int, ...], format: Format) -> int:
    return math.prod(vectors.grid(shape, format))


def _scale(matrices: list[np.ndarray]) -> float:
    """A power of two that takes the greatest finite magnitude of float64 values to about 1: their
    squares leave its range where values are beyond 1e154. Those of narrower dtypes do not."""
    if all(W.dtype != np.float64 for W in matrices):
        return 1.0
    finite = (np.max(np.abs(W), initial=0, where=np.isfinite(W)) for W in matrices)
    return math.ldexp(1.0, min(max(-math.frexp(max(map(float, finite)))[1], -1022), 1022))


def _squared_norms(W: np.ndarray, format: Format, scale: float) -> np.ndarray:
    """[groups along the outer mode, groups along the inner mode]: in float64, so that squares of
    float16 do not overflow."""
    squares = np.transpose((W.astype(np.float64) * scale) ** 2, format.modes)
    (height, width), (down, across) = vectors.tile(format), vectors.grid(W.shape, format)
    beyond = down * height - squares.shape[0], across * width - squares.shape[1]
    padded = np.pad(squares, [(0, size) for size in beyond])
    return padded.reshape(down, height, across, width).sum((1, 3))


def _of_groups(chosen: np.ndarray, shape: tuple[int, ...], format: Format, values: Any) -> Any:
    """The matrix that stores the groups of these numbers, which count along the inner mode first;
    values(rows, columns) gives its values."""
    (height, width), (_, across) = vectors.tile(format), vectors.grid(shape, format)
    down, along = np.divmod(np.sort(chosen), max(across, 1))
    outer = (down * height)[:, None, None] + np.arange(height)[:, None]
    inner = (along * width)[:, None, None] + np.arange(width)
    levels = [x.reshape(-1) for x in np.broadcast_arrays(outer, inner)]
    inside = (levels[0] < shape[format.modes[0]]) & (levels[1] < shape[format.modes[1]])
    rows, columns = (levels[format.modes.index(mode)][inside] for mode in range(2))
    coordinates = np.stack([rows, columns], axis=1)
    return SparseArray.from_coordinates(coordinates, values(rows, columns), shape, format=format)
