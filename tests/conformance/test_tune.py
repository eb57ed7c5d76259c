"""Tuning: which schedules are tried, which one is chosen, and what is cached. No test measures
time: the operations state what they would have taken."""

import dataclasses
import functools
import inspect
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import (
    BCSR,
    CSF,
    CSR,
    CVS,
    AtomicParallelism,
    AttentionTile,
    CpuTile,
    OctetTile,
    Problem,
    Reference,
    RowStatistics,
    ScheduleError,
    SparseArray,
    Unfused,
    candidate_schedules,
    choose_schedule,
    einsum,
    evaluate,
    gsddmm,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
    spmv,
    tune,
)
from sgap_jax.compiler import Schedule as Chain
from sgap_jax.compiler import assign
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.schedules.cpu import scatter
from sgap_jax.schedules.emulated import Emulated

module = inspect.getmodule(tune)
TILES = tuple(CpuTile(nonzeros=n) for n in (10, 20, 30))


def pattern(seed=0, shape=(40, 30)):
    dense = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    rows, columns = np.indices(shape)
    return SparseArray.from_dense(np.where((7 * rows + 3 * columns + seed) % 4 == 0, dense, 0))


def dense(*shape):
    return jnp.asarray(np.random.default_rng(9).standard_normal(shape), jnp.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def samples(monkeypatch):
    """Records the calls of a sample; a sample's time is what the first result states."""
    found = []

    def sample(program, operands, calls):
        found.append(calls)
        return abs(float(program(*operands))) + 1e-3

    monkeypatch.setattr(module, "_sample", sample)
    monkeypatch.setattr(module, "_calls", lambda *_: 3)
    return found


def taking(seconds):
    """An operation that states these seconds for each schedule."""
    return lambda x, *, schedule: x + jnp.asarray(seconds[schedule], x.dtype)


def test_the_fastest_is_chosen_and_all_are_told(samples):
    run = taking(dict(zip(TILES, (5.0, 2.0, 9.0), strict=True)))
    tuned = tune(run, dense(1) * 0, candidates=TILES, seconds=1e-3)
    assert tuned.schedule == TILES[1] and tuned.default == TILES[0]
    assert [schedule for schedule, _ in tuned.times] == [TILES[1], TILES[0], TILES[2]]
    assert tuned.speedup == pytest.approx(5.001 / 2.001, rel=1e-4)
    first, second, third = str(tuned).splitlines()
    assert first.endswith(f"{TILES[1]} (chosen)") and second.endswith(f"{TILES[0]} (default)")
    assert third.split() == ["9001000.0", "us", *str(TILES[2]).split()]


def test_the_first_candidate_stays_unless_another_gains_more_than_noise(samples):
    for gain, chosen in ((1.01, TILES[0]), (1.05, TILES[2])):
        seconds = dict(zip(TILES, (gain, 2.0, 1.0), strict=True))
        tuned = tune(taking(seconds), dense(1) * 0, candidates=TILES, seconds=1e-3)
        assert tuned.schedule == chosen and tuned.times[0][0] == TILES[2]


def test_a_slow_spell_counts_against_nobody(monkeypatch):
    rounds = dict.fromkeys(TILES, 0)
    seconds = dict(zip(TILES, (1.0, 1.15, 0.9), strict=True))

    def sample(program, operands, calls):
        schedule = min(TILES, key=lambda x: abs(seconds[x] - float(program(*operands))))
        rounds[schedule] += 1
        # From round 8 on all take three times as long; the second candidate was dropped by then.
        return seconds[schedule] * (3 if rounds[schedule] > 8 else 1) * 0.1

    monkeypatch.setattr(module, "_sample", sample)
    monkeypatch.setattr(module, "_calls", lambda *_: 3)
    tuned = tune(taking(seconds), dense(1) * 0, candidates=TILES, seconds=0.2)
    assert rounds[TILES[0]] == rounds[TILES[2]] > 20 > rounds[TILES[1]]
    assert [schedule for schedule, _ in tuned.times] == [TILES[2], TILES[0], TILES[1]]
    assert tuned.speedup == pytest.approx(1 / 0.9) and tuned.schedule == TILES[2]


def test_what_else_a_step_runs_may_refuse_candidates(samples):
    def both(A, B, *, schedule):
        return spmm(A, B, schedule=schedule), sparse_softmax(A, schedule=schedule).values

    A = pattern(shape=(80, 60))  # more than one task
    tuned = tune(both, A, dense(60, 20), seconds=1e-3)
    assert {schedule.columns for schedule, _ in tuned.times} == {0} and len(tuned.times) > 1


def test_a_sample_is_a_program_of_many_calls(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    def wait(result):
        clock[0] += 3.0
        order.append("waited")
        return result

    monkeypatch.setattr(module.jax, "block_until_ready", wait)
    assert module._sample(lambda x: order.append("called"), (dense(1),), 4) == 0.75
    assert order == ["called", "waited"]
    # From 1 ms on a sample is one call; a call of no time at all counts as a microsecond.
    for seconds, calls in ((2.5e-3, 1), (4e-4, 3), (0.0, math.ceil(1e-3 / 1e-6))):
        monkeypatch.setattr(module, "_sample", lambda *_, seconds=seconds: seconds)
        assert module._calls(None, ()) == calls


@pytest.mark.parametrize("what", ["spmm", "its gradient", "plain JAX"])
def test_each_call_of_a_program_runs(what):
    """XLA moves nothing out of the loop, although all calls have the same operands."""
    A, B = pattern(), dense(30, 8)
    launched = []

    def run(call, inputs, outputs):
        launched.append(call)
        return [np.ones(shape, dtype) for shape, dtype in outputs]

    def step(A, B, *, schedule):
        if what != "its gradient":
            return spmm(A, B, schedule=schedule)
        loss = lambda v, B: jnp.sum(spmm(A.with_values(v), B, schedule=schedule) ** 2)
        return jax.grad(loss, argnums=(0, 1))(A.values, B)

    schedule = Reference() if what == "plain JAX" else Emulated(run)
    program = module._repeated(step, schedule, 7).lower(A, B).compile()
    assert np.isfinite(program(A, B))
    if what == "plain JAX":
        (entry,) = re.findall(r"^ENTRY.*?^}", program.as_text(), re.DOTALL | re.MULTILINE)
        assert "while(" in entry and "scatter(" not in entry and "gather(" not in entry
    else:
        assert len(launched) == 7 * (3 if what == "its gradient" else 1)


def test_results_are_those_of_one_call():
    """What the loop writes into the operands are the values that they have."""
    A, B = pattern(), dense(30, 8)
    for calls in (1, 5):
        token = module._repeated(spmm, None, calls)(A, B)
        np.testing.assert_allclose(token, spmm(A, B)[0, 0], rtol=1e-6)
    whole = lambda A, x, *, schedule: (A.values * 2, x.sum(), jnp.zeros((0, 3)))
    assert float(module._repeated(whole, None, 4)(A, jnp.arange(4))) == 2 * A.values[0] + 6


def test_equal_programs_are_timed_once(samples):
    """Candidates that differ for this package, and not for XLA: threads, chunks of one task."""
    chains = [Chain(assign("ij,jk->ik", {"A": CSR})).split("i", name, "row", 8) for name in "ab"]
    kinds = [*chains, chains[0].parallelize("a", "CPUThread", "NoRaces")]
    run = functools.partial(einsum, "ij,jk->ik")
    tuned = tune(run, pattern(), dense(30, 8), candidates=kinds, seconds=1e-3)
    assert {schedule for schedule, _ in tuned.times} == {kinds[0], kinds[2]}
    assert tuned.default == kinds[0]

    def called(x, *, schedule):  # programs with functions of Python look alike
        host = lambda x: np.float32(schedule.nonzeros) + x
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert len(tune(called, dense(1), candidates=TILES, seconds=1e-3).times) == len(TILES)


def test_programs_and_kernels_are_compiled_in_threads(monkeypatch):
    """As on a machine with a GPU; kernels are taken from the cache when a program is lowered."""
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    A, B = pattern(), dense(30, 8)
    points = [AtomicParallelism(row=1, col=col) for col in (1, 2)]
    points.append(dataclasses.replace(points[0], block_size=128))
    points.append(CpuTile())  # refused there
    compiled = []

    def compile_call(call, compiler, arch):
        assert threading.current_thread() is not threading.main_thread()
        compiled.append((call, arch))
        raise NotImplementedError("this GPU lacks it")  # as the lowering of this candidate says

    monkeypatch.setattr(module.launch, "compile_call", compile_call)
    with ThreadPoolExecutor(2) as threads:
        module._compile_kernels(spmm, (A, B), points, threads)
    problem = Problem("spmm", A.shape, A.nnz, 8, platform="cuda")
    want = {launch_plan(problem, point) for point in points[:3]}
    assert {call for call, _ in compiled} == want and len(compiled) == 3
    assert {arch for _, arch in compiled} == {"sm_90"}


def test_what_is_far_behind_is_not_timed_for_long(samples):
    many = tuple(CpuTile(nonzeros=n) for n in range(1, 31))
    seconds = {tile: 1.0 if tile == many[5] else 50.0 + n for n, tile in enumerate(many)}
    assert tune(taking(seconds), dense(1) * 0, candidates=many, seconds=1e-9).schedule == many[5]
    # Two samples of each, the first not counted; then four rounds of the default and the fastest.
    assert len(samples) == 2 * len(many) + 2 * 4


def test_integers_are_timed_and_index_arrays_are_not(samples):
    """XLA removes results that a program does not return; arguments that are returned are
    copied."""
    results = []
    run = lambda A, *, schedule: results.append(A.with_values(2 * A.values)) or results[-1]
    A = SparseArray.from_dense(np.eye(3, dtype=np.int32))
    assert tune(run, A, candidates=[None], seconds=1e-3).speedup == 1
    compiled = jax.jit(lambda A: module._values(run(A, schedule=None))).lower(A).compile()
    assert [aval.shape for aval in jax.tree.leaves(compiled.out_info)] == [(3,)]


def test_none_and_schedules_of_other_kinds_are_candidates():
    B = dense(30, 8)
    tuned = tune(spmm, pattern(), B, candidates=[None, Reference(), None], seconds=1e-3)
    assert {schedule for schedule, _ in tuned.times} == {None, Reference()}
    assert tuned.default is None


def test_attention_over_blocks_is_timed_as_none_too():
    blocks = np.ones((64, 4), bool)  # every row sees every block: block after block, by default
    A = SparseArray.from_dense(np.kron(blocks, np.ones((1, 16), np.float32)), format=BCSR(1, 16))
    q, k, v = dense(64, 2, 16), dense(64, 2, 16), dense(64, 2, 16)
    tuned = tune(sparse_attention, q, k, v, A, seconds=1e-3)
    assert tuned.default is None
    assert {schedule for schedule, _ in tuned.times} == {None, CpuTile(), Unfused()}
    assert tune(sparse_attention, q, k, v, A, seconds=1e-3) == tuned  # from the file
    few = SparseArray.from_dense(np.eye(64, dtype=np.float32), format=BCSR(1, 16))
    assert tune(sparse_attention, q, k, v, few, seconds=1e-3).default == CpuTile()


def test_chains_of_the_compiler_are_candidates():
    X = np.where(np.random.default_rng(1).random((6, 5, 4)) < 0.3, 1.0, 0).astype(np.float32)
    A, B, C = SparseArray.from_dense(X, format=CSF(3)), dense(5, 8), dense(4, 8)
    plain = Chain(assign("ijk,jr,kr->ir", {"A": CSF(3)}))
    chains = (plain, plain.parallelize("i", "CPUThread", "NoRaces"))
    run = functools.partial(einsum, "ijk,jr,kr->ir")
    tuned = tune(run, A, B, C, candidates=chains, seconds=1e-3)
    assert {schedule for schedule, _ in tuned.times} == set(chains)


@pytest.mark.tier("test")
@pytest.mark.skipif(not llvm.available(), reason="no llvmlite")
def test_compiled_loops_have_candidates():
    """Of einsum, kept in a file, and of evaluate; those whose tasks share sums if asked for."""
    X = np.where(np.random.default_rng(1).random((6, 5, 4)) < 0.3, 1.0, 0).astype(np.float32)
    operands = SparseArray.from_dense(X, format=CSF(3)), dense(5, 8), dense(4, 8)
    run = functools.partial(einsum, "ijk,jr,kr->ir")
    tuned = tune(run, *operands, seconds=1e-3, deterministic=False)
    assert tune(run, *operands, seconds=1e-3, deterministic=False) == tuned

    def residual(S, b, x, *, schedule):
        return evaluate("y(i) = b(i) - S(i,j) * x(j)", S=S, b=b, x=x, schedule=schedule)

    others = tune(residual, pattern(), dense(40), dense(30), seconds=1e-3)
    for found, shares in ((tuned, True), (others, False)):
        assert found.default is None and len(found.times) > 1
        assert any("Atomics" in str(schedule) for schedule, _ in found.times) == shares


M, K = 80, 60  # more than one task
OPS = {
    "spmm": lambda A: (spmm, A, dense(K, 20)),
    "transposed": lambda A: (functools.partial(spmm, transpose=True), A, dense(M, 20)),
    "spmv": lambda A: (spmv, A, dense(K)),
    "sddmm": lambda A: (sddmm, A, dense(M, 8), dense(K, 8)),
    "gspmm": lambda A: (functools.partial(gspmm, reduce="max"), A, dense(K, 8)),
    "gsddmm": lambda A: (functools.partial(gsddmm, op="mul"), A, dense(M, 8), dense(K, 8)),
    "sparse_softmax": lambda A: (sparse_softmax, A),
    "row_sum": lambda A: (row_sum, A),
    "row_max": lambda A: (row_max, A),
    "attention": lambda A: (
        sparse_attention,
        dense(1, M, 2, 8),
        dense(1, K, 2, 8),
        dense(1, K, 2, 8),
        A,
    ),
    "einsum": lambda A: (functools.partial(einsum, "ij,jk->ik"), A, dense(K, 4)),
}


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_tuned_and_means_the_same(op, samples):
    run, *operands = OPS[op](pattern(shape=(M, K)))
    tuned = tune(run, *operands, seconds=1e-3)
    assert samples and len(tuned.times) > 1
    chosen, expected = run(*operands, schedule=tuned.schedule), run(*operands)
    for got, want in zip(jax.tree.leaves(chosen), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_column_vectors_and_whole_steps_are_tuned(samples):
    A = pattern().asformat(CVS(4))

    def step(A, B, *, schedule):
        loss = lambda v, B: jnp.sum(spmm(A.with_values(v), B, schedule=schedule) ** 2)
        return jax.grad(loss, argnums=(0, 1))(A.values, B)

    tuned = tune(step, A, dense(30, 20), seconds=1e-3)
    assert set(dict(tuned.times)) == set(candidate_schedules(problem_of(A, 20)))


def problem_of(A, n):
    nnz = A.values.size
    return Problem("spmm", A.shape, nnz, n, format=str(A.format))


def test_what_was_found_is_kept_by_pattern(folder, samples, monkeypatch):
    A, B = pattern(), dense(30, 20)

    def measured(*operands, run=spmm, **how):
        samples.clear()
        tuned = tune(run, *operands, **{"seconds": 1e-3} | how)
        return tuned, bool(samples)

    first, timed = measured(A, B)
    assert timed and len(list((folder / "tuned").iterdir())) == 1
    again, timed = measured(A.with_values(2 * A.values), B + 1)
    assert not timed and again == first
    assert measured(pattern(1), B)[1], "another pattern of the same size"
    assert measured(A, dense(30, 21))[1], "another shape"
    assert measured(A, dense(40, 20), run=functools.partial(spmm, transpose=True))[1]
    assert measured(A, B, again=True)[1]
    assert not measured(A, B)[1]
    assert measured(A, B, seconds=2e-3)[1] and not measured(A, B)[1], "found in less time"
    partial = functools.partial(einsum, "ij,jk->ik")
    assert measured(A, B, run=partial)[1] and not measured(A, B, run=partial)[1]
    monkeypatch.setattr(module, "info", lambda: {"cpu_isa": "other", "cpu_threads": 1})
    assert measured(A, B)[1], "another machine"

    @functools.wraps(spmm)
    def own(A, B, *, schedule):
        return spmm(A, B, schedule=schedule)

    assert measured(A, B, run=own)[1] and measured(A, B, run=own)[1], "a function of one's own"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"times": [], "schedule": "CpuTile(columns=0, nonzeros=8192)", "seconds": 9}',
    ],
)
def test_a_damaged_file_is_measured_again(folder, samples, damage):
    A, B = pattern(), dense(30, 20)
    tune(spmm, A, B, seconds=1e-3)
    (file,) = (folder / "tuned").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage)
    samples.clear()
    tune(spmm, A, B, seconds=1e-3)
    assert samples and len(file.read_bytes()) == pytest.approx(len(whole), rel=0.5)


def test_a_folder_that_cannot_be_written_costs_a_measurement(folder, samples, monkeypatch):
    for place in ("", str(folder / "file" / "below")):
        (folder / "file").touch()
        monkeypatch.setenv("SGAP_CACHE_DIR", place)
        samples.clear()
        assert tune(spmv, pattern(), dense(30), seconds=1e-3).schedule is not None
        assert samples


def test_errors():
    A, B = pattern(), dense(30, 4)
    with pytest.raises(TypeError, match="concrete arrays"):
        jax.jit(lambda B: tune(spmm, A, B).schedule and B)(B)
    with pytest.raises(TypeError, match="concrete arrays"):
        jax.jit(lambda x: tune(spmm, A, B).schedule and x)(1.0)
    with pytest.raises(TypeError, match="tune: run must be a function, .* got a ArrayImpl"):
        tune(dense(1))
    with pytest.raises(TypeError, match="choose_schedule: problem must be a Problem, got a int"):
        choose_schedule(3)
    with pytest.raises(TypeError, match="functools.partial"):
        tune(einsum, "ij,jk->ik", A, B)
    with pytest.raises(NotImplementedError, match="name the candidates"):
        tune(lambda A, *, schedule: A.todense(), A)
    with pytest.raises(TypeError, match=r"must take it and pass it on: .*schedule=schedule"):
        tune(lambda A, B: A @ B, A, B)
    with pytest.raises(TypeError, match="several schedules"):
        tune(spmm, A, B, candidates=CpuTile())
    with pytest.raises(ValueError, match="must return arrays"):
        tune(lambda A, B, *, schedule: None, A, B, candidates=[None])
    with pytest.raises(ValueError, match="at least one"):
        tune(spmm, A, B, candidates=[])
    for seconds in (0, -1.0, "2"):
        with pytest.raises(ValueError, match="seconds must be positive"):
            tune(spmm, A, B, seconds=seconds)
    with pytest.raises(ValueError, match="seconds must be finite"):
        tune(spmm, A, B, candidates=[None], seconds=float("inf"))  # one needs no time
    with pytest.raises(NotImplementedError, match="asks a kernel to obey"):
        tune(lambda A, B, *, schedule: A.todense() @ B, A, B)
    with pytest.raises(ScheduleError, match="only spmm, and sddmm without column vectors, have"):
        tune(sparse_softmax, A, candidates=[CpuTile(columns=16)])
    with pytest.raises(ValueError, match="B must have shape"):
        tune(spmm, A, B[1:])


def test_vectors_without_tiles_have_points():
    problem = Problem("spmm", (9, 9), 81, 4, format="CVS(3)", platform="cuda")
    assert len(candidate_schedules(problem)) > 10


PROBLEMS = [
    Problem(op, (1000, 800), 20_000, n, 1, dtype, format, platform, permuted)
    for platform in ("cpu", "cuda")
    for dtype in ("float32", "bfloat16", "float64")
    for op, n, format, permuted in (
        ("spmm", 1, "CSR", False),
        ("spmm", 17, "CSR", True),
        ("spmm", 128, "CSR", False),
        ("spmm", 64, "CVS(8)", False),
        ("spmm", 64, "CVS(8)", True),
        ("sddmm", 64, "CSR", False),
        ("sddmm", 48, "CVS(4)", False),
        ("gspmm", 32, "CSR", False),
        ("sparse_softmax", 1, "CSR", False),
        ("row_max", 1, "CVS(8)", False),
        ("attention", 64, "CSR", False),
        ("attention", 64, "CVS(8)", False),
    )
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_candidates_are_legal_and_few_and_the_default_is_first(problem):
    every = candidate_schedules(problem, deterministic=False)
    same_bits = candidate_schedules(problem)
    assert every[0] == same_bits[0] == choose_schedule(problem)
    assert len(set(every)) == len(every) and 2 <= len(every) <= 60
    assert set(same_bits) <= set(every)
    for schedule in every:
        schedule.check(problem)
    atomics = problem.platform == "cuda" and problem.op == "spmm" and problem.format == CSR
    assert (len(same_bits) < len(every)) == atomics


def test_points_that_split_nonzeros_are_candidates():
    """Those that add in any order only where the default does so, or where they are asked for."""
    skewed = RowStatistics(mean=16.0, deviation=256.0, longest=32_768)
    problem = Problem("spmm", (4096, 4096), 65_536, 16, platform="cuda")
    split = lambda found: {x.nnz for x in found if isinstance(x, AtomicParallelism) and x.nnz}
    assert split(candidate_schedules(problem)) == set()
    assert split(candidate_schedules(problem, deterministic=False)) == {1, 4, 8, 32}
    rows = dataclasses.replace(problem, rows=skewed)
    assert choose_schedule(rows).nnz and candidate_schedules(rows)[0] == choose_schedule(rows)
    assert split(candidate_schedules(rows)) == {1, 4, 8, 32}
    assert split(candidate_schedules(rows, deterministic=True)) == set()
    # Pieces of rows only where rows are skewed, of each kind of kernel.
    pieces = lambda found: {type(x) for x in found if getattr(x, "chunk", None)}
    assert pieces(candidate_schedules(problem)) == set()
    for about, kinds in (
        ({}, {AtomicParallelism}),
        (dict(dtype="float16", format="CVS(8)"), {OctetTile}),
        (dict(op="attention", n=64, dtype="float16", format="CVS(8)"), {AttentionTile}),
    ):
        found = candidate_schedules(dataclasses.replace(rows, **about), deterministic=True)
        assert pieces(found) == kinds and len(found) <= 60


def test_no_program_is_a_candidate_twice():
    """Chunks that hold all nonzeros are one task; a walk by rows of A has no chunks."""
    small = candidate_schedules(Problem("spmm", (300, 200), 1500, 100))
    assert len({(x.columns, x.packed) for x in small if x.nonzeros >= 2048}) == len(small) - 1
    assert CpuTile(nonzeros=1024) in small and CpuTile() == small[0]
    larger = candidate_schedules(Problem("spmm", (300, 200), 60_000, 8))
    assert [x.nonzeros for x in larger] == [8192, 1024, 2048, 4096, 16384, 32768]
    vectors = Problem("spmm", (64, 80), 6400, 64, format="CVS(8)", permuted=True)
    by_rows = candidate_schedules(vectors)
    assert len({scatter(vectors, tile) for tile in by_rows}) == len(by_rows) > 1
    assert len({tile.nonzeros for tile in by_rows}) == 1


def test_platforms_and_dtypes_without_kernels_have_no_choice():
    assert candidate_schedules(Problem("spmm", (9, 9), 9, 4, platform="tpu")) == (Reference(),)
    assert candidate_schedules(Problem("spmm", (9, 9), 9, 4, dtype="int32")) == ()


@pytest.mark.parametrize(
    ("op", "format", "dtype"),
    [("spmm", CSR, "float32"), ("spmm", CVS(8), "bfloat16"), ("sddmm", CVS(8), "bfloat16")],
)
def test_candidates_on_cuda_lower(op, format, dtype):
    A = SparseArray.from_dense(np.ones((64, 48), np.float32), format=format).astype(dtype)
    X, Y = (jnp.ones((rows, 64), dtype) for rows in (64, 48))
    operands = (A, Y) if op == "spmm" else (A, X, Y)
    run = {"spmm": spmm, "sddmm": lambda *x, schedule: sddmm(*x, schedule=schedule).values}[op]
    problem = Problem(op, A.shape, A.values.size, 64, 1, dtype, str(A.format), "cuda")
    launched = []
    for schedule in candidate_schedules(problem, deterministic=False):
        emulated = Emulated(lambda *_: launched.append(_), schedule)
        jax.jit(functools.partial(run, schedule=emulated)).lower(*operands)
    assert not launched  # lowered, with all sizes checked; nothing ran
