"""Operators, sums and slices of a sparse array that are refused, and what they say instead."""

import importlib
import math  # noqa: F401
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sgap_jax
from sgap_jax import BCSR, COO, CSC, CSR, CVS, SparseArray  # noqa: F401
from sgap_jax.formats.operators import INSTEAD

DENSE = np.arange(20.0).reshape(5, 4) % 3
A = SparseArray.from_dense(DENSE)
OTHER = SparseArray.from_dense(np.eye(5, 4))
T = SparseArray.from_dense(np.ones((2, 2, 3)), format=COO)
V = SparseArray.from_dense(np.eye(5, 4), format=CVS(2))


def squared(offsets):
    """Of vectors that nobody has checked."""
    B = SparseArray.from_arrays(
        V.values, offsets, V.index_arrays[1][1], shape=V.shape, format=CVS(2)
    )
    return (B * B).values


def batch(A):
    return replace(A, values=jnp.ones((2, A.nnz)))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: A + DENSE, NotImplementedError, ["+ ndarray", "A.todense() + x", "with_values"]),
        (lambda: DENSE - A, NotImplementedError, ["ndarray -", " x - A.todense()", "x - A.values"]),
        (lambda: 1 - A, NotImplementedError, ["int -", " x - A.todense()"]),
        (lambda: A * A.to_scipy(), NotImplementedError, ["* csr_array", "from_scipy"]),
        (lambda: A / A.to_bcoo(), NotImplementedError, ["/ BCOO"]),
        (lambda: A + 1.0, NotImplementedError, ["+ float", "A.todense() + x"]),
        (lambda: jnp.float32(0) + A, NotImplementedError, ["+ ArrayImpl"]),
        (lambda: A - A.to_scipy(), NotImplementedError, ["- csr_array", "from_scipy"]),
        (lambda: A * A.T.asformat(CSR), ValueError, ["one shape", "(5, 4) and (4, 5)"]),
        (lambda: A * DENSE.T, ValueError, ["* x", "broadcasts to (5, 4)", "(4, 5)"]),
        (lambda: A * np.ones((2, 5, 4)), ValueError, ["broadcasts", "(2, 5, 4)"]),
        (lambda: A / np.ones(3), ValueError, ["/ x", "(3,)"]),
        (lambda: A * None, ValueError, ["scalar", "NoneType"]),
        (lambda: A * "x", ValueError, ["scalar", "str"]),
        (lambda: A**0, NotImplementedError, ["> 0", "A.todense()**n"]),
        (lambda: A**-1.5, NotImplementedError, ["got -1.5"]),
        (lambda: A**DENSE, NotImplementedError, ["> 0"]),
        (lambda: A**None, NotImplementedError, ["> 0", "got None"]),
        (
            lambda: A.maximum(1),
            NotImplementedError,
            ["of int", "jnp.maximum(A.values, x"],
        ),
        (lambda: A.minimum(DENSE), NotImplementedError, ["minimum of ndarray", "A.todense()"]),
        (lambda: A.minimum(A.T.asformat(CSR)), ValueError, ["one shape", "(4, 5)"]),
        (lambda: jax.jit(squared)(V.index_arrays[1][0]), NotImplementedError, ["twice"]),
        (lambda: jax.jit(lambda n: (A**n).values)(2), NotImplementedError, ["known"]),
        (lambda: np.float32(1) @ A, ValueError, ["at least 1-d"]),
        (lambda: np.ones((2, 3, 4)) @ A, ValueError, ["spmm: B", "[5, n]"]),
        (lambda: A @ np.ones((2, 3, 4)), ValueError, ["spmm: B", "[4, n]"]),
        (lambda: A.max(2), ValueError, ["SparseArray.max: axis"]),
        (lambda: A.max(()), NotImplementedError, ["along no axis"]),
        (lambda: T.max(), NotImplementedError, ["3 dimensions", "A.todense().max"]),
        (lambda: A[:0].min(), ValueError, ["size 0"]),
        (lambda: A[:, :0].argmax(1), ValueError, ["size 0"]),
        (lambda: np.max(A, initial=0), NotImplementedError, ["max: initial"]),
        (lambda: np.argmin(A, out=DENSE), NotImplementedError, ["argmin: out"]),
        (lambda: (A * 1j).max(), ValueError, ["complex"]),
        (lambda: A.reshape(3, 4), ValueError, ["20 places", "(3, 4)"]),
        (lambda: A.reshape(-1, -1), ValueError, ["20 places"]),
        (lambda: A.reshape("a"), ValueError, ["integers"]),
        (lambda: A.reshape(4, 5, order="F"), NotImplementedError, ["A.T.reshape"]),
        (lambda: jax.jit(lambda A: A.reshape(20).values)(A), NotImplementedError, ["1 dim"]),
        (lambda: jax.jit(lambda A: A.nonzero())(A), ValueError, ["A.coordinates()"]),
        (lambda: A.eliminate_zeros(nse=1), ValueError, ["eliminate_zeros", "got 1"]),
        (lambda: A / A, NotImplementedError, ["with_values(A.values / B.values)"]),
        (lambda: jax.jit(lambda A, B: A + B)(T, T), NotImplementedError, ["3 dimensions", "jit"]),
        (lambda: A + batch(A), ValueError, ["second", "jax.vmap"]),
        (lambda: len(A), TypeError, ["A.shape[0]", "A.nnz"]),
        (lambda: A.__setitem__(0, 1.0), TypeError, ["A.values.at[p].set(x)"]),
        (lambda: A[5], IndexError, ["index 5", "-5 .. 4"]),
        (lambda: A[0, -5], IndexError, ["index -5", "-4 .. 3"]),
        (lambda: A[[0, -6]], IndexError, ["index -6", "-5 .. 4"]),
        (lambda: A[1.5], IndexError, ["integers", "float64"]),
        (lambda: A["a"], IndexError, ["str"]),
        (lambda: A[None], IndexError, ["None"]),
        (lambda: A[OTHER], IndexError, ["SparseArray"]),
        (lambda: A[0, 0, 0], IndexError, ["up to 2 indices", "got 3"]),
        (lambda: A[..., ...], IndexError, ["one ellipsis"]),
        (lambda: A[[0, 1], [0, 1, 2]], IndexError, ["that broadcast", "A[I][:, J]"]),
        (lambda: T[0, :, [0, 1]], IndexError, ["one index array"]),
        (lambda: A[DENSE.T > 0], IndexError, ["mask of shape [5]", "[4, 5]"]),
        (lambda: jax.jit(lambda m: A[m].values)(np.ones(5, bool)), IndexError, ["flatnonzero"]),
        (lambda: jax.jit(lambda T: T[0].values)(T), NotImplementedError, ["3 dimensions"]),
        (lambda: jax.jit(lambda A: A[[0, 1]].values)(A), ValueError, ["rows: nse", "traced"]),
        (lambda: A.rows(slice(0, 3), nse=1), ValueError, ["nse", "got 1"]),
        (lambda: A.rows([0], nse=-1), ValueError, ["rows: nse", "-1"]),
        (lambda: A.rows(0), IndexError, ["rows", "slice or a 1-d array"]),
        (lambda: T.rows([0]), ValueError, ["rows", "matrix"]),
        (lambda: batch(A)[0], ValueError, ["batched", "jax.vmap"]),
        (lambda: A[::0], IndexError, ["step cannot be zero"]),
        (lambda: A[0.5:], IndexError, ["integers in a slice"]),
        (lambda: jax.jit(lambda i: A[i:])(1), IndexError, ["A.rows(start + jnp.arange(k), nse=n)"]),
        (lambda: A.asformat(CVS(2))[1:], IndexError, ["here 2", "1:5", "asformat(CSR)"]),
        (lambda: A.asformat(CVS(2))[:1], IndexError, ["multiples", "0:1"]),
        (lambda: list(A), TypeError, ["not iterable", "A[i:i + k]", "A.to_scipy()"]),
        (lambda: A.sum(2), ValueError, ["axis", "-2 .. 1", "got 2"]),
        (lambda: A.sum((0, -2)), ValueError, ["SparseArray.sum", "each once", "(0, -2)"]),
        (lambda: A.mean(1.0), ValueError, ["SparseArray.mean: axis", "got 1.0"]),
        (lambda: T.sum((0, 3)), ValueError, ["axis", "-3 .. 2", "(0, 3)"]),
        (lambda: np.sum(A, out=DENSE), NotImplementedError, ["SparseArray.sum: out"]),
        (lambda: np.mean(A, out=DENSE), NotImplementedError, ["SparseArray.mean: out"]),
        (lambda: np.mean(A, where=DENSE > 0), NotImplementedError, ["mean: where", "with_values"]),
        (lambda: np.sum(A, where=DENSE > 0), NotImplementedError, ["SparseArray.sum: where"]),
        (lambda: A.sum(initial=1.0), NotImplementedError, ["sum: initial", "result + initial"]),
        (lambda: A != 1, TypeError, ["A.todense() != x", "A.with_values(A.values != x)"]),
        (lambda: A == 0, TypeError, ["A.todense() == x", "where nothing is stored"]),
        (lambda: A > OTHER, TypeError, ["a number that is known", "f(A.todense())"]),
        (lambda: jax.jit(lambda x: (A > x).values)(1.0), TypeError, ["number that is known"]),
        (lambda: jax.jit(lambda m: A[m])(DENSE > 1), IndexError, ["jnp.nonzero(mask, size=k)"]),
        (lambda: A == DENSE, TypeError, ["A.with_values(f(A.values))"]),
        (lambda: DENSE == A, TypeError, ["A.with_values(f(A.values))", "`is`"]),
        (lambda: A < 1, TypeError, ["A.todense() < x"]),
        (lambda: -2 <= A, TypeError, ["A.todense() >= x"]),
        (lambda: 1 / A, TypeError, ["A.with_values(f(A.values))"]),
        (lambda: A // 2, TypeError, ["A.with_values(f(A.values))"]),
        (lambda: DENSE % A, TypeError, ["A.with_values(f(A.values))"]),
        (lambda: divmod(A, 2), TypeError, ["A.with_values(f(A.values))"]),
        (lambda: (A > 0) & (A > 1), TypeError, ["A * B is A & B", "masks.intersection"]),
        (lambda: DENSE | A, TypeError, ["A.maximum(B) is A | B", "masks.union"]),
        (lambda: ~(A > 0), TypeError, ["&, |, ^ and ~", "A.todense()"]),
        (lambda: A @ A.T.to_bcoo(), TypeError, ["got a BCOO", "SparseArray.from_bcoo(B)"]),
        (lambda: A @ A.T.to_scipy(), TypeError, ["SparseArray.from_scipy(B)"]),
        (lambda: A @ np.array(["a"] * 4), TypeError, ["spmv: x", "numbers, got <U1"]),
        (lambda: A @ np.ones(4, object), TypeError, ["spmv: x", "numbers, got object"]),
        (lambda: sgap_jax.vstack(A), TypeError, ["vstack: blocks", "sequence", "SparseArray"]),
        (lambda: sgap_jax.block([A]), TypeError, ["block: blocks", "sequence of rows of"]),
        (lambda: sgap_jax.block_diag(3), TypeError, ["block_diag: blocks", "int"]),
        (lambda: sgap_jax.prune(A, sparsity=0.5), ValueError, ["prune: W", "a SparseArray"]),
        (lambda: bool(A), ValueError, ["neither true nor false", "A.nnz > 0"]),
        (lambda: A.todok(), AttributeError, ["A.to_scipy().todok()"]),
        (lambda: SparseArray(DENSE), TypeError, ["got ndarray", "from_dense, from_scipy"]),
        (lambda: SparseArray(A.to_scipy(), dtype=float), TypeError, ["csr_array", "from_scipy"]),
        (lambda: sgap_jax.spmm(A.to_scipy(), DENSE), TypeError, ["from_scipy makes one"]),
        (lambda: A.tobsr(), AttributeError, ["A.asformat(BCSR(r, c))"]),
        (lambda: A.size, AttributeError, ["A.nnz", "math.prod(A.shape)"]),
        (lambda: A.transpose((0, 1)), ValueError, ["axes: expected None or (1, 0), got (0, 1)"]),
        (lambda: T.transpose((1, 0, 2)), ValueError, ["expected None or (2, 1, 0)"]),
        (lambda: A.transpose(0, 1), ValueError, ["axes: expected None or (1, 0), got (0, 1)"]),
        (lambda: A.transpose(1), ValueError, ["axes: expected None or (1, 0), got 1"]),
        (lambda: A.no_such_name, AttributeError, ["no attribute 'no_such_name'"]),
        (lambda: A.asformat(CSC).row_offsets, AttributeError, ["asformat(CSR).row_offsets"]),
        (lambda: A.diagonal(0.5), TypeError, ["float"]),
        (lambda: batch(A).sum((0, 1)), ValueError, ["sum: A is batched", "jax.vmap"]),
        (lambda: T.diagonal(), ValueError, ["diagonal", "matrix", "(2, 2, 3)"]),
    ],
)
def test_message(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_products_and_maxima_of_bool_are_its_logic():
    a, b = A > 0, OTHER > 0
    for found, want in ((a * b, (DENSE > 0) & np.eye(5, 4, dtype=bool)), (a.maximum(b), None)):
        want = (DENSE > 0) | np.eye(5, 4, dtype=bool) if want is None else want
        assert found.dtype == bool
        np.testing.assert_array_equal(found.todense(), want)


def test_objects_are_equal_by_identity():
    assert A == A and A != OTHER and A is not None and A != "A" and A in (None, A)
    assert {A: 1}[A] == 1
    # Names of others that say what to write are not there.
    assert not hasattr(A, "todok") and getattr(A, "getnnz", None) is None


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_is_said_to_be_there_is_there(name):
    """What can be run of the advice."""
    with pytest.raises(AttributeError, match=f"SparseArray.{name}: the nearest is "):
        getattr(A, name)
    expression = re.split(", or |, which ", INSTEAD[name])[0]
    B = A if name == "multiply" else A.T.todense()
    x = np.ones(4) if name == "mv" else 1.0
    names = {"A": A, "B": B, "n": 2, "i": 1, "j": 1, "r": 2, "c": 2, "p": 0, "s": 0.0, "x": x}
    assert eval(expression, globals() | names) is not None


@pytest.mark.parametrize("module", [".", ".graphs", ".linalg", ".masks", ".nn"])
def test_modules_name_what_is_there(module):
    """Names that others have are refused with one that begins with a name of the module, or of the
    package, or is an expression of these."""
    room = importlib.import_module(f"sgap_jax{module}".rstrip("."))
    for name, nearest in room._INSTEAD.items():
        if nearest.startswith("import "):  # sgap_jax.nn, which another test may have imported
            continue
        with pytest.raises(AttributeError, match=f"no attribute '{name}': the nearest is"):
            getattr(room, name)
        found = re.findall(r"[A-Za-z_]\w*", nearest)
        assert any(hasattr(room, word) or hasattr(sgap_jax, word) for word in found), nearest
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'$"):
        _ = room.no_such_name
