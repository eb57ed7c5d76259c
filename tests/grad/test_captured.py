"""A matrix captured by a jitted function is a constant of its program. XLA would expand its
structure during compilation, in an interpreter, for seconds; so no program may expand constants
only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Reference,
    SparseArray,
    Unfused,
    einsum,
    gspmm,
    random,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
)

M, K = 38, 42  # not multiples of 4: the last vectors and blocks end past the matrix
FORMATS = [CSR, CSC, COO, CSF(2), CVS(4), CVS(4).transposed, BCSR(4, 4)]
MATRICES = {f: random((M, K), density=0.3, format=CSR).asformat(f) for f in FORMATS}
X, Y = jnp.ones((K, 3), jnp.float32), jnp.ones((M, 3), jnp.float32)

# Operations that XLA evaluates entry by entry. Arithmetic on constants is folded too, but fast.
EXPANSIONS = {
    f"stablehlo.{name}" for name in ("gather", "scatter", "sort", "reduce_window", "while")
}
OPAQUE = ("stablehlo.optimization_barrier", "stablehlo.custom_call")


def expansions_of_constants(function, *operands):
    """Steps of the program whose operands are all compile-time constants, and whose results are as
    large as an array of offsets."""
    module = jax.jit(function).lower(*operands).compiler_ir("stablehlo")
    functions = {op.attributes["sym_name"].value: op for op in module.body.operations}
    found = []

    def walk(block, known):
        for op in block.operations:
            name, fixed = op.operation.name, all(x in known for x in op.operands)
            if name == "func.call":
                callee = functions[op.attributes["callee"].value].regions[0].blocks[0]
                given = zip(callee.arguments, op.operands, strict=True)
                results = walk(callee, {inner for inner, x in given if x in known})
                known |= {x for x, one in zip(op.results, results, strict=True) if one}
                continue
            if name.endswith(".return"):
                return [x in known for x in op.operands]
            for region in op.regions:
                for inner in region.blocks:
                    walk(inner, set(known))
            if fixed and name not in OPAQUE:
                known |= set(op.results)
                sizes = [np.prod(x.type.shape) for x in op.results]
                if name in EXPANSIONS and max(sizes) >= M // 4:
                    found.append(str(op)[:200])
        return []

    walk(functions["main"].regions[0].blocks[0], set())
    return found


def squares(out):
    return jnp.sum((out.values if isinstance(out, SparseArray) else out) ** 2)


def gradient(f):
    return lambda A, v: jax.grad(lambda v, x, y: squares(f(A.with_values(v), x, y)), (0, 1, 2))(
        v, X, Y
    )


def value(f):
    return lambda A, v: f(A.with_values(v))


CASES = {
    "diagonal": value(lambda A: A.diagonal(1)),
    "todense": value(lambda A: A.todense()),
    "columns' sums": value(lambda A: A.sum(axis=0)),
    "sum": value(lambda A: A.sum()),
    "row_lengths": value(lambda A: A.row_lengths),
    "coordinates": value(lambda A: (A.coordinates(), A.values)),
    "CSR": value(lambda A: A.asformat(CSR).values),
    "CSC": value(lambda A: A.asformat(CSC).values),
    "COO": value(lambda A: A.asformat(COO).values),
    "captured values": lambda A, v: A.todense() * v.sum() + A.asformat(CSC).todense(),
    "row_sum": gradient(lambda A, x, y: row_sum(A)),
    "row_max": gradient(lambda A, x, y: row_max(A)),
    "spmm": gradient(lambda A, x, y: spmm(A, x)),
    "sddmm": gradient(lambda A, x, y: sddmm(A, y, x, weighted=True)),
    "softmax": gradient(lambda A, x, y: sparse_softmax(A, scale=jnp.float32(2))),
    "gspmm max": gradient(lambda A, x, y: gspmm(A, x, op="div", reduce="max")),
    "gspmm mean": gradient(lambda A, x, y: gspmm(A, x, op="add", reduce="mean")),
    "einsum": gradient(lambda A, x, y: einsum("ij,jk->i", A, x, schedule=Reference())),
    "einsum max": gradient(lambda A, x, y: einsum("ij,jk->k", A, x, reduction="max")),
    "reference row_max": gradient(lambda A, x, y: row_max(A, schedule=Reference())),
    "reference spmm": gradient(lambda A, x, y: spmm(A, x, schedule=Reference())),
    "reference sddmm": gradient(lambda A, x, y: sddmm(A, y, x, schedule=Reference())),
    "reference softmax": gradient(lambda A, x, y: sparse_softmax(A, schedule=Reference())),
    "reference gspmm": gradient(lambda A, x, y: gspmm(A, x, reduce="min", schedule=Reference())),
}


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_no_expansion_of_constants(name, format):
    A = MATRICES[format]
    assert expansions_of_constants(lambda v: CASES[name](A, v), A.values) == []


@pytest.mark.parametrize("format", [CSR, CVS(4), BCSR(4, 4)], ids=str)
@pytest.mark.parametrize("schedule", [None, Unfused(), Reference()], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_expansion_of_a_pattern(format, schedule, is_causal):
    A = MATRICES[format]
    q, k = (jnp.ones((size, 2, 4), jnp.float32) for size in A.shape)
    bias = None if format == BCSR(4, 4) else jnp.ones(A.values.shape, jnp.float32)

    def loss(q, k, v, bias):
        options = dict(bias=bias, is_causal=is_causal, schedule=schedule)
        return squares(sparse_attention(q, k, v, A, **options))

    gradients = jax.grad(loss, (0, 1, 2) if bias is None else (0, 1, 2, 3))
    tangents = lambda q, k, v, bias: jax.jvp(  # noqa: E731
        lambda *x: gradients(*x, bias), (q, k, v), (q, k, v)
    )
    for function in (loss, gradients, tangents):
        assert expansions_of_constants(function, q, k, k, bias) == []


def test_the_walk_finds_what_it_looks_for():
    A = MATRICES[CSR]

    def marked(v, offsets):
        row = jnp.zeros(v.size, jnp.int32).at[offsets[1:-1]].add(1)
        return v + row[jnp.flip(A.column_indices)].astype(v.dtype)

    assert len(expansions_of_constants(lambda v: marked(v, A.row_offsets), A.values)) == 2
    hidden = lambda v: marked(v, jax.lax.optimization_barrier(A.row_offsets))  # noqa: E731
    assert expansions_of_constants(hidden, A.values) == []


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["diagonal", "todense", "CSC", "reference spmm"])
def test_a_captured_matrix_gives_the_same_numbers(name, format):
    A = MATRICES[format]
    captured = jax.jit(lambda v: CASES[name](A, v))(A.values)
    jax.tree.map(np.testing.assert_array_equal, captured, jax.jit(CASES[name])(A, A.values))


def test_a_transpose_that_nothing_uses_is_not_computed():
    # The index arrays are hidden one at a time: if all were hidden, the sort would stay.
    A = MATRICES[CSR]

    def product(offsets, indices):
        made = SparseArray.from_arrays(A.values, offsets, indices, shape=A.shape)
        return made.asformat(COO).values @ jnp.ones(A.nnz, A.dtype), made.diagonal()

    program = jax.jit(product).lower(A.row_offsets, A.column_indices).compile().as_text()
    assert " sort(" not in program
