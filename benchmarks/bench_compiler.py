"""Compiled loops: python -m benchmarks.bench_compiler [--problems NAME ...] [--quick]

`ours` is einsum with a schedule, called under jax.jit. For matrices `hand` is our hand-written
kernel with the selector's schedule; its ratio is below 1 where it is quicker. `taco` is the C that
TACO generates with its paper's schedules, `jax_gather` the gathered product in plain JAX.
`first_ms` is the first call, with nothing cached: tracing, loops, machine code. For results above
16 MiB all contenders allocate new memory; a second row times all of them with results written into
existing memory.
"""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import bench_sddmm, bench_spmm, harness, machine, tensors, timing
from benchmarks.peers import common, taco
from benchmarks.peers import sddmm as sddmm_peers
from benchmarks.peers import spmm as spmm_peers
from benchmarks.problems import Unavailable
from sgap_jax import CSF, CSR, Format, Reference, SparseArray, einsum, sddmm, spmm, spmv
from sgap_jax.compiler import Schedule, assign, presets
from sgap_jax.formats.levels import Dense

GOAL = ("hand", "taco", "scipy", "torch", "jax_gather")
RANKS = (16, 32, 64)
N = (1, 32, 128)
DENSE_BYTES = 1 << 28
DONATE_BYTES = 16 << 20
EXPRESSIONS = {
    "spmv": ("ij,j->i", 0),
    "spmm": ("ij,jk->ik", 2),
    "sddmm": ("ij,ik,jk->ij", 3),
    "mttkrp": ("ijk,jr,kr->ir", 3),
    "mttkrp4": ("ijkl,jr,kr,lr->ir", 4),
    "ttm": ("ijk,kr->ijr", 2),
    "ttm_fibers": ("ijk,kr->ijr", 2),
}


def jitted(op: str, schedule: Schedule | Reference, into: bool = False):
    """With `into` the function takes an array before the operands, whose memory the result gets."""
    subscripts, _ = EXPRESSIONS[op]

    def call(A, *dense):
        out = einsum(subscripts, A, *dense, schedule=schedule, fibers=op == "ttm_fibers")
        return out.values if isinstance(out, SparseArray) else out

    if into:
        return jax.jit(lambda spare, *given: call(*given), donate_argnums=0, keep_unused=True)
    return jax.jit(call)


def donating(op: str, schedule: Schedule | Reference, operands: list, places: tuple):
    """A call that donates the memory of its last result, an array of shape `places`, to the next
    call."""
    function, last = jitted(op, schedule, into=True), [jnp.zeros(places)]

    def call():
        last[0] = function(last[0], *operands)
        return last[0].block_until_ready()

    return call


def expression(op: str, format):
    subscripts, _ = EXPRESSIONS[op]
    names = "ABCDE"[: subscripts.count(",") + 2]
    of_result = {"sddmm": format, "ttm_fibers": Format((*format.levels[:-1], Dense))}
    formats = {"A": format} | ({names[-1]: of_result[op]} if op in of_result else {})
    return assign(subscripts, formats)


def candidates(op: str, format) -> list[Schedule]:
    """Candidate schedules; the quickest is used for the row."""
    e = expression(op, format)
    found = [presets.cpu(e, rows) for rows in (4, 16, 64)]
    if op == "spmv":
        found.append(presets.cpu_entries(e))
        found += [presets.cpu_entries(e, entries, staged=True) for entries in (1024, 4096)]
    if op.startswith("mttkrp"):
        found += [presets.cpu_fibers(e, fibers) for fibers in (256, 1024)]
    if op == "spmm":  # rows of C in memory; each entry takes a whole row of B
        s = Schedule(e).reorder("i", "j", "k").split("i", "chunk", "row", 16)
        s = s.parallelize("chunk", "CPUThread", "NoRaces")
        found.append(s.parallelize("k", "CPUVector", "NoRaces"))
    return found


def compiled(op: str, format, operands: list) -> tuple:
    """(call, schedule, milliseconds of the first call) of the quickest candidate."""
    found = {}
    for schedule in candidates(op, format):
        function = jitted(op, schedule)
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        first = 1e3 * (time.perf_counter() - start)
        call = common.ready(function, *operands)
        found[schedule] = (call, schedule, first)
    if len(found) == 1:
        return next(iter(found.values()))
    times = timing.measure({str(i): x[0] for i, x in enumerate(found.values())}, 3)
    best = min(times, key=lambda name: times[name].seconds)
    return list(found.values())[int(best)]


def case(op: str, format, operands: list, **about) -> harness.Case:
    ours, schedule, first = compiled(op, format, operands)
    return harness.Case(
        schedule=f"{op} {format}", ours=ours, more={"first_ms": first, "loops": schedule}, **about
    )


def of_matrix(A, n: int):
    """SpMV, or SpMM and SDDMM, with a matrix in CSR."""
    X, (m, k) = SparseArray.from_scipy(A), A.shape
    B, Y = harness.dense(k, n), harness.dense(m, n, seed=3)
    levels = [(), (A.indptr, A.indices)]

    def by_taco(op: str, dense: list, shape):
        return lambda: taco.plan(op, (A.data, A.shape), levels, dense, shape)

    about = dict(
        n=n,
        flops=2 * A.nnz * n,
        moved=8 * A.nnz + 4 * n * (m + k),
        bound=machine.probe().product_bound(A, n),
    )
    op, right, shape = ("spmv", B[:, 0], (m,)) if n == 1 else ("spmm", B, (m, n))
    dense, hand = jnp.asarray(right), jax.jit(spmv if n == 1 else spmm)
    peers = {
        "hand": lambda: common.ready(hand, X, dense),
        "taco": by_taco(op, [right], shape),
        "scipy": lambda: spmm_peers.with_scipy(A, B),
        "torch": lambda: spmm_peers.with_torch(A, B),
    }
    yield case(op, CSR, [X, dense], peers=peers, wrong=bench_spmm.checker(A, B), **about)
    if n == 1:
        return
    left, right = jnp.asarray(Y), jnp.asarray(B)
    sampled = jax.jit(lambda *x: sddmm(*x, weighted=True).values)
    peers = {
        "hand": lambda: common.ready(sampled, X, left, right),
        "taco": by_taco("sddmm", [Y, B], (m, k)) if 4 * m * k <= DENSE_BYTES else no_dense,
        "torch": lambda: sddmm_peers.with_torch(A, Y, B),
    }
    peers["torch"] = weighted(peers["torch"], A.data)
    yield case("sddmm", CSR, [X, left, right], peers=peers, wrong=sampled_checker(A, Y, B), **about)


def sampled_checker(A, X, Y):
    expected = A.data * bench_sddmm.dots(A, X, Y)
    magnitude = np.abs(A.data) * bench_sddmm.dots(A, np.abs(X), np.abs(Y))
    terms = X.shape[1] + 1
    return lambda found: harness.excess(harness.sampled(A, found), expected, terms, magnitude)


def no_dense():
    raise Unavailable("TACO's SDDMM writes a dense matrix, which would be too large")


def weighted(plan, values: np.ndarray):
    """Wraps torch's sampled product to multiply it by the values of A."""

    def planned():
        call = plan()
        return lambda: call().numpy() * values

    return planned


def of_tensor(A, n: int):
    """MTTKRP and TTM with a tensor of three modes, MTTKRP with one of four; n is the rank."""
    csf, levels = A.asformat(CSF(A.ndim)), None
    levels = [tuple(np.asarray(x) for x in level) for level in csf.index_arrays]
    dense = [harness.dense(size, n, seed=i) for i, size in enumerate(A.shape[1:])]
    coordinates = np.stack([np.asarray(x) for x in A.coordinates()])
    values = np.asarray(A.values)
    ops = ["mttkrp", "ttm", "ttm_fibers"] if A.ndim == 3 else ["mttkrp4"]
    for op in ops:
        used = dense if op.startswith("mttkrp") else dense[1:]
        shape = (*A.shape[: A.ndim - len(used)], n)
        shared = 2 if op == "ttm_fibers" else 0
        rows = tensors.rows_of(coordinates, shape)
        if shared:
            rows = np.unique(rows, return_inverse=True)[1]
        places = (rows.max() + 1, n) if shared else shape
        if 4 * math.prod(places) > DENSE_BYTES:
            continue
        given = [csf, *map(jnp.asarray, used)]
        coo = [csf if shared else A, *given[1:]]
        plain = jitted(op, Reference())
        large = 4 * math.prod(places) > DONATE_BYTES

        def by_taco(fresh, op=op, used=used, shape=shape, shared=shared):
            sparse = np.asarray(csf.values), A.shape
            return lambda: taco.plan(op, sparse, levels, used, shape, shared, fresh)

        def by_torch(reuse, used=used, rows=rows, places=places):
            return lambda: tensors.gathered_by_torch(coordinates, values, used, rows, places, reuse)

        found = case(
            op,
            CSF(A.ndim),
            given,
            n=n,
            peers={
                "taco": by_taco(fresh=large),
                "jax_gather": lambda plain=plain, coo=coo: common.ready(plain, *coo),
                "torch": by_torch(reuse=False),
            },
            wrong=tensors.checker(coordinates, values, used, rows, places),
            flops=2 * A.nnz * n * len(used),
            moved=4 * A.nnz * (1 + A.ndim) + 4 * math.prod(places),
            bound=machine.probe().bound(
                2 * A.nnz * n * len(used), 4 * A.nnz * 2 + 4 * math.prod(places)
            ),
        )
        yield found
        if large:
            into = functools.partial(donating, op, places=places)
            yield dataclasses.replace(
                found,
                schedule=f"{found.schedule}, donated",
                ours=into(found.more["loops"], given),
                peers={
                    "taco": by_taco(fresh=False),
                    "jax_gather": functools.partial(into, Reference(), coo),
                    "torch": by_torch(reuse=True),
                },
            )


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__, N).parse_args(argv)
    harness.run("compiler_tensors", of_tensor, GOAL, args, RANKS, select=tensors.select)
    if not args.problems or not set(args.problems) <= set(tensors.FILES):
        harness.run("compiler", of_matrix, GOAL, args, N)


if __name__ == "__main__":
    main()
