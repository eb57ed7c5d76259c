"""A batch of 0, of every op and schedule: empty results, and gradients of zero."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import row_schedule
from differentiable_ops import normal

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    CpuTile,
    Reference,
    SparseArray,
    einsum,
    gsddmm,
    gspmm,
    info,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
    spmv,
)
from sgap_jax.primitives._vectors import values_of_transpose

N = 8
DENSE = np.where(np.random.default_rng(2).random((N, N)) < 0.5, normal(N, N), 0)
FORMATS = [CSR, CSC, COO, CSF(2), CVS(2), CVS(2).transposed, BCSR(2, 2), BCSR(2, 2).transposed]
VECTORS = [CVS(2), CVS(2).transposed, BCSR(2, 2)]  # these expand by reshaping
CASES = [(format, None) for format in FORMATS]
CASES += [(format, Reference()) for format in (CSR, *VECTORS)]
CASES += [(format, CpuTile(columns=16, nonzeros=64)) for format in (CSR, CVS(2))]
BY_ROWS = (CSR, CVS(2), BCSR(2, 2))
SAFE = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]


def operations(A, schedule):
    """Functions of the values and of a dense X [N, 4]."""
    rows, own = row_schedule(schedule), A.with_values
    kept = None if isinstance(schedule, CpuTile) else schedule  # not every op takes a CpuTile
    yield lambda v, X: spmm(own(v), X, schedule=schedule)
    yield lambda v, X: spmm(own(v), X, transpose=True, schedule=schedule)
    yield lambda v, X: spmv(own(v), X[:, 0], schedule=schedule)
    yield lambda v, X: sddmm(own(v), X, X, scale=X[0, 0], schedule=rows).values
    yield lambda v, X: sddmm(own(v), X, X, weighted=True, schedule=rows).values
    yield lambda v, X: sparse_softmax(own(v * X[0, 0]), schedule=rows).values
    yield lambda v, X: row_sum(own(v * X[0, 0]), schedule=rows)
    yield lambda v, X: row_max(own(v * X[0, 0]), schedule=rows)
    yield lambda v, X: gspmm(own(v), X, reduce="max", schedule=rows)
    yield lambda v, X: gspmm(own(v), X, op="add", reduce="mean", schedule=kept)
    yield lambda v, X: gsddmm(own(v), X, X, op="add", schedule=rows).values + v
    yield lambda v, X: einsum("ij,jk->ik", own(v), X, schedule=kept)
    yield lambda v, X: own(v * X[0, 0]).sum(0)
    if A.format in BY_ROWS:
        head = lambda X: X[:, None]
        yield lambda v, X: sparse_attention(*[head(X) for _ in "qkv"], A, schedule=rows) + v.sum()


@pytest.mark.seconds(test=3)
@pytest.mark.parametrize(("format", "schedule"), CASES, ids=str)
def test_every_operation(format, schedule):
    A, X = SparseArray.from_dense(DENSE, format=format), normal(N, 4)
    none = lambda x: jnp.zeros((0, *x.shape), x.dtype)
    ops = list(operations(A, schedule))
    alone = [jax.eval_shape(op, A.values, X) for op in ops]

    def of_each(op, axes, *args):
        many = jax.vmap(op, axes)
        grads = jax.grad(lambda *x: jnp.sum(many(*x)), (0, 1))(*args)
        total = lambda v, X: jnp.sum(jnp.sin(op(v, X)))
        return many(*args), grads, jax.vmap(jax.grad(total, (0, 1)), axes)(*args)

    for axes in ((None, 0), (0, None), (0, 0)):
        args = [x if a is None else none(x) for x, a in zip((A.values, X), axes, strict=True)]
        # One program of all operations.
        found = jax.jit(lambda *x, axes=axes: [of_each(op, axes, *x) for op in ops])(*args)
        for number, (got, grads, separate) in enumerate(found):
            assert got.shape == (0, *alone[number].shape), (number, axes)
            for grad, x in zip(grads, args, strict=True):
                assert grad.shape == x.shape and not grad.any(), (number, axes)
            assert [g.shape for g in separate] == [(0, *x.shape) for x in (A.values, X)]


@pytest.mark.parametrize("format", [CSR, CVS(2)], ids=str)
def test_attention_of_no_sequences(format):
    A, q = SparseArray.from_dense(DENSE, format=format), jnp.zeros((0, N, 2, 4))
    attend = lambda q, **terms: sparse_attention(q, q, q, A, **terms)
    of_slopes = lambda s: jnp.sum(attend(q, alibi_slopes=s))
    of_scores = lambda q: jnp.sum(attend(q, score_mod=lambda s, b, h, i, j: 2 * s))
    found = jax.jit(jax.hessian(of_slopes))(jnp.ones(2)), jax.jit(jax.grad(of_scores))(q)
    assert [x.shape for x in found] == [(2, 2), q.shape] and not found[0].any()


def test_softmax_of_vectors_of_no_entries():
    none = SparseArray.from_dense(np.zeros((2, 2)))
    (heads,) = jax.export.symbolic_shape("heads")  # jax.eval_shape takes none
    export = jax.export.export(
        jax.jit(lambda v: sparse_softmax(none, values=v)), disabled_checks=SAFE
    )
    assert export(jax.ShapeDtypeStruct((0, heads), "float32")).out_avals[0].shape == (0, heads)


def test_values_of_a_transpose_in_blocks():
    """That CUDA's lowerings compute."""
    of = partial(values_of_transpose, blocks=np.arange(3), width=4)
    assert jax.eval_shape(of, jax.ShapeDtypeStruct((0, 12, 2), "float32")).shape == (0, 6, 4)
