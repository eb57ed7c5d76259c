"""Index arrays that nobody checked: a slice of `make fuzz` (structure_fuzz.py), the same on CUDA's
kernels in the emulator, and what says that an array was checked."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structure_fuzz as fuzz
from conftest import backend_of

from sgap_jax import COO, CSC, CSR, CVS, SparseArray, nn, row_max, sparse_softmax, spmm
from sgap_jax.formats import structure
from sgap_jax.primitives import structures

# Every operation on one format, and every format on one operation; `make fuzz` has all of both.
SLICE = [
    case
    for i, case in enumerate(fuzz.cases())
    if case[2] != "second" and (case[0] in ("spmm", "sddmm") or i % 5 == 0)
]


def named(case):
    return "-".join(case)


@pytest.mark.parametrize("case", SLICE, ids=named)
def test_the_kernels_do_what_the_plain_lowering_does(case):
    rng = np.random.default_rng(sum(map(ord, named(case))))
    fuzz.compare(case, fuzz.several(rng, case[1], 12))


@pytest.mark.seconds(check=1.2, test=4.8)
@pytest.mark.parametrize("name", ["CSR", "CSC", "COO", "DCSR"])
def test_what_takes_part_is_what_the_definition_says(name):
    rng, values = np.random.default_rng(5), np.asarray(fuzz.values_of(name))
    X, B = np.asarray(fuzz.normal(7, 3)), np.asarray(fuzz.normal(6, 3))
    draws = fuzz.several(rng, name, 200)
    operations = ("todense", "spmm", "row_sum", "row_max", "sddmm", "softmax")
    results = [fuzz.run((operation, name, "value"), draws)[0] for operation in operations]
    each = zip(*draws, *results, strict=True)
    for *arrays, todense, product, sums, maxima, sampled, softmax in each:
        expected = fuzz.dense(name, values, arrays)
        np.testing.assert_allclose(todense, expected, atol=1e-6)
        np.testing.assert_allclose(product, expected @ B, atol=1e-5)
        np.testing.assert_allclose(sums, expected.sum(1), atol=1e-5)
        greatest = np.full(fuzz.M, -np.inf)
        for p, i, _ in fuzz.counted(name, arrays):
            greatest[i] = max(greatest[i], values[p])
        np.testing.assert_allclose(maxima, np.tanh(greatest), atol=1e-5)
        # Results at entries: zero where one takes no part.
        dots, e, rows = np.zeros(len(values)), np.zeros(len(values)), np.zeros(fuzz.M)
        for p, i, j in fuzz.counted(name, arrays):
            dots[p] = 0.5 * values[p] * (X[i] @ B[j])
            e[p] = np.exp(-0.5 * values[p])
            rows[i] += e[p]
        for p, i, _ in fuzz.counted(name, arrays):
            e[p] /= rows[i]
        np.testing.assert_allclose(sampled, dots, atol=1e-5)
        np.testing.assert_allclose(softmax, e, atol=1e-5)


def test_offsets_of_other_platforms():
    rng = np.random.default_rng(6)
    draws = np.stack([fuzz.draw_offsets(rng, 9, 13) for _ in range(200)])
    native = structure.valid_offsets(jnp.asarray(draws), 13)
    plain = structures._valid_reference(jnp.asarray(draws), nnz=13, schedule=None)
    np.testing.assert_array_equal(plain, native)
    np.testing.assert_array_equal(native, np.maximum.accumulate(np.clip(draws, 0, 13), axis=1))


@pytest.mark.parametrize("operation", ["spmm", "spmm_transpose", "sddmm", "gspmm_max", "softmax"])
@pytest.mark.parametrize("name", ["CSR", "CVS"])
def test_each_element_of_a_batch_has_its_own_values(name, operation):
    rng, B = np.random.default_rng(11), fuzz.normal(6, 3)
    values = jnp.stack([fuzz.values_of(name) * scale for scale in (1, -2, 3)])

    def one(values, arrays):
        return fuzz.OPERATIONS[operation](fuzz.matrix(name, values, arrays), B, None)

    alone, together = jax.jit(one), jax.jit(jax.vmap(one, (0, None)))
    for arrays in zip(*fuzz.several(rng, name, 12), strict=True):
        for got, own in zip(together(values, arrays), values, strict=True):
            np.testing.assert_allclose(got, alone(own, arrays), rtol=1e-5, atol=1e-5)


EMULATED = ["spmm", "spmm_transpose", "sddmm", "gspmm_max", "softmax", "attention"]


@pytest.mark.parametrize("name", ["CSR", "CVS"])
@pytest.mark.parametrize("operation", EMULATED)
def test_cuda_kernels_stay_within_their_operands(operation, name):
    schedule = backend_of("emulated", "")  # it faults at an access out of bounds
    rng, values, B = np.random.default_rng(7), fuzz.values_of(name), fuzz.normal(6, 3)

    def total(values, B, arrays):
        return jnp.sum(
            jnp.sin(fuzz.OPERATIONS[operation](fuzz.matrix(name, values, arrays), B, schedule))
        )

    slope = jax.jit(jax.grad(total, argnums=(0, 1)))
    draws = fuzz.several(rng, name, 6)
    results = fuzz.run((operation, name, "gradient"), draws)
    for *arrays, d_values, d_B in zip(*draws, *results, strict=True):
        expected = d_values, d_B
        for got, want in zip(slope(values, B, arrays), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def plain(A):
    """The same index arrays in tuples that say nothing of a check."""
    levels = tuple(tuple(level) for level in A.index_arrays)
    return dataclasses.replace(A, index_arrays=levels, transposed=tuple(A.transposed))


A = SparseArray.from_dense(np.eye(5, 4, dtype=np.float32) + np.eye(5, 4, k=2, dtype=np.float32))
B = jnp.ones((4, 2), jnp.float32)


@pytest.mark.parametrize("format", [CSR, CSC, COO, CVS(2)], ids=str)
def test_checked_index_arrays_stay_checked(format):
    S, seen = A.asformat(format), []
    assert S.is_checked and S.T.is_checked and S.with_values(S.values).is_checked
    assert S.asformat(CSR).is_checked and (S + S).is_checked and S[0:4].is_checked

    def note(S, *_):
        seen.append(S.is_checked and S.asformat(CSR).is_checked)
        return S, None

    jax.jit(note)(S)
    jax.lax.scan(note, S, None, length=2)
    jax.vmap(lambda v: note(S.with_values(v))[0].values)(jnp.stack([S.values] * 2))
    jax.grad(lambda v: jnp.sum(note(S.with_values(v))[0].values))(S.values)
    assert len(seen) >= 4 and all(seen)
    assert jax.jit(lambda S: S)(S).is_checked
    assert not plain(S).is_checked


def test_index_arrays_made_in_jit_are_not_checked_until_they_are():
    seen = []

    @jax.jit
    def product(values, offsets, columns):
        S = SparseArray.from_arrays(values, offsets, columns, shape=A.shape)
        seen.extend([S.is_checked, S.checked().is_checked, S.checked().T.is_checked])
        return spmm(S, B)

    got = product(A.values, A.row_offsets, A.column_indices)
    assert seen == [False, True, True]
    assert plain(A).checked().is_checked
    np.testing.assert_array_equal(got, spmm(A, B))


@pytest.mark.parametrize("n", [1, 3, 32])
def test_valid_arrays_give_the_same_bits_whether_checked_or_not(n):
    rng = np.random.default_rng(n)
    dense = np.where(rng.random((300, 200)) < 0.2, rng.standard_normal((300, 200)), 0)
    S, X = SparseArray.from_dense(dense, dtype=np.float32), fuzz.normal(200, n)
    np.testing.assert_array_equal(spmm(S, X), spmm(plain(S), X))
    # Few columns of a transposed product go by rows where the arrays were checked.
    rounding = 1e-6 if n <= 8 else 0
    transposed = (spmm(A, fuzz.normal(300, n)) for A in (S.T, plain(S).T))
    np.testing.assert_allclose(*transposed, rtol=rounding, atol=20 * rounding)


def test_self_loops_of_arrays_that_nobody_checked():
    rng, M = np.random.default_rng(3), fuzz.M

    @jax.jit
    def with_loops(values, offsets, columns):
        S = SparseArray.from_arrays(values, offsets, columns, shape=(M, M))
        return nn.add_self_loops(S).todense()

    for _ in range(100):
        offsets, columns = fuzz.draw_offsets(rng, M, 13), fuzz.draw_indices(rng, 13, M)
        values = rng.standard_normal(13).astype(np.float32)
        expected = np.eye(M)
        for row, entries in enumerate(fuzz.segments(offsets, 13)):
            for p in entries:
                if 0 <= columns[p] < M:
                    expected[row, columns[p]] += values[p]
        np.testing.assert_allclose(with_loops(values, offsets, columns), expected, atol=1e-5)


@pytest.mark.parametrize("format", [CSR, CVS(2)], ids=str)
def test_a_scale_that_is_an_array_is_that_number(format):
    rng, name = np.random.default_rng(4), "CSR" if format == CSR else "CVS"
    draws = fuzz.several(rng, name, 50)

    def softmax(scale, arrays):
        return sparse_softmax(fuzz.matrix(name, fuzz.values_of(name), arrays), scale=scale).values

    number = jax.lax.map(partial(softmax, 0.5), draws)
    array = jax.lax.map(partial(softmax, jnp.float32(0.5)), draws)
    np.testing.assert_allclose(array, number, rtol=1e-6)


def test_integers_have_no_row_max_kernel_and_say_so():
    values, offsets = jnp.arange(3), jnp.asarray([0, 3])
    with pytest.raises(NotImplementedError, match="row_max: no kernel for dtype int"):
        jax.jit(lambda o, c: row_max(SparseArray.from_arrays(values, o, c, shape=(1, 3))))(
            offsets.astype(jnp.int32), jnp.arange(3, dtype=jnp.int32)
        )


@pytest.mark.parametrize("where", [0, 70_000, 99_999])
def test_one_wrong_index_among_many(where):
    # More entries than one task has: most tasks are done before, or with, the one that fails.
    rng = np.random.default_rng(where)
    columns = rng.integers(0, 50, 100_000).astype(np.int32)
    offsets = np.linspace(0, 100_000, 401).astype(np.int32)
    values = rng.standard_normal(100_000).astype(np.float32)
    X = fuzz.normal(50, 8)
    product = jax.jit(
        lambda v, c: spmm(SparseArray.from_arrays(v, offsets_, c, shape=(400, 50)), X)
    )
    offsets_ = jnp.asarray(offsets)
    wrong, zeroed = columns.copy(), values.copy()
    wrong[where], zeroed[where] = 50, 0
    np.testing.assert_allclose(
        product(values, wrong), product(zeroed, columns), rtol=1e-5, atol=1e-5
    )
