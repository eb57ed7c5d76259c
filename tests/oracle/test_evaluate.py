"""evaluate: index notation over any sparse and dense operands, against NumPy and derivatives of the
same expression of dense arrays."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Compressed,
    CpuTile,
    Dense,
    Format,
    Reference,
    ScheduleError,
    SparseArray,
    evaluate,
    explain,
)
from sgap_jax.compiler import Schedule, parse
from sgap_jax.primitives import evaluate_terms

VECTOR = Format((Compressed,))
SIZES = {"i": 7, "j": 5, "k": 4}
WORDS = {"A": "ij", "B": "ij", "D": "jk", "P": "ik", "T": "ijk", "v": "j", "Q": "ii"}
FORMATS = {"A": CSR, "B": CSR, "D": CSR, "P": CSR, "T": CSF(3), "v": VECTOR, "Q": CSR}
RESIDUAL = "y(i) = b(i) - A(i,j) * x(j)"
# Each expression, and how jax.numpy has it of dense arrays.
EINSUM = jnp.einsum
CASES = {
    RESIDUAL: lambda A, b, x: b - A @ x,
    "C(i,j) = A(i,j) * A(i,j) * B(i,j) + b(i) - B(i,j)": lambda A, B, b: A * A * B + b[:, None] - B,
    "s = A(i,j) * D(j,k) * P(i,k)": lambda A, D, P: EINSUM("ij,jk,ik->", A, D, P),
    "C(i,j) = A(i,j) * (B(i,j) - v(j))": lambda A, B, v: A * (B - v[None]),
    "y(i) += T(i,j,k) * D(j,k) + Q(i,i) * b(i)": lambda T, D, Q, b: (
        EINSUM("ijk,jk->i", T, D) + EINSUM("ii,i->i", Q, b)
    ),
}


def dense_operands():
    random = np.random.default_rng(0)
    found = {}
    for name, word in {**WORDS, "x": "j", "b": "i"}.items():
        shape = [SIZES[index] for index in word]
        found[name] = random.integers(1, 4, shape) * (random.random(shape) < 0.4)
    return found | {"x": np.arange(1, 6), "b": np.arange(1, 8)}


DENSE = dense_operands()


def operands(text, dtype="float64", **formats):
    """The operands of an expression, sparse ones in their formats or in those given."""
    formats, right = FORMATS | formats, text.split("=")[1]
    own = {name: x.astype(dtype) for name, x in DENSE.items() if f"{name}(" in right}
    return {
        name: SparseArray.from_dense(x, format=formats[name]) if name in formats else jnp.asarray(x)
        for name, x in own.items()
    }


def dense(given):
    return {n: x.todense() if isinstance(x, SparseArray) else x for n, x in given.items()}


@pytest.mark.parametrize("text", CASES)
def test_values_and_derivatives(text):
    """The value, and derivatives of first and second order in every operand."""
    given = operands(text)
    values = {n: x.values if isinstance(x, SparseArray) else x for n, x in given.items()}

    def with_values(values):
        sparse = lambda x: isinstance(x, SparseArray)
        return {n: x.with_values(values[n]) if sparse(x) else values[n] for n, x in given.items()}

    def each(f, values):
        loss = lambda values: jnp.sum(jnp.sin(f(with_values(values))))
        slope = lambda values: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(values)))
        return f(with_values(values)), jax.grad(slope)(values)

    found = jax.jit(functools.partial(each, lambda own: evaluate(text, **own)))(values)
    want = jax.jit(functools.partial(each, lambda own: CASES[text](**dense(own))))(values)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, want)


def test_formats_dtypes_and_what_runs_as_einsum():
    """Operands that are converted, or left in plain JAX because no order of the loops goes through
    all; half precision, complex numbers, int8 that wraps; one product of one sparse operand."""
    A, B, b, x, Q = (DENSE[name] for name in "ABbxQ")
    for text, formats, want in (
        (RESIDUAL, {"A": CSC}, b - A @ x),
        ("C(i,j) = A(i,j) + B(i,j)", {"A": COO, "B": CVS(2)}, A + B),
        ("y(j) = A(i,j) * b(i)", {}, A.T @ b),
        ("C(i,j) = A(i,j) * x(j)", {"A": CSF(2)}, A * x),
        ("y(i) = Q(i,j) * Q(j,i)", {}, (Q * Q.T).sum(1)),
    ):
        np.testing.assert_array_equal(evaluate(text, **operands(text, **formats)), want, text)
    text = "C(i,j) = A(i,j) * B(i,j) - A(i,j)"
    plain = jax.jit(functools.partial(evaluate, text, schedule=Reference()))
    for dtype, schedule in (("bfloat16", None), ("complex64", None), ("int8", Reference())):
        scale = 50 if dtype == "int8" else 1
        given = {name: x.with_values(scale * x.values) for name, x in operands(text, dtype).items()}
        found = plain(**given) if schedule else evaluate(text, **given)
        want = scale * A.astype(dtype) * scale * B.astype(dtype) - scale * A.astype(dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, want)
    nothing = SparseArray.from_dense(np.zeros((0, 5)))
    assert evaluate(text, A=nothing, B=nothing).shape == (0, 5)


def test_products_with_sparse_vectors_by_the_operator():
    """Matrix times vector, vector times matrix, and the inner product; a row of a matrix too."""
    a, b = DENSE["A"].astype(float), DENSE["D"].astype(float)
    A, B = map(SparseArray.from_dense, (a, b))
    v = SparseArray.from_dense(DENSE["v"].astype(float), format=VECTOR)
    for found, want in ((A @ v, a @ DENSE["v"]), (v @ B, DENSE["v"] @ b), (A[1] @ B, a[1] @ b)):
        assert found.format.is_coordinate and found.nnz == np.count_nonzero(want)
        np.testing.assert_array_equal(found.todense(), want)
    assert float(A[1] @ v) == a[1] @ DENSE["v"]
    slope = jax.grad(lambda x: jnp.sum((A @ v.with_values(x)).values ** 2))(v.values)
    np.testing.assert_allclose(slope, (2 * a.T @ a @ DENSE["v"])[DENSE["v"] != 0])
    with pytest.raises(ValueError, match=r"expected shape\[0\] = 5, .*got shape \(7,\)"):
        A @ SparseArray.from_dense(np.ones(7), format=COO)
    with pytest.raises(ValueError, match=r"A @ v\.todense\(\) is the dense vector"):
        jax.jit(lambda A, v: A @ v)(A, v)


def test_bool_operands():
    """* is and, + is or, with dense and sparse results, inside jit too."""
    a, b, d = (DENSE[name] > 0 for name in "ABD")
    A, B, D = map(SparseArray.from_dense, (a, b, d))
    product = evaluate("C(i,k) = A(i,j) * D(j,k)", A=A, D=D, format=CSR)
    assert product.dtype == bool
    np.testing.assert_array_equal(product.todense(), a.astype(int) @ d > 0)
    either = jax.jit(lambda A, B: evaluate("C(i,j) = A(i,j) + B(i,j)", A=A, B=B))(A, B)
    np.testing.assert_array_equal(either, a | b)
    scaled = evaluate("C(i,j) = A(i,j) * c", A=A, c=True)
    np.testing.assert_array_equal(scaled, a)
    many = np.ones(1 << 16, bool)  # 2^32 products, which no int32 counts
    assert evaluate("y = a(i) * b(j)", a=many, b=many)


def test_a_sparse_vector_says_which_columns_are_read():
    """The loops of A(i,j) * v(j) begin with v where A is in CSR, also for a traced structure; those
    of a sum keep the order of rows, which they merge with v."""
    pytest.importorskip("llvmlite")
    said = []
    for text in ("y(i) = A(i,j) * v(j) * b(i)", "y(i) = A(i,j) * v(j) + b(i)"):
        given, product = operands(text), DENSE["A"] @ DENSE["v"]
        said.append(str(explain(jax.jit(lambda given, t=text: evaluate(t, **given)), given)))
        want = product * DENSE["b"] if "+" not in text else product + DENSE["b"]
        np.testing.assert_array_equal(evaluate(text, **given), want)
    assert "forall(j, forall(i" in said[0] and "while" not in said[0] and "while" in said[1]


def test_maps():
    """Under vmap a dense operand has one more index; values and structures are taken in turn."""
    given = operands(RESIDUAL)
    x, values = jnp.stack([given["x"], 2 * given["x"]]), jnp.stack([given["A"].values] * 2)
    loops = jax.make_jaxpr(jax.vmap(lambda x: evaluate(RESIDUAL, **given | {"x": x})))(x)
    assert "scan" not in str(loops) and "batch" in str(loops)
    many = jax.vmap(lambda x, v: evaluate(RESIDUAL, A=given["A"].with_values(v), b=given["b"], x=x))
    alone = jax.vmap(lambda x: evaluate(RESIDUAL, **given | {"x": x}))
    want = DENSE["b"] - np.asarray(x) @ DENSE["A"].T
    np.testing.assert_array_equal(alone(x), want)
    np.testing.assert_array_equal(many(x, values), want)


def test_schedules():
    """A schedule of the expression as a value, with one of a gradient; what is refused, and why."""
    expression = parse(RESIDUAL, {"A": CSR})
    tiles = Schedule(expression).split("i", "i0", "i1", 4).parallelize("i0", "CPUThread", "NoRaces")
    given, want = operands(RESIDUAL), DENSE["b"] - DENSE["A"] @ DENSE["x"]
    np.testing.assert_array_equal(evaluate(RESIDUAL, schedule=tiles, **given), want)
    other = "u(n) = c(n) - M(n,l) * z(l)"  # the same, up to names
    renamed = dict(zip("Mcz", (given["A"], given["b"], given["x"]), strict=True))
    np.testing.assert_array_equal(evaluate(other, schedule=tiles, **renamed), want)
    slope = jax.grad(lambda x: evaluate(RESIDUAL, schedule=tiles, **given | {"x": x}).sum())
    np.testing.assert_array_equal(slope(given["x"]), -DENSE["A"].sum(0))
    with pytest.raises(ScheduleError, match=r"is for y\(i\) = .* in CSR, got .* in CSC"):
        evaluate(RESIDUAL, schedule=tiles, **operands(RESIDUAL, A=CSC))
    with pytest.raises(NotImplementedError, match="no kernel that obeys CpuTile"):
        evaluate(RESIDUAL, schedule=CpuTile(), **given)
    with pytest.raises(NotImplementedError, match="loops are compiled for .* got complex64"):
        evaluate(RESIDUAL, schedule=tiles, **operands(RESIDUAL, "complex64"))
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        evaluate(RESIDUAL, schedule=3, **given)


@pytest.mark.parametrize("format", [COO, CVS(2), BCSR(2, 3), CSF(2)], ids=str)
def test_schedules_of_one_operand_in_any_format(format):
    """Loops of the caller's take formats that are not merged, checked or made under jit, and so do
    their derivatives."""
    text, given = "y(i) = A(i,j) * x(j)", operands("y(i) = A(i,j) * x(j)", A=format)
    schedule = Schedule(parse(text, {"A": format}))
    want = DENSE["A"] @ DENSE["x"]
    run = functools.partial(evaluate, text, schedule=schedule)
    np.testing.assert_array_equal(run(**given), want)
    A = given["A"]
    plain = dict(index_arrays=tuple(map(tuple, A.index_arrays)), transposed=None)
    made = jax.jit(lambda A: run(A=dataclasses.replace(A, **plain), x=given["x"]))
    np.testing.assert_array_equal(made(A), want)
    loss = lambda values, x: run(A=A.with_values(values), x=x).sum()
    values, x = jax.jit(jax.grad(loss, argnums=(0, 1)))(A.values, given["x"])
    np.testing.assert_array_equal(x, DENSE["A"].sum(0))
    stored = np.asarray(A.with_values(jnp.ones_like(A.values)).todense())
    np.testing.assert_array_equal(A.with_values(values).todense(), stored * DENSE["x"])


def test_index_arrays_may_hold_anything():
    """Loops run where traced index arrays are valid; else plain JAX, in which what is not valid
    takes no part."""
    B, x, b = (jnp.asarray(DENSE[name], float) for name in "Bxb")
    A = operands(RESIDUAL)["A"]
    sparse = operands("y(i) = B(i,j)")["B"]

    @jax.jit
    def both(offsets, indices, values):
        H = SparseArray.from_arrays(values, offsets, indices, shape=A.shape)
        loss = lambda v: jnp.sum(evaluate("C(i,j) = H(i,j)*B(i,j)", H=H.with_values(v), B=sparse))
        found = (
            evaluate("C(i,j) = H(i,j) + B(i,j)", H=H, B=sparse),
            evaluate("y(i) = b(i) - H(i,j) * x(j)", H=H, b=b, x=x),
            jax.grad(loss)(values),
        )
        dense = lambda v: jnp.sum(H.with_values(v).todense() * B)
        return found, (H.todense() + B, b - H.todense() @ x, jax.grad(dense)(values))

    random, (offsets, indices) = np.random.default_rng(1), A.index_arrays[1]
    for n in range(8):
        if n:
            offsets = random.integers(*((-(2**31), 2**31 - 1) if n % 2 else (0, 20)), len(offsets))
            offsets = np.sort(offsets) if n > 3 else offsets
            indices = random.integers(-3, A.shape[1] + 3, len(indices))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-12),
            *both(np.int32(offsets), np.int32(indices), A.values),
        )


def test_loops_run_where_the_documentation_says_so(monkeypatch):
    """Valid arrays reach no plain JAX."""
    monkeypatch.setattr(evaluate_terms, "_reference", None)
    monkeypatch.setattr(evaluate_terms, "plain", None)
    pytest.importorskip("llvmlite")
    for text, formats in ((RESIDUAL, {}), ("C(i,j) = A(i,j) + B(i,j)", {"A": CSC, "B": COO})):
        own = dense(operands(text))
        want = own["A"] + own["B"] if "B" in own else own["b"] - own["A"] @ own["x"]
        np.testing.assert_array_equal(evaluate(text, **operands(text, **formats)), want)


FIBERS = Format((Compressed, Compressed, Dense))
X = np.arange(1.0, 13.0).reshape(4, 3)
SPARSE = {  # the expression, formats of its result, and the result
    "C(i,k) = A(i,j) * D(j,k)": ((CSR, CSC, COO, CSF(2)), lambda A, D: A @ D),
    "C(i,j) = A(i,j) - B(i,j)": ((CSR, CVS(2)), lambda A, B: A - B),
    "R(i,j) = T(i,j,k) * c(k)": ((CSF(2),), lambda T, c: T @ c),
    "R(i,j,r) = T(i,j,k) * X(k,r)": ((FIBERS, CSF(3)), lambda T, X: T @ X),
    "y(i) = A(i,j) * v(j)": ((VECTOR,), lambda A, v: A @ v),
    "R(i,k) = P(i,k) * A(i,j) * D(j,k)": ((CSR,), lambda P, A, D: P * (A @ D)),
    "C(i,j) = A(i,j) + b(i)": ((CSR,), lambda A, b: A + b[:, None]),
}

WITH_DERIVATIVES = [text for text in SPARSE if text[:2] in ("C(", "R(") and "j,r" not in text][:4]


@pytest.mark.parametrize("text", SPARSE)
def test_sparse_results(text):
    """What they store is what terms reach; they are plans for new values inside jit, with
    derivatives in all operands."""
    formats, dense_result = SPARSE[text]
    own = {"c": VECTOR, **FORMATS}
    dense = {name: x.astype(float) for name, x in DENSE.items() if f"{name}(" in text.split("=")[1]}
    dense |= {"X": X} if "X(" in text else {"c": DENSE["x"][:4] % 2.0} if "c(" in text else {}
    given = {
        name: SparseArray.from_dense(x, format=own[name]) if name in own else jnp.asarray(x)
        for name, x in dense.items()
    }
    want, there = dense_result(**dense), {n: abs(x) for n, x in dense.items()}
    reached = there["A"] + there["B"] if "-" in text else dense_result(**there)
    for format in formats:
        found = evaluate(text, format=format, **given).checked()
        assert found.format in (format, COO)
        own = found.to_scipy().toarray() if found.ndim == 2 else found.todense()
        np.testing.assert_array_equal(own, want)
        if "P(" not in text and not format.block_shape and format != FIBERS:
            assert found.nnz == np.count_nonzero(reached)
    if text not in WITH_DERIVATIVES:
        return
    plan = evaluate(text, format=formats[0], **given)
    values = {n: x.values if isinstance(x, SparseArray) else x for n, x in given.items()}
    sparse = {n for n, x in given.items() if isinstance(x, SparseArray)}

    def ours(values):
        new = {n: given[n].with_values(v) if n in sparse else v for n, v in values.items()}
        return jnp.sum(jnp.sin(evaluate(text, pattern=plan, **new).values))

    def theirs(values):
        new = {
            n: given[n].with_values(v).todense() if n in sparse else v for n, v in values.items()
        }
        return jnp.sum(jnp.sin(dense_result(**new)))

    found, want = (jax.jit(jax.grad(f))(values) for f in (ours, theirs))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9), found, want)


@pytest.mark.parametrize("format", ["CVS(2)", "BCSR(2, 4).transposed", "COO"])
def test_structures_in_formats_that_are_not_merged(format):
    """The values of a result are in the order of its format, and a pattern's values are ignored."""
    rng = np.random.default_rng(0)
    M, D = np.where(rng.random((5, 6)) < 0.5, 3.0, 0), rng.standard_normal((5, 6))
    H = SparseArray.from_dense(M, format=format)
    own, sevens = {"H": H, "d": D}, H.with_values(jnp.full_like(H.values, 7))
    for by in ({"format": format}, {"pattern": H}, {"pattern": sevens, "H": H.asformat("csr")}):
        for schedule in (None, "Reference()"):
            found = evaluate("Z(i,j) = H(i,j) * d(i,j)", **own | by, schedule=schedule)
            assert found.format == H.format
            np.testing.assert_array_equal(found.todense(), M * D)
    traced = jax.jit(lambda d, P: evaluate("Z(i,j) = d(i,j)", d=d, pattern=P).todense())
    stored = np.asarray(H.with_values(jnp.ones_like(H.values)).todense())
    np.testing.assert_array_equal(traced(D, sevens), D * stored)


def test_sparse_results_of_traced_structures():
    """In a capacity, of which too small a one is an error or a count; by a plan, and sampled."""
    given = operands("C(i,j) = A(i,j) - B(i,j)")
    text, want = (
        "C(i,j) = A(i,j) - B(i,j) + A(i,j) * x(j)",
        DENSE["A"] * (1 + DENSE["x"]) - DENSE["B"],
    )
    x = jnp.asarray(DENSE["x"], float)
    entries = np.count_nonzero(DENSE["A"] + DENSE["B"])

    @jax.jit
    def both(A, B):
        room, small = (evaluate(text, format=CSC, nse=n, A=A, B=B, x=x) for n in (35, 3))
        sampled = evaluate(text, pattern=A, A=A, B=B, x=x)
        return room, small.todense(), sampled.todense(), room.overflow, small.overflow, small

    room, stored, sampled, none, left_out, small = both(**given)
    np.testing.assert_array_equal(room.checked().to_scipy().toarray(), want)
    np.testing.assert_array_equal(sampled, np.where(DENSE["A"], want, 0))
    assert int(none) == 0 and int(left_out) == entries - 3
    first = np.flatnonzero((DENSE["A"] + DENSE["B"]).T)[:3]
    np.testing.assert_array_equal(stored.T.reshape(-1)[first], want.T.reshape(-1)[first])
    with pytest.raises(Exception, match="at most nnz = 3, got 18"):
        small.checked()


PRODUCT = "C(i,k) = A(i,j) * D(j,k)"
REFUSED_SPARSE = [
    ({}, ValueError, "is traced, .*give nse=, or pattern="),
    ({"nse": 9}, NotImplementedError, "no sparse factor of A.* use spgemm"),
    ({"pattern": CSR}, TypeError, "pattern must be a SparseArray, got Format"),
    ({"pattern": SparseArray.from_dense(np.eye(3))}, ValueError, r"pattern has shape \(3, 3\)"),
    ({"format": CSF(3)}, ValueError, "3"),
    ({"format": None, "nse": 3}, ValueError, "nse is of a sparse result"),
]


@pytest.mark.parametrize("change,error,message", REFUSED_SPARSE)
def test_refused_sparse_results(change, error, message):
    given = operands(PRODUCT)
    change = ({} if "pattern" in change else {"format": CSR}) | change
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda A, D: evaluate(PRODUCT, A=A, D=D, **change), **given)
    with pytest.raises(ValueError, match="without indices is one number"):
        evaluate("s = A(i,j)", format=CSR, A=given["A"])


REFUSED = {
    "y(i) = A(i,j) * x(i)": "index i of .* has sizes 7 and 5",
    "y(i) = A(i) * x(i)": r"A\(i\) is for 1 dimensions, got 2",
    "y(i) = A(i,j)": "x is no operand",
    "y(i) = A(i,j) * x(j) * z(j)": "no value for z of .*; give z=",
    "y(k) = A(i,j) * x(j)": "has the index k of the result; broadcast",
    "y(i) = 2 * A(i,j) * x(j)": r"operands have names; write s \* A\(i,j\) with s=2",
    "y(i) = A[i,j] * x(j)": r"indices are in parentheses, as in A\(i,j\), got A\[i, j\]",
    "y(i) max= A(i,j) * x(j)": r"are added up; gspmm\(A, x, reduce='max'\)",
    "y(i,j) = min(A(i,j), x(j))": r"of two sparse arrays A.minimum\(B\)",
    "y(i) = A(i,j) / x(j)": r"combined by \+, - and \*, got A\(i, j\) / x\(j\)",
    "y(i) = A(i,j+1) * x(j)": "of indices that are names",
    "y(i,i) = A(i,j) * x(j)": r"indices of y\(i,i\) must differ",
    "A(i) = A(i,j) * x(j)": "A is on both sides",
    "A(i,j) * x(j)": "expected one assignment",
    "y(i) = A(i,j) * (x(j)": "no index notation",
    "y(i) = " + "(" * 300 + "A(i,j)": "no index notation",
    "y(i) = " + " * ".join(["(A(i,j) + x(j))"] * 7): "128 terms .* 64 are merged at most",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text):
    given = {"A": operands(RESIDUAL)["A"], "x": operands(RESIDUAL)["x"]}
    with pytest.raises((ValueError, NotImplementedError), match=REFUSED[text]):
        evaluate(text, **given)


def test_refused_operands():
    with pytest.raises(TypeError, match="expected index notation"):
        evaluate(3)
    with pytest.raises(TypeError, match="subtracts, and all operands are bool"):
        evaluate("y(i) = a(i) - a(i)", a=np.array([True]))
    with pytest.raises(NotImplementedError, match="diagonals are taken of dense arrays and"):
        T = SparseArray.from_dense(np.ones((2, 2, 2)), format=CSF(3))
        evaluate("y(i) = T(i,i,k)", T=T)
    many = ",".join(f"i{n}" for n in range(30)), ",".join(f"j{n}" for n in range(30))
    wide = np.ones((1,) * 30)
    with pytest.raises(NotImplementedError, match="einsum has 52 letters for indices, .* has 60"):
        evaluate(f"s = X({many[0]}) * Y({many[1]})", X=wide, Y=wide)
    for nse, message in ((1, "evaluate: nse: expected at least 4"), (-1, "evaluate: nse must not")):
        with pytest.raises(ValueError, match=message):
            evaluate("C(i,j) = A(i,j)", A=np.ones((2, 2)), format=CSR, nse=nse)
    with pytest.raises(NotImplementedError, match="evaluate: a tensor of 3 dimensions with nse"):
        evaluate("R(i,j,k) = T(i,j,k)", T=T, format=CSF(3), nse=9)
    batched = dataclasses.replace(T, values=np.ones((3, 8)))
    with pytest.raises(ValueError, match="is batched"):
        evaluate("y(i) = T(i,j,k)", T=batched)
    with pytest.raises(ValueError, match="no operand 'B' in .*; there are A, x"):
        parse("y(i) = A(i,j) * x(j)", {"B": CSR})
    with pytest.raises(TypeError, match="must be a SparseArray or dense, got a coo_array"):
        evaluate("y(i) = A(i,j)", A=scipy.sparse.coo_array(np.eye(2)))
