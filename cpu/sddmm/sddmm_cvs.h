// SDDMM at column vectors of V rows: of block row b and each of its vectors p,
//   out[batch, p, v] = scale[batch] * weights[batch, p, v] *
//                      sum over c of x[batch, b V + v, c] * y[batch, indices[p], c]    v = 0 .. V -
//                      1
// rounded once; zero for rows past the end of x, and from offsets[block rows] on.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

struct SddmmCvsArgs {
  Dtype dtype;
  const int32_t* offsets;  // [ceil(m / V) + 1]
  const int32_t* indices;  // [vectors]
  const void* x;           // [batch or 1, m, d]
  const void* y;           // [batch or 1, k, d]
  const void* weights;     // [batch or 1, vectors, V], or null
  const void* scale;       // [batch or 1] accumulators, or null
  void* out;               // [batch, vectors, V]
  int64_t m, k, d, vectors, length;
  // elements from one batch to the next, 0 where shared
  int64_t x_stride, y_stride, weights_stride, scale_stride;

  // task = batch * chunks + chunk; a chunk is chunk_vectors consecutive vectors
  int64_t chunk_vectors, chunks;
};

namespace SGAP_ISA {
void SddmmCvs(const SddmmCvsArgs& args, int64_t task);
}

}  // namespace sgap
