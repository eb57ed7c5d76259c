"""Products of two sparse matrices: python -m benchmarks.bench_spgemm [--quick] [--out FOLDER]

`once` is A B from scratch: the structure of the result and its values. `values` is with the
structure known, inside jit; the peers have nothing like it and do the work of `once`. `memory` is
the peak growth of a fresh process's resident set during `A @ B`, and the operands, over operands
and result.
`compiled` is the schedule `presets.cpu_workspace` with the structure known, beside the C that TACO
generates for the same schedule where its result is assembled before.
`gradients` is the value and the gradients of sum((A B)^2) in the values of A and B. `sum` and
`elementwise` are A + B and A * B; there `x_one_thread` is our kernel on one thread, and SciPy has
one thread. Rows are written as they are measured.
"""

import argparse
import operator
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp

from benchmarks import attention_memory, harness, machine, problems, timing
from benchmarks.peers import taco
from sgap_jax import CSR, SparseArray, compiler, evaluate, spgemm, spgemm_plan
from sgap_jax.runtime.native import native


def poisson(n):
    """The five-point stencil on an n x n grid."""
    line = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n))
    return sp.kronsum(line, line)


def interpolation(n):
    """[n^2, (n / 2)^2]: each point of a coarse grid to its neighbours on the fine one."""
    coarse = np.arange(n // 2)
    rows = np.concatenate([2 * coarse, 2 * coarse + 1, 2 * coarse[1:] - 1])
    columns = np.concatenate([coarse, coarse, coarse[1:]])
    weights = np.repeat([1.0, 0.5, 0.5], [n // 2, n // 2, n // 2 - 1])
    line = sp.csr_matrix((weights, (rows, columns)), shape=(n, n // 2))
    return sp.kron(line, line)


def squared(A):
    return A, A


def times_its_transpose(A):
    return A, A.T.tocsr()


def coarse(n):
    """P^T and A P, the second product of a Galerkin product."""
    A, P = built(poisson(n)), built(interpolation(n))
    return P.T.tocsr(), (A @ P).tocsr()


def spread(rows, columns, entries):
    """Two matrices of about as many entries, at random places."""
    return tuple(built(_at_random(rows, columns, entries, seed)) for seed in (1, 2))


def _at_random(rows, columns, entries, seed):
    rng = np.random.default_rng(seed)
    places = rng.integers(0, rows, entries), rng.integers(0, columns, entries)
    return sp.csr_matrix((rng.standard_normal(entries), places), shape=(rows, columns))


def built(matrix):
    return problems.BenchmarkProblem("", "", "", lambda: matrix).build()


def stored(name):
    return problems.select(names=[name])[0].build()


def dlmc():
    file = "body_encoder_layer_0_ffn_conv1_fully_connected"
    return problems.stored(f"dlmc/transformer/magnitude_pruning/0.95/{file}.smtx.gz")


# name -> the two factors
PROBLEMS = {
    "uniform_20k_0.1pct squared": lambda: squared(built(problems.uniform(20000, 20000, 1e-3))),
    "poisson_512 squared": lambda: squared(built(poisson(512))),
    "poisson_512 times interpolation": lambda: (built(poisson(512)), built(interpolation(512))),
    "interpolation^T times poisson_512 times interpolation": lambda: coarse(512),
    "rmat_65k_500k squared": lambda: squared(built(problems.rmat(16, 8))),
    "rmat_262k_500k squared": lambda: squared(built(problems.rmat(18, 2))),
    "weights_2048_95pct, two of them": lambda: (
        built(problems.pruned(2048, 2048, 0.95)),
        built(problems.pruned(2048, 2048, 0.95, seed=1)),
    ),
    "dlmc ffn_conv1 95pct A A^T": lambda: times_its_transpose(dlmc()),
    "bcsstk16 squared": lambda: squared(stored("bcsstk16")),
    "memplus A A^T": lambda: times_its_transpose(stored("memplus")),
    "p2p-Gnutella31 squared": lambda: squared(stored("p2p-Gnutella31")),
    "pubmed squared": lambda: squared(stored("pubmed")),
}
# name -> two matrices of one shape
SUMS = {
    "two of 2M entries, 131k x 131k": lambda: spread(1 << 17, 1 << 17, 2_000_000),
    "two of 2M entries, 20k x 20k": lambda: spread(20000, 20000, 2_000_000),
}
MOST_OF_TORCH = 20_000_000  # entries of the result whose gradients fit in memory
COMPILED_ROWS = 16  # of each task
QUICK = ("poisson_512 squared", "weights_2048_95pct, two of them")


def with_mkl(A, B):
    import sparse_dot_mkl

    return lambda: sparse_dot_mkl.dot_product_mkl(A, B)


def with_torch(A, B):
    import torch

    a, b = (
        torch.sparse_csr_tensor(*map(torch.from_numpy, (X.indptr, X.indices, X.data)), X.shape)
        for X in (A, B)
    )
    return lambda: a @ b


def with_graphblas(A, B):
    import graphblas

    a, b = (graphblas.io.from_scipy_sparse(X) for X in (A, B))
    return lambda: a.mxm(b, graphblas.semiring.plus_times).new()


def torch_gradients(A, B):
    import torch

    leaves = []
    for X in (A.tocoo(), B.tocoo()):
        places = torch.from_numpy(np.stack([X.row, X.col]).astype(np.int64))
        leaves.append(torch.sparse_coo_tensor(places, torch.from_numpy(X.data), X.shape).coalesce())

    def call():
        a, b = (x.detach().requires_grad_() for x in leaves)
        (torch.sparse.mm(a, b).coalesce().values() ** 2).sum().backward()
        return b.grad

    return call


PEERS = {
    "scipy": lambda A, B: lambda: A @ B,
    "sparse_dot_mkl": with_mkl,
    "torch_csr": with_torch,
    "graphblas": with_graphblas,
    "taco": taco.product,
}


def dense_of(result):
    if isinstance(result, SparseArray):
        return result.to_scipy()
    if hasattr(result, "to_csr"):
        parts = result.to_csr()  # offsets, indices, values
        return sp.csr_matrix((parts[2], parts[1], parts[0]), shape=result.shape)
    if hasattr(result, "crow_indices"):
        parts = (result.values(), result.col_indices(), result.crow_indices())
        return sp.csr_matrix(tuple(x.numpy() for x in parts), shape=tuple(result.shape))
    return result


def check(name, result, right):
    if abs(dense_of(result) - right).max() > 1e-4 * abs(right).max():
        raise RuntimeError(f"{name} computes something else")


def products(A, B, keep_structure):
    own = SparseArray.from_scipy(A), SparseArray.from_scipy(B)
    plan = spgemm_plan(*own)
    known = jax.jit(lambda a, b, plan: spgemm(a, b, plan=plan).values)
    right = A @ B
    check("ours", plan.with_values(known(*own, plan)), right)
    if keep_structure:
        calls = {"ours": lambda: known(*own, plan).block_until_ready()}
    else:
        calls = {"ours": lambda: spgemm(*own).values.block_until_ready()}
    for name, peer in PEERS.items():
        try:
            calls[name] = peer(A, B)
        except (ImportError, problems.Unavailable) as reason:
            print(f"# {name}: {reason}")
            continue
        check(name, calls[name](), right)
    return calls


def compiled(A, B):
    own = SparseArray.from_scipy(A), SparseArray.from_scipy(B)
    plan = spgemm_plan(*own)
    expression = compiler.parse("C(i,k) = A(i,j) * B(j,k)", dict.fromkeys("ABC", CSR))
    rows = compiler.presets.cpu_workspace(expression, COMPILED_ROWS)

    @jax.jit
    def known(A, B, plan):
        return evaluate("C(i,k) = A(i,j) * B(j,k)", A=A, B=B, pattern=plan, schedule=rows).values

    right = A @ B
    check("ours", plan.with_values(known(*own, plan)), right)
    calls = {"ours": lambda: known(*own, plan).block_until_ready()}
    try:
        calls["taco"] = taco.product_values(A, B)
    except problems.Unavailable as reason:
        print(f"# taco: {reason}")
        return calls
    for _ in range(2):
        check("taco", calls["taco"](), right)
    return calls


def gradients(A, B):
    own = SparseArray.from_scipy(A), SparseArray.from_scipy(B)
    plan = spgemm_plan(*own)

    def loss(a, b, A, B, plan):
        C = spgemm(A.with_values(a), B.with_values(b), plan=plan)
        return jnp.sum(C.values**2)

    if plan.nnz > MOST_OF_TORCH:
        print(f"# gradients: left out, torch's {plan.nnz} coordinates need more than 20 GB")
        return {}
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    values = own[0].values, own[1].values
    calls = {"ours": lambda: jax.block_until_ready(step(*values, *own, plan))}
    _, (_, slope) = calls["ours"]()
    try:
        calls["torch_coo"] = torch_gradients(A, B)
    except ImportError as reason:
        print(f"# torch_coo: {reason}")
        return calls
    found = calls["torch_coo"]().coalesce()
    rows, columns = found.indices().numpy()
    other = sp.csr_matrix((found.values().numpy(), (rows, columns)), shape=B.shape)
    check("torch_coo", other, own[1].with_values(slope).to_scipy())
    return calls


def merges(A, B, sign):
    own = SparseArray.from_scipy(A), SparseArray.from_scipy(B)
    ours, theirs = {
        "+": (operator.add, operator.add),
        "*": (operator.mul, lambda A, B: A.multiply(B)),
    }[sign]
    flat = [x for X in (A, B) for x in (X.indptr, X.indices, X.data.view(np.uint8))]
    check("ours", ours(*own), theirs(A, B))
    return {
        "ours": lambda: ours(*own).values.block_until_ready(),
        "one_thread": lambda: native.merge(*flat, A.shape[1], sign, A.dtype.name, 1),
        "scipy": lambda: theirs(A, B),
    }


def memory(name):
    """Peak bytes over those of operands and result, in this process, which has made none before."""
    A, B = PROBLEMS[name]()
    own = SparseArray.from_scipy(A), SparseArray.from_scipy(B)
    small = SparseArray.from_scipy(built(poisson(6)))
    small @ small  # loads code
    held = sum(x.nbytes for X in ({id(A): A, id(B): B}).values() for x in _arrays(X))
    grown = attention_memory.growth(lambda: spgemm(*own))
    made = sum(x.nbytes for x in _arrays(spgemm(*own).to_scipy()))
    return (held + grown) / (held + made)


def _arrays(X):
    return X.indptr, X.indices, X.data


def memory_apart(name):
    """`memory` in a process of its own; None where that is not known."""
    if not attention_memory.resident_is_known():
        return None
    command = [sys.executable, "-m", "benchmarks.bench_spgemm", "--memory", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


KINDS = {
    "once": lambda A, B: products(A, B, False),
    "values": lambda A, B: products(A, B, True),
    "compiled": compiled,
    "gradients": gradients,
}
MERGES = {
    "sum": lambda A, B: merges(A, B, "+"),
    "elementwise": lambda A, B: merges(A, B, "*"),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two problems; writes no file")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    parser.add_argument("--only", nargs="*", help="parts of rows' names; joins the file's rows")
    parser.add_argument("--memory", choices=PROBLEMS, help="only prints that of one problem")
    args = parser.parse_args(argv)
    if args.memory:
        print(memory(args.memory))
        return
    folder = args.out or (None if args.quick else machine.results_dir())
    about_run = harness.stamp()
    of_products = KINDS if args.quick else KINDS | {"memory": None}
    chosen = [(name, make, of_products) for name, make in PROBLEMS.items()]
    chosen += [(name, make, MERGES) for name, make in SUMS.items()]
    if args.quick:
        chosen = [x for x in chosen if x[0] in QUICK]
    fresh = not args.only

    def asked(name, kinds):
        parts = args.only or [""]
        return {k: x for k, x in kinds.items() if any(part in f"{name}: {k}" for part in parts)}

    for name, make, kinds in ((name, make, asked(name, kinds)) for name, make, kinds in chosen):
        if not kinds:
            continue
        try:
            A, B = make()
        except problems.Unavailable as reason:
            print(f"# {name}: {reason}")
            continue
        for kind, contenders in kinds.items():
            row = {"problem": f"{name}: {kind}"}
            if contenders is None:
                row |= {"us": "", "memory": memory_apart(name)}
                print(f"{row['problem']}: {row['memory']}", flush=True)
            elif calls := contenders(A, B):
                found = timing.measure(calls, 3 if args.quick else timing.ROUNDS)
                own = found.pop("ours").seconds
                row |= {"us": 1e6 * own}
                row |= {f"x_{peer}": x.seconds / own for peer, x in found.items()}
                ratios = ", ".join(f"{peer} {x.seconds / own:.2f}" for peer, x in found.items())
                print(f"{row['problem']}: {row['us']:.0f} us | {ratios}", flush=True)
            else:
                continue
            if folder:
                row = {"n": "", "schedule": ""} | row | about_run
                harness.write(folder / "spgemm.csv", [row], whole=fresh)
                fresh = False


if __name__ == "__main__":
    main()
