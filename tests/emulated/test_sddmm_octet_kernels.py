"""The SDDMM kernels of octet tiles, run by the emulator, against the oracle."""

import dataclasses
import itertools

import numpy as np
import pytest
from battery import BATTERY
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault
from octet_oracle import tf32
from sddmm_oracle import check_factors, launched, operands, vector_oracle
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax import OctetTile, Problem
from sgap_jax.launch.sddmm import launch_plan
from sgap_jax.schedules.tiles import sddmm_registers

LENGTHS = (2, 4, 8, 16, 32)
DTYPES = ("float16", "bfloat16", "float32")
# Loads of 16 and of 8 bytes, one and several of them in a step, one and several stages.
TILES = [
    OctetTile(8, tile_n=32, tile_k=64, tf32=True),
    OctetTile(8, tile_n=16, tile_k=16, tf32=True),
    OctetTile(8, tile_n=48, tile_k=32, stages=3, tf32=True),
    OctetTile(8, tile_n=64, tile_k=48, tf32=True),
]
FEATURES = (0, 1, 7, 8, 20, 33, 64, 104)
tiles = pytest.mark.parametrize("tile", TILES, ids=str)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def sampled(arrays, shape, tile, dtype, X, Y, weights=None, scale=None, change=None, **where):
    """values [batch, vectors, V] of the kernel; X [Bx, m, d] and Y [By, k, d] are rounded."""
    dense, shapes = launched(dtype, X, Y, weights, scale)
    offsets, indices, values = arrays
    batch = max(len(x) for x in dense)
    problem = Problem("sddmm", shape, values.size, X.shape[2], batch, dtype)
    format = f"CVS({values.shape[1]})"
    problem = dataclasses.replace(problem, format=format, platform="cuda")
    call = launch_plan(problem, tile, shapes)
    call = call if change is None else change(call)
    outputs = [((batch, *values.shape), dense[0].dtype)]
    (found,) = emulate(call, (offsets, indices, *dense), outputs, **where)
    return found


def check(name, tile, dtype, d, **where):
    arrays, case, place = encoded(BATTERY[name], tile.vector_length)
    X, Y = operands(case, d)
    values = sampled(arrays, case.shape, tile, dtype, X[None], Y[None], **where)
    assert_within(values.reshape(-1), *vector_oracle(case, place, values.size, dtype, X, Y))


def of(tile, length, dtype="float16"):
    """The tile for vectors of a length, made smaller if it takes too many registers."""
    tile = dataclasses.replace(tile, vector_length=length)
    smaller = dataclasses.replace(tile, tile_n=16, stages=min(tile.stages, 2))
    return tile if sddmm_registers(tile, dtype) <= 160 else smaller


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", BATTERY)
def test_the_battery(name):
    for j in range(3):  # three of the lengths; the next matrix has others
        i = 3 * list(BATTERY).index(name) + j
        length, dtype = LENGTHS[i % 5], DTYPES[i // 3 % 3]
        check(name, of(TILES[i % 4], length, dtype), dtype, FEATURES[i % 8])


@pytest.mark.parametrize("dtype", DTYPES)
@tiles
def test_every_length_and_feature_count(tile, dtype):
    # 34 and 5 rows: the last block row is not full. Few features for many vectors of many rows.
    for i, (length, d) in enumerate(itertools.product(LENGTHS, FEATURES)):
        if i % 6 == DTYPES.index(dtype) + 3 * (TILES.index(tile) % 2):
            check("padded" if d > 33 else "every_length", of(tile, length, dtype), dtype, d)


@tiles
def test_features_of_whole_steps(tile):
    check("every_length", of(tile, 16), "bfloat16", 3 * tile.tile_k * tile.stages)


@tiles
def test_code_for_older_architectures(tile):
    check("every_length", of(tile, 16), "bfloat16", 24, arch="compute_80")


@pytest.mark.parametrize("own", ["X", "Y", "both"])
def test_batches(own):
    arrays, case, place = encoded(BATTERY["padded"], 8)
    batch, rng = 5, np.random.default_rng(0)
    X = rng.standard_normal((batch if own != "Y" else 1, case.shape[0], 12))
    Y = rng.standard_normal((batch if own != "X" else 1, case.shape[1], 12))
    # A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit.
    few = lambda call: dataclasses.replace(call, grid=(*call.grid[:2], 2))
    for tile in TILES[:2]:
        values = sampled(arrays, case.shape, tile, "float16", X, Y, change=few)
        for i in range(batch):
            one = values[i].reshape(-1)
            bound = vector_oracle(case, place, one.size, "float16", X[i % len(X)], Y[i % len(Y)])
            assert_within(one, *bound)


def check_vector_factors(length, dtype, tile=TILES[1]):
    arrays, case, place = encoded(BATTERY["every_length"], length)
    X, Y = (tf32(x) if dtype == "float32" else x for x in operands(case, 9))
    run = lambda *operands: sampled(arrays, case.shape, of(tile, length, dtype), dtype, *operands)
    check_factors(case, place, arrays[2], dtype, X, Y, run)


@pytest.mark.parametrize("length", LENGTHS)
def test_weights_and_scale(length):
    i = LENGTHS.index(length)
    check_vector_factors(length, DTYPES[i % 3], TILES[i % 4])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("factors.From(row).Multiply", "factors.Multiply"),
        ("left, factors.From(place), out", "left, factors, out"),
        ("all_factors.Of(batch, weights_stride, scale_stride)", "all_factors"),
    ],
)
def test_planted_bugs_of_factors_are_caught(right, wrong, planted):
    planted("sddmm_octet.cuh", right, wrong, lambda: check_vector_factors(8, "float16"))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("d", [8, 17])
def test_what_is_not_sampled_does_not_touch_nan(d, length):
    # NaN in rows of Y that no vector names, or that only vectors before, after or in other rows
    # name.
    arrays, case, place = encoded(BATTERY["every_length"], length)
    X, Y = operands(case, d)
    X[20], Y[3], Y[5] = np.inf, np.nan, -np.inf
    touched = (case.rows == 20) | np.isin(case.column_indices, (3, 5))
    for tile in TILES:
        values = sampled(arrays, case.shape, of(tile, length), "bfloat16", X[None], Y[None])
        entries = values.astype(np.float64).reshape(-1)
        assert touched.any() and np.isfinite(entries[place[~touched]]).all()
        assert not np.isfinite(entries[place[touched]]).any()
        rest = np.delete(entries, place)  # the padding, and rows past the end
        assert rest.size and (rest == 0).all()


def test_padding_may_hold_any_index():
    (offsets, indices, values), case, place = encoded(BATTERY["padded"], 4, padding=40)
    indices[offsets[-1] :] = 2**31 - 1
    X, Y = operands(case, 9)
    for tile in TILES:
        arrays = offsets, indices, values
        found = sampled(arrays, case.shape, of(tile, 4), "float16", X[None], Y[None])
        assert_within(found.reshape(-1), *vector_oracle(case, place, found.size, "float16", X, Y))


@tiles
def test_offsets_that_nobody_checked_stay_within_bounds(tile):
    # Random offsets in [0, vectors], or a matrix without rows: no defined result, but the kernel
    # must end.
    (_, indices, values), case, _ = encoded(BATTERY["every_length"], 8)
    count, rng = len(indices), np.random.default_rng(0)
    falling = np.linspace(count, 0, 6).astype(int)
    jumping = [0, count, 0, count, 0, count]
    for offsets in (falling, jumping, [count], *rng.integers(0, count + 1, (8, 6))):
        m = 8 * (len(offsets) - 1)
        arrays = np.asarray(offsets, np.int32), indices, values
        X, Y = np.ones((1, m, 8)), np.ones((1, case.shape[1], 8))
        try:
            sampled(arrays, (m, case.shape[1]), tile, "float16", X, Y)
        except Fault as fault:
            # Two warps may both treat a vector as theirs.
            assert str(fault).partition(": ")[2].startswith("race on global memory"), fault


def test_a_far_row_of_y_is_not_a_near_one():
    arrays = np.array([0, 1], np.int32), np.array([2**30], np.int32), np.ones((1, 8))
    X, Y = np.ones((1, 8, 8)), np.ones((1, 4, 8))
    with pytest.raises(Fault, match="out of bounds"):
        sampled(arrays, (8, 4), TILES[0], "float16", X, Y)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_vector_has_the_same_bits_wherever_it_stands(length):
    arrays, case, _ = encoded(BATTERY["full"], length)
    X, Y = operands(case, 40)
    X[:], Y[:] = X[0], Y[0]
    for tile in TILES[:3]:
        values = sampled(arrays, case.shape, of(tile, length), "bfloat16", X[None], Y[None])
        stored = values[0, : arrays[0][-1]].reshape(-1)
        assert set(stored.tolist()) <= {stored[0].item(), 0.0}


@pytest.mark.parametrize(
    ("header", "right", "wrong", "tile", "length", "name"),
    [
        ("sddmm_octet.cuh", "column / 2 * kRows", "column / 2 * 2", 0, 16, "full"),
        ("sddmm_octet.cuh", "2 * j + column % 2", "column % 2", 0, 16, "full"),
        ("sddmm_octet.cuh", "left > from ? left - from : 0", "kFeatures", 0, 8, "full"),
        ("sddmm_octet.cuh", "i * 4 * kFeatures", "i * kFeatures", 0, 8, "full"),
        ("sddmm_octet.cuh", "(s + kStages, steps[s])", "(s + 1, steps[s])", 2, 8, "full"),
        ("sddmm_octet.cuh", "s > 0 && at + s * kStep >= d", "false", 2, 8, "full"),
        ("sddmm_octet.cuh", "Advance(threadIdx.x % 4", "Advance(threadIdx.x % 2", 0, 8, "full"),
        ("sddmm_octet.cuh", "d % kTrip == 0", "d >= kTrip", 1, 8, "full"),
        ("sddmm_octet.cuh", "word + j / 2", "word + j % 2", 0, 8, "full"),
        ("sddmm_octet.cuh", "step.y[i + j % 2]", "step.y[i]", 0, 8, "full"),
        ("sddmm_octet.cuh", "2 * half + r % 2", "half + 2 * (r % 2)", 0, 8, "full"),
        ("sddmm_octet.cuh", "row + r < rows ? own", "true ? own", 0, 8, "full"),
        ("sddmm_octet.cuh", "if (row >= kLength) return;", "", 0, 4, "full"),
        ("sddmm_octet.cuh", "kParts == 1 || place / kWarp == i", "true", 3, 8, "full"),
        ("sddmm_octet.cuh", "next > p && next < last ? next : last", "last", 0, 8, "full"),
        ("sddmm_octet.cuh", "end < stored ? end : stored", "end", 0, 8, "padded"),
        ("sddmm_octet.cuh", "first < stored ? stored : first", "end", 0, 8, "padded"),
        ("sddmm_octet.cuh", "if (p <= at && at < stop)", "if (at < stop)", 0, 8, "full"),
        ("sddmm_octet.cuh", "if (p <= at && at < stop)", "if (p <= at)", 0, 8, "full"),
        ("row_search.cuh", "- 1) * part", ") * part", 0, 8, "tall"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, tile, length, name, planted):
    planted(header, right, wrong, lambda: check(name, of(TILES[tile], length), "float16", 104))


@pytest.mark.parametrize(
    ("right", "wrong", "d"),
    [
        ("kAll ? unsigned(kFeatures) : some", "kAll ? 0 : some", 96),
        ("(kAll ? kTrip : ", "(kAll ? 0 : ", 96),
        ("Advance(kTrip)", "Advance(kStep)", 96),
        ("d % kTrip == 0", "d % kStep == 0", 48),
    ],
)
def test_planted_bugs_of_whole_steps_are_caught(right, wrong, d, planted):
    tile = OctetTile(8, tile_n=16, tile_k=16, stages=2)
    planted("sddmm_octet.cuh", right, wrong, lambda: check("every_length", tile, "float16", d))
