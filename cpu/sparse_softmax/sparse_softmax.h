// Softmax over the stored entries of each row, and its Jacobian times a tangent. Values are those
// of column vectors, as row_reduce.h has them.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/row_reduce/row_reduce.h"

namespace sgap {

// out = exp(s) / sum over the row of exp(s), s = scale * values; zeros in a row that is all -inf.
struct SparseSoftmaxArgs {
  Dtype dtype;
  const void* values;  // [batch, vectors, V]
  void* out;           // [batch, vectors, V]
  double scale;
  int64_t numbers;  // vectors * V
  RowPhases phases;
};

// out = scale * p * (t - sum over the row of p t).
struct SparseSoftmaxJacobianArgs {
  Dtype dtype;
  const void* probabilities;  // p [batch or 1, vectors, V]
  const void* tangent;        // t [batch or 1, vectors, V]
  void* out;                  // [batch, vectors, V]
  double scale;
  int64_t numbers;                               // vectors * V
  int64_t probabilities_stride, tangent_stride;  // elements from one batch to the next
  RowPhases phases;
};

}  // namespace sgap
