"""Each operation as a function of its differentiable operands, with a dense twin."""

import jax
import jax.numpy as jnp
import numpy as np
from attention_twin import scatter, twin
from battery import BATTERY, array, from_row_lengths
from conftest import BACKENDS, row_schedule
from gspmm_oracle import away_from_zero

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CVS,
    SparseArray,
    einsum,
    gsddmm,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spgemm,
    spmm,
    spmv,
)

CASE = BATTERY["empty_rows_at_both_ends"]
A = array(CASE, jnp.float64)
VECTORS = A.asformat(CVS(3))  # the last vectors end past the matrix
BLOCKS = A.asformat(BCSR(3, 4))  # the last blocks end past it in both dimensions
TENSOR = SparseArray.from_coordinates(
    [(0, 1, 2), (0, 3, 0), (2, 1, 2), (2, 3, 1), (3, 0, 0)],
    np.arange(1.0, 6),
    (4, 5, 3),
    format=COO,
)
LONG_VECTORS = A.asformat(CVS(16))  # also past the end; CUDA kernels have this length
MASK = jnp.asarray(CASE.dense() != 0)
M, K = CASE.shape
SECOND = array(from_row_lengths("second", 6, [2, 0, 6, 1, 3, 0, 2, 2, 1]), jnp.float64)
MASKED = array(from_row_lengths("mask", 6, [0, 2, 3, 1, 6, 2, 0, 1]), jnp.float64)
ROWS, COLS = jnp.asarray(CASE.rows), jnp.asarray(CASE.column_indices)


def dense(v):
    return jnp.zeros((M, K)).at[ROWS, COLS].set(v)


def dense_second(w):
    return jnp.zeros(SECOND.shape).at[SECOND.coordinates()].set(w)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape))


def dense_vectors(v, of=VECTORS):
    return jnp.zeros((M, K)).at[of.coordinates()].set(v.reshape(-1))  # drops coordinates outside


def sampled_vectors(x, A=VECTORS):
    rows, columns = A.coordinates()
    inside = x[jnp.minimum(rows, M - 1), jnp.minimum(columns, K - 1)]
    return jnp.where(rows < M, inside, 0).reshape(A.values.shape)


def dense_tensor(v):
    return jnp.zeros(TENSOR.shape).at[TENSOR.coordinates()].set(v)


VECTOR_MASK = dense_vectors(jnp.ones(VECTORS.values.shape)) != 0


def masked_softmax(x, mask):
    x = jnp.where(mask, x, -jnp.inf)
    peak = jnp.max(x, axis=1, keepdims=True, initial=-1e30)
    e = jnp.where(mask, jnp.exp(jnp.where(mask, x - peak, 0)), 0)
    return e / jnp.maximum(e.sum(1, keepdims=True), 1e-300)


def dense_softmax(v, scale):
    return masked_softmax(dense(v) * scale, MASK)[ROWS, COLS]


def dense_softmax_of_vectors(v, scale):
    return sampled_vectors(masked_softmax(dense_vectors(v) * scale, VECTOR_MASK))


def masked_max(x, mask):
    return jnp.where(mask.any(1), jnp.where(mask, x, -1e30).max(1), 0)


def finite_row_max(S, mask, v, schedule):
    """row_max with zero, not -infinity, for empty rows."""
    return jnp.where(mask.any(1), row_max(S.with_values(v), schedule=schedule), 0)


def dense_gspmm(op, reduce):
    """A dense gspmm by messages [M, K, n]. Operands avoid ties, where subgradients may differ."""

    def twin(v, X):
        a = jnp.where(MASK, dense(v), 1)[:, :, None]
        x = jnp.broadcast_to(X, (M, *X.shape))
        a = jnp.broadcast_to(a, x.shape)
        messages = {"mul": x * a, "add": x + a, "sub": x - a, "div": x / a, "copy": x}[op]
        mask, rows = MASK[:, :, None], MASK.any(1)[:, None]
        if reduce in ("sum", "mean"):
            count = jnp.maximum(MASK.sum(1), 1)[:, None].astype(v.dtype) if reduce == "mean" else 1
            return jnp.where(mask, messages, 0).sum(1) / count
        worst = -1e30 if reduce == "max" else 1e30
        extremum = jnp.max if reduce == "max" else jnp.min
        return jnp.where(rows, extremum(jnp.where(mask, messages, worst), axis=1), 0)

    return twin


def gspmm_case(op, reduce, transpose=False):
    def function(v, X, s):
        S = A.with_values(v).T if transpose else A.with_values(v)
        s = row_schedule(s) if reduce in ("max", "min") else s
        return gspmm(S, X, op=op, reduce=reduce, transpose=transpose, schedule=s)

    values = jnp.asarray(away_from_zero(CASE.values))  # finite differences divide by them too
    return function, dense_gspmm(op, reduce), (values, normal(K, 5))


def attention_case(A):
    """Attention with all operands (a bias, a sink, two heads that share keys) and both results."""

    def function(q, k, v, bias, sinks, s):
        options = dict(bias=bias, sinks=sinks, return_lse=True, schedule=row_schedule(s))
        out, lse = sparse_attention(q, k, v, A, **options)
        return out + 0.1 * lse[..., None]

    def dense_twin(q, k, v, bias, sinks):
        mask = jnp.zeros(A.shape, bool).at[A.coordinates()].set(True)
        lead = (None, None)
        out, lse = twin(q, k, v, mask[lead], bias=scatter(A, bias)[lead], sinks=sinks)
        return out + 0.1 * lse[..., None]

    sizes = ((1, M, 2, 3), (1, K, 1, 3), (1, K, 1, 2), A.values.shape, (2,))
    return function, dense_twin, tuple(normal(*size) for size in sizes)


# name -> (function of the operands and a schedule, dense twin, operands)
OPS = {
    "spmm": (
        lambda v, B, s: spmm(A.with_values(v), B, schedule=s),
        lambda v, B: dense(v) @ B,
        (A.values, normal(K, 5)),
    ),
    "spmm_transpose": (
        lambda v, B, s: spmm(A.with_values(v), B, transpose=True, schedule=s),
        lambda v, B: dense(v).T @ B,
        (A.values, normal(M, 5)),
    ),
    "spmm_csc": (
        lambda v, B, s: spmm(A.with_values(v).asformat(CSC), B, schedule=s),
        lambda v, B: dense(v) @ B,
        (A.values, normal(K, 3)),
    ),
    "spmm_of_transposed": (
        lambda v, B, s: spmm(A.with_values(v).T, B, schedule=s),
        lambda v, B: dense(v).T @ B,
        (A.values, normal(M, 2)),
    ),
    "spmv": (
        lambda v, x, s: spmv(A.with_values(v), x, schedule=s),
        lambda v, x: dense(v) @ x,
        (A.values, normal(K)),
    ),
    "sddmm": (
        lambda X, Y, s: sddmm(A, X, Y, schedule=row_schedule(s)).values,
        lambda X, Y: (X @ Y.T)[ROWS, COLS],
        (normal(M, 4), normal(K, 4)),
    ),
    "sddmm_weighted": (
        lambda v, X, Y, c, s: (
            sddmm(A.with_values(v), X, Y, scale=c, weighted=True, schedule=row_schedule(s)).values
        ),
        lambda v, X, Y, c: c * v * (X @ Y.T)[ROWS, COLS],
        (A.values, normal(M, 4), normal(K, 4), jnp.asarray(0.7)),
    ),
    "spmm_vectors": (
        lambda v, B, s: spmm(VECTORS.with_values(v), B, schedule=s),
        lambda v, B: dense_vectors(v) @ B,
        (normal(*VECTORS.values.shape), normal(K, 5)),
    ),
    "spmm_vectors_transpose": (
        lambda v, B, s: spmm(LONG_VECTORS.with_values(v), B, transpose=True, schedule=s),
        lambda v, B: dense_vectors(v, LONG_VECTORS).T @ B,
        (normal(*LONG_VECTORS.values.shape), normal(M, 5)),
    ),
    "sddmm_vectors": (
        lambda X, Y, s: sddmm(VECTORS, X, Y, schedule=row_schedule(s)).values,
        lambda X, Y: sampled_vectors(X @ Y.T),
        (normal(M, 4), normal(K, 4)),
    ),
    "spmm_blocks": (
        lambda v, B, s: spmm(BLOCKS.with_values(v), B, schedule=s),
        lambda v, B: dense_vectors(v, BLOCKS) @ B,
        (normal(*BLOCKS.values.shape), normal(K, 5)),
    ),
    "sddmm_blocks_weighted": (
        lambda v, X, Y, s: (
            sddmm(BLOCKS.with_values(v), X, Y, weighted=True, schedule=row_schedule(s)).values
        ),
        lambda v, X, Y: v * sampled_vectors(X @ Y.T, BLOCKS),
        (normal(*BLOCKS.values.shape), normal(M, 4), normal(K, 4)),
    ),
    "einsum_mttkrp": (
        lambda v, X, Y, s: einsum("ijk,jr,kr->ir", TENSOR.with_values(v), X, Y),
        lambda v, X, Y: jnp.einsum("ijk,jr,kr->ir", dense_tensor(v), X, Y),
        (TENSOR.values, normal(5, 2), normal(3, 2)),
    ),
    "einsum_sampled": (
        lambda v, X, y, s: einsum("ij,irj,r->ij", A.with_values(v), X, y).values,
        lambda v, X, y: v * jnp.einsum("irj,r->ij", X, y)[ROWS, COLS],
        (A.values, normal(M, 2, K), normal(2)),
    ),
    "einsum_to_a_column": (
        lambda v, X, y, s: einsum("ij,rs,i->js", VECTORS.with_values(v), X, y),
        lambda v, X, y: jnp.einsum("ij,rs,i->js", dense_vectors(v), X, y),
        (normal(*VECTORS.values.shape), normal(3, 2), normal(M)),
    ),
    "sparse_softmax": (
        lambda v, s: sparse_softmax(A.with_values(v), scale=0.6, schedule=row_schedule(s)).values,
        lambda v: dense_softmax(v, 0.6),
        (A.values,),
    ),
    "sparse_softmax_scale": (
        lambda v, c, s: sparse_softmax(A.with_values(v), scale=c, schedule=row_schedule(s)).values,
        dense_softmax,
        (A.values, jnp.asarray(1.3)),
    ),
    "sparse_softmax_vectors": (
        lambda v, s: (
            sparse_softmax(VECTORS.with_values(v), scale=0.6, schedule=row_schedule(s)).values
        ),
        lambda v: dense_softmax_of_vectors(v, 0.6),
        (normal(*VECTORS.values.shape),),
    ),
    "sparse_softmax_vectors_scale": (
        lambda v, c, s: (
            sparse_softmax(VECTORS.with_values(v), scale=c, schedule=row_schedule(s)).values
        ),
        lambda v, c: dense_softmax_of_vectors(v, c),
        (normal(*VECTORS.values.shape), jnp.asarray(1.3)),
    ),
    "row_sum_vectors": (
        lambda v, s: row_sum(VECTORS.with_values(v), schedule=row_schedule(s)),
        lambda v: dense_vectors(v).sum(1),
        (normal(*VECTORS.values.shape),),
    ),
    "row_max_vectors": (
        lambda v, s: finite_row_max(VECTORS, VECTOR_MASK, v, row_schedule(s)),
        lambda v: masked_max(dense_vectors(v), VECTOR_MASK),
        (normal(*VECTORS.values.shape),),
    ),
    "spgemm": (
        lambda v, w, s: spgemm(A.with_values(v), SECOND.with_values(w)).todense(),
        lambda v, w: dense(v) @ dense_second(w),
        (A.values, SECOND.values),
    ),
    "spgemm_mask": (
        lambda v, w, s: spgemm(SECOND.with_values(w).T, A.with_values(v).T, mask=MASKED.T).values,
        lambda v, w: (dense(v) @ dense_second(w))[tuple(MASKED.coordinates())],
        (A.values, SECOND.values),
    ),
    "row_sum": (
        lambda v, s: row_sum(A.with_values(v), schedule=row_schedule(s)),
        lambda v: dense(v).sum(1),
        (A.values,),
    ),
    "row_max": (
        lambda v, s: finite_row_max(A, MASK, v, row_schedule(s)),
        lambda v: masked_max(dense(v), MASK),
        (A.values,),
    ),
    "gspmm_mul_max": gspmm_case("mul", "max"),
    "gspmm_add_min_transpose": gspmm_case("add", "min", transpose=True),
    "gspmm_div_max": gspmm_case("div", "max"),
    "gspmm_sub_mean": gspmm_case("sub", "mean"),
    "gsddmm_sub": (
        lambda x, y, s: gsddmm(A, x, y, op="sub", schedule=row_schedule(s)).values,
        lambda x, y: (x[:, None] - y[None])[ROWS, COLS],
        (normal(M), normal(K)),
    ),
    "sparse_attention": attention_case(A),
    "sparse_attention_vectors": attention_case(VECTORS),
    "attention": (
        lambda Q, Y, V, s: spmm(
            sparse_softmax(
                sddmm(A, Q, Y, schedule=row_schedule(s)), scale=0.5, schedule=row_schedule(s)
            ),
            V,
            schedule=s,
        ),
        lambda Q, Y, V: dense(dense_softmax((Q @ Y.T)[ROWS, COLS], 0.5)) @ V,
        (normal(M, 3), normal(K, 3, seed=1), normal(K, 2)),
    ),
}


# The derivative rules do not depend on the schedule, so all of them run with the default schedule;
# on the other schedules only the composition of all ops runs.
CASES = {
    **{name: (name, None) for name in OPS},
    "attention-tiled": ("attention", BACKENDS["cpu-tiled"]),
    "attention-reference": ("attention", BACKENDS["reference"]),
}


def function_of(case):
    """(function of the operands, dense twin, operands) of a case."""
    name, schedule = CASES[case]
    function, twin, operands = OPS[name]
    return (lambda *x: function(*x, schedule)), twin, operands


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), actual, expected
    )


def scalar(function):
    """A scalar that depends on every element of a result, for gradients."""
    return lambda *x: jnp.sum(jnp.sin(function(*x)))
