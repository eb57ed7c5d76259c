"""Products with few columns: python -m benchmarks.bench_narrow [--kind ...] [--problems NAME ...]

A B and A^T B with 1, 4 and 8 columns and, in float64, with one, beside SciPy, torch and MKL's
inspector on the same arrays of A; A^T B where everybody has made A^T in CSR beforehand
(`converted`), as MKL's inspector does for `transposed` too; 100 products one after another, x <- A
x / |A x|, in one `jit` beside loops of SciPy and torch; and 20 steps of LOBPCG for the four
greatest eigenvalues in float64, beside SciPy's. Neither has converged by then everywhere: both are
within 1% of `eigsh`. A row has our time and, of each peer, its time over ours.
"""

import argparse
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg

from benchmarks import harness, machine, problems, timing
from benchmarks.peers import common
from benchmarks.peers import spmm as peers
from benchmarks.problems import Unavailable
from sgap_jax import SparseArray, linalg, spmm

PROBLEMS = ("uniform_10k_0.1pct", "uniform_10k_1pct", "rmat_131k_1m", "weights_2048x1024_90pct")
PROBLEMS += ("bcsstk16", "delaunay_n15", "wiki_squirrel", "email_enron", "coauthor_cs")
PROBLEMS += ("pubmed", "cora")  # loops only
ALONE, IN_LOOPS = 100_000, 10_000  # the fewest nonzeros
STEPS = 100
EIGENVALUES, EIGENVALUE_STEPS = 4, 20


def products(A, n: int, transpose: bool, converted: bool = False):
    """(name -> plan of a call) of A B or A^T B, ours first; of A^T B with A^T in CSR."""
    own = SparseArray.from_scipy(A)
    if converted:
        A, own, transpose = A.T.tocsr(), own.T.tocsr(), False
    rows = A.shape[0] if transpose else A.shape[1]
    B = common.aligned((rows, n), A.data.dtype)
    B[:] = np.random.default_rng(2).standard_normal((rows, n))

    def with_torch():
        torch, T = common.torch_module(), common.torch_csr(A)
        T, x = T.t() if transpose else T, torch.from_numpy(peers.vector_if_one(B))
        return lambda: T @ x

    product = jax.jit(lambda A, B: spmm(A, B, transpose=transpose))
    left, x = A.T if transpose else A, peers.vector_if_one(B)
    return {
        "ours": lambda: common.ready(product, own, jnp.asarray(B)),
        "scipy": lambda: lambda: left @ x,
        "torch_csr": with_torch,
        "mkl_inspector": lambda: peers.with_mkl_inspector(A, B, transpose=transpose),
    }


def loops(A):
    x0 = np.random.default_rng(2).random(A.shape[0]).astype(A.data.dtype)

    def with_ours():
        def step(_, carry):
            A, x = carry
            y = A @ x
            return A, y / jnp.linalg.norm(y)

        power = jax.jit(lambda A, x: jax.lax.fori_loop(0, STEPS, step, (A, x))[1])
        return common.ready(power, SparseArray.from_scipy(A), jnp.asarray(x0))

    def repeated(A, x, norm):
        for _ in range(STEPS):
            y = A @ x
            x = y / norm(y)
        return x

    def with_torch():
        torch, T = common.torch_module(), common.torch_csr(A)
        return lambda: repeated(T, torch.from_numpy(x0), torch.linalg.norm)

    return {
        "ours": with_ours,
        "scipy": lambda: lambda: repeated(A, x0, np.linalg.norm),
        "torch_csr": with_torch,
    }


def wide(A):
    return A.astype(np.float64)


def symmetric(A):
    return ((A + A.T) / 2).tocsr().astype(np.float64)


def eigenvalues(A):
    X = np.random.default_rng(2).standard_normal((A.shape[0], EIGENVALUES))
    steps = dict(tol=1e-30, maxiter=EIGENVALUE_STEPS)  # all of them

    def with_scipy():
        def call():
            with warnings.catch_warnings(action="ignore"):  # that it did not converge
                return scipy.sparse.linalg.lobpcg(A, X, **steps)[0]

        return call

    ours = jax.jit(lambda A, X: linalg.lobpcg(A, X, **steps)[0])
    exact = scipy.sparse.linalg.eigsh(A, EIGENVALUES, which="LA")[0][::-1]
    return {
        "exact": lambda: lambda: exact,
        "ours": lambda: common.ready(ours, SparseArray.from_scipy(A), jnp.asarray(X)),
        "scipy": with_scipy,
    }


KINDS = {  # kind -> (dtype of A, columns, plans)
    "product": (None, (1, 4, 8), lambda A, n: products(A, n, False)),
    "transposed": (None, (1, 4, 8), lambda A, n: products(A, n, True)),
    "converted": (None, (1, 4, 8), lambda A, n: products(A, n, True, converted=True)),
    "float64": (wide, (1,), lambda A, n: products(A, n, False)),
    "float64_transposed": (wide, (1,), lambda A, n: products(A, n, True)),
    "float64_converted": (wide, (1,), lambda A, n: products(A, n, True, converted=True)),
    "loop": (None, (1,), lambda A, _: loops(A)),
    "lobpcg": (symmetric, (EIGENVALUES,), lambda A, _: eigenvalues(A)),
}
TOLERANCES = {"lobpcg": 1e-2}  # others: 1e-3


def measured(plans, rounds: int, tolerance: float) -> tuple[float, dict[str, float], str]:
    """Our seconds, the time of each peer over it, and why others have none: one whose numbers
    differ from the first plan's has none. `exact` is that plan where there is one, not timed."""
    calls, notes, want = {}, [], None
    for name, plan in plans.items():
        try:
            call = plan()
            found = np.asarray(call(), np.float64).ravel()
            want = found if want is None else want
            if not np.allclose(found, want, rtol=tolerance, atol=tolerance * np.abs(want).max()):
                raise Unavailable("differs")
            if name != "exact":
                calls[name] = call
        except (ImportError, Unavailable, RuntimeError) as reason:
            notes.append(f"{name}: {(str(reason) or type(reason).__name__).splitlines()[0]}")
    times = timing.measure(calls, rounds)
    ours = times.pop("ours").seconds
    return ours, {name: found.seconds / ours for name, found in times.items()}, "; ".join(notes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--problems", nargs="+", metavar="NAME", default=PROBLEMS)
    parser.add_argument("--quick", action="store_true", help="few rounds; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    rows, best, about_run = [], {}, harness.stamp()
    for problem in problems.select(names=list(args.problems)):
        A = problem.build()
        for kind in args.kind:
            convert, columns, plans = KINDS[kind]
            inside = kind in ("loop", "lobpcg")  # of a program
            if A.nnz < (IN_LOOPS if inside else ALONE) or (inside and A.shape[0] != A.shape[1]):
                continue
            for n in columns:
                own = convert(A) if convert else A
                rounds = 3 if args.quick else timing.ROUNDS
                seconds, peers_, notes = measured(plans(own, n), rounds, TOLERANCES.get(kind, 1e-3))
                row = {"problem": f"{kind}: {problem.name}", "nnz": A.nnz, "n": n, "schedule": ""}
                row |= {"us": 1e6 * seconds} | {f"x_{name}": x for name, x in peers_.items()}
                ratios = ", ".join(f"{name} {x:.2f}" for name, x in peers_.items())
                print(f"{row['problem']} n={n}: {row['us']:.0f} us | {ratios} {notes}", flush=True)
                if peers_:
                    best.setdefault((kind, n), []).append(min(peers_.values()))
                rows.append(row | about_run | {"notes": notes})
    for (kind, n), found in best.items():
        mean = float(np.exp(np.mean(np.log(found))))
        print(f"# {kind}, n = {n}: {mean:.2f}x the best peer in the mean, {min(found):.2f}x least")
    if args.out or not args.quick:
        harness.write((args.out or machine.results_dir()) / "narrow.csv", rows, whole=False)


if __name__ == "__main__":
    main()
