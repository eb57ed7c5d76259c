// Messages along the entries p of row r, and what a row keeps of them. Entry p has the position
// q(p) in the values and the message x[b, indices[p], :] * values[b, q(p)], or the sum of the two.
//
//   extremum: y[b, r, :] is the greatest (least) message, arg[b, r, :] the position of the first
//             entry that attains it; 0 and -1 in a row without entries
//   kPicked:  y[b, r, :] is the sum of the products where picked[b, indices[p], :] is q(p)
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/partition.h"

namespace sgap {

enum class Fold : uint8_t { kMaxProduct, kMinProduct, kMaxSum, kMinSum, kPicked };

struct GspmmArgs : RowTasks {
  Dtype dtype;
  Fold fold;
  const void* values;          // [batch or 1, nnz]
  const int32_t* offsets;      // [m + 1]
  const int32_t* indices;      // [nnz]
  const int32_t* permutation;  // [nnz], or null: q(p) = p
  const void* x;               // [batch or 1, k, n]
  const int32_t* picked;       // [batch or 1, k, n], for kPicked
  void* y;                     // [batch, m, n]
  int32_t* arg;                // [batch, m, n], of an extremum; null where nobody asks
  int64_t m, k, n, nnz;
  int64_t values_stride, x_stride, picked_stride;  // from one batch to the next, 0 where shared

  // task = batch * row_tasks + row task
  // partials: [batch, pieces, n]; remaining: [batch, split_rows]
  int32_t* partial_arg;  // [batch, pieces, n], with arg
};

namespace SGAP_ISA {
void Gspmm(const GspmmArgs& args, int64_t task);
}

}  // namespace sgap
