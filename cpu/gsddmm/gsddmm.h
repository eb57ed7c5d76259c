// Vectors of the entries, one column at a time: entry q at (i, j) gets
//
//   out[b, q, :] = x[b, i, :] op y[b, j, :]
//
// (sddmm sums products over the columns instead.)
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

struct GsddmmArgs {
  Dtype dtype;
  bool add;                // op is +, else *
  const int32_t* offsets;  // [m + 1], valid
  const int32_t* indices;  // [nnz]; an entry whose column is out of range gets zeros
  const void* x;           // [batch or 1, m, n]
  const void* y;           // [batch or 1, k, n]
  void* out;               // [batch, nnz, n]
  int64_t m, k, n, nnz;
  int64_t first;               // entries before this one are in no row: they get zeros
  int64_t x_stride, y_stride;  // from one batch to the next, 0 where shared

  // task = batch * chunks + chunk; a chunk is chunk_size consecutive entries
  int64_t chunk_size, chunks;
};

}  // namespace sgap
