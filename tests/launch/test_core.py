"""The launch core against a stand-in driver: what it calls, in which order, with what."""

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
DEVICE_0, DEVICE_1 = 0x10, 0x11  # streams; their contexts are 0xc0 and 0xc1

LOAD = ["cuLibraryLoadData(cubin, 0, 0)", "cuLibraryGetKernel(record_0)"]
ENTER = ["cuStreamGetCtx(0x10)", "cuCtxGetCurrent()", "cuCtxPushCurrent(0xc0)"]
READ = [f"cuFuncGetAttribute({attribute}, record_0)" for attribute in (4, 3, 6)]
FUNCTION = ["cuKernelGetFunction(context 0xc0)", *READ]
LAUNCH = ["cuLaunchKernel(record_0, 1, 1, 1, 32, 1, 1, 0, 0x10, context 0xc0)"]
LEAVE = ["cuCtxPopCurrent()"]


def test_first_launch_loads_and_later_ones_only_launch(standin, make_kernel):
    kernel = make_kernel()
    assert kernel.launch(DEVICE_0) == ""
    assert standin.calls() == ENTER + LOAD + FUNCTION + LAUNCH + LEAVE
    assert kernel.launch(DEVICE_0) == ""
    assert standin.calls() == ENTER + LAUNCH + LEAVE


def test_what_is_loaded_and_prepared_is_not_done_again(standin, make_kernel):
    kernel = make_kernel()
    assert kernel.load() == ""
    assert standin.calls() == LOAD  # of all contexts: none is looked at
    assert kernel.prepare(DEVICE_0) == ""
    assert standin.calls() == ENTER + FUNCTION + LEAVE
    assert kernel.load() == kernel.prepare(DEVICE_0) == ""
    assert standin.calls() == ENTER + LEAVE
    assert kernel.launch(DEVICE_0) == ""
    assert standin.calls() == ENTER + LAUNCH + LEAVE


def test_a_current_context_is_left_alone(standin, make_kernel):
    kernel = make_kernel()
    kernel.prepare(DEVICE_0)
    standin.calls()
    standin.make_current(0xC0)
    assert kernel.launch(DEVICE_0) == ""
    assert standin.calls() == ENTER[:2] + LAUNCH


def test_another_current_context_is_restored(standin, make_kernel):
    kernel = make_kernel()
    standin.make_current(0xC1)
    assert kernel.launch(DEVICE_0) == ""
    standin.calls()
    assert kernel.launch(DEVICE_1) == ""
    calls = standin.calls()
    assert "cuCtxPushCurrent(0xc1)" not in calls  # 0xc1 is current again


def test_arguments_are_inputs_outputs_scalars(standin, make_kernel):
    kernel = make_kernel("record_6", grid=(5, 4, 3), block=(64, 2, 4), scalars=(7, -1, 2**40))
    outputs = [(0xA000, 16), (0xB000, 0)]
    assert kernel.launch(DEVICE_0, inputs=[0x9000], outputs=outputs) == ""
    (launch,) = [line for line in standin.calls() if line.startswith("cuLaunchKernel")]
    head, *arguments = launch.rstrip(")").split("; ")
    assert head == "cuLaunchKernel(record_6, 5, 4, 3, 64, 2, 4, 0, 0x10, context 0xc0"
    assert [int(a, 16) for a in arguments] == [0x9000, 0xA000, 0xB000, 7, 2**64 - 1, 2**40]


def test_outputs_named_are_zeroed_before_the_launch_and_no_others(standin, make_kernel):
    arrays = [np.ones(n, np.float32) for n in (4, 6, 0, 2)]
    outputs = [(a.ctypes.data, a.nbytes) for a in arrays]
    kernel = make_kernel(zero=(1, 2, 3))
    assert kernel.launch(DEVICE_0, outputs=outputs) == ""
    calls = [line for line in standin.calls() if line.startswith(("cuMemset", "cuLaunch"))]
    assert calls == [  # nothing to zero in the one without elements
        f"cuMemsetD8Async({arrays[1].ctypes.data:#x}, 0, 24, 0x10)",
        f"cuMemsetD8Async({arrays[3].ctypes.data:#x}, 0, 8, 0x10)",
        *LAUNCH,
    ]
    assert arrays[0].all() and not arrays[1].any() and not arrays[3].any()


def test_the_kernel_runs_on_the_operands(standin, make_kernel):
    x, y = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    kernel = make_kernel("axpy", scalars=(8, 3), zero=(0,))
    assert kernel.launch(DEVICE_0, [x.ctypes.data], [(y.ctypes.data, y.nbytes)]) == ""
    np.testing.assert_array_equal(y, 3 * x)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_grid_without_blocks_zeroes_and_launches_nothing(standin, make_kernel, grid):
    y = np.ones(4, np.float32)
    kernel = make_kernel(grid=grid, zero=(0,))
    assert kernel.check() == ""
    assert kernel.launch(DEVICE_0, outputs=[(y.ctypes.data, y.nbytes)]) == ""
    assert not y.any()
    assert not any(line.startswith("cuLaunchKernel") for line in standin.calls())


def test_shared_memory_is_asked_for_once_per_device(standin, make_kernel):
    kernel = make_kernel(shared=100_000)
    assert kernel.launch(DEVICE_0) == ""
    ask = ["cuFuncSetAttribute(8, 100000)"]
    launch = ["cuLaunchKernel(record_0, 1, 1, 1, 32, 1, 1, 100000, 0x10, context 0xc0)"]
    assert standin.calls() == ENTER + LOAD + FUNCTION + ask + launch + LEAVE
    assert kernel.launch(DEVICE_0) == ""
    assert standin.calls() == ENTER + launch + LEAVE


def test_two_devices_share_the_library_and_have_their_own_function(standin, make_kernel):
    kernel = make_kernel()
    for _ in range(2):
        assert kernel.launch(DEVICE_0) == kernel.launch(DEVICE_1) == ""
    calls = standin.calls()
    assert calls.count(LOAD[0]) == calls.count(LOAD[1]) == 1
    assert [line for line in calls if line.startswith("cuKernelGetFunction")] == [
        "cuKernelGetFunction(context 0xc0)",
        "cuKernelGetFunction(context 0xc1)",
    ]
    launched = [line.split(", ")[-2:] for line in calls if line.startswith("cuLaunchKernel")]
    assert launched == [["0x10", "context 0xc0)"], ["0x11", "context 0xc1)"]] * 2


def test_threads_of_two_devices_load_once(standin, make_kernel):
    kernel, errors = make_kernel(), []

    def run(stream):
        errors.extend(kernel.launch(stream) for _ in range(50))

    threads = [threading.Thread(target=run, args=(s,)) for s in (DEVICE_0, DEVICE_1) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = standin.calls()
    assert set(errors) == {""}
    assert calls.count(LOAD[0]) == 1
    assert sum(line.startswith("cuKernelGetFunction") for line in calls) == 2
    assert sum(line.startswith("cuLaunchKernel") for line in calls) == 200
    assert sum(line.endswith(", 0x11, context 0xc1)") for line in calls) == 100


def test_the_library_is_kept_until_the_kernel_goes_and_unloaded_then(standin, make_kernel):
    kernel, unused = make_kernel(), make_kernel()
    kernel.launch(DEVICE_0)
    kernel.launch(DEVICE_1)
    assert "cuLibraryUnload()" not in standin.calls()
    kernel.delete()
    kernel._pointer = None
    assert standin.calls() == ["cuLibraryUnload()"]
    unused.delete()
    unused._pointer = None
    assert standin.calls() == []


def test_kernels_of_one_cubin_share_its_library(standin, make_kernel):
    kernels = [make_kernel() for _ in range(3)] + [make_kernel("record_1")]
    for kernel, inputs in zip(kernels, [[], [], [], [0x10]], strict=True):
        assert kernel.launch(DEVICE_0, inputs) == ""
    calls = standin.calls()
    assert calls.count(LOAD[0]) == 1 and calls.count(LOAD[1]) == 3
    for kernel in kernels:
        assert "cuLibraryUnload()" not in standin.calls()
        kernel.delete()
        kernel._pointer = None
    assert standin.calls() == ["cuLibraryUnload()"]
    other = make_kernel(cubin="another")
    assert other.load() == make_kernel().load() == ""
    assert sum(line.startswith("cuLibraryLoadData") for line in standin.calls()) == 2


FAILURES = {
    "cuStreamGetCtx": "cuStreamGetCtx: ",
    "cuCtxGetCurrent": "cuCtxGetCurrent: ",
    "cuCtxPushCurrent": "cuCtxPushCurrent: ",
    "cuLibraryLoadData": "cuLibraryLoadData (record_0): ",
    "cuLibraryGetKernel": "cuLibraryGetKernel (record_0): ",
    "cuKernelGetFunction": "cuKernelGetFunction (record_0): ",
    "cuFuncGetAttribute": "cuFuncGetAttribute (record_0): ",
    "cuFuncSetAttribute": "cuFuncSetAttribute (record_0, 64 bytes of shared memory): ",
    "cuMemsetD8Async": "cuMemsetD8Async (record_0, output 0 of 16 bytes): ",
    "cuLaunchKernel": "cuLaunchKernel (record_0, grid 1 x 1 x 1, block 32 x 1 x 1, 64 bytes of "
    "shared memory, 40 registers and 0 local bytes a thread, code for sm_90): ",
}


@pytest.mark.parametrize("call", FAILURES)
def test_a_failing_call_is_named_and_ends_the_launch(standin, make_kernel, call):
    y = np.ones(4, np.float32)
    kernel = make_kernel(shared=64, zero=(0,))
    arguments = (DEVICE_0, [], [(y.ctypes.data, y.nbytes)])
    standin.fail(call)
    failure = "CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure"
    assert kernel.launch(*arguments) == FAILURES[call] + failure
    calls = standin.calls()
    *_, last = [line for line in calls if not line.startswith(("cuCtxPop", "cuLibraryUnload"))]
    assert last.startswith(call + "(")
    assert calls.count("cuCtxPopCurrent()") == calls.count("cuCtxPushCurrent(0xc0)") - (
        call == "cuCtxPushCurrent"
    )
    # A library without its kernel is not kept.
    assert ("cuLibraryUnload()" in calls) == (call == "cuLibraryGetKernel")
    standin.mend()
    assert kernel.launch(*arguments) == ""  # nothing half done is left behind
    assert not y.any()


def test_an_error_that_the_driver_cannot_name_keeps_its_number(standin, make_kernel):
    standin.fail("cuLaunchKernel", 12345)
    assert make_kernel().launch(DEVICE_0).endswith("code for sm_90): CUDA error (12345)")


@pytest.mark.parametrize("position", [-1, 1])
def test_an_output_to_zero_that_is_not_there(standin, make_kernel, position):
    error = make_kernel(zero=(position,)).launch(DEVICE_0, outputs=[(0xA000, 0)])
    assert error == f"zero: expected positions of the 1 outputs, got {position}"
    assert not any(line.startswith("cuLaunchKernel") for line in standin.calls())


@pytest.mark.parametrize(
    "plan, message",
    [
        (dict(cubin=""), "cubin: expected"),
        (dict(name=""), "kernel: expected a name"),
        (dict(grid=(-1, 1, 1)), "grid: expected sizes in"),
        (dict(grid=(1, 2**31, 1)), "got 1 x 2147483648 x 1"),
        (dict(block=(0, 1, 1)), "block: expected 1 to 1024 threads"),
        (dict(block=(32, 32, 2)), "got 32 x 32 x 2"),
        (dict(block=(2**62, 4, 1)), "block: expected 1 to 1024 threads"),
        (dict(shared=-1), "shared_bytes: expected"),
        (dict(shared=2**31), "shared_bytes: expected"),
    ],
)
def test_sizes_that_no_launch_has(make_kernel, plan, message):
    assert message in make_kernel(**plan).check()


def test_sizes_at_the_limits(make_kernel):
    kernel = make_kernel(grid=(2**31 - 1, 65535, 65535), block=(32, 32, 1), shared=2**31 - 1)
    assert kernel.check() == ""


def test_no_driver(core_library, tmp_path):
    missing = str(tmp_path / "libcuda.so.1").encode()
    error = core_library.core_open(missing).decode()
    assert error.startswith(f"no NVIDIA driver: {missing.decode()} does not load (")
    assert "cannot open shared object file" in error


def test_a_driver_that_is_too_old(core_library, libraries):
    error = core_library.core_open(str(libraries / "cpu_stream.so").encode()).decode()
    assert error.endswith("has no cuInit: a driver of CUDA 12.0 (525) or later is needed")


def test_a_driver_that_does_not_start(core_library, standin, libraries):
    standin.fail("cuInit")
    error = core_library.core_open(str(libraries / "libcuda.so.1").encode()).decode()
    assert error == "cuInit: CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure"


def test_the_table_of_the_driver_is_that_of_cuda_h():
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += sorted(Path("/usr/local").glob("cuda*"))
    headers = [root / "include" for root in roots if (root / "include" / "cuda.h").exists()]
    if not headers:
        pytest.skip("no cuda.h on this machine")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{HERE.parents[1]}", "-isystem"]
    command += [headers[0], HERE / "driver_types.cc"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
