"""The launches within JAX on a device: export, command buffers, threads, donation, two at once."""

import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array, cast
from gpu_session import DRY_RUN, on_gpu, require_gpu, some, time_left
from spmm_oracle import dense_operand, oracle
from tolerance import assert_within

from sgap_jax import Problem, candidate_schedules, spmm, tune
from sgap_jax.launch import launch

HERE = pathlib.Path(__file__).parent
CASE = BATTERY["skewed"]
A, B = array(CASE, "float32"), cast(dense_operand(CASE, 32), "float32")


def run(*command, seconds=170, **environment):
    """(exit status, output) of a program of programs.py; the modules of tests/ are on its path."""
    path = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    words = [str(word) for word in (*command, *(["--emulated"] if DRY_RUN else []))]
    done = subprocess.run(
        words,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=min(seconds, max(time_left(), 60)),
    )
    return done.returncode, done.stdout


def program(*words):
    return (sys.executable, HERE / "programs.py", *words)


def check(C):
    assert_within(C, *oracle(CASE, "float32", dense_operand(CASE, 32)))


def test_a_sample_in_a_process_of_its_own():
    status, output = run(*program("sample"))
    assert status == 0 and "programs are right" in output, output


def test_an_exported_program_runs_in_another_process(tmp_path):
    require_gpu()
    allowed = [jax.export.DisabledSafetyCheck.custom_call(launch.TARGET)]
    product = jax.jit(lambda values, B: spmm(A.with_values(values), B))
    exported = jax.export.export(product, platforms=("cuda",), disabled_checks=allowed)
    file = tmp_path / "exported"
    file.write_bytes(exported(A.values, jnp.asarray(B)).serialize())
    np.savez(f"{file}.npz", values=np.asarray(A.values), B=B)
    # Nothing to compile with: the program has the machine code.
    status, output = run(*program("call", file), SGAP_CACHE_DIR="", CUDA_HOME=str(tmp_path))
    assert status == 0, output
    check(np.load(f"{file}.npy"))


def test_the_schedules_that_a_tuner_tries_are_right_and_timed(monkeypatch, record_property):
    monkeypatch.setenv("SGAP_CACHE_DIR", "")
    asked = Problem("spmm", A.shape, A.nnz, B.shape[1], platform="cuda")
    points = some(candidate_schedules(asked, deterministic=False))
    for point in points:
        check(spmm(A, B, schedule=on_gpu(point)))
    product = lambda *x, schedule: spmm(*x, schedule=on_gpu(schedule))
    tuned = tune(product, A, B, candidates=points, seconds=0.5)
    assert {point for point, _ in tuned.times} == set(points)
    if not DRY_RUN:
        tuned = tune(spmm, A, B)
        check(spmm(A, B, schedule=tuned.schedule))
    record_property("tuned", f"{tuned.speedup:.2f}x by {tuned.schedule}")


def test_command_buffers(tmp_path, record_property):
    """The sample with custom calls in CUDA graphs, from the first launch on."""
    require_gpu()
    flags = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL"
    flags += f" --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}"
    status, output = run(*program("sample"), XLA_FLAGS=flags)
    assert status == 0 and "programs are right" in output, output
    dumped = (path.read_text(errors="replace").lower() for path in tmp_path.rglob("*.txt"))
    record_property("graphs", any("command_buffer" in t or "kcommandbuffer" in t for t in dumped))


def test_threads_share_an_executable_and_have_their_own():
    wrong = []
    shared = jax.jit(lambda A, B: spmm(A, B, schedule=on_gpu()))

    def work(seed):
        own = jax.jit(lambda A, B: spmm(A, B + 0 * seed, schedule=on_gpu()))
        for _ in range(1 if DRY_RUN else 20):
            for product in (shared, own):
                try:
                    check(product(A, B))
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_a_donated_result_is_written_in_place():
    into = jax.jit(
        lambda A, B, C: spmm(A, B, schedule=on_gpu()), donate_argnums=2, keep_unused=True
    )
    C = jnp.full((A.shape[0], 32), jnp.nan, jnp.float32)
    for _ in range(3):
        C = into(A, B, C)
    check(C)


def test_products_that_follow_each_other_see_each_others_results():
    """A chain in one program: each launch reads what the one before wrote."""

    @jax.jit
    def chain(A, B):
        step = lambda _, B: spmm(A, B, schedule=on_gpu()) * jnp.float32(0.25)
        return jax.lax.fori_loop(0, 5, step, B)

    assert CASE.shape[0] == CASE.shape[1]
    expected, dense = dense_operand(CASE, 32), CASE.dense()
    for _ in range(5):
        expected = dense @ expected * 0.25
    scale = np.abs(expected).max()
    np.testing.assert_allclose(chain(A, jnp.asarray(B)), expected, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool):
    require_gpu()
    sanitizer = shutil.which("compute-sanitizer") or pytest.skip("no compute-sanitizer")
    words = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    words = words[:4] if tool == "racecheck" else words
    # An allocation for each array: within a pool nothing is out of bounds.
    allocator = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    status, output = run(sanitizer, *words, *program("sample"), seconds=240, **allocator)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device")
    assert status == 0 and "programs are right" in output, output[-4000:]
