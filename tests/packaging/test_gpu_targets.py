"""What `make gpu-...` does, where a stand-in says that it is an interpreter with a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.everything import commit, workers

ROOT = Path(__file__).parents[2]
GPU = """#!/bin/sh
case "$*" in
  *"import jax"*) test -n "$STANDIN_GPU" && echo sm_90 || { echo no driver >&2; exit 1; } ;;
  *use_installed*) exit ${STANDIN_INSTALLED:-1} ;;
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


BENCHMARKS = ("run", "octets", "attention", "figures", "tables", "tuned", "taco")
DOCTOR = """case "$*" in *"sgap_jax doctor"*)
  for file; do :; done; echo "$STANDIN_DOCTOR" > "$file"; grep -q '"ok": true' "$file" || exit 1 ;;
esac
"""


@pytest.fixture
def everything(make, tmp_path):
    """`make gpu` with what the doctor writes, into one results folder: its result, the parts that
    ran, and the report."""
    python, results = tmp_path / "python", tmp_path / "results"
    python.write_text(GPU + DOCTOR)

    def run(doctor, *variables, **environment):
        said = {"STANDIN_DOCTOR": json.dumps(doctor)}
        done, asked = make("gpu", f"RESULTS={results}", *variables, **said | environment)
        parts = [
            next(word for word in line.split() if "gpu" in word or word == "doctor")
            for line in asked
            if "pip install" not in line
        ]
        report = json.loads((results / "gpu_report.json").read_text())
        text = (results / "gpu_report.md").read_text()
        assert str(results / "gpu_report.md") in done.stdout
        return done, parts, report["parts"], text

    return run


WORKS = {"ok": True, "first_failed": None, "conclusion": "All layers work."}


def test_all_of_them_whatever_one_does_and_none_twice(everything):
    done, parts, report, text = everything(WORKS, STANDIN_FAILS="benchmarks.gpu.octets ")
    every = ["doctor", "tests/gpu", *(f"benchmarks.gpu.{name}" for name in BENCHMARKS)]
    assert done.returncode != 0 and parts == every, done.stdout + done.stderr
    assert [part["state"] for part in report.values()].count("done") == 8
    assert report["gpu-octets"]["state"] == "failed" and report["gpu-octets"]["output"]
    assert "The first part that failed is gpu-octets" in text and "All layers work." in text
    done, parts, report, text = everything(WORKS)  # goes on where it ended
    assert done.returncode == 0, done.stdout + done.stderr
    assert parts == ["benchmarks.gpu.octets", "benchmarks.gpu.octets_sddmm"]
    assert "All parts are done." in text
    assert everything(WORKS)[1] == []


def test_what_the_doctor_finds_decides_what_starts(everything):
    broken = {"ok": False, "first_failed": "driver", "conclusion": "No driver. Install one."}
    done, parts, report, text = everything(broken)
    assert done.returncode != 0 and parts == ["doctor"]
    assert report["gpu-bench"] == {"state": "not started", "why": "No driver. Install one."}
    assert "The first part that failed is gpu-doctor" in text and "No driver." in text
    one_kernel = broken | {"first_failed": "kernels", "kernels": [{"family": "spmm octet"}]}
    _, parts, report, text = everything(one_kernel)
    assert len(parts) == 10 and "| spmm octet | - |" in text
    assert report["gpu-bench"]["state"] == "done"


def test_a_report_where_the_first_step_fails(everything, tmp_path):
    """No JAX that sees a GPU, and no package: nothing is built, and what a doctor has found before
    does not count; nor does a report that is damaged."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "doctor.json").write_text(json.dumps(WORKS))
    damaged = json.dumps({"commit": commit(), "parts": [3]})
    (tmp_path / "results" / "gpu_report.json").write_text(damaged)
    done, parts, report, text = everything(WORKS, STANDIN_GPU="")
    assert done.returncode != 0 and parts == []
    assert "has no JAX that sees an NVIDIA GPU" in text
    assert "could not be installed" in report["gpu-test"]["why"]
    # With the package installed the doctor says what is missing.
    assert everything(WORKS, STANDIN_GPU="", STANDIN_INSTALLED="0")[1] == ["doctor"]


def test_a_results_folder_that_cannot_be_made(make, tmp_path):
    (tmp_path / "file").write_text("")
    done, asked = make("gpu", f"RESULTS={tmp_path / 'file' / 'folder'}")
    assert done.returncode != 0 and asked == [] and "name another with RESULTS=" in done.stdout


def test_the_installed_package_is_used_where_it_is_the_same(make):
    assert make("gpu-install", STANDIN_INSTALLED="0")[1] == []


def use_installed(folder, tmp_path, *, tools=False):
    """The exit status of use_installed.py with a package in a folder, and where the link leads."""
    path = [folder]
    if tools:
        (tmp_path / "tools" / "scikit_build_core").mkdir(parents=True)
        path.append(tmp_path / "tools")
    words = [sys.executable, "-S", ROOT / "benchmarks/gpu/use_installed.py", tmp_path / "site"]
    set_now = {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(list(map(str, words)), env=os.environ | set_now)
    link = tmp_path / "site" / "sgap_jax"
    return done.returncode, link.resolve() if link.exists() else None


def test_which_installed_package_is_used(tmp_path):
    folder = tmp_path / "packages"
    assert use_installed(folder, tmp_path) == (1, None)
    package = folder / "sgap_jax"
    ignored = shutil.ignore_patterns("_native*", "__pycache__")
    shutil.copytree(ROOT / "sgap_jax", package, ignore=ignored)
    assert use_installed(folder, tmp_path) == (1, None)  # it is not built
    (package / "_native.so").write_text("")
    assert use_installed(folder, tmp_path, tools=True) == (0, package)
    (package / "another.py").write_text("")
    assert use_installed(folder, tmp_path) == (0, package)  # there are no tools to build
    shutil.rmtree(tmp_path / "tools")
    assert use_installed(folder, tmp_path, tools=True)[0] == 1


def test_workers_fit_in_the_free_memory(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    for printed, most in (("echo 7000", 2), ("echo 100", 1), ("exit 9", 1), ("echo 80000", 12)):
        smi.write_text(f"#!/bin/sh\n{printed}\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert 1 <= workers() <= most


def test_without_a_gpu_the_reason_is_said(make):
    done, asked = make("gpu-test", STANDIN_GPU="")
    assert done.returncode != 0 and asked == []
    assert "no driver" in done.stderr and "GPU_PYTHON=" in done.stdout
