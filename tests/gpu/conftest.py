"""Skips without a GPU, stops when the time is over, and records the outcomes (see gpu_session.py).

A test that hangs or loses the device ends only its own process: pytest-xdist starts another worker,
which continues with the next test.
"""

import collections
import faulthandler
import json
import math
import os
import pathlib
import time

import gpu_session
import pytest

from benchmarks.gpu import device

_HERE = "tests/gpu/"
_EVERY = 10  # seconds between writes of the results, so that a killed run leaves some
_outcomes = collections.defaultdict(list)
_notes = {}
_stamp = {}
_written = 0.0
_worker = _controller = False
_stderr = None
_failed = False
_lost = ""  # the test during which the device was lost


def pytest_configure(config):
    global _worker, _controller, _stderr
    _worker = hasattr(config, "workerinput")
    _controller = not _worker and bool(config.getoption("numprocesses", None))
    _stderr = os.dup(2)  # before pytest captures it


@pytest.fixture(autouse=True)
def gpu_and_time():
    if _lost:
        pytest.skip(f"not started: {_lost} lost the device")
    if not gpu_session.DRY_RUN:
        gpu_session.require_gpu()
    if gpu_session.time_left() < 0:
        pytest.skip(f"not started: {gpu_session.SECONDS:.0f} seconds are over")
    if math.isfinite(most := gpu_session.seconds_of_a_test()):
        faulthandler.dump_traceback_later(most, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    global _failed
    if not report.nodeid.startswith(_HERE):
        return
    _failed |= report.failed
    _notes.update(report.user_properties)
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if report.skipped else report.longreprtext[-2000:]
        _outcomes[report.outcome].append((report.nodeid, reason))
    if not _worker and time.monotonic() - _written > _EVERY:
        _write(finished=False)


def pytest_runtest_logfinish(nodeid):
    global _failed, _lost
    failed, _failed = _failed, False
    if failed and not _controller and gpu_session.lost():
        _lost = nodeid
        if _worker:
            # The controller has the reports of earlier tests, and counts only this one as
            # unfinished.
            os.write(_stderr, f"{nodeid} lost the device\n".encode())
            os._exit(1)


def pytest_sessionfinish(session):
    if not _worker and (path := _write(finished=True)):
        print(f"\n{path}")


def _write(finished):
    """Writes the results; called by the controller, which has the reports of all workers. Returns
    the file, or None if no results folder is set."""
    global _written
    if not (results := os.environ.get("SGAP_GPU_RESULTS")):
        return None
    if not _stamp:
        _stamp.update(device.stamp() | {"versions": device.versions()})
    failures = {}
    for nodeid, reason in _outcomes["failed"]:  # if a process ended: its last output and that fact
        failures[nodeid] = "\n".join(filter(None, (failures.get(nodeid), reason)))
    summary = {
        **_stamp,
        "dry_run": gpu_session.DRY_RUN,
        "finished": finished,
        "seconds": round(time.monotonic() - gpu_session.START),
        "passed": len(_outcomes["passed"]),
        "failed": len(failures),
        "skipped": len(_outcomes["skipped"]),
        "failures": failures,
        "skips": dict(_outcomes["skipped"]),
        "notes": _notes,
    }
    path = device.folder(pathlib.Path(results)) / "gpu_tests.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    _written = time.monotonic()
    return path
