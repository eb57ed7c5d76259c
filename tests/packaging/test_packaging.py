"""The package as strangers receive it: sdist, wheel built from that sdist, a clean environment.

`python -m build` and pip use the ordinary package index (for the build requirements and for jax).
"""

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from cuda_sources import require_nvrtc

from sgap_jax.launch import nvrtc
from sgap_jax.launch.precompiled import ARCHITECTURES

ROOT = Path(__file__).parents[2]
# One worker only: the fixtures build a wheel once, which takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging"), pytest.mark.tier("all")]


def run(*command, check=True, **keywords):
    """Run outside the checkout's influence: no PYTHONPATH, no folder that has an sgap_jax in it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    environment |= keywords.pop("env", {})
    result = subprocess.run(
        [str(part) for part in command], env=environment, capture_output=True, text=True, **keywords
    )
    if check:
        output = f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
        assert result.returncode == 0, f"{command}\n{output}"
    return result


@pytest.fixture(scope="session")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def toolkit(tmp_path_factory):
    """A CUDA_HOME with our NVRTC, for a build that sees no package of ours; None without NVRTC."""
    try:
        nvrtc.version()
    except nvrtc.NvrtcMissing:
        return None
    home = tmp_path_factory.mktemp("toolkit")
    # Next to each other: NVRTC and the library that it loads by itself.
    (home / "lib64").symlink_to(Path(nvrtc._library()._name).resolve().parent)
    return home


@pytest.fixture(scope="session")
def distributions(tmp_path_factory, toolkit):
    """(sdist, wheel), the wheel built from the sdist's content and not from the checkout.

    With the precompiled kernels of one operation, where there is NVRTC, and slow CPU kernels of one
    instruction set and slow handlers, which compile in less time: the environment of the tests was
    built with all.
    """
    out = tmp_path_factory.mktemp("dist")
    settings = {"SGAP_CUBINS": "ON" if toolkit else "OFF", "SGAP_CUBINS_OPS": "row_sum"}
    settings |= {"SGAP_OPTIMIZATION": "-O0", "SGAP_ONLY_ISA": "baseline"}
    words = [f"-Ccmake.define.{name}={value}" for name, value in settings.items()]
    environment = {"CUDA_HOME": str(toolkit)} if toolkit else {}
    run(sys.executable, "-m", "build", *words, "--outdir", out, ROOT, cwd=out, env=environment)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="session")
def clean_python(distributions, tmp_path_factory):
    """The interpreter of a new virtual environment that holds the wheel and what it asks for."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home / "venv", with_pip=True)
    python = home / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", distributions[1], cwd=home)
    return python


def test_sdist_holds_what_a_build_needs_and_no_build_products(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"} <= names
    folders = {name.split("/")[0] for name in names}
    sources = {"sgap_jax", "cpu", "cuda", "cmake"}
    assert sources <= folders
    files = {path for folder in sources for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    own = {
        path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".so", ".pyc")
    }
    assert len(own) > 300 and own <= names
    assert not folders & {".venv", "build", ".git"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_wheel_holds_the_package_and_nothing_else(distributions):
    names = zipfile.ZipFile(distributions[1]).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sgap_jax"}
    assert sum(name.startswith("sgap_jax/_native") and name.endswith(".so") for name in names) == 1
    assert [n for n in names if n.endswith("licenses/LICENSE")]
    assert not [n for n in names if n.endswith((".cc", ".h", ".pyc"))]


def test_wheel_has_the_default_kernels(distributions):
    require_nvrtc()
    archive = zipfile.ZipFile(distributions[1])
    cubins = [info for info in archive.infolist() if info.filename.startswith("sgap_jax/cubins/")]
    found = {info.filename.rpartition("/")[2] for info in cubins}
    assert found == {f"{arch}.zip" for arch in ARCHITECTURES}
    assert 1 << 15 < sum(info.compress_size for info in cubins) < 1 << 19  # those of row_sum


def test_default_kernels_of_the_wheel_need_no_compiler(clean_python, tmp_path):
    require_nvrtc()
    code = """
import jax, numpy as np
from sgap_jax import Schedule, SparseArray, row_sum
from sgap_jax.launch import nvrtc
nvrtc._candidates = lambda: iter(())
A = SparseArray.from_dense(np.eye(50, dtype=np.float32))
def lowered(schedule=None):
    sums = jax.jit(lambda A: row_sum(A, schedule=schedule))
    return sums.trace(A).lower(lowering_platforms=("cuda",)).as_text()
assert "custom_call @sgap_launch_v1" in lowered()
try:
    lowered(Schedule.parse("{<3 row, 1 col>, 1}"))
except ImportError as error:
    print(error)
"""
    environment = {"SGAP_CUDA_ARCH": "sm_86", "SGAP_CACHE_DIR": "", "JAX_PLATFORMS": "cpu"}
    assert "NVRTC" in run(clean_python, "-c", code, cwd=tmp_path, env=environment).stdout


@pytest.mark.parametrize("wanted", ["AUTO", "ON"])
def test_a_build_without_nvrtc(clean_python, tmp_path, wanted):
    cmake = shutil.which("cmake") or pytest.skip("no cmake")
    words = [f"-DSGAP_CUBINS={wanted}", f"-DPython_EXECUTABLE={clean_python}"]
    words += ["-DSKBUILD_STATE=wheel", "-P", ROOT / "cmake" / "CudaPrecompile.cmake"]
    empty = {"CUDA_HOME": str(tmp_path), "LD_LIBRARY_PATH": ""}
    result = run(cmake, *words, cwd=ROOT, env=empty, check=False)
    if wanted == "ON":
        assert result.returncode != 0 and "pip install 'sgap_jax[cuda13]'" in result.stderr
    else:
        assert result.returncode == 0 and "compiled where they run" in result.stdout


def test_wheel_metadata(distributions, project):
    archive = zipfile.ZipFile(distributions[1])
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Name"] == project["name"]
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_clean_environment_computes(clean_python, project, tmp_path):
    code = """
import json, jax, numpy as np, sgap_jax
dense = np.array([[1, 0, 2], [0, 0, 0]], np.float32)
a = sgap_jax.SparseArray.from_dense(dense)
product = jax.jit(lambda a, b: a @ b)(a, np.ones((3, 2), np.float32))
file = sgap_jax.__file__
print(json.dumps([sgap_jax.__version__, file, np.asarray(product).tolist()]))
"""
    version, file, product = json.loads(run(clean_python, "-c", code, cwd=tmp_path).stdout)
    assert version == project["version"]
    assert Path(file).is_relative_to(clean_python.parents[1])
    assert product == [[3.0, 3.0], [0.0, 0.0]]


def test_import_alone_does_not_start_a_backend(clean_python, tmp_path):
    code = """
import sgap_jax, jax, sys
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend exists
assert jax.device_count() == 3
for heavy in ("jax.experimental.sparse", "scipy.sparse.linalg", "flax", "matplotlib"):
    assert heavy not in sys.modules, heavy
"""
    run(clean_python, "-c", code, cwd=tmp_path, env={"JAX_PLATFORMS": "cpu"})


def test_info_command(clean_python, project, tmp_path):
    text = run(clean_python, "-m", "sgap_jax", "info", cwd=tmp_path).stdout
    for expected in (project["version"], "jax", "cpu"):
        assert expected in text


@pytest.mark.parametrize(("value", "named"), [("avx1024", "avx1024"), ("", None)])
def test_isa_override_is_checked_at_import(clean_python, tmp_path, value, named):
    environment = {"SGAP_CPU_ISA": value} if named else {}
    result = run(clean_python, "-c", "import sgap_jax", cwd=tmp_path, env=environment, check=False)
    assert (result.returncode == 0) == (named is None)
    if named:
        assert "ImportError" in result.stderr
        assert named in result.stderr


def test_older_ffi_than_the_library_is_refused_with_importerror(clean_python, tmp_path):
    """Headers that announce an older FFI API than the library's: nothing is registered."""
    header = tmp_path / "include" / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 1\n")
    code = f"""
import jax
registered = []
jax.ffi.include_dir = lambda: {str(tmp_path / "include")!r}
jax.ffi.register_ffi_target = lambda *a, **k: registered.append(a)
try:
    import sgap_jax
except ImportError as error:
    print(error)
else:
    raise SystemExit("imported")
assert not registered
assert jax.numpy.ones(2).sum() == 2  # the CPU backend of the process is alive
"""
    message = run(clean_python, "-c", code, cwd=tmp_path).stdout
    assert "jax" in message
    assert "0.1" in message
