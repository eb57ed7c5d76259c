"""The kernels of column vectors on CUDA cores, run by the emulator, against the oracle."""

import dataclasses
import itertools
import zlib

import numpy as np
import pytest
from battery import BATTERY, from_row_lengths
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from emulator import Fault
from sddmm_oracle import operands
from spmm_oracle import dense_operand, oracle
from subwarp_tiles import (
    check_infinity,
    check_product,
    check_sampled,
    check_sampled_factors,
    problem_of,
    product,
    sampled,
    sampled_is_right,
)
from tolerance import DTYPES, assert_within
from vector_cases import encoded

from sgap_jax import SubwarpTile
from sgap_jax.launch import sddmm as sddmm_cuda
from sgap_jax.launch import spmm as spmm_cuda
from sgap_jax.schedules.subwarp import LENGTHS

# All matrices but those whose long rows take the emulator long.
NAMES = [name for name in BATTERY if name not in ("skewed", "tall", "one_heavy_row")]
COLUMNS = [0, 1, 2, 3, 4, 8, 12, 17, 33]
WIDE = {"float64": 2, "float32": 4, "bfloat16": 8, "float16": 8}  # values in 16 bytes
SHAPES = [  # (subwarp, split, block_size, tile_k)
    (1, 1, 32, None),
    (2, 2, 64, 2),
    (4, 1, 128, None),
    (8, 1, 128, 4),
    (8, 2, 64, 8),
    (8, 8, 128, None),
    (16, 4, 256, 64),
    (32, 1, 32, 1),
    (32, 32, 128, None),
]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def drawn(key, few):
    """Some of the matrices, others for each key."""
    start = zlib.crc32(repr(key).encode())
    return [NAMES[(start + i * 5) % len(NAMES)] for i in range(few)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_and_shape(length, shape, transpose):
    subwarp, split, block, tile_k = shape
    tile = SubwarpTile(length, None, tile_k, subwarp, split, block)
    i = LENGTHS.index(length) + SHAPES.index(shape) * 5 + transpose
    dtype = DTYPES[i % 4]
    # A float64 multiply-add in one rounding takes the emulator long.
    columns = [n for n in COLUMNS if dtype != "float64" or n <= 4]
    for name in drawn((length, shape, transpose), 2):
        check_product(name, tile, dtype, columns[i % len(columns)], transpose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose", [False, True])
def test_every_dtype_and_width_of_a_load(transpose, dtype):
    for columns in (1, 2, 4, 8):
        if columns > WIDE[dtype]:
            continue
        tile = SubwarpTile(4, tile_n=2 * columns, subwarp=4, split=2)
        for n in (columns * 3, columns * 3 + 1):  # vector loads, and single loads
            check_product("every_length", tile, dtype, n, transpose)


@pytest.mark.parametrize("name", BATTERY)
def test_the_battery(name):
    i = list(BATTERY).index(name)
    check_product(name, SubwarpTile(8), "float32", 8, False)
    check_product(name, SubwarpTile(LENGTHS[i % 6], split=2), "float32", 5, True)
    check_sampled(name, SubwarpTile(LENGTHS[i % 6], subwarp=4), "float32", 5)


@pytest.mark.parametrize("shape", [(1, 16), (2, 1), (4, 4), (8, 2), (16, 8), (32, 32)], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_and_shape_of_sddmm(length, shape):
    subwarp, window = shape
    tile = SubwarpTile(length, tile_n=window, subwarp=subwarp, block_size=64)
    i = LENGTHS.index(length) + 7 * subwarp
    d = [0, 1, 3, 4, 8, 16, 35][i % 7]
    for name in drawn((length, shape), 2):
        check_sampled(name, tile, DTYPES[i % 4], min(d, 16 * subwarp))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_width_of_features(dtype):
    for columns in (1, 2, 4, 8):
        if columns > WIDE[dtype]:
            continue
        tile = SubwarpTile(4, tile_k=4 * columns, subwarp=4)
        for d in (columns * 7, columns * 7 + 1):
            check_sampled("padded", tile, dtype, d)


@pytest.mark.parametrize("length", LENGTHS)
def test_weights_and_scale_of_sddmm(length):
    i = LENGTHS.index(length)
    tile = SubwarpTile(length, tile_n=4, subwarp=(2, 8, 32)[i % 3], block_size=64)
    check_sampled_factors(tile, DTYPES[i % 4])


def test_code_for_older_architectures():
    check_product("every_length", SubwarpTile(8), "float16", 8, False, arch="compute_80")
    check_product("every_length", SubwarpTile(8), "float16", 8, True, arch="compute_80")
    check_sampled("every_length", SubwarpTile(8), "float16", 8, arch="compute_80")


def few_blocks(call):
    """A grid with fewer blocks in z than batch members, as for batches beyond the grid's limit."""
    return dataclasses.replace(call, grid=(*call.grid[:2], 2))


@pytest.mark.parametrize("own", ["values", "B", "both"])
@pytest.mark.parametrize("transpose", [False, True])
def test_batches(transpose, own):
    tile, rng, batch = SubwarpTile(4, split=2), np.random.default_rng(0), 3
    (offsets, indices, values), case, place = encoded(BATTERY["padded"], 4)
    several = np.where(
        np.isnan(values), np.nan, rng.standard_normal((batch if own != "B" else 1, *values.shape))
    )
    B = np.stack([dense_operand(case, 4, transpose, i) for i in range(batch)])
    B = B[: batch if own != "values" else 1]
    arrays = (offsets, indices, several)
    C = product(arrays, case, tile, "float32", B, transpose, change=few_blocks)
    for i in range(batch):
        numbers = several[i % len(several)].reshape(-1)[place]
        expected = oracle(case, "float32", B[i % len(B)], transpose, values=numbers)
        assert_within(C[i], *expected)


@pytest.mark.parametrize("own", ["X", "Y", "both"])
def test_batches_of_sddmm(own):
    arrays, case, place = encoded(BATTERY["padded"], 4)
    rng, batch = np.random.default_rng(0), 3
    X = rng.standard_normal((batch if own != "Y" else 1, case.shape[0], 6))
    Y = rng.standard_normal((batch if own != "X" else 1, case.shape[1], 6))
    values = sampled(arrays, case, SubwarpTile(4), "float32", X, Y, change=few_blocks)
    for i in range(batch):
        sampled_is_right(values[i], case, place, "float32", X[i % len(X)], Y[i % len(Y)])


@pytest.mark.parametrize("length", [2, 8])
@pytest.mark.parametrize("n", [4, 5])
def test_rows_that_no_vector_names_do_not_touch_the_result(n, length):
    """NaN in a row of B; for A^T B, in the rows in which only vectors of other rows lie."""
    arrays, case, place = encoded(BATTERY["every_length"], length)
    for transpose in (False, True):
        B = dense_operand(case, n, transpose)
        B[3] = np.nan
        for split in (1, 4):
            C = product(
                arrays, case, SubwarpTile(length, split=split), "float32", B[None], transpose
            )
            entries = case.dense() != 0
            touched = entries[3] if transpose else entries[:, 3]
            assert touched.any() and not touched.all()
            np.testing.assert_array_equal(np.isnan(C[0]), np.repeat(touched[:, None], n, 1))
    X, Y = operands(case, n)
    X[0], Y[3] = np.inf, np.nan
    values = sampled(arrays, case, SubwarpTile(length), "float32", X[None], Y[None])
    touched = ((case.rows == 0) | (case.column_indices == 3)).nonzero()[0]
    found = np.flatnonzero(~np.isfinite(values.reshape(-1)))
    np.testing.assert_array_equal(found, np.sort(place[touched]))


def test_a_last_block_row_that_the_matrix_cuts_off():
    """A vector covers V rows of B; those past the end do not exist, nor do their values."""
    for m, length in itertools.product((1, 5, 9, 13), (2, 4, 8, 16, 32)):
        arrays, case, place = encoded(from_row_lengths("cut", 6, [3] * m), length)
        for transpose in (False, True):
            B = dense_operand(case, 4, transpose)
            C = product(arrays, case, SubwarpTile(length), "float32", B[None], transpose)
            assert_within(C[0], *oracle(case, "float32", B, transpose))
        X, Y = operands(case, 4)
        values = sampled(arrays, case, SubwarpTile(length), "float32", X[None], Y[None])
        sampled_is_right(values[0], case, place, "float32", X, Y)


def test_padding_may_hold_any_index_and_be_more_than_there_are_threads():
    arrays, case, place = encoded(BATTERY["padded"], 4, padding=600)
    offsets, indices, values = arrays
    indices = np.where(np.arange(len(indices)) < offsets[-1], indices, 2**31 - 1).astype(np.int32)
    B, (X, Y) = dense_operand(case, 4), operands(case, 4)
    arrays = (offsets, indices, values)
    C = product(arrays, case, SubwarpTile(4), "float32", B[None])
    assert_within(C[0], *oracle(case, "float32", B))
    found = sampled(arrays, case, SubwarpTile(4), "float32", X[None], Y[None])
    sampled_is_right(found[0], case, place, "float32", X, Y)


@pytest.mark.parametrize("op", ["spmm", "transpose", "sddmm"])
def test_offsets_that_nobody_checked_end_and_stay_within_bounds(op):
    (m, k, length), count, rng = (7, 5, 2), 30, np.random.default_rng(0)
    blocks = k if op == "transpose" else -(-m // length)
    indices = rng.integers(0, -(-m // length) if op == "transpose" else k, count).astype(np.int32)
    values, tile = np.ones((1, count, length), np.float32), SubwarpTile(length, split=1)
    places = rng.permutation(count).astype(np.int32)
    shape = (k, m) if op == "transpose" else (m, k)
    ended = 0
    falling = np.linspace(count, 0, blocks + 1).astype(int)
    up_and_down = np.arange(blocks + 1) % 2 * count
    for offsets in (falling, up_and_down, *rng.integers(0, count + 1, (12, blocks + 1))):
        offsets = np.asarray(offsets, np.int32)
        problem = problem_of("spmm", shape, values, 4, "float32", permuted=op == "transpose")
        if op == "sddmm":
            problem = dataclasses.replace(problem, op="sddmm")
            call = sddmm_cuda.launch_plan(problem, tile)
            X, Y, absent = np.ones((m, 4), "f4"), np.ones((k, 4), "f4"), np.zeros(0, "f4")
            inputs, out = (offsets, indices, X, Y, absent, absent), values
        else:
            call = spmm_cuda.launch_plan(problem, tile)
            inputs = (values, offsets, indices, places, np.ones((shape[1], 4), "f4"))
            out = np.zeros((1, shape[0], 4), np.float32)
        try:
            emulate(call, inputs, [(out.shape, out.dtype)], step_limit=30_000)
            ended += 1
        except Fault as fault:
            # Two windows may both treat a vector as theirs.
            assert str(fault).partition(": ")[2].startswith("race on global memory"), fault
    assert ended > 5


@pytest.mark.parametrize("op", ["spmm", "transpose", "sddmm"])
def test_the_same_bits_in_any_order_of_the_blocks(op):
    arrays, case, _ = encoded(BATTERY["every_length"], 4)

    def bits(seed):
        def order(call):
            run["order"] = np.random.default_rng(seed).permutation(np.prod(call.grid)).tolist()
            assert len(run["order"]) > 2
            return call

        run = {"order": []}
        if op == "sddmm":
            X, Y = operands(case, 8)
            tile = SubwarpTile(4, tile_n=4, subwarp=16, block_size=32)
            sampled(arrays, case, tile, "float32", X[None], Y[None], change=order)
            return sampled(arrays, case, tile, "float32", X[None], Y[None], **run)
        B = dense_operand(case, 8, op == "transpose")[None]
        tile = SubwarpTile(4, subwarp=16, split=4, block_size=32)
        product(arrays, case, tile, "float32", B, op == "transpose", change=order)
        return product(arrays, case, tile, "float32", B, op == "transpose", **run)

    first = bits(0)
    for seed in (1, 2):
        np.testing.assert_array_equal(bits(seed), first)


@pytest.mark.parametrize("op", ["spmm", "transpose", "sddmm"])
def test_a_far_row_is_not_a_near_one(op):
    """Row 2^30 of 8 columns is 2^33 values away: in 32 bits this would be 0, where there is
    memory."""
    far, one = 2**30, np.array([0, 1], np.int32)
    values = np.ones((1, 1, 1), np.float32)
    at, memory = np.array([far], np.int32), np.ones((4, 8), np.float32)
    problem = problem_of("spmm", (1, far + 1), values, 8, "float32", permuted=op == "transpose")
    if op == "sddmm":
        call = sddmm_cuda.launch_plan(dataclasses.replace(problem, op="sddmm"), SubwarpTile(1))
        absent = np.zeros(0, np.float32)
        inputs, out = (one, at, memory, memory, absent, absent), [((1, 1, 1), np.float32)]
    else:
        call = spmm_cuda.launch_plan(problem, SubwarpTile(1))
        inputs, out = (values, one, at, np.zeros(1, np.int32), memory), [((1, 1, 8), np.float32)]
    with pytest.raises(Fault, match="out of bounds"):
        emulate(call, inputs, out)


@pytest.mark.parametrize("transpose", [False, True])
def test_infinity_is_not_multiplied_by_what_does_not_exist(transpose):
    for length, split in itertools.product((1, 2, 4), (1, 4)):
        check_infinity(SubwarpTile(length, split=split), transpose)
