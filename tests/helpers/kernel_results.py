"""Checksums of the CPU kernels' results for fixed operands: every operation and format, every
dtype.

    SGAP_CPU_ISA=avx2 python tests/helpers/kernel_results.py

prints {case: checksum of the result's bits} as JSON, for the kernels of one instruction set (the
best one without SGAP_CPU_ISA), with SGAP_CPU_LIKE=intel in the loops that an Intel takes.
test_checksums.py runs this file; test_ffi_calls.py lists the FFI
calls of the same cases.

Operands are hashes of integers, not a library's random numbers, so that they have the same bits
with every version of NumPy and JAX and on every processor. Sizes that select different loops of a
kernel all occur in float32; each other dtype has a third of them.
"""

import dataclasses
import json
import math
import os
import zlib
from functools import partial

import jax
import ml_dtypes
import numpy as np

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSR,
    CVS,
    CpuTile,
    SparseArray,
    gsddmm,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spgemm,
    spmm,
    spmv,
)

DTYPES = ("float32", "float64", "bfloat16", "float16")
LENGTHS = (2, 5, 8, 16)  # lengths of column vectors
SMALL_CHUNKS = CpuTile(nonzeros=64)  # rows are cut between tasks
PACKED_TILES = CpuTile(columns=16, nonzeros=64, packed=True)
PROCESSORS = 4  # assumed for the pieces of attention's gradients


def hashes(count, seed):
    """`count` integers of 64 bits that look random (splitmix64)."""
    x = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_values(dtype, *shape, seed=0):
    """Values from -2 to 2. For 16-bit dtypes they have 24 bits before the cast, so are rounded
    once."""
    bits = 53 if dtype == "float64" else 24
    words = hashes(math.prod(shape), seed) >> np.uint64(64 - bits)
    exact = words.astype(np.float64) * 2.0 ** (2 - bits) - 2
    exact = exact if dtype == "float64" else exact.astype(np.float32)
    return exact.astype(np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)


def matrix(dtype, columns, lengths, format=CSR, seed=1):
    """A matrix whose rows (or block rows of column vectors and blocks) have these lengths; the last
    vectors end one row past the matrix."""
    found = [np.sort(np.argsort(hashes(columns, i + 99))[:n]) for i, n in enumerate(lengths)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    indices = np.concatenate(found).astype(np.int32)
    values = random_values(dtype, len(indices), *format.block_shape, seed=seed)
    tall, wide = (*format.block_shape, 1, 1)[:2]
    shape = (len(lengths) * tall - (tall > 1), columns * wide)
    return SparseArray.from_arrays(values, offsets, indices, shape=shape, format=format)


# (columns, row lengths): each length once, with empty and full rows; a dense pattern; and columns
# that the transpose uses often.
UNEVEN = (60, [(37 * i) % 61 for i in range(61)])
DENSE = (210, [130, 0, 7, 201, 90] * 4)
TALL = (24, [12] * 300)


@dataclasses.dataclass
class Cases:
    """name -> (function, operands), for one dtype.

    Attributes:
      dtype: the dtype of all operands.
      inexact: names of the cases whose last bits depend on the C library's exp or log.
    """

    dtype: str
    found: dict = dataclasses.field(default_factory=dict)
    inexact: set = dataclasses.field(default_factory=set)

    def some(self, *sizes):
        """All sizes in float32, else this dtype's third of them."""
        turn = DTYPES.index(self.dtype)
        return sizes if turn == 0 else sizes[turn - 1 :: 3]

    def add(self, name, function, *operands, inexact=False):
        name = f"{name}, {self.dtype}"
        assert name not in self.found, name
        self.found[name] = (function, operands)
        if inexact and self.dtype == "float64":
            self.inexact.add(name)

    def random_values(self, *shape, seed=0):
        return random_values(self.dtype, *shape, seed=seed)

    def matrix(self, of, format=CSR):
        return matrix(self.dtype, *of, format)


def products(cases):
    A = cases.matrix(UNEVEN)
    m, k = A.shape
    for n in cases.some(1, 2, 3, 4, 7, 8, 16, 17, 33, 64, 130, 5):
        cases.add(f"spmm, CSR, n={n}", spmm, A, cases.random_values(k, n))
    B, D = cases.random_values(k, 36), cases.random_values(m, 36)
    transposed, packed = partial(spmm, transpose=True), partial(spmm, schedule=PACKED_TILES)
    cases.add("spmm, CSR, small chunks", partial(spmm, schedule=SMALL_CHUNKS), A, B)
    cases.add("spmm, CSR, packed tiles", packed, A, B)
    for n in cases.some(36, 5, 1):
        # By columns: how many pieces the rows have depends on the number of cores.
        by_columns = partial(transposed, schedule=CpuTile())
        cases.add(f"spmm, CSR, transposed, n={n}", by_columns, A, D[:, :n])
    for n in cases.some(1, 2, 3, 4, 6, 8):
        cases.add(f"spmm, CSR, transposed by rows, n={n}", transposed, A, D[:, :n])
    tall = cases.matrix(TALL)
    cases.add("spmm, CSR, transposed by short rows", transposed, tall, cases.random_values(300, 1))
    rows = np.repeat(np.arange(m), np.diff(A.row_offsets))
    for format in (CSC, COO):
        coordinates = np.stack([rows, A.column_indices], 1)
        of = SparseArray.from_coordinates(coordinates, A.values, A.shape, format=format)
        cases.add(f"spmm, {format}", spmm, of, B)
    cases.add(
        "spmm, BCSR(2, 3)", spmm, cases.matrix(UNEVEN, BCSR(2, 3)), cases.random_values(180, 17)
    )
    cases.add("spmv, CSR", spmv, A, B[:, 0])
    masked = lambda A, C: spgemm(A.T, A, mask=C).values
    cases.add("spgemm, CSR, at a mask", masked, A, matrix(cases.dtype, k, range(k), seed=6))
    batch = (cases.random_values(3, A.nnz, seed=2), cases.random_values(3, k, 9, seed=3))
    over = lambda A, v, B: jax.vmap(lambda v, B: spmm(A.with_values(v), B))(v, B)
    cases.add("spmm, CSR, a batch of three", over, A, *batch)
    for V in cases.some(*LENGTHS):
        of = cases.matrix(UNEVEN, CVS(V))
        for n in cases.some(7, 16, 36, 1):
            cases.add(f"spmm, CVS({V}), n={n}", spmm, of, B[:, :n])
        cases.add(f"spmm, CVS({V}), packed tiles", packed, of, B)
        cases.add(
            f"spmm, CVS({V}), transposed", transposed, of, cases.random_values(of.shape[0], 5)
        )
        tall = cases.matrix(TALL, CVS(V))
        D = cases.random_values(tall.shape[0], 40)
        cases.add(f"spmm, CVS({V}), transposed by rows", transposed, tall, D)


def sampled_products(cases):
    factors = lambda A, d: (
        cases.random_values(A.shape[0], d, seed=4),
        cases.random_values(A.shape[1], d),
    )
    values = lambda A, X, Y: sddmm(A, X, Y).values
    weighted = lambda A, X, Y: sddmm(A, X, Y, weighted=True, scale=-0.75).values
    A = cases.matrix(UNEVEN)
    for d in cases.some(1, 3, 16, 32, 64, 101):
        cases.add(f"sddmm, CSR, d={d}", values, A, *factors(A, d))
    cases.add("sddmm, CSR, weighted", weighted, A, *factors(A, 20))
    of = cases.matrix(DENSE)
    cases.add("sddmm, CSR, a dense pattern", values, of, *factors(of, 259))
    for V in cases.some(*LENGTHS):
        of = cases.matrix(UNEVEN, CVS(V))
        for d in cases.some(1, 32, 37):
            cases.add(f"sddmm, CVS({V}), d={d}", values, of, *factors(of, d))
        cases.add(f"sddmm, CVS({V}), weighted", weighted, of, *factors(of, 20))
        dense = cases.matrix(DENSE, CVS(V))
        cases.add(f"sddmm, CVS({V}), a dense pattern", values, dense, *factors(dense, 70))


def messages(cases):
    A = cases.matrix(UNEVEN)
    away = A.with_values(A.values + np.copysign(A.values.dtype.type(0.5), A.values))
    X, Z = cases.random_values(A.shape[1], 21), cases.random_values(A.shape[0], 6)
    for op, reduce in cases.some(
        ("mul", "max"), ("add", "min"), ("sub", "max"), ("div", "min"), ("copy", "max")
    ):
        extremum = partial(gspmm, op=op, reduce=reduce)
        transposed = partial(extremum, transpose=True, schedule=SMALL_CHUNKS)
        cases.add(f"gspmm, {op} {reduce}", extremum, away, X)
        cases.add(f"gspmm, {op} {reduce}, transposed", transposed, away, Z)
        cases.add(f"gspmm, {op} {reduce}, gradients", partial(gradients, extremum), away, X)
        cases.add(f"gspmm, {op} {reduce}, tangents", partial(tangents, extremum), away, X)
    of_ends = lambda A, X, Y, op: gsddmm(A, X, Y, op=op).values
    for op in cases.some("add", "sub", "div", "copy"):
        pair = (cases.random_values(A.shape[0], 3), cases.random_values(A.shape[1], 3, seed=5))
        cases.add(f"gsddmm, {op}", partial(of_ends, op=op), A, *pair)


def tangents(function, A, X):
    """The tangent of a function of a matrix and X, along a fixed tangent of X."""
    along = random_values(str(X.dtype), *X.shape, seed=9)
    return jax.jvp(lambda X: function(A, X), (X,), (along,))[1]


def gradients(function, A, *operands):
    """The gradients of a function of a matrix and other operands, in all of them, for fixed
    cotangents."""
    of_values = lambda values, *operands: function(A.with_values(values), *operands)
    results, back = jax.vjp(of_values, A.values, *operands)
    return back(jax.tree.map(lambda x: random_values(str(x.dtype), *x.shape, seed=6), results))


def rows(cases):
    softmax = lambda A, **options: sparse_softmax(A, **options).values
    for format in (CSR, *map(CVS, cases.some(*LENGTHS))):
        A = cases.matrix(UNEVEN, format)
        for name, reduction in (("row_sum", row_sum), ("row_max", row_max)):
            cases.add(f"{name}, {format}", reduction, A)
            chunks = partial(reduction, schedule=SMALL_CHUNKS)
            cases.add(f"{name}, {format}, small chunks", chunks, A)
        cases.add(f"row_broadcast, {format}", partial(gradients, row_sum), A)
        scaled = partial(softmax, scale=0.6)
        cases.add(f"sparse_softmax, {format}", scaled, A, inexact=True)
        chunks = partial(softmax, schedule=SMALL_CHUNKS)
        cases.add(f"sparse_softmax, {format}, small chunks", chunks, A, inexact=True)
        back = partial(gradients, scaled)
        cases.add(f"sparse_softmax_jacobian, {format}", back, A, inexact=True)


def attention(cases):
    def function(A, q, k, v, bias=None, sinks=None, **options):
        return sparse_attention(q, k, v, A, bias=bias, sinks=sinks, return_lse=True, **options)

    wide = "float64" if cases.dtype == "float64" else "float32"
    for format in (CSR, *map(CVS, cases.some(*LENGTHS))):
        A = cases.matrix(UNEVEN, format)
        m, k = A.shape
        bias = random_values(wide, *A.values.shape, seed=13)
        bias[::5] = -np.inf  # masked entries
        sinks = random_values(wide, 4, seed=14)
        for depth, name in ((8, "narrow heads"), (64, "wide heads")):
            q = cases.random_values(2, m, 4, depth, seed=10)
            keys, v = (cases.random_values(2, k, 2, depth, seed=seed) for seed in (11, 12))
            plain, every = (A, q, keys, v), (A, q, keys, v, bias, sinks)
            lengths = np.int32([k - 7, k + 5])
            masked = partial(function, is_causal=True, key_value_seq_lengths=lengths)
            back = partial(gradients, masked)
            cases.add(f"attention, {format}, {name}", function, *plain, inexact=True)
            cases.add(f"attention, {format}, {name}, masked", masked, *every, inexact=True)
            cases.add(f"attention, {format}, {name}, gradients", back, *every, inexact=True)


def unchecked(cases):
    """Cases with unchecked structures: the kernels leave out entries that are out of range."""

    def of(offsets, indices, values, B):
        A = SparseArray.from_arrays(values, offsets, indices, shape=(5, 9))
        return spmm(A, B), sddmm(A, B[:5], B).values, row_sum(A)

    offsets = np.int32([0, 3, 2, 30, 11, 12])
    indices = np.int32([0, 9, 2, -1, 4, 5, 1 << 30, 7, 8, 3, 1, 0])
    given = (offsets, indices, cases.random_values(12), cases.random_values(9, 17))
    cases.add("spmm, sddmm and row_sum of an unchecked structure", of, *given)


def all_cases(dtype):
    cases = Cases(dtype)
    for part in (products, sampled_products, messages, rows, attention, unchecked):
        part(cases)
    return cases


def together(cases):
    """One jitted program for all cases, and its operands: compiling each case separately takes a
    minute."""
    functions = {name: function for name, (function, _) in cases.found.items()}
    given = {name: operands for name, (_, operands) in cases.found.items()}
    return jax.jit(lambda of: {name: f(*of[name]) for name, f in functions.items()}), given


def checksums(cases):
    """{case: CRC-32 of the bits of its results, as hexadecimal digits}."""
    program, operands = together(cases)
    found = {}
    for name, results in program(operands).items():
        crc = 0
        for result in map(np.asarray, jax.tree.leaves(results)):
            # float64 exp and log come from the C library, whose last bit may differ between
            # machines.
            rounded = result.astype(np.float32) if name in cases.inexact else result
            crc = zlib.crc32(np.ascontiguousarray(rounded).tobytes(), crc)
        found[name] = f"{crc:08x}"
    return found


def main():
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    os.cpu_count = lambda: PROCESSORS
    found = {}
    for dtype in DTYPES:
        found |= checksums(all_cases(dtype))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
