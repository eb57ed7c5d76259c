"""einsum over unchecked structures: whatever the index arrays hold, values and derivatives are
those of the entries that take part, and nothing else is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unchecked_einsum import every, near
from unchecked_structures import KINDS

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, Reference
from sgap_jax.primitives import einsum_unchecked

MATRICES = [CSR, CSC, COO, CSF(2), CVS(4), BCSR(2, 4), BCSR(3, 2).transposed]
TENSORS = [COO, CSF(3), CSF(3, order=(1, 2, 0))]
CASES = [
    *[("ij,j,jr->ir", format) for format in MATRICES],
    *[("ij,i,ir->rj", format) for format in MATRICES],
    *[("ij,ir,r,jr->ij", format) for format in MATRICES],
    *[("ij,r->jir", format) for format in (CSR, CSC, CVS(4), CSF(2))],
    *[("ijk,jr,kr->ir", format) for format in TENSORS],
    *[("ijk,kr->ijr", format) for format in TENSORS],
    *[("ijk,ir,kr->jr", format) for format in TENSORS],
    *[("ijk,ir,jr,kr->ijk", format) for format in TENSORS],
]


def check(cases, **options):
    first = cases[0]
    call = jax.jit(lambda v, a, d: first.call(v, *d, arrays=a, **options))

    def loss(v, d, a, w):
        return jnp.vdot(w, first.call(v, *d, arrays=a, **options).reshape(w.shape))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for kind, case in zip(KINDS, cases, strict=True):
        v, a, d = case.given()
        want = case.wanted()
        near(call(v, a, d), want, kind)
        weights = np.random.default_rng(7).standard_normal(want.shape).astype(np.float32)
        of_values, of_dense = grad(v, d, a, jnp.asarray(weights))
        for n, got in enumerate([of_values, *of_dense]):
            near(got, case.gradient(n, weights.astype(np.float64)), f"{kind}, {n}", 1e-3)


@pytest.mark.parametrize("subscripts, format", CASES, ids=str)
def test_loops(subscripts, format):
    check(every(subscripts, format))


@pytest.mark.parametrize("subscripts, format", CASES[::2], ids=str)
def test_plain(subscripts, format):
    check(every(subscripts, format, seed=3), schedule=Reference())


@pytest.mark.parametrize("subscripts, format", CASES[1::3], ids=str)
def test_the_look_at_index_arrays_of_other_platforms(monkeypatch, subscripts, format):
    monkeypatch.setattr(einsum_unchecked, "_hold_natively", einsum_unchecked._hold)
    check(every(subscripts, format, seed=5))


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
@pytest.mark.parametrize(
    "subscripts, depth", [("ijk,kr->ijr", 2), ("ijk,jr,ks->irs", 1), ("ijk,ir,kr->ijr", 2)]
)
def test_fibers(subscripts, depth, schedule):
    cases = every(subscripts, CSF(3), fibers=depth)
    check(cases, schedule=schedule)
    options = dict(reduction="max", schedule=schedule)
    call = jax.jit(lambda v, a, d: cases[0].call(v, *d, arrays=a, **options))
    for kind, case in zip(KINDS, cases, strict=True):
        near(call(*case.given()), case.wanted("max"), kind)


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
@pytest.mark.parametrize("subscripts, format", CASES[::2], ids=str)
def test_extrema(subscripts, format, schedule):
    """The gradient goes to the products that attain the extremum."""
    cases = every(subscripts, format, seed=5)
    options = dict(reduction="max", schedule=schedule)
    call = jax.jit(lambda v, a, d: cases[0].call(v, *d, arrays=a, **options))
    grad = jax.jit(jax.grad(lambda v, a, d: jnp.sum(finite(call(v, a, d)))))
    for kind, case in zip(KINDS, cases, strict=True):
        near(call(*case.given()), case.wanted("max"), kind)
        got = np.asarray(grad(*case.given()))
        outside = np.setdiff1d(np.arange(case.nnz), case.places)
        assert np.isfinite(got).all() and (got[outside] == 0).all()


def finite(x):
    return jnp.where(jnp.isfinite(x), x, 0)
