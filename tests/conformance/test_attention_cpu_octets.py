"""OctetTile as the schedule of attention on the CPU: where it is chosen, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import (
    CSR,
    CVS,
    CpuTile,
    OctetTile,
    Problem,
    ScheduleError,
    SparseArray,
    choose_schedule,
    sparse_attention,
)
from sgap_jax.schedules.machine import Machine, assuming

PROBLEM = Problem("attention", (64, 64), 2000, 64, dtype="bfloat16", format="CVS(8)")
TILE = OctetTile(8, tile_n=32, tile_k=64)


def test_it_is_chosen_where_there_is_a_matrix_unit():
    chosen = lambda **changes: choose_schedule(dataclasses.replace(PROBLEM, **changes))  # noqa: E731
    with assuming(Machine(matrix_tiles=True)):
        for length in (4, 8, 16, 32):
            tile = chosen(format=CVS(length))
            assert tile == dataclasses.replace(TILE, vector_length=length)
            tile.check(dataclasses.replace(PROBLEM, format=CVS(length)))
        for other in (
            dict(dtype="float32"),
            dict(format=CSR),
            dict(format=CVS(2)),
            dict(format=CVS(20)),
            dict(n=513),
            dict(nnz=400),  # few keys in a row
        ):
            assert chosen(**other) == CpuTile(), other
    with assuming(Machine(matrix_tiles=False)):
        assert chosen() == CpuTile()
    text = TILE.explain(PROBLEM)
    assert "rounded to bfloat16" in text and "column_indices[p:p+512]" in text


@pytest.mark.parametrize(
    ("tile", "changes", "error", "words"),
    [
        (TILE, dict(n=513), NotImplementedError, "up to 512 features on the CPU, got 513; CpuTile"),
        (TILE, dict(dtype="float32"), NotImplementedError, "multiply bfloat16, got float32"),
        (TILE, dict(format=CSR), NotImplementedError, "runs on column vectors"),
        (TILE, dict(format=CVS(4)), ScheduleError, "is for vectors of 8, got CVS"),
        (TILE, dict(platform="cuda"), NotImplementedError, "has kernels of spmm and sddmm"),
        (OctetTile(8), {}, NotImplementedError, "vectors of 4 to 32 rows have tile_n=32 and"),
        (OctetTile(2, 32, 64), dict(format=CVS(2)), NotImplementedError, "of 4 to 32 rows"),
        (dataclasses.replace(TILE, stages=2), {}, ScheduleError, "leave stages out"),
    ],
)
def test_what_it_refuses(tile, changes, error, words):
    with pytest.raises(error, match=words):
        tile.check(dataclasses.replace(PROBLEM, **changes))


def test_wide_values():
    """The width of values is not part of a problem."""
    A = SparseArray.from_dense(np.ones((8, 8), np.float32), format=CVS(8))
    q, v = jnp.ones((8, 1, 64), "bfloat16"), jnp.ones((8, 1, 513), "bfloat16")
    with pytest.raises(NotImplementedError, match="got 513"):
        sparse_attention(q, q, v, A, schedule=TILE)
    with assuming(Machine(matrix_tiles=True)):
        text = jax.jit(lambda: sparse_attention(q, q, v, A)).lower().as_text()
    assert "sgap_attention_cvs_v1" in text


def test_gradients_follow_the_schedule():
    A = SparseArray.from_dense(np.ones((8, 8), np.float32), format=CVS(8))
    q = jnp.ones((8, 1, 8), "bfloat16")
    loss = lambda q, k, v: sparse_attention(q, k, v, A, schedule=TILE).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).as_text()
    assert "sgap_attention_octet_v1" in text and "sgap_attention_backward_octet_v1" in text
