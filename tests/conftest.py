import os

import jaxlib

# Two devices for shard_map; must be set before JAX starts.
FLAGS = " --xla_force_host_platform_device_count=2"
# XLA's older code generator, without the fusion emitters, compiles our many small programs in two
# thirds of the time, and quicker still where it does not cut each into parts for several threads.
# XLA ends the process at a flag that it does not know; every jaxlib 0.10 knows these two.
if jaxlib.__version__.startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + FLAGS

import contextlib  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import golden_files  # noqa: E402
import result_cache  # noqa: E402
import tiers  # noqa: E402
from cuda_sources import require_nvrtc  # noqa: E402
from emulated_launch import Sampled, emulate  # noqa: E402

from sgap_jax import CpuTile, Reference  # noqa: E402
from sgap_jax.schedules.emulated import Emulated  # noqa: E402
from sgap_jax.schedules.machine import Machine, set_machine  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Default schedules, and with them the bits of results, are those of one machine, whatever this is.
set_machine(Machine())

# XLA's executables are kept beside the other cached results: JAX keys them by program, options and
# machine.
jax.config.update("jax_compilation_cache_dir", result_cache.xla_folder())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The backends of an operation: the CPU kernels with the schedule that the selector picks, with
# schedules that split rows and columns even in small problems, and the plain-JAX lowering of other
# platforms; the CUDA kernels in the emulator, with the selector's points and with random ones.
BACKENDS = {
    "cpu": None,
    "cpu-tiled": CpuTile(columns=16, nonzeros=64, packed=True),
    "reference": Reference(),
    "emulated": Emulated(emulate),
    "emulated-sampled": Emulated(emulate),
}


def backend_of(name, test):
    """The schedule of a backend; `test` names the test, which seeds the sampled backend."""
    if isinstance(BACKENDS[name], Emulated):
        require_nvrtc()
    return Emulated(emulate, choose=Sampled(test)) if name.endswith("sampled") else BACKENDS[name]


@pytest.fixture(params=BACKENDS, ids=list(BACKENDS))
def backend(request):
    """The schedule of a backend for spmm; `row_schedule` makes it one for the other ops."""
    return backend_of(request.param, request.node.nodeid)


def row_schedule(schedule):
    """Adapts a schedule of spmm for another op: a CpuTile is specific to spmm; an emulation chooses
    for each op."""
    return CpuTile(nonzeros=schedule.nonzeros) if isinstance(schedule, CpuTile) else schedule


def pytest_addoption(parser):
    parser.addoption(
        "--tier", choices=tiers.TIERS, default="all", help="see tests/helpers/tiers.py"
    )
    words = "write tests/helpers/seconds.txt: the processor time of each test"
    parser.addoption("--write-seconds", action="store_true", help=words)
    words = "write golden files: runs the tests that have some, see tests/helpers/golden_files.py"
    parser.addoption("--write-golden", action="store_true", help=words)


def pytest_configure(config):
    if config.option.write_seconds:
        config.pluginmanager.register(tiers.Timing())


@pytest.fixture
def golden(request):
    """The golden files in the folder `golden` beside the test: see golden_files.py."""
    return golden_files.Golden(request.path.parent / "golden", request.config.option.write_golden)


# Of a test's variants those that a matrix of the battery meets on a backend: one of so many. On the
# emulator each dtype is another kernel, and slow; no code of the reference depends on a size.
SHARES = {"emulated": 8, "emulated-sampled": 8, "reference": 4}


# Tests that are left out once the time is over, and when it is: tests/helpers/tiers.py.
IF_TIME = pytest.StashKey()
UNTIL = os.environ.get("SGAP_TEST_UNTIL")


def pytest_collection_modifyitems(config, items):
    """Selects the tests of the tier; of a backend with a share, for each matrix another share."""
    groups = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        backend = params.get("backend")
        if "name" in params and isinstance(backend, str) and backend in SHARES:
            of_test = groups.setdefault((backend, item.function), {})
            of_test.setdefault(params["name"], []).append(item)
    left = {
        item
        for (backend, _), of_test in groups.items()
        for turn, variants in enumerate(of_test.values())
        for i, item in enumerate(variants)
        if i % SHARES[backend] != turn % min(SHARES[backend], len(variants))
    }
    candidates = [item for item in items if item not in left]
    tier = "every" if config.option.write_golden else config.option.tier
    left |= tiers.left_out(candidates, tier)
    if UNTIL and config.option.tier == "all":
        config.stash[IF_TIME] = tiers.left_out(candidates, "check")
        others = tiers.left_out(candidates, "test")
        last = tiers.further([item for item in items if item not in left], others)
        orders = (config.stash[IF_TIME], others, last)
        items.sort(key=lambda item: sum(item in later for later in orders))
    left |= golden_files.left_out(items) if config.option.write_golden else set()
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item in item.config.stash.get(IF_TIME, ()) and time.time() > float(UNTIL):
        pytest.skip("not in the tier `check`, and the time is over (SGAP_TEST_UNTIL)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed:
        command = f"make test-all PYTEST_ARGS=\"-n0 '{item.nodeid}'\""
        report.sections.append(("to run it alone", command))
    return report


@pytest.fixture(scope="session")
def data_dir():
    folder = pathlib.Path(os.environ.get("SGAP_DATA_DIR", ROOT.parent / "shared" / "data"))
    if not (folder / "MANIFEST.md").exists():
        pytest.skip(f"no data set at SGAP_DATA_DIR={folder}")
    return folder


# Folders of tests whose programs XLA compiles with few optimizations: their work is in our kernels,
# which XLA does not touch, or in plain gathers and sums. Other tests see its optimizations, as
# users do: the transformations of JAX, the compiler's loops, pages and examples.
QUICKLY_COMPILED = ("conformance", "emulated", "errors", "grad", "nn", "oracle", "property")


@pytest.fixture(autouse=True, scope="module")
def optimizations(request):
    quick = request.path.parent.name in QUICKLY_COMPILED
    quick &= request.path.name != "test_transformations.py"
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture(autouse=True)
def random_numbers(request):
    """A module's random numbers start anew: a test has the same, whichever tests ran before it."""
    if generator := getattr(request.module, "RNG", None):
        generator.bit_generator.state = np.random.default_rng(1).bit_generator.state


_executables = 0


def _count_executables(event, seconds, **_):
    global _executables
    _executables += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_executables)


@pytest.fixture(autouse=True)
def bounded_memory():
    """Every shape is an executable of about 2 MB that JAX keeps: clears these caches now and then.
    At 300 instead of 1000 the tests take a fifth longer, since they share small programs. glibc
    keeps most of what was freed, half a worker's memory, until it is asked."""
    global _executables
    yield
    if _executables > 1000:
        _executables = 0
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
