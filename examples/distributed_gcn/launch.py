"""Starts train.py in several processes on this machine, joined on loopback, and waits for them.

    python launch.py --processes 4 --graph mine.npz --run runs/mine

Options that are not listed here are those of train.py. What a process prints has its number in
front. When one ends with an error the others have as long as --timeout says to notice it, and then
they are ended; the same command again goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

TRAIN = Path(__file__).with_name("train.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(processes: int, devices: int, arguments: list[str]) -> list[subprocess.Popen]:
    """The processes of a program on CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    others = ["--processes", str(processes), "--coordinator", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, str(TRAIN), *arguments, *others]
    options: dict = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    options["errors"] = "backslashreplace"  # one byte that is no text must not end the reading
    started: list[subprocess.Popen] = []
    try:
        for i in range(processes):
            numbered = [*command, "--process", str(i)]
            started.append(subprocess.Popen(numbered, env=environment, **options))
    except BaseException:
        _killed(started)
        raise
    return started


def wait(
    started: list[subprocess.Popen], grace: float, out: TextIO, signals: Sequence[int] = ()
) -> list[int]:
    """The exit statuses. Once one process has failed the others have `grace` seconds to end; once
    `signals`, to which a handler adds, has one, none."""
    threads = [
        threading.Thread(target=_copied, args=(i, each, out)) for i, each in enumerate(started)
    ]
    deadline = None
    try:
        for thread in threads:
            thread.start()
        while not signals and any(each.poll() is None for each in started):
            if deadline is None and any(each.poll() for each in started):
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        _killed(started)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return [each.wait() for each in started]


def _killed(started: list[subprocess.Popen]) -> None:
    for each in started:
        each.kill()
        each.wait()


def _copied(number: int, process: subprocess.Popen, out: TextIO) -> None:
    assert process.stdout is not None
    for line in process.stdout:  # to the end: a full pipe would stop the process
        with contextlib.suppress(OSError, ValueError):  # of an `out` that is closed, or has no é
            out.write(f"[{number}] {line}")
            out.flush()


def ended(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def main(arguments: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="of each process")
    parser.add_argument("--timeout", type=int, default=60, metavar="SECONDS")
    given, rest = parser.parse_known_args(arguments)
    # No exception from the handler: in the constructor of a process it would lose that process.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    started = start(given.processes, given.devices, [*rest, "--timeout", str(given.timeout)])
    found = wait(started, 2 * given.timeout, sys.stdout, signals)
    if signals:
        sys.exit(f"{parser.prog}: ended, with the processes")
    if any(found):
        parts = [f"process {i} {ended(status)}" for i, status in enumerate(found) if status]
        sys.exit(f"{parser.prog}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
