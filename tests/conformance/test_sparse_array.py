"""A `SparseArray` as JAX and NumPy see it: a pytree, traced structure, operators, memory."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from battery import BATTERY, array
from format_invariants import PADDED, SMALL, formats, invariants
from jax import export
from jax.sharding import PartitionSpec as P

from sgap_jax import BCSR, COO, CSC, CSR, CVS, SparseArray

cases = pytest.mark.parametrize("case", BATTERY.values(), ids=list(BATTERY))


def aligned(x):
    """A copy of x on a 64-byte boundary, where JAX would alias the memory instead of copying it."""
    buffer = np.zeros(x.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    view = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


@pytest.mark.parametrize("format", [COO, CVS(4), BCSR(2, 3)], ids=str)
def test_an_exported_program_takes_and_returns_it(format):
    A = SparseArray.from_dense(np.eye(6, 9, 2, dtype=np.float32), format=format)
    twice = jax.jit(lambda A: A.with_values(2 * A.values))
    restored = export.deserialize(export.export(twice)(A).serialize()).call(A)
    assert (restored.shape, restored.format) == (A.shape, format)
    assert jax.tree.structure(restored) == jax.tree.structure(A)
    np.testing.assert_array_equal(restored.values, 2 * np.asarray(A.values))


@pytest.mark.parametrize("format", [CSR, BCSR(2, 3)], ids=str)
def test_a_transpose_that_nobody_gave_is_made(format):
    """Of the bare constructor, and of an array that lost it: right results, no assertion."""
    D = np.where(np.random.default_rng(0).random((6, 6)) < 0.5, 1.5, 0)
    whole = SparseArray.from_dense(D, format=format)
    plain = tuple(tuple(level) for level in whole.index_arrays)
    bare = SparseArray(whole.values, plain, None, (6, 6), format)

    @jax.jit
    def results(A, D):
        products = A @ D, A.T @ D, jax.grad(lambda D: ((A @ D) ** 2).sum())(D)
        if format != CSR:
            return products
        return *products, A.asformat(CSC).todense(), A.T.row_lengths

    expected = D @ D, D.T @ D, 2 * D.T @ D @ D, D, (D != 0).sum(0)
    for A in (bare, dataclasses.replace(whole, transposed=None)):
        found = results(A, D)
        for got, want in zip(found, expected[: len(found)], strict=True):
            np.testing.assert_allclose(got, want)
    if format == CSR:
        other = SparseArray.from_dense(D.T, format=CSC)
        np.testing.assert_allclose((bare + other).todense(), D + D.T)


def test_a_new_size_compiles_a_program_or_two_for_a_conversion():
    """XLA takes as long for one step of a conversion as for all of them as a program."""
    programs = []

    def count(event, *_, **__):
        programs.append(event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        D = np.where(np.random.default_rng(0).random((43, 47)) < 0.2, 1.5, 0)
        A = SparseArray.from_dense(D)
        for format in (COO, CSC, CVS(3), CVS(3).transposed, BCSR(2, 5)):
            programs.clear()
            C = A.asformat(format)
            assert sum(programs) <= 2, format
            C.coordinates()
            assert sum(programs) <= 3, format
            np.testing.assert_array_equal(C.todense(), D)
            assert sum(programs) <= 4, format
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_nothing_aliases_the_caller():
    dense = np.arange(600.0).reshape(20, 30) + 1
    a = scipy.sparse.csr_array(dense)
    arrays = [aligned(x) for x in (a.data, a.indices, a.indptr)]
    coordinates = [aligned(x) for x in scipy.sparse.coo_array(dense).coords]
    kept = [
        SparseArray.from_scipy(scipy.sparse.csr_array(tuple(arrays), shape=a.shape)),
        SparseArray.from_scipy(
            scipy.sparse.coo_array((arrays[0], tuple(coordinates)), shape=a.shape), format=COO
        ),
        SparseArray.from_arrays(arrays[0], arrays[2], arrays[1], shape=a.shape),
    ]
    back = [A.to_scipy() for A in kept]
    for x in (*arrays, *coordinates):
        x[:] = 0
    for A in kept:
        np.testing.assert_array_equal(A.checked().todense(), dense)
    for b in back:
        b.data[:] = -1  # nor do arrays that we return alias ours
    for A in kept:
        np.testing.assert_array_equal(A.todense(), dense)


@formats
def test_pytree(format):
    A = array(PADDED, jnp.float64, format)
    dense = PADDED.dense()
    leaves, tree = jax.tree.flatten(A)
    assert len(leaves) == {CSR: 6, CSC: 6}.get(format, 7)
    invariants(jax.tree.unflatten(tree, leaves), dense)
    assert tree == jax.tree.structure(copy.deepcopy(A)) != jax.tree.structure(A.T)
    assert hash(tree) == hash(jax.tree.structure(copy.copy(A)))
    invariants(pickle.loads(pickle.dumps(A)), dense)
    invariants(copy.deepcopy(A), dense)
    invariants(jax.tree.map(lambda x: x, A), dense)
    invariants(jax.device_put(A), dense)
    assert A == A and (A == copy.copy(A)) is False and hash(A) != hash(copy.copy(A))
    shapes = jax.eval_shape(lambda a: a, A)
    # Leaves may be anything: ShapeDtypeStruct, None, strings.
    for odd in (shapes, jax.tree.map(lambda x: None, A), jax.tree.map(str, A)):
        assert "shape=(5, 31)" in repr(odd)
    assert f"nnz={A.nnz}, density=" in repr(shapes) and "dtype=float64" in repr(shapes)
    seen = []
    jax.jit(lambda a: seen.append(repr(a)))(A)
    jax.vmap(lambda v: seen.append(repr(A.with_values(v))))(jnp.ones((3, A.nnz)))
    assert seen == [repr(A)] * 2
    batched = jax.vmap(A.with_values)(jnp.ones((3, A.nnz)))
    assert batched.nnz == A.nnz and "batch=(3,)" in repr(batched)


@formats
def test_todense_under_transformations(format):
    A, stored = array(PADDED, jnp.float64, format), PADDED.stored
    dense = PADDED.dense()
    np.testing.assert_array_equal(jax.jit(SparseArray.todense)(A), dense)
    real = (np.asarray(A.coordinates()[0]) < A.shape[0]).astype(float)
    assert real.sum() == stored
    grad = jax.grad(lambda v: (A.with_values(v).todense() * dense).sum())(A.values)
    np.testing.assert_array_equal(grad, np.where(real, np.asarray(A.values), 0))
    stack = jnp.stack([A.values, 2 * A.values])
    out = jax.vmap(lambda v: A.with_values(v).todense())(stack)
    np.testing.assert_array_equal(out, np.stack([dense, 2 * dense]))
    # vmap over structure, and an array carried through scan.
    both = jax.tree.map(lambda x: jnp.stack([x, x]), A)
    np.testing.assert_array_equal(jax.vmap(SparseArray.todense)(both), np.stack([dense, dense]))
    last, _ = jax.lax.scan(lambda a, _: (a * 2.0, None), A, None, length=3)
    np.testing.assert_array_equal(last.todense(), 8 * dense)


def test_values_may_be_traced_where_structure_is_not():
    coordinates = np.array([[2, 0], [0, 1], [2, 0]])

    def total(v):
        A = SparseArray.from_coordinates(coordinates, v, (3, 2))
        return (A.todense() * jnp.arange(1.0, 7).reshape(3, 2)).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.ones(3)), [5, 2, 5])


@cases
@pytest.mark.parametrize("format", [CSR, CSC], ids=str)
def test_traced_structure(case, format):
    A = array(case, jnp.float64, format)
    build = jax.jit(lambda v, o, i: SparseArray.from_arrays(v, o, i, shape=A.shape, format=format))
    B = build(A.values, *A.index_arrays[1])
    invariants(B, case.dense())
    for x, y in zip(A.transposed, B.transposed, strict=True):
        np.testing.assert_array_equal(x[: case.stored], y[: case.stored])


def test_padding_indices_may_be_anything():
    indices = np.array([1, 0, 2, 2**40, -(2**40), 7])
    offsets = np.array([0, 1, 3])
    A = SparseArray.from_arrays(np.arange(1.0, 7), offsets, indices, shape=(2, 3))
    invariants(A, np.array([[0, 1.0, 0], [2, 0, 3]]))


def test_scalars_scale():
    A = array(SMALL, jnp.float32)
    scalars = (2, 2.0, np.float32(2), np.array(2, np.float32), jnp.float32(2))
    for s in scalars:
        for B in (A * s, s * A):
            assert isinstance(B, SparseArray) and B.dtype == jnp.float32
            np.testing.assert_array_equal(B.values, A.values * np.float32(s))
        np.testing.assert_array_equal((A / s).values, A.values / np.float32(s))
    np.testing.assert_array_equal((-A).todense(), -SMALL.dense().astype(np.float32))
    grad = jax.jit(jax.grad(lambda s: (A * s).values.sum()))(jnp.float32(3))
    np.testing.assert_allclose(grad, A.values.sum(), rtol=1e-6)
    assert A.astype(jnp.bfloat16).dtype == jnp.bfloat16
    for bad in ("2", None, np.array("x")):
        with pytest.raises(ValueError, match="scalar|numeric"):
            A * bad
        with pytest.raises(ValueError, match="scalar|numeric"):
            bad * A


@formats
def test_matmul_from_both_sides(format):
    dense = SMALL.dense().astype(np.float32)
    A = array(SMALL, jnp.float32, format)
    m, k = SMALL.shape
    rng = np.random.default_rng(1)
    right, left = rng.integers(-4, 5, (k, 3)), rng.integers(-4, 5, (3, m))
    for convert in (np.asarray, jnp.asarray):
        B, C = convert(right.astype(np.float32)), convert(left.astype(np.float32))
        for got, expected in [
            (A @ B, dense @ B),
            (A @ B[:, 0], dense @ B[:, 0]),
            (C @ A, C @ dense),
            (C[0] @ A, C[0] @ dense),
            (jax.jit(lambda c: c @ A)(C), C @ dense),
        ]:
            assert isinstance(got, jax.Array) and got.shape == expected.shape
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(np.float32(2) * A, SparseArray)
    with pytest.raises(TypeError):  # not an object array of sparse arrays
        np.multiply(right, A)
    with pytest.raises(ValueError, match=f"B: expected {k} rows"):
        A @ A
    for C in (np.ones((2, 3, m), np.float32), jnp.ones((2, 3, m), jnp.float32)):
        np.testing.assert_allclose(C @ A, C @ dense, rtol=1e-5, atol=1e-5)


def test_x64_off_narrows_as_jnp_does():
    with jax.enable_x64(False):
        A = SparseArray.from_dense(np.eye(2))
        assert A.dtype == jnp.float32
        assert SparseArray.from_dense(np.eye(2, dtype=np.complex128)).dtype == jnp.complex64
        assert SparseArray.from_dense(np.eye(2, dtype=np.int64)).dtype == jnp.int32
        invariants(A, np.eye(2))


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_dense_arrays_vary_over_devices_as_values_do(shape):
    """In shard_map, where the branches of a choice must agree: also where there is no element."""
    A = SparseArray.from_dense(np.ones(shape))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def dense(values):
        own = A.with_values(values)
        return jax.lax.cond(True, own.todense, lambda: jnp.zeros(shape) + values.sum())

    split = jax.shard_map(dense, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    found = jax.jit(split)(jnp.arange(2.0 * A.nnz))
    np.testing.assert_array_equal(found, np.arange(2.0 * A.nnz).reshape(2 * shape[0], shape[1]))
