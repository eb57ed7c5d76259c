"""The structure of the transpose inside jit: a counting sort, equal to the sort of plain JAX."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_call import run
from unchecked_structures import anything

from sgap_jax import SparseArray, spmm
from sgap_jax.formats.structure import transpose_by_comparing, transpose_structure
from sgap_jax.runtime.native import native
from sgap_jax.schedules.cpu import CpuTile
from sgap_jax.schedules.machine import Machine, on_machine


def valid(rng, rows, nnz, size, spare=0):
    lengths = (
        np.bincount(rng.integers(0, rows, nnz), minlength=rows) if nnz else np.zeros(rows, int)
    )
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = rng.integers(0, max(size, 1), nnz + spare).astype(np.int32)
    return offsets, indices


def same(offsets, indices, size):
    given = jnp.asarray(offsets), jnp.asarray(indices)
    found = tuple(jax.jit(transpose_structure, static_argnums=2)(*given, size))
    expected = jax.jit(transpose_by_comparing, static_argnums=2)(*given, size)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    return [np.asarray(x) for x in found]


@pytest.mark.parametrize("rows", [0, 1, 2, 30])
@pytest.mark.parametrize("nnz", [0, 1, 40])
@pytest.mark.parametrize("size", [0, 1, 25])
def test_small_structures_with_any_contents(rows, nnz, size):
    rng = np.random.default_rng(rows + nnz + size)
    for _ in range(5):
        same(*anything(rng, rows, nnz, size), size)
    if rows and size:
        same(*valid(rng, rows, nnz, size, spare=3), size)


@pytest.mark.parametrize(("rows", "nnz", "size"), [(900, 200_000, 700), (5, 100_000, 90_000)])
def test_entries_and_indices_in_pieces(rows, nnz, size):
    rng = np.random.default_rng(0)
    offsets, indices = valid(rng, rows, nnz, size, spare=1000)
    ends, of_rows, permutation = same(offsets, indices, size)
    assert sorted(permutation) == list(range(nnz + 1000))
    np.testing.assert_array_equal(np.diff(ends), np.bincount(indices[:nnz], minlength=size))
    columns = np.repeat(np.arange(size), np.diff(ends))
    np.testing.assert_array_equal(indices[permutation[:nnz]], columns)
    np.testing.assert_array_equal(
        of_rows[:nnz], np.repeat(np.arange(rows), np.diff(offsets))[permutation[:nnz]]
    )
    same(*anything(rng, rows, nnz, size), size)


def test_any_number_of_threads_and_batches():
    rng = np.random.default_rng(1)
    (nnz, size), count = (70_000, 5000), 3
    each = [valid(rng, 40, nnz, size) for _ in range(count)]
    arrays = [np.stack(x) for x in zip(*each, strict=True)]
    results = [((count, n), np.int32) for n in (size + 1, nnz, nnz)]
    one, *others = (
        run("sgap_transpose_structure_v1", arrays, results, {}, native.isa(), threads)
        for threads in (1, 2, 7)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, one)
    many = jax.jit(jax.vmap(lambda o, i: transpose_structure(o, i, size)))(*arrays)
    jax.tree.map(np.testing.assert_array_equal, list(many), list(one))
    for b, (offsets, indices) in enumerate(each):
        jax.tree.map(
            np.testing.assert_array_equal, [x[b] for x in one], same(offsets, indices, size)
        )


def test_programs_have_no_comparison_sort():
    A = SparseArray.from_dense(np.eye(50, dtype=np.float32))
    B = jnp.ones((50, 4), jnp.float32)

    def loss(values, offsets, columns):
        made = SparseArray.from_arrays(values, offsets, columns, shape=(50, 50))
        return jnp.sum(spmm(made, B) ** 2)

    program = jax.jit(jax.grad(loss)).lower(A.values, A.row_offsets, A.column_indices)
    assert " sort(" not in program.compile().as_text()


@pytest.mark.tier("test")
def test_products_that_need_no_transposed_structure():
    """A^T X of a structure made inside jit, by rows where all cores have work and by columns where
    they have not: any contents, against plain loops; derivatives; several structures."""
    rng, (m, k, n, nnz) = np.random.default_rng(2), (40, 6, 40, 200)
    each = [valid(rng, m, nnz - 9, k, spare=9), *(anything(rng, m, nnz, k) for _ in range(2))]
    offsets, columns = (np.stack(x) for x in zip(*each, strict=True))
    values = rng.standard_normal((3, nnz)).astype(np.float32)
    X = rng.standard_normal((m, n)).astype(np.float32)

    def product(values, offsets, columns, X):
        A = SparseArray.from_arrays(values, offsets, columns, shape=(m, k))
        return spmm(A, X, transpose=True)

    def squares(*operands):
        return jnp.sum(product(*operands) ** 2)

    expected = np.zeros((3, k, n))
    for s in range(3):
        ends = np.maximum.accumulate(np.clip(offsets[s].astype(np.int64), 0, nnz))
        for i in range(m):
            for p in range(ends[i], ends[i + 1]):
                if 0 <= columns[s, p] < k:
                    expected[s, columns[s, p]] += values[s, p] * X[i].astype(np.float64)
    every = (0, 0, 0, None)
    anew = lambda f: lambda *operands: f(*operands)  # JAX keeps what a function lowers to
    gradients = []
    for cores, target in ((2, "sgap_spmm_csr_scatter_v1"), (64, "sgap_spmm_csr_v1")):
        with on_machine(Machine(cores=cores)):
            one = jax.jit(anew(product)).lower(values[0], offsets[0], columns[0], X)
            all_ = jax.jit(jax.vmap(anew(product), every))
            many = all_.lower(values, offsets, columns, X).compile()
            assert target in one.as_text()
            sorted_ = '"sgap_transpose_structure_v1"' in one.compile().as_text()
            assert sorted_ == (cores == 64)
            slope = jax.jit(jax.vmap(jax.grad(anew(squares), (0, 3)), every))
            gradients.append(slope.lower(values, offsets, columns, X).compile())
        np.testing.assert_allclose(many(values, offsets, columns, X), expected, atol=1e-4)
    by_rows, by_columns = (f(values, offsets, columns, X) for f in gradients)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), by_rows, by_columns)
    with on_machine(Machine(cores=2)):  # bfloat16 is summed in float32
        narrow = values[0].astype("bfloat16"), offsets[0], columns[0], X.astype("bfloat16")
        half = jax.jit(anew(product))(*narrow)
        rounded = (narrow[0].astype("float32"), *narrow[1:3], narrow[3].astype("float32"))
        wide = jax.jit(anew(product))(*rounded)
    # One rounding, of sums of the same numbers.
    np.testing.assert_allclose(half.astype(np.float32), wide, rtol=2**-8, atol=1e-5)


def test_few_columns_of_a_transposed_product_go_by_rows():
    """Where the rows are known to say what the columns say, and each core has entries for all."""
    rng = np.random.default_rng(4)
    offsets, columns = valid(rng, 300, 2000, 500)
    at = np.stack([np.repeat(np.arange(300), np.diff(offsets)), columns], axis=1)
    A = SparseArray.from_coordinates(at, np.ones(2000, np.float32), shape=(300, 500))
    x = rng.standard_normal((300, 2)).astype(np.float32)
    unchecked = replace(A, transposed=tuple(A.transposed))
    one_tile = CpuTile(nonzeros=100)
    for cores, array, schedule, scatters in (
        (2, A, None, True),
        (64, A, None, False),
        (2, A, one_tile, False),
        (2, unchecked, None, False),
    ):
        with on_machine(Machine(cores=cores)):
            product = lambda A, x, s=schedule: spmm(A, x, transpose=True, schedule=s)  # noqa: E731
            program = jax.jit(product).lower(array, x)
        assert ("sgap_spmm_csr_scatter_v1" in program.as_text()) == scatters
        expected = np.asarray(A.todense()).T @ x
        np.testing.assert_allclose(program.compile()(array, x), expected, rtol=1e-4, atol=1e-4)


def test_the_handler_refuses_other_shapes():
    offsets, indices = np.int32([0, 1, 2]), np.int32([0, 1])
    for results in ([(3,), (2,), (3,)], [(0,), (2,), (2,)], [(1, 3), (2,), (2,)]):
        shapes = [(shape, np.int32) for shape in results]
        with pytest.raises(ValueError, match="transpose_structure: expected offsets"):
            run("sgap_transpose_structure_v1", [offsets, indices], shapes, {}, native.isa(), 1)
