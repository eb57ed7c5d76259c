"""One scenario of launches on the CPU backend, with a driver and streams that stand in.

    python on_cpu.py <cpu_stream.so> <scenario> [file]

Says what came out on stdout; test_on_cpu.py starts it and reads the calls that the driver got.
"""

import ctypes
import gc
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax  # noqa: E402
import jax.export  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from launched_axpy import FakeCompiler, axpy_call, make_axpy  # noqa: E402

from sgap_jax.launch import launch  # noqa: E402
from sgap_jax.launch.cache import Cubin  # noqa: E402
from sgap_jax.runtime.native import native  # noqa: E402


def register_for_cpu(library):
    """As the package does for CUDA: before a backend is there, and no type beside the handlers."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    stages = native.cuda_targets()[launch.TARGET]
    lend = ctypes.CDLL(library)
    names = ("instantiate", "initialize", "execute")
    lend.lend_streams_to(*(ctypes.c_void_p(get(stages[name], None)) for name in names))
    handlers = {name: jax.ffi.pycapsule(getattr(lend, f"cpu_{name}")) for name in names}
    jax.ffi.register_ffi_target(launch.TARGET, handlers, platform="cpu")


def x_on(device):
    return jax.device_put(jnp.arange(4, dtype=jnp.float32), jax.devices()[device])


def twice():
    axpy = jax.jit(lambda x: make_axpy("cpu", FakeCompiler())(x, 3))
    print(axpy(x_on(0)), axpy(x_on(0)))


def bare():
    axpy = make_axpy("cpu", FakeCompiler(name="record_2"), scalars=(), zero=())
    jax.block_until_ready(axpy(x_on(0), 3))


def in_place():
    make = make_axpy("cpu", FakeCompiler(), zero=(), in_place=((0, 0),))
    axpy, x = jax.jit(lambda x: make(x, 3)), x_on(0)
    print(axpy(x), axpy(x), x)


def two_devices():
    axpy = make_axpy("cpu", FakeCompiler())
    for device in (0, 1, 0, 1):
        y = axpy(x_on(device), 3)
        print(y, y.devices())


def freed():
    axpy = make_axpy("cpu", FakeCompiler())
    first, second = jax.jit(lambda x: axpy(x, 2)), jax.jit(lambda x: axpy(x, 3))
    first, second = (f.lower(x_on(0)).compile() for f in (first, second))
    print(first(x_on(0)), second(x_on(0)))
    del first
    gc.collect()
    print("one freed", Path(os.environ["SGAP_STANDIN_LOG"]).read_text().count("Unload"))
    print(second(x_on(0)))
    del second
    gc.collect()
    print("both freed", Path(os.environ["SGAP_STANDIN_LOG"]).read_text().count("Unload"))


def fails():
    try:
        compiled = jax.jit(lambda x: make_axpy("cpu", FakeCompiler())(x, 3)).lower(x_on(0))
        compiled = compiled.compile()
        print("compiled")
        print(compiled(x_on(0)))
    except Exception as error:
        print("error:", error)


def refused():
    """Programs that `launch.lower` would not make."""
    call = launch.call_attributes(axpy_call(x_on(0), 3), Cubin("axpy", b"cubin"))
    three = np.array([1, 1, 1])
    out = jax.ShapeDtypeStruct((4,), jnp.float32)
    changes = [("block", 2048 * three), ("grid", -three), ("grid", three[:2]), ("zero", three)]
    for name, value in [*changes, ("shared_bytes", np.int64(-1)), ("kernel", "")]:
        try:
            print(jax.ffi.ffi_call(launch.TARGET, out)(x_on(0), **(call | {name: value})))
        except Exception as error:
            print("error:", error)


def export(file):
    axpy = jax.jit(lambda x: make_axpy("cpu", FakeCompiler())(x, 3))
    check = jax.export.DisabledSafetyCheck.custom_call(launch.TARGET)
    exported = jax.export.export(axpy, platforms=("cpu",), disabled_checks=[check])(x_on(0))
    Path(file).write_bytes(exported.serialize())


def load(file):
    print(jax.export.deserialize(bytearray(Path(file).read_bytes())).call(x_on(0)))


if __name__ == "__main__":
    register_for_cpu(sys.argv[1])
    globals()[sys.argv[2]](*sys.argv[3:])
