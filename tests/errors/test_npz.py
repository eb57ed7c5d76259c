"""Archives that are wrong or hostile, and the two layouts that are read."""

import os
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
import scipy.sparse

from sgap_jax import SparseArray, read, write

GOOD = SparseArray.from_dense(np.array([[0, 1.5, 0, 2], [0, 0, 0, 0], [3, 0, -4, 0]], np.float32))


def peak_while_refused(path, words):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=words):
            read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


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
        (dict(format="dia"), ["csr, csc, bsr or coo", "dia"]),
        (dict(format=np.arange(3)), ["csr, csc, bsr or coo"]),
        (dict(format="bsr"), ["blocks [blocks, r, c]", "(3,)"]),
        (dict(format="bsr", data=np.ones((3, 2, 2))), ["blocks", "divide (2, 3)", "(3, 2, 2)"]),
        (dict(format="bsr", data=np.ones((3, 0, 1))), ["blocks", "(3, 0, 1)"]),
        (dict(format="bsr", data=np.ones((3, 2, 1))), ["indptr", "[2]", "[3]"]),
        (dict(format="bsr", data=np.ones((2, 1, 1))), ["3 blocks", "2"]),
        (dict(format="bsr", data=np.ones((3, 1, 3))), ["indices[1]", "0 .. 0", "1"]),
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


def test_a_block_of_any_size_in_no_bytes(tmp_path):
    huge = 2**31 - 2
    arrays = dict(indices=np.zeros(0, int), indptr=np.zeros(2, int), shape=(huge, 1), format="bsr")
    path = npz(tmp_path / "bad.npz", **arrays)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("data.npy", header((0, huge, 1)))
    assert peak_while_refused(path, "GiB") < 2**25


def same(A, B):
    return np.array_equal(A.todense(), B.todense()) and A.shape == B.shape


def test_scipy_and_plain_layouts(tmp_path):
    dense = np.asarray(GOOD.todense())
    for kind in ("csr", "csc", "coo", "bsr"):
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
