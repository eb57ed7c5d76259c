"""Hand-written functions of the loop IR: the loop nests that every printer must print correctly."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from sgap_jax.compiler.loop_ir.loopir import (
    Array,
    Binary,
    Float,
    For,
    Function,
    GroupReduce,
    If,
    Int,
    Let,
    Load,
    Search,
    SegReduce,
    Select,
    Set,
    Store,
    Var,
    While,
    Workspace,
)

BLOCK, WARP, THREAD = "GPUBlock", "GPUWarp", "GPUThread"


def term(x):
    """Converts a string to a variable, a number to a literal."""
    if isinstance(x, str):
        return Var(x)
    return Int(x) if isinstance(x, int) else Float(x) if isinstance(x, float) else x


def op(symbol, first, *rest):
    out = term(first)
    for x in rest:
        out = Binary(symbol, out, term(x))
    return out


def add(*x):
    return op("+", *x)


def mul(*x):
    return op("*", *x)


def less(x, y):
    return op("<", x, y)


def at(array, index):
    return Load(array, term(index))


def loop(var, end, *body, begin=0, step=1, unit=None):
    return For(var, term(begin), term(end), body, step, unit)


def let(name, value, mutable=False):
    return Let(name, term(value), mutable)


def change(name, value):
    return Set(name, term(value))


def store(array, index, value, op=None, atomic=False):
    return Store(array, term(index), term(value), op, atomic)


@dataclasses.dataclass(frozen=True)
class Sparse:
    """A matrix A in CSR with empty rows; `padding` entries past the end are out of range and
    NaN."""

    m: int = 13
    k: int = 17
    padding: int = 5
    seed: int = 0

    def arrays(self, dtype):
        random = np.random.default_rng(self.seed)
        lengths = random.integers(0, 7, self.m) * (random.random(self.m) < 0.7)
        if self.m > 3:
            lengths[[0, -1]], lengths[2] = 0, 40  # longer than a warp
        pos = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        nnz = int(pos[-1])
        crd = random.integers(0, max(self.k, 1), nnz)
        crd = np.concatenate([crd, np.full(self.padding, 2**31 - 1)]).astype(np.int32)
        vals = random.standard_normal(nnz + self.padding)
        vals[nnz:] = np.nan
        return {"A2_pos": pos, "A2_crd": crd, "A_vals": vals.astype(jnp.dtype(dtype))}

    def dense(self, arrays):
        """Dense A, with duplicates added up, and dense |A|."""
        rows = np.repeat(np.arange(self.m), np.diff(arrays["A2_pos"]))
        nnz = len(rows)
        out = np.zeros((2, self.m, self.k))
        for i, vals in enumerate([arrays["A_vals"][:nnz], np.abs(arrays["A_vals"][:nnz])]):
            np.add.at(out[i], (rows, arrays["A2_crd"][:nnz]), vals.astype(np.float64))
        return out


def function(name, A, dtype, n, body, out=None, fill=None, index="int32"):
    capacity = len(A.arrays(dtype)["A2_crd"])
    inputs = (
        Array("A2_pos", "int32", A.m + 1),
        Array("A2_crd", "int32", capacity),
        Array("A_vals", dtype, capacity),
        Array("B", dtype, A.k * n),
    )
    outputs = (Array("C", out or dtype, A.m * n, fill),)
    accumulator = "float64" if dtype == "float64" else "float32"
    return Function(name, inputs, outputs, tuple(body), accumulator, index)


def capacity(A):
    return len(A.arrays("float32")["A2_crd"])


def wide(dtype):
    """The dtype of outputs that atomics add to."""
    return "float64" if dtype == "float64" else "float32"


def product(p, k, n):
    return mul(at("A_vals", p), at("B", add(mul(at("A2_crd", p), n), k)))


def row_sum(n, *, op="+"):
    """C[i, k] = the sum over row i, carried in a scalar."""
    value = product("p", "k", n)
    combined = add("sum", value) if op == "+" else Binary(op, Var("sum"), value)
    return (
        let("sum", 0.0, mutable=True),
        loop("p", at("A2_pos", add("i", 1)), change("sum", combined), begin=at("A2_pos", "i")),
        store("C", add(mul("i", n), "k"), "sum"),
    )


def rows_on_gpu(A, dtype="float32", n=1, threads=64, index="int32", op="+"):
    """One GPU thread for each element of C."""
    blocks = -(-A.m * n // threads)
    body = loop(
        "b",
        blocks,
        loop(
            "t",
            threads,
            let("f", add(mul("b", threads), "t")),
            If(
                less("f", A.m * n),
                (let("i", op_("//", "f", n)), let("k", op_("%", "f", n)), *row_sum(n, op=op)),
            ),
            unit=THREAD,
        ),
        unit=BLOCK,
    )
    return function("rows", A, dtype, n, [body], index=index)


op_ = op


def rows_on_cpu(A, dtype="float32", n=1):
    """Row 1 of the conformance list: vectorized columns, and sums in a workspace."""
    vector = loop(
        "k",
        n,
        store("sums", "k", product("p", "k", n), op="+"),
        unit="CPUVector",
    )
    body = loop(
        "i0",
        -(-A.m // 4),
        loop(
            "i1",
            4,
            let("i", add(mul("i0", 4), "i1")),
            If(
                less("i", A.m),
                (
                    Workspace("sums", n),
                    loop("p", at("A2_pos", add("i", 1)), vector, begin=at("A2_pos", "i")),
                    loop("k", n, store("C", add(mul("i", n), "k"), at("sums", "k"))),
                ),
            ),
        ),
        unit="CPUThread",
    )
    return function("rows", A, dtype, n, [body])


def nonzeros(A, n, chunk, start, op="+"):
    """Entries start to start + chunk - 1: search for the row, advance it, flush at its end (rows 2
    and 12)."""
    flush = store("C", add(mul("i", n), "k"), "sum", op=op, atomic=True)
    value = product("p", "k", n)
    combined = add("sum", value) if op == "+" else Binary(op, Var("sum"), value)
    entry = (
        let("p", add("start", "z")),
        If(
            less("p", at("A2_pos", A.m)),
            (
                While(
                    op_("==", "p", at("A2_pos", add("i", 1))),
                    (flush, change("sum", 0.0), change("i", add("i", 1))),
                ),
                change("sum", combined),
            ),
        ),
    )
    chunk_of_one = (
        let("i", Search("A2_pos", Int(0), Int(A.m), Var("start")), mutable=True),
        let("sum", 0.0, mutable=True),
        loop("z", chunk, *entry, unit="unroll"),
        flush,
    )
    return let("start", start), If(less("start", at("A2_pos", A.m)), chunk_of_one)


def nonzeros_on_gpu(A, dtype="float32", n=3, chunk=4, warps=4, index="int32", op="+"):
    """S1: {<chunk nnz, 1 col>, 1}, warps along the entries, threads along the columns."""
    start = mul(add(mul("b", warps), "w"), chunk)
    columns = loop(
        "dv",
        -(-n // 32),
        let("k", add(mul("dv", 32), "t")),
        If(less("k", n), nonzeros(A, n, chunk, start, op)),
        unit="unroll",
    )
    thread = loop("t", 32, columns, unit=THREAD)
    blocks = -(-capacity(A) // (warps * chunk))
    body = loop("b", blocks, loop("w", warps, thread, unit=WARP), unit=BLOCK)
    return function("nonzeros", A, dtype, n, [body], wide(dtype), 0.0, index)


def nonzeros_on_cpu(A, dtype="float32", n=3, chunk=4):
    chunks = -(-capacity(A) // chunk)
    columns = loop("k", n, *nonzeros(A, n, chunk, mul("p0", chunk)))
    return function(
        "nonzeros",
        A,
        dtype,
        n,
        [loop("p0", chunks, columns, unit="CPUThread")],
        wide(dtype),
        0.0,
    )


def row_groups(A, dtype="float32", n=3, lanes=16, group=8, index="int32", op="+", warps=8):
    """S3: {<1/lanes row, 1 col>, group}: strided entries, then a parallel reduction."""
    value = product("p", "k", n)
    combined = add("sum", value) if op == "+" else Binary(op, Var("sum"), value)
    strided = loop(
        "p",
        at("A2_pos", add("i", 1)),
        change("sum", combined),
        begin=add(at("A2_pos", "i"), "jp1"),
        step=lanes,
    )
    reduce = GroupReduce("C", term(add(mul("i", n), "k")), Var("sum"), group, op)
    inner = (
        let("i", op_("//", "f", n)),
        let("k", op_("%", "f", n)),
        let("sum", 0.0, mutable=True),
        strided,
        reduce,
    )
    thread = loop("jp1", lanes, If(less("f", A.m * n), inner), unit=THREAD)
    warp = loop("kio", warps, let("f", add(mul("ko", warps), "kio")), thread, unit=WARP)
    body = loop("ko", -(-A.m * n // warps), warp, unit=BLOCK)
    return function("row_groups", A, dtype, n, [body], wide(dtype), 0.0, index)


def segments(A, dtype="float32", n=3, threads=64, group=16, index="int32", op="+"):
    """S4: {<1 nnz, 1 col>, group}: lanes past the end take no part in the segment reduction."""
    live = Var("live")
    body = loop(
        "b",
        -(-capacity(A) // threads),
        loop(
            "k",
            n,
            loop(
                "p1",
                threads,
                let("p", add(mul("b", threads), "p1")),
                let("live", less("p", at("A2_pos", A.m))),
                let("i", Select(live, Search("A2_pos", Int(0), Int(A.m), Var("p")), Int(-1))),
                let("value", Select(live, product("p", "k", n), Float(0.0))),
                SegReduce(
                    "C",
                    Select(live, add(mul("i", n), "k"), Int(-1)),
                    Var("value"),
                    group,
                    op,
                ),
                unit=THREAD,
            ),
        ),
        unit=BLOCK,
    )
    return function("segments", A, dtype, n, [body], wide(dtype), 0.0, index)


GPU = {f.__name__: f for f in (rows_on_gpu, nonzeros_on_gpu, row_groups, segments)}
CPU = {f.__name__: f for f in (rows_on_cpu, nonzeros_on_cpu)}


def inputs(A, dtype, n):
    arrays = A.arrays(dtype)
    B = np.random.default_rng(1).standard_normal(A.k * n).astype(jnp.dtype(dtype))
    return arrays | {"B": B}


def expected(A, arrays, n, op="+"):
    """(C, |A| |B|, terms) for sums; for maxima, the maximum of 0 and the products, and zeros."""
    B = arrays["B"].astype(np.float64).reshape(A.k, n)
    terms = np.diff(arrays["A2_pos"])[:, None]
    if op == "+":
        dense, magnitude = A.dense(arrays)
        return dense @ B, magnitude @ np.abs(B), terms
    rows = np.repeat(np.arange(A.m), terms[:, 0])
    out = np.zeros((A.m, n))
    values = arrays["A_vals"][: len(rows)].astype(np.float64)
    products = values[:, None] * B[arrays["A2_crd"][: len(rows)]]
    {"max": np.maximum, "min": np.minimum}[op].at(out, rows, products)
    return out, np.abs(out), np.ones_like(terms)


def random_expression(random, kind, depth):
    """A random expression of kind "integer" (x[t], t), "number" (v[t]) or "truth"; values are small
    and whole, so that results are exact."""
    if depth == 0 or (kind != "truth" and random.random() < 0.15):
        leaf = {
            "integer": (Var("t"), at("x", "t"), Int(int(random.integers(-3, 4)))),
            "number": (at("v", "t"), Float(float(random.integers(-3, 4)))),
            "truth": (less("t", 3), op("==", at("x", "t"), 1)),
        }[kind]
        return leaf[random.integers(len(leaf))]
    below = lambda of: random_expression(random, of, depth - 1)
    if kind == "truth":
        if random.random() < 0.5:
            return op(random.choice(("and", "or")), below("truth"), below("truth"))
        of = random.choice(("integer", "number"))
        return op(random.choice(("<", "<=", ">", ">=", "==", "!=")), below(of), below(of))
    if random.random() < 0.15:
        return Select(below("truth"), below(kind), below(kind))
    symbol = random.choice(("+", "-", "*", "max", "min", *(("//", "%") * (kind == "integer"))))
    left, right = below(kind), below(kind)
    if symbol in ("//", "%"):
        left, right = op("max", left, 0), op("max", right, 1)
    return op(str(symbol), left, right)


def random_function(name, count, index, loops, seed=0):
    """y[t, i] = the i-th of `count` random expressions, for t in 0 to 7, inside of `loops`."""
    random, stores = np.random.default_rng(seed), []
    for i in range(count):
        kind = ("integer", "number", "truth")[i % 3]
        value = random_expression(random, kind, 3)
        if kind == "integer":
            value = at("whole", add(op("min", op("max", value, -20), 20), 20))
        elif kind == "truth":
            value = Select(value, Float(1.0), Float(2.0))
        stores.append(store("y", add(mul("t", count), i), value))
    arrays = (Array("x", "int32", 8), Array("v", "float32", 8), Array("whole", "float32", 41))
    return Function(name, arrays, (Array("y", "float32", 8 * count),), loops(stores), index=index)


RANDOM_INPUTS = {
    "x": np.int32([3, -1, 0, 2, 1, -3, -2, 1]),
    "v": np.float32([-1, 2, 3, -3, 0, 1, 2, -2]),
    "whole": np.arange(-20, 21, dtype=np.float32),
}
