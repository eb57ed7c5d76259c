"""Attention with a fixed mask, forward or forward and backward; q, k, v [1, L, H, D], float32.

Each plan takes (A, operands, backward), with A a SciPy matrix whose stored entries are the mask,
and operands q, k, v and the cotangent. A call returns O, or (O, dQ, dK, dV).
"""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.peers import common
from benchmarks.problems import Unavailable
from sgap_jax import CVS, SparseArray, Unfused, sparse_attention

V = 8  # vector length of the problems
HEADS, WIDTH = 4, 64
BLOCK = 128  # FlexAttention's block size


def operands(L: int) -> list:
    return [jnp.asarray(harness.dense(1, L, HEADS, WIDTH, seed=seed)) for seed in range(4)]


def step(attention, backward: bool):
    """jit of (q, k, v, cotangent, mask) for an attention(q, k, v, mask)."""

    def forward(q, k, v, cotangent, mask):
        return attention(q, k, v, mask)

    def both(q, k, v, cotangent, mask):
        out, pullback = jax.vjp(lambda *x: attention(*x, mask), q, k, v)
        return out, *pullback(cotangent)

    return jax.jit(both if backward else forward)


def block_radius(A) -> int | None:
    """w of a band of BLOCK-blocks |a - b| <= w; None for any other mask."""
    coo, count = A.tocoo(), A.shape[0] // BLOCK
    radius = int(abs(coo.row // BLOCK - coo.col // BLOCK).max(initial=0))
    a = np.arange(count)
    blocks = np.count_nonzero(abs(a[:, None] - a[None]) <= radius)
    return radius if A.shape[0] % BLOCK == 0 and A.nnz == blocks * BLOCK**2 else None


def vectors(A) -> SparseArray:
    return SparseArray.from_scipy(A, format=CVS(V))


def unfused(q, k, v, mask):
    return sparse_attention(q, k, v, mask, schedule=Unfused())


def dot_product(q, k, v, mask, implementation=None):
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)


def with_unfused(A, operands, backward):
    return common.ready(step(unfused, backward), *operands, vectors(A))


def with_jax_nn(A, operands, backward):
    mask = common.dense_of(A)[None, None] != 0
    return common.ready(step(dot_product, backward), *operands, mask)


def _in_torch(A, operands):
    import torch

    tensors = [torch.from_numpy(np.array(x)).transpose(1, 2).contiguous() for x in operands]
    return tensors, torch.from_numpy(A.toarray() != 0)


def with_torch_sdpa(A, operands, backward):
    import torch

    (q, k, v, cotangent), mask = _in_torch(A, operands)
    attention = torch.nn.functional.scaled_dot_product_attention
    back = lambda x: x.transpose(1, 2).detach().numpy()  # noqa: E731

    def forward():
        with torch.no_grad():
            return back(attention(q, k, v, attn_mask=mask))

    def both():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, attn_mask=mask)
        return tuple(map(back, (out, *torch.autograd.grad(out, leaves, cotangent))))

    return both if backward else forward


def with_flex_attention(A, operands, backward, score_mod=None):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if backward:
        raise Unavailable("FlexAttention has no backward pass on the CPU")
    (q, k, v, _), mask = _in_torch(A, operands)
    L, radius = mask.shape[0], block_radius(A)

    def seen(b, h, i, j):
        # Computed where the mask is regular, which saves FlexAttention the load from an array.
        return mask[i, j] if radius is None else abs(i // BLOCK - j // BLOCK) <= radius

    blocks = create_block_mask(seen, None, None, L, L, device="cpu", BLOCK_SIZE=BLOCK)
    torch.compiler.reset()  # else a second length compiles with dynamic shapes
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward():
        with torch.no_grad():
            out = compiled(q, k, v, score_mod=score_mod, block_mask=blocks)
            return out.transpose(1, 2).numpy()

    return forward


PEERS = {
    "jax_nn": with_jax_nn,
    "torch_sdpa": with_torch_sdpa,
    "flex_attention": with_flex_attention,
    "unfused": with_unfused,
}
GOAL = ("jax_nn", "torch_sdpa", "flex_attention")
"""`unfused` is ours."""
