"""Runs a layer of `worker.py` in a process, and gives its answers as they come."""

from __future__ import annotations

import json
import os
import pickle
import queue
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


class Ended(Exception):
    """The process ended, or was ended, before it had answered; says how."""


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
    process = subprocess.Popen(
        [*COMMAND, layer],
        env=os.environ | dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    lines: queue.Queue[bytes | None] = queue.Queue()
    last: deque[bytes] = deque(maxlen=50)

    def listen(stream: Any, take: Any, end: Any) -> None:
        for line in stream:
            take(line)
        end()

    streams: list[tuple[Any, Any, Any]] = [
        (process.stdout, lines.put, lambda: lines.put(None)),
        (process.stderr, last.append, lambda: None),
    ]
    threads = [threading.Thread(target=listen, args=each, daemon=True) for each in streams]
    for thread in threads:
        thread.start()
    try:
        try:
            process.stdin.write(pickle.dumps(dict(request)))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended: what it said on stderr is told below
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
            if line.startswith(MARK.encode()):
                patience = silence
                yield json.loads(line[len(MARK) :])
        status = process.wait(timeout=10)
        if status != 0:
            threads[1].join(timeout=1)
            raise Ended(_ending(status, list(last)))
    finally:
        process.kill()
        process.wait()


def _ending(status: int, last: list[bytes]) -> str:
    """How a process ended, and the last line that it said, without the traces of libraries."""
    if status < 0:
        try:
            return f"its process was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"its process was ended by signal {-status}"
    said = [line.decode(errors="replace").strip() for line in last]
    said = [line for line in said if line and "^~" not in line]
    return f"its process ended with status {status}" + (f": {said[-1][:300]}" if said else "")
