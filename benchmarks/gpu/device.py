"""Identifies the GPU, and the folder of its results."""

import csv
import datetime
import functools
import pathlib
import re
import subprocess
from importlib import metadata

from benchmarks import machine

_FIELDS = ("name", "driver_version", "compute_cap", "memory.total")
_PACKAGES = ("jax-cuda13-plugin", "jax-cuda12-plugin", "cupy-cuda13x", "nvidia-cusparse", "triton")


@functools.cache
def query() -> dict[str, str]:
    """What nvidia-smi reports of the first GPU; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        (first, *_) = csv.reader(text.stdout.splitlines(), skipinitialspace=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return dict(zip(_FIELDS, first, strict=True)) if len(first) == len(_FIELDS) else {}


def name() -> str:
    """The name of the GPU; without one the CPU's name, marked as a dry run."""
    return query().get("name") or f"dry run on {machine.cpu_model()}"


def stamp() -> dict[str, str]:
    """The provenance that every result carries: device, driver, commit, date."""
    return {
        "device": name(),
        "driver": query().get("driver_version", "none"),
        "compute_capability": query().get("compute_cap", "none"),
        "memory": query().get("memory.total", "none"),
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    found = machine.versions()
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def folder(results: pathlib.Path) -> pathlib.Path:
    """RESULTS/<device>, created if missing."""
    path = results / re.sub(r"[^a-z0-9]+", "_", name().lower()).strip("_")
    path.mkdir(parents=True, exist_ok=True)
    return path
