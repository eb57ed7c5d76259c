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

// Several searches at once: sets first[i] and last[i] to the first entry of first[i] to last[i] - 1
// that is in row[i] or later, given that the rows ascend, or to last[i] where there is none. Four
// lanes side by side have the same arguments, and all lanes of a warp must call together: they look
// at four entries of each range in a round, whose loads are under way at once. The first round
// finds row r where the range has every row from 0 on, or none from r on; each other one divides a
// range by 5.
template <int kMany>
__device__ inline void FirstByFour(const Index* rows, unsigned (&first)[kMany],
                                   unsigned (&last)[kMany], const Index (&row)[kMany]) {
  const unsigned lane = threadIdx.x % 4, others = threadIdx.x % 32 - lane;
  unsigned from[kMany], apart[kMany];  // the first of the four entries, and how far the others are
#pragma unroll
  for (int i = 0; i < kMany; ++i) {
    const unsigned size = first[i] < last[i] ? last[i] - first[i] : 0;
    from[i] = first[i] + (unsigned(row[i]) < size ? unsigned(row[i]) : size);
    from[i] -= from[i] > first[i];
    apart[i] = 1;
  }
  while (true) {
    bool before[kMany], any = false;
#pragma unroll
    for (int i = 0; i < kMany; ++i) any |= first[i] < last[i];
    if (!__any_sync(~0u, any)) return;
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      const unsigned probe = from[i] + lane * apart[i];
      before[i] = probe < last[i] && rows[probe] < row[i];
    }
#pragma unroll
    for (int i = 0; i < kMany; ++i) {
      const unsigned passed = __popc(__ballot_sync(~0u, before[i]) >> others & 15);
      const unsigned end = from[i] + passed * apart[i];
      if (passed < 4 && end < last[i]) last[i] = end;
      if (passed > 0) first[i] = end - apart[i] + 1;
      apart[i] = first[i] < last[i] ? (last[i] - first[i]) / 5 + 1 : 1;
      from[i] = first[i] + apart[i] - 1;
    }
  }
}

}  // namespace sgap
