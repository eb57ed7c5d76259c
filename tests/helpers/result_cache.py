"""An on-disk cache, keyed by content, of expensive results that depend on their inputs only: PTX,
reports of ptxas, emulated launches. Also the folder of XLA's executables, which JAX keys.

A key holds everything that a result depends on: sources with the headers that they include,
versions, the emulator's own code, every operand. Calls that raise are not cached. The folder is
`build/test-results` of the checkout, or SGAP_TEST_RESULTS (empty: no cache); `make clean` removes
it.
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
DAYS = 14  # a result that was not used for so long is removed


@functools.cache
def folder():
    """The cache's folder, with old results removed; None if there is no cache."""
    named = os.environ.get("SGAP_TEST_RESULTS", str(ROOT / "build" / "test-results"))
    if not named:
        return None
    path = pathlib.Path(named)
    (path / "xla").mkdir(parents=True, exist_ok=True)
    for entry in itertools.chain(os.scandir(path), os.scandir(path / "xla")):
        with contextlib.suppress(FileNotFoundError):  # another worker may remove them too
            if entry.is_file() and entry.stat().st_mtime < time.time() - DAYS * 86400:
                pathlib.Path(entry.path).unlink()
    return path


def xla_folder():
    """The folder where JAX keeps XLA's executables; None if there is no cache."""
    return None if folder() is None else str(folder() / "xla")


def cached(parts, compute):
    """compute(), or its earlier result for the same parts (texts, bytes)."""
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
    """The emulator's source, a part of each key."""
    files = sorted((ROOT / "tests" / "emulator").glob("*.py"))
    return "".join(path.read_text() for path in files)
