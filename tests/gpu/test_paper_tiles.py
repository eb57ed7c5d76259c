"""vectorSparse's own tiles on the device: against the oracle, and the emulator's bits on integers.

A tensor core sums several products at once and rounds toward zero: the bound allows each addition
four of the accumulator's roundings.
"""

import itertools

import jax
import numpy as np
import pytest
import spmm_oracle
from battery import BATTERY, cast, rounded
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from gpu_session import on_gpu, some
from tolerance import assert_within, sum_bound
from vector_cases import encoded, vectors

from sgap_jax import PaperOctetTile, WarpTile, reference, sddmm, spmm
from sgap_jax.schedules.emulated import Emulated

SPMM = [(WarpTile(V, k), t) for V, k, t in ((8, 16, "float16"), (4, 32, "bfloat16"))]
SPMM += [(PaperOctetTile(V, k), "float16") for V, k in ((8, 32), (4, 12), (2, 64))]
SDDMM = [(WarpTile(8), "bfloat16"), (WarpTile(2), "float16")]
SDDMM += [
    (PaperOctetTile(V, partials=partials), "float16")
    for V, partials in itertools.product((8, 4), ("registers", "shuffle"))
]
WIDTHS = (1, 8, 63, 64, 130)
_ROUNDINGS = 4


@pytest.mark.parametrize(("tile", "dtype"), SPMM, ids=str)
def test_spmm(tile, dtype):
    for name, n in some(itertools.product(BATTERY, WIDTHS)):
        arrays, case, _ = encoded(BATTERY[name], tile.vector_length)
        B = spmm_oracle.dense_operand(case, n)
        C = spmm(vectors(arrays, case, dtype), cast(B, dtype), schedule=on_gpu(tile))
        expected, _ = spmm_oracle.oracle(case, dtype, B)
        values, B = (np.abs(rounded(x, dtype)) for x in (case.values, B))
        structure = (case.row_offsets, case.column_indices, case.shape)
        magnitude = reference.spmm(values, *structure, B)
        terms = np.diff(case.row_offsets)[:, None]
        assert_within(C, expected, sum_bound(expected, magnitude, _ROUNDINGS * terms, dtype))


@pytest.mark.parametrize(("tile", "dtype"), SDDMM, ids=str)
def test_sddmm(tile, dtype):
    for name, d in some(itertools.product(BATTERY, WIDTHS)):
        arrays, case, place = encoded(BATTERY[name], tile.vector_length)
        rng = np.random.default_rng(5)
        X, Y = (rng.standard_normal((size, d)) for size in case.shape)
        A = vectors(arrays, case, dtype)
        values = sddmm(A, cast(X, dtype), cast(Y, dtype), schedule=on_gpu(tile)).values
        X, Y = rounded(X, dtype), rounded(Y, dtype)
        structure = (case.row_offsets, case.column_indices)
        expected, magnitude = (reference.sddmm(*structure, f(X), f(Y)) for f in (np.array, np.abs))
        bound = sum_bound(expected, magnitude, _ROUNDINGS * d, dtype)
        flat = np.asarray(values).reshape(-1)
        assert_within(flat[place], expected, bound)
        assert not np.delete(flat, place).any()


@pytest.mark.parametrize(("tile", "dtype"), [*SPMM, *SDDMM[2:]], ids=str)
def test_bits(tile, dtype):
    require_nvrtc()
    for name, n in some(itertools.product(("every_length", "padded"), (8, 65)), 1):
        arrays, case, _ = encoded(BATTERY[name], tile.vector_length)
        integers = lambda *shape: np.random.default_rng(shape).integers(-2, 3, shape)
        whole = np.where(np.isnan(arrays[2]), np.nan, integers(*arrays[2].shape))
        A = vectors((*arrays[:2], whole), case, dtype)
        X, Y = (cast(integers(size, n), dtype) for size in case.shape)

        def run(schedule, A=A, X=X, Y=Y):
            if (tile, dtype) in SPMM:
                return spmm(A, Y, schedule=schedule)
            return sddmm(A, X, Y, schedule=schedule).values

        with jax.default_device(jax.devices("cpu")[0]):
            expected = np.asarray(run(Emulated(emulate, tile)))
        found = np.asarray(run(on_gpu(tile)))
        np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
