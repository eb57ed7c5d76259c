"""Bad input of matrices in parts: the type of the error, and that it says what to write."""

import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.sharding import AxisType

import sgap_jax
from sgap_jax import SparseArray, aggregate, parallel, spmm
from sgap_jax.primitives._define import OPS_IN_PARTS


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture(scope="module")
def A():
    return SparseArray.from_dense(np.eye(6))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(axis="y"), r"axis: expected one of \['x'\], got 'y'"),
        (dict(second="y"), r"second: expected one of \[\] or None, got 'y'"),
        (dict(second=1), r"second: expected one of \[\] or None, got 1"),
        (dict(second="x"), "'x' has the parts already; expected another axis"),
        (dict(rows="odd"), "rows: expected 'balanced', 'even' or 2 numbers of rows"),
        (dict(rows=[1, 2, 3]), "2 numbers of rows"),
        (dict(rows=[1.0, 5.0]), "2 numbers of rows"),
        (dict(rows=[3, 4]), "expected 6 in all"),
        (dict(rows=[7, -1]), "expected 6 in all"),
        (dict(order="random"), "expected 'given', 'metis' or a function"),
        (dict(order=None), "expected 'given', 'metis' or a function, got None"),
        (dict(order="metis", rows="even"), "balances the parts by itself"),
        (dict(order=lambda A: [0, 1, 2, 3, 4, 4]), "a permutation of 0 .. 5"),
    ],
)
def test_partition(A, mesh, options, message):
    options = dict(axis="x") | options
    with pytest.raises(ValueError, match=message):
        parallel.partition(A, mesh, options.pop("axis"), **options)


def test_what_is_no_array_no_mesh_and_no_concrete_matrix(A, mesh):
    with pytest.raises(TypeError, match="A must be a SparseArray"):
        parallel.partition(np.eye(6), mesh, "x")
    with pytest.raises(TypeError, match="mesh must be"):
        parallel.partition(A, "x", "x")
    with pytest.raises(TypeError, match=r"expected a mapping .* got a list"):
        parallel.from_parts([A, A], mesh, "x")
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda v: parallel.partition(A.with_values(v), mesh, "x").values)(A.values)


def test_products(A, mesh):
    P = parallel.partition(A, mesh, "x")
    with pytest.raises(TypeError, match="sgap_jax.parallel.spmm takes it"):
        spmm(P, jnp.ones((6, 2)))
    with pytest.raises(TypeError, match="sgap_jax.parallel has gsddmm, gspmm, row_max"):
        aggregate(P, jnp.ones((6, 2)))
    both = {n for n, x in vars(parallel).items() if callable(x)} & set(vars(sgap_jax))
    assert both - {"read"} == set(OPS_IN_PARTS)  # `read` is of files
    with pytest.raises(TypeError, match="parallel.partition spreads it"):
        parallel.spmm(A, jnp.ones((6, 2)))
    with pytest.raises(ValueError, match=r"expected \[6, n\] or in parts .* got \[5, 2\]"):
        P @ jnp.ones((5, 2))
    with pytest.raises(ValueError, match=r"expected \[2, 3, n\], as to_parts .* got \[2, 4, 2\]"):
        P @ jnp.ones((2, 4, 2))
    with pytest.raises(ValueError, match="of own columns"):
        P.with_values((jnp.ones(3), P.values[1]))
    with pytest.raises(NotImplementedError, match=r"in_order: .*partition\(A.T, mesh, axis\)"):
        parallel.spmm(P, jnp.ones((6, 2)), transpose=True, in_order=True)
    with pytest.raises(ValueError, match=r"no second axis; .* second=...\) names one"):
        P.choose(2)
    with pytest.raises(ValueError, match="of foreign columns"):
        P.with_values((P.values[0], jnp.ones(3)))


OPERATIONS = {
    "spmm": lambda A: parallel.spmm(A, jnp.ones((6, 2))),
    "sddmm": lambda A: parallel.sddmm(A, jnp.ones((6, 2)), jnp.ones((6, 2))),
    "gsddmm": lambda A: parallel.gsddmm(A, jnp.ones(6), jnp.ones(6)),
    "gspmm": lambda A: parallel.gspmm(A, jnp.ones((6, 2))),
    "sparse_softmax": parallel.sparse_softmax,
    "row_sum": parallel.row_sum,
    "row_max": parallel.row_max,
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_whole_matrix_goes_to_the_operation_of_one_device(A, op):
    with pytest.raises(TypeError, match=f"parallel.{op}: A must be .* sgap_jax.{op} takes"):
        OPERATIONS[op](A)


def test_what_matrices_have_elsewhere(A, mesh):
    P = parallel.partition(A, mesh, "x")
    with pytest.raises(AttributeError, match=r"\.T: the nearest is parallel.spmm\(A, X, transpose"):
        P.T @ jnp.ones((6, 2))
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        P.other  # noqa: B018
    changed = P.with_values(jax.tree.map(jnp.array, P.values))
    assert {P: 1, changed: 2}[P] == 1 and P in [changed, P] and P != changed
    for made in (np.asarray, jnp.asarray):
        with pytest.raises(TypeError, match="is no dense array: .* sgap_jax.parallel has gsddmm"):
            made(P)
    with pytest.raises(TypeError, match=r"A \* x: expected a scalar, got \[6, 1\]; A.with_values"):
        np.ones((6, 1)) * P
    with pytest.raises(ValueError, match=r"expected \[r, 6\] or \[6\], got \[2, 3, 2\]"):
        jnp.ones((2, 3, 2)) @ P
    for wrong, got in ((A, "SparseArray"), (1, "int"), (parallel.partition(A, mesh, "x"), "other")):
        with pytest.raises(TypeError, match=f"A - B: .* got {got}.*; of other structures, paral"):
            P - wrong
    function, (fields, specs) = P.__reduce__()
    numbers, *names = fields["mesh"]
    with pytest.raises(
        ValueError, match=r"pickled on devices \[90, 91\], of which .* are not here"
    ):
        function({**fields, "mesh": (numbers + 90, *names)}, specs)
    with pytest.raises(TypeError, match="only arrays with a value"):
        jax.eval_shape(pickle.dumps, P)
    with pytest.raises(ValueError, match="values of own and of foreign entries, as A.values, got"):
        P.with_values(A.values)
    with pytest.raises(TypeError, match="must be dense, got a csr_array"):
        P @ scipy.sparse.csr_array(np.eye(6))
    with pytest.raises(TypeError, match="got csr_array; SparseArray.from_scipy"):
        parallel.partition(scipy.sparse.csr_array(np.eye(6)), mesh, "x")


def test_other_operations(A, mesh):
    P, ones = parallel.partition(A, mesh, "x"), jnp.ones((6, 2))
    with pytest.raises(ValueError, match=r"sddmm: X: expected \[6, n\] or in parts \[2, 3, n\]"):
        parallel.sddmm(P, ones[:5], ones)
    with pytest.raises(ValueError, match="same features, got 2 and 1"):
        parallel.sddmm(P, ones, ones[:, :1])
    with pytest.raises(TypeError, match="weighted must be a bool"):
        parallel.sddmm(P, ones, ones, weighted=1.5)
    with pytest.raises(ValueError, match="reduce must be one of"):
        parallel.gspmm(P, ones, reduce="prod")
    with pytest.raises(ValueError, match="op must be one of"):
        parallel.gsddmm(P, ones, ones, op="pow")
    with pytest.raises(ValueError, match="scale must be a real scalar"):
        parallel.sparse_softmax(P, scale=jnp.ones(2))
    with pytest.raises(TypeError, match="schedule must be"):
        parallel.row_sum(P, schedule=3)
    with pytest.raises(ValueError, match=r"from_parts: expected \[2, 3, ...\], got \[3, 2\]"):
        P.from_parts(jnp.ones((3, 2)))


def test_attention(A, mesh):
    P, q = parallel.partition(A, mesh, "x"), jnp.ones((6, 2, 4))
    with pytest.raises(TypeError, match="pattern must be a PartitionedArray, got SparseArray"):
        parallel.sparse_attention(q, q, q, A)
    with pytest.raises(ValueError, match=r"pattern must have shape \[5, 6\], got \[6, 6\]"):
        parallel.sparse_attention(q[:5], q, q, P)
    with pytest.raises(ValueError, match="bias: expected values of own and of foreign entries"):
        parallel.sparse_attention(q, q, q, P, bias=jnp.ones(6))
    with pytest.raises(ValueError, match=r"bias of own entries must be floats of shape \[2, 3\]"):
        parallel.sparse_attention(q, q, q, P, bias=(jnp.ones((3, 2, 3)), P.values[1]))
    with pytest.raises(ValueError, match="bias of foreign entries"):
        parallel.sparse_attention(q, q, q, P, bias=(P.values[0], jnp.ones((2, 2))))
    with pytest.raises(ValueError, match=r"sinks must be floats of shape \[2\]"):
        parallel.sparse_attention(q, q, q, P, sinks=jnp.ones(3))
    with pytest.raises(ValueError, match=r"batch_axis: expected another axis, of \[\], got 'x'"):
        parallel.sparse_attention(q, q, q, P, batch_axis="x")
    two = jax.make_mesh((1, 2), ("x", "h"), axis_types=(AxisType.Auto,) * 2)
    whole = parallel.partition(A, two, "x")
    with pytest.raises(ValueError, match="heads_axis: 2 devices along 'h' do not divide 2 and 1"):
        parallel.sparse_attention(q, q[:, :1], q[:, :1], whole, heads_axis="h")


def test_arrays_of_another_mesh_and_matrices_as_operands(A, mesh):
    """Two devices, and one of them; each error says what to write."""
    P = parallel.partition(A, mesh, "x")
    one = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    other = parallel.partition(A, one, "x")
    X = other @ other.to_parts(jnp.ones((6, 2)))
    words = r"B is on the devices of a mesh {'x': 1}, .* of a mesh {'x': 2}; jax.device_put"
    with pytest.raises(ValueError, match=words):
        P @ X
    with pytest.raises(ValueError, match="X is on the devices of"):
        parallel.sddmm(P, X[0], jnp.ones((6, 2)))
    q = jax.device_put(jnp.ones((6, 2, 4)), jax.NamedSharding(one, jax.P()))
    with pytest.raises(ValueError, match="sparse_attention: k is on the devices of"):
        parallel.sparse_attention(jnp.ones((6, 2, 4)), q, q, P)
    with pytest.raises(ValueError, match="a value is on the devices of"):
        P.with_values(other.values)
    explicit = jax.make_mesh((2, 1), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="expected that of its own mesh"):
        parallel.row_sum(P)
    with jax.set_mesh(explicit):
        B = jax.sharding.reshard(jnp.ones((6, 2)), jax.P("x"))
        with pytest.raises(ValueError, match="parallel.spmm: B is on the devices of a mesh"):
            jax.jit(lambda B: P @ B)(B)
    for wrong in (A, P):
        with pytest.raises(TypeError, match="B must be dense, got a (SparseA|PartitionedA)rray"):
            P @ wrong
    with pytest.raises(TypeError, match="got PartitionedArray; sgap_jax.parallel.spmm takes it"):
        spmm(P, jnp.ones((6, 2)))


def test_parts_that_do_not_fit(mesh):
    half = scipy.sparse.csr_array(np.ones((3, 6)))
    with pytest.raises(ValueError, match="from_parts: parts: expected one for each of .0, 1."):
        parallel.from_parts({0: half}, mesh, "x")
    with pytest.raises(ValueError, match=r"parts have \[5, 6\] columns"):
        parallel.from_parts({0: half, 1: half[:, :5]}, mesh, "x")
    with pytest.raises(TypeError, match="part 0 must be a SparseArray or a SciPy"):
        parallel.from_parts(lambda p: np.ones((3, 6)), mesh, "x")
    with pytest.raises(ValueError, match=r"axis: expected one of \['x'\]"):
        parallel.from_parts({}, mesh, "y")
    corrupt = half.copy()
    corrupt.indices[4] = 1 << 30
    with pytest.raises(ValueError, match="ind"):
        parallel.from_parts({0: half, 1: corrupt}, mesh, "x")


def test_metis_of_a_rectangle_and_without_pymetis(A, mesh, monkeypatch):
    with pytest.raises(ValueError, match=r"'metis' cuts a square matrix, got \[5, 6\]"):
        parallel.partition(A[:5], mesh, "x", order="metis")
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match=r"pip install 'sgap_jax\[metis\]'"):
        parallel.partition(A, mesh, "x", order="metis")


def test_files(mesh, tmp_path):
    (tmp_path / "a.smtx").write_text("1, 1, 0\n0 0\n\n")
    with pytest.raises(NotImplementedError, match="parallel.read: no rows of .smtx files"):
        parallel.read(tmp_path / "a.smtx", mesh, "x")
    with pytest.raises(FileNotFoundError):
        parallel.read(tmp_path / "none.mtx", mesh, "x")
    with pytest.raises(ValueError, match="parallel.read: axis: expected one of"):
        parallel.read(tmp_path / "a.mtx", mesh, "y")
