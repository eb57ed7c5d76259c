"""Bugs planted in the kernels of vectorSparse's own tiles: each is caught."""

import dataclasses

import numpy as np
import pytest
import sddmm_oracle
import spmm_oracle
from battery import BATTERY
from cuda_sources import require_nvrtc
from paper_tiles import assert_sampled, check_sampled_factors, product, sampled
from tolerance import assert_within
from vector_cases import encoded

from sgap_jax import PaperOctetTile, WarpTile


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


WARP, OCTET = WarpTile(4), PaperOctetTile(4, tile_k=12)
REG = PaperOctetTile(4)
SHUFFLE = PaperOctetTile(8, partials="shuffle")
SPMM_BUGS = [
    ("spmm_warp.cuh", "if (first + k < last) {", "if (true) {", WARP),
    ("spmm_warp.cuh", "first + k < last && start < columns", "start < columns", WARP),
    ("spmm_warp.cuh", "valid ? columns - start : 0", "valid ? 8 : 0", WARP),
    ("spmm_warp.cuh", "__syncwarp();\n        tile.Multiply(d);", "tile.Multiply(d);", WARP),
    ("spmm_warp.cuh", "tile.Multiply(d);\n        __syncwarp();", "tile.Multiply(d);", WARP),
    (
        "spmm_warp.cuh",
        "__syncwarp();\n      tile.template StoreRows",
        "tile.template StoreRows",
        WARP,
    ),
    ("spmm_warp.cuh", "k * kRowPitch + half * kHalf", "k * kRowPitch", WARP),
    ("spmm_warp.cuh", "m - first_row < kVectorLength ? m - first_row :", "", WARP),
    ("wmma.cuh", '"col.row.m8n32k16.f32.f32"', '"row.row.m8n32k16.f32.f32"', WARP),
    ("spmm_paper_octet.cuh", "exists ? kVectorLength : 0", "kVectorLength", OCTET),
    ("spmm_paper_octet.cuh", "exists ? left : 0", "left", OCTET),
    ("spmm_paper_octet.cuh", "p + kTileK <= last", "p < last", OCTET),
    ("spmm_paper_octet.cuh", "p + k - lane.t < last", "p + k < last", OCTET),
    ("spmm_paper_octet.cuh", "vectors.words[k] + 2 * half", "vectors.words[k]", PaperOctetTile(8)),
    ("spmm_paper_octet.cuh", "odd ? other : own", "own", PaperOctetTile(8)),
    ("spmm_paper_octet.cuh", "odd ? d[j][i] : d[j][4 + i], 1", "d[j][4 + i], 1", PaperOctetTile(8)),
    ("spmm_paper_octet.cuh", "if (row < rows && left > 0)", "if (left > 0)", OCTET),
    (
        "spmm_paper_octet.cuh",
        "__syncwarp();\n        vectors.LoadFrom",
        "vectors.LoadFrom",
        OCTET,
    ),
    ("mma_m8n8k4.cuh", "m8n8k4.col.row", "m8n8k4.col.col", OCTET),
]
SDDMM_BUGS = [
    ("sddmm_warp.cuh", "row < rows && start < features", "start < features", WARP),
    ("sddmm_warp.cuh", "__shfl_sync(~0u, index, j)", "index", WARP),
    ("sddmm_warp.cuh", "__syncwarp();\n        tile.Multiply(sums);", "tile.Multiply(sums);", WARP),
    ("sddmm_warp.cuh", "tile.Multiply(sums);\n        __syncwarp();", "tile.Multiply(sums);", WARP),
    ("sddmm_warp.cuh", "MultiplyRows(vector, rows)", "Multiply(vector)", WARP),
    ("sddmm_warp.cuh", "if (threadIdx.x < vectors) {", "{", WARP),
    ("sddmm_warp.cuh", "ClearPadding<32>(", "if (false) ClearPadding<32>(", WARP),
    ("sddmm_paper_octet.cuh", "near_start ^ 32", "near_start", REG),
    (
        "sddmm_paper_octet.cuh",
        "threadIdx.x >= 16 ? far.at[i] : near.at[i]",
        "near.at[i]",
        REG,
    ),
    ("sddmm_paper_octet.cuh", "sums[s][1][i ^ 4]", "sums[s][1][i]", PaperOctetTile(8)),
    ("sddmm_paper_octet.cuh", "if constexpr (kShuffle) y_part.ExchangeGroups();", "", SHUFFLE),
    ("sddmm_paper_octet.cuh", "if constexpr (kShuffle) x_part.ExchangeGroups();", "", SHUFFLE),
    ("sddmm_paper_octet.cuh", "upper ? low : high, 8", "upper ? high : low, 8", REG),
    (
        "sddmm_paper_octet.cuh",
        "odd ? pair[0] : pair[1], 4",
        "odd ? pair[1] : pair[0], 4",
        REG,
    ),
    ("sddmm_paper_octet.cuh", "second ? own[i] : own[i + 2], 2", "own[i], 2", REG),
    ("sddmm_paper_octet.cuh", "MultiplyRows(vector, rows)", "Multiply(vector)", REG),
    (
        "mma.cuh",
        "(32 / kInWord * (j % kInWord));\n  }\n  if",
        "(16 - 16 * (j % 2));\n  }\n  if",
        REG,
    ),
    ("sddmm_paper_octet.cuh", "if (place < vectors) {", "{", REG),
    ("mma_m8n8k4.cuh", "m8n8k4.row.col", "m8n8k4.row.row", REG),
]


def without_column_0(case):
    """No vector names row 0 of B or Y, which an absent vector might read by mistake."""
    (m, k), columns = case.shape, case.column_indices + 1
    return dataclasses.replace(case, shape=(m, k + 1), column_indices=columns)


@pytest.mark.parametrize(("header", "right", "wrong", "tile"), SPMM_BUGS)
def test_planted_bugs_of_products_are_caught(header, right, wrong, tile, planted):
    case = without_column_0(BATTERY["every_length"])
    arrays, entries, _ = encoded(case, tile.vector_length)

    def check():
        B = spmm_oracle.dense_operand(entries, 65)
        expected = spmm_oracle.oracle(entries, "float16", B)
        B[0] = np.nan
        assert_within(product(entries, arrays, tile, "float16", B[None])[0], *expected)

    planted(header, right, wrong, check)


@pytest.mark.parametrize(("header", "right", "wrong", "tile"), SDDMM_BUGS)
def test_planted_bugs_of_sampled_products_are_caught(header, right, wrong, tile, planted):
    case = without_column_0(BATTERY["every_length"])
    arrays, entries, place = encoded(case, tile.vector_length)

    def check():
        X, Y = sddmm_oracle.operands(entries, 70)
        Y[0] = np.nan
        values = sampled(entries, arrays, tile, "float16", X[None], Y[None])
        assert_sampled(values[0], entries, place, "float16", X, Y)
        values = sampled(entries, arrays, tile, "float16", X[None], np.nan * Y[None])
        assert not np.delete(values.reshape(-1), place).any()

    planted(header, right, wrong, check)


FACTOR_BUGS = [
    ("sddmm_warp.cuh", "factors.From(at)", "factors", WARP),
    (
        "sddmm_warp.cuh",
        "all_factors.Of(batch, weights_stride, scale_stride)",
        "all_factors",
        WARP,
    ),
    ("sddmm_warp.cuh", "factors.MultiplyRows(vector, rows);", "", WARP),
    ("sddmm_paper_octet.cuh", "factors.From(at)", "factors", REG),
    (
        "sddmm_paper_octet.cuh",
        "all_factors.Of(batch, weights_stride, scale_stride)",
        "all_factors",
        REG,
    ),
]


@pytest.mark.parametrize(("header", "right", "wrong", "tile"), FACTOR_BUGS)
def test_planted_bugs_of_factors_are_caught(header, right, wrong, tile, planted):
    planted(header, right, wrong, lambda: check_sampled_factors(tile, "float16"))
