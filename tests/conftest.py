import os

# Two devices for shard_map; before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

import pathlib  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from sgap_jax import CpuTile, Reference  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]

# What runs an operation: the kernels with the schedule that the selector picks, with schedules that
# split rows and columns even in small problems, and the plain-JAX lowering of other platforms.
BACKENDS = {
    "cpu": None,
    "cpu-tiled": CpuTile(columns=16, nonzeros=64, packed=True),
    "reference": Reference(),
}


@pytest.fixture(params=BACKENDS, ids=list(BACKENDS))
def backend(request):
    """The schedule of a backend for spmm; `row_schedule` makes it one for the other ops."""
    return BACKENDS[request.param]


def row_schedule(schedule):
    return CpuTile(nonzeros=schedule.nonzeros) if isinstance(schedule, CpuTile) else schedule


@pytest.fixture(scope="session")
def data_dir():
    folder = pathlib.Path(os.environ.get("SGAP_DATA_DIR", ROOT.parent / "shared" / "data"))
    if not (folder / "MANIFEST.md").exists():
        pytest.skip(f"no data set at SGAP_DATA_DIR={folder}")
    return folder


_tests_run = 0


@pytest.fixture(autouse=True)
def bounded_memory():
    """Every shape is an executable of about 2 MB that JAX keeps: let go of them now and then."""
    global _tests_run
    yield
    _tests_run += 1
    if _tests_run % 40 == 0:
        jax.clear_caches()
