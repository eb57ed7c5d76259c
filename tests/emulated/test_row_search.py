"""The search for the row of an entry by a warp, against np.searchsorted."""

import numpy as np
import pytest
from battery import from_row_lengths
from cuda_sources import INCLUDE

SOURCE = """#include "row_search.cuh"
extern "C" __global__ void k(const int* offsets, unsigned rows, int* found) {
  for (int p = blockIdx.x; p < offsets[rows]; p += gridDim.x) {
    const int row = sgap::RowByWarp(offsets, 0, rows, p);
    if (row == __shfl_sync(~0u, row, 0)) found[32 * p + threadIdx.x] = row;
  }
}"""
LENGTHS = {
    "one row": [7],
    "two rows": [3, 4],
    "33 rows": [1] * 33,
    "empty rows": [0, 0, 5, *[0] * 40, 1, 2, 0, 0],
    "three rounds": [0, 1, 0] * 400,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_entry_has_its_row_in_every_lane(name, launch):
    case = from_row_lengths(name, 7, LENGTHS[name])
    offsets = case.row_offsets
    found = np.full((case.stored, 32), -1, np.int32)
    found = launch(SOURCE, 8, 32, offsets, len(offsets) - 1, found, options=INCLUDE)[1]
    np.testing.assert_array_equal(found, np.repeat(case.rows[:, None], 32, 1))


def test_offsets_in_no_order_end_and_stay_within_bounds(launch):
    rng = np.random.default_rng(0)
    for rows in (1, 2, 40, 1100):
        offsets = rng.integers(0, 20, rows + 1).astype(np.int32)
        found = np.full((20, 32), -1, np.int32)
        found = launch(SOURCE, 8, 32, offsets, rows, found, options=INCLUDE)[1]
        assert found.max() < rows
