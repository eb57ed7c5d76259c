"""The CUDA lowerings of spmm_p and sddmm_p with vectorSparse's own tiles: as text, and emulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from vector_cases import encoded, vectors

from sgap_jax import (
    CSR,
    CVS,
    PaperOctetTile,
    Problem,
    ScheduleError,
    WarpTile,
    choose_schedule,
    sddmm,
    sparse_softmax,
    spmm,
)
from sgap_jax.schedules.emulated import Emulated

TILES = [(WarpTile(4), "bfloat16"), (PaperOctetTile(8), "float16"), (WarpTile(2), "float16")]
tiles = pytest.mark.parametrize(("tile", "dtype"), TILES, ids=str)


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def integers(rng, shape, dtype):
    return jnp.asarray(rng.integers(-2, 3, shape), dtype)  # every sum is exact


def operands(tile, dtype):
    """A with integer values and NaN where it stores no entry; B, X and Y."""
    arrays, entries, _ = encoded(BATTERY["empty_rows_at_both_ends"], tile.vector_length)
    rng = np.random.default_rng(0)
    whole = np.where(np.isnan(arrays[2]), np.nan, rng.integers(-2, 3, arrays[2].shape))
    m, k = entries.shape
    dense = (integers(rng, shape, dtype) for shape in ((2, k, 6), (2, m, 6), (2, k, 6)))
    return vectors((*arrays[:2], whole), entries, dtype), *dense


@tiles
def test_a_launch_gets_the_operands_that_its_kernel_takes(tile, dtype):
    A, B, X, Y = operands(tile, dtype)
    schedule = Emulated(emulate, tile)
    product = jax.vmap(lambda values, B: spmm(A.with_values(values), B, schedule=schedule))
    both = product(jnp.stack([A.values, 2 * A.values]), B)
    shared = jax.vmap(lambda B: spmm(A, B, schedule=schedule))(B)
    sampled = jax.vmap(lambda X, Y: sddmm(A, X, Y, schedule=schedule).values)(X, Y)
    one = jax.vmap(lambda Y: sddmm(A, X[0], Y, schedule=schedule).values)(Y)
    assert both.dtype == sampled.dtype == dtype
    for b in range(2):
        np.testing.assert_array_equal(shared[b], spmm(A, B[b]))
        np.testing.assert_array_equal(both[b], (b + 1) * spmm(A, B[b]))
        np.testing.assert_array_equal(sampled[b], sddmm(A, X[b], Y[b]).values)
        np.testing.assert_array_equal(one[b], sddmm(A, X[0], Y[b]).values)


@pytest.mark.parametrize(("tile", "dtype"), TILES[:2], ids=str)
def test_value_and_gradients_are_those_of_the_cpu(tile, dtype):
    A, B, X, Y = operands(tile, dtype)
    A = A.with_values(jnp.where(jnp.isnan(A.values), 0, A.values))

    def product(values, B, schedule):
        return jnp.sum(spmm(A.with_values(values), B, schedule=schedule) ** 2)

    def sampled(X, Y, schedule):
        return jnp.sum(sddmm(A, X, Y, schedule=schedule).values ** 2)

    for loss, given in ((product, (A.values, B[0])), (sampled, (X[0], Y[0]))):
        run = jax.value_and_grad(loss, (0, 1))
        found, expected = (run(*given, s) for s in (Emulated(emulate, tile), None))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@tiles
def test_programs_for_a_gpu_hold_one_launch(tile, dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A, B, X, Y = operands(tile, dtype)
    product = lambda A, B: spmm(A, B, schedule=tile)
    sampled = lambda A, X, Y: sddmm(A, X, Y, schedule=tile).values
    family = type(tile).__name__.removesuffix("Tile")
    for name, function, given in (
        ("Spmm", product, (A, B[0])),
        ("Sddmm", sampled, (A, X[0], Y[0])),
    ):
        lowered = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("custom_call @sgap_launch_v1") == lowered.count("custom_call") == 1
        assert f"{name}{family}Kernel" in lowered and "scatter" not in lowered
    with pytest.raises(NotImplementedError, match="runs on the platform cuda, not on cpu"):
        spmm(A, B[0], schedule=tile)


def run(function):
    return jax.jit(function).trace().lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("tile", "dtype", "format", "error", "says"),
    [
        (
            WarpTile(8),
            "float32",
            CVS(8),
            NotImplementedError,
            "bfloat16, not on float32",
        ),
        (PaperOctetTile(8), "bfloat16", CVS(8), NotImplementedError, "float16, not on bfloat16"),
        (WarpTile(4), "float16", CVS(8), ScheduleError, r"vectors of 4, got CVS\(8\)"),
        (PaperOctetTile(4), "float16", CSR, NotImplementedError, r"A.asformat\(CVS\(4\)\)"),
        (PaperOctetTile(8, tile_k=16), "float16", CVS(8), ScheduleError, "leave tile_k out"),
        (WarpTile(8, tile_k=32), "float16", CVS(8), ScheduleError, "64 features a step"),
    ],
    ids=str,
)
def test_what_no_kernel_takes_is_refused_by_name(tile, dtype, format, error, says, monkeypatch):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    arrays, entries, _ = encoded(BATTERY["padded"], 8, padding=0)
    A = vectors(arrays, entries, dtype).asformat(format)
    X, Y = (jnp.ones((size, 4), dtype) for size in A.shape)
    with pytest.raises(error, match=says):
        run(lambda: sddmm(A, X, Y, schedule=tile).values)
    if "tile_k" not in says and "step" not in says:
        with pytest.raises(error, match=says):
            run(lambda: spmm(A, Y, schedule=tile))


def test_what_spmm_and_other_operations_do_not_take_is_refused(monkeypatch):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    A, B, X, _ = operands(PaperOctetTile(8), "float16")
    with pytest.raises(ScheduleError, match="only sddmm has inverted products; leave partials out"):
        run(lambda: spmm(A, B[0], schedule=PaperOctetTile(8, partials="shuffle")))
    with pytest.raises(NotImplementedError, match=r"WarpTile.* no kernel of A\^T B"):
        run(lambda: spmm(A, X[0], transpose=True, schedule=WarpTile(8)))
    with pytest.raises(NotImplementedError, match="has kernels of spmm and sddmm"):
        run(lambda: sparse_softmax(A, schedule=WarpTile(8)).values)


def test_they_are_never_a_default():
    for op, V, dtype in (("spmm", 8, "float16"), ("sddmm", 4, "bfloat16"), ("spmm", 2, "float16")):
        problem = Problem(op, (999, 999), 8000, 64, 1, dtype, f"CVS({V})", platform="cuda")
        assert not isinstance(choose_schedule(problem), WarpTile | PaperOctetTile)
