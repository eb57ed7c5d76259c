"""Runs a layer of `worker.py` in a process, and gives its answers as they come."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from sgap_jax.doctor.worker import MARK

# The start of the command; the layer's name follows. Tests run the layers in a program of theirs.
COMMAND: list[str] = [sys.executable, "-m", "sgap_jax.doctor.worker"]
_START = 30.0  # seconds until the first answer


_LAST = 10.0  # seconds that a process may take to end, or to be ended


class Ended(Exception):
    """The process ended, or was ended, before it had answered; says how.

    Attributes:
      by_system: whether what was asked of it had no part in that: it could not be started, or it
        was killed from outside, as where memory is short.
    """

    def __init__(self, how: str, by_system: bool = False) -> None:
        super().__init__(how)
        self.by_system = by_system


def answers(
    layer: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str],
    deadline: float,
    silence: float,
) -> Iterator[dict]:
    """The answers of a layer. Raises `Ended` if the process ends with a fault, at `deadline` (of
    `time.monotonic`), or after `silence` seconds without an answer; the first may take longer, as
    libraries are imported before."""
    try:
        process = subprocess.Popen(
            [*COMMAND, layer],
            env=os.environ | dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        why = error.strerror or str(error)
        raise Ended(f"its process cannot be started ({why})", by_system=True) from None
    assert process.stdin and process.stdout and process.stderr
    lines: queue.Queue[bytes | None] = queue.Queue()
    last: deque[bytes] = deque(maxlen=50)

    def listen(stream: Any, take: Any, end: Any) -> None:
        for line in stream:
            take(line)
        end()

    def ask(stream: Any) -> None:
        # It may have ended: what it said on stderr is told below.
        with contextlib.suppress(BrokenPipeError), stream:
            stream.write(pickle.dumps(dict(request)))

    threads = [
        threading.Thread(target=target, args=given, daemon=True)
        for target, given in (
            (listen, (process.stdout, lines.put, lambda: lines.put(None))),
            (listen, (process.stderr, last.append, lambda: None)),
            (ask, (process.stdin,)),  # a process that hangs does not read
        )
    ]
    for thread in threads:
        thread.start()
    try:
        patience = max(silence, _START)
        while True:
            left = deadline - time.monotonic()
            try:
                line = lines.get(timeout=max(min(left, patience), 0.01))
            except queue.Empty:
                over = "the time was over" if left <= patience else f"{patience:.0f} s had passed"
                raise Ended(f"it did not answer before {over}") from None
            if line is None:
                break
            if (said := _answer(line)) is not None:
                patience = silence
                yield said
        try:
            status = process.wait(timeout=_LAST)
        except subprocess.TimeoutExpired:
            raise Ended(f"its process did not end in {_LAST:.0f} s after its answers") from None
        if status != 0:
            threads[1].join(timeout=1)
            raise Ended(_ending(status, list(last)), by_system=status == -signal.SIGKILL)
    finally:
        process.kill()
        # One that waits in the driver is not ended by a signal; it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_LAST)


def _answer(line: bytes) -> dict | None:
    """The answer in a line; None if there is none. Libraries may have printed before and after."""
    _, mark, text = line.partition(MARK.encode())
    try:
        said = json.JSONDecoder().raw_decode(text.decode())[0] if mark else None
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _ending(status: int, last: list[bytes]) -> str:
    """How a process ended, and the last line that it said, without the traces of libraries."""
    how = f"ended with status {status}"
    if status < 0:
        try:
            how = f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            how = f"was ended by signal {-status}"
    if status == -signal.SIGKILL:
        return f"its process {how}, as a system does where memory is short"
    said = [line.decode(errors="replace").strip() for line in last]
    said = [line for line in said if line and "^~" not in line]
    # XLA says why it aborts ("F1125 18:11:25.7 file.cc:9] ...") before the trace of the stack.
    fatal = [line.partition("] ")[2] for line in said if re.match(r"F\d{4} [\d:.]+ .*\] ", line)]
    text = fatal[0] if fatal else said[-1] if said and status > 0 else ""
    return f"its process {how}" + (f": {text[:300]}" if text else "")
