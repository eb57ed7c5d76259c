"""Programs of every public operation, for XLA's GPU compiler: in the process of compile.py only.

A case is a function of a structure and of differentiable operands. Index arrays are arguments of
the program, as a training step has them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jax.sharding import PartitionSpec as P

from sgap_jax import (
    BCSR,
    CSF,
    CSR,
    CVS,
    Schedule,
    SparseArray,
    aggregate,
    einsum,
    evaluate,
    eye,
    gsddmm,
    gspmm,
    linalg,
    masks,
    prepare,
    row_max,
    row_sum,
    sddmm,
    select,
    sparse_attention,
    sparse_softmax,
    spgemm,
    spmm,
    spmv,
)
from sgap_jax.compiler import assign, presets

M, K, N, D = 1024, 768, 64, 64
DEVICES = 4
COLUMNS = P(None, "x")
# Axes of the data of a case that are split, by what they are; of "batch" all data has one more.
SPLITS = {
    ("spmm", "columns"): (P(), COLUMNS),
    ("sddmm", "summed features"): (COLUMNS, COLUMNS),
    ("gspmm max", "columns"): (P(), COLUMNS),
    ("gspmm mean", "columns"): (P(), COLUMNS),
    ("gsddmm", "batch"): (P("x"), P("x")),
    ("sparse_softmax", "batch"): (P("x"),),
    ("row_sum", "batch"): (P("x"),),
    ("row_max", "batch"): (P("x"),),
    ("attention", "heads"): (P(None, None, "x"),) * 3,
    ("attention", "batch"): (P("x"),) * 3,
    ("einsum", "an index of the result"): (P(), COLUMNS, COLUMNS),
}


# Compiled forward and with the gradient only: XLA takes seconds for each program of these, most of
# them for prefix sums.
SLOW = ("spmm in pieces", "spmm in pieces, vectors", "attention in pieces")
SLOW += ("attention in pieces, vectors", "triangular_solve", "ilu")


class Case(NamedTuple):
    function: Any  # of (structure, *data)
    structure: SparseArray
    data: tuple  # of the shapes and dtypes of the operands that have gradients


def random(format=None, dtype=jnp.float32, rows=M, columns=K):
    whole = sp.random(rows, columns, 0.03, "csr", np.float32, np.random.default_rng(0))
    array = SparseArray.from_scipy(whole)
    array = array if format is None else array.asformat(format)
    return array.with_values(array.values.astype(dtype))


def skewed(format=None, dtype=jnp.float32):
    """A row and a column store all, others few: default schedules cut them into pieces."""
    dense = np.random.default_rng(0).random((M, K)) < 0.005
    dense[7] = dense[:, 5] = True
    array = SparseArray.from_scipy(sp.csr_matrix(dense.astype(np.float32)))
    array = array if format is None else array.asformat(format)
    return array.with_values(array.values.astype(dtype))


def seen_by_all(format=None):
    """A mask in which 8 tokens see all and are seen by all, the others a window."""
    at = np.arange(1024)
    near = np.abs(at[:, None] // 8 - at // 8) <= 1
    dense = near | (at[:, None] < 8) | (at < 8)
    array = SparseArray.from_scipy(sp.csr_matrix(dense.astype(np.float32)))
    return array if format is None else array.asformat(format)


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def like(array):
    return shape(*array.values.shape, dtype=array.values.dtype)


def cases():
    """{name: Case}, whose default schedules are those of a user's call."""
    csr, square = random(), random(rows=256, columns=256)
    half = jnp.bfloat16
    half_csr, vectors = random(dtype=half), random(CVS(8), half)
    wide_vectors, blocks = random(CVS(8)), random(BCSR(8, 8), jnp.float16)
    places = np.unique(np.random.default_rng(1).integers(0, 30, (500, 3)), axis=0)
    tensor = SparseArray.from_coordinates(
        places, np.ones(len(places), np.float32), (30, 30, 30), format=CSF(3)
    )
    window, window_of_vectors = masks.band(512, 64), masks.band(512, 64, format=CVS(8))
    edges = shape(csr.nnz, N)
    long_rows, long_vectors = skewed(), skewed(CVS(8), half)
    seen, seen_vectors = seen_by_all(), seen_by_all(CVS(8))
    dominant = square.with_values(square.values * 0.01) + eye(256, format=CSR)
    matrix = assign("ij,jk->ik", {"A": CSR})
    loops = presets.spmm_point(matrix, Schedule.parse("{<1/8 row, 4 col>, 8}"), N)

    def product(transpose=False, schedule=None):
        return lambda A, v, B: spmm(A.with_values(v), B, transpose=transpose, schedule=schedule)

    def sampled(weighted=False):
        return lambda A, v, X, Y: sddmm(A.with_values(v), X, Y, weighted=weighted).values

    def attention(A, q, k, v):
        return sparse_attention(q, k, v, A)

    def with_terms(A, q, k, v):
        options = dict(softcap=20.0, alibi_slopes=jnp.linspace(0.1, 0.8, 8), query_offset=3)
        options |= dict(segment_ids=jnp.arange(512) // 128, dropout_rate=0.1, dropout_rng=0)
        return sparse_attention(q, k, v, A, **options)

    def three_steps(A, q, k, v):
        return spmm(sparse_softmax(sddmm(A, q, k), scale=0.125), v)

    def heads(keys, dtype, length=512):
        return tuple(shape(1, length, h, D, dtype=dtype) for h in (8, keys, keys))

    def residual(A, v, x, b):
        return evaluate("r(i) = b(i) - A(i,j) * x(j)", A=A.with_values(v), x=x, b=b)

    def added(A, v, w):
        terms = dict(A=A.with_values(v), B=A.T.with_values(w))
        return evaluate("C(i,j) = A(i,j) + B(i,j)", pattern=A, **terms).values

    def made_inside(A, v, B):
        return spmm(SparseArray.from_arrays(v, A.row_offsets, A.column_indices, shape=A.shape), B)

    row = lambda f: lambda A, v: f(A.with_values(v))
    messages = lambda **how: lambda A, v, X: gspmm(A.with_values(v), X, **how)
    of_edges = lambda **how: lambda A, v, X: gspmm(A, X, values=v, **how)
    aggregated = lambda reduce: lambda A, v: aggregate(A, v, reduce)
    found = {
        "spmm": Case(product(), csr, (like(csr), shape(K, N))),
        "spmm bfloat16": Case(product(), half_csr, (like(half_csr), shape(K, N, dtype=half))),
        "spmm transpose": Case(product(True), csr, (like(csr), shape(M, N))),
        "spmm 4 columns": Case(product(), csr, (like(csr), shape(K, 4))),
        "spmm by nonzeros": Case(
            product(schedule=Schedule.parse("{<1 nnz, 4 col>, 8}")), csr, (like(csr), shape(K, N))
        ),
        "spmm vectors": Case(product(), vectors, (like(vectors), shape(K, N, dtype=half))),
        "spmm vectors float32": Case(product(), wide_vectors, (like(wide_vectors), shape(K, N))),
        "spmm blocks": Case(product(), blocks, (like(blocks), shape(K, N, dtype=jnp.float16))),
        "spmv": Case(lambda A, v, x: spmv(A.with_values(v), x), csr, (like(csr), shape(K))),
        "sddmm": Case(lambda A, X, Y: sddmm(A, X, Y).values, csr, (shape(M, D), shape(K, D))),
        "sddmm weighted": Case(sampled(True), csr, (like(csr), shape(M, D), shape(K, D))),
        "sddmm vectors": Case(
            lambda A, X, Y: sddmm(A, X, Y).values,
            vectors,
            (shape(M, D, dtype=half), shape(K, D, dtype=half)),
        ),
        "sparse_softmax": Case(row(lambda A: sparse_softmax(A).values), csr, (like(csr),)),
        "sparse_softmax vectors": Case(
            row(lambda A: sparse_softmax(A).values), vectors, (like(vectors),)
        ),
        "row_sum": Case(row(row_sum), csr, (like(csr),)),
        "row_max": Case(row(row_max), csr, (like(csr),)),
        "gspmm max": Case(messages(op="mul", reduce="max"), csr, (like(csr), shape(K, N))),
        "gspmm mean": Case(messages(op="sub", reduce="mean"), csr, (like(csr), shape(K, N))),
        "gsddmm": Case(lambda A, x, y: gsddmm(A, x, y, op="add").values, csr, (shape(M), shape(K))),
        "attention": Case(attention, window, heads(8, jnp.float32)),
        "attention vectors": Case(attention, window_of_vectors, heads(2, half)),
        "attention with terms": Case(with_terms, window, heads(8, jnp.float32)),
        "attention in three steps": Case(three_steps, csr, (shape(M, D), shape(K, D), shape(K, D))),
        "einsum": Case(
            lambda A, v, X, Y: einsum("ijk,jr,kr->ir", A.with_values(v), X, Y),
            tensor,
            (like(tensor), shape(30, 16), shape(30, 16)),
        ),
        "einsum with a schedule": Case(
            lambda A, v, B: einsum("ij,jk->ik", A.with_values(v), B, schedule=loops),
            csr,
            (like(csr), shape(K, N)),
        ),
        "spgemm": Case(
            lambda A, v, w: spgemm(A.with_values(v), A.with_values(w), mask=A).values,
            square,
            (like(square), like(square)),
        ),
        "spgemm in a capacity": Case(
            lambda A, v, w: spgemm(A.with_values(v), A.with_values(w), nse=M * 256).values,
            square,
            (like(square), like(square)),
        ),
        "gspmm edge vectors": Case(of_edges(), csr, (edges, shape(K, N))),
        "gspmm edge vectors, sub": Case(of_edges(op="sub"), csr, (edges, shape(K, N))),
        "gspmm edge vectors, max": Case(of_edges(reduce="max"), csr, (edges, shape(K, N))),
        "gsddmm edge vectors": Case(
            lambda A, X, Y: gsddmm(A, X, Y, reduce=None),
            csr,
            (shape(M, N), shape(K, N)),
        ),
        "gsddmm edge vectors, add": Case(
            lambda A, v, Y: gsddmm(A, None, Y, values=v, op="add", reduce=None),
            csr,
            (edges, shape(K, N)),
        ),
        "aggregate": Case(aggregated("sum"), csr, (edges,)),
        "aggregate max": Case(aggregated("max"), csr, (edges,)),
        "row_max edge vectors": Case(lambda A, v: row_max(A, values=v), csr, (edges,)),
        "sparse_softmax edge vectors": Case(
            lambda A, v: sparse_softmax(A, values=v), csr, (shape(csr.nnz, 8),)
        ),
        "spmm in pieces": Case(product(), long_rows, (like(long_rows), shape(K, N))),
        "spmm in pieces, vectors": Case(
            product(), long_vectors, (like(long_vectors), shape(K, N, dtype=half))
        ),
        "spmm by nonzeros, skewed": Case(product(), long_rows, (like(long_rows), shape(K, 4))),
        "gspmm max, skewed": Case(
            messages(reduce="max"), long_rows, (like(long_rows), shape(K, 4))
        ),
        "gspmm max, forward mode": Case(
            lambda A, v, X: jax.jvp(lambda *x: messages(reduce="max")(A, *x), (v, X), (v, X))[1],
            csr,
            (like(csr), shape(K, N)),
        ),
        "attention in pieces": Case(attention, seen, heads(8, jnp.float32, 1024)),
        "attention in pieces, vectors": Case(attention, seen_vectors, heads(2, half, 1024)),
        "evaluate": Case(residual, csr, (like(csr), shape(K), shape(M))),
        "evaluate at a pattern": Case(added, square, (like(square), like(square))),
        "triangular_solve": Case(
            lambda A, v, b: linalg.triangular_solve(A.with_values(v), b),
            dominant,
            (like(dominant), shape(256, 4)),
        ),
        "ilu": Case(
            lambda A, v, b: linalg.ilu(A.with_values(v))(b),
            dominant,
            (like(dominant), shape(256, 4)),
        ),
        "spmm, made inside": Case(made_inside, csr, (like(csr), shape(K, N))),
        "threshold": Case(
            lambda _, x: select.threshold(x, 0.5, nse=M * K // 4).values, csr, (shape(M, K),)
        ),
        "top_k": Case(lambda _, x: select.top_k(x, 32).values, csr, (shape(M, K),)),
        "from_dense": Case(
            lambda _, x: SparseArray.from_dense(x, nse=M * K).values, csr, (shape(M, K),)
        ),
        "top_p": Case(lambda _, x: select.top_p(x, 0.5, most=32).values, csr, (shape(M, K),)),
    }
    # With the work lists of calls and gradients.
    for name in ("spmm in pieces", "attention in pieces, vectors"):
        case = found[name]
        kept = prepare(case.structure, gradient(case), case.data)
        found[f"{name}, prepared"] = case._replace(structure=kept)
    return found


def forward(case):
    return lambda A, data: case.function(A, *data)


def gradient(case):
    def loss(data, A):
        return jnp.sum(jnp.sin(case.function(A, *data).astype(jnp.float32)))

    return lambda A, data: jax.grad(loss)(data, A)


def batched(data, size=DEVICES):
    return jax.tree.map(lambda x: shape(size, *x.shape, dtype=x.dtype), data)


def mapped(case):
    return jax.vmap(gradient(case), (None, 0))


def scanned(case):
    step = gradient(case)
    return lambda A, data: jax.lax.scan(lambda _, one: (None, step(A, one)), None, data)[1]


def split(case, mesh):
    return jax.shard_map(mapped(case), mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))


def trained(case):
    """A step of gradient descent."""
    step = gradient(case)

    def update(A, data):
        return jax.tree.map(lambda x, g: x - jnp.asarray(0.1, x.dtype) * g, data, step(A, data))

    return update
