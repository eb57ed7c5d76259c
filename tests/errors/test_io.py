"""Files that are wrong, truncated or hostile: a ValueError that names the file (and line), nothing
else, no memory out of proportion, nothing half-built."""

import gzip
import io
import os
import pickle
import tracemalloc
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from sgap_jax import COO, SparseArray, read, write
from sgap_jax.formats import smtx, text

MTX = "%%MatrixMarket matrix coordinate "
REAL = MTX + "real general\n% comment\n\n3 4 2\n"

BAD_TEXT = [
    # suffix, content, words of the message; {f} is the file
    (".mtx", "", ["{f}:1", "MatrixMarket"]),
    (".mtx", "3 4 2\n1 1 1\n", ["{f}:1", "MatrixMarket", "3 4 2"]),
    (".mtx", "%%MatrixMarket vector coordinate real general\n", ["{f}:1"]),
    (".mtx", "%%MatrixMarket matrix array real general\n2 2\n", ["{f}:1", "coordinate", "array"]),
    (".mtx", MTX + "quaternion general\n1 1 0\n", ["{f}:1", "real", "quaternion"]),
    (".mtx", MTX + "real circular\n1 1 0\n", ["{f}:1", "symmetric", "circular"]),
    (".mtx", MTX + "real hermitian\n1 1 0\n", ["{f}:1", "real hermitian"]),
    (".mtx", MTX + "pattern skew-symmetric\n1 1 0\n", ["{f}:1", "pattern skew"]),
    (".mtx", MTX + "real general\n% only comments\n", ["{f}", "m k nnz", "end"]),
    (".mtx", MTX + "real general\n3 4\n", ["{f}:2", "three", "3 4"]),
    (".mtx", MTX + "real general\n3 -4 2\n", ["{f}:2", "non-negative", "-4"]),
    (".mtx", MTX + "real general\n3 4 nan\n", ["{f}:2", "nan"]),
    (".mtx", MTX + "real general\n3.0 4 2\n", ["{f}:2", "3.0"]),
    (".mtx", MTX + "real symmetric\n3 4 2\n", ["{f}:2", "square", "3 x 4"]),
    (".mtx", MTX + "real general\n3 4 13\n", ["{f}:2", "12", "13"]),
    (".mtx", MTX + "real general\n9999999999 1 1\n1 1 1\n", ["{f}:2", "2147483647"]),
    (".mtx", MTX + "real general\n2000000000 2000000000 1\n1 1 1\n", ["{f}", "GiB", "from_coord"]),
    (
        ".mtx",
        MTX + "real general\n2000000 2000000 999999999999\n1 1 1\n",
        ["{f}:2", "of this size"],
    ),
    (".mtx", MTX + f"real general\n1 1 {'9' * 5000}\n", ["{f}:2", "three"]),
    (".mtx", REAL + "1 1 1.5\n", ["{f}", "2 entries", "1;", "truncated"]),
    (".mtx", REAL + "1 1 1\n2 2 2\n\n3 3 3\n", ["{f}:8", "2 entries", "3 3 3"]),
    (".mtx", REAL + "1 1 1\n4 1 1\n", ["{f}:6", "1 .. 3", "'4'"]),
    (".mtx", REAL + "1 1 1\n1 0 1\n", ["{f}:6", "index 2", "1 .. 4", "'0'"]),
    (".mtx", REAL + "1 1 1\n\n1 -1 1\n", ["{f}:7", "'-1'"]),
    (".mtx", REAL + "1 1 1\n1 nan 1\n", ["{f}:6", "'nan'"]),
    (".mtx", REAL + "1 1 1\n1 1.5 1\n", ["{f}:6", "'1.5'"]),
    (".mtx", REAL + "1 1 1\n1 1e99 1\n", ["{f}:6", "'1e99'"]),
    (".mtx", REAL + "1 1 1\n1 2 apple\n", ["{f}:6", "two indices and a number", "apple"]),
    (".mtx", REAL + "1 1 1\n1 2\n", ["{f}:6", "two indices and a number", "1 2"]),
    (".mtx", REAL + "1 1\n1 2\n", ["{f}:5", "two indices and a number"]),
    (".mtx", REAL + "1 1 1 1\n1 2 1 1\n", ["{f}:5", "two indices and a number"]),
    (".mtx", REAL + "1 1 1 1\n1 2\n", ["{f}:5"]),
    (".mtx", REAL + "1 1 0x10\n1 2 1_0\n", ["{f}:5", "0x10"]),
    (".mtx", REAL + "1 1 1\n1 2 \x00\n", ["{f}:6"]),
    (".mtx", REAL + "1 1 1\n1 2 \u0663\n", ["{f}:6"]),
    (".mtx", MTX + "integer general\n3 4 1\n1 1 1.5\n", ["{f}:3", "integer", "1.5"]),
    (".mtx", MTX + "integer general\n3 4 1\n1 1 nan\n", ["{f}:3", "integer", "nan"]),
    (".mtx", MTX + "integer general\n3 4 1\n1 1 99999999999999999999\n", ["{f}:3", "int64"]),
    (".mtx", MTX + "complex general\n3 4 1\n1 1 1\n", ["{f}:3", "two numbers"]),
    (".mtx", MTX + "pattern general\n3 4 1\n1 1 1\n", ["{f}:3", "two indices", "1 1 1"]),
    (".mtx", MTX + "real skew-symmetric\n3 3 1\n2 2 1\n", ["{f}", "diagonal"]),
    (".mtx", REAL + "x" * 70000 + "\n", ["{f}:5"]),
    (".mtx", MTX + "real general\n%" + "x" * 70000 + "\n", ["{f}:2", "longer"]),
    (".smtx", "", ["{f}", "m, k, nnz"]),
    (".smtx", "% comment\n", ["{f}", "m, k, nnz"]),
    (".smtx", "2, 3\n", ["{f}:1", "2, 3"]),
    (".smtx", "2, -3, 1\n", ["{f}:1", "-3"]),
    (".smtx", "2, 3, 7\n", ["{f}:1", "6", "7"]),
    (".smtx", "9999999999, 3, 7\n", ["{f}:1", "2147483647"]),
    (".smtx", "2000000000, 2, 2\n0 1 2\n0 1\n", ["{f}:1", "of this size"]),
    (".smtx", "1, 2000000000, 1\n0 1\n0\n", ["{f}", "GiB"]),
    (".smtx", "2, 3, 2\n0 1 2\n0\n", ["{f}", "3 row offsets", "2 column", "got 4"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 1 2\n", ["{f}", "more"]),
    (".smtx", "2, 3, 2\n0 1 1\n0 1\n", ["{f}:2", "nnz = 2", "got 1"]),
    (".smtx", "2, 3, 2\n1 1 2\n0 1\n", ["{f}", "row offsets[0]", "got 1"]),
    (".smtx", "2, 3, 2\n0 5 2\n0 1\n", ["{f}", "row offsets[2]", "5"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 3\n", ["{f}", "column indices[1]", "0 .. 2", "got 3"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 -1\n", ["{f}", "column indices[1]", "got -1"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 nan\n", ["{f}:2", "integers", "nan"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 1.5\n", ["{f}:2", "integers"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 1-1\n", ["{f}", "integers"]),
    (".smtx", "2, 3, 2\n0 1 99999999999999999999\n0 1\n", ["{f}", "integers"]),
    (".smtx", "2, 3, 2\n0 1 2\n0 \u0661\n", ["{f}", "integers"]),
    (".tns", "", ["{f}", "coordinates and a value", "none"]),
    (".tns", "# comment\n", ["{f}", "none"]),
    (".tns", "5\n", ["{f}:1", "coordinates and a value", "5"]),
    (".tns", "1 1 1\n1 1\n", ["{f}:2", "2 coordinates and a value", "1 1"]),
    (".tns", "1 1 1\n1 1 1 1\n", ["{f}:2", "1 1 1 1"]),
    (".tns", "1 1 1\n0 1 1\n", ["{f}:2", "index 1", "'0'"]),
    (".tns", "# c\n1 1 1\n1 3000000000 1\n", ["{f}:3", "index 2", "3000000000"]),
    (".tns", "1 1 1\n\n# c\nnan 1 1\n", ["{f}:4", "'nan'"]),
    (".tns", "1 1 1\n1 1 pear\n", ["{f}:2", "pear"]),
    (".tns", "# shape: 2 2\n1 3 1\n", ["{f}:2", "1 .. 2", "'3'"]),
    (".tns", "# shape: 2 2\n1 1 1 1\n", ["{f}:2", "2 coordinates"]),
    (".tns", "# shape: 2 99999999999\n", ["{f}:1", "2147483647"]),
    (".tns", "1 " * 100 + "\n", ["{f}:1", "32"]),
    (".tns", "2000000000 2000000000 1\n", ["{f}", "GiB"]),
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize(("suffix", "content", "words"), BAD_TEXT)
def test_bad_text(tmp_path, suffix, content, words, packed):
    if packed and any("of this size" in word for word in words):
        words = ["{f}"]  # gzip may expand; the count is then found out by reading
    path = tmp_path / ("bad" + suffix + ".gz" * packed)
    data = content.encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    for word in ["expected", "got", *words]:
        assert word.format(f=path) in str(caught.value), str(caught.value)
    assert peak < 2**25, "memory for what the file only declares"


GOOD = SparseArray.from_dense(np.array([[0, 1.5, 0, 2], [0, 0, 0, 0], [3, 0, -4, 0]], np.float32))
ONES = GOOD.with_values(np.ones(4, np.float32))
SUFFIXES = [".mtx", ".mtx.gz", ".smtx", ".smtx.gz", ".tns", ".tns.gz", ".npz"]


def good_file(folder, suffix):
    path = folder / f"good{suffix}"
    write(path, ONES if "smtx" in suffix else GOOD)
    return path


def same(A, B):
    return np.array_equal(A.todense(), B.todense()) and A.shape == B.shape


@pytest.mark.parametrize("suffix", [".mtx.gz", ".smtx.gz", ".tns.gz", ".npz"])
def test_truncated_anywhere(tmp_path, suffix):
    path = good_file(tmp_path, suffix)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="good"):
            read(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_fuzzed(tmp_path, suffix):
    """Whatever happens to the bytes: a sound array or a ValueError that names the file."""
    path = good_file(tmp_path, suffix)
    data = np.frombuffer(path.read_bytes(), np.uint8)
    rng = np.random.default_rng(7)
    interesting = np.frombuffer(b"0123456789-+.eE% \n\t#,\0\xff", np.uint8)
    refused = 0
    for trial in range(300):
        damaged = data.copy()
        where = rng.integers(0, len(data), rng.integers(1, 4))
        damaged[where] = rng.choice(interesting, len(where)) if trial % 2 else rng.integers(0, 256)
        if trial % 5 == 0:  # repeat or drop a piece
            i, j = sorted(rng.integers(0, len(data), 2))
            damaged = np.concatenate([damaged[:j], damaged[i:]])
        path.write_bytes(damaged.tobytes())
        try:
            A = read(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            A.checked()
    assert refused > 30


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_junk(tmp_path, suffix):
    rng = np.random.default_rng(0)
    path = tmp_path / f"junk{suffix}"
    for junk in (b"", b"\0" * 1000, rng.bytes(5000), b"PK\x03\x04" + rng.bytes(100), b"\n" * 99):
        for data in (junk, gzip.compress(junk)) if suffix.endswith("gz") else (junk,):
            path.write_bytes(data)
            with pytest.raises(ValueError, match="junk"):
                read(path)


def peak_while_refused(path, words):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=words):
            read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_gzip_bombs(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "FREE_EXPANSION_BYTES", 1 << 20)
    monkeypatch.setattr(text, "HEADER_LINES", 1000)
    pattern = (MTX + "pattern general\n").encode()
    for name, data, words in [
        ("line.smtx.gz", b"2, 3, 4\n" + b" " * (100 << 20), "expand less than 256"),
        ("line.mtx.gz", pattern + b"9 9 3\n" + b"1" * (100 << 20), "without end"),
        ("rows.tns.gz", b"1 1 1\n" * (1 << 20), "expand less than 256"),
        ("rows.mtx.gz", pattern + b"9 9 3\n" + b"1 1\n" * (1 << 17), "3 entries"),
        ("comments.mtx.gz", pattern + b"%\n" * (1 << 19), "1000 lines of comments"),
        ("comments.tns.gz", b"# shape: 2 2\n" * (1 << 16), "1000 lines of comments"),
    ]:
        path = tmp_path / name
        path.write_bytes(gzip.compress(data, 6))
        del data
        assert peak_while_refused(path, words) < 2**26, name


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


CSR_ARRAYS = dict(
    data=np.arange(1.0, 4), indices=np.array([0, 1, 0]), indptr=np.array([0, 2, 3]), shape=(2, 3)
)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(data=None), ["data, indices, indptr, shape", "got indices"]),
        (dict(data=np.array([Evil(), 1, 2])), ["data", "pickle"]),
        (dict(shape=np.array([Evil(), 3])), ["shape", "pickle"]),
        (dict(shape=(2, -3)), ["shape", "-3"]),
        (dict(shape=(2, 2**40)), ["shape", "2147483647"]),
        (dict(shape=(2, 3, 4)), ["csr", "(2, 3, 4)"]),
        (dict(shape=2), ["shape", "1-d"]),
        (dict(shape=(2.0, 3.0)), ["shape", "integer"]),
        (dict(shape=(3, 3)), ["indptr", "[4]", "[3]"]),
        (dict(shape=(2, 2**31 - 1)), ["GiB"]),
        (dict(indices=np.array([0, 3, 0])), ["[1]", "0 .. 2", "3"]),
        (dict(indices=np.array([0, -1, 0])), ["[1]", "-1"]),
        (dict(indices=np.array([0.0, 1, 0])), ["indices", "integer", "float64"]),
        (dict(indptr=np.array([0, 5, 3])), ["indptr[2]"]),
        (dict(indptr=np.array([0, 2, 4])), ["indptr[2]", "nnz = 3", "4"]),
        (dict(indptr=np.array([0, 1, 2])), ["data and indptr[-1]", "3"]),
        (dict(indptr=np.array([1, 2, 3])), ["indptr[0]"]),
        (dict(data=np.arange(2.0)), ["3", "2"]),
        (dict(data=np.eye(3)), ["values", "[3, 3]"]),
        (dict(data=np.array(["a", "b", "c"])), ["values", "numeric"]),
        (dict(data=np.array(["2020"] * 3, "M8[Y]")), ["values", "numeric"]),
        (dict(format="bsr"), ["csr, csc or coo", "bsr"]),
        (dict(format=np.arange(3)), ["csr, csc or coo"]),
        (dict(dtype="complicated"), ["dtype", "complicated"]),
        (dict(dtype="O"), ["dtype", "numeric"]),
    ],
)
def test_bad_npz(tmp_path, wrong, words):
    arrays = {k: v for k, v in (CSR_ARRAYS | wrong).items() if v is not None}
    path = npz(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError) as caught:
        read(path)
    for word in [str(path), "expected", "got", *words]:
        assert word in str(caught.value), str(caught.value)
    read(npz(tmp_path / "good.npz", **CSR_ARRAYS)).checked()


def header(shape, dtype="<f8"):
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "member",
    [
        b"",
        b"not numpy",
        header((10**12,)),  # declares 8 TB
        header((-1,)),
        header((2**63, 2**63)),
        header((3,), "|O") + pickle.dumps(Evil()),
        header("(" * 3000),
        header((3,)) + b"\0" * 23,
        header((3,)) + b"\0" * 25,
        b"\x93NUMPY\x09\x00" + b"\0" * 100,
    ],
)
def test_bad_npz_members(tmp_path, member):
    path = npz(tmp_path / "bad.npz", **{k: v for k, v in CSR_ARRAYS.items() if k != "data"})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data.npy", member)
    assert peak_while_refused(path, "bad.npz") < 2**25


def test_npz_bomb(tmp_path):
    zeros = np.zeros(200 << 20, np.int8)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, **(CSR_ARRAYS | dict(data=zeros, indices=zeros)))
    assert os.path.getsize(path) < 2**20
    assert peak_while_refused(path, "expands less than 256") < 2**25


def test_scipy_and_plain_layouts(tmp_path):
    dense = np.asarray(GOOD.todense())
    for kind in ("csr", "csc", "coo"):
        scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.coo_array(dense).asformat(kind))
        assert same(read(tmp_path / "a.npz").checked(), GOOD)
        write(tmp_path / "b.npz", GOOD)
        assert (scipy.sparse.load_npz(tmp_path / "b.npz").toarray() == dense).all()
    big_endian = {
        k: np.asarray(v).astype(np.asarray(v).dtype.newbyteorder(">"))
        for k, v in CSR_ARRAYS.items()
    }
    assert same(
        read(npz(tmp_path / "c.npz", **big_endian)), read(npz(tmp_path / "d.npz", **CSR_ARRAYS))
    )


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
    assert dense("real general", "0 5 0\n").shape == (0, 5)
    nan = dense("real general", "1 2 2\n1 1 nan\n1 2 -inf\n")  # numbers, if values
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
    # More text than one block holds: no line is lost where two blocks meet.
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


def test_written_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write(tmp_path / "a.npz", GOOD)
    assert (tmp_path / "a.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_smtx_as_it_is_written():
    out = io.BytesIO()
    smtx.write(out, np.ones(2), [np.array([0, 2]), np.array([1, 0])], (3, 2))
    assert out.getvalue() == b"3, 2, 2\n0 1 1 2\n1 0\n"
