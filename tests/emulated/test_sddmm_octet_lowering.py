"""sddmm_p on column vectors as it lowers for CUDA: alone, in derivatives, and as text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from vector_cases import encoded, vectors

from sgap_jax import OctetTile, Schedule, sddmm, spmm
from sgap_jax.schedules.emulated import Emulated

DEFAULT = Emulated(emulate)
KERNEL = "SddmmOctetKernel"


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def integers(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)  # exact sums


def operands(length, d, dtype, batch=(), name="every_length"):
    """An array of vectors with integers for values, NaN where it has padding, and X and Y."""
    arrays, case, _ = encoded(BATTERY[name], length)
    A = vectors(arrays, case, dtype)
    A = A.with_values(jnp.where(jnp.isnan(A.values), A.values, integers(A.values.shape, dtype)))
    return A, *(integers((*batch, rows, d), dtype, rows) for rows in A.shape)


def recorded(calls):
    def run(call, inputs, outputs):
        calls.append(call.kernel)
        return emulate(call, inputs, outputs)

    return Emulated(run)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("length", [4, 8, 16, 32])
def test_a_launch_gets_the_operands_that_its_kernel_takes(length, dtype):
    A, X, Y = operands(length, 12, dtype, batch=(2,))
    calls = []
    product = lambda A, X, Y: sddmm(A, X, Y, schedule=recorded(calls)).values
    both = jax.vmap(product, (None, 0, 0))(A, X, Y)
    shared = jax.vmap(product, (None, None, 0))(A, X[0], Y)
    turned = sddmm(A.T, Y[0], X[0], schedule=recorded(calls))
    assert calls == [KERNEL] * 3
    assert both.dtype == dtype and turned.format == A.T.format
    for b in range(2):
        np.testing.assert_array_equal(both[b], sddmm(A, X[b], Y[b]).values)
        np.testing.assert_array_equal(shared[b], sddmm(A, X[0], Y[b]).values)
    np.testing.assert_array_equal(turned.values, both[0])


@pytest.mark.parametrize("length", [2, 8])
def test_float32_is_rounded_to_tf32_where_that_is_allowed(length):
    A, X, Y = operands(length, 9, "float32")
    X = X + 8 + 2.0**-12  # the fraction is beyond tf32's 10 bits
    tile = OctetTile(length, tile_n=16, tf32=True)
    found = sddmm(A, X, Y, schedule=Emulated(emulate, tile)).values
    np.testing.assert_array_equal(found, sddmm(A, jnp.round(X), Y).values)
    exact = sddmm(A, X, Y, schedule=DEFAULT).values
    np.testing.assert_array_equal(exact, sddmm(A, X, Y).values)
    assert (found != exact).any()


@pytest.mark.parametrize("length", [4, 16])
def test_value_and_gradients_are_those_of_the_cpu(length):
    A, X, Y = operands(length, 8, "float16", name="padded")
    calls = []

    def loss(X, Y, scale, values, schedule):
        C = sddmm(A.with_values(values), X, Y, scale=scale, weighted=True, schedule=schedule)
        return jnp.sum(C.values**2)

    run = jax.value_and_grad(loss, (0, 1, 2, 3))
    arguments = X, Y, jnp.float16(0.125), A.values
    found, expected = (run(*arguments, s) for s in (recorded(calls), None))
    # The values and the gradient in the weights; the gradient in the scale has float32 sums.
    assert calls.count(KERNEL) == 2 and calls.count("SddmmSubwarpKernel") == 1
    assert jax.tree.all(jax.tree.map(lambda x: jnp.isfinite(x).all(), found))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_gradient_of_spmm_in_its_values_is_this_kernel():
    A, _, B = operands(8, 8, "bfloat16")
    calls = []

    def loss(values, B, schedule):
        C = spmm(A.with_values(values), B, schedule=schedule)
        return jnp.sum(C.astype(jnp.float32))

    values = jnp.where(jnp.isnan(A.values), jnp.bfloat16(0), A.values)
    found, expected = (
        jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(values, B, s)
        for s in (recorded(calls), None)
    )
    assert calls.count(KERNEL) == 1
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_second_derivatives_too():
    A, X, Y = operands(8, 4, "float16", name="padded")
    loss = lambda X, s: jnp.sum(sddmm(A, X, Y, schedule=s).values ** 3 / 1024)
    product = lambda s: jax.jvp(lambda X: jax.grad(loss)(X, s), (X,), (X,))
    found, expected = product(DEFAULT), product(None)
    assert np.isfinite(found[1]).all() and np.asarray(found[1]).any()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_programs_for_a_gpu_hold_the_launch_and_nothing_on_entries(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A, X, Y = operands(8, 16, "bfloat16")

    def text(schedule=None):
        function = lambda X, Y: sddmm(A, X, Y, schedule=schedule).values
        return jax.jit(function).trace(X, Y).lower(lowering_platforms=("cuda",)).as_text()

    for program in (text(), text(OctetTile(8, tile_n=16))):
        assert program.count("custom_call @sgap_launch_v1") == program.count("custom_call") == 1
        assert KERNEL in program and "gather" not in program and "scatter" not in program
    expanded = text(Schedule.parse("{<4 nnz, 4 col>, 4}"))  # points work on entries, not on vectors
    assert "SddmmNnzKernel" in expanded and KERNEL not in expanded
    with pytest.raises(NotImplementedError, match="no kernel on the CPU obeys OctetTile"):
        sddmm(A, X, Y, schedule=OctetTile(8))
