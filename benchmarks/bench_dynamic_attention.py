"""Attention over selected keys: python -m benchmarks.bench_dynamic_attention [--quick] [--only ...]

The core of a layer, without its projections: scores of the selection, the selection itself, and
attention over what is selected; causal, one sequence, 8 heads of 64, float32, forward or forward
and backward. Peers get the mask of our selection ready-made and compute the same result, which is
checked; `torch_causal` sees all keys up to the query, which is what people do without selection.
FlexAttention has no backward pass on the CPU; its block mask is made anew in each call. torch takes
a few heads in turn where their masks as numbers are large; other masked peers whose arrays do not
fit into the memory that is free are left out, and named.

The indexer alone, in float32 and bfloat16, beside the attention that it selects for and a product
of as many multiply-adds. Decoding: one step over a cache, with and without selection.
"""

import argparse
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, machine, timing
from benchmarks.peers.attention import step
from benchmarks.problems import Unavailable
from sgap_jax import sparse_attention
from sgap_jax.nn import selection

HEADS, WIDTH, BLOCK = 8, 64, 64
INDEX_HEADS, INDEX_WIDTH = 4, 32
LENGTHS = (4096, 16384)
TOKENS, BLOCKS = 256, 16
CONTEXT, DECODED = 131_072, 2048
TOGETHER = 5e9  # bytes that a masked peer may have at a time: else it takes a few heads in turn


def operands(L: int, heads: int = HEADS) -> list:
    return [jnp.asarray(harness.dense(1, L, heads, WIDTH, seed=seed)) for seed in range(4)]


def indexer(L: int, rows: int | None = None) -> list:
    shapes = ((1, rows or L, INDEX_HEADS, INDEX_WIDTH), (1, L, INDEX_WIDTH))
    shapes = (*shapes, (1, rows or L, INDEX_HEADS))
    return [jnp.asarray(harness.dense(*shape, seed=9 + i)) for i, shape in enumerate(shapes)]


def blocks_of(query_block: int):
    options = dict(block_size=BLOCK, num_blocks=BLOCKS, query_block=query_block)
    return functools.partial(selection.select_blocks, is_causal=True, lengths=None, **options)


def with_tokens(q, k, v, indexed):
    options = dict(count=TOKENS, is_causal=True, lengths=None)
    return sparse_attention(q, k, v, selection.select_tokens(*indexed, **options))


def with_blocks(q, k, v, _, query_block):
    pattern = blocks_of(query_block)(q, k)
    return sparse_attention(q, k, v, pattern, is_causal=True)


WAYS = {
    "tokens": (with_tokens, f"{TOKENS} tokens"),
    "blocks": (functools.partial(with_blocks, query_block=BLOCK), f"{BLOCKS} blocks of {BLOCK}"),
    "moba": (
        functools.partial(with_blocks, query_block=1),
        f"{BLOCKS} blocks of {BLOCK} for each query",
    ),
}


def selected(kind: str, x: list, indexed: list):
    """The pattern alone, with leading axes [1, 1 or HEADS]."""
    if kind == "tokens":
        options = dict(count=TOKENS, is_causal=True, lengths=None)
        return jax.jit(lambda *x: selection.select_tokens(*x, **options))(*indexed)
    return jax.jit(blocks_of(BLOCK if kind == "blocks" else 1))(*x[:2])


def mask_of(pattern) -> np.ndarray:
    """bool [1, 1 or HEADS, L, L], of entries up to the query."""
    (_, groups), (L, _) = pattern.values.shape[:2], pattern.shape
    height, width = (*pattern.format.block_shape, 1, 1)[:2]
    mask = np.zeros((1, groups, L, L), bool)
    for g in range(groups):
        offsets, columns = (np.asarray(x[0, g]) for x in pattern.index_arrays[1])
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        grid = np.zeros((L // height, L // width), bool)
        grid[rows, columns[: offsets[-1]]] = True
        mask[0, g] = np.tril(grid.repeat(height, 0).repeat(width, 1))
    return mask


def available() -> float:
    """Bytes of memory that are free, by Linux's account."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def fits(count: float) -> None:
    if count > 0.8 * available():
        raise Unavailable(f"needs {count / 1e9:.0f} GB")


def dense(x, pattern, backward):
    """`jax.nn.dot_product_attention` with a mask, compiled for it."""
    attend = lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask)  # noqa: E731
    groups, (L, _) = pattern.values.shape[1], pattern.shape
    mask = jax.ShapeDtypeStruct((1, groups, L, L), jnp.bool_)
    return step(attend, backward).lower(*x, mask).compile()


def temporary_megabytes(compiled) -> float:
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


def with_jax_nn(x, pattern, backward):
    attention = dense(x, pattern, backward)
    fits(1.1e6 * temporary_megabytes(attention))
    mask = jnp.asarray(mask_of(pattern))
    return lambda: jax.block_until_ready(attention(*x, mask))


def with_torch(x, pattern, backward, causal=False):
    import torch

    torch.set_num_threads(machine.threads())
    tensors = [torch.from_numpy(np.array(a)).transpose(1, 2).contiguous() for a in x]
    heads, mask = HEADS, None
    if not causal:
        groups, L = pattern.values.shape[1], pattern.shape[0]
        # The kernel turns a boolean mask into one of numbers; the backward pass has all weights.
        of_head = (4.0 + (12 if backward else 0)) * L * L
        heads = min(max(int(TOGETHER / of_head), 1), HEADS)
        fits(groups * L * L + heads * of_head)
        mask = torch.from_numpy(mask_of(pattern)).expand(1, HEADS, L, L)
    attention = torch.nn.functional.scaled_dot_product_attention

    def part(begin):
        own = slice(begin, begin + heads)
        options = {"is_causal": True}
        if mask is not None:  # one mask for all heads stays one
            options = {"attn_mask": mask[:, own] if groups > 1 else mask[:, :1]}
        *inputs, cotangent = (a[:, own] for a in tensors)
        if not backward:
            with torch.no_grad():
                return (attention(*inputs, **options),)
        leaves = [a.detach().requires_grad_() for a in inputs]
        out = attention(*leaves, **options)
        return out, *torch.autograd.grad(out, leaves, cotangent)

    def call():
        parts = [part(begin) for begin in range(0, HEADS, heads)]
        found = [torch.cat(x, 1) if len(x) > 1 else x[0] for x in zip(*parts, strict=True)]
        return [a.transpose(1, 2).detach().numpy() for a in found]

    return call


def with_flex_attention(x, pattern, backward):
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    if backward:
        raise Unavailable("FlexAttention has no backward pass on the CPU")
    if pattern.format.block_shape != (BLOCK, BLOCK):
        raise Unavailable("a block mask has blocks of queries")
    q, k, v, _ = (torch.from_numpy(np.array(a)).transpose(1, 2).contiguous() for a in x)
    L, count = q.shape[2], q.shape[2] // BLOCK
    counts = np.zeros((1, HEADS, count), np.int32)
    columns = np.zeros((1, HEADS, count, count), np.int32)
    for g in range(HEADS):
        offsets, found = (np.asarray(a[0, g]) for a in pattern.index_arrays[1])
        counts[0, g] = np.diff(offsets)
        for row in range(count):
            columns[0, g, row, : counts[0, g, row]] = found[offsets[row] : offsets[row + 1]]
    counts, columns = torch.from_numpy(counts), torch.from_numpy(columns)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward():
        with torch.no_grad():
            made = BlockMask.from_kv_blocks(
                counts,
                columns,
                BLOCK_SIZE=BLOCK,
                seq_lengths=(L, L),
                mask_mod=lambda b, h, i, j: i >= j,
            )
            return [compiled(q, k, v, block_mask=made).transpose(1, 2).numpy()]

    return forward


PEERS = {
    "jax_nn": with_jax_nn,
    "torch_sdpa": with_torch,
    "flex_attention": with_flex_attention,
    "torch_causal": functools.partial(with_torch, causal=True),
}
OTHER_WORK = ("torch_causal",)


def measured(contenders: dict, rounds: int, about: str) -> dict:
    found = timing.measure(contenders, rounds)
    ours = found.pop("ours").seconds
    row = {"problem": about, "us": 1e6 * ours}
    row |= {f"x_{name}": x.seconds / ours for name, x in found.items()}
    ratios = ", ".join(f"{name} {x.seconds / ours:.2f}" for name, x in found.items())
    print(f"{about}: {1e-3 * row['us']:.1f} ms | {ratios}", flush=True)
    return row


def layer(kind: str, L: int, backward: bool, rounds: int, without=()) -> dict:
    x, indexed = operands(L), indexer(L)
    attention, text = WAYS[kind]
    compiled = step(attention, backward).lower(*x, indexed).compile()
    ours = lambda: jax.block_until_ready(compiled(*x, indexed))  # noqa: E731
    pattern = selected(kind, x, indexed)
    contenders, notes = {"ours": ours}, []
    want = ours() if backward else [ours()]
    select = selected_alone(kind)
    contenders["selection"] = lambda: jax.block_until_ready(select(*x[:2], *indexed))
    contenders["selection"]()
    for name, plan in PEERS.items():
        try:
            if name in without:
                raise Unavailable("left out")
            call = plan(x, pattern, backward)
            for got, expected in zip(call(), want, strict=False) if name not in OTHER_WORK else ():
                apart = np.abs(np.asarray(got) - np.asarray(expected)).max()
                if apart > 1e-4 * np.abs(np.asarray(expected)).max():
                    raise Unavailable(f"differs by {apart:.1e}")
            contenders[name] = call
        except (ImportError, Unavailable, RuntimeError, MemoryError) as reason:
            notes.append(f"{name}: {(str(reason) or type(reason).__name__).splitlines()[0]}")
    passes = "forward and backward" if backward else "forward"
    row = measured(contenders, rounds, f"{text}, L = {L}, {passes}")
    row["temporary_MB"] = temporary_megabytes(compiled)
    row["dense_temporary_MB"] = temporary_megabytes(dense(x, pattern, backward))
    row["notes"] = "; ".join(notes)
    print(
        f"  temporary {row['temporary_MB']:.0f} MB{'; ' if notes else ''}{row['notes']}", flush=True
    )
    return row


def selected_alone(kind: str):
    """Only the selection, from all operands: the index arrays by rows."""

    def of(q, k, *indexed):
        if kind == "tokens":
            found = selection.select_tokens(*indexed, count=TOKENS, is_causal=True, lengths=None)
        else:
            found = blocks_of(BLOCK if kind == "blocks" else 1)(q, k)
        return found.index_arrays[1]

    return jax.jit(of)


def selecting(L: int, rounds: int) -> dict:
    """The selection of tokens by the indexer, float32, beside the same in bfloat16, attention over
    what it selects, and one float32 product of as many multiply-adds as its scores have."""
    *x, _ = operands(L)
    indexed, alone = indexer(L), selected_alone("tokens")
    narrow = [a.astype(jnp.bfloat16) for a in indexed]
    pattern = selected("tokens", x, indexed)
    side = L // 4
    inner = L * L * INDEX_HEADS * INDEX_WIDTH // 2 // side**2  # half of the pairs are causal
    left, right = (jnp.asarray(harness.dense(side, inner, seed=seed)) for seed in (5, 6))
    calls = {
        "ours": (alone, (*x[:2], *indexed)),
        "bfloat16": (alone, (*x[:2], *narrow)),
        "attention": (jax.jit(sparse_attention), (*x, pattern)),
        "equal_product": (jax.jit(lambda a, b: a @ b.T), (left, right)),
    }
    wide, rounded = (
        [np.asarray(a).ravel() for a in calls[name][0](*calls[name][1])]
        for name in ("ours", "bfloat16")
    )
    same = len(np.intersect1d(*(keyed(*a, L) for a in (wide, rounded)))) / int(wide[0][-1])
    if same < 0.9:
        raise RuntimeError(f"bfloat16 selects others: {same:.0%} are the same")
    contenders = {
        name: lambda call=call, given=given: jax.block_until_ready(call(*given))
        for name, (call, given) in calls.items()
    }
    contenders["attention"](), contenders["equal_product"]()
    row = measured(contenders, rounds, f"select {TOKENS} tokens, L = {L}")
    return row | {"notes": f"{same:.1%} of those that bfloat16 selects are the same"}


def keyed(offsets: np.ndarray, columns: np.ndarray, L: int) -> np.ndarray:
    """A number for each stored entry."""
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return rows * L + columns[: offsets[-1]]


def decoding(kind: str, context: int, rounds: int) -> dict:
    """One position at the end of a full cache."""
    query, key, value, _ = operands(context)
    q, k, v = (x[:, -1:] for x in (query, key, value))
    at = np.int32(context - 1)
    caches = lambda *more: tuple(jnp.array(x) for x in (key, value, *more))  # noqa: E731
    if kind == "tokens":
        index_q, index_keys, weights = indexer(context, 1)
        new = (index_q, index_keys[:, -1:], weights)
        cache = caches(index_keys, at)
        own = functools.partial(selection.decode_tokens, "decode", count=DECODED)
    else:
        new, means = (), selection._blocks(key, BLOCK, None)
        cache = caches(means, at)
        blocks = dict(block_size=BLOCK, num_blocks=DECODED // BLOCK)
        own = functools.partial(selection.decode_blocks, "decode", **blocks)

    # A cache is written in place where it is donated; here each call has the one before.
    @functools.partial(jax.jit, donate_argnums=0)
    def ours(cache, q, k, v, *new):
        out, (keys, values, more, _) = own(cache, q, k, v, *new)
        return out, (keys, values, more, jnp.asarray(at))

    @functools.partial(jax.jit, donate_argnums=0)
    def dense(cache, q, k, v):
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, x, at, 1)
            for old, x in zip(cache, (k, v), strict=True)
        )
        return jax.nn.dot_product_attention(q, keys, values), (keys, values)

    state = {"ours": cache, "jax_nn": caches()}

    def call(name, function, *more):
        out, state[name] = function(state[name], q, k, v, *more)
        return jax.block_until_ready(out)

    contenders = {
        "ours": lambda: call("ours", ours, *new),
        "jax_nn": lambda: call("jax_nn", dense),
    }
    try:
        import torch

        torch.set_num_threads(machine.threads())
        tensors = [
            torch.from_numpy(np.array(x)).transpose(1, 2).contiguous() for x in (q, key, value)
        ]
        attention = torch.nn.functional.scaled_dot_product_attention

        def in_torch():
            with torch.no_grad():
                return attention(*tensors)

        contenders["torch_sdpa"] = in_torch
    except ImportError as reason:
        print(f"# torch_sdpa: {reason}")
    for one in contenders.values():
        one()
    what = f"{DECODED} tokens" if kind == "tokens" else f"{DECODED // BLOCK} blocks of {BLOCK}"
    return measured(contenders, rounds, f"decode: {what} of {context}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short length; writes no file")
    parser.add_argument("--only", choices=(*WAYS, "indexer", "decode"), help="one kind")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default {LENGTHS}")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=(), help="peers left out")
    parser.add_argument("--passes", choices=("forward", "both"), help="default: each")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the CSV (default: of the CPU)")
    args = parser.parse_args(argv)
    rows, about_run = [], harness.stamp()
    rounds = 3 if args.quick else timing.ROUNDS
    lengths = args.lengths or ((1024,) if args.quick else LENGTHS)
    for kind in WAYS:
        for L in lengths if args.only in (None, kind) else ():
            for backward in {"forward": (False,), "both": (True,)}.get(args.passes, (False, True)):
                rows.append(
                    {"n": WIDTH, "schedule": ""}
                    | layer(kind, L, backward, rounds, args.without)
                    | about_run
                )
    for L in lengths if args.only in (None, "indexer") else ():
        rows.append({"n": WIDTH, "schedule": ""} | selecting(L, rounds) | about_run)
    for kind in ("tokens", "blocks") if args.only in (None, "decode") else ():
        context = 16_384 if args.quick else CONTEXT
        rows.append({"n": WIDTH, "schedule": ""} | decoding(kind, context, rounds) | about_run)
    if args.out or not args.quick:  # a part replaces the rows that it measured
        whole = not (args.only or args.passes or args.lengths)
        harness.write((args.out or machine.results_dir()) / "dynamic_attention.csv", rows, whole)


if __name__ == "__main__":
    main()
