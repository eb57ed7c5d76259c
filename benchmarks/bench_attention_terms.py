"""What soft cap, distances, segments and dropout cost: python -m benchmarks.bench_attention_terms

One sequence, 4 heads of 64 features (the column n), 8 x 1 vectors. The column schedule names the
term and says forward, or forward and backward. `without` is the time of the same attention without
the term over that with it, in turns: 0.9 says that the term takes a tenth. Peers compute the same
with the term: our steps, `jax.nn` with a dense bias (ALiBi), torch's FlexAttention with a score_mod
(forward only, as it has no backward pass on the CPU).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine
from benchmarks.peers import attention as peers
from benchmarks.peers import common
from benchmarks.peers.attention import HEADS, WIDTH, operands
from benchmarks.problems import Unavailable
from sgap_jax import Unfused, nn, sparse_attention

CAP = 20.0
SLOPES = nn.alibi_slopes(HEADS)


def terms(L: int) -> dict[str, dict]:
    """The arguments of sparse_attention by the name of a row."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((HEADS, 257)), jnp.float32)
    segments = jnp.asarray(np.arange(L) // (L // 4), jnp.int32)
    found = {
        "softcap": dict(softcap=CAP),
        "alibi": dict(alibi_slopes=jnp.asarray(SLOPES)),
        "table": dict(relative_bias=table),
        "segments": dict(segment_ids=segments),
        "dropout": dict(dropout_rate=0.1, dropout_rng=jax.random.key(0)),
    }
    every = {name: x for options in found.values() for name, x in options.items()}
    return found | {"all five": every}


def with_jax_nn(A, x, backward, name):
    """The bias is dense, and made beforehand: it takes no part in the time."""
    if name != "alibi":
        raise Unavailable(f"jax.nn has no {name}")
    L, mask = A.shape[0], common.dense_of(A)[None, None] != 0
    bias = jnp.asarray(-SLOPES[:, None, None] * abs(np.arange(L)[:, None] - np.arange(L)))[None]
    bias = bias.astype(jnp.float32)
    call = lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask, bias=bias)  # noqa: E731
    return common.ready(peers.step(call, backward), *x, mask)


def with_flex_attention(A, x, backward, name):
    import torch

    def softcap(score, b, h, i, j):
        return CAP * torch.tanh(score / CAP)

    slopes = torch.from_numpy(np.asarray(SLOPES))

    def alibi(score, b, h, i, j):
        return score - slopes[h] * abs(i - j)

    mods = {"softcap": softcap, "alibi": alibi}
    if name not in mods:
        raise Unavailable(f"no score_mod for {name}")
    return peers.with_flex_attention(A, x, backward, score_mod=mods[name])


def with_unfused(A, x, backward, name):
    options = terms(A.shape[0])[name] | dict(schedule=Unfused())
    call = lambda q, k, v, mask: sparse_attention(q, k, v, mask, **options)  # noqa: E731
    return common.ready(peers.step(call, backward), *x, peers.vectors(A))


PEERS = {"jax_nn": with_jax_nn, "flex_attention": with_flex_attention, "unfused": with_unfused}
GOAL = ("jax_nn", "flex_attention")


def cases(A, n: int):
    L, x = A.shape[0], operands(A.shape[0])
    mask = peers.vectors(A)
    for backward in (False, True):
        plain = peers.step(lambda q, k, v, mask: sparse_attention(q, k, v, mask), backward)
        for name, options in terms(L).items():
            attend = lambda q, k, v, mask, options=options: sparse_attention(  # noqa: E731
                q, k, v, mask, **options
            )
            ours = peers.step(attend, backward)
            expected = jax.tree.leaves(with_unfused(A, x, backward, name)())

            def wrong(result, expected=expected) -> float:
                pairs = zip(jax.tree.leaves(result), expected, strict=True)
                return max(
                    float(np.abs(np.asarray(a).reshape(b.shape) - b).max())
                    / (1e-4 * float(np.abs(b).max()))
                    for a, b in pairs
                )

            flops = 2 * (7 if backward else 2) * HEADS * WIDTH * A.nnz
            yield harness.Case(
                n=WIDTH,
                schedule=f"{name}, {'forward and backward' if backward else 'forward'}",
                ours=functools.partial(_ready, ours, x, mask),
                peers={
                    of: functools.partial(plan, A, x, backward, name) for of, plan in PEERS.items()
                },
                wrong=wrong,
                flops=flops,
                moved=4 * HEADS * L * WIDTH * (8 if backward else 4) + 4 * A.nnz // peers.V,
                beside={"without": functools.partial(_ready, plain, x, mask)},
                bound=(flops / (machine.probe().fma_gflops * 1e9), "FMA"),
            )


def _ready(step, x, mask):
    return jax.block_until_ready(step(*x, mask))


def main(argv: list[str] | None = None) -> None:
    args = harness.arguments(__doc__).parse_args(argv)
    args.tag = args.tag or ("attention_quick" if args.quick else "attention")
    harness.run("attention_terms", cases, GOAL, args, tag="attention")


if __name__ == "__main__":
    main()
