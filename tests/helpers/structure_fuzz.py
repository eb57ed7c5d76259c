"""Fuzzes index arrays, valid and invalid, through every operation, format and derivative.

`make fuzz` runs this file as a program, with the address sanitizer; the tests run a few draws.
`TOGETHER` draws of a case run one after the other in a loop of one program. For one group in
`COMPARED` the results are compared with the plain-JAX lowering.

    python tests/helpers/structure_fuzz.py --draws 1000000 --seed 1
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Reference,
    SparseArray,
    aggregate,
    einsum,
    gsddmm,
    gspmm,
    linalg,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spgemm,
    spmm,
)

M, K, N = 7, 6, 3  # M and K are not multiples of a vector's or block's sides
CAPACITY = {"CSR": 13, "CSC": 13, "CVS": 9, "BCSR": 5, "COO": 13, "DCSR": 13}
TOGETHER, COMPARED = 100, 8

FORMATS = {"CSR": CSR, "CSC": CSC, "CVS": CVS(2), "BCSR": BCSR(2, 4), "COO": COO, "DCSR": CSF(2)}
NODES = 4  # row nodes of DCSR


def grid(name):
    """The number of segments, and of the indices, of a format by rows or by columns."""
    outer, inner = (K, M) if name == "CSC" else (M, K)
    height, width = {"CVS": (2, 1), "BCSR": (2, 4)}.get(name, (1, 1))
    return -(-outer // height), -(-inner // width)


def draw_offsets(rng, count, nnz):
    kind = rng.integers(5)
    if kind == 0:
        return np.sort(np.append(rng.integers(0, nnz + 1, count), 0)).astype(np.int32)
    if kind == 1:
        return rng.integers(0, nnz + 1, count + 1).astype(np.int32)
    if kind == 2:
        return rng.integers(-(2**31), 2**31, count + 1).astype(np.int32)
    near = [0, 1, nnz - 1, nnz, nnz + 1, -1, 2**31 - 1, -(2**31), 2 * nnz]
    offsets = rng.choice(near, count + 1).astype(np.int32)
    return np.sort(offsets) if kind == 3 else offsets


def draw_indices(rng, count, size):
    kind = rng.integers(5)
    if kind < 2:
        indices = rng.integers(0, size, count).astype(np.int32)
        if kind == 1 and count:  # one offset or index is wrong
            indices[rng.integers(count)] = rng.choice([-1, size, 2**30, -(2**31), 2**31 - 1])
        return indices
    if kind == 2:
        return rng.integers(-(2**31), 2**31, count).astype(np.int32)
    near = [0, size - 1, size, size + 1, -1, -size, 2**30, 2**31 - 1, -(2**31)]
    return rng.choice(near, count).astype(np.int32)


def draw(rng, name):
    """Draws the index arrays of a format, as `matrix` takes them."""
    outer, inner = grid(name)
    nnz = CAPACITY[name]
    if name == "COO":
        rows, columns = draw_indices(rng, nnz, outer), draw_indices(rng, nnz, inner)
        return (draw_offsets(rng, 1, nnz), rows, columns, *draw_transpose(rng, nnz))
    if name == "DCSR":
        first = draw_offsets(rng, 1, NODES), draw_indices(rng, NODES, outer)
        second = draw_offsets(rng, NODES, nnz), draw_indices(rng, nnz, inner)
        return (*first, *second, *draw_transpose(rng, nnz))
    return draw_offsets(rng, outer, nnz), draw_indices(rng, nnz, inner)


def draw_transpose(rng, nnz):
    return draw_offsets(rng, K, nnz), draw_indices(rng, nnz, M), draw_indices(rng, nnz, nnz)


def matrix(name, values, arrays):
    if name == "COO":
        bounds, rows, columns, *transposed = arrays
        levels = ((bounds, rows), (columns,))
        return SparseArray(values, levels, tuple(transposed), (M, K), COO)
    if name == "DCSR":
        bounds, rows, offsets, columns, *transposed = arrays
        levels = ((bounds, rows), (offsets, columns))
        return SparseArray(values, levels, tuple(transposed), (M, K), CSF(2))
    return SparseArray.from_arrays(values, *arrays, shape=(M, K), format=FORMATS[name])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def values_of(name):
    block = FORMATS[name].block_shape
    return normal(CAPACITY[name], *block)


def attention(A, B, schedule, **options):
    # A query for each row and a key for each column, in two heads that share keys.
    q, k = jnp.sin(normal(1, M, 2, N)), B[None, :, None]
    return sparse_attention(q, k, k, A, schedule=schedule, **options)


def sparse_product(A, B, schedule):
    """With a capacity that does not always suffice, and sampled at A's own entries."""
    other = SparseArray.from_dense(np.float32(np.arange(K * 5).reshape(K, 5) % 3))
    C, square = spgemm(A, other, nse=12, schedule=schedule), spgemm(A, A.T, nse=9)
    return C.todense().sum() + spgemm(square, A, mask=A, schedule=schedule).values


def vectors(A):
    """A vector for each entry, that depends on the values."""
    return jnp.sin(A.values[:, None] * jnp.arange(1.0, N + 1))


def messages(A, B, schedule):
    """Vectors of entries, summed to rows by columns and by rows, and the greatest of each row."""
    V, X = vectors(A), normal(M, N)
    total = gspmm(A, B, values=V, schedule=schedule) + aggregate(A, V, "mean", schedule=schedule)
    most = gspmm(A, X, values=V, op="add", reduce="max", transpose=True, schedule=schedule)
    return total + most.sum()


def vectors_of_rows(A, B, schedule):
    V = sparse_softmax(A, values=vectors(A), schedule=schedule)
    V = V + gsddmm(A, normal(M, N), B, op="add", reduce=None, schedule=schedule)
    return row_max(A, values=V, schedule=schedule) + row_sum(A, values=V, schedule=schedule)


def attention_terms(A, B, schedule):
    rate = {"dropout_rate": 0.25, "dropout_rng": jax.random.key(1)}
    terms = {"softcap": 2.0, "alibi_slopes": B[:2, 0], "relative_bias": normal(2, M + K)}
    segments = {"segment_ids": jnp.arange(M) // 4, "kv_segment_ids": jnp.arange(K) // 4}
    return attention(A, B, schedule, query_offset=2, **terms, **segments, **rate)


def solves(A, B, schedule):
    """Triangular solves, also with incomplete factors, of a square matrix in CSR."""
    square = SparseArray.from_arrays(A.values, A.row_offsets, A.column_indices, shape=(M, M))
    b = normal(M, N)
    upper = linalg.triangular_solve(square, b, lower=False, trans=1)
    found = linalg.triangular_solve(square, b, unit_diagonal=True) + upper + linalg.ilu(square)(b)
    return jnp.where(jnp.isfinite(found), jnp.tanh(found), 0)


# Every operation that reads index arrays, as a function of a matrix A, B [K, N] and a schedule.
OPERATIONS = {
    "spmm": lambda A, B, s: spmm(A, B, schedule=s),
    "spmv": lambda A, B, s: spmm(A, B[:, :1], schedule=s),
    "spmm_transpose": lambda A, B, s: spmm(A, normal(M, N), transpose=True, schedule=s),
    "sddmm": lambda A, B, s: sddmm(A, normal(M, N), B, weighted=True, scale=0.5, schedule=s).values,
    "gspmm_max": lambda A, B, s: gspmm(A, B, reduce="max", schedule=s),
    "gspmm_min_transpose": lambda A, B, s: gspmm(
        A, normal(M, N), op="add", reduce="min", transpose=True, schedule=s
    ),
    "gspmm_mean": lambda A, B, s: gspmm(A, B, op="div", reduce="mean", schedule=s),
    "gsddmm": lambda A, B, s: gsddmm(A, normal(M, N), B, op="add", schedule=s).values,
    "sparse_product": sparse_product,
    "softmax": lambda A, B, s: sparse_softmax(A, scale=-0.5, schedule=s).values,
    "row_sum": lambda A, B, s: row_sum(A, schedule=s),
    "row_max": lambda A, B, s: jnp.tanh(row_max(A, schedule=s)),
    "attention": attention,
    "attention_bias": lambda A, B, s: attention(A, B, s, bias=A.values, is_causal=True),
    "attention_terms": attention_terms,
    "messages": messages,
    "vectors_of_rows": vectors_of_rows,
    "solves": solves,
    "einsum": lambda A, B, s: einsum("ij,jk->ik", A, B, schedule=s),
    "todense": lambda A, B, s: A.todense(),
    "sums": lambda A, B, s: A.sum(0) + A.diagonal().sum() + A.row_lengths.sum().astype(A.dtype),
    "converted": lambda A, B, s: A.asformat(CSC).asformat(COO).asformat(CSR).todense(),
}
ONE_FORMAT = ("CSR", "CVS", "BCSR")  # formats of attention
ONE_VALUE = ("sparse_product", "messages", "vectors_of_rows")  # entries, not blocks
DERIVATIVES = ("value", "gradient", "second")
HAVE_SECOND = ("spmm", "sddmm", "softmax", "gspmm_max", "attention")


def cases():
    for operation in OPERATIONS:
        for name in FORMATS:
            if operation.startswith("attention") and name not in ONE_FORMAT:
                continue
            if operation in ONE_VALUE and FORMATS[name].block_shape:
                continue
            if operation == "solves" and name != "CSR":
                continue
            if operation == "attention_bias" and name == "BCSR":
                continue
            for derivative in DERIVATIVES:
                if derivative != "second" or operation in HAVE_SECOND:
                    yield operation, name, derivative


@functools.cache
def program(operation, name, derivative, reference=False):
    """A function of index arrays made under jit: an operation, or its derivative in the values and
    B."""
    schedule = Reference() if reference else None

    def value(values, B, arrays):
        A = matrix(name, values, arrays)
        return OPERATIONS[operation](A, B, schedule)

    def total(values, B, arrays):
        return jnp.sum(jnp.sin(value(values, B, arrays)))

    def slope(values, B, arrays):
        d_values, d_B = jax.grad(total, argnums=(0, 1))(values, B, arrays)
        return jnp.sum(jnp.cos(d_values)) + jnp.sum(jnp.cos(d_B))

    of = {"value": value, "gradient": jax.grad(total, argnums=(0, 1))}
    one = of.get(derivative) or jax.grad(slope, argnums=(0, 1))
    return jax.jit(lambda values, B, draws: jax.lax.map(lambda a: one(values, B, a), draws))


def several(rng, name, count):
    """Index arrays of `count` draws, stacked."""
    return tuple(map(np.stack, zip(*(draw(rng, name) for _ in range(count)), strict=True)))


def run(case, draws, reference=False):
    """The results of all draws, stacked."""
    values, B = values_of(case[1]), normal(K, N)
    return jax.tree.leaves(program(*case, reference)(values, B, draws))


def compare(case, draws):
    """Compares the results of the kernels with those of the plain-JAX lowering."""
    for got, expected in zip(run(case, draws), run(case, draws, reference=True), strict=True):
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            arrays = [a[i].tolist() for a in draws]
            # The sums of a derivative may cancel: the error is relative to the greatest element.
            scale = np.max(np.abs(other), initial=1, where=np.isfinite(other))
            np.testing.assert_allclose(
                one, other, rtol=2e-4, atol=3e-5 * scale, err_msg=f"{case} {arrays}"
            )


def segments(offsets, count):
    """The positions of each segment: offsets are clamped and made non-decreasing."""
    starts = np.maximum.accumulate(np.clip(np.asarray(offsets, np.int64), 0, count))
    return [range(begin, end) for begin, end in zip(starts, starts[1:], strict=False)]


def counted(name, arrays):
    """Positions, rows and columns of the entries that take part, by the definition, in loops."""
    if name == "COO":
        bounds, rows, columns, *_ = arrays
        found = [(p, rows[p], columns[p]) for p in segments(bounds, len(rows))[0]]
    elif name == "DCSR":
        bounds, rows, offsets, columns, *_ = arrays
        of_node = segments(offsets, len(columns))
        nodes = segments(bounds, len(rows))[0]
        found = [(p, rows[i], columns[p]) for i in nodes for p in of_node[i]]
    else:
        offsets, indices = arrays
        each = enumerate(segments(offsets, len(indices)))
        found = [(p, i, indices[p]) for i, segment in each for p in segment]
        if name == "CSC":
            found = [(p, i, j) for p, j, i in found]
    return [(p, i, j) for p, i, j in found if 0 <= i < M and 0 <= j < K]


def dense(name, values, arrays):
    """The dense matrix of those entries, for formats with one value each."""
    out = np.zeros((M, K), np.float64)
    for p, i, j in counted(name, arrays):
        out[i, j] += np.asarray(values)[p]
    return out


def fuzz(draws, seed, part=(0, 1), report=print):
    """Runs at least `draws` draws, equally many of each case, or the share i of n processes for
    part (i, n); returns the number of draws."""
    rng, every, start = np.random.default_rng(seed), list(cases()), time.time()
    groups = -(-draws // (TOGETHER * len(every)))
    every = every[part[0] :: part[1]]
    for i, case in enumerate(every):
        for group in range(groups):
            together = several(rng, case[1], TOGETHER)
            if (group + i) % COMPARED == 0:
                compare(case, together)
            else:
                jax.block_until_ready(run(case, together))
        program.cache_clear()
        jax.clear_caches()
        if (i + 1) % 10 == 0:
            count = (i + 1) * groups * TOGETHER
            report(f"{count} draws of {i + 1} cases, {time.time() - start:.0f} s", flush=True)
    return groups * TOGETHER * len(every)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="0/1", help="1/4: the second of four processes")
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)  # XLA's code is not under test
    count = fuzz(options.draws, options.seed, tuple(map(int, options.part.split("/"))))
    print(f"{count} draws: the process lives, and results are those of the plain lowering")


if __name__ == "__main__":
    main()
