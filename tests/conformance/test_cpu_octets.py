"""OctetTile as a schedule of the CPU: where it is chosen, what it refuses, what it lowers to."""

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
    sddmm,
    sparse_attention,
    spmm,
)
from sgap_jax.schedules.machine import Machine, on_machine

PROBLEM = Problem("attention", (64, 64), 2000, 64, dtype="bfloat16", format="CVS(8)")
TILE = OctetTile(8, tile_n=32, tile_k=64)


def test_attention_takes_it_where_there_is_a_matrix_unit():
    chosen = lambda **changes: choose_schedule(dataclasses.replace(PROBLEM, **changes))  # noqa: E731
    with on_machine(Machine(matrix_tiles=True)):
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
    with on_machine(Machine(matrix_tiles=False)):
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
def test_what_attention_refuses(tile, changes, error, words):
    with pytest.raises(error, match=words):
        tile.check(dataclasses.replace(PROBLEM, **changes))


def test_wide_values():
    """The width of values is not part of a problem."""
    A = SparseArray.from_dense(np.ones((8, 8), np.float32), format=CVS(8))
    q, v = jnp.ones((8, 1, 64), "bfloat16"), jnp.ones((8, 1, 513), "bfloat16")
    with pytest.raises(NotImplementedError, match="got 513"):
        sparse_attention(q, q, v, A, schedule=TILE)
    with on_machine(Machine(matrix_tiles=True)):
        text = jax.jit(lambda: sparse_attention(q, q, v, A)).lower().as_text()
    assert "sgap_attention_cvs_v1" in text


def test_gradients_follow_the_schedule():
    A = SparseArray.from_dense(np.ones((8, 8), np.float32), format=CVS(8))
    q = jnp.ones((8, 1, 8), "bfloat16")
    loss = lambda q, k, v: sparse_attention(q, k, v, A, schedule=TILE).sum()  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).as_text()
    assert "sgap_attention_octet_v1" in text and "sgap_attention_backward_octet_v1" in text


PRODUCT = Problem("spmm", (2048, 1024), 200_000, 256, dtype="bfloat16", format="CVS(8)")
SAMPLED = dataclasses.replace(PRODUCT, op="sddmm")
SAMPLING = OctetTile(8, tile_n=32, tile_k=64)


def test_products_take_it_where_there_is_a_matrix_unit():
    transposed = dict(shape=(1024, 2048), permuted=True)
    with on_machine(Machine(matrix_tiles=True)):
        for length in (4, 8, 16, 32):
            problem = dataclasses.replace(PRODUCT, format=CVS(length))
            assert choose_schedule(problem) == OctetTile(length, tile_n=512, tile_k=32)
            problem = dataclasses.replace(SAMPLED, format=CVS(length))
            assert choose_schedule(problem) == OctetTile(length, tile_n=32, tile_k=64)
            # Of short vectors, adding up the products takes longer than the products.
            problem = dataclasses.replace(PRODUCT, format=CVS(length), **transposed)
            expected = OctetTile(length, tile_k=32) if length >= 16 else CpuTile()
            assert choose_schedule(problem) == expected
            expected.check(problem)
        for other in (dict(dtype="float32"), dict(n=8), dict(format=CSR), dict(format=CVS(3))):
            assert not isinstance(
                choose_schedule(dataclasses.replace(PRODUCT, **other)), OctetTile
            ), other
    with on_machine(Machine()):
        assert not isinstance(choose_schedule(PRODUCT), OctetTile)
        assert not isinstance(choose_schedule(SAMPLED), OctetTile)


@pytest.mark.parametrize(
    ("tile", "problem", "changes", "error", "words"),
    [
        (OctetTile(8), PRODUCT, dict(dtype="float16"), NotImplementedError, "multiply bfloat16"),
        (OctetTile(8), PRODUCT, dict(format=CSR), NotImplementedError, "convert with A.asformat"),
        (OctetTile(4), PRODUCT, {}, ScheduleError, "is for vectors of 4, got CVS"),
        (OctetTile(8, tile_n=80), PRODUCT, {}, NotImplementedError, "tile_n is a multiple of 64"),
        (OctetTile(8, tile_k=48), PRODUCT, {}, NotImplementedError, "tile_k one of 16, 32"),
        (OctetTile(8, row_warps=2), PRODUCT, {}, ScheduleError, "leave row_warps out"),
        (OctetTile(8, tf32=True), PRODUCT, {}, ScheduleError, "leave tf32 out"),
        (OctetTile(8), SAMPLED, {}, NotImplementedError, "tile_n=32 and tile_k=64"),
        (OctetTile(8), PRODUCT, dict(op="row_sum"), NotImplementedError, "leave the schedule out"),
    ],
)
def test_what_products_refuse(tile, problem, changes, error, words):
    with pytest.raises(error, match=words):
        tile.check(dataclasses.replace(problem, **changes))


def test_what_the_loops_are():
    permuted = dataclasses.replace(PRODUCT, permuted=True)
    assert "A[:, p0:p0+32] @ B[column_indices[p0:p0+32]" in OctetTile(8, tile_k=32).explain(PRODUCT)
    assert "sums[column_indices[p0 + i], j0:j0+64]" in OctetTile(8).explain(permuted)
    assert "Y[column_indices[p0:p0+32], l0:l0+64]" in SAMPLING.explain(SAMPLED)


def test_products_lower_to_its_kernels_and_have_gradients():
    """Against float32: each operand and result is rounded once more."""
    rng = np.random.default_rng(0)
    mask = np.kron(rng.random((6, 40)) < 0.3, np.ones((8, 1)))[:45]
    A = SparseArray.from_dense(jnp.asarray(mask, "float32"), format=CVS(8))
    X, B, w = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((45, 24), (40, 24), 16))

    def loss(values, X, B, schedules):
        product, sampling = schedules
        C = spmm(A.with_values(values), B, schedule=product)
        C = C + spmm(A.with_values(values), X, transpose=True, schedule=product)[:1]
        S = sddmm(A, X, B, schedule=sampling)
        return ((C[:, :16] @ w.astype(C.dtype)) ** 2).mean() + (S.values**2).mean()

    wide = A.values + 0.1, X, B
    narrow = [x.astype("bfloat16") for x in wide]
    tiles = OctetTile(8), SAMPLING
    text = jax.jit(lambda *x: loss(*x, tiles)).lower(*narrow).as_text()
    for kind in ("spmm_octet", "spmm_octet_scatter", "sddmm_octet"):
        assert f"sgap_{kind}_v1" in text
    found = jax.value_and_grad(lambda *x: loss(*x, tiles), (0, 1, 2))(*narrow)
    right = jax.value_and_grad(lambda *x: loss(*x, (CpuTile(), CpuTile())), (0, 1, 2))(*wide)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        size = float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype("float32"), b, rtol=0.05, atol=0.03 * size)
