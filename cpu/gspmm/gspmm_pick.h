// The entries that attained the extrema of gspmm, by their positions in the values (arg), and the
// products there. Entry q is at (i, j) of the matrix; row and source are i and j, or j and i with
// `transposed`.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

struct PickArgs {
  Dtype dtype;
  bool transposed;
  const int32_t* offsets;  // [rows of the matrix + 1], valid
  const int32_t* indices;  // [nnz], columns; an entry whose column is out of range takes no part
  const void* x;           // [batch or 1, sources, n]
  const int32_t* arg;      // [batch or 1, m, n], m rows of the result of gspmm
  int64_t matrix_rows, m, sources, n, nnz;
  int64_t x_stride, arg_stride;  // elements from one batch to the next, 0 where shared

  // task = batch * chunks + chunk; a chunk is chunk_size consecutive rows (GspmmPick), or entries
  int64_t chunk_size, chunks;

  // GspmmPick: y[b, row, :] = values[b, q] * x[b, source, :], q = arg[b, row, :]
  const void* values;  // [batch or 1, nnz]
  int64_t values_stride;
  void* y;  // [batch, m, n]

  // GspmmPickToValues: out[b, q] = sum over l with arg[b, row, l] = q of x[b, source, l] * d[b,
  // row, l]
  const void* d;  // [batch or 1, m, n]
  int64_t d_stride;
  void* out;  // [batch, nnz]
};

namespace SGAP_ISA {
void GspmmPick(const PickArgs& args, int64_t task);
void GspmmPickToValues(const PickArgs& args, int64_t task);
}  // namespace SGAP_ISA

}  // namespace sgap
