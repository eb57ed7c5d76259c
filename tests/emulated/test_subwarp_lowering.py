"""Column vectors on CUDA cores in JAX programs: for "cuda" as text and emulated, with
derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from vector_cases import encoded, vectors

from sgap_jax import CSR, CVS, Reference, Schedule, ScheduleError, SubwarpTile, sddmm, spmm, spmv
from sgap_jax.schedules.emulated import Emulated

CASE = BATTERY["every_length"]  # 34 x 33: block rows of 8 are cut off by the last rows
TILE = SubwarpTile(8, split=2)


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def integers(rng, shape, dtype):
    return jnp.asarray(rng.integers(-3, 4, shape), dtype)  # every sum is exact


def operand(length, dtype):
    arrays, case, _ = encoded(CASE, length)
    A = vectors(arrays, case, dtype)
    return A.with_values(integers(np.random.default_rng(1), A.values.shape, dtype))


def loss(function):
    return lambda *x: jnp.sum(jnp.sin(function(*x)))


def operations(A, schedule):
    """Functions of differentiable operands, and the operands."""
    rng, (m, k) = np.random.default_rng(2), A.shape
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), A.dtype)
    values = draw(*A.values.shape)
    of = A.with_values
    yield (lambda v, B: spmm(of(v), B, schedule=schedule)), (values, draw(k, 4))
    yield (
        lambda v, B: spmm(of(v), B, transpose=True, schedule=schedule),
        (values, draw(m, 4)),
    )
    yield (lambda X, Y: sddmm(A, X, Y, schedule=schedule).values), (draw(m, 4), draw(k, 4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", [None, TILE], ids=str)
def test_a_launch_gets_the_operands_that_its_kernel_takes(schedule, dtype):
    A, rng = operand(8, dtype), np.random.default_rng(0)
    emulated = Emulated(emulate, schedule)
    for transpose, batch in ((False, 1), (True, 2)):
        B = integers(rng, (batch, A.shape[0 if transpose else 1], 6), dtype)
        C = jax.vmap(lambda B, t=transpose: spmm(A, B, transpose=t, schedule=emulated))(B)
        assert C.dtype == dtype
        for b in range(batch):
            np.testing.assert_array_equal(C[b], spmm(A, B[b], transpose=transpose))
    x = integers(rng, (A.shape[1],), dtype)
    np.testing.assert_array_equal(spmv(A, x, schedule=Emulated(emulate)), spmv(A, x))
    X, Y = (integers(rng, (2, size, 6), dtype) for size in A.shape)
    sampled = lambda X, Y, s: sddmm(A, X, Y, schedule=s).values
    tile = Emulated(emulate, schedule and SubwarpTile(8, tile_n=4))
    for axes in ((0, 0), (None, 0)):
        left = X if axes[0] == 0 else X[0]
        both = jax.vmap(lambda X, Y: sampled(X, Y, tile), axes)(left, Y)
        np.testing.assert_array_equal(
            both, jax.vmap(lambda X, Y: sampled(X, Y, None), axes)(left, Y)
        )


def test_values_of_a_batch_their_own():
    A, emulated = operand(4, "float32"), Emulated(emulate)
    B = integers(np.random.default_rng(0), (A.shape[1], 4), "float32")
    several = jnp.stack([A.values, 2 * A.values, -A.values])
    product = lambda v, s: spmm(A.with_values(v), B, schedule=s)
    found = jax.vmap(lambda v: product(v, emulated))(several)
    np.testing.assert_array_equal(found, jax.vmap(lambda v: product(v, None))(several))


@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize("length", [1, 8])
def test_two_orders_of_derivatives_are_those_of_the_cpu(length, i):
    A = operand(length, "float64")

    def derivatives(schedule):
        function, operands = list(operations(A, schedule))[i]
        gradient = jax.grad(loss(function), (0, 1))
        along = lambda *x: jax.jvp(gradient, x, x)
        second = jax.grad(lambda *x: jnp.sum(jnp.sin(gradient(*x)[0])), (0, 1))
        return jax.jit(lambda *x: (function(*x), along(*x), second(*x)))(*operands)

    launched = []

    def recorded(call, inputs, outputs):
        launched.append(call.kernel)
        return emulate(call, inputs, outputs)

    found = derivatives(Emulated(recorded))
    assert set(launched) == {
        "SpmmSubwarpKernel",
        "SpmmSubwarpTransposedKernel",
        "SddmmSubwarpKernel",
    }
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    jax.tree.map(same, found, derivatives(None))


def lowered(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def for_sm_90(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("schedule", [None, SubwarpTile(8)], ids=str)
@pytest.mark.parametrize("i", range(3))
def test_programs_for_a_gpu_hold_launches_on_vectors_and_no_expansion(i, schedule, for_sm_90):
    function, operands = list(operations(operand(8, "float32"), schedule))[i]
    first = lowered(jax.value_and_grad(loss(function), (0, 1)), *operands)
    assert first.count("custom_call @sgap_launch_v1") == first.count("custom_call") == 3
    gradient = jax.grad(loss(function), (0, 1))
    second = lowered(jax.grad(lambda *x: jnp.sum(jnp.sin(gradient(*x)[0])), (0, 1)), *operands)
    assert second.count("custom_call @sgap_launch_v1") == second.count("custom_call") > 3
    for text in (first, second):
        assert "SubwarpKernel" in text and "gather" not in text and "scatter" not in text


def test_what_no_kernel_takes_is_expanded(for_sm_90):
    arrays, case, _ = encoded(CASE, 3)
    A, B = vectors(arrays, case, "float32"), jnp.ones((case.shape[1], 4), jnp.float32)
    text = lowered(lambda A, B: spmm(A, B), A, B)
    assert "SpmmRow" in text and "gather" in text and "Subwarp" not in text
    point = Schedule.parse("{<1 row, 4 col>, 1}")
    text = lowered(lambda A, B: spmm(A, B, schedule=point), operand(8, "float32"), B)
    assert "SpmmRowKernel" in text and "Subwarp" not in text
    spmm(A, B, schedule=Emulated(emulate))
    text = lowered(lambda A, B: spmm(A, B, schedule=Reference()), operand(8, "float32"), B)
    assert "custom_call" not in text


def test_errors():
    A, emulate_it = operand(8, "float32"), lambda tile: Emulated(emulate, tile)
    B, X = (jnp.ones((size, 6), jnp.float32) for size in A.shape[::-1])
    with pytest.raises(NotImplementedError, match=r"spmm: .* runs on the platform cuda, not on"):
        spmm(A, B, schedule=TILE)
    with pytest.raises(ScheduleError, match=r"spmm: .* is for vectors of 4, got CVS\(8\)"):
        spmm(A, B, schedule=emulate_it(SubwarpTile(4)))
    with pytest.raises(NotImplementedError, match=r"not on CSR; convert with A.asformat\(CVS\(8\)"):
        spmm(A.asformat(CSR), B, schedule=emulate_it(SubwarpTile(8)))
    with pytest.raises(ScheduleError, match="sddmm: .* leave split out"):
        sddmm(A, X, B, schedule=emulate_it(TILE))
    with pytest.raises(ScheduleError, match="tile_n is what 8 lanes load.*float32: 8 to 32"):
        spmm(A, B, schedule=emulate_it(SubwarpTile(8, tile_n=64)))
    with pytest.raises(ScheduleError, match="tile_k is what 8 lanes load.*float32: 8 to 32"):
        sddmm(A, X, B, schedule=emulate_it(SubwarpTile(8, tile_k=4)))
    with pytest.raises(NotImplementedError, match="no kernel for dtype int32"):
        spmm(A.astype(jnp.int32), B.astype(jnp.int32), schedule=emulate_it(SubwarpTile(8)))
    assert A.format == CVS(8)
