"""Special cases of the derivatives of messages: ties, NaN, padding, and every op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, from_row_lengths
from conftest import row_schedule
from differentiable_ops import close, normal, scalar
from gspmm_oracle import PAIRS, away_from_zero
from jax.test_util import check_grads

from sgap_jax import gsddmm, gspmm
from sgap_jax.primitives import gspmm_arg_gather
from sgap_jax.primitives.gspmm import OPS

CASE = BATTERY["skewed"]


def by_gather(case, op, reduce, transpose):
    """gspmm in plain JAX: gather, combine, segment_*."""
    rows, columns = jnp.asarray(case.rows), jnp.asarray(case.column_indices[: case.stored])
    to, source = (columns, rows) if transpose else (rows, columns)
    m = case.shape[1 if transpose else 0]
    lengths = jnp.zeros(m).at[to].add(1)[:, None]

    def f(v, X):
        x, a = X[source], jnp.broadcast_to(v[: case.stored, None], (case.stored, X.shape[1]))
        messages = {"mul": x * a, "add": x + a, "sub": x - a, "div": x / a, "copy": x}[op]
        if reduce in ("sum", "mean"):
            total = jax.ops.segment_sum(messages, to, m)
            return total / jnp.maximum(lengths, 1) if reduce == "mean" else total
        segment = jax.ops.segment_max if reduce == "max" else jax.ops.segment_min
        return jnp.where(lengths > 0, segment(messages, to, m), 0)

    return f


@pytest.mark.parametrize("transpose", [False, True], ids=["A", "AT"])
@pytest.mark.parametrize(("op", "reduce"), PAIRS)
def test_gradients_of_every_op_and_reduction(op, reduce, transpose):
    v = jnp.asarray(away_from_zero(CASE.values))
    A, X = array(CASE, "float64"), normal(CASE.shape[0 if transpose else 1], 9)
    f = lambda v, X: gspmm(A.with_values(v), X, op=op, reduce=reduce, transpose=transpose)
    twin = by_gather(CASE, op, reduce, transpose)
    expected = jax.jit(jax.grad(scalar(twin), (0, 1)))(v, X)
    close(jax.jit(jax.grad(scalar(f), (0, 1)))(v, X), expected)


@pytest.mark.parametrize("transpose", [False, True], ids=["A", "AT"])
def test_second_order_in_reverse_over_reverse(transpose):
    v, X = jnp.asarray(CASE.values), normal(CASE.shape[0 if transpose else 1], 2)
    A = array(CASE, "float64")
    f = lambda v, X: gspmm(A.with_values(v), X, reduce="max", transpose=transpose)
    twin = by_gather(CASE, "mul", "max", transpose)
    second = lambda g: jax.jit(jax.jacrev(jax.grad(scalar(g), 1)))(v, X)
    close(second(f), second(twin))


def test_vmap_of_the_derivative_along_each_operand():
    v, X = jnp.asarray(CASE.values), normal(CASE.shape[1], 3)
    A = array(CASE, "float64")
    f = lambda v, X: gspmm(A.with_values(v), X, reduce="max")
    twin = by_gather(CASE, "mul", "max", False)
    xs = jnp.stack([X, 2 - X, -X])  # other entries attain the maximum in each
    slope = lambda g: jax.jit(jax.vmap(lambda X: jax.jvp(g, (v, X), (v, X))[1]))(xs)
    close(slope(f), slope(twin))


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_gsddmm(op):
    case = BATTERY["every_length"]
    A = array(case, "float64")
    X, Y = (
        normal(case.shape[0], 3),
        jnp.asarray(away_from_zero(np.asarray(normal(case.shape[1], 3)))),
    )
    function = jax.jit(lambda X, Y: gsddmm(A, X, Y, op=op).values)
    check_grads(function, (X, Y), order=2, eps=1e-5)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_gradient_goes_to_the_first_that_attains_the_extremum(reduce, backend):
    A = array(from_row_lengths("ties", 4, [4, 0, 2]), "float64")
    sign = 1 if reduce == "max" else -1
    v = sign * jnp.asarray([1.0, 3.0, 3.0, 2.0, 5.0, 5.0])
    X = jnp.ones((4, 2)) * jnp.asarray([[1.0, 2.0]])
    f = lambda v: gspmm(A.with_values(v), X, reduce=reduce, schedule=row_schedule(backend)).sum()
    np.testing.assert_array_equal(jax.grad(f)(v), [0, 3, 0, 0, 3, 0])


def test_ties_across_the_pieces_of_a_long_row():
    from sgap_jax import CpuTile

    A = array(BATTERY["one_heavy_row"], "float64")
    f = lambda v: gspmm(
        A.with_values(v), jnp.ones((700, 3)), reduce="max", schedule=CpuTile(nonzeros=64)
    )
    gradient = jax.grad(lambda v: f(v).sum())(jnp.ones(A.nnz))
    first = BATTERY["one_heavy_row"].row_offsets[:-1]
    expected = np.zeros(A.nnz)
    expected[first[np.diff(BATTERY["one_heavy_row"].row_offsets) > 0]] = 3
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("op", ["mul", "add"])
def test_an_entry_that_does_not_attain_does_not_touch_nan(op, backend):
    A = array(from_row_lengths("two rows", 3, [3, 3]), "float64")
    v = jnp.asarray([1.0, jnp.nan, 2.0, 1.0, 2.0, 4.0])
    X = jnp.ones((3, 2))
    f = lambda v, X: gspmm(A.with_values(v), X, op=op, reduce="max", schedule=row_schedule(backend))
    dv = jax.grad(lambda v: f(v, X)[0].sum())(v)
    assert dv[0] == dv[2] == 0 and not dv[3:].any() and np.isfinite(dv[1])
    dX = jax.grad(lambda X: f(v, X)[1].sum())(X)
    # The NaN of column 1 attains the extremum of row 0, and NaN times a cotangent of zero is NaN.
    np.testing.assert_array_equal(
        dX[jnp.array([0, 2])], [[0, 0], [4, 4] if op == "mul" else [1, 1]]
    )


@pytest.mark.parametrize("name", ["padded", "only_padding", "no_rows", "no_columns", "no_entries"])
@pytest.mark.parametrize(("op", "reduce"), [("mul", "max"), ("div", "min"), ("div", "mean")])
def test_degenerate_structures_and_nan_in_the_padding(op, reduce, name, backend):
    case = BATTERY[name]
    A, schedule = array(case, "float64"), row_schedule(backend)
    for transpose in (False, True):
        X = normal(case.shape[0 if transpose else 1], 3)
        f = lambda v, X, t=transpose: gspmm(
            A.with_values(v), X, op=op, reduce=reduce, transpose=t, schedule=schedule
        )
        dv, dX = jax.grad(scalar(f), (0, 1))(A.values, X)
        assert not dv[case.stored :].any()
        expected = jax.jit(jax.grad(scalar(by_gather(case, op, reduce, transpose)), (0, 1)))(
            A.values, X
        )
        if case.stored:
            close((dv[: case.stored], dX), (expected[0][: case.stored], expected[1]))
        else:
            assert not np.any(dX)
        tangent = jax.jvp(f, (A.values, X), (jnp.ones_like(A.values), jnp.ones_like(X)))[1]
        assert np.isfinite(tangent).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_keep_the_dtype(dtype):
    A, X = array(CASE, dtype), jnp.ones((CASE.shape[1], 3), dtype)
    for op, reduce in (("mul", "max"), ("div", "min"), ("add", "mean")):
        f = lambda v, X: gspmm(A.with_values(v), X, op=op, reduce=reduce).sum()  # noqa: B023
        dv, dX = jax.jit(jax.grad(f, (0, 1)))(A.values, X)
        assert dv.dtype == dX.dtype == dtype
        assert dv.shape == A.values.shape and dX.shape == X.shape


@pytest.mark.tier("all")
def test_third_order_of_an_extremum(backend):
    case = BATTERY["empty_rows_at_both_ends"]
    A = array(case, "float64")
    f = lambda v, X: gspmm(A.with_values(v), X, reduce="max", schedule=row_schedule(backend))
    # Not compiled as a whole: the third derivatives are large programs, the steps are small ones.
    check_grads(f, (A.values, normal(case.shape[1], 2)), order=3, modes=["fwd", "rev"], eps=1e-5)


def test_programs_of_earlier_versions_find_the_arg_extremum_gathers_by_another_name(monkeypatch):
    A, B = array(BATTERY["skewed"], jnp.float32), normal(BATTERY["skewed"].shape[1], 5)

    def loss(v, B):
        return jnp.sum(jnp.sin(gspmm(A.with_values(v), B.astype(v.dtype), reduce="max")))

    def along(v, B):
        return jax.jvp(jax.grad(loss, (0, 1)), (v, B), (v, B))

    now = jax.jit(along)(A.values, B)
    lowering, names = gspmm_arg_gather.ffi_lowering, set()

    def renamed(target, *operands, **attributes):
        names.add(target.replace("arg_gather", "pick"))
        return lowering(target.replace("arg_gather", "pick"), *operands, **attributes)

    monkeypatch.setattr(gspmm_arg_gather, "ffi_lowering", renamed)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda v, B: along(v, B))(A.values, B), now)
    assert len(names) == 3
