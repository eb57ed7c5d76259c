"""Aggregation: y[i, :] = reduce over the stored entries e of row i of M[e, :]."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.levels import CSR
from sgap_jax.primitives._define import accumulator, by_default, check_schedule, check_sparse
from sgap_jax.primitives._incidence import incidence
from sgap_jax.primitives.gspmm import REDUCTIONS, Reduction, check_choice, gspmm
from sgap_jax.primitives.row_reduce import (
    LONGEST,
    check_entry_values,
    largest_or_zero,
    sums_of_vectors,
)
from sgap_jax.schedules import Schedule


def aggregate(
    A: SparseArray,
    M: Any,
    reduce: Reduction = "sum",
    *,
    transpose: bool = False,
    schedule: Schedule | str | None = None,
) -> jax.Array:
    """Reduces messages of the entries (the edges) over each row (the node that they arrive at).

        Y[i, ...] = reduce over the stored entries e = (i, j) of M[e, ...]

    What `scatter` is in PyG, `segment_sum` in jraph and `copy_e` in DGL. With `transpose` over the
    entries of each column. Differentiable to any order in M; the gradient of a maximum or minimum
    goes to the first entry that attains it, as in `gspmm`.

    Args:
      A: sparse [m, k] in CSR, CSC or COO; only its structure is read.
      M: [nnz, ...], such as [nnz], [nnz, d] or [nnz, heads, d], in the order of A.values; float32,
        float64, bfloat16 or float16 (others run in plain JAX).
      reduce: "sum", "mean" (the sum over the number of stored entries), "max" or "min".
      transpose: reduce over columns.
      schedule: how to run, or its text, as for `gspmm`; None lets `choose_schedule` pick.

    Returns:
      Y [m, ...] ([k, ...] with `transpose`) in M's dtype (integers have a mean in floating point).
      Sums are carried in float32 (float64 for float64); on the CPU the same bits for any number of
      threads. Rows without entries are zero for every reduction. NaN propagates.

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: a reduction that is not one of these, or M has the wrong shape.
      NotImplementedError: A is in CVS or BCSR; no kernel for this dtype with this schedule.

    Source: Sgap, section 2.1 (segment reduction).
    """
    check_sparse("aggregate", "A", A)
    schedule = check_schedule("aggregate", schedule)
    check_choice("aggregate", "reduce", reduce, REDUCTIONS)
    transpose = check_flag(transpose, "transpose", "aggregate")
    M = check_entry_values("aggregate", "M", A, M, ("...",))
    columns = M.reshape(M.shape[0], math.prod(M.shape[1:]))
    Y = _aggregate(A.T if transpose else A, columns, reduce=reduce, schedule=schedule)
    return Y.reshape(Y.shape[:1] + M.shape[1:])


@partial(jax.jit, static_argnames=("reduce", "schedule"), inline=True)
def _aggregate(
    A: SparseArray, M: Any, *, reduce: Reduction, schedule: Schedule | None
) -> jax.Array:
    if reduce in ("sum", "mean"):
        dtype = M.dtype
        if reduce == "mean":  # of one rounding
            dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
            M = M.astype(accumulator(dtype))
        Y = sums_of_vectors(A, M, schedule)
        if reduce == "mean":
            Y = Y / jnp.maximum(A.row_lengths, 1)[:, None].astype(Y.dtype)
        return Y.astype(dtype)
    schedule = by_default(schedule, M.dtype)
    B = incidence(A, M.dtype)
    reduced = partial(gspmm, op="copy", reduce=reduce, schedule=schedule)
    other = schedule is not None or A.format != CSR or M.shape[1] > LONGEST
    if reduce != "max" or other:
        return reduced(B, M)

    # The kernel of row_max is the faster one where nobody asks which entry attains the maximum.
    @jax.custom_jvp
    def largest(B: SparseArray, A: SparseArray, M: jax.Array) -> jax.Array:
        return largest_or_zero(A, M)

    @largest.defjvp
    def attained(primals: tuple, tangents: tuple) -> tuple:
        B, _, M = primals
        return jax.jvp(lambda M: reduced(B, M), (M,), (tangents[2],))

    return largest(B, A, M)
