"""Arguments that have to be known while a program is made, traced: a ValueError that names them and
says what to write instead, and never JAX's own about an array that NumPy asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sgap_jax import (
    BCSR,
    COO,
    CSF,
    CSR,
    CVS,
    SparseArray,
    cluster_rows,
    einsum,
    fill_in,
    gspmm,
    masks,
    nn,
    prune,
    random,
    read,
    sparse_attention,
    spmm,
    spmv,
    write,
)

A = random((16, 16), density=0.3)
B, HEADS = jnp.ones((16, 2), jnp.float32), jnp.ones((16, 2, 4), jnp.float32)
IDS, N, SHARE = jnp.arange(8) // 4, jnp.int32(4), jnp.float32(0.5)
FORMATS = [CSR, COO, CSF(2), CVS(4), BCSR(4, 4), BCSR(5, 3), CVS(4).transposed]
DENSE = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
COLUMNS = [0, 1]


def linear(sparsity):
    return nn.SparseLinear(4, 4, sparsity=sparsity, rngs=nnx.Rngs(0))


def heads(count):
    return nn.GraphAttention(4, 4, heads=count, rngs=nnx.Rngs(0))


def written(matrix):
    write("never.mtx", matrix)


@pytest.mark.parametrize(
    ("call", "argument", "words"),
    [
        (
            masks.block_diagonal,
            IDS,
            ["masks.block_diagonal: segment_ids", "pass it as an argument"],
        ),
        (masks.block_diagonal, IDS, ["key_value_seq_lengths", "bias of -inf", "outside jit"]),
        (lambda x: masks.block_diagonal([x[0], x[1]]), IDS, ["segment_ids"]),
        (lambda x: masks.block_diagonal(np.zeros(8, int), x), IDS, ["kv_segment_ids"]),
        (lambda x: masks.band(x, 4), N, ["masks.band: L", "static size"]),
        (lambda x: masks.strided(16, x), N, ["masks.strided: stride"]),
        (lambda x: masks.fixed(16, 4, x), N, ["masks.fixed: c"]),
        (lambda x: masks.band_and_random(64, 8, x), SHARE, ["sparsity"]),
        (lambda x: masks.band_and_random(64, 8, 0.5, seed=x), N, ["seed"]),
        (lambda x: masks.bigbird(64, 8, seed=x), N, ["masks.bigbird: seed"]),
        (lambda x: masks.longformer(64, 8, x), IDS, ["global_tokens"]),
        (
            lambda x: masks.from_function(lambda i, j: jnp.less(i, j), x.shape[0]),
            B,
            ["from_function: f(rows"],
        ),
        (masks.causal, A, ["masks.causal", "tracers", "outside jit"]),
        (lambda x: masks.union(x, A), A, ["masks.union", "outside jit"]),
        (masks.plot, A, ["masks.plot", "outside jit"]),
        (lambda x: random((8, 8), density=x), SHARE, ["random: density", "static size"]),
        (lambda x: random((8, 8), density=0.5, seed=x), N, ["random", "seed"]),
        (lambda x: prune(x, sparsity=0.5), B, ["prune: W", "nn.magnitude_mask"]),
        (lambda x: prune([[x]], sparsity=0.5), SHARE, ["prune: W"]),
        (lambda x: prune(B, sparsity=x), SHARE, ["prune: sparsity"]),
        (lambda x: cluster_rows(x, CVS(4)), A, ["cluster_rows", "outside jit"]),
        (lambda x: fill_in(x, CVS(4)), A, ["fill_in", "outside jit"]),
        (written, A, ["write", "outside jit"]),
        (lambda x: x.to_scipy(), A, ["SparseArray.to_scipy", "outside jit"]),
        (lambda x: x[[0, 1]], A, ["SparseArray.rows: nse", "traced"]),
        (lambda x: x.asformat(CVS(4)), A, ["asformat", "outside jit"]),
        (lambda x: A.diagonal(x), N, ["SparseArray.diagonal: k"]),
        (lambda x: A.asformat(CVS(2), max_fill_in=x), N, ["max_fill_in"]),
        (SparseArray.from_dense, B, ["from_dense: x", "with_values inside"]),
        (lambda x: SparseArray.from_dense([[x]]), SHARE, ["from_dense: x"]),
        (lambda x: SparseArray.from_dense(B, nse=x), N, ["from_dense: nse", "how much"]),
        (
            lambda x: SparseArray.from_coordinates([[0, 1]], [1.0], (4, 4), nse=x),
            N,
            ["from_coordinates: nse", "how much"],
        ),
        (lambda x: nn.sparsity_schedule(x, steps=3), SHARE, ["final", "step may be traced"]),
        (lambda x: nn.sparsity_schedule(0.5, steps=x), N, ["sparsity_schedule: steps"]),
        (linear, SHARE, ["SparseLinear: sparsity"]),
        (lambda x: nn.SparseLinear.from_dense(DENSE, x), SHARE, ["sparsity"]),
        (heads, N, ["GraphAttention: heads"]),
        (lambda x: spmm(A, B, transpose=x), N, ["spmm: transpose", "static_argnames"]),
        (lambda x: spmv(A, B[:, 0], transpose=x), N, ["spmv: transpose"]),
        (lambda x: gspmm(A, B, transpose=x), N, ["gspmm: transpose"]),
        (lambda x: einsum("ij,jk->ik", A, B, fibers=x), N, ["einsum: fibers"]),
        (lambda x: sparse_attention(*[HEADS] * 3, A, is_causal=x), N, ["is_causal", "static_arg"]),
        (lambda x: sparse_attention(*[HEADS] * 3, A, return_lse=x), N, ["return_lse"]),
    ],
)
def test_message(call, argument, words):
    with pytest.raises(ValueError) as caught:
        jax.jit(call)(argument)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_under_jit_a_concrete_matrix_stays_concrete(format, tmp_path):
    M = A.asformat(format)
    done = []

    @jax.jit
    def program(x):
        np.testing.assert_array_equal(M.to_scipy().toarray(), M_dense)
        write(tmp_path / "m.npz", M)
        write(tmp_path / "m.tns", M)
        done.append(
            (fill_in(M, CVS(2)), cluster_rows(M, CVS(2)), masks.causal(M, format=CSR).shape)
        )
        assert M.checked() is M
        return x

    M_dense = np.asarray(M.todense())
    program(N)
    np.testing.assert_array_equal(read(tmp_path / "m.npz").todense(), M_dense)
    np.testing.assert_array_equal(read(tmp_path / "m.tns", dtype="float32").todense(), M_dense)
    assert done[0][0] == fill_in(M, CVS(2))
    np.testing.assert_array_equal(done[0][1], cluster_rows(M, CVS(2)))


def test_a_list_with_traced_numbers_is_an_array():
    P = SparseArray.from_arrays(jnp.ones(2), [0, 1, 2], COLUMNS, shape=(2, 3))

    @jax.jit
    def program(x, n):
        made = SparseArray.from_arrays([x, x], [0, 1, n], COLUMNS, shape=(2, 3))
        placed = SparseArray.from_coordinates([[0, 0], [1, 1]], [x, x], (2, 3))
        return made.todense(), P.with_values([x, x]).todense(), placed.todense()

    for out in program(jnp.float32(3), jnp.int32(2)):
        np.testing.assert_array_equal(out, 3 * P.todense())
