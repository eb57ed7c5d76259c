"""gsddmm: C[i, j] = sum_l (X[i, l] op Y[j, l]) at the stored entries (i, j), the edges."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.primitives._define import accumulator, check_dense, check_schedule, check_sparse
from sgap_jax.primitives.gspmm import OPS, check_choice
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.schedules import Schedule


def gsddmm(
    A: SparseArray, X: Any, Y: Any, *, op: str = "mul", schedule: Schedule | str | None = None
) -> SparseArray:
    """Combines the features of the row and the column of each stored entry, and sums over them.

        C[i, j] = sum_l (X[i, l] op Y[j, l])   at the stored entries (i, j) of A

    Differentiable to any order in X and Y. For one message per feature instead of their sum, map
    over the columns:

        jax.vmap(lambda x, y: gsddmm(A, x, y, op="add").values, in_axes=1, out_axes=1)(X, Y)

    Args:
      A: sparse [m, k] in CSR, CSC, COO, CVS or BCSR; only its structure is read.
      X: dense [m, d], or [m] for one feature; float32, float64, bfloat16 or float16.
      Y: dense [k, d], or [k].
      op: "mul" (an `sddmm`), "add" (with one feature the logits of GAT), "sub", "div" (a product
        with the rounded 1 / Y) or "copy" (X alone; Y is not read).
      schedule: how to run, or its text, as for `sddmm`; None lets `choose_schedule` pick.

    Returns:
      A SparseArray with A's structure and format, in the promoted dtype of X and Y. Sums are
      carried in float32 (float64 for float64) and rounded once; "add" and "sub" sum X and Y
      separately.
      On the CPU the same bits for any number of threads. Padding entries of A get zero. NaN or
      infinity in a row reaches only the entries of that row (of X) or column (of Y).

    Raises:
      TypeError: A is not a SparseArray, or schedule is not a Schedule.
      ValueError: an op that is not one of these, or X or Y has the wrong shape.
      NotImplementedError: no kernel for this dtype or platform with this schedule.

    Source: Sgap, section 2.1 (SDDMM as message passing).
    """
    check_sparse("gsddmm", "A", A)
    schedule = check_schedule("gsddmm", schedule)
    check_choice("gsddmm", "op", op, OPS)
    one = jnp.ndim(X) == 1
    X = check_dense("gsddmm", "X", X, (A.shape[0],) if one else (A.shape[0], "d"))
    Y = check_dense("gsddmm", "Y", Y, (A.shape[1], *X.shape[1:]))
    return A.with_values(_gsddmm(A, X, Y, op=op, schedule=schedule))


@partial(jax.jit, static_argnames=("op", "schedule"), inline=True)
def _gsddmm(A: SparseArray, X: Any, Y: Any, *, op: str, schedule: Schedule | None) -> jax.Array:
    dtype = X.dtype if op == "copy" else jnp.result_type(X, Y)
    if op == "div" and not jnp.issubdtype(dtype, jnp.inexact):
        dtype = jnp.result_type(float)
    wide = dtype if op == "mul" else accumulator(dtype)
    X, Y = ((x[:, None] if x.ndim == 1 else x).astype(wide) for x in (X, Y))
    if op == "div":
        Y = 1 / Y
    elif op != "mul":
        # sum (x + y) = (sum x) * 1 + 1 * (sum y)
        X, Y = X.sum(1, keepdims=True), Y.sum(1, keepdims=True)
        one, other = jnp.ones_like(X), jnp.ones_like(Y)
        if op == "copy":
            Y = other
        else:
            X, Y = jnp.hstack([X, one]), jnp.hstack([other, -Y if op == "sub" else Y])
    return sddmm(A, X, Y, schedule=schedule).values.astype(dtype)
