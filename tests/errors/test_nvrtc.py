"""NVRTC that is missing, and source that does not compile: what the messages say."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda_sources import require_nvrtc

from sgap_jax.launch import nvrtc

KERNEL = 'extern "C" __global__ void {}(int* p) {{ *p = 1; }}\n'


def test_missing_nvrtc_names_the_extra(monkeypatch):
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["libnvrtc_that_is_not_there.so"]))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"pip install 'sgap_jax\[cuda13\]'") as caught:
            nvrtc.compile(KERNEL.format("k"), arch="sm_90")
        assert "libnvrtc_that_is_not_there.so" in str(caught.value)  # what was tried, and why not
    finally:
        nvrtc._library.cache_clear()


def test_a_library_that_does_not_load_is_passed_over(monkeypatch, tmp_path):
    require_nvrtc()
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"not a library")
    good = list(nvrtc._candidates())
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter([str(broken), *good]))
    nvrtc._library.cache_clear()
    try:
        assert nvrtc.compile(KERNEL.format("k"), arch="sm_90").name == "k"
    finally:
        nvrtc._library.cache_clear()


@pytest.mark.parametrize(("driver", "first"), [(12, "cuda_nvrtc"), (13, "cu13"), (None, "cu13")])
def test_a_compiler_newer_than_the_driver_comes_last(driver, first, monkeypatch, tmp_path):
    for folder in ("cuda_nvrtc", "cu13"):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / "libnvrtc.so.1").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(nvrtc, "driver_major", lambda: driver)
    found = [Path(path).parts[-3] for path in nvrtc._candidates() if str(tmp_path) in path]
    assert found[0] == first and len(found) == 2


def test_a_compile_error_carries_the_log():
    require_nvrtc()
    with pytest.raises(nvrtc.CompilationError, match='identifier "undeclared" is undefined'):
        nvrtc.compile('extern "C" __global__ void k(int* p) { *p = undeclared; }', arch="sm_90")


def test_an_unknown_architecture_and_a_missing_header():
    require_nvrtc()
    with pytest.raises(nvrtc.CompilationError, match="and later, not for sm_10; the NVRTC"):
        nvrtc.compile(KERNEL.format("k"), arch="sm_10")
    with pytest.raises(nvrtc.CompilationError, match="no_such.cuh"):
        nvrtc.compile('#include "no_such.cuh"\n', arch="sm_90")


def test_a_gpu_newer_than_the_compiler_gets_ptx():
    require_nvrtc()
    newest = max(nvrtc.architectures())
    compiled = nvrtc.compile(KERNEL.format("k"), arch=f"sm_{newest + 10}")
    assert compiled.name == "k" and f".target sm_{newest}\n".encode() in compiled.cubin
    assert compiled.cubin.endswith(b"\0")  # the driver reads PTX as a C string
    for arch in (f"sm_{newest}", "sm_90a"):
        assert nvrtc.compile(KERNEL.format("k"), arch=arch).cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90a"),
        ("sm_103", "compute_100"),
        ("sm_130", "compute_100"),
        ("sm_130a", "compute_100"),
        ("compute_90", "compute_90"),
        ("compute_103", "compute_100"),
    ],
)
def test_what_is_compiled_for_an_architecture(arch, target):
    assert nvrtc.target_of(arch, (75, 80, 90, 100)) == target


@pytest.mark.parametrize("names", [[], ["one", "two"]])
def test_a_unit_has_one_kernel(names):
    require_nvrtc()
    source = "".join(map(KERNEL.format, names))
    with pytest.raises(nvrtc.CompilationError, match=f"one kernel, got {len(names)}"):
        nvrtc.compile(source, arch="sm_90")


def test_version_and_ptx():
    major, minor = map(int, require_nvrtc().split("."))
    assert major >= 12 and minor >= 0
    text = nvrtc.ptx(KERNEL.format("k"), "compute_90")
    assert ".entry k(" in text and ".target sm_90" in text and "\0" not in text
    assert isinstance(nvrtc._library(), ctypes.CDLL)
