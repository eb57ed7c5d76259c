"""Runs the tests of tests/gpu in a process that emulates the GPU, so that their code runs without
one."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from cuda_sources import require_nvrtc

ROOT = pathlib.Path(__file__).resolve().parents[2]


def gpu_tests(results, *words, **environment):
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", *words]
    set_now = {"SGAP_GPU_RESULTS": str(results), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | set_now, capture_output=True, text=True
    )
    (file,) = results.glob("*/gpu_tests.json")
    return done, json.loads(file.read_text())


def test_the_tests_are_right_about_the_emulator(tmp_path):
    require_nvrtc()
    chosen = "(float32 and not bits) or (bits and float32 and nnz_group) or (points and nnz) or own"
    chosen += " or (vectors and bits and float32 and 8) or (of_vectors and 8) or (at_vectors and 4)"
    chosen += " or (paper_tiles and test_spmm) or octet or (attention and float16) or threads"
    chosen += " or tuner or donated or follow or (spmv and not second) or (default and padded)"
    done, found = gpu_tests(tmp_path, "-k", chosen, SGAP_GPU_DRY_RUN="1")
    assert done.returncode == 0, done.stdout
    assert found["failed"] == 0 and found["passed"] > 10 and found["dry_run"]
    assert all("no GPU" in reason for reason in found["skips"].values())
    assert {"device", "driver", "commit", "date", "versions", "seconds"} <= set(found)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({}, "no GPU for JAX"), ({"SGAP_GPU_DRY_RUN": "1", "SGAP_GPU_SECONDS": "-1"}, "not started")],
)
def test_without_a_gpu_or_time_nothing_runs_and_the_reason_is_said(tmp_path, environment, reason):
    done, found = gpu_tests(tmp_path, "-k", "row_reductions", **environment)
    assert done.returncode == 0, done.stdout
    assert found["passed"] == 0 and found["skipped"] == 4
    assert all(reason in text for text in found["skips"].values())


def test_a_wrong_kernel_fails_them(tmp_path):
    """The dry run fails if launches give results that are one too large."""
    require_nvrtc()
    plugin = tmp_path / "wrong_launches.py"
    plugin.write_text(
        "import emulated_launch\n"
        "whole = emulated_launch.emulate\n"
        "def emulate(call, inputs, outputs, **keywords):\n"
        "    results = whole(call, inputs, outputs, **keywords)\n"
        "    return [result + result.dtype.type(1) for result in results]\n"
        "emulated_launch.emulate = emulate\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), *filter(None, sys.path)])
    done, found = gpu_tests(
        tmp_path, "-p", "wrong_launches", "-k", "test_spmv", SGAP_GPU_DRY_RUN="1", PYTHONPATH=path
    )
    assert done.returncode == 1 and found["failed"] == 4, done.stdout


def test_a_test_that_hangs_or_loses_the_device_costs_no_other(tmp_path):
    """Such a test ends its worker; another worker runs the remaining tests."""
    plugin = tmp_path / "troubles.py"
    plugin.write_text(
        "import time\n"
        "import gpu_session\n"
        "def works(**_):\n"
        "    pass\n"
        "def hangs(**_):\n"
        "    time.sleep(600)\n"
        "def loses(**_):\n"
        "    gpu_session.lost = lambda: True\n"
        "    raise RuntimeError('CUDA_ERROR_ILLEGAL_ADDRESS')\n"
        "def pytest_ignore_collect(collection_path):\n"
        "    return collection_path.suffix == '.py' and 'paper' not in collection_path.name\n"
        "def pytest_collection_modifyitems(items):\n"
        "    del items[5:]\n"
        "    for item, does in zip(items, (works, hangs, works, loses, works), strict=True):\n"
        "        item.obj = does\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), *filter(None, sys.path)])
    set_now = {"SGAP_GPU_DRY_RUN": "1", "SGAP_GPU_TEST_SECONDS": "2", "PYTHONPATH": path}
    done, found = gpu_tests(tmp_path, "-p", "troubles", "-n", "1", "--dist", "worksteal", **set_now)
    assert (found["passed"], found["failed"], found["finished"]) == (3, 2, True), done.stdout
    hung, lost = found["failures"].values()
    assert "crashed" in hung and "Timeout" in done.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in lost and "crashed" in lost
    assert "lost the device" in done.stderr
