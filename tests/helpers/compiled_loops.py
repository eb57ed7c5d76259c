"""Hand-written loop IR: small versions of the kernels that lowering makes."""

import jax
import jax.numpy as jnp

from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_THREAD,
    CPU_VECTOR,
    Array,
    Binary,
    Float,
    For,
    Function,
    If,
    Int,
    Let,
    Load,
    Search,
    Set,
    Store,
    Var,
    While,
)


def add(*terms):
    total = terms[0]
    for term in terms[1:]:
        total = Binary("+", total, term)
    return total


def times(*factors):
    product = factors[0]
    for factor in factors[1:]:
        product = Binary("*", product, factor)
    return product


def lanes(n, *body, begin=0, var="e"):
    begin, n = (x if not isinstance(x, int) else Int(x) for x in (begin, n))
    return For(var, begin, n, body, unit=CPU_VECTOR)


def threads(n, *body, var="i"):
    return For(var, Int(0), Int(n), body, unit=CPU_THREAD)


def at(array, *index):
    """array[i0 * s0 + i1 * s1 + ...], from pairs of an index and its stride."""
    return Load(array, add(*index))


def accumulator(dtype):
    return "float64" if dtype == "float64" else "float32"


def function(name, inputs, outputs, body, dtype):
    of = lambda array: Array(array[0], *(array[1:] if len(array) > 2 else (dtype, array[1])))
    return Function(
        name,
        tuple(map(of, inputs)),
        tuple(Array(o[0], dtype, o[1], o[2] if len(o) > 2 else None) for o in outputs),
        tuple(body),
        accumulator(dtype),
    )


def csr(m, nnz):
    return [("A2_pos", "int32", m + 1), ("A2_crd", "int32", nnz), ("A_vals", nnz)]


def row_of(i):
    return Let("first", Load("A2_pos", i)), Let("last", Load("A2_pos", add(i, Int(1))))


ROW, K, P, LAST, FIRST, SUM = map(Var, ("i", "k", "p", "last", "first", "sum"))


def spmv(m, k, nnz, dtype, unit=None):
    """y = A x, row by row; `unit` is the unit of the loop over a row's entries."""
    term = times(Load("A_vals", P), Load("x", Load("A2_crd", P)))
    row = (
        *row_of(ROW),
        Let("sum", Float(0.0), mutable=True),
        For("p", FIRST, LAST, (Set("sum", add(SUM, term)),), unit=unit),
        Store("y", ROW, SUM),
    )
    loop = threads(m, *row)
    return function("spmv", [*csr(m, nnz), ("x", k)], [("y", m)], [loop], dtype)


def spmm(m, k, n, nnz, dtype):
    """C = A B: rows over threads, columns over vector lanes."""
    term = times(Load("A_vals", P), at("B", times(Load("A2_crd", P), Int(n)), K))
    column = (
        Let("sum", Float(0.0), mutable=True),
        For("p", FIRST, LAST, (Set("sum", add(SUM, term)),)),
        Store("C", add(times(ROW, Int(n)), K), SUM),
    )
    columns = lanes(n, *column, var="k")
    loop = threads(m, *row_of(ROW), columns)
    return function("spmm", [*csr(m, nnz), ("B", k * n)], [("C", m * n)], [loop], dtype)


def spmm_by_entries(m, k, n, nnz, dtype, chunk=16, tile=8):
    """C += A B: chunks of entries over threads, whose row is found by a search and then advanced;
    columns over vector lanes in tiles whose size need not divide n."""
    p = add(times(Var("c"), Int(chunk)), Var("p1"))
    term = times(Load("A_vals", P), at("B", times(Load("A2_crd", P), Int(n)), K))
    lane = (
        Let("k", add(times(Var("k0"), Int(tile)), Var("k1"))),
        If(
            Binary("<", K, Int(n)),
            (Store("C", add(times(ROW, Int(n)), K), term, "+", atomic=True),),
        ),
    )
    columns = lanes(tile, *lane, var="k1")
    step = Set("i", add(ROW, Int(1)))
    beyond = Binary("==", P, Load("A2_pos", add(ROW, Int(1))))
    entry = (
        Let("p", p),
        If(
            Binary("<", P, Load("A2_pos", Int(m))),
            (While(beyond, (step,)), For("k0", Int(0), Int(-(-n // tile)), (columns,))),
        ),
    )
    start = Search("A2_pos", Int(0), Int(m), times(Var("c"), Int(chunk)))
    body = (Let("i", start, mutable=True), For("p1", Int(0), Int(chunk), entry))
    loop = threads(-(-nnz // chunk), *body, var="c")
    return function(
        "spmm_by_entries", [*csr(m, nnz), ("B", k * n)], [("C", m * n, 0.0)], [loop], dtype
    )


def sddmm(m, k, d, nnz, dtype):
    """vals[p] = A_vals[p] <x_i, y_j>, each dot product summed over vector lanes."""
    left, right = at("x", times(ROW, Int(d)), K), at("y", times(Load("A2_crd", P), Int(d)), K)
    entry = (
        Let("sum", Float(0.0), mutable=True),
        lanes(d, Set("sum", add(times(left, right), SUM)), var="k"),
        Store("vals", P, times(Load("A_vals", P), SUM)),
    )
    loop = threads(m, *row_of(ROW), For("p", FIRST, LAST, entry))
    inputs = [*csr(m, nnz), ("x", m * d), ("y", k * d)]
    return function("sddmm", inputs, [("vals", nnz, 0.0)], [loop], dtype)


def mttkrp(shape, capacities, rank, dtype):
    """D[i, r] += A[i, j, k] X[j, r] Y[k, r] for A in CSF."""
    a, b, c = capacities
    ranks = Int(rank)
    x = at("X", times(Load("A2_crd", Var("q")), ranks), Var("r"))
    y = at("Y", times(Load("A3_crd", P), ranks), Var("r"))
    lane = (
        Let("sum", Float(0.0), mutable=True),
        For(
            "q",
            Load("A2_pos", Var("o")),
            Load("A2_pos", add(Var("o"), Int(1))),
            (
                Let("inner", Float(0.0), mutable=True),
                For(
                    "p",
                    Load("A3_pos", Var("q")),
                    Load("A3_pos", add(Var("q"), Int(1))),
                    (Set("inner", add(Var("inner"), times(Load("A_vals", P), y))),),
                ),
                Set("sum", add(SUM, times(Var("inner"), x))),
            ),
        ),
        Store("D", add(times(ROW, ranks), Var("r")), SUM),
    )
    slice_ = (
        Let("i", Load("A1_crd", Var("o"))),
        lanes(rank, *lane, var="r"),
    )
    guarded = If(Binary("<", Var("o"), Load("A1_pos", Int(1))), slice_)
    loop = threads(a, guarded, var="o")
    inputs = [
        ("A1_pos", "int32", 2),
        ("A1_crd", "int32", a),
        ("A2_pos", "int32", a + 1),
        ("A2_crd", "int32", b),
        ("A3_pos", "int32", b + 1),
        ("A3_crd", "int32", c),
        ("A_vals", c),
        ("X", shape[1] * rank),
        ("Y", shape[2] * rank),
    ]
    return function("mttkrp", inputs, [("D", shape[0] * rank, 0.0)], [loop], dtype)


def call(function, *arrays, **options):
    """Calls a function under jit and returns its outputs."""
    results = [jax.ShapeDtypeStruct((o.size,), jnp.dtype(o.dtype)) for o in function.outputs]
    attributes = llvm.call_attributes(function, **options)
    run = jax.jit(lambda *arrays: jax.ffi.ffi_call(llvm.TARGET, results)(*arrays, **attributes))
    return run(*map(jnp.asarray, arrays))
