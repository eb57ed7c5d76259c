// out[b, p] = scale[b] * weights[b, p] * sum over c of x[b, row of p, c] * y[b, indices[p], c],
// zero from offsets[m] on; rounded once.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

struct SddmmArgs {
  Dtype dtype;
  const int32_t* offsets;  // [m + 1]
  const int32_t* indices;  // [nnz]
  const void* x;           // [batch or 1, m, d]
  const void* y;           // [batch or 1, k, d]
  const void* weights;     // [batch or 1, nnz], or null
  const void* scale;       // [batch or 1] accumulators, or null
  void* out;               // [batch, nnz]
  int64_t m, k, d, nnz;
  // elements from one batch to the next, 0 where shared
  int64_t x_stride, y_stride, weights_stride, scale_stride;
  int64_t prefetch_entries;  // how many entries ahead rows of y are prefetched, 0: not

  // task = batch * chunks + chunk; a chunk is chunk_nonzeros consecutive entries
  int64_t chunk_nonzeros, chunks;
};

namespace SGAP_ISA {
void Sddmm(const SddmmArgs& args, int64_t task);
}

}  // namespace sgap
