"""All benchmarks of a GPU: python -m benchmarks.gpu.run [--results DIR] [--dry-run]

SGAP_GPU_SECONDS: no case starts after that many seconds; cases that did not start are listed.
"""

from __future__ import annotations

from benchmarks import problems
from benchmarks.gpu import summary
from benchmarks.gpu.bench import MOST_POINTS, OURS, Case, Row
from benchmarks.gpu.session import Session, about_case, said
from benchmarks.gpu.vectors import VectorCase
from sgap_jax.launch.defaults import OF_VECTORS

# Ordered by goal, so that a run that ends early has the most important ones.
PLAN = tuple(("spmm", n) for n in (4, 64, 1, 16, 128))
PLAN += (("sddmm", 64), ("sddmm", 128), ("softmax", 1))
PLAN += (("spmm_vectors", 64), ("spmm_vectors", 256), ("sddmm_vectors", 64))
DRY_PLAN = (("spmm", 4), ("sddmm", 4), ("softmax", 1), ("spmm", 1))
DRY_PLAN += (("spmm_vectors", 4), ("sddmm_vectors", 4))

VECTOR_TAGS = {"vectors", "vectors_ci"}  # of matrices made of column vectors


def main(argv: list[str] | None = None) -> None:
    session = Session(__doc__, "all", argv)
    found = problems.select("ci" if session.dry else "default", session.names)
    if not (session.dry or session.names):
        found += problems.select("gpu") + problems.select("vectors_quick")
    matrices = session.matrices(found)
    rows: dict[str, list[Row]] = {name: [] for name in ("spmm", "sddmm", "softmax", "points")}
    rows |= {name: [] for name in OF_VECTORS}
    for op, n in DRY_PLAN if session.dry else PLAN:
        for problem, A in matrices:
            if op == "sddmm" and "gpu" in problem.tags:
                continue  # its oracle takes a minute
            if (op in OF_VECTORS) != bool(problem.tags & VECTOR_TAGS):
                continue
            if not session.starts(f"{op} {problem.name} n={n}"):
                continue
            about = about_case(problem, A)
            make, of = (VectorCase, OF_VECTORS[op]) if op in OF_VECTORS else (Case, op)
            case = make(of, A, n, *session.where)
            rows[op] += [said(about | row, op) for row in case.rows()]
            if op == "spmm" and n == 4:
                few = 3 if session.dry else MOST_POINTS
                rows["points"] += [about | row for row in case.search(few)]
            session.write(rows)
    about = session.record("run", gb_per_s=1e-9 * session.where[1])
    print(summary.write(session.folder).read_text())
    print(f"{session.folder}: {about['seconds']} s; {len(session.not_started)} cases not started")
    session.end([row for found in rows.values() for row in found if row["contender"] in OURS])


if __name__ == "__main__":
    main()
