"""On integers every sum is exact, so the device and the emulator must agree in every bit."""

import itertools

import jax
import numpy as np
import pytest
from battery import BATTERY, array, cast
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from gpu_session import on_gpu, some
from tolerance import DTYPES
from vector_cases import encoded, vectors

from sgap_jax import (
    OctetTile,
    Problem,
    SubwarpTile,
    gspmm,
    legal_points,
    row_max,
    row_sum,
    sddmm,
    spmm,
)
from sgap_jax.schedules.emulated import Emulated
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.subwarp import LENGTHS

POINTS = list(legal_points(Problem("spmm", (100, 90), 1000, n=128)))
NAMES = ("every_length", "padded", "empty_rows_at_both_ends", "heavy_first_and_last")


def integers(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).integers(-2, 3, shape)


def integer_array(case, dtype):
    """The case with small integers in place of its values, and NaN where its padding has it."""
    values = np.where(np.isnan(case.values), np.nan, integers(case.nnz))
    return array(case, dtype).with_values(cast(values, dtype))


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def same_bits(function, point=None):
    """function(schedule) on the device, and with its launches on the emulator."""
    require_nvrtc()
    with jax.default_device(jax.devices("cpu")[0]):
        expected = function(Emulated(emulate, point))
    np.testing.assert_array_equal(bits(function(on_gpu(point))), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["row", "row_group", "nnz", "nnz_group"])
def test_spmm(family, dtype):
    points = [p for p in POINTS if algorithm(p, "spmm") == family]
    for i, point in enumerate(some(points[DTYPES.index(dtype) :: 4][:6], 1)):
        case, transpose = BATTERY[NAMES[i % 4]], bool(i % 2)
        B = cast(integers(case.shape[0 if transpose else 1], 5 + i % 4), dtype)
        same_bits(
            lambda s, c=case, t=transpose, B=B: spmm(
                integer_array(c, dtype), B, transpose=t, schedule=s
            ),
            point,
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_octet_tiles_of_sddmm(dtype):
    for i, (name, length) in enumerate(some(itertools.product(NAMES, (2, 4, 8, 16, 32)), 1)):
        arrays, case, _ = encoded(BATTERY[name], length)
        tile = OctetTile(length, 16 * (1 + i % 2), 32 * (1 + i % 2), tf32=dtype == "float32")
        A, d = vectors(arrays, case, dtype), 24 + i % 2
        X, Y = (cast(integers(size, d, seed=i), dtype) for size in case.shape)
        factors = dict(weighted=i % 2 == 1, scale=0.5 if i % 3 else None)
        same_bits(lambda s, A=A, X=X, Y=Y, f=factors: sddmm(A, X, Y, schedule=s, **f).values, tile)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("length", [2, 4, 8, 16, 32])
def test_spmm_of_vectors_by_octet_tiles(length, dtype):
    stages, tile_n = (2, 128) if length < 16 else (1, 64)
    tiles = [OctetTile(length, stages=stages, row_warps=2, swizzle=True, tf32=True)]
    tiles += [OctetTile(length, tile_n=tile_n, tf32=True)]
    for i, tile in enumerate(some(tiles, 1)):
        arrays, case, _ = encoded(BATTERY[NAMES[(length // 2 + i) % 4]], length)
        stored = np.where(np.isnan(arrays[2]), np.nan, integers(*arrays[2].shape))
        A = vectors((*arrays[:2], stored), case, dtype)
        B = cast(integers(case.shape[1], 24 + i), dtype)
        same_bits(lambda s, A=A, B=B: spmm(A, B, schedule=s), tile)


@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults(dtype):
    for name, d in some(itertools.product(NAMES, (1, 6)), 1):
        case = BATTERY[name]
        X, Y = (cast(integers(size, d, seed=1), dtype) for size in case.shape)
        same_bits(lambda s, c=case, Y=Y: spmm(integer_array(c, dtype), Y, schedule=s))
        same_bits(
            lambda s, c=case, X=X, Y=Y, w=d > 1: (
                sddmm(integer_array(c, dtype), X, Y, weighted=w, schedule=s).values
            )
        )
        same_bits(
            lambda s, c=case, Y=Y: gspmm(integer_array(c, dtype), Y, reduce="max", schedule=s)
        )
        gradient = jax.grad(
            lambda Y, s, c=case: gspmm(
                integer_array(c, dtype), Y, op="add", reduce="min", schedule=s
            ).sum()
        )
        same_bits(lambda s, Y=Y, gradient=gradient: gradient(Y, s))
    for name in some(NAMES, 1):
        same_bits(lambda s, c=BATTERY[name]: row_sum(integer_array(c, dtype), schedule=s))
        same_bits(lambda s, c=BATTERY[name]: row_max(integer_array(c, dtype), schedule=s))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors(dtype, length):
    tiles = (None, SubwarpTile(length, subwarp=16, split=2, block_size=64))
    for name, n, tile in some(itertools.product(NAMES, (1, 6, 8), tiles), 1):
        arrays, case, _ = encoded(BATTERY[name], length)
        A = vectors(arrays, case, dtype)
        numbers = np.where(np.isnan(arrays[2]), np.nan, integers(*A.values.shape))
        A = A.with_values(cast(numbers, dtype))
        X, Y = (cast(integers(size, n, seed=1), dtype) for size in case.shape)
        same_bits(lambda s, A=A, Y=Y: spmm(A, Y, schedule=s), tile)
        same_bits(lambda s, A=A, X=X: spmm(A, X, transpose=True, schedule=s), tile)
        same_bits(lambda s, A=A, X=X, Y=Y, w=n == 6: sddmm(A, X, Y, weighted=w, schedule=s).values)
