"""shard_map over two devices, and the gradients of replicated operands."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from differentiable_ops import CASES, close, function_of, normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sgap_jax import (
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Reference,
    SparseArray,
    gspmm,
    row_max,
    sddmm,
    sparse_softmax,
    spgemm,
    spgemm_plan,
    spmm,
)

A = array(BATTERY["skewed"], jnp.float64)
B = normal(A.shape[1], 6)


def product(v, B, schedule=None):
    return spmm(A.with_values(v), B, schedule=schedule)


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_columns_sharded(mesh, check_vma):
    specs = dict(in_specs=(P(), P(None, "x")), out_specs=P(None, "x"))
    sharded = jax.shard_map(product, mesh=mesh, check_vma=check_vma, **specs)
    b = jax.device_put(B, NamedSharding(mesh, P(None, "x")))
    close(jax.jit(sharded)(A.values, b), product(A.values, B))
    loss = lambda f: lambda v, B: jnp.sum(jnp.sin(f(v, B)))
    expected = jax.grad(loss(product), (0, 1))(A.values, B)
    close(jax.grad(loss(sharded), (0, 1))(A.values, b), expected)  # eagerly
    close(jax.jit(jax.grad(loss(sharded), (0, 1)))(A.values, b), expected)
    text = jax.jit(sharded).lower(A.values, b).compile().as_text()
    assert "all-gather" not in text and "all-reduce" not in text


def test_gradient_inside_of_a_replicated_operand(mesh):
    # JAX must insert the psum of the replicated operand's gradient by itself.
    step = lambda v, B: jax.grad(lambda v: jnp.sum(jnp.sin(product(v, B))))(v)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(None, "x")), out_specs=P())
    close(jax.jit(sharded)(A.values, B), step(A.values, B))


@pytest.mark.parametrize("case", CASES)
def test_every_op_batched_over_devices(case, mesh):
    function, _, operands = function_of(case)
    batch = jnp.stack([operands[-1], operands[-1] * 0.5])
    f = lambda *x: jnp.sum(jnp.sin(function(*x)))

    def loss(first, last):
        local = jnp.sum(jax.vmap(lambda y: f(*first, y))(last))
        return jax.lax.psum(local, "x")

    first = operands[:-1]
    sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    whole = lambda first, last: sum(f(*first, y) for y in last)
    both = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(first, batch)
    close(both(sharded), both(whole))


def test_a_sparse_array_crosses_shard_map(mesh):
    f = jax.shard_map(spmm, mesh=mesh, in_specs=(P(), P(None, "x")), out_specs=P(None, "x"))
    close(jax.jit(f)(A, B), spmm(A, B))


def test_automatic_sharding_gives_the_right_result(mesh):
    b = jax.device_put(B, NamedSharding(mesh, P(None, "x")))
    close(jax.jit(product)(A.values, b), product(A.values, B))


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_explicit_sharding(schedule):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    run = jax.jit(partial(product, schedule=schedule))
    with jax.set_mesh(mesh):
        b = jax.device_put(B, NamedSharding(mesh, P(None, "x")))
        close(run(A.values, b), product(A.values, B))


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_gradients_under_explicit_sharding(schedule):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    loss = lambda v, B: jnp.sum(product(v, B, schedule) ** 2)
    expected = jax.grad(loss, (0, 1))(A.values, B)
    with jax.set_mesh(mesh):
        b = jax.device_put(B, NamedSharding(mesh, P(None, "x")))
        close(jax.jit(jax.grad(loss, (0, 1)))(A.values, b), expected)


def test_explicit_axes_that_split_what_is_gathered_or_joined():
    """Values of a sparse product along their entries, and columns beside a mapped axis."""
    S = SparseArray.from_dense(np.diag(np.arange(1.0, 9)))
    plan = S @ S
    loss = lambda v: jnp.sum(jnp.sin(spgemm(S, S.with_values(v), plan=plan).values))
    x = normal(A.shape[1], 4, 6)
    mapped = lambda x: jax.vmap(partial(spmm, A), in_axes=1, out_axes=2)(x)
    expected = jax.grad(loss)(S.values), mapped(x)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        v = jax.device_put(S.values, NamedSharding(mesh, P("x")))
        close(jax.jit(jax.grad(loss))(v), expected[0])
        x = jax.device_put(x, NamedSharding(mesh, P(None, None, "x")))
        close(jax.jit(mapped)(x), expected[1])


@pytest.mark.parametrize("format", [CSR, CVS(2)], ids=str)
def test_the_reference_of_other_ops_under_explicit_sharding(format):
    S = array(BATTERY["skewed"], jnp.float64).asformat(format)
    X = normal(S.shape[0], 6)

    def f(A, X, Y):
        with_weights = sddmm(A, X, Y, weighted=True, schedule=Reference())
        P = sparse_softmax(with_weights, schedule=Reference())
        return row_max(P, schedule=Reference()), gspmm(P, Y, reduce="max", schedule=Reference())

    loss = lambda v, X, Y: sum(jnp.sum(jnp.sin(x)) for x in f(S.with_values(v), X, Y))
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(S.values, X, B)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, b = (jax.device_put(y, NamedSharding(mesh, P(None, "x"))) for y in (X, B))
        close(jax.jit(jax.grad(loss, (0, 1, 2)))(S.values, x, b), expected)


@pytest.mark.tier("all")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("format", [CSR, COO, CVS(2), CSF(2)], ids=str)
def test_arrays_made_under_set_mesh_and_in_shard_map(kind, format):
    """Index arrays made there would be on the mesh of `set_mesh`, but shard_map has another
    mesh."""
    dense = np.asarray(A.todense())
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType[kind],))

    def f(v, b):
        made = SparseArray.from_dense(dense, format=format)
        other = outside.with_values(v)
        parts = (made, other, other + made, other[2:], other.asformat(CSC), other.asformat(CVS(3)))
        return sum(jnp.sum((part.todense() @ b) ** 2, axis=0) for part in parts)

    loss = lambda v, b, f=f: jnp.sum(jnp.sin(f(v, b)))
    outside = SparseArray.from_dense(dense, format=format)
    v = outside.values
    expected = jax.jit(lambda v, b: (loss(v, b), jax.grad(loss)(v, b)))(v, B)
    with jax.set_mesh(mesh):
        outside = SparseArray.from_dense(dense, format=format)
        b = jax.device_put(B, NamedSharding(mesh, P(None, "x")))
        sharded = jax.shard_map(f, mesh=mesh, in_specs=(P(), P(None, "x")), out_specs=P("x"))
        run = lambda v, b: loss(v, b, sharded)
        close((jax.jit(run)(v, b), jax.jit(jax.grad(run))(v, b)), expected)


@pytest.mark.tier("all")
def test_a_sparse_product_in_plain_jax(mesh):
    """Its loop starts from zeros, which must vary over the devices as the operands do."""
    pattern = spgemm_plan(A, A.T)

    def step(v):
        product = lambda v: spgemm(A.with_values(v), A.T, mask=pattern, schedule=Reference())
        return jax.grad(lambda v: jnp.sum(jnp.sin(product(v[0]).values)))(v)

    each = jnp.stack([A.values, 2 * A.values])
    sharded = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    one = jax.jit(step)
    close(jax.jit(sharded)(each), jnp.concatenate([one(each[:1]), one(each[1:])]))
