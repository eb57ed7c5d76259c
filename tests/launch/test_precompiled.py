"""The kernels that a wheel carries: found without a compiler, passed over where they do not fit."""

import itertools
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cuda_sources import require_nvrtc
from launched_axpy import CUBIN, FakeCompiler

from sgap_jax import Problem, Schedule, choose_schedule
from sgap_jax.launch import launch, precompiled
from sgap_jax.launch.cache import Cubin, CubinCache, decode_entry
from sgap_jax.launch.defaults import (
    DTYPES,
    EDGE_COLUMNS,
    LAUNCH_PLANS,
    OF_EDGES,
    default_calls,
)
from sgap_jax.launch.kernel_call import KernelCall, header_folder, included_headers
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.schedules.problem import TILED

ROOT = Path(__file__).parents[2]
SOURCE = '#include "spmm.cuh"\n'
CALL = KernelCall(SOURCE, "kernel", (1,), (1,))
KEPT = Cubin("kernel", b"packaged" + bytes(range(256)))


class NoCompiler:
    """NVRTC that is not installed."""

    def version(self):
        raise ImportError("no NVRTC")

    compile = version


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of a package whose wheel has CALL for sm_80 and sm_90, made by CUDA 12.9."""
    monkeypatch.setattr(precompiled, "package_folder", lambda: tmp_path)
    monkeypatch.setattr(precompiled, "driver_major", lambda: None)
    headers = included_headers(SOURCE, header_folder())
    for arch in ("sm_80", "sm_90"):
        kept = Cubin(KEPT.kernel, KEPT.code + arch.encode())
        precompiled.write(tmp_path, arch, "12.9", {precompiled.key(CALL, headers): kept})
    precompiled._find.cache_clear()
    yield tmp_path
    precompiled._find.cache_clear()


def compiled(arch, call=CALL, compiler=None):
    return launch.compile_call(call, compiler or NoCompiler(), arch, CubinCache(None)).code


def test_no_compiler_is_asked_for_what_the_package_has(package):
    assert compiled("sm_80") == KEPT.code + b"sm_80"
    assert compiled("sm_90") == KEPT.code + b"sm_90"


@pytest.mark.parametrize("arch", ["sm_75", "sm_87", "sm_90a", "sm_100", "sm_120"])
def test_other_architectures_are_compiled_for(package, arch):
    with pytest.raises(ImportError):
        compiled(arch)
    assert compiled(arch, compiler=FakeCompiler()) == CUBIN


@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_later_minor_versions_run_the_code_of_earlier_ones(package, arch):
    assert compiled(arch) == KEPT.code + b"sm_80"


def test_other_sources_and_headers_are_compiled(package, monkeypatch):
    for call in (
        KernelCall("another", "kernel", (1,), (1,)),
        KernelCall(SOURCE, "another", (1,), (1,)),
    ):
        assert compiled("sm_90", call, FakeCompiler()) == CUBIN
    changed = package / "headers"
    changed.mkdir()
    (changed / "spmm.cuh").write_text("changed")
    monkeypatch.setattr(launch, "header_folder", lambda: changed)
    assert compiled("sm_90", compiler=FakeCompiler()) == CUBIN


@pytest.mark.parametrize(("driver", "served"), [(11, False), (12, True), (13, True), (None, True)])
def test_an_older_driver_does_not_get_code_of_a_newer_compiler(
    package, monkeypatch, driver, served
):
    monkeypatch.setattr(precompiled, "driver_major", lambda: driver)
    assert (compiled("sm_90", compiler=FakeCompiler()) != CUBIN) == served


def test_any_damage_leads_to_the_compiler_or_does_not_matter(package):
    path = package / "sm_90.zip"
    whole = path.read_bytes()
    flipped = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in range(len(whole))]
    outcomes = set()
    for data in [*flipped, b"", whole[: len(whole) // 2], whole[:-1]]:
        path.write_bytes(data)
        precompiled._find.cache_clear()
        outcomes.add(compiled("sm_90", compiler=FakeCompiler()))
    assert outcomes == {CUBIN, KEPT.code + b"sm_90"}  # a flipped date harms nothing


def test_the_same_kernels_make_the_same_file(package, tmp_path):
    entries = {str(i): Cubin(f"kernel{i}", bytes([i]) * 100) for i in range(3)}
    first = precompiled.write(tmp_path / "a", "sm_90", "13.0", entries)
    second = precompiled.write(tmp_path / "b", "sm_90", "13.0", dict(reversed(entries.items())))
    assert first.read_bytes() == second.read_bytes()


def test_a_checkout_has_none():
    assert not list(precompiled.package_folder().glob("*.zip"))


@pytest.mark.parametrize("name", LAUNCH_PLANS)
def test_the_default_points_of_other_problems_are_among_the_calls(name):
    (op, plan), calls = LAUNCH_PLANS[name], default_calls(name)
    widths = (1, 2, 3, 7, 30, 64, 100, 255, 300, 1000, 4097) if op in (*TILED, "sddmm") else (1,)
    widths = EDGE_COLUMNS if name in OF_EDGES else widths
    lengths = (0, 0.3, 1, 3, 5, 12, 100, 1000)
    for n, length, dtype in itertools.product(widths, lengths, DTYPES):
        nnz = int(1000 * length)
        problem = Problem(op, (1000, 900), nnz, n, 1, dtype, platform="cuda")
        assert plan(problem, choose_schedule(problem)).source in calls


def test_a_call_that_is_no_default_is_not_among_them():
    problem = Problem("spmm", (100, 100), 1000, n=128, platform="cuda")
    call = launch_plan(problem, Schedule.parse("{<1 nnz, 2 col>, 16}"))
    assert call.source not in default_calls("spmm")


def test_the_build_enumerates_without_jax_and_without_the_native_library(tmp_path):
    require_nvrtc()
    program = f"""if True:
        import runpy, sys
        sys.modules["jax"] = sys.modules["numpy"] = None  # as if they were not installed
        class Elsewhere:  # the finder of an editable install of another checkout
            def find_spec(self, name, path=None, target=None):
                assert not name.startswith("sgap_jax"), name
        sys.meta_path.insert(0, Elsewhere())
        sys.argv = ["precompile.py", {str(tmp_path)!r}, "--check"]
        runpy.run_path({str(ROOT / "cmake" / "precompile.py")!r}, run_name="__main__")
        from sgap_jax.launch.defaults import default_calls
        assert len(default_calls("spmm")) > 50
        assert "sgap_jax._native" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == require_nvrtc()


def test_the_build_compiles_for_one_gpu_where_that_is_named(tmp_path):
    version, script = require_nvrtc(), ROOT / "cmake" / "precompile.py"
    command = [sys.executable, script, tmp_path, "row_sum", "--for", "sm_89"]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path) as archive:
        assert (path.name, archive.comment.decode()) == ("sm_80.zip", version)
        found = {name: decode_entry(archive.read(name)) for name in archive.namelist()}
    calls = default_calls("row_sum").values()
    assert set(found) == {
        precompiled.key(call, included_headers(call.source, header_folder())) for call in calls
    }
    assert all("RowReduce" in cubin.kernel for cubin in found.values())
