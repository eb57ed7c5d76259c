"""Selection in each row of scores: the k greatest."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sgap_jax.formats import checks, structure, vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.primitives._define import as_numbers, check_schedule
from sgap_jax.primitives.top_k import bind_top_k
from sgap_jax.schedules import Schedule
from sgap_jax.schedules.schedule import KERNEL_DTYPES


def top_k(
    scores: ArrayLike,
    k: int,
    *,
    causal: bool = False,
    lengths: ArrayLike | None = None,
    keep: ArrayLike | None = None,
    format: Format = CSR,
    shape: tuple[int, int] | None = None,
    schedule: Schedule | None = None,
) -> SparseArray:
    """The k greatest scores of each row, as a sparse array with the scores as its values:

        (i, j) stored  <=>  fewer than k columns of row i come before j,

    where greater scores come first, and of equal ones (0 and -0 are) the lower column; NaN comes
    after every number, and -infinity is never stored. A row with fewer scores stores those. Columns
    ascend in each row, as in any CSR array. Works inside jit: the capacity is m min(k, n), and what
    rows leave of it is padding. Differentiable in scores, as `jax.lax.top_k` is; the pattern itself
    is piecewise constant.

    Args:
      scores: [m, n], float32, float64, bfloat16 or float16; for CVS(V) and BCSR(r, c) one score for
        each vector or block of the pattern. Batches: `jax.vmap`.
      k: how many at most, static; all if more than n.
      causal: only columns j <= i + n - m, the last row sees all. In units of blocks for blocks.
      lengths: int32 [m] or scalar, may be traced: only columns j < lengths[i].
      keep: bool, broadcasts to [m, n]: columns that come before all others that are not kept, such
        as the own and the first block; those with a score of -infinity too. They count among the k.
      format: CSR; CVS(V) or BCSR(r, c), whose numbers are all the score of their vector or block.
      shape: of the result; by default [m, n], or for vectors and blocks [m r, n c].
      schedule: None; `Reference()` for plain JAX.

    Returns:
      A SparseArray whose structure is checked. The same bits for any number of threads.

    Raises:
      TypeError: scores of another dtype, or k not an integer.
      ValueError: wrong shapes, a negative k, or another format.

    Source: DeepSeek-V3.2-Exp (2025), section 2, for tokens; MoBA (Lu et al. 2025) for blocks. On
    the CPU one pass over the scores: a threshold from a sample leaves a few more than k candidates,
    and a bisection over these finds the k-th. In time O(m n).
    """
    what = "select.top_k"
    scores = as_numbers(what, "scores", scores)
    if scores.ndim != 2:
        raise ValueError(
            f"{what}: scores must have shape [m, n], got {list(scores.shape)}; a batch is a vmap"
        )
    if scores.dtype.name not in KERNEL_DTYPES:
        raise TypeError(f"{what}: scores must be one of {KERNEL_DTYPES}, got {scores.dtype}")
    check_schedule(what, schedule)
    m, n = scores.shape
    k = min(checks.check_count(k, "k", what), n)
    shape = _shape(what, shape, scores.shape, format)
    checks.check_nnz(m * k * math.prod(format.block_shape), what)
    limits = jnp.full(m, n, jnp.int32)
    if causal:
        limits = jnp.clip(jnp.arange(m, dtype=jnp.int32) + 1 + n - m, 0, n)
    if lengths is not None:
        lengths = as_numbers(what, "lengths", lengths)
        if lengths.shape not in ((), (m,)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(
                f"{what}: lengths must be integers [{m}] or one, got {list(lengths.shape)} of "
                f"{lengths.dtype}"
            )
        limits = jnp.minimum(limits, checks.saturated(lengths))
    return _selected(scores, limits, keep, k=k, shape=shape, format=format, schedule=schedule)


@partial(jax.jit, static_argnames=("k", "shape", "format", "schedule"), inline=True)
def _selected(
    scores: jax.Array,
    limits: jax.Array,
    keep: Any,
    *,
    k: int,
    shape: tuple[int, int],
    format: Format,
    schedule: Schedule | None,
) -> SparseArray:
    ranked = scores
    if keep is not None:
        keep = jnp.asarray(keep)
        if keep.dtype != jnp.bool_:
            raise TypeError(f"select.top_k: keep must be boolean, got {keep.dtype}")
        ranked = jnp.where(keep, jnp.asarray(jnp.inf, scores.dtype), scores)
    values, offsets, indices = (x[0] for x in bind_top_k(ranked[None], limits[None], k, schedule))
    if keep is not None:
        rows = structure.segment_of_entry(offsets, indices.shape[0])
        inside = structure.positions(indices.shape[0]) < offsets[-1]
        own = scores[rows, indices] if scores.size else values
        values = jnp.where(inside, own, jnp.zeros((), scores.dtype))
    transposed = structure.transpose_structure(offsets, indices, scores.shape[1])
    block = format.block_shape
    values = jnp.broadcast_to(values.reshape(-1, *[1] * len(block)), (values.shape[0], *block))
    fields = structure.as_fields(((), (offsets, indices)), transposed, checked=True)
    return SparseArray(values=values, **fields, shape=shape, format=format)


def _shape(
    what: str, shape: tuple[int, int] | None, grid: tuple[int, ...], format: Format
) -> tuple[int, int]:
    """The shape of an array whose entries, vectors or blocks are those of a grid."""
    stored = format.levels[:2] == CSR.levels if isinstance(format, Format) else False
    if not stored or format.order is not None or format.dense_modes or len(format.levels) > 4:
        raise ValueError(f"{what}: format must be CSR, CVS(V) or BCSR(r, c), got {format}")
    rows, columns = (size * side for size, side in zip(grid, vectors.tile(format), strict=True))
    given = checks.check_shape((rows, columns) if shape is None else shape, what)
    if len(given) != 2 or vectors.grid(given, format) != list(grid):
        raise ValueError(
            f"{what}: shape: scores {list(grid)} in {format} are those of at most "
            f"{[rows, columns]}, got {list(given)}"
        )
    return given[0], given[1]
