"""Conversions inside transformations: the structure is known, the values are traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from differentiable_ops import close, normal

from sgap_jax import BCSR, COO, CSC, CSF, CSR, CVS, SparseArray, einsum, spmm

BLOCKS = [CVS(2), CVS(4).transposed, BCSR(2, 3), BCSR(3, 2), BCSR(2, 3).transposed]
MATRICES = [CSR, CSC, COO, COO.transposed, CSF(2), CSF(2).transposed, *BLOCKS]
COO_3 = SparseArray.from_dense(np.zeros((1, 1, 1)), format=COO).format
TENSORS = [CSF(3), CSF(3, order=(2, 0, 1)), COO_3, COO_3.transposed]
PADDED = array(BATTERY["padded"], jnp.float64)


def tensor(format):
    x = np.where(np.random.default_rng(5).random((5, 4, 6)) < 0.3, normal(5, 4, 6), 0)
    return SparseArray.from_dense(x, format=format)


CASES = [
    *((lambda f=f: array(BATTERY["empty_rows_at_both_ends"], jnp.float64, f)) for f in MATRICES),
    *((lambda f=f: tensor(f)) for f in TENSORS),
    lambda: PADDED,
    lambda: array(BATTERY["no_entries"], jnp.float64),
    lambda: einsum("ijk,kr->ijr", tensor(CSF(3)), normal(6, 3), fibers=True),
]
NAMES = [*map(str, MATRICES), *map(str, TENSORS), "padded", "no entries", "fibers"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_pair_of_formats_with_traced_values(case):
    A = case()
    targets = MATRICES if A.ndim == 2 else TENSORS
    convert = lambda v: [A.with_values(v).asformat(f) for f in targets]
    of_values = lambda v: [C.values for C in convert(v)]
    expected = [A.asformat(f) for f in targets]
    for program in (convert, jax.jit(convert)):
        for C, want in zip(program(A.values), expected, strict=True):
            assert C.format == want.format
            jax.tree.map(np.testing.assert_array_equal, C, want)
            C.checked()

    many = jnp.stack([A.values, 2 * A.values, -A.values])
    for C, want in zip(jax.jit(jax.vmap(of_values))(many), expected, strict=True):
        np.testing.assert_array_equal(C, jnp.stack([want.values, 2 * want.values, -want.values]))

    where, weights = A.coordinates(), normal(*A.shape)
    dense = lambda v: jnp.zeros(A.shape).at[where].add(v.reshape(-1), mode="drop")
    loss = lambda x: jnp.sum(jnp.sin(x) * weights)
    total = lambda v: sum(loss(C.todense()) for C in convert(v))
    twin = lambda v: len(targets) * loss(dense(v))
    close(jax.jit(jax.grad(total))(A.values), jax.grad(twin)(A.values))
    tangents = (A.values,), (jnp.cos(A.values),)
    if A is not PADDED:  # its padding is NaN
        close(jax.jvp(total, *tangents)[1], jax.jvp(twin, *tangents)[1])


def test_a_chain_of_conversions_stays_concrete_under_jit():
    A = array(BATTERY["skewed"], jnp.float64)
    B = normal(A.shape[1], 3)

    def f(v):
        for format in (COO, CSF(2), CVS(4), BCSR(4, 2), CVS(4), CSC, CSF(2)):
            C = A.asformat(format).with_values(A.with_values(v).asformat(format).values)
        return spmm(C.asformat(CSR), B)

    close(jax.jit(f)(A.values), spmm(A, B))

    @jax.jit
    def made_inside(v):
        C = SparseArray.from_arrays(v, A.row_offsets, np.asarray(A.column_indices), shape=A.shape)
        for format in (COO, CSF(2), CVS(4), BCSR(4, 2), CSC):
            C = C.asformat(format)
        return C.todense()

    np.testing.assert_array_equal(made_inside(A.values), A.todense())
    # Also where the array as a whole is captured.
    np.testing.assert_array_equal(
        jax.jit(lambda: A.asformat(COO).asformat(CVS(4)).values)(), A.asformat(CVS(4)).values
    )


def test_a_value_that_is_not_finite_stays_where_it_is():
    A = SparseArray.from_dense(np.array([[1.0, 0], [0, 2], [3, 0]]))
    for bad in (jnp.nan, jnp.inf):
        v = A.values.at[-1].set(bad)  # fill-in zeros must not become NaN
        got = jax.jit(lambda v: A.with_values(v).asformat(CVS(2)).values)(v)
        np.testing.assert_array_equal(got, A.with_values(v).asformat(CVS(2)).values)
        assert int(jnp.isfinite(got).sum()) == got.size - 1


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float16, np.complex64])
def test_the_fill_of_vectors_is_of_the_dtype_of_the_values(dtype):
    A = SparseArray.from_dense(np.array([[1, 0], [0, 1], [1, 0]], dtype))
    for format in (CVS(2), BCSR(2, 2)):
        want = A.asformat(format).values
        got = jax.jit(lambda v, f=format: A.with_values(v).asformat(f).values)(A.values)
        assert got.dtype == want.dtype == dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", [CSF(2), CVS(2), BCSR(2, 2)], ids=str)
def test_a_traced_structure_is_refused_and_says_why(format):
    for A in (PADDED, PADDED.asformat(COO), PADDED.asformat(CVS(3))):
        with pytest.raises(ValueError, match=r"asformat.*traced structure.*outside jit"):
            jax.jit(lambda A: A.asformat(format))(A)


@pytest.mark.tier("all")
def test_under_shard_map_and_of_explicit_sharding():
    A = array(BATTERY["tall"], jnp.float64)
    targets = [COO, CSC, CSF(2), CVS(4), BCSR(2, 3)]
    of_values = lambda v: [A.with_values(v).asformat(f).todense() for f in targets]
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
        both = jax.device_put(jnp.stack([A.values, -A.values]), jax.NamedSharding(mesh, jax.P("x")))
        one = lambda v: jax.tree.map(lambda x: x[None], of_values(v[0]))
        sharded = jax.shard_map(one, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
        for got in jax.jit(sharded)(both):
            np.testing.assert_array_equal(got, jnp.stack([A.todense(), -A.todense()]))
        with jax.set_mesh(mesh):
            placed = jax.device_put(A.values, jax.NamedSharding(mesh, jax.P("x")))
            for got in jax.jit(of_values)(placed):
                np.testing.assert_array_equal(got, A.todense())
            # An array that is replicated on a mesh, as a parameter of a model may be.
            whole = jax.device_put(A, jax.NamedSharding(mesh, jax.P()))
            for f in targets:
                np.testing.assert_array_equal(whole.asformat(f).todense(), A.todense())
                of_whole = lambda v, A=whole, f=f: A.with_values(v).asformat(f).todense()
                np.testing.assert_array_equal(jax.jit(of_whole)(placed), A.todense())


def test_values_that_are_shared_stay_where_they_lie():
    A = SparseArray.from_coordinates([(0, 1), (1, 1), (2, 0), (2, 3)], np.ones(4), (4, 4))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(A.values, jax.P("x"))
        for f in (COO, CSF(2)):
            assert jax.typeof(A.with_values(placed).asformat(f).values) == jax.typeof(placed)
