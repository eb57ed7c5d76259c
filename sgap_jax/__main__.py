"""`python -m sgap_jax info` prints what was chosen, versions and devices; `calibrate` measures what
the choice of schedules needs of this CPU; `doctor` tests each layer on the way to a GPU."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

from sgap_jax.runtime import info

_INTERRUPTED = 130  # as shells number what Ctrl-C ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sgap_jax")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, CPU kernels, devices")
    doctor = commands.add_parser("doctor", help="test each layer on the way to a GPU")
    doctor.add_argument("--seconds", type=float, default=30.0, help="time for all of it")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    doctor.add_argument(
        "--only", nargs="+", default=[], metavar="FAMILY", help="test these kernels: spmm octet"
    )
    constants = commands.add_parser(
        "calibrate", help="measure this CPU for the choice of schedules"
    )
    constants.add_argument("--seconds", type=float, default=10.0, help="time to measure")
    arguments = parser.parse_args()
    if arguments.command == "calibrate":
        return _calibrate(arguments.seconds)
    if arguments.command == "doctor":
        from sgap_jax.doctor.cases import cases

        names = sorted({case.family for case in cases()}) if arguments.only else []
        for name in arguments.only:
            if not any(family.startswith(name) for family in names):
                doctor.error(f"--only: no family begins with {name!r}: {', '.join(names)}")
        if not arguments.seconds > 0:
            doctor.error(f"--seconds: expected more than 0, got {arguments.seconds}")
        try:
            return _doctor(arguments.seconds, arguments.only, arguments.json)
        except KeyboardInterrupt:
            return _INTERRUPTED
    facts = info()
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        print(f"{name:<{width}}  {text}")
    return 0


def _calibrate(seconds: float) -> int:
    from sgap_jax.calibration import calibrate, file

    try:
        found = calibrate(seconds)
    except KeyboardInterrupt:
        print("python -m sgap_jax calibrate: interrupted; nothing is kept", file=sys.stderr)
        return _INTERRUPTED
    except (OSError, ValueError) as error:
        print(f"python -m sgap_jax calibrate: {error}", file=sys.stderr)
        return 1
    for name, value in found.items():
        print(f"{name:<{max(map(len, found))}}  {value}")
    print(f"kept in {file() or 'no file: SGAP_CACHE_DIR is empty'}, for processes from now on")
    return 0


def _doctor(seconds: float, only: list[str], file: Path | None) -> int:
    from sgap_jax.doctor.doctor import examine

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # what takes the messages is full or gone
            print(text, file=sys.stderr, flush=True)

    report = examine(seconds, only, say=say)
    if file is not None:
        try:
            file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        except OSError as error:
            say(f"the report cannot be written to {file} ({error.strerror})")
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of folders may be in any script
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(report.text(), flush=True)
    except OSError as error:
        say(f"the report cannot be printed ({error.strerror})")
        sys.stdout = open(os.devnull, "w")  # what is left is flushed at exit
        return 1
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
