"""Trees of fibers: CSF of tensors, DCSR of matrices, and a dense first level."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from format_invariants import invariants

from sgap_jax import COO, CSC, CSF, CSR, Compressed, Dense, Format, SparseArray, einsum, spmm
from sgap_jax import sparse_softmax as softmax

ROOTED = Format((Dense, Compressed, Compressed))
TREES = [CSF(3), CSF(3, order=(2, 0, 1)), ROOTED, Format(ROOTED.levels, (1, 2, 0))]
trees = pytest.mark.parametrize("format", TREES, ids=str)


def tensor(shape=(4, 5, 6), nnz=17, seed=0):
    """A dense tensor with `nnz` entries, none of them in the first slice along any mode."""
    rng = np.random.default_rng(seed)
    dense = np.zeros(shape, np.float32)
    inner = dense[1:, 1:, 1:]
    places = rng.choice(inner.size, nnz, replace=False)
    inner[np.unravel_index(places, inner.shape)] = rng.uniform(1, 2, nnz)
    return dense


def nodes(dense, modes, depth):
    """The sorted distinct prefixes of `depth` coordinates, by a loop over the entries."""
    found = zip(*np.nonzero(dense), strict=True)
    return sorted({tuple(int(at[mode]) for mode in modes[:depth]) for at in found})


@trees
def test_the_levels_are_the_distinct_prefixes(format):
    dense = tensor()
    T = SparseArray.from_dense(dense, format=format)
    above = [()]
    for depth, level in enumerate(T.index_arrays, 1):
        if not level:
            above = [(i,) for i in range(dense.shape[format.modes[0]])]
            continue
        found = nodes(dense, format.modes, depth)
        offsets, indices = (np.asarray(x) for x in level)
        assert indices.tolist() == [node[-1] for node in found]
        children = [sum(node[:-1] == parent for node in found) for parent in above]
        assert offsets.tolist() == [0, *itertools.accumulate(children)]
        assert offsets.dtype == indices.dtype == np.int32
        above = found
    expected = [dense[tuple(np.array(node)[np.argsort(format.modes)])] for node in above]
    assert T.values.tolist() == expected


@trees
@pytest.mark.parametrize("nnz", [0, 17])
def test_conversions_and_the_transpose(format, nnz):
    dense = tensor(nnz=nnz)
    T = SparseArray.from_dense(dense, format=format).checked()
    for other in (COO, *TREES):
        U = T.asformat(other).checked()
        assert U.format == (Format(COO.levels + COO.levels[1:]) if other == COO else other)
        np.testing.assert_array_equal(U.todense(), dense)
        back = U.asformat(format)
        for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(T), strict=True):
            np.testing.assert_array_equal(x, y)
    assert all(x is y for x, y in zip(jax.tree.leaves(T), jax.tree.leaves(T.T), strict=True))
    np.testing.assert_array_equal(jax.jit(lambda t: t.T.todense())(T), dense.T)
    coordinates = np.stack(T.coordinates(), 1)
    again = SparseArray.from_coordinates(coordinates, T.values, T.shape, format=format)
    np.testing.assert_array_equal(again.todense(), dense)


@trees
def test_einsum_and_its_gradient(format):
    dense = tensor()
    T = SparseArray.from_dense(dense, format=format)
    X, Y = np.ones((5, 3), np.float32), np.full((6, 3), 2, np.float32)
    mttkrp = jax.jit(lambda t: einsum("ijk,jr,kr->ir", t, X, Y))
    np.testing.assert_allclose(mttkrp(T), np.einsum("ijk,jr,kr->ir", dense, X, Y), rtol=1e-6)
    gradient = jax.grad(lambda v: mttkrp(T.with_values(v)).sum())(T.values)
    np.testing.assert_allclose(gradient, np.full(T.nnz, 6), rtol=1e-6)


@pytest.mark.parametrize("format", [CSF(2), CSF(2).transposed], ids=str)
@pytest.mark.parametrize("name", ["empty_rows_at_both_ends", "padded", "no_entries", "no_rows"])
def test_hypersparse_matrices(name, format):
    case = BATTERY[name]
    dense = case.dense()
    A = array(case, jnp.float64).asformat(format)
    assert A.nnz == case.stored  # padding does not become nodes
    invariants(A, dense)
    invariants(A.T, dense.T)
    B = np.random.default_rng(0).standard_normal((dense.shape[1], 3))
    np.testing.assert_allclose(jax.jit(spmm)(A, B), dense @ B, rtol=1e-12, atol=1e-12)
    for back in (CSR, CSC, COO):
        invariants(jax.jit(lambda a, f=back: a.asformat(f))(A), dense)
    S = jax.jit(softmax)(A)
    assert S.format == format
    np.testing.assert_allclose(S.todense(), softmax(A.asformat(CSR)).todense(), rtol=1e-12)


def test_fields_that_nodes_are_not():
    A = SparseArray.from_dense(np.eye(3), format=CSF(2))
    np.testing.assert_array_equal(A.column_indices, [0, 1, 2])
    for name in ("row_offsets", "column_offsets", "row_indices"):
        with pytest.raises(AttributeError, match="asformat"):
            getattr(A, name)


def test_padding_of_a_tree_is_ignored():
    T = SparseArray.from_dense(tensor(), format=CSF(3))
    (bounds, rows), *rest, (offsets, indices) = T.index_arrays
    nan = jnp.full(2, jnp.nan, T.dtype)
    levels = ((bounds, rows), *rest, (offsets, jnp.append(indices, jnp.array([99, 99], jnp.int32))))
    fields = (jnp.append(T.values, nan), levels, None, T.shape, T.format)
    padded = SparseArray(*fields).checked()
    np.testing.assert_array_equal(jax.jit(lambda t: t.todense())(padded), T.todense())
    np.testing.assert_array_equal(padded.asformat(COO).values, T.values)


def test_a_traced_structure_has_no_number_of_nodes():
    A = SparseArray.from_dense(np.eye(3))
    with pytest.raises(ValueError, match="traced structure.*static"):
        jax.jit(lambda a: a.asformat(CSF(2)))(A)
    with pytest.raises(NotImplementedError, match="traced CSF.*CSR"):
        jax.jit(lambda a: a.checked())(A.asformat(CSF(2)))
    with pytest.raises(ValueError, match="from_coordinates"):
        SparseArray.from_arrays(np.ones(1), [0, 1], [0], shape=(1, 1), format=CSF(2))


@pytest.mark.parametrize(
    ("level", "part", "position", "value", "words"),
    [
        (0, 0, 1, 9, "offsets of level 0"),
        (0, 1, 0, 7, "indices of level 0"),
        (1, 0, 1, 0, "sorted, no duplicates"),
        (1, 1, 0, -1, "indices of level 1"),
        (2, 0, 0, 1, "expected 0, got 1"),
        (2, 1, 0, 6, "indices of level 2"),
    ],
)
def test_damage_is_found(level, part, position, value, words):
    T = SparseArray.from_dense(tensor(), format=CSF(3))
    levels = [list(arrays) for arrays in T.index_arrays]
    levels[level][part] = levels[level][part].at[position].set(value)
    broken = SparseArray(T.values, tuple(map(tuple, levels)), None, T.shape, T.format)
    with pytest.raises(ValueError, match=words):
        broken.checked()
    bounds = jnp.array([0, 2], jnp.int32), jnp.array([0, 2], jnp.int32)
    childless = jnp.array([0, 0, 1], jnp.int32), jnp.array([1], jnp.int32)
    with pytest.raises(ValueError, match="no node is without an entry"):
        SparseArray(jnp.ones(1), (bounds, childless), None, (4, 4), CSF(2)).checked()
    short = SparseArray(T.values[1:], T.index_arrays, None, T.shape, T.format)
    with pytest.raises(ValueError, match="values"):
        short.checked()
    offsets, indices = T.index_arrays[1]
    levels = (T.index_arrays[0], (offsets[:-1], indices), T.index_arrays[2])
    with pytest.raises(ValueError, match="expected shape"):
        SparseArray(T.values, levels, None, T.shape, T.format).checked()


def test_only_trees_that_are_compressed_below_the_root():
    for format in (Format((Compressed, Dense)), Format((Dense, Compressed(unique=False)))):
        with pytest.raises(NotImplementedError, match="CSR"):
            SparseArray.from_dense(np.eye(2), format=format)
