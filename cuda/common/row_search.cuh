// The row of an entry, from the row offsets. Empty rows own no entry, however many there are.
#pragma once

#include "types.cuh"

namespace sgap {

// The row of entry p among rows low to high - 1: row_offsets[low] <= p < row_offsets[high].
__device__ inline Index RowBetween(const Index* row_offsets, unsigned low, unsigned high, Index p) {
  while (high - low > 1) {
    const unsigned middle = low + (high - low) / 2;
    if (row_offsets[middle] <= p) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return Index(low);
}

// RowBetween by all lanes of a warp, which call together with the same arguments: each round leaves
// one of 32 parts, where a lane alone halves.
__device__ inline Index RowByWarp(const Index* row_offsets, unsigned low, unsigned high, Index p) {
  enum { kWarp = 32 };
  const unsigned lane = threadIdx.x % kWarp;
  while (high - low > 1) {
    const unsigned part = (high - low + kWarp - 1) / kWarp, middle = low + lane * part;
    const bool before = lane == 0 || (middle < high && row_offsets[middle] <= p);
    low += (__popc(__ballot_sync(~0u, before)) - 1) * part;
    high = low + part < high ? low + part : high;
  }
  return Index(low);
}

// The row of entry p, known to be `row` or later: steps that double, since the next row is most
// often near but a run of empty rows may be long.
__device__ inline Index RowFrom(const Index* row_offsets, unsigned row, unsigned rows, Index p) {
  unsigned step = 1;
  while (row + step < rows && row_offsets[row + step] <= p) {
    row += step;
    step *= 2;
  }
  return RowBetween(row_offsets, row, row + step < rows ? row + step : rows, p);
}

// The first of entries `first` to last - 1, whose rows ascend, that is in `row` or later; `last`
// where none is.
__device__ inline unsigned FirstFrom(const Index* rows, unsigned first, unsigned last, Index row) {
  while (first < last) {
    const unsigned middle = first + (last - first) / 2;
    if (rows[middle] < row) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

}  // namespace sgap
