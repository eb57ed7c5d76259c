"""A run on a GPU: its arguments, its time limit, and its result files."""

from __future__ import annotations

import argparse
import csv
import faulthandler
import functools
import json
import os
import pathlib
import time

from benchmarks import problems
from benchmarks.gpu import device, timing
from benchmarks.gpu.bench import LOST, Row
from sgap_jax.launch.launch import device_arch

CASE_SECONDS = 240  # a longer case has hung: the run ends, with its tables written


class Session:
    """A run from its arguments on.

    Attributes:
      dry: whether it runs on the emulator.
      names: names of the requested problems, or None.
      where: the device, its bandwidth and its architecture: arguments of a case.
      folder: where the results go.
      not_started: the cases for which no time was left.
    """

    def __init__(self, about_it: str | None, problems_by_default: str, argv: list[str] | None):
        parser = argparse.ArgumentParser(description=about_it)
        parser.add_argument(
            "--results", type=pathlib.Path, default=problems.ROOT / "benchmarks/results"
        )
        parser.add_argument(
            "--problems", nargs="+", metavar="NAME", help=f"default: {problems_by_default}"
        )
        parser.add_argument("--dry-run", action="store_true", help="on the emulator, tiny problems")
        args = parser.parse_args(argv)
        self.dry, self.names = args.dry_run, args.problems
        self._start = time.monotonic()
        self._seconds = float(os.environ.get("SGAP_GPU_SECONDS") or "inf")
        self._seconds /= int(os.environ.get("SGAP_GPU_RUNS") or 1)  # several runs share the time
        hardware = timing.DryRun() if self.dry else timing.gpu()
        self.where = hardware, hardware.bandwidth(), "sm_90" if self.dry else device_arch()
        self.folder = device.folder(args.results)
        self.not_started: list[str] = []
        self._skipped: list[str] = []

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._start

    def matrices(self, found: list[problems.BenchmarkProblem]) -> list:
        """(problem, matrix) of all problems whose data is present; the others are reported as
        skipped."""
        matrices = []
        for problem in found:
            try:
                matrices.append((problem, problem.build()))
            except problems.Unavailable as reason:
                self._skipped.append(f"{problem.name}: {reason}")
                print(f"skipped {problem.name}: {reason}", flush=True)
        return matrices

    def starts(self, case: str) -> bool:
        """Whether there is time for the case, and a device; if not the case is listed."""
        faulthandler.cancel_dump_traceback_later()
        if self.seconds > self._seconds or self.where[0].lost:
            self.not_started.append(case)
            return False
        if not self.dry:
            left = self._seconds - self.seconds
            faulthandler.dump_traceback_later(min(CASE_SECONDS, left + 60), exit=True)
        return True

    def write(self, rows: dict[str, list[Row]]) -> None:
        """Writes a CSV file for each name that has rows."""
        stamp = device.stamp()
        for name, found in rows.items():
            if not found:
                continue
            text = [
                {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in (row | stamp).items()}
                for row in found
            ]
            columns = list(dict.fromkeys(key for row in text for key in row))
            with (self.folder / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(text)

    def record(self, name: str, **more: object) -> dict:
        """Writes and returns the metadata of the run, NAME.json."""
        about = device.stamp() | {"versions": device.versions(), **more, "dry_run": self.dry}
        about |= {"not_started": self.not_started, "skipped": self._skipped}
        about["device_lost"] = self.where[0].lost
        about["seconds"] = round(self.seconds)
        (self.folder / f"{name}.json").write_text(json.dumps(about, indent=2) + "\n")
        return about

    def end(self, ours: list[Row]) -> None:
        """Ends the program with an error if any kernel, ours or a peer's, has lost the device, or
        if one of our results is wrong."""
        faulthandler.cancel_dump_traceback_later()
        if lost := self.where[0].lost:
            raise SystemExit(f"{LOST}: {lost}; {len(self.not_started)} cases were not started")
        if wrong := [row for row in ours if str(row.get("notes", "")).startswith("wrong")]:
            raise SystemExit(f"{len(wrong)} results of ours are wrong, the first: {wrong[0]}")


def about_case(problem: problems.BenchmarkProblem, A) -> Row:
    """The columns of a row that describe its matrix."""
    about = {"problem": problem.name, "family": problem.family}
    return about | {"m": A.shape[0], "k": A.shape[1], "nnz": A.nnz}


def said(row: Row, *of: str) -> Row:
    """Prints the row under the table or operation that `of` names, and returns it."""
    value = f"{row['us']:.1f} us" if "us" in row else row["notes"]
    named = f"{row['contender']} {row.get('schedule') or ''}".strip()
    print(*of, f"{row['problem']} n={row['n']} {named}: {value}", flush=True)
    return row


def heading(about: dict, what: str) -> list[str]:
    """The first lines of a summary: which run it is, and what it does not show."""
    lines = [
        f"{about['device']}, driver {about['driver']}, commit {about['commit']}, {about['date']}; "
        f"{what}",
        "",
    ]
    if about["dry_run"]:
        lines += ["A dry run on the emulator: no figure here says anything about a GPU.", ""]
    return [*lines, *not_started(about)]


def not_started(about: dict) -> list[str]:
    """The lines of a summary about cases that were not started."""
    if not about["not_started"]:
        return []
    lost = about["device_lost"]
    why = f"the device was lost ({lost})" if lost else "the time was over"
    return [f"Not started, {why}: {', '.join(about['not_started'])}.", ""]


def tiny_vectors() -> problems.BenchmarkProblem:
    """A small pattern of column vectors for the emulator."""
    make = functools.partial(problems.vectors, lambda: problems.uniform(6, 40, 0.2), 8)
    return problems.BenchmarkProblem("small_v8", "V=8 80%", "generated", make, frozenset())
