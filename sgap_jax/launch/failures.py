"""The list of kernel families that fail on a GPU, in a file beside the compiled kernels.

`python -m sgap_jax doctor` writes it. An entry holds for one name of a GPU, one version of the
driver and one of this package: another driver or package starts without.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sgap_jax.launch.cache import default_folder, replace_file
from sgap_jax.launch.driver import Driver, DriverError, NoDriver

FILE = "failing_kernels.json"
_WAIT = 200  # hundredths of a second for another process to write the list


def place(device: str, driver: tuple[int, int]) -> dict[str, str]:
    """The fields of an entry that say where it holds."""
    try:
        package = version("sgap_jax")
    except PackageNotFoundError:  # used from a checkout that is not installed
        package = "unknown"
    return {"device": device, "driver": ".".join(map(str, driver)), "version": package}


def entries(folder: Path) -> list[dict[str, Any]]:
    """The entries of the list; none if there is no list, or a damaged one."""
    try:
        # A pipe of that name would wait for a writer; deep nesting ends in a RecursionError.
        text = (folder / FILE).read_bytes() if (folder / FILE).is_file() else b"[]"
        found = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return []
    fields = ("device", "driver", "version", "family", "why")
    if not isinstance(found, list):
        return []
    return [
        entry
        for entry in found
        if isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in fields)
    ]


def record(folder: Path, where: Mapping[str, str], tested: Mapping[str, str]) -> None:
    """Writes the outcome of a test of families, {family: why it failed, or ""}: those that failed
    are on the list at `where` from now on, those that worked are not. OSError on failure."""
    if not any(tested.values()) and not entries(folder):
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(folder):
        before = entries(folder)
        kept = [
            entry
            for entry in before
            if entry["family"] not in tested or any(entry[name] != where[name] for name in where)
        ]
        now = kept + [{**where, "family": name, "why": why} for name, why in tested.items() if why]
        if now != before:
            replace_file(folder / FILE, (json.dumps(now, indent=1) + "\n").encode())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A context that one process at a time is in, so that two doctors, each of another GPU, do not
    lose what the other has found. Where a file system has no locks, or another process holds this
    one for long, it goes on all the same."""
    with open(folder / ".failing_kernels.lock", "ab") as file:
        for _ in range(_WAIT):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield


def failing_here() -> Mapping[str, str]:
    """{family: why} for the GPUs of this machine: what `schedules.families.failing` asks."""
    folder = default_folder()
    try:
        changed = None if folder is None else (folder / FILE).stat().st_mtime_ns
    except OSError:
        return {}
    return {} if folder is None or changed is None else _failing(folder, changed)


@cache
def _failing(folder: Path, changed: int) -> Mapping[str, str]:
    return matching(entries(folder), _gpus())


def matching(
    found: Iterable[Mapping[str, Any]], places: Iterable[Mapping[str, str]]
) -> dict[str, str]:
    """{family: why} of the entries that hold at one of these places: a program may run on each."""
    every = list(places)
    return {
        entry["family"]: entry["why"]
        for entry in found
        if any(all(entry[name] == value for name, value in one.items()) for one in every)
    }


@cache
def _gpus() -> tuple[dict[str, str], ...]:
    """The places of this process's GPUs; none without a driver."""
    try:
        driver = Driver()
        driver.start()
        return tuple(place(device.name, driver.version()) for device in driver.devices())
    except (NoDriver, DriverError):
        return ()
