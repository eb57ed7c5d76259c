// SDDMM: dot products of rows of x and y at the entries p of a pattern, zero from offsets[block
// rows] on, rounded once. Entries of row r, result [batch, entries]:
//   out[b, p] = scale[b] * weights[b, p] * sum over c of x[b, r, c] * y[b, indices[p], c]
// Column vectors of block row i, result [batch, entries, V], zero for rows past the end of x:
//   out[b, p, v] = scale[b] * weights[b, p, v] *
//                  sum over c of x[b, i V + v, c] * y[b, indices[p], c]          v = 0 .. V - 1
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/slabs.h"

namespace sgap {

// Of kernels Sddmm (entries; length = 1), SddmmCvs and SddmmOctet.
struct SddmmArgs {
  Dtype dtype;
  const int32_t* offsets;  // [ceil(m / length) + 1]
  const int32_t* indices;  // [entries]
  const void* x;           // [batch or 1, m, d]
  const void* y;           // [batch or 1, k, d]
  const void* weights;     // [batch or 1, entries, length], or null
  const void* scale;       // [batch or 1] accumulators, or null
  void* out;               // [batch, entries, length]
  int64_t m, k, d, entries, length;
  // elements from one batch to the next, 0 where shared
  int64_t x_stride, y_stride, weights_stride, scale_stride;
  int64_t prefetch_entries;  // how many entries ahead Sddmm prefetches rows of y, 0: not

  // Of Sddmm and SddmmCvs in float16: [k + length, d] accumulators each, for the rows of y and for
  // those of x that a block row has.
  Slabs slabs;

  // Of Sddmm: entries of a chunk whose columns are among so many rows of y are computed together,
  // so that these stay near; 0: all. With a cursor for each row of x.
  int64_t block_rows;
  Slabs cursors;

  // task = batch * chunks + chunk; a chunk is chunk_entries consecutive entries
  int64_t chunk_entries, chunks;
};

}  // namespace sgap
