"""Results of what is expensive and depends on nothing but its inputs, kept on disk by content:
PTX, reports of ptxas, emulated launches; and the folder for what XLA compiles, keyed by JAX.

A key holds all that a result depends on: sources with the headers that they include, versions, the
emulator's own code, every operand. What raises is not kept. The folder is `build/test-results` of
the checkout, or SGAP_TEST_RESULTS (empty: keep nothing); `make clean` removes it.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import pickle
import time

from sgap_jax.launch.cache import content_key, replace_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
DAYS = 14  # a result that no run has used for so long is removed


@functools.cache
def folder():
    """Where results are kept, without old ones; None where nothing is kept."""
    named = os.environ.get("SGAP_TEST_RESULTS", str(ROOT / "build" / "test-results"))
    if not named:
        return None
    path = pathlib.Path(named)
    (path / "xla").mkdir(parents=True, exist_ok=True)
    for entry in itertools.chain(os.scandir(path), os.scandir(path / "xla")):
        with contextlib.suppress(FileNotFoundError):  # another worker removes them too
            if entry.is_file() and entry.stat().st_mtime < time.time() - DAYS * 86400:
                pathlib.Path(entry.path).unlink()
    return path


def xla_folder():
    """Where JAX keeps XLA's executables; None where nothing is kept."""
    return None if folder() is None else str(folder() / "xla")


def cached(parts, compute):
    """compute(), or what it returned when it was called for the same parts (texts, bytes)."""
    if folder() is None:
        return compute()
    path = folder() / content_key("test", *parts)
    try:
        result = pickle.loads(path.read_bytes())
        os.utime(path)
        return result
    except (OSError, pickle.UnpicklingError, EOFError):
        result = compute()
        replace_file(path, pickle.dumps(result))
        return result


@functools.cache
def emulator_code():
    """The emulator itself, a part of each result's key."""
    files = sorted((ROOT / "tests" / "emulator").glob("*.py"))
    return "".join(path.read_text() for path in files)
