"""Index notation from subscripts and from tensors, and the expressions that are refused."""

import re

import pytest

from sgap_jax import BCSR, COO, CSC, CSR, CVS
from sgap_jax.compiler.notation.expr import (
    Access,
    Assign,
    Attained,
    Sum,
    Tensor,
    assign,
    index_vars,
)
from sgap_jax.formats.levels import CSF, Compressed, Dense, Format, Singleton

i, j, k, l = index_vars("i j k l")  # noqa: E741


def test_subscripts_and_tensors_say_the_same():
    A, B, C = Tensor("A", CSR), Tensor("B"), Tensor("C")
    spmm = assign("ij,jk->ik", {"A": CSR})
    assert spmm == Assign(C[i, k], A[i, j] * B[j, k]) and hash(spmm) == hash(
        assign("ij, jk -> ik", {"A": CSR})
    )
    assert str(spmm) == "C(i,k) += A(i,j) * B(j,k)"
    assert (spmm.sparse, spmm.indices, spmm.reduced) == (A[i, j], (i, k, j), (j,))
    X = Tensor("X", CSF(3))
    mttkrp = assign("ikl,lj,kj->ij", {"X": CSF(3)}, names="X B C M")
    assert mttkrp == Assign(Tensor("M")[i, j], X[i, k, l] * B[l, j] * C[k, j])
    assert str(assign("i,i->", names=["x", "y", "s"])) == "s += x(i) * y(i)"
    assert assign("i,i->", names="x y s").output == Tensor("s")[()]
    assert str(assign("ij,i->ij", {"A": CSR, "C": CSR})) == "C(i,j) = A(i,j) * B(i)"
    assert str(assign("ij,jk->ik", {"A": CSR}, reduction="max")) == "C(i,k) max= A(i,j) * B(j,k)"
    assert assign("ij->ji").factors == (Access("A", (i, j)),)


@pytest.mark.parametrize("format", [CSR, CSC, COO, CSF(2), BCSR(2, 4), CVS(8)], ids=str)
def test_formats_of_matrices(format):
    sampled = assign("ij,ik,jk->ij", {"A": format, "D": format})
    assert sampled.sparse == Access("A", (i, j), format) and sampled.output.format == format


def test_coordinates_of_any_rank():
    three = assign("ijk,k->ij", {"A": COO})
    assert three.sparse.format == Format((Compressed(unique=False), Singleton(), Singleton()))
    assert assign("i,i->", {"A": COO}).sparse.format == Format((Compressed(unique=False),))


@pytest.mark.parametrize(
    "error,reason,arguments",
    [
        (ValueError, "letters, the output written out", ("ij,jk",)),
        (ValueError, "letters, the output written out", ("i...,j->i",)),
        (ValueError, "letters, the output written out", ("ij->i->j",)),
        (ValueError, "letters, the output written out", ("ij->i,j",)),
        (ValueError, "expected 3 names for 'ij,j->i'", ("ij,j->i", {}, "A x")),
        (ValueError, "expected 3 names", ("ij,j->i", {}, "A x 2")),
        (ValueError, "a name of its own", ("ij,j->i", {}, "A A y")),
        (ValueError, "no operand 'X'; there are A, B, C", ("ij,j->i", {"X": CSR})),
        (
            ValueError,
            "format: expected a Format or its text",
            ("ij->i", {"A": "CRS"}),
        ),
        (ValueError, "CSR is for 2 indices, got 3 in A(i,j,k)", ("ijk,k->ij", {"A": CSR})),
        (ValueError, "no factor has the index k", ("ij->ik",)),
        (ValueError, "reduction: expected one of +, max, min", ("ij,j->i", {}, None, "mean")),
        (
            NotImplementedError,
            "A and B are both sparse; B(j,k) in COO may store a coordinate several times",
            ("ij,jk->ik", {"A": CSR, "B": COO}),
        ),
        (
            NotImplementedError,
            "A and B are both sparse; A(i,j) in BCSR(2, 2) stores blocks, which are not merged",
            ("ij,ij->ij", {"A": BCSR(2, 2), "B": CSR}),
        ),
        (
            NotImplementedError,
            "a factor of every term, not C(i,j) in CSC",
            ("ij,ij->ij", {"A": CSR, "B": CSR, "C": CSC}),
        ),
        (NotImplementedError, "the index i twice in A(i,i)", ("ii->i",)),
        (NotImplementedError, "structure of its own", ("ij,jk->ik", {"A": CSR, "C": CSR})),
        (NotImplementedError, "structure of its own", ("ij->ji", {"A": CSR, "B": CSR})),
        (NotImplementedError, "structure of its own", ("ij->ij", {"A": CSR, "B": CSC})),
        (NotImplementedError, "here: no sparse factor", ("ij->ij", {"B": CSR})),
        (NotImplementedError, "leave its format out", ("ij->i", {"A": Format((Dense, Dense))})),
        (
            NotImplementedError,
            "a Singleton level has one coordinate for each position",
            ("ij->i", {"A": Format((Dense, Singleton))}),
        ),
    ],
)
def test_refused(error, reason, arguments):
    with pytest.raises(error, match=re.escape(reason)):
        assign(*arguments)


def test_what_attains_is_an_extremum_of_something():
    best, factor = Access("C", (i,)), Access("A", (i, j))
    assert str(Attained((factor,), best, "max")) == "[A(i,j) >= C(i)]"
    with pytest.raises(ValueError, match=r"C\(i\): .* expected max or min, got '\+'"):
        Attained((factor,), best, "+")
    with pytest.raises(ValueError, match=r"at least one factor beside C\(i\)"):
        Attained((), best, "max")


def test_nothing_is_no_expression():
    with pytest.raises(ValueError, match="expected at least one factor"):
        Assign(Access("C", (i,)), ())
    with pytest.raises(ValueError, match="expected at least one factor"):
        Assign(Access("C", (i,)), Sum(()))
    with pytest.raises(TypeError):
        Access("A", (i,)) * 2
