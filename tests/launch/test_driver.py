"""The driver through ctypes, against the stand-in: what it says of GPUs, and launches, which are
what the FFI handler would call."""

import numpy as np
import pytest
from launched_axpy import CUBIN

from benchmarks.gpu import timing
from sgap_jax.launch.cache import Cubin
from sgap_jax.launch.driver import Device, Driver, DriverError, NoDriver
from sgap_jax.launch.kernel_call import KernelCall


@pytest.fixture
def driver(libraries, standin):
    return Driver(str(libraries / "libcuda.so.1"))


def test_a_launch_loads_once_zeroes_and_passes_every_argument(driver, standin):
    call = KernelCall("source", "name", (5, 2), (64,), 1024, scalars=(7, -1), zero=(0,))
    launch = driver.kernel(call, Cubin("record_5", CUBIN))
    loaded = standin.calls()
    assert loaded[0] == f"cuLibraryLoadData({CUBIN.hex()}, 0, 0)"
    assert (
        loaded[1] == "cuLibraryGetKernel(record_5)" and loaded[3] == "cuFuncSetAttribute(8, 1024)"
    )
    out = np.ones(3, np.float32)
    for _ in range(2):
        launch(0x10, [0xA0, 0xB0], [(out.ctypes.data, out.nbytes)])
        zeroed, launched = standin.calls()
        assert zeroed == f"cuMemsetD8Async({out.ctypes.data:#x}, 0, 12, 0x10)" and not out.any()
        arguments = f"; 0xa0; 0xb0; {out.ctypes.data:#x}; 0x7; {2**64 - 1:#x}"
        head = "cuLaunchKernel(record_5, 5, 2, 1, 64, 1, 1, 1024, 0x10, context none"
        assert launched == head + arguments + ")"


def test_a_launch_computes(driver):
    call = KernelCall("source", "name", (1,), (32,), scalars=(4, 3), zero=(0,))
    x, y = np.arange(4, dtype=np.float32), np.full(4, np.nan, np.float32)
    launch = driver.kernel(call, Cubin("axpy", CUBIN))
    launch(0x10, [x.ctypes.data], [(y.ctypes.data, y.nbytes)])
    np.testing.assert_array_equal(y, 3 * x)


def test_an_error_of_the_driver_names_the_call(driver, monkeypatch):
    monkeypatch.setenv("SGAP_STANDIN_FAIL", "cuLaunchKernel=719")
    launch = driver.kernel(KernelCall("", "", (1,), (1,)), Cubin("record_0", CUBIN))
    words = (
        r"cuLaunchKernel: CUDA error 719 \(CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure\)"
    )
    with pytest.raises(DriverError, match=words):
        launch(0x10, [], [])
    monkeypatch.setenv("SGAP_STANDIN_FAIL", "cuInit=12345")  # one that the driver cannot name
    with pytest.raises(DriverError, match=r"cuInit: CUDA error 12345$"):
        driver.start()


def test_what_it_says_of_gpus(driver, monkeypatch):
    monkeypatch.setenv("SGAP_STANDIN_GPUS", "9.0,12.0")
    monkeypatch.setenv("SGAP_STANDIN_VERSION", "12080")
    driver.start()
    assert driver.version() == (12, 8)
    assert driver.devices() == [
        Device(0, "Stand-in GPU", "9.0", 8 << 30),
        Device(1, "Stand-in GPU", "12.0", 8 << 30),
    ]
    assert driver.free_bytes() == 4 << 30


def test_memory_goes_there_and_back(driver, standin):
    driver.enter(1)
    assert standin.calls()[-1] == "cuCtxSetCurrent(0xc1)"
    array, back = np.arange(6, dtype=np.float32), np.empty(6, np.float32)
    address = driver.allocate(array.nbytes)
    driver.write(address, array)
    driver.wait()
    driver.read(address, back)
    np.testing.assert_array_equal(back, array)
    driver.release(address)


def test_the_attributes_of_a_kernel(driver):
    found = driver.attributes(driver.load(Cubin("record_0", CUBIN)))
    assert found == {"registers": 40, "local_bytes": 0, "shared_bytes": 0, "binary_version": 90}


def test_no_driver_and_one_that_lacks_a_function(libraries, tmp_path):
    with pytest.raises(NoDriver, match=r"libcuda.so.1 does not load \("):
        Driver(str(tmp_path / "libcuda.so.1"))
    with pytest.raises(NoDriver, match="the driver has no cuInit"):
        Driver(str(libraries / "cpu_stream.so")).start()


@pytest.fixture
def without_torch(libraries, standin):
    return timing.WithoutTorch(str(libraries / "libcuda.so.1"))


def axpy(device):
    """(enqueue, y): y = 3 x by one launch, on a device of the benchmarks."""
    call = KernelCall("source", "name", (1,), (32,), scalars=(4, 3), zero=(0,))
    x, y = device.put(np.arange(4, dtype=np.float32)), device.poisoned((4,), "float32")
    assert np.isnan(device.get(y)).all()
    launch = device.kernel(call, Cubin("axpy", CUBIN))
    return lambda i: launch([x], [y]), y


def test_benchmarks_measure_without_torch(without_torch, standin):
    """Launches are captured into a graph, whose replays are timed; the stand-in's events are 1 ms
    apart."""
    enqueue, y = axpy(without_torch)
    standin.calls()
    timed = without_torch.measure(enqueue, 2)
    np.testing.assert_array_equal(without_torch.get(y), [0, 3, 6, 9])
    assert timed.method == "graph" and timed.seconds == pytest.approx(0.5e-3)
    calls = [line.partition("(")[0] for line in standin.calls()]
    assert calls.count("cuGraphLaunch") == 1 + timing.ROUNDS
    captured = calls[calls.index("cuStreamBeginCapture") : calls.index("cuStreamEndCapture")]
    assert captured.count("cuLaunchKernel") == 2
    assert without_torch.bandwidth(1 << 20) == pytest.approx(2 * (1 << 20) / 1e-3)
    with pytest.raises(ImportError, match="no torch here"):
        without_torch.tensor(np.zeros(1))


def test_a_capture_that_fails_is_timed_by_events(without_torch, monkeypatch):
    enqueue, _ = axpy(without_torch)
    monkeypatch.setenv("SGAP_STANDIN_FAIL", "cuStreamBeginCapture=900")
    assert without_torch.measure(enqueue, 2).method == "events"


def test_a_lost_device_is_noticed(without_torch, monkeypatch):
    without_torch.check()
    assert without_torch.lost == ""
    monkeypatch.setenv("SGAP_STANDIN_FAIL", "cuCtxSynchronize=719")
    without_torch.check()
    assert "CUDA_ERROR_LAUNCH_FAILED" in without_torch.lost
