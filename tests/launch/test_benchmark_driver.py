"""Launches of the GPU benchmarks, against the stand-in driver: what the FFI handler would call."""

import numpy as np
import pytest
from launched_axpy import CUBIN

from benchmarks.gpu.driver import Driver
from sgap_jax.launch.cache import Cubin
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
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA error 719"):
        launch(0x10, [], [])
