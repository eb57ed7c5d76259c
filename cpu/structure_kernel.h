#pragma once

#include <cstdint>

namespace sgap::SGAP_ISA {
bool IndicesHold(const int32_t* indices, int64_t count, int64_t size);
bool OffsetsHold(const int32_t* offsets, int64_t rows, int64_t nnz);
}  // namespace sgap::SGAP_ISA
