"""Several structures in one launch of a CUDA kernel: what a launch for each gives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import (
    CSR,
    CVS,
    Schedule,
    SparseArray,
    gspmm,
    row_max,
    row_sum,
    sddmm,
    select,
    sparse_attention,
    sparse_softmax,
    spmm,
)
from sgap_jax.primitives import _batch
from sgap_jax.schedules.emulated import Emulated

# An odd number of entries, so that the index arrays of most structures are not aligned.
COUNT, M, K, D = 3, 23, 20, 8


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


class Recorded:
    """Runs launches on the emulator, and lists them."""

    def __init__(self):
        self.calls = []

    def __call__(self, call, inputs, outputs):
        self.calls.append(call)
        return emulate(call, inputs, outputs)

    def names(self):
        return [call.kernel for call in self.calls]


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def structures(format, dtype="float32"):
    """Structures of one capacity, which fill it differently; the last one stores nothing."""
    length = format.vector_length or 1
    scores = normal(COUNT, -(-M // length), K)
    lengths = jnp.asarray([K, K // 3, 0], jnp.int32)
    pick = lambda x, n: select.top_k(x, 5, lengths=n, format=format, shape=(M, K))
    A = jax.vmap(pick)(scores, lengths)
    return jax.vmap(lambda A, v: A.with_values(v))(A, normal(*A.values.shape, seed=1, dtype=dtype))


def one(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def close(found, right, **tolerance):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        tolerance = tolerance or dict(rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.float32(x), np.float32(y), **tolerance)


HEADS = lambda x: x[:, None, :]
# Functions of an array, of X [M, D] and of Y [K, D].
OPS = {
    "spmm": lambda A, X, Y, s: spmm(A, Y, schedule=s),
    "spmm transposed": lambda A, X, Y, s: spmm(A, X, transpose=True, schedule=s),
    "sddmm": lambda A, X, Y, s: sddmm(A, X, Y, scale=X[0, 0], weighted=True, schedule=s).values,
    "softmax": lambda A, X, Y, s: sparse_softmax(A, scale=0.5, schedule=s).values,
    "row_sum": lambda A, X, Y, s: row_sum(A, schedule=s),
    "row_max": lambda A, X, Y, s: jnp.maximum(row_max(A, schedule=s), -9),
    "gspmm max": lambda A, X, Y, s: gspmm(A, Y, op="add", reduce="max", schedule=s),
    "gspmm min": lambda A, X, Y, s: gspmm(A, X, reduce="min", transpose=True, schedule=s),
    "attention": lambda A, X, Y, s: sparse_attention(
        HEADS(X), HEADS(Y), HEADS(2 * Y), A, bias=A.values, schedule=s
    ),
}
VECTORS = ("spmm", "spmm transposed", "sddmm", "softmax", "attention")
CASES = [(op, CSR) for op in OPS] + [(op, CVS(4)) for op in VECTORS]


@pytest.mark.parametrize(("op", "format"), CASES, ids=str)
def test_results_and_gradients(op, format):
    A, X, Y = structures(format), normal(COUNT, M, D), normal(K, D)
    shape = jax.eval_shape(lambda *x: OPS[op](*x, None), one(A, 0), X[0], Y).shape
    weights = normal(COUNT, *shape, seed=2)

    def value_and_gradients(schedule, A, X, Y, weights):
        f = lambda A, X, Y: OPS[op](A, X, Y, schedule)
        of = lambda v, X, Y: jnp.vdot(f(A.with_values(v), X, Y), weights)
        return f(A, X, Y), jax.grad(of, (0, 1, 2))(A.values, X, Y)

    together, alone = Recorded(), Recorded()
    mapped = lambda s: jax.jit(
        jax.vmap(lambda *x: value_and_gradients(s, *x), (0, 0, None, 0)), inline=True
    )
    program = mapped(Emulated(together))
    assert "stablehlo.while" not in program.lower(A, X, Y, weights).as_text()
    found = program(A, X, Y, weights)
    close(found, mapped(None)(A, X, Y, weights))  # the CPU's kernels
    assert {call.grid[2] for call in together.calls} == {COUNT}
    program = jax.jit(lambda *x: value_and_gradients(Emulated(alone), *x))
    close(one(found, 1), program(one(A, 1), X[1], Y, weights[1]), rtol=1e-6, atol=1e-6)
    assert sorted(alone.names()) == sorted(together.names())


SPMM = {
    CSR: [
        "{<2 row, 2 col>, 1}",
        "{<1/8 row, 4 col>, 4}",
        "{<4 nnz, 1 col>, 1}",
        "{<4 nnz, 2 col>, 8}",
    ],
    CVS(4): ["SubwarpTile(vector_length=4)", "WarpTile(vector_length=4)"],
    CVS(8): [
        "OctetTile(vector_length=8, swizzle=True)",
        "OctetTile(vector_length=8, row_warps=2)",
        "PaperOctetTile(vector_length=8)",
    ],
}
SDDMM = {
    CSR: ["{<2 nnz, 2 col>, 4}", "{<1/4 row, 2 col>, 2}", "{<2 row, 1 col>, 1}"],
    CVS(4): ["SubwarpTile(vector_length=4)", "WarpTile(vector_length=4)"],
    CVS(8): ["OctetTile(vector_length=8, tile_n=32, tile_k=64)", "PaperOctetTile(vector_length=8)"],
}
ATTENTION = {
    CSR: ["AttentionTile(lanes=8, share=2)"],
    CVS(8): ["AttentionTile(lanes=16, share=1, octet=True)"],
}
KERNELS = [
    (op, format, text)
    for op, kinds in (("spmm", SPMM), ("sddmm", SDDMM), ("attention", ATTENTION))
    for format, texts in kinds.items()
    for text in texts
]


@pytest.mark.parametrize(("op", "format", "text"), KERNELS, ids=str)
def test_every_kernel(op, format, text):
    dtype = "float32" if format == CSR else "float16"
    A = structures(format, dtype)
    X, Y = normal(COUNT, M, D, dtype=dtype), normal(COUNT, K, D, seed=1, dtype=dtype)
    transposed = op == "spmm" and not text.startswith(("Octet", "Warp", "Paper"))

    def results(schedule, A, X, Y):
        found = [OPS[op](A, X, Y, schedule)]
        if transposed:
            found.append(OPS["spmm transposed"](A, X, Y, schedule))
        if op == "attention":
            weighted = lambda *x: jnp.vdot(OPS[op](A, *x, schedule), HEADS(X).astype(dtype))
            found += jax.grad(weighted, (0, 1))(X, Y)
        return found

    recorded, schedule = Recorded(), Schedule.parse(text)
    program = jax.jit(jax.vmap(lambda *x: results(Emulated(recorded, schedule), *x)))
    found = program(A, X, Y)
    assert len(recorded.calls) == {"spmm": 1 + transposed, "sddmm": 1, "attention": 3}[op]
    assert {call.grid[2] for call in recorded.calls} == {COUNT}
    alone = jax.jit(lambda *x: results(Emulated(emulate, schedule), *x))
    for i in range(COUNT):
        right = alone(*one((A, X, Y), i))
        if text.endswith(("nnz, 1 col>, 1}", "nnz, 2 col>, 8}")):  # atomic additions
            close(one(found, i), right)
        else:
            for x, y in zip(one(found, i), right, strict=True):
                np.testing.assert_array_equal(x, y)


def test_several_elements_for_each_structure():
    A, X, Y = structures(CSR), normal(COUNT, 2, M, D), normal(COUNT, K, D)
    recorded = Recorded()
    pair = lambda s: lambda A, X, Y: sddmm(A, X, Y, schedule=s).values
    mapped = lambda s: jax.jit(jax.vmap(jax.vmap(pair(s), (None, 0, None))))
    found = mapped(Emulated(recorded))(A, X, Y)  # X has two for a structure, Y one
    close(found, mapped(None)(A, X, Y))
    assert [call.grid[2] for call in recorded.calls] == [2 * COUNT]
    recorded.calls.clear()
    shared = lambda s: jax.jit(jax.vmap(lambda A: pair(s)(A, X[0, 0], Y[0])))
    close(shared(Emulated(recorded))(A), shared(None)(A))  # all share X and Y
    assert [call.grid[2] for call in recorded.calls] == [COUNT]
    # A pattern for each head, which two sequences share; and for each sequence and head.
    q, k = normal(2, M, COUNT, D), normal(2, K, COUNT, D)
    twice = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), A)
    for pattern in (A, twice):
        recorded.calls.clear()
        attend = lambda s: jax.jit(lambda q, A: sparse_attention(q, k, k, A, schedule=s))  # noqa: B023
        close(attend(Emulated(recorded))(q, pattern), attend(None)(q, pattern))
        assert [call.grid[2] for call in recorded.calls] == [2 * COUNT]


def test_index_arrays_that_are_not_aligned():
    A, values, Y = structures(CSR), normal(5 * M), normal(COUNT, K, D)  # the values are shared
    schedule = Emulated(emulate, Schedule.parse("{<4 nnz, 2 col>, 8}"))
    of = lambda s: jax.jit(jax.vmap(lambda A, Y: spmm(A.with_values(values), Y, schedule=s)))
    close(of(schedule)(A, Y), of(None)(A, Y))


def test_unchecked_index_arrays():
    rng = np.random.default_rng(0)
    near = np.asarray([-(2**31), -1, 0, 1, 5, 114, 115, 116, 2**31 - 1], np.int32)
    offsets = np.stack([np.linspace(0, 115, M + 1).astype(np.int32)] * COUNT)
    offsets[1] = rng.choice(near, M + 1)
    indices = rng.integers(0, K, (COUNT, 115)).astype(np.int32)
    indices[2, ::7] = rng.choice(near, indices[2, ::7].shape)
    X, Y, values = normal(M, D), normal(K, D), normal(COUNT, 115)

    def made(schedule, offsets, indices, values):
        A = SparseArray.from_arrays(values, offsets, indices, shape=(M, K))
        assert not A.is_checked
        return [OPS[op](A, X, Y, schedule) for op in ("spmm", "sddmm", "softmax", "attention")]

    recorded = Recorded()
    mapped = lambda s: jax.jit(jax.vmap(lambda *x: made(s, *x)))
    program = mapped(Emulated(recorded))
    assert "stablehlo.while" not in program.lower(offsets, indices, values).as_text()
    close(program(offsets, indices, values), mapped(None)(offsets, indices, values))
    assert [call.grid[2] for call in recorded.calls] == [COUNT] * 4


def test_more_than_a_launch_takes_and_none(monkeypatch):
    A, Y, recorded = structures(CVS(4)), normal(K, D), Recorded()
    mapped = jax.vmap(lambda A: spmm(A, Y, schedule=Emulated(recorded)))
    right = jax.vmap(lambda A: spmm(A, Y))(A)
    monkeypatch.setattr(_batch, "GRID_Z", COUNT - 1)
    assert "stablehlo.while" in jax.jit(mapped).lower(A).as_text()
    close(jax.jit(mapped)(A), right)
    assert [call.grid[2] for call in recorded.calls] == [1] * COUNT
    assert mapped(jax.tree.map(lambda x: x[:0], A)).shape == (0, M, D)


@pytest.mark.parametrize("op", ["spmm", "attention"])
def test_programs_for_cuda(op, monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A, X, Y = structures(CSR), normal(COUNT, M, D), normal(K, D)
    total = lambda X, Y: jnp.sum(jax.vmap(lambda A, X: OPS[op](A, X, Y, None))(A, X) ** 2)
    program = jax.jit(jax.value_and_grad(total, (0, 1)))
    text = program.trace(X, Y).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @sgap_launch_v1") == {"spmm": 2, "attention": 3}[op]
    assert "stablehlo.while" not in text


def test_the_structure_of_each_element():
    """The last argument of a kernel gives each block its structure, for grids of any size."""
    for count, neighbours in itertools.chain(
        ((n, 65535 // n) for n in range(2, 65536, 97)), ((65535 // n, n) for n in range(1, 300))
    ):
        sharing = -(-(2**32) // neighbours)
        last = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(neighbours) - np.uint64(1)
        first = last + np.uint64(1) - np.uint64(neighbours)
        for z in (first, last):
            np.testing.assert_array_equal(z * np.uint64(sharing) >> np.uint64(32), np.arange(count))
