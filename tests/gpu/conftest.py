"""Skips without a GPU, stops in time, and writes down what happened (see gpu_session.py)."""

import collections
import json
import os
import pathlib
import time

import gpu_session
import pytest

from benchmarks.gpu import device

_HERE = "tests/gpu/"
_outcomes = collections.defaultdict(list)
_notes = {}


@pytest.fixture(autouse=True)
def gpu_and_time():
    if not gpu_session.DRY_RUN:
        gpu_session.require_gpu()
    if gpu_session.time_left() < 0:
        pytest.skip(f"not started: {gpu_session.SECONDS:.0f} seconds are over")


def pytest_runtest_logreport(report):
    if not report.nodeid.startswith(_HERE):
        return
    _notes.update(report.user_properties)
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped else report.longreprtext[-2000:]
        _outcomes[report.outcome].append((report.nodeid, reason))


def pytest_sessionfinish(session):
    results = os.environ.get("SGAP_GPU_RESULTS")
    if not results or hasattr(session.config, "workerinput"):  # the controller hears of all tests
        return
    summary = {
        **device.stamp(),
        "versions": device.versions(),
        "dry_run": gpu_session.DRY_RUN,
        "seconds": round(time.monotonic() - gpu_session.START),
        **{kind: len(_outcomes[kind]) for kind in ("passed", "failed", "skipped")},
        "failures": dict(_outcomes["failed"]),
        "skips": dict(_outcomes["skipped"]),
        "notes": _notes,
    }
    path = device.folder(pathlib.Path(results)) / "gpu_tests.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    print(f"\n{path}")
