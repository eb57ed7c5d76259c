"""The CUDA lowering of spmm_p: for "cuda" as text, and run by the emulator instead of a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from jax.extend.core import Primitive
from jax.interpreters import mlir  # noqa: TID251 a primitive of our own

from sgap_jax import Schedule, spmm
from sgap_jax.primitives import spmm as rules
from sgap_jax.primitives._define import structure
from sgap_jax.runtime import launch

POINTS = ["{<2 row, 2 col>, 1}", "{<1/8 row, 4 col>, 8}", "{<1/8 row, 1 col>, 4}"]
POINTS += ["{<4 nnz, 1 col>, 1}", "{<1 nnz, 2 col>, 16}"]
CASE = BATTERY["every_length"]


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


@pytest.fixture
def emulated(monkeypatch):
    """spmm_p's operands and parameters, with launches on the emulator."""

    def lower(ctx, call, operands, avals, results, *, compiler):
        shapes = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]

        def run(*arrays):
            return emulate(call, arrays, [(s.shape, s.dtype) for s in shapes])

        rule = mlir.lower_fun(lambda *arrays: jax.pure_callback(run, shapes, *arrays), True)
        return rule(ctx.replace(avals_in=list(avals), avals_out=list(results)), *operands)

    monkeypatch.setattr(launch, "lower", lower)
    primitive = Primitive("spmm_emulated")
    primitive.def_abstract_eval(rules._abstract_eval)
    mlir.register_lowering(primitive, rules._cuda, platform="cpu")
    return primitive


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("point", POINTS)
def test_a_launch_gets_the_operands_that_its_kernel_takes(point, dtype, emulated):
    A, rng = array(CASE, dtype), np.random.default_rng(0)
    A = A.with_values(jnp.asarray(rng.integers(-3, 4, A.nnz), dtype))  # every sum is exact
    for transpose, batch in ((False, 1), (True, 2)):
        rows = A.shape[0] if transpose else A.shape[1]
        B = jnp.asarray(rng.integers(-3, 4, (batch, rows, 6)), dtype)
        params = dict(shape=A.shape, transpose=transpose, schedule=Schedule.parse(point))
        bind = jax.jit(lambda v, B, *index, p=params: emulated.bind(v, B, *index, **p))
        C = bind(A.values[None], B, *structure(A))
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
    assert "sgap_" not in default.as_text()
    with pytest.raises(NotImplementedError, match="runs on the platform cuda, not on cpu"):
        spmm(A, B, schedule=schedule)
