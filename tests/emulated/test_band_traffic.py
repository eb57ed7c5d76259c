"""Bytes that L1s pass on where neighbouring block rows (or keys) of a band share a thread block,
counted by the emulator: at most 0.4 of those of a block for each."""

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from cuda_sources import ptx, require_nvrtc
from emulated_launch import placed, program
from emulator import Traffic, replay

from sgap_jax import AttentionTile, OctetTile, Problem
from sgap_jax.launch import attention, attention_octet
from sgap_jax.launch.attention_shapes import AttentionShapes
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.schedules import tiles

SIZE, WINDOW, DEPTH, V = 768, 128, 64, 8


def l2_bytes(call, given, results, warps=16):
    """Of an H100 with the blocks of so many warps on each multiprocessor at a time."""
    memory, pointers, _ = placed(call, given, results)
    module, traffic = program(ptx(call.source)), Traffic()
    (entry,) = module.entries
    module.run(entry, call.grid, call.block, [*pointers, *call.scalars], memory, traffic=traffic)
    sizes = dict(multiprocessors=132, l1_bytes=200 << 10, l2_bytes=50 << 20)
    passed = replay(traffic, resident=warps * 32 // call.block[0], **sizes)
    return passed.l2_read + passed.l2_written


def launches():
    """(call, operands, results, warps that fit) of products over a band: each block row of 8 has
    the columns of a window around it."""
    first = np.arange(SIZE // V) * V + V // 2 - WINDOW // 2
    rows = [np.arange(max(at, 0), min(at + WINDOW, SIZE)) for at in first]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    columns, half = np.concatenate(rows).astype(np.int32), ml_dtypes.bfloat16
    dense, lse = np.ones((1, SIZE, 1, DEPTH), half), np.zeros((1, SIZE, 1), np.float32)
    none, index = np.zeros((1, 0), np.float32), np.zeros((1, 0), np.int32)
    band = dict(nnz=V * len(columns), n=DEPTH, dtype="bfloat16", format="CVS(8)", platform="cuda")
    asked, product = (Problem(op, (SIZE, SIZE), **band) for op in ("attention", "spmm"))
    shapes, tile = AttentionShapes(1, 1, DEPTH), AttentionTile(16, octet=True)
    out = ((1, SIZE, 1, DEPTH), half)
    yield (
        attention.forward_plan(asked, tile, shapes, 0.125),
        [dense, dense, dense, none, none, index, offsets, columns],
        [out, (lse.shape, np.float32)],
        16,
    )
    yield (
        attention.rows_backward_plan(asked, tile, shapes, 0.125, False),
        [dense, lse, dense, dense, dense, none, index, lse, offsets, columns],
        [out, ((0,), np.float32)],
        16,
    )
    stored = np.arange(len(columns))
    by_keys = sp.csr_matrix((stored + 1, columns, offsets), (SIZE // V, SIZE)).tocsc()
    transposed = [by_keys.indptr, by_keys.indices, (by_keys.data - 1).astype(np.int32)]
    yield (
        attention.keys_backward_plan(asked, tile, shapes, 0.125),
        [dense, lse, dense, dense, dense, none, index, lse, *transposed],
        [out, out],
        8,  # of some 216 registers a lane
    )
    values = np.ones((1, len(columns), V), half)
    yield (
        launch_plan(product, OctetTile(V, stages=2)),
        [values, offsets, columns, index[0], dense[:, :, 0]],
        [((1, SIZE, DEPTH), half)],
        16,
    )


@pytest.mark.tier("all")
def test_neighbouring_block_rows_of_a_band_share_an_l1(monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(attention_octet, "_BLOCK_WARPS", 1)
    apart = [(call.block[0], l2_bytes(call, *of)) for call, *of in launches()]
    for module in (tiles, attention_octet):  # as in problems that fill a GPU
        monkeypatch.setattr(module, "WARPS_UNDER_WAY", 1)
    together = [(call.block[0], l2_bytes(call, *of)) for call, *of in launches()]
    assert [block for block, _ in apart] == [32] * 4
    assert [block for block, _ in together] == [256] * 4
    parts = [more / one for (_, more), (_, one) in zip(together, apart, strict=True)]
    print(*(f"{part:.2f}" for part in parts))
    assert max(parts) <= 0.4, parts
