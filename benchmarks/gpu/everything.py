"""`make gpu`: the doctor, then the tests, then the benchmarks, and a report to attach to an issue.

    python benchmarks/gpu/everything.py --results DIR [--again]     a part after the other
    python benchmarks/gpu/everything.py --workers                   how many test processes fit

Each part is a target of the Makefile. Whatever happens, DIR/gpu_report.md and .json say what was
done, what failed first and why. A part that is finished in DIR, at this commit, is not run again.

Python's library alone: it must run where nothing else is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Targets in the order of goals, and what each is.
PARTS = {
    "gpu-doctor": "driver, compiler, kernels, XLA: each layer on its own",
    "gpu-test": "every operation against its oracle on the GPU",
    "gpu-bench": "SpMM, SDDMM and softmax against other libraries",
    "gpu-octets": "column vectors on tensor cores",
    "gpu-attention": "attention and its gradients",
    "gpu-figures": "Figures 17 and 19 of vectorSparse",
    "gpu-tables": "Tables 1 to 3 of Sgap",
    "gpu-tuned": "Tables 4 and 5 and Figure 11 of Sgap",
    "gpu-taco": "Figures 16, 18 and 20 of TACO and the study of its section 8.3",
}
# Layers of the doctor without which no later part can run.
NEEDED = ("driver", "architecture", "XLA")
DONE, FAILED, LEFT_OUT = "done", "failed", "not started"
_TAIL = 60  # lines of the output of a part that failed
_WORKER_BYTES = 3 << 30  # of a GPU, for a test process: its context and the largest test
_HOST_BYTES = 2 << 30  # of the machine, for the same
_MOST_WORKERS = 12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--again", action="store_true", help="run finished parts too")
    parser.add_argument("--workers", action="store_true", help="print a number and end")
    parser.add_argument("--make", default="make")
    arguments = parser.parse_args(argv)
    if arguments.workers:
        print(workers())
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):  # parts may print in any script
        sys.stdout.reconfigure(errors="backslashreplace")
    folder = arguments.results.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"{folder} cannot be made ({error.strerror}): name another with RESULTS=")
        return 1
    return Run(folder, arguments.make, arguments.again).all()


class Run:
    """All parts into a folder."""

    def __init__(self, folder: pathlib.Path, make: str, again: bool) -> None:
        self._folder, self._make = folder, make
        self._report = {"commit": commit(), "parts": {}}
        before = {} if again else read(folder / "gpu_report.json")
        if before.get("commit") == self._report["commit"]:
            kept = before.get("parts")
            self._report["parts"] = {
                name: part
                for name, part in (kept if isinstance(kept, dict) else {}).items()
                if isinstance(part, dict) and part.get("state") == DONE
            }

    def all(self) -> int:
        why = ""
        try:
            for name in PARTS:
                if name in self._report["parts"]:
                    print(f"== {name}: done before, in {self._folder}", flush=True)
                    continue
                if why:
                    self._report["parts"][name] = {"state": LEFT_OUT, "why": why}
                    continue
                self._part(name)
                self.write()
                why = self._stops(name)
        except KeyboardInterrupt:
            print("interrupted: run it again to go on", flush=True)
        finally:
            for name in PARTS:
                left = {"state": LEFT_OUT, "why": why or "interrupted"}
                self._report["parts"].setdefault(name, left)
            self.write()
        print(f"{self._folder / 'gpu_report.md'}: attach it, and gpu_report.json, to an issue")
        return 0 if all(part["state"] == DONE for part in self._report["parts"].values()) else 1

    def _part(self, name: str) -> None:
        print(f"== {name}: {PARTS[name]}", flush=True)
        if name == "gpu-doctor":  # what an earlier run found would be taken for this one's
            with contextlib.suppress(OSError):
                (self._folder / "doctor.json").unlink()
        start, lines = time.monotonic(), []
        command = [self._make, "--no-print-directory", name, f"RESULTS={self._folder}"]
        try:
            with subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    print(line, end="", flush=True)
                    lines.append(line.rstrip())
            status = process.returncode
        except OSError as error:
            status = 127
            lines.append(f"{command[0]}: {error.strerror}")
        part = {"state": FAILED if status else DONE, "seconds": round(time.monotonic() - start)}
        if status:
            part |= {"status": status, "output": lines[-_TAIL:]}
        self._report["parts"][name] = part

    def _stops(self, name: str) -> str:
        """Why no other part can start after this one; empty if they can."""
        if self._report["parts"][name]["state"] == DONE or name != "gpu-doctor":
            return ""
        doctor = read(self._folder / "doctor.json")
        if not doctor:
            return "the package could not be installed, or the doctor did not end"
        return str(doctor["conclusion"]) if doctor.get("first_failed") in NEEDED else ""

    def write(self) -> None:
        """Writes the report; a disk that is full costs the report, and says so."""
        about = self._report | {
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
            "python": sys.version.split()[0],
            "doctor": read(self._folder / "doctor.json"),
            "results": found(self._folder),
        }
        try:
            replace(self._folder / "gpu_report.json", json.dumps(about, indent=2))
            replace(self._folder / "gpu_report.md", "\n".join(page(about)))
        except OSError as error:
            print(f"the report cannot be written to {self._folder}: {error.strerror}", flush=True)


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file by rename: an interruption leaves the one before, from which a run goes on."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text + "\n", encoding="utf-8", errors="replace")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def page(about: dict) -> Iterator[str]:
    """The report as Markdown: what failed first, the parts, the doctor's table, failures."""
    parts = {name: about["parts"].get(name, {"state": LEFT_OUT}) for name in PARTS}
    doctor = about["doctor"]
    yield f"# Report of `make gpu`, commit {about['commit']}, {about['date']}"
    yield ""
    failed = next((name for name, part in parts.items() if part["state"] == FAILED), None)
    if failed is not None:
        yield f"**The first part that failed is {failed}: {PARTS[failed]}.**"
    elif all(part["state"] == DONE for part in parts.values()):
        yield "All parts are done."
    if doctor:
        yield f"\nThe doctor: {doctor.get('conclusion', '')}"
    yield "\n| part | state | seconds | |\n|---|---|---|---|"
    for name, part in parts.items():
        row = (name, part["state"], part.get("seconds", ""), part.get("why", PARTS[name]))
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"
    if doctor:
        yield "\n## The doctor\n"
        yield from (f"- {name}: {value}" for name, value in doctor.get("facts", {}).items())
        yield "\n| layer | state | found |\n|---|---|---|"
        for layer in doctor.get("layers", []):
            text = " ".join(filter(None, (layer["found"], layer["do"])))
            yield f"| {layer['name']} | {layer['state']} | {text.replace('|', '/')} |"
        yield from kernels(doctor.get("kernels", []))
    for file, tests in about["results"].get("tests", {}).items():
        counts = ", ".join(f"{tests.get(n, 0)} {n}" for n in ("passed", "failed", "skipped"))
        yield f"\n## Tests ({file})\n\n{counts}\n"
        for test, why in list(tests.get("failures", {}).items())[:20]:
            yield f"- `{test}`\n\n```\n{why[-1500:]}\n```"
    for file, text in about["results"].get("summaries", {}).items():
        yield f"\n## {file}\n\n{text}"
    for name, part in parts.items():
        if part.get("output"):
            yield f"\n## The end of {name}\n\n```"
            yield from part["output"]
            yield "```"


def kernels(rows: list[dict]) -> Iterator[str]:
    """The doctor's kernels as a table."""
    if not rows:
        return
    yield "\n| family | call | kernel | registers | local bytes | code for | outcome |"
    yield "|---|---|---|---|---|---|---|"
    names = ("family", "about", "kernel", "registers", "local_bytes", "binary_version")
    for row in rows:
        cells = [*(str(row.get(name, "-")) for name in names), row.get("why") or "ok"]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def found(folder: pathlib.Path) -> dict:
    """What the parts have written: test outcomes and summaries, by file."""
    tests = {str(p.relative_to(folder)): read(p) for p in folder.glob("*/gpu_tests.json")}
    summaries = {}
    for path in sorted(folder.glob("*/*.md")):
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            summaries[str(path.relative_to(folder))] = text
    return {"tests": tests, "summaries": summaries}


def read(path: pathlib.Path) -> dict:
    """A JSON object; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def commit() -> str:
    """The commit, marked where files differ from it; "unknown" outside of git."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def workers() -> int:
    """How many test processes the free memory of the first GPU and of the machine, and its
    processors, allow; 1 to 12."""
    limits = [_MOST_WORKERS, len(os.sched_getaffinity(0)), *_gpu_limit(), *_host_limit()]
    return max(min(limits), 1)


def _gpu_limit() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return [(int(done.stdout.split()[0]) << 20) // _WORKER_BYTES]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return [1]


def _host_limit() -> list[int]:
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration, ValueError):
        return []
    return [free // _HOST_BYTES]


if __name__ == "__main__":
    sys.exit(main())
