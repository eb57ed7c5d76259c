"""Constructors with a capacity inside jit: equal to plain loops; what does not fit is told."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse as jsparse
from jax.test_util import check_grads

from sgap_jax import BCSR, COO, CSC, CSF, CSR, SparseArray, select, spmm
from sgap_jax.runtime.native import info
from sgap_jax.schedules.machine import Machine, on_machine

M, N, COUNT = 6, 9, 40
FORMATS = (CSR, CSC, COO)
RUN_TIME_ERRORS = (ValueError, jax.errors.JaxRuntimeError)


@partial(jax.jit, static_argnames=("format", "nse", "duplicates", "shape"))
def made(coordinates, values, *, format=CSR, nse=None, duplicates="sum", shape=(M, N)):
    return SparseArray.from_coordinates(
        coordinates, values, shape, format=format, nse=nse, duplicates=duplicates
    )


def coordinates_of(kind):
    rng = np.random.default_rng(0)
    found = np.stack([rng.integers(0, M, COUNT), rng.integers(0, N, COUNT)], 1)
    if kind == "out of range":
        found[rng.random(found.shape) < 0.1] = -1
        found[::7, 1] = N
        found[::11] = 2**31 - 1
    elif kind == "nothing in range":
        found[:, 0] = M
    elif kind == "all equal":
        found[:] = 3
    elif kind == "each once":
        found = np.argwhere(np.ones((M, N)))[rng.permutation(M * N)[:COUNT]]
    return found.astype(np.int32)


KINDS = ["duplicates", "out of range", "nothing in range", "all equal", "each once"]


def entries_of(coordinates, values, by_column=False):
    """{(i, j): sum}, in the order of the format, by plain loops."""
    sums = {}
    for (i, j), x in zip(coordinates.tolist(), values.tolist(), strict=True):
        if 0 <= i < M and 0 <= j < N:
            sums[i, j] = sums.get((i, j), 0.0) + x
    return dict(sorted(sums.items(), key=lambda entry: entry[0][:: -1 if by_column else 1]))


def same(A, entries, capacity):
    """A stores exactly the first entries, and says how many there are beyond its capacity."""
    assert A.nnz == capacity
    assert int(A.overflow) == max(len(entries) - capacity, 0)
    stored = list(entries.items())[:capacity]
    found = np.stack(A.coordinates(), 1)
    np.testing.assert_array_equal(found[: len(stored)], np.reshape([x for x, _ in stored], (-1, 2)))
    assert (found[len(stored) :] == A.shape).all()
    np.testing.assert_allclose(A.values[: len(stored)], [x for _, x in stored], rtol=1e-5)
    dense = np.zeros(A.shape)
    for place, x in stored:
        dense[place] = x
    np.testing.assert_allclose(A.todense(), dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(spmm(A, jnp.eye(N, dtype=jnp.float32)), dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        spmm(A, jnp.eye(M, dtype=jnp.float32), transpose=True), dense.T, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("nse", [None, 5, 50, 0])
def test_coordinates_in_any_order(format, nse):
    rng = np.random.default_rng(1)
    for kind in KINDS:
        coordinates, values = coordinates_of(kind), rng.standard_normal(COUNT).astype(np.float32)
        A = made(coordinates, values, format=format, nse=nse)
        entries = entries_of(coordinates, values, format == CSC)
        same(A, entries, COUNT if nse is None else nse)
        assert A.format == format and A.is_checked == (nse in (None, 50))
        if A.overflow > 0:
            more = rf"at most nnz = {nse}, got {len(entries)}, {len(entries) - nse} more than fit"
            with pytest.raises(ValueError, match=more):
                A.checked()
        else:
            assert A.checked().is_checked


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_checked_inside_jit_tells_what_did_not_fit(format):
    @jax.jit
    def values_only(coordinates, values):
        return made(coordinates, values, format=format, nse=12).checked().values

    values = np.ones(COUNT, np.float32)
    np.testing.assert_array_equal(
        values_only(coordinates_of("all equal"), values), [40.0] + [0.0] * 11
    )
    count = len(entries_of(coordinates_of("duplicates"), values))
    with pytest.raises(RUN_TIME_ERRORS, match=rf"expected at most nnz=12, got {count}"):
        values_only(coordinates_of("duplicates"), values).block_until_ready()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_whatever_is_used_of_a_checked_array_is_checked(format):
    """Each array alone, and of no entries the array as a whole, of which nothing is used."""
    values = np.ones(COUNT, np.float32)

    def checked(coordinates, values, nse):
        return made(coordinates, values, format=format, nse=nse).checked()

    leaves = jax.tree.leaves(checked(coordinates_of("all equal"), values, 3))
    uses = [lambda c, v, i=i: jax.tree.leaves(checked(c, v, 3))[i] for i in range(len(leaves))]
    for use in (*uses, lambda c, v: checked(c, v, 0).todense()):
        with pytest.raises(RUN_TIME_ERRORS, match=r"expected at most nnz=[03], got"):
            jax.block_until_ready(jax.jit(use)(coordinates_of("duplicates"), values))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_checked_array_without_entries_is_taken_by_checkpoint_and_its_gradient(in_order):
    empty, B = SparseArray.from_dense(np.zeros((M, N), np.float32)), np.ones((N, 2), np.float32)

    @jax.checkpoint
    def loss(A, B):
        return jnp.sum(spmm(A.checked(sorted=in_order), B)) + jnp.sum(B)

    np.testing.assert_array_equal(jax.jit(jax.grad(loss, 1))(empty, B), B)


def test_checked_coordinates_inside_jit():
    """COO of two and of three dimensions: a valid one stays as it is, and each fault is named."""
    good = [np.int32([0, 0, 2, 9]), np.int32([1, 3, 0, 9]), np.int32([2, 0, 0, 9])]

    def checked(bounds, values, *levels):
        format = SparseArray.from_dense(np.ones((1,) * len(levels)), format=COO).format
        index_arrays = (bounds, levels[0]), *((level,) for level in levels[1:])
        return SparseArray(values, index_arrays, None, (4,) * len(levels), format).checked()

    program = jax.jit(checked)
    bounds, values = np.int32([0, 3]), np.float32([1, 2, 3, np.nan])
    for levels in (good[:2], good):
        A = program(bounds, values, *levels)
        assert A.is_checked
        dense = np.zeros(A.shape, np.float32)
        for p in range(3):
            dense[tuple(x[p] for x in levels)] = values[p]
        np.testing.assert_array_equal(A.todense(), dense)
    found = [np.asarray(x) for x in program(bounds, values, *good[:2]).transposed]
    assert found[0].tolist() == [0, 1, 2, 2, 3] and found[1][:3].tolist() == [2, 0, 0]
    faults = [
        (np.int32([0, 5]), good, "bounds.1.: expected at most nnz=4, got 5"),
        (np.int32([1, 3]), good, "bounds.0.: expected 0, got 1"),
        (np.int32([0, -1]), good, "bounds.1.: expected at least 0"),
        (bounds, [good[0], np.int32([1, 4, 0, 9]), good[2]], "level 1.1.: expected 0 <= index < 4"),
        (bounds, [np.int32([0, 0, -1, 9]), *good[1:]], "level 0.2.: .*got -1"),
        (bounds, [good[0], np.int32([3, 1, 0, 9]), good[2]], "got entry 1 before entry 0"),
        (bounds, [x[[0, 0, 2, 3]] for x in good], "each once, got entry 1 like entry 0"),
    ]
    for wrong, levels, words in faults:
        with pytest.raises(RUN_TIME_ERRORS, match=words):
            jax.block_until_ready(program(wrong, values, *levels).values)
    with pytest.raises(ValueError, match="bounds and coordinates: expected shapes .2. and .4."):
        program(bounds, values, good[0], good[1][:3])
    with pytest.raises(NotImplementedError, match="nearest are CSR and COO"):
        jax.jit(lambda A: A.checked().values)(SparseArray.from_dense(dense, format=CSF(3)))


def test_duplicates_as_an_error_are_found_by_checked():
    values = np.ones(COUNT, np.float32)
    once = made(coordinates_of("each once"), values, duplicates="error")
    assert not once.is_checked and once.checked().is_checked
    repeated = made(coordinates_of("duplicates"), values, duplicates="error")
    with pytest.raises(ValueError, match="expected more than .*no duplicates"):
        repeated.checked()


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 512), ("bool", 1), ("int32", 512), ("uint8", 0)]
)
def test_sums_of_other_dtypes(dtype, expected):
    # In bfloat16 a sum of ones would stay at 256.
    coordinates = jnp.zeros((512, 2), jnp.int32)
    A = jax.jit(lambda c, v: SparseArray.from_coordinates(c, v, (2, 2), nse=3))(
        coordinates, jnp.ones(512, dtype)
    )
    assert A.dtype == dtype
    np.testing.assert_array_equal(np.asarray(A.values, np.float32), [expected, 0, 0])


def test_wide_coordinates_and_empty_shapes():
    coordinates = np.array([[0, 2**32], [2**32 + 1, 1], [1, 1]])
    with jax.enable_x64():
        A = jax.jit(lambda c: SparseArray.from_coordinates(c, [1.0, 2.0, 3.0], (2, 3)))(coordinates)
    np.testing.assert_array_equal(A.todense(), [[0, 0, 0], [0, 3, 0]])
    for shape in ((0, N), (M, 0)):
        A = made(coordinates_of("duplicates"), np.ones(COUNT, np.float32), shape=shape, nse=3)
        assert A.todense().shape == shape and A.overflow == 0 and not A.todense().any()
    A = made(np.zeros((0, 2), np.int32), np.zeros(0, np.float32), nse=4)
    assert A.nnz == 4 and not A.todense().any() and A.checked().is_checked


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("nse", [7, 60])
def test_dense(format, nse):
    make = jax.jit(partial(SparseArray.from_dense, format=format, nse=nse))
    rng = np.random.default_rng(2)
    x = np.where(rng.random((M, N)) < 0.4, rng.standard_normal((M, N)), 0).astype(np.float32)
    for dense in (x, np.zeros_like(x), np.ones_like(x)):
        places = np.argwhere(dense) if format != CSC else np.argwhere(dense.T)[:, ::-1]
        same(make(dense), {(i, j): dense[i, j] for i, j in places.tolist()}, nse)
    A = make(np.full((M, N), np.nan, np.float32))
    assert A.overflow == max(M * N - nse, 0) and np.isnan(A.values[: min(M * N, nse)]).all()
    assert A.is_checked == (nse == 60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "complex64"])
def test_dense_with_subnormal_numbers(dtype):
    tiny = np.asarray(float(jnp.finfo(dtype).tiny) / 4, dtype)  # XLA's arithmetic takes it for 0
    x = np.zeros((2, 3), dtype)
    x[0, 1], x[1, 2] = -tiny, tiny * 1j if dtype == "complex64" else tiny
    x[1, 0] *= -1  # -0 is 0
    for make in (SparseArray.from_dense, jax.jit(partial(SparseArray.from_dense, nse=4))):
        A = make(x)
        assert A.row_offsets.tolist() == [0, 1, 2] and A.column_indices[:2].tolist() == [1, 2]
        assert np.asarray(A.values)[:2].tobytes() == x[[0, 1], [1, 2]].tobytes()


@pytest.mark.parametrize(
    ("dtype", "numbers", "offsets"),
    [("float8_e5m2fnuz", [1, 2, np.nan, 0], [0, 3]), ("float8_e8m0fnu", [1, 2], [0, 2])],
)
def test_dense_with_small_floats(dtype, numbers, offsets):
    x = jnp.asarray([numbers], dtype)
    A = jax.jit(partial(SparseArray.from_dense, nse=4))(x)
    assert A.row_offsets.tolist() == offsets


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_dense_without_elements(shape):
    A = jax.jit(partial(SparseArray.from_dense, nse=3))(np.ones(shape, np.float32))
    assert A.shape == shape and A.todense().shape == shape and A.overflow == 0


def test_bcoo_inside_jit():
    rng = np.random.default_rng(3)
    dense = (rng.random((M, N)) < 0.3) * rng.standard_normal((M, N)).astype(np.float32)
    peer = jsparse.BCOO.fromdense(dense, nse=30)  # padding by indices past the end
    A = jax.jit(SparseArray.from_bcoo)(peer)
    assert A.nnz == 30 and A.is_checked
    np.testing.assert_array_equal(A.todense(), dense)
    A = jax.jit(partial(SparseArray.from_bcoo, nse=4, format=CSC))(peer)
    assert int(A.overflow) == (dense != 0).sum() - 4
    A = SparseArray.from_bcoo(peer, nse=30)
    assert A.nnz == 30
    np.testing.assert_array_equal(A.todense(), dense)


@pytest.mark.parametrize("distinct", [True, False])
def test_top_k_of_jax(distinct):
    rng = np.random.default_rng(4)
    values, indices = jax.lax.top_k(rng.standard_normal((M, N)).astype(np.float32), 4)
    if not distinct:
        indices = jnp.asarray(rng.integers(-1, N + 1, (M, 4)), jnp.int32)
    rows = np.repeat(np.arange(M), 4)
    coordinates = np.stack([rows, np.asarray(indices).reshape(-1)], 1)
    entries = entries_of(coordinates, np.asarray(values).reshape(-1))
    same(SparseArray.from_topk(indices, values, shape=(M, N)), entries, 4 * M)
    A = jax.jit(partial(SparseArray.from_topk, shape=(M, N)))(indices, values)
    same(A, entries, 4 * M)
    assert A.is_checked
    ones = jax.jit(partial(SparseArray.from_topk, shape=(M, N), nse=3))(indices)
    assert ones.overflow == len(entries) - 3 and ones.dtype == jnp.ones(()).dtype


@pytest.mark.parametrize("nse", [None, 5, 60])
def test_concrete_coordinates_are_as_before_and_padded(nse):
    coordinates, values = coordinates_of("duplicates"), np.arange(COUNT, dtype=np.float32)
    peer = scipy.sparse.coo_array((values, coordinates.T), shape=(M, N)).tocsr()
    peer.sum_duplicates()
    for format in FORMATS:
        make = partial(SparseArray.from_coordinates, coordinates, shape=(M, N), format=format)
        if nse == 5:
            with pytest.raises(ValueError, match=f"nse: expected at least {peer.nnz}, .*got 5"):
                make(values=values, nse=nse)
            continue
        for A in (make(values=values, nse=nse), jax.jit(lambda v: make(values=v, nse=nse))(values)):  # noqa: B023
            assert A.nnz == (peer.nnz if nse is None else nse)
            assert A.is_checked and A.overflow == 0 and A.checked().is_checked
            np.testing.assert_allclose(A.todense(), peer.toarray(), rtol=1e-6)
            np.testing.assert_allclose(A.T.asformat(CSR).todense(), peer.toarray().T, rtol=1e-6)


@pytest.mark.parametrize("nse", [5, 0, None])
def test_gradients(nse):
    room = 60 if nse is None else nse
    coordinates = coordinates_of("out of range")
    rng = np.random.default_rng(5)
    values, B = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (COUNT, (N, 3)))

    def product(values, B):
        return jnp.sin(spmm(made(coordinates, values, nse=nse), B))

    check_grads(jax.jit(product), (values, B), order=2, modes=["fwd", "rev"], atol=0.05, rtol=0.05)
    dense = jnp.asarray(made(coordinates, values).todense())
    of_dense = jax.jit(
        jax.grad(lambda x: jnp.sum(spmm(SparseArray.from_dense(x, nse=room), B) ** 2))
    )(dense)
    kept = np.arange(dense.size).reshape(dense.shape)
    stored = np.flatnonzero(dense)[:room]
    mask = np.isin(kept, stored).astype(np.float32)
    right = jax.grad(lambda x: jnp.sum(((x * mask) @ B) ** 2))(dense)
    np.testing.assert_allclose(of_dense, right * mask, rtol=1e-4, atol=1e-4)


def test_vmap_over_structures():
    rng = np.random.default_rng(6)
    stack = np.stack([coordinates_of(kind) for kind in KINDS])
    values = rng.standard_normal((len(KINDS), COUNT)).astype(np.float32)
    A = jax.jit(jax.vmap(partial(made, nse=12)))(stack, values)
    each = [made(c, v, nse=12) for c, v in zip(stack, values, strict=True)]
    np.testing.assert_array_equal(A.overflow, [a.overflow for a in each])
    dense = jax.vmap(SparseArray.todense)(A)
    np.testing.assert_allclose(dense, [a.todense() for a in each], rtol=1e-6)
    fit = jax.jit(jax.vmap(lambda c, v: made(c, v, nse=COUNT - 1).checked().todense()))
    expected = np.zeros(dense.shape)
    for place, v, c in zip(expected, values, stack, strict=True):
        for at, x in entries_of(c, v).items():
            place[at] = x
    np.testing.assert_allclose(fit(stack[:4], values[:4]), expected[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("nse", [5, 60])
def test_nothing_is_sorted_by_comparing(format, nse):
    make = dict(format=format, nse=nse)
    # A product by columns scatters where each core has an entry for each row of the result.
    product = "csr_scatter" if format == CSC and nse >= 2 * M else "csr"

    def of_coordinates(v, c):
        return made(c, v, **make)

    def of_dense(v, c):
        return SparseArray.from_dense(v.reshape(M, N), **make)

    def of_top_k(v, c):
        return SparseArray.from_topk(c[:, :4], v[: 4 * M].reshape(M, 4), shape=(M, N), **make)

    for build, size in ((of_coordinates, 54), (of_dense, 54), (of_top_k, 54)):
        loss = jax.grad(lambda v, c: jnp.sum(spmm(build(v, c), jnp.ones((N, 2), jnp.float32)) ** 2))  # noqa: B023
        c = jnp.zeros((size, 2) if build is of_coordinates else (M, 5), jnp.int32)
        with on_machine(Machine(cores=2)):
            text = jax.jit(loss).lower(jnp.ones(size, jnp.float32), c).as_text()
        assert "sgap_transpose_structure_v1" in text and f"sgap_spmm_{product}_v1" in text
        assert "stablehlo.sort" not in text


def test_exported_for_any_number_of_coordinates():
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in info()["ffi_targets"]]
    (n,) = jax.export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((n, 2), jnp.int32), jax.ShapeDtypeStruct((n,), jnp.float32)
    coordinates, values = coordinates_of("duplicates"), np.arange(COUNT, dtype=np.float32)
    for nse in (None, 50):
        f = jax.jit(lambda c, v: made(c, v, nse=nse).todense())  # noqa: B023
        exported = jax.export.export(f, disabled_checks=allowed)(*shapes)
        np.testing.assert_array_equal(exported.call(coordinates, values), f(coordinates, values))
    shapes = jax.ShapeDtypeStruct((n, 2), jnp.int32), jax.ShapeDtypeStruct((n, 3), jnp.float32)
    f = jax.jit(lambda c, x: select.route(c, N, block=4).gather(x))
    exported = jax.export.export(f, disabled_checks=allowed)(*shapes)
    x = np.random.default_rng(8).standard_normal((COUNT, 3)).astype(np.float32)
    right = np.asarray(f(coordinates, x))
    found = np.asarray(exported.call(coordinates, x))
    np.testing.assert_array_equal(found[: len(right)], right)
    assert not found[len(right) :].any()


def test_what_is_refused():
    coordinates, values = coordinates_of("duplicates"), np.ones(COUNT, np.float32)
    for format in (BCSR(2, 2), CSF(2)):
        with pytest.raises(NotImplementedError, match="nearest are CSR, CSC and COO"):
            made(coordinates, values, format=format)
        with pytest.raises(NotImplementedError, match="nearest are CSR, CSC and COO"):
            SparseArray.from_coordinates(coordinates, values, (M, N), format=format, nse=50)
        with pytest.raises(NotImplementedError, match="from_dense: .*nearest are CSR"):
            SparseArray.from_dense(np.eye(3), format=format, nse=3)
    with pytest.raises(NotImplementedError, match="a tensor of 3 dimensions"):
        jax.jit(partial(SparseArray.from_dense, format=COO, nse=4))(np.ones((2, 2, 2)))
    with pytest.raises(ValueError, match="nse must not be negative, got -1"):
        made(coordinates, values, nse=-1)
    with pytest.raises(TypeError, match="nse must be an integer, got 1.5"):
        SparseArray.from_dense(np.eye(3), nse=1.5)
    with pytest.raises(ValueError, match="nse: expected a concrete value"):
        jax.jit(lambda n: SparseArray.from_dense(np.eye(3), nse=n))(3)
    with pytest.raises(ValueError, match="duplicates: expected one of"):
        made(coordinates, values, duplicates="first")
    with pytest.raises(ValueError, match=r"expected shape \[nnz, 2\]"):
        made(coordinates[:, :1], values)
    with pytest.raises(ValueError, match="expected an integer dtype"):
        made(coordinates.astype(np.float32), values)
    with pytest.raises(ValueError, match="from_topk: shape: expected"):
        SparseArray.from_topk(np.zeros((3, 2), int), shape=(4, 5))
    with pytest.raises(ValueError, match=r"from_topk: values: expected shape \[3, 2\]"):
        SparseArray.from_topk(np.zeros((3, 2), int), np.ones(3), shape=(3, 5))
    with pytest.raises(ValueError, match="expected an index in"):
        SparseArray.from_coordinates([[0, N]], [1.0], (M, N), nse=3)
