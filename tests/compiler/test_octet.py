"""Loop nests bound to octet_mma: a GPU runs them on tensor cores, elsewhere they are plain
loops."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler_chains import blocks, octet_product, octet_sampled, octets_on_gpu
from compiler_tensors import Problem
from cuda_sources import EACH_ARCHITECTURE, has_turn, ptx, require_nvrtc, resources
from emulated_launch import emulate
from loop_functions import loop, store
from loop_interpreter.independence import independent
from loop_interpreter.interp import LoopFault, run

from sgap_jax import ScheduleError, SparseArray, einsum
from sgap_jax.compiler.cuda.print_cuda import launch_plan, print_cuda
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import CPU_THREAD, GPU_BLOCK, GPU_THREAD, GPU_WARP, Int
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.notation.cin import ATOMICS, NO_RACES
from sgap_jax.schedules.emulated import Emulated

CHAINS = octets_on_gpu()
SIZES = {"i": 48, "j": 70, "k": 130}
DTYPES = ("float16", "bfloat16")


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def lowered(schedule, sizes=SIZES, dtype="float16", **problem):
    problem = Problem(schedule.expression, sizes, dtype=dtype, **problem)
    return lower(schedule, sizes, problem.positions, dtype, "kernel"), problem


def check(schedule, sizes, dtype, **problem):
    function, problem = lowered(schedule, sizes, dtype, **problem)
    given = {array.name: problem.inputs[array.name] for array in function.inputs}
    (out,) = function.outputs
    want = problem.want.astype(jnp.dtype(out.dtype))
    np.testing.assert_array_equal(run(function, given)[out.name], want)
    result = [((out.size,), want.dtype)]
    np.testing.assert_array_equal(emulate(launch_plan(function), given.values(), result)[0], want)


# Rows, columns and vectors that do not fill a tile; that do; capacity without any vector.
SETTINGS = [(SIZES, 0.4, 5), ({"i": 16, "j": 64, "k": 64}, 1, 0), ({"i": 8, "j": 9, "k": 3}, 0, 4)]


@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_computes_exactly_the_sums(name):
    for i, (sizes, density, spare) in enumerate(SETTINGS):
        dtype = DTYPES[(list(CHAINS).index(name) + i) % 2]
        check(CHAINS[name], sizes, dtype, density=density, spare=spare, seed=i)


def on_blocks(schedule):
    return schedule.bind("i1", "octet_mma").parallelize("i0", GPU_BLOCK, NO_RACES)


@pytest.mark.parametrize("length", [2, 4, 8])
def test_every_length_and_dtype(length):
    sizes = {"i": 3 * length, "j": 41, "k": 39}
    for dtype in DTYPES:
        check(on_blocks(octet_product(length)), sizes, dtype, density=0.7, spare=2)
        for rows in (False, True):
            schedule = on_blocks(octet_sampled(length, features=16, rows=rows))
            check(schedule, sizes, dtype, density=0.7, spare=2)


def test_vectors_that_go_beyond_the_matrix_are_loops_or_refused():
    sizes = {"i": 30, "j": 41, "k": 39}
    for schedule in (octet_product(8), octet_sampled(8, features=16)):
        bound, problem = schedule.bind("i1", "octet_mma"), Problem(schedule.expression, sizes)
        function = lower(bound, sizes, problem.positions, "float32")
        found = run(function, problem.inputs)[function.outputs[0].name]
        np.testing.assert_array_equal(found, problem.want)
        with pytest.raises(NotImplementedError, match=r"the last ones .* go beyond i = 30"):
            lowered(on_blocks(schedule), sizes)


def counted(expression):
    """The expression with a pattern for its sparse factor."""
    sparse, *dense = expression.factors
    factors = (dataclasses.replace(sparse, pattern=True), *dense)
    return dataclasses.replace(expression, factors=factors)


def test_the_entries_of_a_pattern_scale_nothing():
    plain = octet_sampled(expression=counted(octet_sampled().expression))
    problem = Problem(plain.expression, SIZES, 0.4, spare=2, dtype="float16")
    functions = [
        lower(schedule, SIZES, problem.positions, "float16", "kernel")
        for schedule in (plain, on_blocks(plain))
    ]
    given = {array.name: problem.inputs[array.name] for array in functions[0].inputs}
    assert "A_vals" not in given
    want, found = (run(function, given)["D"] for function in functions)
    np.testing.assert_array_equal(found, want.astype(found.dtype))
    result = [(found.shape, found.dtype)]
    (theirs,) = emulate(launch_plan(functions[1]), given.values(), result)
    np.testing.assert_array_equal(theirs, found)


def test_the_kernels_are_of_tensor_cores_and_the_steps_what_was_split():
    for dtype, kind in zip(DTYPES, ("f16.f16", "bf16.bf16"), strict=True):
        for vectors in (16, 48):
            function, _ = lowered(on_blocks(octet_product(8, vectors)), dtype=dtype)
            source = launch_plan(function).source
            assert f"<sgap::{dtype}, 8, 64, {vectors}, false>" in source
            # Four mma for each 16 vectors: each covers 16 of the 64 columns, and 8 rows.
            multiplies = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32"
            assert ptx(source).count(multiplies) == vectors // 4


def operands(schedule, dtype, seed=0):
    """Small integers, and NaN in the rows and columns of dense operands that no entry names."""
    rng, given, words = np.random.default_rng(seed), [], []
    length = schedule.expression.sparse.format.vector_length
    there = np.repeat(rng.random((SIZES["i"] // length, 60)) < 0.3, length, 0)
    for access in schedule.expression.factors:
        names = [index.name for index in access.indices]
        x = rng.integers(-3, 4, [SIZES[name] for name in names]).astype(float)
        stored = [index.name for index in schedule.expression.sparse.indices]
        if access.format is not None:
            there = np.pad(there, [(0, 0), (0, SIZES[stored[1]] - 60)])
            there[:length] = there[-length:] = False
            x = np.where(there, np.where(x == 0, 1, x), 0)
            x = SparseArray.from_dense(x.astype(jnp.dtype(dtype)), format=access.format)
        elif stored[1] in names:
            x[(slice(None),) * names.index(stored[1]) + (slice(60, None),)] = np.nan
        given.append(x if isinstance(x, SparseArray) else jnp.asarray(x, jnp.dtype(dtype)))
        words.append("".join(names))
    output = "".join(index.name for index in schedule.expression.output.indices)
    return f"{','.join(words)}->{output}", given


def dense_of(x):
    return np.asarray(x.todense() if isinstance(x, SparseArray) else x, np.float64)


@pytest.mark.parametrize("name", ["V1 steps", "V2"])
def test_einsum_runs_them_and_what_no_entry_names_is_not_read(name):
    schedule, calls = CHAINS[name], []
    subscripts, given = operands(schedule, DTYPES[len(name) % 2])

    def noting(call, inputs, outputs):
        calls.append(call.source)
        return emulate(call, inputs, outputs)

    emulated = Emulated(noting, schedule=schedule)
    found = jax.jit(lambda *x: einsum(subscripts, *x, schedule=emulated))(*given)
    assert found.dtype == given[0].dtype and "Tile<" in calls[0] and len(calls) == 1
    np.testing.assert_array_equal(dense_of(found), dense_of(einsum(subscripts, *given)))


def test_rounding_is_that_of_float32_sums_and_derivatives_are_of_the_expression():
    """Random values, against the same nest as float64 loops; products that overflow float16."""
    rng = np.random.default_rng(0)
    subscripts, (A, B) = operands(CHAINS["V1"], "float16")
    A = A.with_values(jnp.asarray(rng.uniform(150, 300, A.values.shape), "float16"))
    B = jnp.asarray(rng.uniform(-300, -150, B.shape) * (rng.random(B.shape) < 0.02), "float16")
    schedule = Emulated(emulate, schedule=CHAINS["V1"])
    C = einsum(subscripts, A, B, schedule=schedule)
    exact = dense_of(A) @ np.asarray(B, np.float64)
    assert np.abs(exact).max() > 65504  # beyond float16's range
    exact = np.where(np.abs(exact) < 65504, exact, np.copysign(np.inf, exact))
    np.testing.assert_allclose(dense_of(C), exact, rtol=2**-11 + 1e-6, atol=0)
    B = B / 300
    wide = lambda B, schedule: jnp.sum(einsum(subscripts, A, B, schedule=schedule) / 1024)
    dB, plain = (jax.grad(wide)(B, s) for s in (schedule, None))
    np.testing.assert_allclose(dense_of(dB), dense_of(plain), rtol=2**-9)
    mapped = jax.vmap(lambda B: einsum(subscripts, A, B, schedule=schedule))(jnp.stack([B, -B]))
    np.testing.assert_allclose(dense_of(mapped[1]), -dense_of(mapped[0]), rtol=2**-10)


def test_the_program_of_a_gpu_is_one_launch(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    subscripts, given = operands(CHAINS["V2"], "bfloat16")
    product = jax.jit(lambda *x: einsum(subscripts, *x, schedule=CHAINS["V2"]))
    text = product.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @sgap_launch_v1") == 1 and "gather" not in text


@pytest.mark.parametrize("schedule", [octet_product(), octet_sampled()], ids=["V1", "V2"])
def test_on_a_cpu_the_nest_is_the_loops_that_it_was(schedule):
    threads = schedule.parallelize("i0", CPU_THREAD, NO_RACES)
    for plain in (schedule, threads):
        bound = plain.bind("i1", "octet_mma")
        assert bound.loops() == plain.loops() and "tensor" not in bound.loops()
    subscripts, given = operands(schedule, "float32")
    found = einsum(subscripts, *given, schedule=threads.bind("i1", "octet_mma"))
    np.testing.assert_array_equal(dense_of(found), dense_of(einsum(subscripts, *given)))


BIG = [
    octet_product(8, 64).split("jt", "jo", "w", 16).reorder("i0", "kb", "w", "jo"),
    octet_product(2, 128).split("jt", "jo", "w", 8).reorder("i0", "kb", "w", "jo"),
    octet_sampled(8, 32, 16, rows=True).split("kt", "ko", "w", 32),
    octet_sampled(8, 64, 32).split("kt", "ko", "w", 16),
]
BIG = [blocks(s.bind("i1", "octet_mma"), ("i0", NO_RACES), ("w", ATOMICS)) for s in BIG]


@pytest.mark.parametrize("arch", EACH_ARCHITECTURE[:3] + EACH_ARCHITECTURE[4:])
def test_they_stay_in_registers(arch):
    """Each schedule, and the largest steps that a block of that many warps may have."""
    for i, schedule in enumerate([*CHAINS.values(), *BIG]):
        if has_turn(i, arch) or schedule in (CHAINS["V1"], CHAINS["V2"]):
            source = launch_plan(lowered(schedule, dtype=DTYPES[i % 2])[0]).source
            _, stack, spills = resources(source, arch)
            assert (stack, spills) == (0, 0), source


WARPS = octet_product(8, 96).split("jt", "jo", "w", 16).reorder("i0", "kb", "w", "jo")
THREADS = octet_product().split("i0", "b", "t", 32).parallelize("b", GPU_BLOCK, NO_RACES)
PATTERN = counted(octet_product().expression)
REFUSED = {
    "float32": (
        lambda: lowered(CHAINS["V1"], dtype="float32"),
        NotImplementedError,
        "multiply float16 and bfloat16 with float32 sums, got float32: cast the operands",
    ),
    "registers": (
        lambda: launch_plan(
            lowered(blocks(WARPS.bind("i1", "octet_mma"), ("i0", NO_RACES), ("w", ATOMICS)))[0]
        ),
        NotImplementedError,
        "16 warps of a block have no registers for tiles of 8 x 64 in steps of 96; split by less",
    ),
    "threads around": (
        lambda: THREADS.parallelize("t", GPU_THREAD, NO_RACES).bind("i1", "octet_mma"),
        ScheduleError,
        "the threads of a warp run octet_mma together, and the loop of t gives them iterations of",
    ),
    "threads around, later": (
        lambda: THREADS.bind("i1", "octet_mma").parallelize("t", GPU_THREAD, NO_RACES),
        ScheduleError,
        "give it to GPUWarp or GPUBlock",
    ),
    "shared tile": (
        lambda: lowered(
            blocks(
                octet_product()
                .split("jt", "jo", "w", 4)
                .reorder("i0", "kb", "jo", "w")
                .bind("i1", "octet_mma"),
                ("i0", NO_RACES),
                ("w", NO_RACES),
            )
        ),
        ScheduleError,
        "w derives from j, over which C(i,k) is reduced",
    ),
    "a pattern": (
        lambda: octet_product(expression=PATTERN).bind("i1", "octet_mma"),
        NotImplementedError,
        "is neither a product nor a sampled one",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, says = REFUSED[name]
    with pytest.raises(error, match=re.escape(says)):
        call()


def test_einsum_says_why_float32_is_refused():
    subscripts, given = operands(CHAINS["V1"], "float32")
    with pytest.raises(NotImplementedError, match="tensor cores multiply float16 and bfloat16"):
        einsum(subscripts, *given, schedule=Emulated(emulate, schedule=CHAINS["V1"]))


# Functions that no schedule produces, but that can be written.


def mma_of(function):
    """The statements of a lowered V1: the block, its tile's Mma and MmaStore."""
    (block,) = function.body
    (step,) = [s for s in block.body if isinstance(s, loopir.For)]
    return block, step.body[-1], block.body[-1]


def test_tensor_cores_of_less_than_a_warp_are_refused():
    function, problem = lowered(CHAINS["V1"], {"i": 16, "j": 9, "k": 64}, density=1)
    block, mma, end = mma_of(function)
    assert isinstance(mma, loopir.Mma) and isinstance(end, loopir.MmaStore)
    given = {array.name: problem.inputs[array.name] for array in function.inputs}

    def bodied(*body, unit=GPU_BLOCK):
        blocks = dataclasses.replace(block, body=body, unit=unit)
        return dataclasses.replace(function, body=(blocks,))

    threads = loop("t", 32, *block.body, unit=GPU_THREAD)
    with pytest.raises(LoopFault, match="tensor cores in a loop of GPUThread"):
        run(bodied(threads), given)
    with pytest.raises(NotImplementedError, match="beside others, or a loop of threads"):
        print_cuda(bodied(threads))
    with pytest.raises(NotImplementedError, match="beside others, or a loop of threads"):
        print_cuda(bodied(*block.body, mma))
    with pytest.raises(LoopFault, match="tensor cores in a loop of CPUThread"):
        run(bodied(*block.body, unit=CPU_THREAD), given)
    alone = [s for s in block.body if not isinstance(s, loopir.Workspace)]
    with pytest.raises(NotImplementedError, match="a tile that warps share"):
        print_cuda(bodied(*alone, loop("w", 2, unit=GPU_WARP)))
    with pytest.raises(NotImplementedError, match="a store beside the loops of threads"):
        print_cuda(bodied(*block.body, store("C", 0, 1.0)))
    with pytest.raises(NotImplementedError, match="a tile that nothing adds to"):
        print_cuda(bodied(*block.body[:-1], dataclasses.replace(end, tile="other")))
    with pytest.raises(ValueError, match="a tile to C, which is float16, by +"):
        print_cuda(bodied(*block.body[:-1], dataclasses.replace(end, op="+")))
    flat = dataclasses.replace(mma.right, rows=dataclasses.replace(mma.right.rows, gather=None))
    with pytest.raises(ValueError, match="gathers along one side"):
        print_cuda(bodied(*block.body[:3], dataclasses.replace(mma, right=flat), end))
    wide = [
        dataclasses.replace(a, dtype="float32") if a.name == "B" else a for a in function.inputs
    ]
    with pytest.raises(LoopFault, match="B is float32"):
        wide = dataclasses.replace(function, inputs=tuple(wide))
        run(wide, given | {"B": given["B"].astype(np.float32)})


def test_a_step_beyond_the_operands_is_a_fault():
    function, problem = lowered(CHAINS["V1"], {"i": 16, "j": 9, "k": 64}, density=1)
    given = {array.name: problem.inputs[array.name] for array in function.inputs}
    block, mma, _ = mma_of(function)
    assert independent(next(s for s in block.body if isinstance(s, loopir.For)))
    more = dataclasses.replace(mma, columns=Int(mma.shape[1] + 1))
    steps = [
        s if not isinstance(s, loopir.For) else dataclasses.replace(s, body=(*s.body[:-1], more))
        for s in block.body
    ]
    broken = dataclasses.replace(function, body=(dataclasses.replace(block, body=tuple(steps)),))
    with pytest.raises(LoopFault, match="out of bounds"):
        run(broken, given)


def test_the_text_of_a_sampled_product(golden):
    given = ({"i": 24, "j": 100, "k": 90}, 320, "bfloat16")
    text = CHAINS["V2"].loops(*given) + "\n" + CHAINS["V2"].source("cuda", *given)
    golden.text("octet_sampled.txt", text)
