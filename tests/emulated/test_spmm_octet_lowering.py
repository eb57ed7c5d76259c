"""spmm on column vectors by octet tiles: the primitive's lowering, derivatives, batches, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, cast
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from vector_cases import encoded, vectors

from sgap_jax import (
    CSR,
    CVS,
    OctetTile,
    Problem,
    RowStatistics,
    Schedule,
    ScheduleError,
    choose_schedule,
    sddmm,
    spmm,
)
from sgap_jax.schedules.emulated import Emulated

TILES = [None, OctetTile(8), OctetTile(8, stages=2, row_warps=4, swizzle=True)]


@pytest.fixture(autouse=True)
def compiler():
    require_nvrtc()


def integer_vectors(dtype, length=8, name="every_length"):
    """An array of vectors with small integers, so that every sum of products is exact."""
    arrays, case, _ = encoded(BATTERY[name], length)
    A, rng = vectors(arrays, case, dtype), np.random.default_rng(0)
    return A.with_values(cast(rng.integers(-3, 4, A.values.shape), dtype))


def integers(dtype, *shape):
    return cast(np.random.default_rng(len(shape)).integers(-3, 4, shape), dtype)


def noting(used):
    """An emulation that records the kernels it runs."""

    def run(call, inputs, outputs):
        used.append(call.kernel)
        return emulate(call, inputs, outputs)

    return run


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_launch_gets_the_operands_that_its_kernel_takes(tile, dtype):
    A, used = integer_vectors(dtype), []
    schedule = Emulated(noting(used), tile)
    B = integers(dtype, 3, A.shape[1], 24)
    product = jax.vmap(lambda B: spmm(A, B, schedule=schedule))
    C = product(B)
    assert C.dtype == dtype and set(used) == {"SpmmOctetKernel"}
    for b in range(3):
        np.testing.assert_array_equal(C[b], spmm(A, B[b]))
    values = jnp.stack([A.values, 2 * A.values])
    C = jax.vmap(lambda v: spmm(A.with_values(v), B[0], schedule=schedule))(values)
    np.testing.assert_array_equal(C[1], spmm(A, 2 * B[0]))


def test_long_block_rows_in_pieces_are_two_launches():
    """One structure and several, a batch, and block rows that are all short."""
    A, used = integer_vectors("bfloat16", name="one_heavy_row"), []
    B = integers("bfloat16", 2, A.shape[1], 8)
    tile = Emulated(noting(used), OctetTile(8, chunk=3))
    product = jax.vmap(lambda A, B, s: spmm(A, B, schedule=s), (None, 0, None))
    np.testing.assert_array_equal(product(A, B, tile), product(A, B, None))
    assert used == ["SpmmOctetPiecesKernel", "SumPiecesKernel"]
    both = jax.tree.map(lambda *x: jnp.stack(x), A, A.with_values(2 * A.values))
    each = jax.vmap(lambda A, B, s: spmm(A, B, schedule=s), (0, 0, None))
    np.testing.assert_array_equal(each(both, B, tile), each(both, B, None))
    assert used == 2 * ["SpmmOctetPiecesKernel", "SumPiecesKernel"]
    used.clear()
    spmm(A, B[0], schedule=Emulated(noting(used), OctetTile(8, chunk=10_000)))
    assert used == ["SpmmOctetKernel"]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_derivatives(tile):
    A, used = integer_vectors("bfloat16"), []
    B = integers("bfloat16", A.shape[1], 8)

    def derivatives(schedule):
        # Integers as a cotangent: small sums stay exact in bfloat16.
        weights = integers("bfloat16", A.shape[0], 8, 1)[:, :, 0]
        loss = lambda v, B: jnp.sum(spmm(A.with_values(v), B, schedule=schedule) * weights)
        tangents = jax.jvp(
            lambda v, B: spmm(A.with_values(v), B, schedule=schedule), (A.values, B), (A.values, B)
        )
        return jax.grad(loss, (0, 1))(A.values, B), tangents

    found = derivatives(Emulated(noting(used), tile))
    jax.tree.map(np.testing.assert_array_equal, found, derivatives(None))
    assert used.count("SpmmOctetKernel") >= 4  # one for each gradient, and three for the jvp


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_product_lowers_to_one_launch_and_nothing_is_expanded(tile, monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A, B = integer_vectors("bfloat16"), integers("bfloat16", 33, 16)
    product = jax.jit(lambda A, B: spmm(A, B, schedule=tile))
    text = product.trace(A, B).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @sgap_launch_v1") == 1
    assert "gather" not in text and ("sort" in text) == (tile is not None and tile.swizzle)
    loss = jax.jit(jax.value_and_grad(lambda B: jnp.sum(spmm(A, B, schedule=tile)), 0))
    text = loss.trace(B).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @sgap_launch_v1") == 2


def test_float32_in_tf32_where_it_is_allowed():
    A = integer_vectors("float32", 16)
    B = integers("float32", 33, 12)
    tile = OctetTile(16, tf32=True)
    C = spmm(A, B, schedule=Emulated(emulate, tile))
    np.testing.assert_array_equal(C, spmm(A, B))


PROBLEM = Problem("spmm", (100, 90), 800, 64, 1, "bfloat16", "CVS(8)", "cuda")


@pytest.mark.parametrize(
    ("tile", "changes", "kind", "says"),
    [
        (OctetTile(8), {"platform": "tpu"}, NotImplementedError, "runs on the platform cuda, not"),
        (OctetTile(8), {"dtype": "int32"}, NotImplementedError, "no kernel for dtype int32"),
        (OctetTile(8), {"dtype": "float64"}, NotImplementedError, "have no float64"),
        (OctetTile(8), {"dtype": "float32"}, ScheduleError, r"10 bits of tf32; .* tf32=True"),
        (OctetTile(8), {"format": "CSR"}, NotImplementedError, r"not on CSR; .*CVS\(8\)"),
        (OctetTile(4), {}, ScheduleError, r"for vectors of 4, got CVS\(8\)"),
        (OctetTile(8), {"permuted": True}, NotImplementedError, "those of A.T do not"),
        (
            OctetTile(8),
            {"op": "row_sum"},
            NotImplementedError,
            "row_sum: .* of spmm and sddmm",
        ),
        (OctetTile(8, tile_n=96), {}, ScheduleError, "tile_n must be a multiple of 64"),
        (OctetTile(8, tile_n=512), {}, ScheduleError, "takes some .* registers .* tile_n"),
        (OctetTile(8, row_warps=16, stages=4), {}, ScheduleError, "of which there are 128"),
        (OctetTile(8), {"n": 64 * 65535 + 1}, ScheduleError, "exceeds the 65535 tiles"),
        (OctetTile(8, chunk=1), {"nnz": 2**33}, ScheduleError, "more sums than 2.31"),
        (OctetTile(8, chunk=9), {"op": "sddmm"}, ScheduleError, "chunk are of spmm"),
    ],
)
def test_what_no_kernel_obeys_is_refused(tile, changes, kind, says):
    with pytest.raises(kind, match=says):
        tile.check(dataclasses.replace(PROBLEM, **changes))
    tile = OctetTile(tile.vector_length)
    tile.check(dataclasses.replace(PROBLEM, format=f"CVS({tile.vector_length})"))


def test_shared_memory_is_bounded():
    problem = dataclasses.replace(PROBLEM, format="CVS(32)")
    OctetTile(32, tile_n=128, row_warps=4).check(problem)
    with pytest.raises(ScheduleError, match="65536 bytes of shared memory"):
        OctetTile(32, tile_n=128, row_warps=8).check(problem)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vector_length": 3}, "vector_length must be one of 2, 4, 8, 16, 32, got 3"),
        ({"tile_n": 24}, "tile_n must be a multiple of 16 from 16 to 512, got 24"),
        ({"tile_k": 0}, "tile_k must be a multiple of 16 from 16 to 128, got 0"),
        ({"stages": 5}, "stages must be an int from 1 to 4, got 5"),
        ({"row_warps": True}, "row_warps must be one of 1, 2, 4, 8, 16, got True"),
        ({"swizzle": 1}, "swizzle must be a bool, got 1"),
        ({"tf32": None}, "tf32 must be a bool, got None"),
        ({"chunk": 0}, "chunk must be a positive int or None, got 0"),
        ({"chunk": 8, "swizzle": True}, "with chunk, full pieces start first; leave swizzle out"),
    ],
)
def test_fields_out_of_range_say_so(fields, says):
    with pytest.raises(ScheduleError, match=f"OctetTile: {says}"):
        OctetTile(**fields)


def test_the_operations_say_what_they_take():
    A, B = integer_vectors("bfloat16"), integers("bfloat16", 33, 8)
    with pytest.raises(NotImplementedError, match="no kernel on the CPU obeys OctetTile"):
        spmm(A, B, schedule=OctetTile(8, tile_k=48))
    on_entries = A.asformat(CSR)
    with pytest.raises(NotImplementedError, match="not on CSR"):
        spmm(on_entries, B, schedule=Emulated(emulate, OctetTile(8)))
    with pytest.raises(ScheduleError, match=r"for vectors of 4, got CVS\(8\)"):
        spmm(A, B, schedule=Emulated(emulate, OctetTile(4)))


@pytest.mark.parametrize(
    "tile",
    [*TILES[1:], OctetTile(32, tile_n=128, tile_k=32, stages=3, tf32=True, chunk=256)],
    ids=str,
)
def test_schedules_are_text(tile):
    assert Schedule.parse(str(tile)) == tile
    assert tile.deterministic and tile.transposed() is None and tile.derived() is None


def test_explain_says_who_owns_what():
    tile = choose_schedule(dataclasses.replace(PROBLEM, nnz=100 * 400))
    text = tile.explain(dataclasses.replace(PROBLEM, batch=3))
    assert "13 x 1 blocks" in text and "for each of 3 products" in text
    assert "128 threads: 4 warps, each every 4-th step, for the block row" in text
    assert "16 columns x 8 rows x 16 vectors" in text
    assert "(4 of 8 columns idle)" in OctetTile(4).explain(PROBLEM)
    large = dataclasses.replace(PROBLEM, shape=(40_000, 90), nnz=8 * 40_000)
    large = dataclasses.replace(large, rows=RowStatistics(16.0, 64.0, 4096))
    tile = choose_schedule(large)
    assert str(tile) == "OctetTile(vector_length=8, stages=2, chunk=128)"
    text = tile.explain(large)
    assert "664 x 1 blocks: block rows, or pieces of up to 128 vectors of one," in text
    assert "256 threads: 8 neighbouring block rows, a warp each" in text
    assert "the longest row, of 4096, has 32\n  a second launch adds the sums" in text


def test_the_derivative_in_the_values_is_the_sddmm_of_the_default():
    """A tile given for one operation does not determine the tile of another."""
    A, used = integer_vectors("float16"), []
    X, Y = integers("float16", 34, 8), integers("float16", 33, 8)
    schedule = Emulated(noting(used), OctetTile(8))
    grad = jax.grad(lambda v: jnp.sum(spmm(A.with_values(v), Y, schedule=schedule) * X))(A.values)
    np.testing.assert_array_equal(grad, sddmm(A, X, Y).values)
    assert A.format == CVS(8) and len(used) == 2
