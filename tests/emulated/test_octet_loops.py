"""The tensor-core functions of compiled loops (cuda/loops/loops_octet.cuh), run by the emulator."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiler_chains import octet_product, octet_sampled, octets_on_gpu
from compiler_tensors import Problem
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from loop_interpreter.interp import run
from tolerance import assert_within, sum_bound

from sgap_jax.compiler.cuda.print_cuda import launch_plan
from sgap_jax.compiler.lowering.lower import lower

CHAINS = octets_on_gpu()
SIZES = {"j": 75, "k": 75}


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def emulated(function, given, **where):
    (out,) = function.outputs
    arrays = [given[array.name] for array in function.inputs]
    result = [((out.size,), jnp.dtype(out.dtype))]
    return emulate(launch_plan(function), arrays, result, **where)[0]


@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
@pytest.mark.parametrize("name, plain", [("V1", octet_product()), ("V2", octet_sampled())])
def test_sums_are_those_of_the_plain_loops_to_rounding(name, plain, arch):
    rng, dtype = np.random.default_rng(0), {"V1": "float16", "V2": "bfloat16"}[name]
    sizes = SIZES | {"i": 40}
    problem, given = Problem(plain.expression, sizes, 0.6, spare=3, dtype=dtype), {}
    for key, x in problem.inputs.items():
        real = np.where(np.isnan(np.float64(x)), np.nan, rng.standard_normal(x.shape))
        given[key] = x if x.dtype == np.int32 else real.astype(x.dtype)
    exact = lower(plain, sizes, problem.positions, "float64")
    wide = {key: x if x.dtype == np.int32 else np.float64(x) for key, x in given.items()}
    (want,) = run(exact, wide).values()
    (magnitude,) = run(exact, {key: np.abs(x) for key, x in wide.items()}).values()
    bound = sum_bound(want, magnitude, sizes["j"], dtype)
    function = lower(CHAINS[name], sizes, problem.positions, dtype, "kernel")
    assert_within(emulated(function, given, arch=arch), want, bound)
    assert_within(*run(function, given).values(), want, bound)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("V1", "b + column + First(lane)", "b + First(lane)"),
        ("V1", "c + column + First(lane)", "c + First(lane)"),
        ("V1", "lane / 4 * O::kChunk", "lane % 4 * O::kChunk"),
        ("V1", "? columns - First(lane) : 0", "? columns : 0"),
        ("V1", "row, row + kLength, n,", "row, row + 1, n,"),
        ("V1 columns", "step[q].MultiplyInto", "step[0].MultiplyInto"),
        ("V1 steps", "if (j < left) Access", "Access"),
        ("V2", "dots.x_rows[j] + own, 0", "dots.x_rows[j], 0"),
        ("V2", "(feature + own + from)", "(feature + from)"),
        ("V2", "stride, dots.left - from)", "stride, dots.left)"),
        ("V2", "if (j < left) {", "{"),
        ("V2", "at < count ? at : count - 1", "at"),
        ("V2", "if (at >= count) continue;", ""),
        ("V2", "own[r] *= Widen(", "own[r] = Widen("),
        ("V2 rows", "r < kLength ? r : kLength - 1", "r"),
        ("V2 rows", "columns[i] * stride + feature", "columns[i] * stride"),
        ("V2 rows", "if (row >= kLength) return;", ""),
    ],
)
def test_planted_bugs_are_caught(name, right, wrong, planted):
    schedule, dtype = CHAINS[name], "float16"
    sizes = SIZES | {"i": 8 * schedule.expression.sparse.format.vector_length}
    problem = Problem(schedule.expression, sizes, 0.6, spare=4, dtype=dtype)
    function = lower(schedule, sizes, problem.positions, dtype, "kernel")
    # Blocks run from the last to the first: one that writes past its own part overwrites finished
    # results.
    order = range(launch_plan(function).grid[0])[::-1]

    def check():
        found = emulated(function, problem.inputs, order=list(order))
        np.testing.assert_array_equal(found, problem.want.astype(found.dtype))

    planted("loops_octet.cuh", right, wrong, check)
