// Searches for the row of an entry, given the row offsets. Any number of empty rows is allowed.
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

// RowBetween by all lanes of a warp, which must call together with the same arguments: each round
// divides the range by 32, not by 2.
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

// The row of entry p, known to be `row` or later, by steps that double: the next row is most often
// near, but many empty rows may lie between.
__device__ inline Index RowFrom(const Index* row_offsets, unsigned row, unsigned rows, Index p) {
  unsigned step = 1;
  while (row + step < rows && row_offsets[row + step] <= p) {
    row += step;
    step *= 2;
  }
  return RowBetween(row_offsets, row, row + step < rows ? row + step : rows, p);
}

// The first entry of `first` to last - 1 that is in `row` or later, given that the rows ascend;
// `last` where there is none.
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
