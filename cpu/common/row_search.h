// From entries to rows.
#pragma once

#include <cstdint>

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

}  // namespace sgap::SGAP_ISA
