"""Each operation against automatic differentiation of its dense twin, and finite differences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, from_row_lengths
from differentiable_ops import CASES, close, function_of, normal, scalar
from jax.test_util import check_grads

from sgap_jax import row_max, sparse_softmax, spmm


@pytest.fixture(params=CASES)
def op(request):
    return function_of(request.param)


def argnums(operands):
    return tuple(range(len(operands)))


@pytest.mark.seconds(check=2, test=6, all=50)
def test_finite_differences_to_order_2(op):
    function, _, operands = op
    check_grads(jax.jit(function), operands, order=2, modes=["fwd", "rev"], eps=1e-5)


@pytest.mark.seconds(check=12, test=60)
def test_value_and_gradient(op):
    function, twin, operands = op
    every = argnums(operands)
    gradient = lambda f: jax.grad(scalar(f), every)
    expected = jax.jit(lambda *x: (twin(*x), gradient(twin)(*x)))(*operands)
    close((function(*operands), gradient(function)(*operands)), expected)  # step by step
    saved = jax.grad(jax.checkpoint(scalar(function)), every)
    found = jax.jit(lambda *x: (function(*x), gradient(function)(*x), saved(*x)))(*operands)
    close(found, (*expected, expected[1]))


MODES = {"forward": jax.jacfwd, "reverse": jax.jacrev}


@pytest.mark.seconds(check=4, test=50, all=80)  # one program: most of the time is XLA's
def test_second_order_mixed(op):
    function, twin, operands = op
    every = argnums(operands)
    second = lambda f, outer, inner: MODES[outer](MODES[inner](scalar(f), every), every)

    @jax.jit
    def run(*x):
        found = {pair: second(function, *pair)(*x) for pair in itertools.product(MODES, MODES)}
        return found, second(twin, "forward", "reverse")(*x)

    found, expected = run(*operands)
    for (outer, inner), derivatives in found.items():
        print(f"{outer} over {inner}")
        close(derivatives, expected)


@pytest.mark.seconds(check=2, test=6)
def test_jvp_and_linearize(op):
    function, twin, operands = op
    tangents = tuple(normal(*x.shape, seed=9) for x in operands)
    expected = jax.jit(lambda *t: jax.jvp(twin, operands, t))(*tangents)
    close(jax.jvp(function, operands, tangents), expected)
    out, linear = jax.linearize(function, *operands)
    close((out, linear(*tangents)), expected)
    close(jax.jit(lambda *t: jax.jvp(function, operands, t))(*tangents), expected)


def test_one_operand_at_a_time(op):
    function, twin, operands = op
    for i in argnums(operands):
        expected = jax.jit(jax.grad(scalar(twin), i))(*operands)
        close(jax.grad(scalar(function), i)(*operands), expected)


def test_scan(op):
    function, twin, operands = op

    def loop(f):
        def step(carry, c):
            return carry + jnp.sum(jnp.cos(c * f(*operands_of(carry)))), None

        def operands_of(carry):
            return [x * (1 + 0.01 * carry) for x in operands]

        return lambda x: jax.lax.scan(step, x, jnp.arange(3.0))[0]

    x = jnp.asarray(0.3)
    close(jax.jit(jax.grad(loop(function)))(x), jax.grad(loop(twin))(x))


def test_row_max_shares_the_gradient_among_ties(backend):
    from conftest import row_schedule

    case = from_row_lengths("ties", 4, [4, 0, 2])
    A = array(case, jnp.float64)
    v = jnp.asarray([1.0, 3.0, 3.0, 2.0, 5.0, 5.0])
    f = lambda v: row_max(A.with_values(v), schedule=row_schedule(backend))[jnp.array([0, 2])].sum()
    np.testing.assert_array_equal(jax.grad(f)(v), [0, 0.5, 0.5, 0, 0.5, 0.5])


def test_row_max_counts_more_ties_than_a_float16_can():
    ties = 70_000
    A = array(from_row_lengths("many_ties", ties, [ties]), jnp.float16)
    v = jnp.ones(ties, jnp.float16)
    slope = jax.grad(lambda v: row_max(A.with_values(v)).sum())(v)
    np.testing.assert_allclose(np.asarray(slope, np.float32), 1 / ties, rtol=0.01)


def test_row_max_of_nan_differentiates_as_jnp_max(backend):
    from conftest import row_schedule

    A = array(from_row_lengths("nan", 4, [3, 0, 2]), jnp.float64)
    v = jnp.asarray([1.0, jnp.nan, 3.0, 2.0, 5.0])
    f = lambda v: row_max(A.with_values(v), schedule=row_schedule(backend))[jnp.array([0, 2])]
    twin = lambda v: jnp.stack([v[:3].max(), v[3:].max()])
    for derivative in (jax.jacfwd, jax.jacrev):
        mine = derivative(f)(v)
        assert np.isnan(mine[0, :3]).all() and np.isnan(derivative(twin)(v)[0, :3]).all()
        np.testing.assert_array_equal(mine[1, 3:], [0, 1])


def test_masked_rows_have_zero_gradients(backend):
    from conftest import row_schedule

    case = from_row_lengths("masked", 3, [2, 0, 3])
    A = array(case, jnp.float64)
    v = jnp.asarray([-jnp.inf, -jnp.inf, 0.1, -jnp.inf, 0.4])
    f = lambda v: jnp.sum(
        jnp.sin(sparse_softmax(A.with_values(v), schedule=row_schedule(backend)).values)
    )
    g = jax.grad(f)(v)
    assert np.isfinite(g).all() and not g[:2].any() and g[3] == 0 and g[2] != 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_keep_the_dtype(dtype):
    A = array(BATTERY["skewed"], dtype)
    B = jnp.ones((A.shape[1], 3), dtype)
    dv, dB = jax.grad(lambda v, B: spmm(A.with_values(v), B).sum(), (0, 1))(A.values, B)
    assert dv.dtype == dB.dtype == dtype
    rows = np.bincount(BATTERY["skewed"].column_indices, minlength=A.shape[1])
    assert (
        dB.shape == B.shape
        and np.isfinite(dB.astype(jnp.float32)).all()
        and len(rows) == B.shape[0]
    )


@pytest.mark.parametrize("name", ["padded", "only_padding", "no_rows", "no_columns", "no_entries"])
def test_degenerate_structures(name, backend):
    A = array(BATTERY[name], jnp.float64)
    f = lambda v, B: jnp.sum(jnp.sin(spmm(A.with_values(v), B, schedule=backend)))
    v = jnp.where(jnp.isnan(A.values), 1.0, A.values)
    B = normal(A.shape[1], 3)
    dv, dB = jax.grad(f, (0, 1))(v, B)
    case = BATTERY[name]
    twin = jnp.zeros(A.shape).at[case.rows, case.column_indices[: case.stored]]
    g = lambda v, B: jnp.sum(jnp.sin(twin.set(v[: case.stored]) @ B))
    close((dv, dB), jax.grad(g, (0, 1))(v, B))


def test_gradient_with_respect_to_the_array_itself():
    A = array(BATTERY["skewed"], jnp.float64)
    B = normal(A.shape[1], 3)
    grads = jax.grad(lambda A: spmm(A, B).sum(), allow_int=True)(A)
    close(grads.values, jax.grad(lambda v: spmm(A.with_values(v), B).sum())(A.values))
    assert grads.row_offsets.dtype == jax.dtypes.float0
