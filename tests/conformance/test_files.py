"""The meaning of files: every layout and suffix, and the data set against its own table and
SciPy."""

import gzip
import io
import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.io
import scipy.sparse

from sgap_jax import (
    COO,
    CSC,
    CSR,
    SparseArray,
    read,
    write,
)
from sgap_jax.formats.io import outline, smtx

MTX = "%%MatrixMarket matrix coordinate "
GOOD = SparseArray.from_dense(np.array([[0, 1.5, 0, 2], [0, 0, 0, 0], [3, 0, -4, 0]], np.float32))
SUFFIXES = [".mtx", ".mtx.gz", ".smtx", ".smtx.gz", ".tns", ".tns.gz", ".npz"]


def same(A, B):
    return np.array_equal(A.todense(), B.todense()) and A.shape == B.shape


@pytest.mark.tier("test")
def test_what_matrix_market_means(tmp_path):
    path = tmp_path / "a.mtx"

    def dense(header_, body, **options):
        path.write_text(MTX + header_ + "\n" + body)
        return np.asarray(read(path, **options).checked().todense())

    lower = "% c\n 3 3 3 \n\n1 1 1.5\r\n2 1 2e0\n\t3  2 -3"  # spaces, CRLF, no final newline
    full = np.array([[1.5, 0, 0], [2, 0, 0], [0, -3, 0]])
    np.testing.assert_array_equal(dense("real general", lower), full)
    np.testing.assert_array_equal(dense("REAL Symmetric", lower), full + np.tril(full, -1).T)
    skew = "3 3 2\n2 1 2\n3 2 -3\n"
    strict = np.tril(full, -1)
    np.testing.assert_array_equal(dense("real skew-symmetric", skew), strict - strict.T)
    hermitian = dense("complex hermitian", "2 2 2\n1 1 1 0\n2 1 3 4\n")
    np.testing.assert_array_equal(hermitian, [[1, 3 - 4j], [3 + 4j, 0]])
    pattern = dense("pattern symmetric", "2 2 1\n2 1\n")
    assert pattern.dtype == np.float32 and (pattern == [[0, 1], [1, 0]]).all()
    assert dense("pattern general", "2 2 1\n2 1\n", dtype=jnp.bfloat16).dtype == jnp.bfloat16
    exact = dense("integer general", f"1 2 2\n1 1 {2**62 + 1}\n1 2 7\n")
    assert exact.dtype == np.int64 and exact[0, 0] == 2**62 + 1
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"a\.mtx.*int32.*x64"):
        read(path)
    with pytest.raises(ValueError, match=rf"{path}:3: expected an unsigned integer value.*'-3'"):
        dense("unsigned-integer general", "1 1 1\n1 1 -3\n")
    with pytest.raises(ValueError, match="skew-symmetric"):
        dense("unsigned-integer skew-symmetric", "1 1 0\n")
    fortran = dense("real general", "1 3 3\n1 1 2.5D+01\n1 2 -1d-2\n1 3 3.e1\n")
    np.testing.assert_array_equal(fortran, [[25, -0.01, 30]])
    with pytest.raises(
        ValueError, match=rf"{path}:4: expected two indices and a number, got '1 2 d"
    ):
        dense("real general", "1 2 2\n1 1 1D0\n1 2 d2\n")
    assert dense("integer general", "0 5 0\n").dtype == np.int64
    assert dense("real general", "0 5 0\n").shape == (0, 5)
    nan = dense("real general", "1 2 2\n1 1 nan\n1 2 -inf\n")  # NaN and infinity are valid values
    assert np.isnan(nan[0, 0]) and nan[0, 1] == -np.inf
    twice = "2 2 3\n1 1 1\n2 2 5\n1 1 2\n"
    np.testing.assert_array_equal(dense("real general", twice), [[3, 0], [0, 5]])
    with pytest.raises(ValueError, match=r"a\.mtx.*\(0, 0\) more than once"):
        read(path, duplicates="error")


def test_smtx_columns_may_be_unsorted_and_separated_by_anything(tmp_path):
    path = tmp_path / "a.smtx"
    path.write_text("% c\n2 4 3\n0 2\n3\n3 1\t2")
    np.testing.assert_array_equal(read(path).todense(), [[0, 1, 0, 1], [0, 0, 1, 0]])


def test_large_blocks(tmp_path):
    # More text than one read block holds: no line is lost where two blocks meet.
    n = 500_000
    rng = np.random.default_rng(0)
    A = SparseArray.from_coordinates(
        rng.integers(0, 40_000, (n, 2)), rng.standard_normal(n), (40_000, 40_000)
    )
    for suffix in (".mtx", ".smtx", ".tns"):
        path = tmp_path / f"large{suffix}"
        X = A.with_values(np.ones(A.nnz)) if suffix == ".smtx" else A
        write(path, X)
        B = read(path)
        np.testing.assert_array_equal(B.column_indices, A.column_indices)
        np.testing.assert_array_equal(B.row_offsets, A.row_offsets)
        np.testing.assert_array_equal(B.values, X.values)
    lines = (tmp_path / "large.mtx").read_bytes().splitlines(keepends=True)
    number = len(lines) - 3
    lines[number - 1] = b"1 1 oops\n"
    (tmp_path / "large.mtx").write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"large\.mtx:{number}: .*oops"):
        read(tmp_path / "large.mtx")


def test_paths(tmp_path):
    for op in (read, lambda p: write(p, GOOD)):
        for name in ("a.csv", "mtx", "a.npz.gz", "a.mtx.bz2", "a"):
            with pytest.raises(ValueError, match=r"path.*\.mtx.*\.npz.*got"):
                op(tmp_path / name)
    for suffix in SUFFIXES:
        with pytest.raises(FileNotFoundError):
            read(tmp_path / f"absent{suffix}")
    upper = tmp_path / "A.MTX"
    write(str(upper), GOOD)
    assert same(read(str(upper)), GOOD)
    write(os.fsencode(upper), GOOD)
    assert same(read(os.fsencode(upper)), GOOD)
    for op in (read, lambda p: write(p, GOOD)):
        with pytest.raises(TypeError, match=r"path must be a str, bytes or os.PathLike, got int"):
            op(3)


def test_write_refuses_what_a_format_cannot_hold_and_leaves_the_old_file(tmp_path):
    tensor = SparseArray.from_dense(np.ones((2, 2, 2)), format=COO)
    for name, bad, words in [
        ("a.smtx", GOOD, "ones"),
        ("a.smtx.gz", tensor, "matrices"),
        ("a.mtx", tensor, "matrices"),
        ("a.tns", GOOD.with_values(np.ones(4) * 1j), "real"),
        ("a.npz", np.eye(3), "SparseArray"),
    ]:
        path = tmp_path / name
        path.write_bytes(b"old")
        with pytest.raises(ValueError, match=words):
            write(path, bad)
        assert path.read_bytes() == b"old"
    with pytest.raises(ValueError, match="tracer"):
        jax.jit(lambda a: write(tmp_path / "a.npz", a))(GOOD)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    with pytest.raises(OSError):
        write(tmp_path / "no" / "folder.mtx", GOOD)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_unsigned_integers_are_read_back(tmp_path, dtype):
    greatest = np.array([np.iinfo(dtype).max, 1, 2, 3], dtype)
    write(tmp_path / "a.mtx", GOOD.with_values(greatest))
    B = read(tmp_path / "a.mtx")
    assert B.dtype == np.uint64
    np.testing.assert_array_equal(B.values, greatest)


def test_diagonals_of_scipy(tmp_path):
    path = tmp_path / "a.npz"
    data = np.arange(1.0, 21).reshape(4, 5)
    for shape in ((4, 6), (6, 4), (0, 3), (5, 5)):
        D = scipy.sparse.dia_array((data, [0, -2, 3, 7]), shape)
        scipy.sparse.save_npz(path, D)
        np.testing.assert_array_equal(read(path).todense(), D.toarray())
    assert read(path).nnz == D.tocsr().nnz
    good = dict(np.load(path))
    for name, bad, words in (
        ("offsets", [0, 0, 3, 7], "offsets: each once"),
        ("offsets", [0, 1], r"data \[2, columns\]"),
        ("data", np.ones(4), r"data \[4, columns\]"),
    ):
        np.savez(path, **good | {name: np.array(bad)})
        with pytest.raises(ValueError, match=rf"a\.npz: expected {words}"):
            read(path)
    with pytest.raises(NotImplementedError, match="rows of an archive in format csr, got dia"):
        np.savez(path, **good)
        read(path, rows=(0, 1))


def test_written_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write(tmp_path / "a.npz", GOOD)
    assert (tmp_path / "a.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_padding_is_not_written(tmp_path, suffix):
    offsets, indices = GOOD.index_arrays[1]
    padded = SparseArray.from_arrays(
        np.array([1, 1, 1, 1, 9, 9]), offsets, np.append(indices, [2, 77]), shape=GOOD.shape
    )
    for A in (padded, padded.asformat(COO), padded.asformat(CSC)):
        write(tmp_path / f"a{suffix}", A)
        B = read(tmp_path / f"a{suffix}").asformat(CSR).checked()
        assert B.nnz == 4
        np.testing.assert_array_equal(B.todense(), GOOD.todense() != 0)


def test_smtx_as_it_is_written():
    out = io.BytesIO()
    smtx.write(out, np.ones(2), [np.array([0, 2]), np.array([1, 0])], (3, 2))
    assert out.getvalue() == b"3, 2, 2\n0 1 1 2\n1 0\n"


def manifest(data_dir):
    """(path, shape, nnz) of the matrix files that the data set's own table lists."""
    for line in (data_dir / "MANIFEST.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 5 or not cells[1].endswith((".smtx.gz", ".mtx.gz", ".npz", ".tns.gz")):
            continue
        path = data_dir / cells[1]
        path = path if path.exists() else data_dir / "dlmc" / cells[1]
        shape = tuple(int(n) for n in cells[2].split("x"))
        yield path, shape, int(cells[3])


def test_the_data_set_reads_as_its_manifest_says(data_dir):
    seen = 0
    for path, shape, nnz in manifest(data_dir):
        A = read(path)
        seen += 1
        assert A.nnz == nnz, path
        if path.name.endswith(".tns.gz"):  # no header: the shape is the largest coordinates
            assert all(a <= b for a, b in zip(A.shape, shape, strict=True)), path
        else:
            assert A.shape == shape, path
    assert seen > 100


@pytest.mark.parametrize(
    "name", ["bcsstk09", "west0479", "young1c", "dwg961b", "jazz", "rajat01", "lp_e226"]
)
def test_matrix_market_agrees_with_scipy(data_dir, name):
    path = data_dir / "matrices" / f"{name}.mtx.gz"
    A, expected = read(path).checked(), scipy.io.mmread(path, spmatrix=False).tocsr()
    got = A.to_scipy()
    expected.sort_indices()
    assert got.dtype == (np.float32 if name == "rajat01" else expected.dtype)  # a pattern: ones
    np.testing.assert_array_equal(got.indptr, expected.indptr)
    np.testing.assert_array_equal(got.indices, expected.indices)
    np.testing.assert_array_equal(got.data, expected.data)


def test_reading_a_graph_agrees_with_scipy(data_dir):
    path = data_dir / "graphs" / "as_caida.npz"
    with np.load(path) as arrays:
        expected = scipy.sparse.csr_array(
            (arrays["data"], arrays["indices"], arrays["indptr"]), shape=arrays["shape"]
        )
    assert (read(path, format=CSC).checked().to_scipy() != expected).nnz == 0


def of_rows(path):
    """Ranges of the rows of a file, each against the same rows of the whole."""
    whole = read(path)
    m = whole.shape[0]
    for begin, end in ((0, m), (0, 0), (2, 5), (m - 1, m), (m, m)):
        part, expected = read(path, rows=(begin, end)), whole[begin:end]
        assert part.shape == (end - begin, whole.shape[1]) and part.dtype == whole.dtype
        np.testing.assert_array_equal(part.todense(), expected.todense())
        assert part.nnz == expected.nnz  # zeros that are stored stay


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric", "pattern"])
@pytest.mark.parametrize("suffix", [".mtx", ".mtx.gz"])
def test_rows_of_matrix_market(tmp_path, symmetry, suffix):
    rng = np.random.default_rng(0)
    D = np.where(rng.random((9, 9)) < 0.3, rng.integers(1, 9, (9, 9)), 0).astype(float)
    if symmetry == "skew-symmetric":
        D = np.tril(D, -1) - np.tril(D, -1).T
    elif symmetry == "symmetric":
        D = np.tril(D) + np.tril(D, -1).T
    field = "pattern" if symmetry == "pattern" else None
    text = io.BytesIO()
    how = "general" if symmetry == "pattern" else symmetry
    scipy.io.mmwrite(text, scipy.sparse.coo_array(D), field=field, symmetry=how)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(text.getvalue()) if "gz" in suffix else text.getvalue())
    of_rows(path)
    (shape, lengths) = outline(path, "test", count=True)
    assert shape == (9, 9) and np.array_equal(lengths, np.count_nonzero(D, 1))
    assert outline(path, "test", count=False) == ((9, 9), None)


@pytest.mark.parametrize("compressed", [False, True])
def test_rows_of_npz(tmp_path, compressed):
    A = scipy.sparse.random_array((11, 7), density=0.3, rng=np.random.default_rng(0)).tocsr()
    A.data[:3] = 0  # stored
    A.indices[:2] = A.indices[:2][::-1]  # not sorted
    scipy.sparse.save_npz(tmp_path / "a.npz", A, compressed=compressed)
    of_rows(tmp_path / "a.npz")
    B = SparseArray.from_scipy(A).astype(jnp.bfloat16)
    write(tmp_path / "b.npz", B)
    of_rows(tmp_path / "b.npz")


def test_rows_of_a_large_archive_are_all_that_is_in_memory(tmp_path):
    A = scipy.sparse.random_array((2000, 2000), density=0.25, rng=np.random.default_rng(0))
    scipy.sparse.save_npz(tmp_path / "a.npz", A.tocsr(), compressed=False)
    read(tmp_path / "a.npz", rows=(0, 1))
    tracemalloc.start()
    part = read(tmp_path / "a.npz", rows=(1000, 1010))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert part.nnz > 4000 and peak < (tmp_path / "a.npz").stat().st_size / 10


@pytest.mark.parametrize(
    "rows, message",
    [((0, 6), "begin <= end <= 5"), ((3, 2), "expected 0 <= begin"), (4, r"\(begin, end\)")],
)
def test_rows_that_a_file_lacks(tmp_path, rows, message):
    write(tmp_path / "a.mtx", SparseArray.from_dense(np.eye(5)))
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.mtx", rows=rows)


def test_rows_of_other_files(tmp_path):
    A = SparseArray.from_dense(np.eye(5))
    write(tmp_path / "a.tns", A)
    with pytest.raises(NotImplementedError, match="no rows of .tns files"):
        read(tmp_path / "a.tns", rows=(0, 1))
    write(tmp_path / "a.npz", A.asformat(CSC))
    with pytest.raises(NotImplementedError, match="in format csr, got csc"):
        read(tmp_path / "a.npz", rows=(0, 1))
    arrays = dict(data=np.ones(3), indices=np.arange(3), shape=np.array([3, 3]))
    for offsets in ([0, 1, 2, 9], [0, 2, 1, 3], [0, 1, 3], [0, 1, 2, 2]):
        np.savez(tmp_path / "b.npz", indptr=np.array(offsets), **arrays)
        with pytest.raises(ValueError, match="indptr"):
            read(tmp_path / "b.npz", rows=(0, 2))
    np.savez(tmp_path / "b.npz", indptr=np.arange(4), **arrays | dict(indices=np.array([0, 7, 1])))
    with pytest.raises(ValueError, match="7"):
        read(tmp_path / "b.npz", rows=(0, 2))
