"""Bugs planted in the kernels of column vectors on CUDA cores are caught by their tests."""

import pytest
from cuda_sources import require_nvrtc
from subwarp_tiles import check_infinity, check_product, check_sampled, check_sampled_factors

from sgap_jax import SubwarpTile


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


SPMM, SDDMM = "spmm_subwarp.cuh", "sddmm_subwarp.cuh"


def halves(transpose):
    """V = 8 in 16 bits, whose rows two subwarps share; lanes share the vectors."""
    check_product("every_length", SubwarpTile(8, split=2), "float16", 16, transpose)


def narrow(transpose):
    """Loads of several columns that n cuts off; lanes that end with some columns of a row."""
    for split in (2, 4):
        tile = SubwarpTile(4, tile_n=32 // split, split=split)
        check_product("every_length", tile, "float32", 11, transpose)
        check_product("every_length", tile, "float32", 9, transpose)


def pairs(transpose):
    check_product("every_length", SubwarpTile(2), "float32", 4, transpose)


def rows_of_x(name):
    check_sampled(name, SubwarpTile(8, tile_n=8, subwarp=4), "float32", 8)


def parts_of_a_vector(name):
    """Vectors of which each lane has two rows."""
    check_sampled(name, SubwarpTile(8, tile_n=8, subwarp=32), "float32", 8)


def features(name):
    check_sampled(name, SubwarpTile(8, tile_k=16, subwarp=4), "float32", 9)


def factors(dtype):
    """V = 8, whose rows two subwarps share in float64."""
    check_sampled_factors(SubwarpTile(8, tile_n=8, subwarp=4), dtype)


@pytest.mark.parametrize(
    ("header", "right", "wrong", "check", "of"),
    [
        # one vector past the end of the row is added
        (
            SPMM,
            "kAll || p + i * kSplit < last ? width : 0",
            "width",
            check_infinity,
            SubwarpTile(2),
        ),
        (SPMM, "(kAtOnce - 1) * kSplit < last", "0 < last", pairs, False),
        (
            SPMM,
            "p + i * kStride < last ? p + i * kStride : last - 1",
            "p + i * kStride",
            halves,
            False,
        ),
        (SPMM, "valid = q + i * kSplit < last", "valid = true", pairs, True),
        (SPMM, "columns[i] = next[i]", "(void)next[i]", pairs, False),
        (SPMM, "unsigned share = lane % kSplit", "unsigned share = 0", halves, False),
        (SPMM, "group.ReduceSpread(sums)", "", halves, True),
        (SPMM, "values_stride + place.part * kRows", "values_stride", halves, False),
        (SPMM, "row >= rows || ", "", narrow, False),
        (SPMM, " || column >= left", "", narrow, True),
        (SPMM, "left - column, own", "left, own", narrow, True),
        # rows of B past the end of the matrix
        (SPMM, "(kWhole || row + piece + v < unsigned(k))", "true", narrow, True),
        (SPMM, "exists ? Widen(scales.at[v]) : 0", "Widen(scales.at[v])", narrow, True),
        (SDDMM, "Rows(own, rows > v ? rows - v : 0)", "(own)", rows_of_x, "every_length"),
        (SDDMM, "rows > v ? rows - v : 0", "rows", parts_of_a_vector, "every_length"),
        (SDDMM, "factors.From(place)", "factors", factors, "float16"),
        (SDDMM, "factors.From(at)", "factors", factors, "float16"),
        (
            SDDMM,
            "all_factors.Of(batch, weights_stride, scale_stride)",
            "all_factors",
            factors,
            "float16",
        ),
        (SDDMM, "if (v + 1 < rows) x_row += d", "x_row += d", rows_of_x, "every_length"),
        (SDDMM, "row < m ? row : m - 1", "row", rows_of_x, "every_length"),
        (SDDMM, "row < m ? rows : 0", "rows", rows_of_x, "every_length"),
        (SDDMM, "if (first / kRows >= left) continue;", "", rows_of_x, "every_length"),
        (SDDMM, "&& block_end < last ? block_end", "&& block_end < last ? last", rows_of_x, "full"),
        (SDDMM, "stored - first < kWindow ? stored :", "", rows_of_x, "padded"),
        (SDDMM, "stored * kLength, vectors", "vectors * kLength, vectors", rows_of_x, "padded"),
        (SDDMM, "kVector ? unsigned(kColumns) : left", "unsigned(kColumns)", features, "full"),
    ],
)
def test_planted_bugs_are_caught(header, right, wrong, check, of, planted):
    arguments = (of, False) if isinstance(of, SubwarpTile) else (of,)
    planted(header, right, wrong, lambda: check(*arguments))
