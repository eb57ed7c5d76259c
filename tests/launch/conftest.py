"""Compiles the launch core and a fake driver, for tests without a GPU."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def compile_library(out, *sources):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [*compiler.split(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared"]
    command += ["-fPIC", f"-I{ROOT}", "-isystem", jax.ffi.include_dir(), "-o", out, *sources]
    done = subprocess.run(
        [str(part) for part in (*command, "-ldl")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """A folder with libcuda.so.1 (the fake driver), core.so and cpu_stream.so."""
    folder = tmp_path_factory.mktemp("launch")
    compile_library(folder / "libcuda.so.1", HERE / "standin_driver.cc")
    sources = ROOT / "cuda" / "launch"
    core = [HERE / "core_api.cc", sources / "launch_core.cc", sources / "driver.cc"]
    compile_library(folder / "core.so", *core)
    compile_library(folder / "cpu_stream.so", HERE / "cpu_stream.cc")
    return folder


@pytest.fixture(scope="session")
def core_library(libraries):
    core = ctypes.CDLL(str(libraries / "core.so"))
    core.core_new.restype = ctypes.c_void_p
    for name in ("open", "check", "load", "prepare", "launch"):
        getattr(core, f"core_{name}").restype = ctypes.c_char_p
    return core


class Standin:
    """The fake driver: the calls that it received, and the calls that it shall refuse."""

    def __init__(self, log, library, monkeypatch):
        self._log, self._library, self._monkeypatch = log, library, monkeypatch
        monkeypatch.setenv("SGAP_STANDIN_LOG", str(log))

    def calls(self):
        """The calls logged since the last time."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.write_text("")
        return lines

    def fail(self, call, error=719):
        self._monkeypatch.setenv("SGAP_STANDIN_FAIL", f"{call}={error}")

    def mend(self):
        self._monkeypatch.delenv("SGAP_STANDIN_FAIL")

    def make_current(self, context):
        self._library.standin_set_current(ctypes.c_void_p(context))


@pytest.fixture
def standin(libraries, core_library, tmp_path, monkeypatch):
    """The fake driver, opened as the core's driver, with no current context and an empty log."""
    path = str(libraries / "libcuda.so.1")
    standin = Standin(tmp_path / "calls", ctypes.CDLL(path), monkeypatch)
    assert core_library.core_open(path.encode()) == b""
    standin.make_current(None)
    assert standin.calls() == ["cuInit(0)"]
    return standin


class Kernel:
    """A LaunchKernel of the core; methods return the error message, empty on success."""

    def __init__(
        self, core, name="record_0", *, cubin="cubin", grid=(1, 1, 1), block=(32, 1, 1), shared=0,
        scalars=(), zero=(),
    ):  # fmt: skip
        def int64s(values):
            return (ctypes.c_int64 * len(values))(*values)

        self._core = core
        self._pointer = ctypes.c_void_p(
            core.core_new(
                cubin.encode(), name.encode(), int64s((*grid, *block, shared)),
                int64s(scalars), len(scalars), int64s(zero), len(zero),
            )
        )  # fmt: skip

    def check(self):
        return self._core.core_check(self._pointer).decode()

    def load(self):
        return self._core.core_load(self._pointer).decode()

    def prepare(self, stream):
        return self._core.core_prepare(self._pointer, ctypes.c_void_p(stream)).decode()

    def launch(self, stream, inputs=(), outputs=()):
        """Launches; inputs are addresses, outputs are (address, bytes)."""

        def pointers(values):
            return (ctypes.c_void_p * len(values))(*values)

        sizes = (ctypes.c_size_t * len(outputs))(*(size for _, size in outputs))
        return self._core.core_launch(
            self._pointer, ctypes.c_void_p(stream), pointers(inputs), len(inputs),
            pointers([address for address, _ in outputs]), sizes, len(outputs),
        ).decode()  # fmt: skip

    def delete(self):
        self._core.core_delete(self._pointer)


@pytest.fixture
def make_kernel(core_library):
    kernels = []

    def make(*args, **keywords):
        kernels.append(Kernel(core_library, *args, **keywords))
        return kernels[-1]

    yield make
    for kernel in kernels:
        if kernel._pointer:
            kernel.delete()
