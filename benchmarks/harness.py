"""Turns a case (one problem, one width) into rows of a CSV file: check, time, compare."""

import argparse
import csv
import dataclasses
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks import machine, problems, timing
from benchmarks.peers.common import aligned
from benchmarks.problems import Unavailable


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on one problem: the contenders, the check of results, and the counts of work.

    Attributes:
      n: dense columns, or features (SDDMM); 1 if there are none.
      schedule: label of our row.
      ours: our call.
      peers: name -> plan; a plan returns the call, or raises Unavailable or ImportError.
      wrong: largest error of a result over its rounding bound; above 1 the result is wrong.
      flops: useful flops: a multiply and an add per stored entry and column.
      moved: bytes if every operand is read and every result written once.
      bound: (seconds, name) of the machine's bound.
      beside: name -> call of other work, timed in turns; the column is its time over ours.
      more: further columns of the row.
    """

    n: int
    schedule: str
    ours: Callable[[], object]
    peers: dict[str, Callable[[], Callable[[], object]]]
    wrong: Callable[[object], float]
    flops: float
    moved: float
    bound: tuple[float, str]
    beside: dict[str, Callable[[], object]] = dataclasses.field(default_factory=dict)
    more: dict[str, object] = dataclasses.field(default_factory=dict)


def dense(*shape: int, seed: int = 2) -> np.ndarray:
    array = aligned(shape)
    np.random.default_rng(seed).standard_normal(out=array, dtype=np.float32)
    return array


def sampled(A, result: object) -> np.ndarray:
    """The values [nnz] of a result, which is either these or dense [m, k]."""
    result = np.asarray(result)
    if result.shape != A.shape:
        return result
    return result[np.repeat(np.arange(A.shape[0]), np.diff(A.indptr)), A.indices]


def excess(result, expected, terms, magnitude) -> float:
    """Largest |result - expected| over (terms + 10) eps magnitude: the bound of a float32 sum.

    `terms` is the number of summands of an entry, `magnitude` the sum of their absolute values.
    """
    error = np.abs(np.asarray(result, np.float64).reshape(expected.shape) - expected)
    allowed = (terms + 10) * np.finfo(np.float32).eps * magnitude + np.finfo(np.float32).tiny
    return float(np.max(error / allowed, initial=0.0))


def compare(case: Case, goal: Iterable[str], rounds: int) -> dict[str, object]:
    """The measured columns of a row; raises RuntimeError if our result is wrong.

    A peer that cannot run, fails or is wrong is left out, and `notes` says why.
    """
    contenders, notes = {"ours": case.ours}, []
    if not (error := case.wrong(case.ours())) <= 1:
        raise RuntimeError(f"our result is wrong: error {error:.3g} times the rounding bound")
    for name, plan in case.peers.items():
        try:
            call = plan()
            if not (error := case.wrong(call())) <= 1:
                raise Unavailable(f"wrong, error {error:.3g} times the rounding bound")
            contenders[name] = call
        except (ImportError, Unavailable, RuntimeError, MemoryError) as reason:
            why = str(reason) or type(reason).__name__
            notes.append(f"{name}: {why.splitlines()[0]}")
    times = timing.measure({**contenders, **case.beside}, rounds)
    notes += [f"{name}: {found.calls} calls" for name, found in times.items() if found.capped]
    ours = times.pop("ours")
    ratio = {name: found.seconds / ours.seconds for name, found in times.items()}
    rivals = [name for name in goal if name in ratio]
    best = min(rivals, key=ratio.get) if rivals else ""
    return {
        "us": 1e6 * ours.seconds,
        "gflops": 1e-9 * case.flops / ours.seconds,
        "gb_per_s": 1e-9 * case.moved / ours.seconds,
        "bound_us": 1e6 * case.bound[0],
        "bound_by": case.bound[1],
        "fraction_of_bound": case.bound[0] / ours.seconds,
        "spread": ours.spread,
        "best_peer": best,
        "x_best": ratio.get(best, ""),
        **{f"x_{name}": ratio.get(name, "") for name in case.peers},
        **{name: ratio[name] for name in case.beside},
        **case.more,
        "notes": "; ".join(notes),
    }


def beside_ours(
    problem: str, calls: dict[str, Callable[[], object]], quick: bool
) -> dict[str, object]:
    """A row of the time of calls["ours"], and of the others' over it, timed in turns; printed."""
    found = timing.measure(calls, 3 if quick else timing.ROUNDS)
    own = found.pop("ours").seconds
    ratios = {name: x.seconds / own for name, x in found.items()}
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"{problem}: {1e6 * own:.0f} us | {said}", flush=True)
    row = {"n": "", "schedule": "", "problem": problem, "us": 1e6 * own}
    return row | {f"x_{name}": ratio for name, ratio in ratios.items()}


def arguments(description: str, n: tuple[int, ...] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tag", default=None, help="problems with this tag (default: default)")
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="problems by name")
    if n:
        parser.add_argument("--n", nargs="+", type=int, default=None, help=f"default: {n}")
    parser.add_argument("--quick", action="store_true", help="a few problems; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    return parser


def stamp() -> dict[str, object]:
    """The columns of every row that say where and when it was measured; warns of other load."""
    about = {
        "commit": machine.commit(),
        "date": datetime.date.today().isoformat(),
        "device": machine.cpu_model(),
        "threads": machine.threads(),
        "load": machine.load_at_start(),
    }
    if about["load"] > 0.25 * about["threads"]:
        print(f"# load average {about['load']:.1f}: others use these cores, so do not trust ratios")
    return about


def run(
    op: str,
    cases: Callable[[object, int], Iterable[Case]],
    goal,
    args,
    n=(1,),
    tag="default",
    select=problems.select,
) -> None:
    """Measures the cases of the selected problems, prints a line for each and writes the CSV.

    A run over all problems of `tag` replaces the file; any other replaces the rows it measured.
    """
    found = select(args.tag or ("quick" if args.quick else tag), args.problems)
    whole = not (args.tag or args.problems or args.quick or getattr(args, "n", None))
    widths = getattr(args, "n", None) or (n[-4::2] if args.quick else n)
    about_run = stamp()
    peaks, rows = machine.probe(), []
    print(f"# {op}: {about_run['device']}, {peaks.cores} threads, {peaks.describe()}", flush=True)
    for problem in found:
        try:
            A = problem.build()
        except Unavailable as reason:
            print(f"{op} {problem.name}: skipped, {reason}", flush=True)
            continue
        about = {"m": A.shape[0], "k": A.shape[1], "nnz": A.nnz}
        for width in widths:
            for case in cases(A, width):
                start = time.perf_counter()
                row = {"problem": problem.name, "family": problem.family, **about}
                row |= {"n": case.n, "schedule": case.schedule}
                row |= compare(case, goal, 3 if args.quick else timing.ROUNDS)
                row |= about_run
                rows.append(row)
                print(_line(op, row, time.perf_counter() - start), flush=True)
    if args.out or not args.quick:
        write((args.out or machine.results_dir()) / f"{op}.csv", rows, whole)


def _line(op: str, row: dict[str, object], seconds: float) -> str:
    peers = {key[2:]: x for key, x in row.items() if key.startswith("x_") and key != "x_best"}
    ratios = " ".join(f"{name} {x:.1f}" for name, x in peers.items() if x != "")
    best = f"{row['x_best']:5.2f}x {row['best_peer']}" if row["best_peer"] else "no peer"
    return (
        f"{op} {row['problem']} n={row['n']} {row['schedule']}: {row['us']:.0f} us "
        f"{row['gflops']:.1f} GFLOP/s, {100 * row['fraction_of_bound']:.0f}% of {row['bound_by']}, "
        f"{best} | {ratios} [{seconds:.1f} s]"
    )


def _text(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def write(path: pathlib.Path, rows: list[dict[str, object]], whole: bool) -> None:
    """Writes rows as CSV, and about the machine beside it; unless `whole`, to the rows that the
    file has of other problems."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{key: _text(value) for key, value in row.items()} for row in rows]

    def key(row):
        return row["problem"], str(row["n"]), row["schedule"]

    if path.exists() and not whole:
        fresh = {key(row) for row in rows}
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if key(row) not in fresh] + rows
    with path.open("w", newline="") as file:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    about = {"device": machine.cpu_model(), **dataclasses.asdict(machine.probe())}
    about["versions"] = machine.versions()
    (path.parent / "machine.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"# {path}", file=sys.stderr)
