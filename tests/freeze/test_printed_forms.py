"""What formats, arrays, schedules and expressions print as, and that schedules parse back.

Printed schedules are kept in users' files and in results of `tune`, so their text is an interface.
"""

import dataclasses
from fractions import Fraction

import jax
import numpy as np
import pytest
from compiler_chains import SDDMM, SPMM, SPMV, cpu_presets, gpu_presets

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    AtomicParallelism,
    AttentionTile,
    Compressed,
    CpuTile,
    Dense,
    Format,
    HashRows,
    OctetTile,
    PaperOctetTile,
    Problem,
    Reference,
    Schedule,
    ScheduleError,
    Singleton,
    SparseArray,
    SubwarpTile,
    Tuned,
    Unfused,
    WarpTile,
)
from sgap_jax.compiler import Schedule as LoopSchedule
from sgap_jax.compiler import Tensor, assign, gradient, index_vars

FORMATS = [
    *(CSR, CSC, COO, Format(COO.levels, (1, 0)), CSF(1), CSF(2), CSF(3), CSF(3, order=(2, 0, 1))),
    *(CVS(8), CVS(8).transposed, BCSR(2, 4), BCSR(2, 4).transposed),
    *(Format((Dense, Compressed, Compressed)), Format((Compressed, Compressed, Dense), (1, 0, 2))),
    Format((Compressed(unique=False), Singleton, Singleton)),
    *(Dense(), Dense(4), Compressed(), Compressed(unique=False), Singleton()),
]

SCHEDULES = [
    *(Reference(), Unfused(), CpuTile(), CpuTile(columns=32, nonzeros=512, packed=True)),
    *(HashRows(), HashRows(sorted=False)),
    *(AttentionTile(), AttentionTile(32, share=4), AttentionTile(8, octet=True)),
    *(OctetTile(), OctetTile(4, 128, 32, 3, 2, swizzle=True, tf32=True)),
    *(SubwarpTile(), SubwarpTile(2, tile_n=32, tile_k=4, subwarp=16, split=4, block_size=64)),
    *(WarpTile(), WarpTile(4, tile_k=48), PaperOctetTile(), PaperOctetTile(2, 8, "shuffle")),
    *(AtomicParallelism(row=1), AtomicParallelism(nnz=4, col=2, group=8, block_size=128)),
    AtomicParallelism(row=Fraction(1, 8), col=4, group=8, tile_size=8),
    AtomicParallelism(row=Fraction(1, 32), group=8, worker_dim_r=Fraction(1, 4)),
    AtomicParallelism(row=2, col=Fraction(1, 4), group=4),
]

PROBLEM = Problem("spmm", (1000, 800), 20_000, n=64)
PROBLEMS = [
    *(PROBLEM, dataclasses.replace(PROBLEM, format="CVS(8)", dtype="float16", permuted=True)),
    *(Problem("sddmm", (1000, 800), 20_000, n=64, format="CVS(8)", dtype="float16"),),
    *(Problem("sddmm", (1000, 800), 20_000, n=64), Problem("gspmm", (1000, 800), 20_000, n=64)),
    *(Problem("row_sum", (1000, 800), 20_000), Problem("sparse_softmax", (1000, 800), 20_000)),
    Problem("attention", (1000, 800), 20_000, n=64, batch=8, format="CVS(8)", dtype="bfloat16"),
]


def arrays():
    dense = np.float32([[1, 0, 2], [0, 0, 0], [0, 3, 0], [4, 0, 5]])
    A = SparseArray.from_dense(dense)
    yield from (A, A.T, A.asformat(COO), A.asformat(CSF(2)), A.asformat(CVS(2)))
    yield from (A.asformat(BCSR(2, 2)), A.astype(np.float64), SparseArray.from_dense(dense[1:2]))
    yield jax.eval_shape(lambda: A)
    yield jax.tree.map(lambda x: None, A)
    yield dataclasses.replace(A, values=np.zeros((7, 5), np.float32))


def expressions():
    i, j, k = index_vars("i j k")
    yield from (SPMV, SPMM, SDDMM, i, Tensor("A", CSR), Tensor("A", CSR)[i, j], Tensor("C")[()])
    yield from (assign("ij,jk->ik", {"A": CSR}, reduction="max"), assign("i,i->"))
    yield from (gradient(SPMM, "A"), gradient(SPMM, "B"), gradient(SDDMM, "C"))


def both(value):
    """`str`, and `repr` where that is another text."""
    text = str(value)
    return text if repr(value) == text else f"{text}\n    repr: {value!r}"


def explained():
    """A heading and the loops, for each schedule of an operation that it is for."""
    for problem in PROBLEMS:
        for schedule in SCHEDULES:
            for platform in ("cpu", "cuda"):
                there = dataclasses.replace(problem, platform=platform)
                try:
                    schedule.check(there)
                except (NotImplementedError, ScheduleError):
                    continue
                permuted = ", transposed" if there.permuted else ""
                where = f"{there.op}, {there.format}{permuted}, {there.dtype}, {platform}"
                yield f"## {schedule}: {where}\n{schedule.explain(there)}"
                break


def test_printed_forms(golden):
    presets = {**gpu_presets(), **cpu_presets()}
    tuned = Tuned(CpuTile(64), ((CpuTile(64), 1e-5), (CpuTile(), 2e-5)), CpuTile())
    sections = {
        "formats and levels": map(both, FORMATS),
        "arrays": map(both, arrays()),
        "schedules": map(both, SCHEDULES),
        "problems and results of tune": map(both, (PROBLEM, tuned)),
        "expressions": map(both, expressions()),
        "a schedule of loops": [both(LoopSchedule(SPMV).split("i", "i0", "i1", 16))],
        "provenance of the presets": (f"{n}\n{s.provenance()}" for n, s in presets.items()),
        "schedules explained": explained(),
    }
    found = [f"# {name}\n\n" + "\n".join(texts) + "\n" for name, texts in sections.items()]
    golden.text("printed.txt", "\n".join(found))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules_parse_back(schedule):
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.parse(f"  {schedule}\n") == schedule


def test_every_kind_of_schedule_is_here():
    """A new kind of schedule in the package's namespace needs a line in SCHEDULES."""
    import sgap_jax

    kinds = {x for x in vars(sgap_jax).values() if isinstance(x, type) and issubclass(x, Schedule)}
    assert kinds - {Schedule} == {type(schedule) for schedule in SCHEDULES}
