"""What `make gpu-...` does, where a stand-in says that it is an interpreter with a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU = """#!/bin/sh
case "$*" in
  *"import jax"*) test -n "$STANDIN_GPU" && echo sm_90 || { echo no driver >&2; exit 1; } ;;
  -VV) echo "Python $STANDIN_VERSION" ;;
  *) echo "seconds=$SGAP_GPU_SECONDS/$SGAP_GPU_RUNS $*" >> "$STANDIN_LOG"
    mkdir -p "$STANDIN_SITE"
    test -z "$STANDIN_FAILS" || case "$*" in *"$STANDIN_FAILS"*) exit 1 ;; esac ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """(target, variables, environment) -> (its result, what the interpreter was asked for)."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    python, log, site = tmp_path / "python", tmp_path / "log", tmp_path / "site"
    python.write_text(GPU)
    python.chmod(0o755)

    def run(target, *variables, **environment):
        log.write_text("")
        set_now = {
            "STANDIN_LOG": log,
            "STANDIN_SITE": site,
            "STANDIN_GPU": "1",
            "STANDIN_VERSION": "3.12",
        } | environment
        words = ["make", target, f"GPU_PYTHON={python}", f"GPU_SITE={site}", *variables]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=os.environ | {k: str(v) for k, v in set_now.items()},
            capture_output=True,
            text=True,
        )
        return done, log.read_text().splitlines()

    return run


def test_the_package_is_built_once_for_what_it_is_made_of(make):
    done, (install,) = make("gpu-install")
    assert done.returncode == 0, done.stderr
    assert "pip install" in install and "SGAP_CUBINS_FOR=sm_90" in install
    assert make("gpu-install")[1] == []
    assert len(make("gpu-install", STANDIN_VERSION="3.13")[1]) == 1


def test_the_runs_of_a_target_share_its_time(make):
    _, (_, one) = make("gpu-bench", "GPU_SECONDS=90.5")
    assert one.startswith("seconds=90.5/1 -m benchmarks.gpu.run --results")
    _, both = make("gpu-octets", "GPU_SECONDS=100")
    assert [line.split()[:3] for line in both] == [
        ["seconds=100/2", "-m", f"benchmarks.gpu.{name}"] for name in ("octets", "octets_sddmm")
    ]


def test_all_of_them_whatever_one_does(make):
    done, (_, *asked) = make("gpu", STANDIN_FAILS="benchmarks.gpu.octets ")
    assert done.returncode != 0
    assert [next(word for word in line.split() if "gpu" in word) for line in asked] == [
        "tests/gpu",
        *(f"benchmarks.gpu.{name}" for name in ("run", "octets", "attention", "figures", "tables")),
    ]


def test_without_a_gpu_the_reason_is_said(make):
    done, asked = make("gpu-test", STANDIN_GPU="")
    assert done.returncode != 0 and asked == []
    assert "no driver" in done.stderr and "GPU_PYTHON=" in done.stdout
