"""The SpMM kernel of octet tiles, run by the emulator, against the oracle."""

import dataclasses
import itertools

import numpy as np
import pytest
from battery import BATTERY, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault
from octet_oracle import octet_oracle, octet_product
from spmm_oracle import dense_operand
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax import OctetTile, Problem
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.schedules import tiles

DTYPES = ("bfloat16", "float16", "float32")
LENGTHS = (2, 4, 8, 16, 32)
SETTINGS = list(itertools.product(LENGTHS, DTYPES))
# Some values of each field, and several fields changed at once.
TILES = [
    OctetTile(8),
    OctetTile(8, tile_n=128),
    OctetTile(8, tile_k=32),
    OctetTile(8, stages=2),
    OctetTile(16, stages=3, row_warps=2),
    OctetTile(8, row_warps=4),
    OctetTile(4, row_warps=8, stages=2, swizzle=True),
    OctetTile(16, tile_n=128, tf32=True),
    OctetTile(32, stages=2, row_warps=4),
    OctetTile(2, stages=4, swizzle=True),
    OctetTile(8, stages=2, chunk=5),
    OctetTile(16, tf32=True, row_warps=2, chunk=17),
]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def check(name, tile, dtype, n, padding=3):
    arrays, case, _ = encoded(BATTERY[name], tile.vector_length, padding)
    B = dense_operand(case, n)
    (C,) = octet_product(arrays, case, tile, dtype, B[None])
    assert_within(C, *octet_oracle(case, dtype, B))


@pytest.mark.parametrize("name", BATTERY)
def test_the_battery(name):
    for offset in (0, 7):
        length, dtype = SETTINGS[(list(BATTERY).index(name) + offset) % len(SETTINGS)]
        check(name, OctetTile(length, tf32=True), dtype, 5 + 3 * (offset > 0))


@pytest.mark.tier("test")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_and_dtype(length, dtype):
    tile = OctetTile(length, stages=2 if length < 32 else 1, tf32=True)
    for name, n in (("every_length", 64), ("every_length", 72), ("skewed", 68 + length // 16)):
        check(name, tile, dtype, n)


@pytest.mark.parametrize("n", [0, 1, 4, 7, 8, 63, 65, 130])
def test_any_number_of_columns(n):
    for dtype in ("float16", "float32"):
        check("every_length", OctetTile(8, tf32=True), dtype, n)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_field(tile):
    dtype = "float32" if tile.tf32 else DTYPES[TILES.index(tile) % 2]
    for name, n in (("every_length", 136), ("one_heavy_row", 67), ("padded", 8)):
        check(name, tile, dtype, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_code_for_older_architectures(dtype):
    arrays, case, _ = encoded(BATTERY["every_length"], 8)
    B = dense_operand(case, 16)
    tile = OctetTile(8, tf32=True)
    (C,) = octet_product(arrays, case, tile, dtype, B[None], arch="compute_80")
    assert_within(C, *octet_oracle(case, dtype, B))


@pytest.mark.parametrize("own", ["values", "B", "both"])
@pytest.mark.parametrize("tile", [TILES[0], TILES[4]], ids=str)
def test_batches(tile, own):
    arrays, case, place = encoded(BATTERY["padded"], tile.vector_length)
    rng, batch, stored = np.random.default_rng(0), 5, arrays[2]
    values = rng.standard_normal((batch if own != "B" else 1, *stored.shape))
    values = np.where(np.isnan(stored), np.nan, values)
    B = rng.standard_normal((batch if own != "values" else 1, case.shape[1], 8))
    # A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit.
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    C = octet_product(arrays, case, tile, "bfloat16", B, values=values, change=few)
    for i in range(batch):
        own_values = values[i % len(values)].reshape(-1)[place]
        assert_within(C[i], *octet_oracle(case, "bfloat16", B[i % len(B)], own_values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_entries_not_stored_do_not_touch_nan(length, dtype):
    arrays, case, _ = encoded(from_row_lengths("gaps", 40, [3, 0, 5, 1, 17, 0, 0, 2] * 9), length)
    B = dense_operand(case, 8)
    columns = [3, 30]
    B[columns[0]], B[columns[1]] = np.nan, np.inf
    (C,) = octet_product(arrays, case, OctetTile(length, tf32=True), dtype, B[None])
    touched = (case.dense() != 0)[:, columns].any(axis=1)
    assert touched.any() and not np.isfinite(C[touched].astype(np.float32)).any()
    assert np.isfinite(C[~touched].astype(np.float32)).all()
    assert length > 8 or not touched.all()


def test_what_does_not_exist_is_not_row_0_and_not_what_follows():
    # The single vector of a block row, followed directly by vectors of the next one.
    case = from_row_lengths("last", 9, [1, 0, 0, 0, 3, 0, 0, 0])
    case = dataclasses.replace(case, column_indices=np.array([4, 5, 6, 7], np.int32))
    arrays, case, _ = encoded(case, 4)
    B = dense_operand(case, 8)
    B[[0, 5]] = np.nan
    (C,) = octet_product(arrays, case, OctetTile(4), "float16", B[None])
    assert np.isfinite(C[:4]).all() and np.isnan(C[4:]).all()


def test_vectors_of_a_matrix_without_rows_are_not_read():
    arrays = (np.array([3], np.int32), np.array([1, 2, 0], np.int32), np.ones((3, 8)))
    case = dataclasses.replace(BATTERY["no_rows"], shape=(0, 4))
    B = np.ones((1, 4, 8))
    assert octet_product(arrays, case, OctetTile(8), "float16", B).shape == (1, 0, 8)


@pytest.mark.parametrize("tile", [TILES[3], TILES[5], TILES[8]], ids=str)
def test_blocks_in_other_orders_and_swizzled_give_the_same_bits(tile):
    arrays, case, _ = encoded(BATTERY["one_heavy_row"], tile.vector_length)
    B = dense_operand(case, 72)[None]
    first = octet_product(arrays, case, tile, "bfloat16", B)
    swizzled = dataclasses.replace(tile, swizzle=True)
    blocks = -(-case.shape[0] // tile.vector_length) * 2
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(blocks).tolist()
        again = octet_product(arrays, case, swizzled, "bfloat16", B, order=order)
        np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("tile", [TILES[3], TILES[10]], ids=str)
def test_neighbouring_block_rows_that_share_a_block_give_the_same_bits(tile, monkeypatch):
    """As in large products: a block has 8 block rows or pieces, the last block not all of them."""
    arrays, case, _ = encoded(BATTERY["every_length"], tile.vector_length)
    B = dense_operand(case, 72)[None]
    apart = octet_product(arrays, case, tile, "bfloat16", B)
    monkeypatch.setattr(tiles, "WARPS_UNDER_WAY", 1)
    near = lambda call: (near_blocks.append(call.block[0]), call)[1]
    near_blocks = []
    together = octet_product(arrays, case, tile, "bfloat16", B, change=near)
    assert near_blocks == [256]
    np.testing.assert_array_equal(together, apart)


def test_offsets_in_any_order_end_and_stay_within_bounds():
    m, k, n, count = 52, 5, 8, 90
    problem = Problem("spmm", (m, k), 8 * count, n, 1, "float16", "CVS(8)", "cuda")
    rng, calls = np.random.default_rng(0), []
    for tile in (OctetTile(8, stages=2), OctetTile(8, row_warps=2)):
        calls.append(launch_plan(problem, tile))
    values, B = np.ones((count, 8), np.float16), np.ones((k, n), np.float16)
    columns, nothing = rng.integers(0, k, count).astype(np.int32), np.zeros(0, np.int32)
    for offsets in ([90, 75, 60, 45, 30, 15, 0, 90], *rng.integers(0, count + 1, (6, 8))):
        inputs = (values, np.asarray(offsets, np.int32), columns, nothing, B)
        for call in calls:
            (C,) = emulate(call, inputs, [((1, m, n), np.float16)], step_limit=30_000)
            lengths = np.maximum(np.diff(offsets), 0).repeat(8)[:m]
            np.testing.assert_array_equal(C[0], np.broadcast_to(lengths[:, None], (m, n)))


def test_a_far_row_of_b_is_not_a_near_one():
    """Row 2^30 of 8 columns is 2^33 values away: in 32 bits this would be 0, where there is
    memory."""
    problem = Problem("spmm", (8, 2**30 + 1), 8, 8, 1, "float16", "CVS(8)", "cuda")
    call = launch_plan(problem, OctetTile(8))
    arrays = [np.ones((1, 8), np.float16), np.array([0, 1], np.int32)]
    arrays += [np.array([2**30], np.int32), np.zeros(0, np.int32), np.ones((4, 8), np.float16)]
    with pytest.raises(Fault, match="out of bounds"):
        emulate(call, arrays, [((1, 8, 8), np.float16)])


PLAIN, FLOATS, WARPS = OctetTile(8), OctetTile(8, tf32=True), OctetTile(8, row_warps=4)
PIECES = OctetTile(8, chunk=3)


@pytest.mark.parametrize(
    ("right", "wrong", "tile"),
    [
        # fragments: halves, columns and vectors in the wrong places
        ("PackHigh(x, y)", "PackHigh(y, x)", PLAIN),
        ("PackLow(x, y)", "PackHigh(x, y)", PLAIN),
        ("g / 2 * 4 + g % 2", "g", PLAIN),
        ("r % 2 : r / O::kTiles", "0 : r / O::kTiles", PLAIN),
        ("r / 2 : r % O::kTiles", "0 : r % O::kTiles", OctetTile(16)),
        ("j % 2 * 2 + e", "e * 2 + j % 2", PLAIN),
        (": O::kTiles * g;", ": g;", OctetTile(16, tf32=True)),
        ("2 * s + j][panel]", "s + 2 * j][panel]", FLOATS),
        # vectors that do not exist
        ("if (rows_left > at) ", "", PLAIN),
        ("|| values_left > at;", "|| true;", PLAIN),
        ("idle = row >= kLength ||", "idle = false ||", OctetTile(2)),
        ("&& Size(blockIdx.y + 1) * (kPanels * O::kPanel) <= call.n", "", PLAIN),
        ("wide ? (count + (kWarps - 1)", "wide ? (count + kWarps", PLAIN),
        ("|| row >= m", "", PLAIN),
        ("if (left <= at) continue;", "", PLAIN),
        # steps, stages and warps
        ("columns += kStride", "columns += O::kQuad", WARPS),
        ("rows_left -= kStride", "rows_left -= O::kQuad", OctetTile(8, tile_k=32)),
        ("Find(kStages, step)", "Find(1, step)", OctetTile(8, stages=2)),
        ("at = ahead * kStride +", "at = ahead * O::kQuad +", WARPS),
        ("i + 2 * (kStages - 1) < whole", "i < whole", OctetTile(8, stages=2)),
        ("(s + kStages - 1) % kStages", "s % kStages", OctetTile(8, stages=2)),
        ("if (i + s >= own) break;", "if (i + s + 1 >= own) break;", PLAIN),
        ("first + warp * kStep", "first", WARPS),
        ("(warp + half) % kHalf", "warp % kHalf", WARPS),
        ("if (warp == 0) write", "write", WARPS),
        ("      __syncthreads();\n      if", "      if", WARPS),
        ("order[work]", "work / 2", OctetTile(8, swizzle=True)),
        # pieces
        ("own.first, own.last, [&]", "own.first + 1, own.last, [&]", PIECES),
        ("partial + place * kLength * n", "partial + place * n", PIECES),
        ("work < pieces", "work + 1 < pieces", PIECES),
        ("AllOfRow(own.place, places)", "true", PIECES),
    ],
)
def test_planted_bugs_are_caught(right, wrong, tile, planted):
    def check_both():
        for name, padding, n in (("every_length", 0, 24), ("one_heavy_row", 3, 72)):
            check(name, tile, "float32" if tile.tf32 else "float16", n, padding)

    planted("spmm_octet.cuh", right, wrong, check_both)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kAll || rows_left > q * O::kQuad + j", "true"),
        ("exists ? width : 0", "left > at ? width : 0"),
    ],
)
def test_rows_of_vectors_that_do_not_exist_are_caught(right, wrong, planted):
    check = test_what_does_not_exist_is_not_row_0_and_not_what_follows
    planted("spmm_octet.cuh", right, wrong, check)
