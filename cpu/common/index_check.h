// Whether index arrays are valid (structure.h), at the speed at which they are read.
#pragma once

#include <cstdint>

namespace sgap::SGAP_ISA {

// Every index in 0 .. size - 1. Without a sign negative ones are the greatest: one instruction for
// a vector of them.
inline bool IndicesHold(const int32_t* indices, int64_t count, int64_t size) {
  uint32_t greatest = 0;
#pragma GCC unroll 4
  for (int64_t p = 0; p < count; ++p) {
    const auto index = uint32_t(indices[p]);
    greatest = index > greatest ? index : greatest;
  }
  return count == 0 || greatest < uint32_t(size);
}

// From 0, never falling, to nnz at most.
inline bool OffsetsHold(const int32_t* offsets, int64_t rows, int64_t nnz) {
  uint32_t wrong = offsets[0] != 0 || offsets[rows] > nnz;
  for (int64_t r = 0; r < rows; ++r) wrong |= offsets[r + 1] < offsets[r];
  return wrong == 0;
}

}  // namespace sgap::SGAP_ISA
