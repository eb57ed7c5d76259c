// Operations on two concrete matrices, called by Python without XLA: nothing is compiled for a new
// size, and the result may have as many entries as it has.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/row_pieces.h"

namespace sgap {

// A matrix in CSR whose arrays may hold anything. Values may be null.
struct DirectMatrix {
  const int32_t *offsets, *indices;
  const void* values;
  int64_t rows, entries, columns;
};

// A B, columns ascending in each row. False where there would be 2^31 - 1 entries or more; throws
// std::bad_alloc.
bool DirectProduct(const DirectMatrix& a, const DirectMatrix& b, Dtype dtype, int64_t threads,
                   RowResult& result);

}  // namespace sgap
