"""Sums, products and parts of sparse arrays under grad, jit and vmap, against the dense twin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from differentiable_ops import close
from jax.sharding import PartitionSpec as P

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, masks

CASE = BATTERY["padded"]
M, K = CASE.shape
OTHER = np.random.default_rng(1).random((M, K)) < 0.3


@pytest.mark.parametrize("format", [CSR, BCSR(2, 4)], ids=str)
def test_the_dense_twin(format):
    A, B = array(CASE, jnp.float64, format), SparseArray.from_dense(OTHER * 1.0, format=format)

    def f(v, w):
        A_, B_ = A.with_values(v), B.with_values(w)
        C = A_ - B_ * 2.0
        return (
            C.todense(),
            (A_ * B_).todense(),
            C[2:4].todense(),
            A_.T.diagonal(),
            *sums(C.sum),
            C.mean(0),
        )

    def sums(total):
        return total(), total(axis=0), total(axis=-1), total((), keepdims=True)

    def twin(v, w):
        a, b = A.with_values(v).todense(), B.with_values(w).todense()
        c = a - 2 * b
        return c, a * b, c[2:4], jnp.diagonal(a), *sums(c.sum), c.mean(0)

    scalar = lambda f: lambda *x: sum(jnp.sum(jnp.sin(y)) for y in f(*x))
    values = A.values, B.values
    batch = jnp.stack([values[0], -values[0]])

    def every(f):
        run = lambda v, w, batch: (
            f(v, w),
            jax.grad(scalar(f), (0, 1))(v, w),
            jax.vmap(f, (0, None))(batch, w),
        )
        return jax.jit(run)(*values, batch)

    for found, expected in zip(every(f), every(twin), strict=True):
        close(found, expected)


@pytest.mark.parametrize("format", [CSR, COO, CVS(4)], ids=str)
def test_patterns_stay_concrete(format):
    """Under jit, and in shard_map outside of jit, where JAX traces arrays that are made inside."""
    dense, other = array(CASE, jnp.float64).todense(), OTHER * 1.0
    A, B = (SparseArray.from_dense(x, format=format) for x in (dense, other))

    def f(s):
        C = (A * s[0] + B) - A  # the sum of two patterns in a sum of two patterns
        D = (C * A)[4:]
        return (D if format.block_shape else D.asformat(CSF(2))).sum(0)[None]

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    scales = jnp.asarray([2.0, -3.0])
    want = jnp.stack([((s * dense + other - dense) * dense)[4:].sum(0) for s in scales])
    for run in (sharded, jax.jit(sharded)):
        close(run(scales), want)


@pytest.mark.tier("all")
@pytest.mark.parametrize("format", [CSR, CVS(4), BCSR(2, 4)], ids=str)
def test_explicit_sharding(format):
    A, B = (SparseArray.from_dense(np.tri(8, k=k), format=format) for k in (0, -2))
    v, w = (jnp.asarray(np.arange(1.0, x.nnz + 1)).reshape(x.values.shape) for x in (A, B))

    def f(v, w):
        A_, B_ = A.with_values(v), B.with_values(w)
        C = A_ + B_ * A_
        cut = slice(0, 4) if format == CVS(4) else slice(2, 4)
        # A_ is sharded, C is not.
        other = A_.asformat(CSF(2)).values if format == CSR else A_.values
        parts = (C[cut].todense(), A_[cut].todense(), C.asformat(CSC).values, other)
        return *parts, A_.diagonal(), A_.sum(), A_.sum(0)

    @jax.jit
    def run(v, w):
        scalar = lambda *x: sum(jnp.sum(jnp.sin(y)) for y in f(*x))
        return f(v, w), jax.grad(scalar, (0, 1))(v, w)

    want = run(v, w)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        v = jax.device_put(v, P("x"))
        close(run(v, w), want)
        close((A.with_values(v) + B).sum(), v.sum() + B.sum())  # eagerly


def test_padding_of_explicit_sharding_is_cut_off():
    """The remaining three of four values cannot be distributed over two devices."""
    offsets, columns = jnp.asarray([0, 1, 3]), jnp.asarray([0, 0, 1, 0])
    A = SparseArray.from_arrays(jnp.zeros(4), offsets, columns, shape=(2, 2))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        values = jax.device_put(jnp.asarray([1.0, 2.0, 3.0, 9.0]), P("x"))
        tree = jax.jit(lambda v: A.with_values(v).asformat(CSF(2)).values)(values)
        np.testing.assert_array_equal(tree, [1, 2, 3])


def test_shard_map_captures_a_transpose_that_is_made_on_an_explicit_mesh():
    """Of a sum, and of a mask, which is made there itself."""
    A = SparseArray.from_dense(np.eye(4))
    total = A + A
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for B in (total, masks.band(4, 3)):
            X = jax.device_put(np.arange(8, dtype=B.dtype).reshape(4, 2), P(None, "x"))
            split = jax.shard_map(
                lambda X, B=B: B.T @ X, in_specs=P(None, "x"), out_specs=P(None, "x")
            )
            close(jax.jit(split)(X), B.to_scipy().T @ np.arange(8.0).reshape(4, 2))


def test_traced_structure_of_one_pattern():
    A = array(CASE, jnp.float64)

    def f(A, w):
        B = A.with_values(w)
        return (A + B - A * B).values.sum(where=jnp.arange(A.nnz) < CASE.stored), B.sum(0)

    w = jnp.arange(A.nnz, dtype=jnp.float64)
    expected = f(A, w)
    close(jax.jit(f)(A, w), expected)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), A)
    mapped = jax.jit(jax.vmap(f, (0, None)))(both, w)
    close(jax.tree.map(lambda x: x[1], mapped), expected)
    assert (both + both).values.shape == both.values.shape  # a batch of one pattern
