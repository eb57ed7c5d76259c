"""What runs where the caller says nothing: the schedules that are chosen, and the CUDA launches.

A choice is part of the behaviour: it decides the order of sums, and so the bits of a result. Why a
rule is as it is stands at `choose_schedule`; here is only what it says of problems of all kinds.
"""

import dataclasses
import hashlib
import itertools

from sgap_jax import Problem, candidate_schedules, choose_schedule
from sgap_jax.launch.defaults import NAMES, default_calls

OPS = ("spmm", "sddmm", "gspmm", "sparse_softmax")
FORMATS = ("CSR", "CVS(8)", "BCSR(4, 4)")
# Rows, columns and stored entries: few, many short rows, long rows, so many that a tile is packed.
SIZES = ((100, 80, 900), (50_000, 50_000, 150_000), (512, 4096, 200_000), (2048, 2048, 400_000))
COLUMNS = (1, 2, 4, 16, 32, 64, 100, 256, 1024)


def problems():
    """Problems that differ in all but the number of dense columns."""
    for op, dtype, format in itertools.product(OPS, ("float32", "float64", "float16"), FORMATS):
        for rows, columns, nnz in SIZES:
            yield Problem(op, (rows, columns), nnz, dtype=dtype, format=format)
            if op in ("spmm", "gspmm"):
                yield Problem(op, (rows, columns), nnz, dtype=dtype, format=format, permuted=True)
    for dtype, format in itertools.product(("float32", "bfloat16"), ("CSR", "CVS(8)", "CVS(16)")):
        yield Problem("attention", (2048, 2048), 200_000, batch=8, dtype=dtype, format=format)


def chosen(problem):
    """A line for each schedule: the numbers of dense columns that it is chosen for."""
    columns = COLUMNS if problem.op in ("spmm", "sddmm", "gspmm", "attention") else (1,)
    each = [(n, str(choose_schedule(dataclasses.replace(problem, n=n)))) for n in columns]
    return [
        f"    n = {', '.join(str(n) for n, _ in group)}: {schedule}"
        for schedule, group in itertools.groupby(each, lambda choice: choice[1])
    ]


def test_chosen_schedules(golden):
    """Problems with the same choices share a paragraph. On the machine that conftest.py sets."""
    found = {}
    for problem, platform in itertools.product(problems(), ("cpu", "cuda")):
        problem = dataclasses.replace(problem, platform=platform)
        permuted = ", transposed" if problem.permuted else ""
        what = f"{problem.op} on {platform}{permuted}: {problem.dtype} in {problem.format}"
        size = f"{problem.shape[0]} x {problem.shape[1]} with {problem.nnz}"
        found.setdefault("\n".join(chosen(problem)), []).append(f"{what}, {size}")
    golden.text("choices.txt", "\n".join("\n".join([*who, what]) for what, who in found.items()))


def described(call):
    """All that a launch consists of."""
    sizes = f"grid {call.grid}, block {call.block}, shared bytes {call.shared_bytes}"
    memory = f"zeroed results {call.zero}, results in place {call.in_place}"
    return f"{call.source}{call.kernel}: {sizes}\nscalars {call.scalars}, {memory}"


def test_candidates(golden):
    """What `tune` tries."""
    lines = []
    for problem in (
        Problem("spmm", (2048, 2048), 400_000, n=64),
        Problem("sddmm", (2048, 2048), 400_000, n=64, format="CVS(8)"),
        Problem("spmm", (2048, 2048), 400_000, n=64, platform="cuda"),
        Problem("spmm", (2048, 2048), 400_000, 64, 1, "float16", "CVS(8)", "cuda"),
        Problem("sddmm", (2048, 2048), 400_000, 64, 1, "float16", "CVS(8)", "cuda"),
        Problem("row_sum", (2048, 2048), 400_000, platform="cuda"),
        Problem("attention", (2048, 2048), 400_000, n=64, batch=8, platform="cuda"),
    ):
        lines += [str(problem), *(f"    {schedule}" for schedule in candidate_schedules(problem))]
    golden.text("candidates.txt", "\n".join(lines) + "\n")


def test_default_launches(golden):
    """The kernels that a wheel carries: their number, a checksum of all, and one in full."""
    found = []
    for name in NAMES:
        calls = sorted(map(described, default_calls(name).values()))
        checksum = hashlib.sha256("\n".join(calls).encode()).hexdigest()[:16]
        found.append(f"# {name}: {len(calls)} kernels, {checksum}\n{calls[0]}\n")
    golden.text("launches.txt", "\n".join(found))
