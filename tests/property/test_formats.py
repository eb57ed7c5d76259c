"""Laws of the formats on generated matrices: round trips, transposition, order, duplicates."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, fill_in, read, write

STORED = [CSR, CSC, COO, COO.transposed, CSF(2)]
DTYPES = [np.float32, np.float64, np.complex64, np.int32]
# The first call on a shape compiles, so there is no deadline.
law = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
formats = st.sampled_from(STORED)
# Of the sizes 0, 1, 2 and 5 that `entries` draws, some end with a block and some within one.
BLOCKED = [CVS(2), CVS(5).transposed, BCSR(2, 2), BCSR(5, 1), BCSR(2, 3).transposed]
blocked = st.sampled_from(BLOCKED)
some = settings(law, max_examples=6)  # each is a dozen compilations


@st.composite
def entries(draw, ndim=2, dtypes=DTYPES):
    """(coordinates [nnz, ndim] in any order with repeats, values, shape)."""
    # Few sizes, so that compiled programs are used again.
    shape = tuple(draw(st.sampled_from([0, 1, 2, 5])) for _ in range(ndim))
    most = 8 if all(shape) else 0
    nnz = draw(st.integers(0, most))
    coordinates = np.array(
        [[draw(st.integers(0, size - 1)) for size in shape] for _ in range(nnz)], np.int32
    ).reshape(nnz, ndim)
    dtype = draw(st.sampled_from(dtypes))
    # Small integers add up exactly in every order.
    values = draw(hnp.arrays(np.int32, nnz, elements=st.integers(-8, 8))).astype(dtype)
    return coordinates, values, shape


def dense_of(coordinates, values, shape):
    out = np.zeros(shape, values.dtype)
    np.add.at(out, tuple(coordinates.T), values)
    return out


def concrete(A):
    return [np.asarray(x) for x in A.coordinates()], np.asarray(A.values)


def identical(A, B):
    assert (A.shape, A.format, A.dtype) == (B.shape, B.format, B.dtype)
    for x, y in zip([*concrete(A)[0], A.values], [*concrete(B)[0], B.values], strict=True):
        np.testing.assert_array_equal(x, y)


@law
@given(entries(), formats)
def test_coordinates_mean_a_sum(data, format):
    A = SparseArray.from_coordinates(*data, format=format).checked()
    np.testing.assert_array_equal(A.todense(), dense_of(*data))
    assert A.nnz == len(np.unique(data[0], axis=0))
    assert A.dtype == data[1].dtype


@law
@given(entries(), formats, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(data, format, random):
    coordinates, values, shape = data
    order = np.array(random.sample(range(len(values)), len(values)), int)
    identical(
        SparseArray.from_coordinates(coordinates, values, shape, format=format),
        SparseArray.from_coordinates(coordinates[order], values[order], shape, format=format),
    )


@law
@given(entries(), formats)
def test_duplicates_are_refused_exactly_when_there_are_any(data, format):
    def build():
        return SparseArray.from_coordinates(*data, format=format, duplicates="error")

    if len(np.unique(data[0], axis=0)) == len(data[0]):
        build().checked()
    else:
        with pytest.raises(ValueError, match="more than once"):
            build()


@law
@given(entries(), formats)
def test_transposition(data, format):
    A = SparseArray.from_coordinates(*data, format=format)
    identical(A.T.T, A)
    np.testing.assert_array_equal(A.T.checked().todense(), dense_of(*data).T)
    # The transpose by sharing is the transpose by construction.
    coordinates, values, shape = data
    swapped = SparseArray.from_coordinates(
        coordinates[:, ::-1], values, shape[::-1], format=format.transposed
    )
    identical(A.T, swapped)


@law
@given(entries(), formats, formats, formats)
def test_conversion_is_canonical(data, first, second, third):
    A = SparseArray.from_coordinates(*data, format=first)
    direct = SparseArray.from_coordinates(*data, format=third)
    identical(A.asformat(second).asformat(third).checked(), direct)


@some
@given(entries(), blocked, st.sampled_from([*STORED, *BLOCKED]))
def test_blocks_come_back_from_every_format(data, format, second):
    A = SparseArray.from_coordinates(*data, format=format).checked()
    np.testing.assert_array_equal(A.todense(), dense_of(*data))
    B = A.asformat(second).checked()
    np.testing.assert_array_equal(B.todense(), dense_of(*data))
    back = B.asformat(format).checked()
    np.testing.assert_array_equal(back.todense(), dense_of(*data))
    # The zeros inside blocks are entries by now, so that none is lost: B may have added some.
    assert back.nnz == A.nnz or second.block_shape
    identical(A.T.T, A)
    np.testing.assert_array_equal(A.T.todense(), dense_of(*data).T)
    entries_ = SparseArray.from_coordinates(*data)
    assert A.nnz == round(fill_in(entries_, format) * entries_.nnz)


@some
@given(entries(dtypes=[np.float32, np.complex64, np.int32]), blocked)
def test_blocks_in_peers_and_files(tmp_path, data, format):
    A = SparseArray.from_coordinates(*data, format=format)
    identical(SparseArray.from_scipy(A.to_scipy(), format=format), A)
    write(tmp_path / "a.npz", A)
    identical(read(tmp_path / "a.npz", format=format, dtype=A.dtype), A)
    if A.nnz and all(A.shape):
        identical(SparseArray.from_bcoo(A.to_bcoo(), format=format), A)
        identical(SparseArray.from_bcsr(A.to_bcsr(), format=format), A)


@law
@given(entries(), formats, st.sampled_from(["csr", "csc", "coo"]))
def test_scipy_round_trip(data, format, kind):
    A = SparseArray.from_coordinates(*data, format=format)
    identical(SparseArray.from_scipy(A.to_scipy().asformat(kind), format=format), A)
    coordinates, values, shape = data
    a = scipy.sparse.coo_array((values, tuple(coordinates.T)), shape=shape)
    identical(SparseArray.from_scipy(a, format=format), A)


@law
@given(entries(), formats)
def test_bcoo_and_bcsr_round_trip(data, format):
    A = SparseArray.from_coordinates(*data, format=format)
    if A.nnz and all(A.shape):
        identical(SparseArray.from_bcoo(A.to_bcoo(), format=format), A)
        identical(SparseArray.from_bcsr(A.to_bcsr(), format=format), A)


@law
@given(entries(), formats)
def test_dense_round_trip_drops_zeros_only(data, format):
    dense = dense_of(*data)
    A = SparseArray.from_dense(dense, format=format).checked()
    np.testing.assert_array_equal(A.todense(), dense)
    assert A.nnz == np.count_nonzero(dense)


@law
@given(entries(), st.integers(0, 4), st.sampled_from([CSR, CSC]))
def test_padding_changes_nothing(data, padding, format):
    A = SparseArray.from_coordinates(*data, format=format)
    offsets, indices = A.index_arrays[1]
    junk = np.array([7, -3, 2**30, 0][:padding], np.int32)
    padded = SparseArray.from_arrays(
        np.concatenate([A.values, np.full(padding, 99, A.dtype)]),
        offsets,
        np.concatenate([indices, junk]),
        shape=A.shape,
        format=format,
    )
    assert padded.nnz == A.nnz + padding
    for target in STORED:
        B = padded.asformat(target).checked()
        np.testing.assert_array_equal(B.todense(), dense_of(*data))
        np.testing.assert_array_equal(B.row_lengths, A.row_lengths)
        identical(SparseArray.from_scipy(B.to_scipy(), format=target), A.asformat(target))


@law
@given(entries(ndim=3))
def test_tensors(data):
    A = SparseArray.from_coordinates(*data, format=COO).checked()
    np.testing.assert_array_equal(A.todense(), dense_of(*data))
    np.testing.assert_array_equal(A.T.todense(), dense_of(*data).T)


SUFFIXES = [".mtx", ".mtx.gz", ".npz", ".tns", ".tns.gz"]
# No subnormals: XLA on the CPU may flush them.
FLOATS = {
    np.float32: st.floats(width=32, allow_subnormal=False),
    np.float64: st.floats(allow_subnormal=False),
}


@law
@given(entries(dtypes=[np.float32, np.float64]), st.sampled_from(SUFFIXES), formats, st.data())
def test_files_keep_every_bit(tmp_path, data, suffix, format, draw):
    A = SparseArray.from_coordinates(*data, format=format)
    number = FLOATS[A.dtype.type]  # infinities and NaN among them
    A = A.with_values(draw.draw(hnp.arrays(A.dtype, A.nnz, elements=number)))
    path = tmp_path / f"a{suffix}"
    write(path, A)
    identical(read(path, format=format, dtype=A.dtype).checked(), A)


@law
@given(
    entries(ndim=3, dtypes=[np.float32, np.int32]),
    st.sampled_from([".npz", ".tns"]),
    st.sampled_from([COO, CSF(3)]),
)
def test_tensor_files(tmp_path, data, suffix, format):
    A = SparseArray.from_coordinates(*data, format=format)
    write(tmp_path / f"a{suffix}", A)
    identical(read(tmp_path / f"a{suffix}", format=format, dtype=A.dtype).checked(), A)


@law
@given(entries(dtypes=[np.complex64, np.int32]), st.sampled_from([".mtx", ".npz"]), formats)
def test_complex_and_integer_files(tmp_path, data, suffix, format):
    A = SparseArray.from_coordinates(*data, format=format)
    write(tmp_path / f"a{suffix}", A)
    identical(read(tmp_path / f"a{suffix}", format=format, dtype=A.dtype), A)


@law
@given(entries(dtypes=[np.float32]), st.sampled_from([".smtx", ".smtx.gz"]), formats)
def test_pattern_files(tmp_path, data, suffix, format):
    A = SparseArray.from_coordinates(*data, format=format)
    A = A.with_values(np.ones(A.nnz, np.float32))
    write(tmp_path / f"a{suffix}", A)
    identical(read(tmp_path / f"a{suffix}", format=format).checked(), A)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_narrow_floats_in_files(tmp_path, dtype, suffix):
    values = np.random.default_rng(0).standard_normal((5, 6)).astype(jnp.dtype(dtype))
    A = SparseArray.from_dense(values)
    path = tmp_path / f"a{suffix}"
    write(path, A)
    identical(read(path, dtype=dtype), A)
    if suffix == ".npz":  # which remembers the dtype
        identical(read(path), A)
    else:
        np.testing.assert_array_equal(read(path, dtype=np.float32).values, A.astype("f4").values)
