// From entries to rows.
#pragma once

#include <cstdint>

#include "simd.h"

namespace sgap::SGAP_ISA {

// The row r with offsets[r] <= p < offsets[r + 1]; needs offsets[0] <= p < offsets[m].
inline int64_t RowOfEntry(const int32_t* offsets, int64_t m, int64_t p) {
  int64_t low = 0, high = m;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (offsets[middle] <= p ? low : high) = middle;
  }
  return low;
}

// ExpandRows may write this many elements past what was asked for.
constexpr int64_t kRowSlack = 16;

// rows[p - begin] = p's row, for p in [begin, end); `row` is begin's. Returns the row of end - 1.
// Stores whole vectors, each row over the excess of the one before: no branch for short rows.
inline int64_t ExpandRows(const int32_t* offsets, int64_t row, int64_t begin, int64_t end,
                          int32_t* rows) {
  int64_t p = begin;
  for (;; ++row) {
    const int64_t stop = offsets[row + 1] < end ? offsets[row + 1] : end;
    const Vector<int32_t, kRowSlack> same = Vector<int32_t, kRowSlack>{} + int32_t(row);
    int32_t* target = rows + (p - begin);
    do {
      __builtin_memcpy(target, &same, sizeof(same));
      target += kRowSlack;
      p += kRowSlack;
    } while (p < stop);
    p = stop;
    if (p >= end) return row;
  }
}

}  // namespace sgap::SGAP_ISA
