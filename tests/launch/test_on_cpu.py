"""The whole path, from `launch.lower` through XLA and the FFI shell to the driver, without a GPU.

JAX's CPU backend runs the custom call; a stand-in libcuda.so.1 gets the calls and computes. Each
scenario is a process of its own (on_cpu.py), because a process has one driver for good.
"""

import ctypes.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched_axpy import CUBIN

HERE = Path(__file__).parent


@pytest.fixture
def on_cpu(libraries, tmp_path):
    """Runs a scenario: (what it printed, the driver's calls)."""

    def run(scenario, *arguments, fail="", driver=True):
        log = tmp_path / f"{scenario}.log"
        log.write_text("")
        tests = str(HERE.parent)
        environment = dict(os.environ, SGAP_STANDIN_LOG=str(log), JAX_PLATFORMS="cpu")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (tests, *sys.path)))
        environment["LD_LIBRARY_PATH"] = str(libraries) if driver else str(tmp_path)
        if fail:
            environment["SGAP_STANDIN_FAIL"] = f"{fail}=719"
        command = [sys.executable, HERE / "on_cpu.py", libraries / "cpu_stream.so", scenario]
        done = subprocess.run(
            [str(part) for part in (*command, *arguments)],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), log.read_text().splitlines()

    return run


def only(calls, *names):
    """The calls of these functions, without addresses of buffers."""
    return [re.sub(r"\(0x\w+, ", "(y, ", c) for c in calls if c.partition("(")[0] in names]


def test_a_program_loads_once_and_zeroes_and_launches_each_time(on_cpu):
    printed, calls = on_cpu("twice")
    assert printed == ["[0. 3. 6. 9.] [0. 3. 6. 9.]"]
    assert calls[:3] == [
        "cuInit(0)",
        f"cuLibraryLoadData({CUBIN.hex()}, 0, 0)",  # every byte of it
        "cuLibraryGetKernel(axpy)",
    ]
    run = [
        "cuMemsetD8Async(y, 0, 16, 0x10)",
        "cuLaunchKernel(axpy, 1, 1, 1, 32, 1, 1, 0, 0x10, context 0xc0)",
    ]
    ready = ["cuKernelGetFunction(context 0xc0)"]  # at INITIALIZE, before anything is enqueued
    names = ("cuKernelGetFunction", "cuMemsetD8Async", "cuLaunchKernel")
    assert only(calls, *names) == ready + run + run


def test_without_scalars_and_zeroed_outputs_there_are_pointers_only(on_cpu):
    _, calls = on_cpu("bare")
    (launch,) = only(calls, "cuLaunchKernel")
    assert launch.count("; 0x") == 2 and only(calls, "cuMemsetD8Async") == []


def test_a_result_in_place_starts_as_its_operand(on_cpu):
    """y += 3 x where y is x; the caller's x is a copy."""
    printed, calls = on_cpu("in_place")
    assert printed == ["[ 0.  4.  8. 12.] [ 0.  4.  8. 12.] [0. 1. 2. 3.]"]
    assert only(calls, "cuMemsetD8Async") == []


def test_two_devices(on_cpu):
    printed, calls = on_cpu("two_devices")
    assert printed == [f"[0. 3. 6. 9.] {{CpuDevice(id={device})}}" for device in (0, 1, 0, 1)]
    contexts = [re.search(r"context (\w+)", c)[1] for c in only(calls, "cuLaunchKernel")]
    assert contexts == ["0xc0", "0xc1", "0xc0", "0xc1"]


def test_the_library_goes_with_the_last_of_its_executables(on_cpu):
    printed, calls = on_cpu("freed")
    assert printed == [
        "[0. 2. 4. 6.] [0. 3. 6. 9.]",
        "one freed 0",
        "[0. 3. 6. 9.]",
        "both freed 1",
    ]
    assert len(only(calls, "cuLibraryLoadData")) == len(only(calls, "cuLibraryUnload")) == 1


def test_a_cubin_that_does_not_load_fails_the_compilation(on_cpu):
    printed, _ = on_cpu("fails", fail="cuLibraryLoadData")
    (error,) = printed
    assert "sgap_launch: cuLibraryLoadData (axpy): CUDA_ERROR_LAUNCH_FAILED (719)" in error


@pytest.mark.parametrize("call", ["cuKernelGetFunction", "cuMemsetD8Async", "cuLaunchKernel"])
def test_a_failing_launch_fails_the_run(on_cpu, call):
    compiled, error = on_cpu("fails", fail=call)[0]
    assert compiled == "compiled"
    assert f"sgap_launch: {call} (axpy" in error and "CUDA_ERROR_LAUNCH_FAILED (719)" in error


def test_without_a_driver_a_program_compiles_and_does_not_run(on_cpu):
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has an NVIDIA driver")
    (compiled, error), calls = on_cpu("fails", driver=False)
    assert compiled == "compiled" and calls == []
    assert "sgap_launch: no NVIDIA driver: libcuda.so.1 does not load" in error


def test_attributes_that_no_launch_has(on_cpu):
    printed, calls = on_cpu("refused")
    expected = [
        "block: expected 1 to 1024 threads, got 2048 x 2048 x 2048",
        "grid: expected sizes in [0, 2147483647], got -1 x -1 x -1",
        "grid and block: expected three sizes each",
        "zero: expected positions of the 1 outputs, got 1",
        "shared_bytes: expected a size in [0, 2147483647], got -1",
        "kernel: expected a name, got nothing",
    ]
    assert [line.partition("sgap_launch: ")[2] for line in printed] == expected
    assert only(calls, "cuLaunchKernel") == []


def test_an_exported_program_runs_in_a_process_that_never_lowered_it(on_cpu, tmp_path):
    file = tmp_path / "exported"
    _, calls = on_cpu("export", file)
    assert calls == []
    printed, calls = on_cpu("load", file)
    assert printed == ["[0. 3. 6. 9.]"]
    assert only(calls, "cuLibraryLoadData") == [f"cuLibraryLoadData({CUBIN.hex()}, 0, 0)"]
