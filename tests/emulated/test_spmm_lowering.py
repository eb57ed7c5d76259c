"""The CUDA lowering of spmm_p: for "cuda" as text, and run by the emulator instead of a GPU."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import Reference, Schedule, spmm
from sgap_jax.schedules.emulated import Emulated

POINTS = ["{<2 row, 2 col>, 1}", "{<1/8 row, 4 col>, 8}", "{<1/8 row, 1 col>, 4}"]
POINTS += ["{<4 nnz, 1 col>, 1}", "{<1 nnz, 2 col>, 16}", "{<4 nnz, 2 col>, 8}"]
CASE = BATTERY["every_length"]


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("point", POINTS)
def test_a_launch_gets_the_operands_that_its_kernel_takes(point, dtype):
    A, rng = array(CASE, dtype), np.random.default_rng(0)
    schedule = Emulated(emulate, Schedule.parse(point))
    A = A.with_values(jnp.asarray(rng.integers(-3, 4, A.nnz), dtype))  # every sum is exact
    for transpose, batch in ((False, 1), (True, 2)):
        rows = A.shape[0] if transpose else A.shape[1]
        B = jnp.asarray(rng.integers(-3, 4, (batch, rows, 6)), dtype)
        product = jax.vmap(lambda B, t=transpose: spmm(A, B, transpose=t, schedule=schedule))
        C = product(B)
        assert C.dtype == dtype
        for b in range(batch):
            np.testing.assert_array_equal(C[b], spmm(A, B[b], transpose=transpose))


@pytest.mark.parametrize("point", POINTS)
def test_value_and_gradient_lower_to_launches(point, monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A, schedule = array(CASE, "float32"), Schedule.parse(point)
    B = jnp.ones((A.shape[1], 6), jnp.float32)
    loss = lambda A, B: jnp.sum(spmm(A, B, schedule=schedule) ** 2)
    lowered = jax.jit(jax.value_and_grad(loss, 1)).trace(A, B).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @sgap_launch_v1") == 2  # A B, and A^T dC
    default = jax.jit(lambda A, B: spmm(A, B)).trace(A, B).lower(lowering_platforms=("cuda",))
    assert default.as_text().count("custom_call @sgap_launch_v1") == 1
    with pytest.raises(NotImplementedError, match="runs on the platform cuda, not on cpu"):
        spmm(A, B, schedule=schedule)


def test_symbolic_sizes_are_refused_with_a_remedy(monkeypatch):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    A = array(CASE, "float32")
    (n,) = jax.export.symbolic_shape("n")
    B = jax.ShapeDtypeStruct((A.shape[1], n), jnp.float32)
    product = jax.jit(lambda B, schedule=None: spmm(A, B, schedule=schedule), static_argnums=1)
    export = jax.export.export(product, platforms=("cuda",))
    with pytest.raises(NotImplementedError, match=r"spmm: .*concrete sizes.*Reference\(\)"):
        export(B)
    export(B, Reference())
