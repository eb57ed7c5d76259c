"""The kernels of vectorSparse's own tiles, run by the emulator, against the oracle."""

import dataclasses

import numpy as np
import pytest
import sddmm_oracle
import spmm_oracle
from battery import BATTERY, from_row_lengths
from cuda_sources import require_nvrtc
from emulator import Fault
from paper_tiles import assert_sampled, check_sampled_factors, product, sampled
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax import PaperOctetTile, WarpTile

# (tile, dtype)
PRODUCTS = [
    (WarpTile(8), "float16"),
    (WarpTile(4), "bfloat16"),
    (WarpTile(2, tile_k=48), "float16"),
    (PaperOctetTile(8), "float16"),
    (PaperOctetTile(4, tile_k=12), "float16"),
    (PaperOctetTile(2, tile_k=64), "float16"),
]
SAMPLED = [
    (WarpTile(8), "float16"),
    (WarpTile(2), "bfloat16"),
    (WarpTile(4), "float16"),
    (PaperOctetTile(8), "float16"),
    (PaperOctetTile(4), "float16"),
    (PaperOctetTile(8, partials="shuffle"), "float16"),
    (PaperOctetTile(2, partials="shuffle"), "float16"),
]
WIDTHS = [0, 1, 8, 63, 64, 72, 130]
LARGE = ("heavy_first_and_last", "one_heavy_row", "skewed", "tall")


def battery(tiles):
    """Every tile and matrix; large matrices with two tiles, since the emulator takes a second for
    each."""
    cases = [(*tile, name) for tile in tiles for name in BATTERY if name not in LARGE]
    return cases + [(*tile, name) for tile in tiles[::3][:2] for name in LARGE]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def check_product(name, tile, dtype, n, **where):
    arrays, entries, _ = encoded(BATTERY[name], tile.vector_length)
    B = spmm_oracle.dense_operand(entries, n)
    C = product(entries, arrays, tile, dtype, B[None], **where)
    assert_within(C[0], *spmm_oracle.oracle(entries, dtype, B))


def check_sampled(name, tile, dtype, d, **where):
    arrays, entries, place = encoded(BATTERY[name], tile.vector_length)
    X, Y = sddmm_oracle.operands(entries, d)
    values = sampled(entries, arrays, tile, dtype, X[None], Y[None], **where)
    assert_sampled(values[0], entries, place, dtype, X, Y)


@pytest.mark.parametrize(("tile", "dtype", "name"), battery(PRODUCTS), ids=str)
def test_products_of_the_battery(tile, dtype, name):
    check_product(name, tile, dtype, 9 if name in LARGE else 72)


@pytest.mark.parametrize(("tile", "dtype", "name"), battery(SAMPLED), ids=str)
def test_sampled_products_of_the_battery(tile, dtype, name):
    check_sampled(name, tile, dtype, 9 if name in LARGE else 72)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS, ids=str)
def test_every_number_of_columns(tile, dtype, n):
    check_product("padded", tile, dtype, n)


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize(("tile", "dtype"), SAMPLED, ids=str)
def test_every_number_of_features(tile, dtype, d):
    check_sampled("padded", tile, dtype, d)


def test_code_for_older_architectures():
    for tile, dtype in PRODUCTS[::3]:
        check_product("every_length", tile, dtype, 8, arch="compute_80")
    for tile, dtype in SAMPLED[::3]:
        check_sampled("every_length", tile, dtype, 8, arch="compute_80")


# A grid with fewer blocks than batch members, tiles and windows, as if there were too many of them.
def few(call):
    return dataclasses.replace(call, grid=(call.grid[0], 1, 2))


@pytest.mark.parametrize("own", ["values", "B", "both"])
@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS[::3], ids=str)
def test_batches_of_products(tile, dtype, own):
    arrays, entries, place = encoded(BATTERY["padded"], tile.vector_length)
    batch, rng = 3, np.random.default_rng(0)
    values = np.where(np.isnan(arrays[2]), np.nan, rng.standard_normal((batch, *arrays[2].shape)))[
        : batch if own != "B" else 1
    ]
    B = rng.standard_normal((batch if own != "values" else 1, entries.shape[1], 72))
    C = product(entries, arrays, tile, dtype, B, values, change=few)
    for i in range(batch):
        flat = values[i % len(values)].reshape(-1)[place]
        assert_within(C[i], *spmm_oracle.oracle(entries, dtype, B[i % len(B)], values=flat))


@pytest.mark.parametrize("own", ["X", "Y", "both"])
@pytest.mark.parametrize(("tile", "dtype"), SAMPLED[::3], ids=str)
def test_batches_of_sampled_products(tile, dtype, own):
    arrays, entries, place = encoded(BATTERY["full"], tile.vector_length, padding=40)
    batch, rng = 3, np.random.default_rng(0)
    X = rng.standard_normal((batch if own != "Y" else 1, entries.shape[0], 8))
    Y = rng.standard_normal((batch if own != "X" else 1, entries.shape[1], 8))
    values = sampled(entries, arrays, tile, dtype, X, Y, change=few)
    for i in range(batch):
        assert_sampled(values[i], entries, place, dtype, X[i % len(X)], Y[i % len(Y)])


@pytest.mark.parametrize(("tile", "dtype"), SAMPLED, ids=str)
def test_weights_and_scale(tile, dtype):
    check_sampled_factors(tile, dtype)


def test_windows_of_a_long_row_in_one_block():
    arrays, entries, place = encoded(BATTERY["wide"], 2)
    X, Y = sddmm_oracle.operands(entries, 3)
    for tile in (WarpTile(2), PaperOctetTile(2)):
        values = sampled(entries, arrays, tile, "float16", X[None], Y[None], change=few)
        assert_sampled(values[0], entries, place, "float16", X, Y)


@pytest.mark.parametrize("n", [8, 9])
@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS, ids=str)
def test_vectors_not_stored_do_not_touch_nan(tile, dtype, n):
    arrays, entries, _ = encoded(from_row_lengths("few", 90, [1] * 43), tile.vector_length)
    B, bad = spmm_oracle.dense_operand(entries, n), entries.column_indices[[0, -1]]
    B[bad] = [[np.nan], [np.inf]]
    (C,) = product(entries, arrays, tile, dtype, B[None])
    touched = np.zeros(entries.shape[0], bool)
    touched[entries.rows[np.isin(entries.column_indices, bad)]] = True
    assert touched.any() and not touched.all()
    assert np.isfinite(C[~touched].astype(np.float32)).all()
    assert not np.isfinite(C[touched].astype(np.float32)).any()


@pytest.mark.parametrize("d", [8, 9])
@pytest.mark.parametrize(("tile", "dtype"), SAMPLED, ids=str)
def test_rows_not_sampled_do_not_touch_nan(tile, dtype, d):
    arrays, entries, place = encoded(BATTERY["every_length"], tile.vector_length)
    X, Y = sddmm_oracle.operands(entries, d)
    X[20], Y[3] = np.inf, np.nan
    values = sampled(entries, arrays, tile, dtype, X[None], Y[None]).astype(np.float32).reshape(-1)
    touched = (entries.rows == 20) | (entries.column_indices[: entries.stored] == 3)
    assert touched.any() and np.isfinite(values[place][~touched]).all()
    assert not np.isfinite(values[place][touched]).any()
    assert not np.delete(values, place).any()  # those of rows that do not exist too, where Y is NaN


@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS, ids=str)
def test_a_vector_that_does_not_exist_is_not_row_0(tile, dtype):
    case = dataclasses.replace(
        from_row_lengths("last", 9, [0, 3]), column_indices=np.array([4, 6, 7], np.int32)
    )
    arrays, entries, _ = encoded(case, tile.vector_length, padding=0)
    B = spmm_oracle.dense_operand(entries, 4)
    B[0] = np.nan
    assert np.isfinite(product(entries, arrays, tile, dtype, B[None]).astype(np.float32)).all()


@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS[::3], ids=str)
def test_padding_may_hold_any_index(tile, dtype):
    arrays, entries, place = encoded(BATTERY["padded"], tile.vector_length, padding=70)
    arrays[1][arrays[0][-1] :] = 2**31 - 1
    X, Y = sddmm_oracle.operands(entries, 8)
    values = sampled(entries, arrays, tile, dtype, X[None], Y[None])
    assert_sampled(values[0], entries, place, dtype, X, Y)
    B = spmm_oracle.dense_operand(entries, 8)
    C = product(entries, arrays, tile, dtype, B[None])
    assert_within(C[0], *spmm_oracle.oracle(entries, dtype, B))


@pytest.mark.parametrize(("tile", "dtype"), [PRODUCTS[0], PRODUCTS[3]], ids=str)
def test_offsets_that_nobody_checked_stay_within_bounds(tile, dtype):
    # Random offsets in [0, vectors]: no defined result, but the kernel must end.
    arrays, entries, _ = encoded(BATTERY["padded"], 8)
    vectors, rng = len(arrays[1]), np.random.default_rng(0)
    B = spmm_oracle.dense_operand(entries, 8)
    X, Y = sddmm_oracle.operands(entries, 8)
    case = dataclasses.replace(entries, shape=(40, entries.shape[1]))
    X = np.ones((40, 8))
    for offsets in (np.linspace(vectors, 0, 6), *rng.integers(0, vectors + 1, (6, 6))):
        odd = (offsets.astype(np.int32), *arrays[1:])
        product(case, odd, tile, dtype, B[None])
        try:
            sampled(case, odd, tile, dtype, X[None], Y[None])
        except Fault as fault:
            # Two blocks may both treat a vector as theirs, or as padding.
            assert str(fault).partition(": ")[2].startswith("race on global memory"), fault


def test_results_are_rounded_once():
    # 2048 + 1 + 1 in float16: if rounded after each addition it stays 2048.
    ones = dataclasses.replace(from_row_lengths("one", 3, [3] * 8), values=np.ones(24))
    arrays, entries, _ = encoded(ones, 8, padding=0)
    arrays[2][:] = [[2048], [1], [1]]
    B = np.ones((3, 8))
    for tile in (WarpTile(8), PaperOctetTile(8)):
        C = product(entries, arrays, tile, "float16", B[None])
        np.testing.assert_array_equal(C, np.full((1, 8, 8), 2050, np.float16))


@pytest.mark.parametrize(("tile", "dtype"), PRODUCTS[::3], ids=str)
def test_blocks_in_any_order_give_the_same_bits(tile, dtype):
    arrays, entries, _ = encoded(BATTERY["every_length"], 8)
    B = spmm_oracle.dense_operand(entries, 72)[None]
    X, Y = (x[None] for x in sddmm_oracle.operands(entries, 72))
    for operands, run in (((B,), product), ((X, Y), sampled)):
        bits = run(entries, arrays, tile, dtype, *operands).view(np.uint16)
        order = range(2 * -(-34 // 8))[::-1]  # two tiles of columns, two windows of vectors
        found = run(entries, arrays, tile, dtype, *operands, order=order)
        np.testing.assert_array_equal(found.view(np.uint16), bits)
