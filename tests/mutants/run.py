"""Plants each bug of tests/mutants/bugs.py in a copy of the checkout, and says which tier of the
test suite notices it.

    python tests/mutants/run.py                      all bugs, whole tiers: about a day
    python tests/mutants/run.py --focused            of each tier only the bug's own tests: 1 to 2 h
    python tests/mutants/run.py NAME ... --tier test no tier beyond `test`
    python tests/mutants/run.py --list               the bugs that this processor runs

The copy lies outside of the checkout, with a virtual environment that borrows the packages of the
running Python. Bugs in Python and in CUDA headers need no build: headers are read from the copy.
Bugs in C++ are built in one build folder, from the same sources, so that each compiles only the
files that it touches. A test that fails with a bug is run again without it, where it must pass.
Exits with 1 where no tier notices a bug.
"""

import argparse
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from bug import ROOT, Bug, Moved, planted
from bugs import BUGS

TIERS = ("check", "test", "all")
# Exit statuses of pytest: some test failed; stopped, as by an error in collecting; no tests.
FAILED, STOPPED, NO_TESTS = 1, 2, 5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a bug met: the tier that noticed it and the first test that failed there; or "none", or
    "limit" where a tier was not done in time, which says nothing."""

    bug: Bug
    tier: str
    test: str
    seconds: float


class Copy:
    """A copy of the checkout with a virtual environment and, where it is asked for, a build."""

    def __init__(self, folder: Path, workers: int, seconds: float) -> None:
        self.folder, self.root = folder, folder / "checkout"
        self.python = folder / "venv" / "bin" / "python"
        self.build, self.clean_build = folder / "build", folder / "build_without_bugs"
        self.logs = folder / "logs"
        self.workers, self.seconds = workers, seconds
        self.logs.mkdir(parents=True, exist_ok=True)
        self.lock = (folder / "lock").open("w")  # held until the process ends
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit(f"another run uses {folder}: name another with --folder") from None
        self._copy_checkout()
        self._make_environment()
        self.library = self._install(_built_library())

    def _copy_checkout(self) -> None:
        """The files that git knows or does not ignore. One that has not changed keeps its time, so
        that a build of an earlier run can go on."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
        for path in self.root.rglob("*"):
            if path.is_file() and str(path.relative_to(self.root)) not in names:
                path.unlink()
        for name in names:
            source, target = ROOT / name, self.root / name
            if target.is_file() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)

    def _make_environment(self) -> None:
        """Sees the copy first, then what the running Python sees. Hooks of an editable install are
        not borrowed: folders that a .pth file adds have no .pth files of their own."""
        home = self.folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", home], check=True)
        standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        standard |= {str(Path(__file__).parent), str(ROOT), str(ROOT / "tests")}
        standard |= {str(ROOT / "tests" / "helpers")}
        borrowed = [p for p in sys.path if os.path.isdir(p) and p not in standard]
        show = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.run([self.python, "-c", show], check=True, capture_output=True, text=True)
        lines = "\n".join([str(self.root), *borrowed]) + "\n"
        (Path(site.stdout.strip()) / "mutants.pth").write_text(lines)

    def _install(self, library: Path) -> Path:
        target = self.root / "sgap_jax" / library.name
        shutil.copy(library, target)
        return target

    # The native library.

    def prepare_build(self) -> None:
        """The library of the sources without a bug, built once."""
        tools = self.folder / "tools"
        if not (tools / "ready").exists():
            print("== build tools", flush=True)
            requires = tomllib.loads((self.root / "pyproject.toml").read_text())["build-system"]
            subprocess.run([sys.executable, "-m", "venv", "--clear", tools], check=True)
            pip = [tools / "bin" / "python", "-m", "pip", "install", "--quiet"]
            subprocess.run([*pip, *requires["requires"], "cmake", "ninja"], check=True)
            (tools / "ready").touch()
        print("== building the library without bugs", flush=True)
        tool = lambda name: str(tools / "bin" / name)
        configure = [tool("cmake"), "-S", self.root, "-B", self.build, "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_BUILD_TYPE=Release"]
        configure += [f"-DPython_EXECUTABLE={tool('python')}"]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        error = self._compile()
        if error:
            raise SystemExit(f"the checkout without a bug does not build:\n{error}")
        shutil.rmtree(self.clean_build, ignore_errors=True)
        shutil.copytree(self.build, self.clean_build, symlinks=True)

    def _compile(self) -> str:
        """Builds and installs the library; the compiler's words where that fails."""
        command = [self.folder / "tools" / "bin" / "cmake", "--build", self.build]
        command += ["--target", "_native", "--parallel", str(self.workers)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return done.stdout[-3000:] + done.stderr[-3000:]
        self._install(next(self.build.glob("_native*.so")))
        return ""

    def _restore_build(self) -> None:
        shutil.rmtree(self.build)
        shutil.copytree(self.clean_build, self.build, symlinks=True)
        self._install(next(self.build.glob("_native*.so")))

    # One bug.

    def meet(self, bug: Bug, tiers: list[str], focused: bool) -> Outcome:
        """Plants a bug, runs the tiers until one fails, and takes the bug out again."""
        path, start = self.root / bug.file, time.monotonic()
        whole, status = path.read_text(), path.stat()
        changed = planted(bug, whole)
        tests = bug.focus if focused else ()
        try:
            path.write_text(changed)
            if bug.language == "C++" and (error := self._compile()):
                raise SystemExit(f"{bug.name} does not compile: it is no bug\n{error}")
            tier, test = self._first_to_notice(bug.name, tiers, tests)
        finally:
            path.write_text(whole)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            if bug.language == "C++":
                self._restore_build()
        seconds = time.monotonic() - start
        if "::" in test and self._pytest("all", [test], f"{bug.name}.without")[0] not in (0, None):
            raise SystemExit(f"{test} fails without {bug.name} too: mend that first")
        return Outcome(bug, tier, test, seconds)

    def _first_to_notice(
        self, name: str, tiers: list[str], tests: Sequence[str]
    ) -> tuple[str, str]:
        for tier in tiers:
            status, test = self._pytest(tier, tests, f"{name}.{tier}")
            if status is None:
                return "limit", f"({tier} was not done in {self.seconds:.0f} s)"
            if status not in (0, NO_TESTS):
                return tier, test
        return "none", ""

    def _pytest(self, tier: str, tests: Sequence[str], log: str) -> tuple[int | None, str]:
        """The exit status of a tier, or of some tests of it, and the first test that failed; None
        at the limit of time. The test of the list of bugs is left out: it notices them all."""
        command = [str(self.python), "-m", "pytest", f"--tier={tier}", "-x", "-q", "-rfE"]
        command += ["--tb=short", "-p", "no:cacheprovider", "--ignore=tests/mutants"]
        command += ["-n", str(self.workers), "--dist", "loadgroup"] if self.workers > 1 else []
        command += tests
        # What a planted bug compiles and keeps must not reach the user's caches.
        environment = os.environ | {"XDG_CACHE_HOME": str(self.folder / "cache")}
        environment.pop("PYTHONPATH", None)
        path = self.logs / f"{log}.txt"
        with path.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(self.seconds)
            except BaseException as stop:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(stop, subprocess.TimeoutExpired):
                    return None, ""
                raise
        if status in (0, NO_TESTS):
            return status, ""
        found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", path.read_text(), re.MULTILINE)
        if found is None and status not in (FAILED, STOPPED) and status >= 0:
            raise SystemExit(f"pytest did not run ({status}): see {path}")
        return status, found[1] if found else f"(the process ended with {status})"


def _built_library() -> Path:
    """The native library that the running Python has."""
    for folder in map(Path, sys.path):
        for path in (folder / "sgap_jax").glob("_native*.so"):
            return path
    raise SystemExit("no built sgap_jax here: run this by `make mutants`, or build it first")


def _table(outcomes: list[Outcome]) -> str:
    width = max(len(outcome.bug.name) for outcome in outcomes)
    return "\n".join(
        f"{x.bug.name:{width}}  {x.bug.language:6}  {x.tier:5}  {x.seconds:5.0f} s  {x.test}"
        for x in outcomes
    )


def _arguments() -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("names", nargs="*", help="bugs to plant; all of them if none is named")
    parser.add_argument("--tier", choices=TIERS, default="all", help="the last tier that is run")
    parser.add_argument("--focused", action="store_true", help="only tests likely to notice a bug")
    parser.add_argument("--first", action="store_true", help="stop at a bug that no tier notices")
    parser.add_argument("--list", action="store_true", help="list the bugs, and plant none")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest and of builds")
    parser.add_argument("--seconds", type=float, default=7200, help="limit of one tier")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "sgap_jax_mutants",
        help="where the copy and its build are kept",
    )
    return parser.parse_args()


def _is_run(bug: Bug) -> bool:
    """Whether this processor runs what the bug breaks."""
    about = Path("/proc/cpuinfo")
    words = set(about.read_text().split()) if about.exists() else set()
    return words.issuperset(bug.needs)


def main() -> int:
    given = _arguments()
    known = {bug.name: bug for bug in BUGS}
    if unknown := [name for name in given.names if name not in known]:
        raise SystemExit(f"no bug {unknown[0]!r}; --list shows them")
    chosen = [known[name] for name in given.names] or [bug for bug in BUGS if _is_run(bug)]
    if given.list:
        for bug in chosen:
            print(f"{bug.name}  ({bug.room}, {bug.file})\n    {bug.breaks}")
        return 0
    for bug in chosen:  # all entries are looked at before hours are spent on the first
        planted(bug, (ROOT / bug.file).read_text())
    copy = Copy(given.folder.resolve(), given.workers, given.seconds)
    if any(bug.language == "C++" for bug in chosen):
        copy.prepare_build()
    tiers = list(TIERS[: TIERS.index(given.tier) + 1])
    outcomes = []
    for bug in chosen:
        outcomes.append(copy.meet(bug, tiers, given.focused))
        print(_table(outcomes[-1:]), flush=True)
        if given.first and outcomes[-1].tier not in TIERS:
            break
    counts = {word: sum(x.tier == word for x in outcomes) for word in (*tiers, "none", "limit")}
    print("\n" + _table(outcomes))
    print("\n" + ", ".join(f"{word}: {count}" for word, count in counts.items() if count))
    print(f"the output of each run is in {copy.logs}")
    return int(counts["none"] + counts["limit"] > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Moved as error:
        sys.exit(f"error: {error}")
