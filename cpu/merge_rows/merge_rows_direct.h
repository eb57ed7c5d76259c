// Union and intersection of two concrete matrices, called by Python without XLA.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/row_pieces.h"
#include "cpu/merge_rows/merge_rows.h"
#include "cpu/spgemm/spgemm_direct.h"

namespace sgap {

enum class Merged : uint8_t { kDone, kNotAscending, kTooMany };

// A + B, A - B (union) or A * B (intersection): values of `dtype` where A has values, else for each
// entry of the result which entry of A and of B it has, -1 for none. kNotAscending where a row of A
// or B does not ascend; kTooMany for 2^31 - 1 entries or more. Throws std::bad_alloc.
Merged DirectMerge(const DirectMatrix& a, const DirectMatrix& b, Merge merge, Dtype dtype,
                   int64_t threads, RowResult& result);

}  // namespace sgap
