"""Calibration: what is made of measured times, what is kept, and what is read again. Times of one
small case are really taken; no test asks how fast anything is."""

import json
import math
import subprocess
import sys

import pytest

from sgap_jax import calibrate, calibration, keep_memory
from sgap_jax.__main__ import main
from sgap_jax.schedules.machine import Machine


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    return tmp_path


def paying(slab, row_length, l2=1 << 20):
    """Gains of a machine where packing pays up to such a slab, and from such rows on."""

    def gain(k, row, uses, seconds):
        assert seconds > 0 and uses > 0
        return 1.2 if k * 128 <= slab * l2 and row >= row_length else 1.0

    return lambda: calibration.constants(gain, l2, 1.0)


def test_constants_are_the_last_that_pay():
    assert paying(2.5, 24)() == {"slab": 2.5, "row_length": 24}
    assert paying(100, 1)() == {"slab": 5.0, "row_length": 12}
    assert paying(0.7, 20)() == {"slab": 0.625, "row_length": 24}
    assert paying(0.1, 100)() == {"slab": 0.0, "row_length": 96}  # packing never pays


def test_constants_are_kept_for_later_processes(cache, monkeypatch):
    monkeypatch.setattr(calibration, "constants", lambda *_: {"slab": 2.5, "row_length": 12})
    assert calibration.kept() == {}
    assert calibrate(0.1) == {"slab": 2.5, "row_length": 12} == calibration.kept()
    machine = calibration.calibrated_machine()
    assert (machine.slab, machine.row_length) == (2.5, 12)
    (path,) = cache.glob("calibrated/*.json")
    assert calibration.file() == path and calibration.cpu() == json.loads(path.read_text())["cpu"]
    monkeypatch.setattr(calibration, "cpu", lambda: "another")
    assert calibration.kept() == {}  # of another CPU nothing is known
    monkeypatch.setenv("SGAP_CACHE_DIR", "")
    assert calibration.file() is None and calibrate(0.1)["slab"] == 2.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"slab": 2.5}',
        '{"slab": 1e9, "row_length": 12}',
        '{"slab": NaN, "row_length": 12}',
    ]
    + ['{"slab": 2.5, "row_length": 0}', '{"slab": "2", "row_length": 12}', "\x00"],
)
def test_a_file_that_holds_anything_else_is_passed_over(cache, text):
    calibration.file().parent.mkdir(parents=True)
    calibration.file().write_text(text)
    assert calibration.kept() == {}
    assert calibration.calibrated_machine().slab == Machine().slab


def test_a_gain_is_a_ratio_of_times():
    found = calibration.gain(64, 4, 8, 0.01)
    assert math.isfinite(found) and found > 0


def test_the_command_prints_what_it_keeps(cache, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "constants", lambda *_: {"slab": 1.25, "row_length": 48})
    monkeypatch.setattr(sys, "argv", ["sgap_jax", "calibrate", "--seconds", "0.5"])
    assert main() == 0
    out = capsys.readouterr().out
    assert "slab        1.25\nrow_length  48\nkept in " in out
    monkeypatch.setattr(sys, "argv", ["sgap_jax", "calibrate", "--seconds", "0"])
    assert main() == 1 and "must be positive, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1.0, "1", math.nan])
def test_seconds_must_be_positive(seconds):
    with pytest.raises(ValueError, match="seconds must be positive"):
        calibrate(seconds)


def test_seconds_have_an_end(monkeypatch):
    monkeypatch.setattr(calibration, "constants", lambda *_: {})
    with pytest.raises(ValueError, match="calibrate: seconds must be finite, got inf"):
        calibrate(math.inf)
    for seconds in (10**400, 10**5000):  # repr refuses the second
        with pytest.raises(ValueError, match="seconds must be finite, got one that no float holds"):
            calibrate(seconds)


def test_an_interrupted_command_says_so_and_keeps_nothing(cache, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "constants", interrupted)
    monkeypatch.setattr(sys, "argv", ["sgap_jax", "calibrate"])
    assert main() == 130 and "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(calibration, "constants", lambda *_: {})
    monkeypatch.setattr("os.replace", interrupted)
    assert main() == 130 and not [x for x in cache.rglob("*") if x.is_file()]


@pytest.mark.parametrize("most", [-1, 1.5, True, None])
def test_memory_is_kept_up_to_a_number_of_bytes(most):
    with pytest.raises(ValueError, match="most_bytes must be an int from 0 on"):
        keep_memory(most)


FAULTS = """
import resource, jax, jax.numpy as jnp, numpy as np
from sgap_jax import keep_memory, random, spmm
A, B = random((40_000, 8), density=0.25), jnp.ones((8, 256), jnp.float32)
f = jax.jit(spmm)
def faults():
    f(A, B).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        f(A, B).block_until_ready()  # 41 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
fresh = faults()
kept = keep_memory()
faults()  # the heap grows to what it needs
print(kept, fresh, min(faults() for _ in range(4)))
"""


@pytest.mark.tier("all")
@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_kept_memory_is_not_faulted_in_again():
    run = [sys.executable, "-c", FAULTS]
    kept, fresh, later = subprocess.run(
        run, capture_output=True, text=True, check=True
    ).stdout.split()
    assert kept == "True" and int(later) <= int(fresh) // 4, (fresh, later)
