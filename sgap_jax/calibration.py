"""`calibrate`: measures the constants of this CPU that rules of `choose_schedule` need, and keeps
them for later processes."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from sgap_jax.formats.prune import random
from sgap_jax.launch.cache import content_key, default_folder, replace_file
from sgap_jax.primitives.spmm import spmm
from sgap_jax.runtime.native import machine
from sgap_jax.schedules.cpu import CpuTile
from sgap_jax.schedules.machine import Machine
from sgap_jax.tuning import check_seconds, tune

SLABS = (Fraction(5, 8), Fraction(5, 4), Fraction(5, 2), Fraction(5))  # of L2, ascending
ROW_LENGTHS = (48, 24, 12)  # nonzeros, descending
_GAIN = 1.03  # packing must be faster by this
_COLUMNS = 256  # dense columns: rows of 1 KiB
_TILE = CpuTile(columns=32, packed=True)  # rows of 128 bytes
_USES, _ROW = 60, 48  # nonzeros for each row of B, and of A, where slabs are measured


def gain(k: int, row: int, uses: int, seconds: float) -> float:
    """Time of spmm on all columns at once over that in packed tiles, for a random pattern of k
    columns, `row` nonzeros in each row and `uses` in each column."""
    m = max(uses * k // row, 1)
    A = random((m, k), density=row / k)
    B = jnp.ones((k, _COLUMNS), jnp.float32)
    times = dict(tune(spmm, A, B, candidates=(CpuTile(), _TILE), seconds=seconds).times)
    return times[CpuTile()] / times[_TILE]


def constants(gain: Callable[..., float], l2_bytes: int, seconds: float) -> dict[str, Any]:
    """The fields of `Machine` that are measured, by `gain`: the largest slab, and the least row,
    up to which packing pays."""
    each = seconds / (len(SLABS) + len(ROW_LENGTHS))
    slab, row_length = Fraction(0), 2 * ROW_LENGTHS[0]
    for found in SLABS:
        if gain(max(int(found * l2_bytes) // 128, 64), _ROW, _USES, each) < _GAIN:
            break
        slab = found
    for length in ROW_LENGTHS:
        if gain(max(l2_bytes // 512, 64), length, 2 * _USES, each) < _GAIN:
            break
        row_length = length
    return {"slab": float(slab), "row_length": row_length}


def cpu() -> str:
    """The CPU's model, as the system names it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            text = file.read(4096)
    except OSError:
        return platform.processor() or platform.machine()
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    return ", ".join(f"{name} {value}" for name, value in found.items()) or platform.machine()


def file() -> Path | None:
    """Where the constants of this CPU, instruction set and number of cores are kept; None if
    nothing is kept on disk."""
    folder, here = default_folder(), machine()
    if folder is None:
        return None
    question = (cpu(), here["vector_bytes"], here["cores"])
    return folder / "calibrated" / f"{content_key('calibrated', repr(question))}.json"


def kept() -> dict[str, Any]:
    """The constants that `calibrate` has kept for this CPU; none if it has not, or if the file
    holds anything else."""
    path = file()
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path else {}
        slab, row_length = found["slab"], found["row_length"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    holds = type(slab) is float and 0 <= slab <= 16
    if not holds or type(row_length) is not int or not 1 <= row_length <= 1 << 20:
        return {}
    return {"slab": slab, "row_length": row_length}


def calibrate(seconds: float = 10.0) -> dict[str, Any]:
    """Measures the constants of `choose_schedule` that differ from CPU to CPU and keeps them, in
    the folder `calibrated` of the cache (SGAP_CACHE_DIR), by CPU model, instruction set and number
    of cores. Later processes read them when they import the package; this one goes on with those
    that it has, so that all of its calls choose alike.

    Returns `slab`, the largest slab of a dense operand (in second-level caches of a core) that
    pays to be packed, and `row_length`, the least nonzeros of a row with which it does. The rules
    that use them are those of `choose_schedule`; without calibration they are those of `Machine`.

    Args:
      seconds: time to measure, about; compilation takes a few more. Let the machine be idle.

    Raises:
      ValueError: `seconds` is not positive and finite.
      OSError: the folder cannot be written.
    """
    check_seconds("calibrate", seconds)
    found = constants(gain, machine()["l2_bytes"], seconds)
    if (path := file()) is not None:
        os.makedirs(path.parent, exist_ok=True)
        replace_file(path, (json.dumps({"cpu": cpu(), **found}) + "\n").encode())
    return found


def calibrated_machine() -> Machine:
    """What `choose_schedule` knows of the machine: what was read of it, and what is kept."""
    return Machine(**machine(), **kept())
