"""einsum under vmap of the stored values, or with a schedule: compiled loops for one element of the
batch, run for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_operands import own_cache  # noqa: F401

from sgap_jax import BCSR, COO, CSF, CSR, Reference, SparseArray, einsum
from sgap_jax.compiler import Schedule, assign
from sgap_jax.compiler.loop_ir import batches
from sgap_jax.primitives import einsum_loops

pytest.importorskip("llvmlite")

SIZES = {"i": 9, "j": 6, "k": 5, "r": 4}
CASES = [
    ("ij,jk,k->ik", CSR, "max"),
    ("ij,ik,jk->ij", BCSR(2, 3), "min"),
    ("ijk,jr,kr->ir", CSF(3), "max"),
    ("ijk,kr->ijr", CSF(3), "fibers"),
    ("ijk,jr,kr->ir", CSF(3), "sum"),
]


def problem(subscripts, format, dtype="float32", batch=3, seed=0):
    """A batch of small integers, so that sums are exact in any order and products tie."""
    random = np.random.default_rng(seed)
    words = subscripts.partition("->")[0].split(",")
    sizes = [[SIZES[i] for i in word] for word in words]
    draw = lambda shape: random.integers(1, 4, shape).astype(dtype)
    A = SparseArray.from_dense(draw(sizes[0]) * (random.random(sizes[0]) < 0.5), format=format)
    values, *dense = (jnp.asarray(draw((batch, *s))) for s in (A.values.shape, *sizes[1:]))
    return A, values, dense


def product(subscripts, A, reduction, schedule=None):
    options = {"reduction": reduction, "schedule": schedule}
    if reduction == "fibers":
        options |= {"reduction": "max", "fibers": True}

    def of(values, *dense):
        out = einsum(subscripts, A.with_values(values), *dense, **options)
        out = getattr(out, "values", out)
        return jnp.where(jnp.isfinite(out), out, 0)

    return of


def with_gradient(f):
    """Wraps a function to return its value and its gradient in all operands."""

    def both(*given):
        out, pull = jax.vjp(f, *given)
        return out, *pull(out)

    return both


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_is_as_alone(case, monkeypatch):
    """The product and its gradient: values and one operand are batched, the others are not."""
    A, values, dense = problem(case[0], case[1])
    made, loops = [], einsum_loops.cpu_loops

    def compiled(*given, **about):
        made.append(about)
        return loops(*given, **about)

    monkeypatch.setattr(einsum_loops, "cpu_loops", compiled)
    monkeypatch.setattr(
        "sgap_jax.primitives.einsum.plain", lambda *x, **y: 1 / 0
    )  # plain JAX does not run
    f, (first, *rest) = with_gradient(product(case[0], A, case[2])), dense
    dims = (0, 0, *[None] * len(rest))
    found = jax.jit(jax.vmap(f, dims))(values, first, *[x[0] for x in rest])
    assert made and all(x["expression"].batch for x in made)
    monkeypatch.undo()
    one = jax.jit(with_gradient(product(case[0], A, case[2], Reference())))
    for n in range(len(values)):
        want = one(values[n], first[n], *[x[0] for x in rest])
        for ours, theirs in zip(found, want, strict=True):
            np.testing.assert_allclose(ours[n], theirs, rtol=1e-6)


@pytest.mark.parametrize("r", [4, 8])
def test_a_batch_of_dense_operands(r, monkeypatch):
    """With rows of eight values, batched loops are those of one element, with its bits; with other
    rows, and in sums over the batch, they have one more index."""
    A, _, (X, Y) = problem("ijk,jr,kr->ir", CSF(3))
    X, y = (jnp.concatenate([x, x / 3], -1)[..., :r] for x in (X, Y[0]))
    loops, made = einsum_loops.cpu_loops, []

    def compiled(*given, **about):
        made.append(about["expression"])
        return loops(*given, **about)

    def each(schedule):
        f = jax.vmap(product("ijk,jr,kr->ir", A, "sum", schedule), (None, 0, None))
        return jax.jit(with_gradient(f))(A.values, X, y)

    monkeypatch.setattr(einsum_loops, "cpu_loops", compiled)
    out, *gradients = each(None)
    wide = [bool(e.batch) for e in made if len(e.output) == 3]
    assert len(wide) == 2 and all(wide) == any(wide) == (r == 8)  # the product, X's gradient
    assert not any(e.batch for e in made if len(e.output) < 3)  # gradients of values and y
    expected, *plain = each(Reference())
    for ours, theirs in zip((out, *gradients), (expected, *plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    if r == 8:
        np.testing.assert_array_equal(out[1], product("ijk,jr,kr->ir", A, "sum")(A.values, X[1], y))


@pytest.mark.parametrize("subscripts", ["ij,ji->i", "ij,jk->ik"])
def test_a_dimension_of_one(subscripts):
    """Coordinates, which differ between lanes, are then multiplied by the size of one part."""
    A = SparseArray.from_dense(np.ones((20, 1), np.float32))
    values = jnp.arange(60.0, dtype="float32").reshape(3, 20)
    X = jnp.arange(60.0, dtype="float32").reshape(3, 1, 20)
    chain = Schedule(assign(subscripts, {"A": CSR})).split("i", "i0", "i1", 8)
    for schedule in (None, chain.parallelize("i1", "CPUVector", "NoRaces")):
        f = jax.vmap(product(subscripts, A, "sum", schedule))
        wanted = jax.vmap(product(subscripts, A, "sum", Reference()))(values, X)
        np.testing.assert_allclose(jax.jit(f)(values, X), wanted, rtol=1e-6)


def test_batches_of_batches():
    """Nested batches of different lengths, with the axes anywhere; one of them only in the
    values."""
    A, values, (x, y) = problem("ij,jk,k->ik", CSR, batch=6)
    f = product("ij,jk,k->ik", A, "max")
    values, x = values.reshape(2, 3, -1), x[:3]
    inner = jax.vmap(f, (1, 0, None), 1)
    found = jax.jit(jax.vmap(inner, (0, None, None)))(jnp.moveaxis(values, 1, 2), x, y[0])
    assert found.shape == (2, 9, 3, 5)
    for a, b in np.ndindex(2, 3):
        np.testing.assert_array_equal(found[a, :, b], f(values[a, b], x[b], y[0]))


def test_derivatives_of_second_order():
    """Derivatives of a batch, some of whose operands all elements share."""
    A, values, (x, y) = problem("ij,jk,k->ik", CSR)

    def second(schedule):
        f = jax.vmap(product("ij,jk,k->ik", A, "max", schedule), (0, None, None))
        slope = jax.grad(lambda *z: jnp.sum(f(*z) ** 3), (0, 1))
        return jax.jit(jax.grad(lambda *z: sum(map(jnp.sum, slope(*z))), (0, 1)))

    for ours, theirs in zip(
        *(second(s)(values, x[0], y[0]) for s in (None, Reference())), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def shared_gradient():
    """The gradient of an operand that 300 elements share: each adds one."""
    A = SparseArray.from_dense(np.ones((1, 1))).astype(jnp.bfloat16)
    values, ones = jnp.ones((300, 1), jnp.bfloat16), jnp.ones(1, jnp.bfloat16)
    f = lambda x: jax.vmap(lambda v: einsum("ij,j,j->i", A.with_values(v), x, ones))(values)
    (dx,) = jax.jit(lambda c: jax.vjp(f, ones)[1](c))(jnp.ones((300, 1), jnp.bfloat16))
    assert float(dx[0]) == 300


def test_sums_over_a_batch_are_carried_in_float32():
    shared_gradient()


def test_one_element_for_all_is_caught(monkeypatch):
    monkeypatch.setattr(batches._Moved, "_index", lambda self, array, index: index)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        test_each_is_as_alone(CASES[0], monkeypatch)


def test_no_product_of_each_entry_is_held():
    """n values for each entry would be more than all else; plain JAX holds them."""
    random = np.random.default_rng(0)
    dense = random.standard_normal((64, 64)) * (random.random((64, 64)) < 0.5)
    A = SparseArray.from_dense(dense.astype(np.float32))
    values = jnp.stack([A.values, -A.values])
    x, y = (jnp.asarray(random.standard_normal(n), jnp.float32) for n in ((64, 128), 128))

    def held(schedule):
        f = jax.vmap(with_gradient(product("ij,jk,k->ik", A, "max", schedule)), (0, None, None))
        compiled = jax.jit(f).lower(values, x, y).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    products = A.nnz * 128 * 4
    assert held(Reference()) > products > 3 * held(None)


def test_integers_and_batches_of_none():
    A, values, (x, y) = problem("ij,jk,k->ik", COO, "int32")
    f = lambda v: einsum("ij,jk,k->ik", A.with_values(v), x[0], y[0], reduction="min")
    found = jax.jit(jax.vmap(f))(values)
    np.testing.assert_array_equal(found, jnp.stack([f(v) for v in values]))
    assert found.dtype == jnp.int32
    assert jax.jit(jax.vmap(f))(values[:0]).shape == (0, 9, 5)


def test_a_batch_of_values_within_one_of_other_operands():
    A, values, (B, c) = problem("ij,jk,k->ik", CSR)
    B, c = jnp.stack([B, B + 1]), jnp.stack([c[0], c[1]])

    def all_of(schedule):
        f = product("ij,jk,k->ik", A, "sum", schedule)
        inner = jax.vmap(f, (0, 0, None))
        return jax.jit(with_gradient(jax.vmap(inner, (None, 0, 0))))(values, B, c)

    for found, expected in zip(all_of(None), all_of(Reference()), strict=True):
        np.testing.assert_array_equal(found, expected)
