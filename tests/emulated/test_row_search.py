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


# Each four lanes search for two rows at once.
FIRST = """#include "row_search.cuh"
extern "C" __global__ void k(const int* rows, const unsigned* first, const unsigned* last,
                             const int* row, unsigned* found) {
  const unsigned own = threadIdx.x / 4 * 2 + blockIdx.x * 16;
  unsigned begin[2] = {first[own], first[own + 1]}, end[2] = {last[own], last[own + 1]};
  const int sought[2] = {row[own], row[own + 1]};
  sgap::FirstByFour(rows, begin, end, sought);
  for (int i = 0; i < 2; ++i) {
    if (begin[i] == end[i]) found[4 * (own + i) + threadIdx.x % 4] = begin[i];
  }
}"""


def searched(launch, rows, first, last, row):
    """What each of the four lanes finds of each search; 2^32 - 1 where its two bounds differ."""
    found = np.full((len(row), 4), 2**32 - 1, np.uint32)
    given = (x.astype(np.uint32) for x in (first, last))
    operands = rows.astype(np.int32), *given, row.astype(np.int32), found
    return launch(FIRST, len(row) // 16, 32, *operands, options=INCLUDE)[4]


def test_four_lanes_find_the_first_entry_of_a_row(launch):
    """Ranges of none to thousands of entries in one warp, rows before, between, behind, and
    repeated."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.integers(0, 900, 3000))
    first = rng.integers(0, 2990, 128)
    last = first + rng.integers(0, [1, 2, 6, 7, 30, 700, 3000, 3000] * 16)
    first[:4], last[:4] = [0, 0, 2999, 3000], [3000, 3000, 3000, 3000]
    last, row = np.minimum(last, 3000), rng.integers(-5, 905, 128)
    row[:2], row[-1] = [2**31 - 1, 0], rows[first[-1]]
    pairs = zip(first, last, row, strict=True)
    expected = [a + np.searchsorted(rows[a:b], at) for a, b, at in pairs]
    found = searched(launch, rows, first, last, row)
    np.testing.assert_array_equal(found, np.repeat(np.array(expected)[:, None], 4, 1))


def test_rows_in_no_order_end_and_stay_within_the_range(launch):
    rng = np.random.default_rng(1)
    rows, first = rng.integers(0, 50, 500), rng.integers(0, 400, 64)
    last = first + rng.integers(0, 100, 64)
    found = searched(launch, rows, first, last, rng.integers(0, 50, 64))
    assert (found >= first[:, None]).all() and (found <= last[:, None]).all()
