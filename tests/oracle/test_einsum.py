"""einsum with a sparse operand against np.einsum on the dense arrays, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast, rounded
from tolerance import DTYPES, assert_within, sum_bound

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, CpuTile, Reference, SparseArray, einsum, spmm

SIZES = {"i": 6, "j": 5, "k": 4, "l": 3, "r": 7, "s": 2}
MATRIX = [
    "ij,jk->ik",  # SpMM, its transposes, and the dense operand by columns
    "ij,jk->ki",
    "ij,kj->ik",
    "ij,ik->jk",
    "ij,ki->jk",
    "jk,ij->ik",
    "ij,j->i",
    "ij,i->j",
    "ij",  # the output that NumPy infers: all indices
    "ij->ij",
    "ij->ji",
    "ij->i",
    "ij->j",
    "ij->",
    "ij,ik,jk->ij",  # SDDMM in each order
    "ij,jk,ik->ij",
    "kj,ij,ki->ij",
    "ij,ik,jk->i",
    "ij,ij->ij",
    "ij,ji->ij",
    "ij,i,j->ij",
    "ij,->ij",
    "ij,i,j->",
    "ij,jk->ijk",
    "ij,jk,kl->il",
    "ij,jk,kl->li",
    "ij,jkl->ikl",
    "ij,rik,rjk->ij",
    "ij,rik,rjk->r",
    "ij,k->k",
    "ij,rs->jrs",
    "ij,jk->",
]
TENSOR = [
    "ijk,jr,kr->ir",  # MTTKRP in each mode
    "ijk,ir,kr->jr",
    "ijk,ir,jr->kr",
    "ijk,k->ij",  # TTV
    "ijk,kr->ijr",  # TTM
    "ijk,jr->irk",
    "ijk,ir,jr,kr->ijk",
    "ijk,ijk->ijk",
    "ijk,ijk->",
    "ijk->ik",
    "ijk->kji",
    "ijk,jr,ks->irs",
    "ijkl,jr,kr,lr->ir",
]


def sparse_dense(word, rng, nnz=None):
    """The coordinates and values of a random tensor, and the tensor as a dense array."""
    shape = tuple(SIZES[index] for index in word)
    place = rng.choice(np.prod(shape), np.prod(shape) // 3 if nnz is None else nnz, replace=False)
    coordinates = np.stack(np.unravel_index(place, shape), 1).reshape(-1, len(shape))
    dense = np.zeros(shape)
    values = rng.standard_normal(len(place))
    dense[tuple(coordinates.T)] = values
    return SparseArray.from_coordinates(coordinates, values, shape, format=COO), dense


def operands(subscripts, dtype="float64", nnz=None):
    """The operands, the same operands dense in float64, and the words of the subscripts."""
    rng = np.random.default_rng(len(subscripts))
    words = subscripts.partition("->")[0].split(",")
    place = next(i for i, word in enumerate(words) if word.startswith("ij"))
    A, dense = sparse_dense(words[place], rng, nnz)
    A = A.with_values(cast(np.asarray(A.values), dtype))
    others = [rounded(rng.standard_normal([SIZES[c] for c in word]), dtype) for word in words]
    given = [A if i == place else cast(x, dtype) for i, x in enumerate(others)]
    whole = [rounded(dense, dtype) if i == place else x for i, x in enumerate(others)]
    return given, whole, place


def as_dense(x):
    return x.todense() if isinstance(x, SparseArray) else x


def check(subscripts, given, whole, dtype):
    out = einsum(subscripts, *given)
    expected = np.einsum(subscripts, *whole)
    size = np.einsum(subscripts, *map(np.abs, whole))
    # Terms of the error bound: products of up to 4 factors, and a rounding between two steps.
    terms = np.einsum(subscripts, *((x != 0).astype(float) for x in whole)) + 2 * len(whole)
    got = as_dense(out)
    assert got.dtype == jnp.dtype(dtype)
    steps = 1 if len(whole) < 3 else 1 + len(whole)
    assert_within(got, expected, steps * sum_bound(expected, size, terms, dtype))
    return out


@pytest.mark.seconds(check=2, test=5)
@pytest.mark.parametrize("subscripts", MATRIX)
def test_matrices_in_every_format(subscripts):
    given, whole, place = operands(subscripts)
    sparse_output = subscripts.partition("->")[2] == "ij" or subscripts == "ij"
    for format in (COO, CSR, CSC, CVS(1), CVS(4), COO.transposed, CVS(2).transposed, BCSR(3, 2)):
        if format.vector_length and format.order is not None:
            A = given[place].T.asformat(CVS(2)).T
        elif format == COO.transposed:
            A = given[place].T.asformat(COO).T
        else:
            A = given[place].asformat(format)
        assert A.format == format
        out = check(subscripts, given[:place] + [A] + given[place + 1 :], whole, "float64")
        assert isinstance(out, SparseArray) == sparse_output
        if sparse_output:
            assert out.format == A.format and out.index_arrays is A.index_arrays


@pytest.mark.seconds(check=2, test=8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("subscripts", TENSOR)
def test_tensors(subscripts, dtype):
    given, whole, _ = operands(subscripts, dtype)
    check(subscripts, given, whole, dtype)
    out = jax.jit(lambda *x: einsum(subscripts, *x))(*given)
    np.testing.assert_array_equal(as_dense(out), as_dense(einsum(subscripts, *given)))


@pytest.mark.parametrize("subscripts", ["ijk,jr,kr->ir", "ijk,kr->ijr", "ij,jk->ijk", "ij,ij->ij"])
def test_no_entries(subscripts):
    given, whole, _ = operands(subscripts, nnz=0)
    check(subscripts, given, whole, "float64")


@pytest.mark.parametrize("name", BATTERY)
def test_padding_and_rows_without_entries(name):
    case = BATTERY[name]
    A, dense = array(case, "float64"), case.dense()
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((case.shape[0], 3)), rng.standard_normal((case.shape[1], 3))
    for subscripts in ("ij,ir,jr->r", "ij,ir,jr->ir", "ij,ir,jr->", "ij,ir,jr->ij", "ij,jr->ijr"):
        given = (x, y) if subscripts.count(",") == 2 else (y,)
        expected = np.einsum(subscripts, dense, *given)
        got = as_dense(einsum(subscripts, A, *map(jnp.asarray, given)))
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_what_no_entry_names_is_not_read():
    A = SparseArray.from_dense(np.array([[1.0, 0, 2], [0, 0, 3]]))
    X = np.ones((3, 2))
    X[1] = np.nan
    np.testing.assert_array_equal(einsum("ij,jk,kr->ir", A, X, np.eye(2)), [[3, 3], [3, 3]])


def test_entries_of_no_row_or_column():
    """A capacity, made inside jit, of a matrix that has none: all of it is padding."""
    made = SparseArray.from_coordinates

    def of_rows(values, x, at):
        return einsum("ij,j,i->j", made(at, values, (0, 2)), x, jnp.ones(0))

    def of_columns(values, x, at):
        return einsum("ij,ik,jk->k", made(at, values, (2, 0)), x, jnp.ones((0, 3)))

    for f, x in ((of_rows, jnp.ones(2)), (of_columns, jnp.ones((2, 3)))):
        given = jnp.ones(3), x, jnp.zeros((3, 2), int)
        np.testing.assert_array_equal(jax.jit(f)(*given), np.zeros(x.shape[-1]))
        gradients = jax.jit(jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1)))(*given)
        assert not any(x.any() for x in gradients)


def test_products_of_a_matrix_run_on_its_kernels():
    given, _, _ = operands("ij,jk->ik")
    schedule = CpuTile(columns=1, nonzeros=2)
    text = jax.jit(lambda A, B: einsum("ij,jk->ik", A, B, schedule=schedule)).lower(*given)
    assert "sgap_spmm_csr_v1" in text.as_text()
    expected = spmm(*given, schedule=schedule)
    np.testing.assert_array_equal(einsum("ij,jk->ik", *given, schedule=schedule), expected)
    three, _, _ = operands("ij,ik,jk->ij")
    text = jax.jit(lambda *x: einsum("ij,ik,jk->ij", *x).values).lower(*three).as_text()
    assert "sgap_sddmm_csr_v1" in text


def test_integers_and_promotion():
    A = SparseArray.from_dense(np.array([[1, 0], [2, 3]], np.int32))
    assert einsum("ij,jk->ik", A, jnp.eye(2, dtype=jnp.int32)).dtype == jnp.int32
    half = SparseArray.from_dense(np.eye(3, dtype=np.float16))
    assert einsum("ij,ir,jr->r", half, *[jnp.ones((3, 2), jnp.float16)] * 2).dtype == jnp.float16
    # 4096 ones: in float16 a sum of ones stays at 2048
    many = SparseArray.from_dense(np.ones((4096, 1), np.float16))
    ones = jnp.ones((4096, 1), jnp.float16)
    np.testing.assert_array_equal(einsum("ij,ir->jr", many, ones, schedule=Reference()), [[4096]])
    np.testing.assert_array_equal(einsum("ij,ir->r", many, ones), [4096])


def test_no_product_is_left_to_tf32():
    """A GPU's default precision for float32 matrix products has an error of a thousandth."""
    A = SparseArray.from_dense(np.eye(5, 4, dtype=np.float32))
    product = jax.jit(lambda *x: einsum("ij,jr,rs->is", *x, schedule=Reference()))
    traced = product.trace(A, jnp.ones((4, 3), jnp.float32), jnp.ones((3, 2), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert dots and all("precision = [HIGHEST, HIGHEST]" in line for line in dots)


def test_a_tensor_of_the_data_set(data_dir):
    from sgap_jax import read

    files = sorted((data_dir / "tensors").glob("*.tns*"))
    if not files:
        pytest.skip("no tensor in the data set")
    A = read(min(files, key=lambda file: file.stat().st_size)).astype(jnp.float64)
    rng = np.random.default_rng(2)
    words = "ijkl"[: A.ndim]
    factors = [rng.standard_normal((size, 4)) for size in A.shape]
    coordinates = np.stack([np.asarray(c) for c in A.coordinates()], 1)
    products = np.asarray(A.values)[:, None] * np.ones(4)
    for mode in range(1, A.ndim):
        products = products * factors[mode][coordinates[:, mode]]
    expected = np.zeros((A.shape[0], 4))
    np.add.at(expected, coordinates[:, 0], products)
    subscripts = ",".join([words, *(w + "r" for w in words[1:])]) + "->ir"
    got = einsum(subscripts, A, *map(jnp.asarray, factors[1:]))
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("subscripts", "shapes", "error", "says"),
    [
        ("ij,jk->ik", [(6, 5)], ValueError, "2 operands, got 1"),
        ("ij,jk->ik", [(6, 5), (4, 3)], ValueError, "'j' .* sizes 5 and 4"),
        ("ij,jk->ik", [(6, 5), (5,)], ValueError, "'jk' is for 2 dimensions, got 1"),
        ("ij,jk->iq", [(6, 5), (5, 3)], ValueError, "output's indices"),
        ("ij,jk->ii", [(6, 5), (5, 3)], ValueError, "output's indices"),
        ("i1,1k->ik", [(6, 5), (5, 3)], ValueError, "letters"),
        ("ij,kk->ij", [(6, 5), (3, 3)], NotImplementedError, "twice in the operand 'kk'"),
        (3, [(6, 5)], ValueError, "subscripts"),
    ],
)
def test_errors(subscripts, shapes, error, says):
    A = SparseArray.from_dense(np.ones(shapes[0]))
    with pytest.raises(error, match=says):
        einsum(subscripts, A, *(jnp.ones(shape) for shape in shapes[1:]))


def test_errors_of_operands_and_schedules():
    A = SparseArray.from_dense(np.ones((6, 5)))
    with pytest.raises(ValueError, match="one SparseArray among the operands, got 0"):
        einsum("ij,jk->ik", jnp.ones((6, 5)), jnp.ones((5, 2)))
    with pytest.raises(ValueError, match="one SparseArray among the operands, got 2"):
        einsum("ij,jk->ik", A, A.T)
    with pytest.raises(TypeError, match="Schedule"):
        einsum("ij,jk->ik", A, jnp.ones((5, 2)), schedule=3)
    with pytest.raises(NotImplementedError, match="no kernel that obeys CpuTile"):
        einsum("ij,ir,jr->r", A, jnp.ones((6, 2)), jnp.ones((5, 2)), schedule=CpuTile())


@pytest.mark.parametrize("subscripts", ["ij,->", "ij,->ij", "ij,->i"])
def test_the_gradient_of_a_scalar_factor(subscripts):
    given, whole, _ = operands("ij,->ij")
    total = lambda s: jnp.sum(getattr(out := einsum(subscripts, given[0], s), "values", out))
    np.testing.assert_allclose(jax.grad(total)(given[1]), whole[0].sum(), rtol=1e-12)


def test_several_sparse_operands_of_the_same_indices():
    """They are multiplied where all are stored; values, derivatives to order 2, jit and vmap."""
    r = np.random.default_rng(5)

    def sparse(x, format):
        return SparseArray.from_dense(x, format=format)

    dense = [np.float32(r.integers(-3, 4, (5, 6)) * (r.random((5, 6)) < 0.6)) for _ in range(3)]
    A, B, D = map(sparse, dense, (CSR, CSC, CSR))
    x = np.float32(r.integers(-3, 4, 6))
    want = np.einsum("ij,ij,j,ij->i", *dense[:2], x, dense[2])
    np.testing.assert_array_equal(einsum("ij,ij,j,ij->i", A, B, x, D), want)
    total = jnp.einsum("ij,ij,j->i", *dense[:2], x)
    np.testing.assert_array_equal(jax.jit(partial(einsum, "ij,ij,j->i"))(A, B, x), total)
    np.testing.assert_array_equal(einsum("ij,ij", A, B), np.einsum("ij,ij", *dense[:2]))
    tensors = [np.float32(r.integers(-1, 2, (3, 4, 5))) for _ in range(2)]
    found = einsum("ijk,ijk,k->ij", *(sparse(x, CSF(3)) for x in tensors), x[:5])
    np.testing.assert_array_equal(found, np.einsum("ijk,ijk,k->ij", *tensors, x[:5]))
    each = einsum("ij,ij->ij", A, B)
    np.testing.assert_array_equal(each.todense(), dense[0] * dense[1])

    def loss(a, b):
        return (einsum("ij,ij,j->i", A.with_values(a), B.with_values(b), x) ** 2).sum()

    def of_dense(a, b):
        a, b = A.with_values(a).todense(), B.with_values(b).todense()
        return (jnp.einsum("ij,ij,j->i", a, b, x) ** 2).sum()

    def derivatives(f, *values):
        first = jax.grad(f, (0, 1))
        return first(*values), jax.grad(lambda *v: sum((g**2).sum() for g in first(*v)))(*values)

    found, want = (jax.jit(partial(derivatives, f))(A.values, B.values) for f in (loss, of_dense))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    batch = jnp.stack([A.values, 2 * A.values])
    found = jax.vmap(lambda a: einsum("ij,ij,j->i", A.with_values(a), B, x))(batch)
    np.testing.assert_array_equal(found, np.stack([total, 2 * total]))
    with pytest.raises(ValueError, match="of the same indices in the same order"):
        einsum("ij,jk->ik", A, sparse(dense[0].T, CSR))
    with pytest.raises(ValueError, match="several are evaluate"):
        einsum("ij,ij->i", A, B, reduction="max")
    with pytest.raises(ValueError, match="has shapes"):
        einsum("ij,ij->i", A, sparse(dense[0].T, CSR))
