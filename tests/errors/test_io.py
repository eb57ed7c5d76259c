"""Files that are wrong, truncated or hostile: a ValueError that names the file (and line), nothing
else, no memory out of proportion, nothing half-built."""

import gzip
import tracemalloc

import numpy as np
import pytest

from sgap_jax import SparseArray, read, write
from sgap_jax.formats.io import number_tables as text

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
    (".mtx", MTX + f"real general\n1 1 {'9' * 5000}\n", ["{f}:2", "sizes up to 2147483647"]),
    (".mtx", MTX + f"real general\n{2**64} 1 1\n", ["{f}:2", "sizes up to", f"{2**64} 1 1"]),
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
    (".smtx", f"{2**64}, 3, 7\n", ["{f}:1", "sizes up to 2147483647"]),
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
