// Whether index arrays are valid (structure.h), at the speed at which they are read.
#include <cstdint>

namespace sgap::SGAP_ISA {

bool IndicesHold(const int32_t* indices, int64_t count, int64_t size);
bool OffsetsHold(const int32_t* offsets, int64_t rows, int64_t nnz);

// Every index in 0 .. size - 1.
bool IndicesHold(const int32_t* indices, int64_t count, int64_t size) {
  const auto limit = uint32_t(size);
  uint32_t wrong = 0;
  for (int64_t p = 0; p < count; ++p) wrong |= uint32_t(indices[p]) >= limit;
  return wrong == 0;
}

// From 0, never falling, to nnz at most.
bool OffsetsHold(const int32_t* offsets, int64_t rows, int64_t nnz) {
  uint32_t wrong = offsets[0] != 0 || offsets[rows] > nnz;
  for (int64_t r = 0; r < rows; ++r) wrong |= offsets[r + 1] < offsets[r];
  return wrong == 0;
}

}  // namespace sgap::SGAP_ISA
