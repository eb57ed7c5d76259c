// SpMM, of entries and of column vectors of V rows, and its kernels' arguments.
//
// Entries, values [batch, entries]:
//   y[b, r, :] = sum over the entries p of row r of values[b, q(p)] * x[b, indices[p], :]
// Column vectors, values [batch, entries, V]: for block row b and each of its vectors p,
//   y[batch, b V + v, :] += values[batch, p, v] * x[batch, indices[p], :]       v = 0 .. V - 1
// and the product with the transpose, whose row j has vectors of V columns:
//   y[batch, j, :] += sum over v of values[batch, q(p), v] * x[batch, indices[p] V + v, :]
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/spmm/column_tiles.h"

namespace sgap {

// Of kernels Spmm (entries; length = 1), SpmmCvs, and SpmmOctet (vectors of 2, 4, 8, 16 or 32
// bfloat16, not transposed).
struct SpmmArgs : ColumnTiles {
  Dtype dtype;
  const void* values;          // [batch or 1, entries, length]
  const int32_t* offsets;      // [block rows + 1], of the transpose of vectors [m + 1]
  const int32_t* indices;      // [entries]
  const int32_t* permutation;  // [entries], or null: q(p) = p
  void* y;                     // [batch, m, n]
  bool transpose;              // the second equation of vectors
  int64_t m, entries, length;
  int64_t values_stride;  // elements from one batch to the next, 0 where shared

  int64_t step;  // of kernel SpmmOctet: vectors of a step, 16 or 32

  // Of kernel Spmm. Not null: it looks at the indices itself, and this is set to 1 where one is not
  // in 0 .. k - 1; the results of the task mean nothing then.
  int32_t* wrong;

  // Of kernel Spmm: whether values were permuted and a copy in order has taken their place. Long
  // rows are then still summed in the pieces in which permuted values are read, to the same bits.
  bool ordered;

  // partials: [batch, pieces, piece_rows, n]; remaining: [walks, split_rows]
  int64_t piece_rows;  // V, of the transpose 1
};

// Up to so many columns, in one tile, with vectors of one value take a kernel that looks at indices
// as it goes: a pass over them before would take about as long as the product.
constexpr int64_t kNarrowScatter = 8;

// The same product with the transpose of column vectors, walked by rows of the matrix:
//   y[batch, indices[p], :] += sum over v of values[batch, p, v] * x[batch, b V + v, :]
// for each vector p of block row b. The V rows of x stay in registers, so that a row of y, once
// loaded, takes V multiply-adds. Block rows are cut into pieces with sums of their own, which are
// added in order.
struct SpmmScatterArgs {
  Dtype dtype;
  const void* values;      // [batch or 1, vectors, V]
  const int32_t* offsets;  // [block rows + 1]
  const int32_t* indices;  // [vectors]
  const void* x;           // [batch or 1, k, n]
  void* y;                 // [batch, m, n]
  int64_t m, k, n, length, blocks, batch;
  int64_t values_stride, x_stride;  // elements from one batch to the next, 0 where shared
  int64_t tile_columns, tiles;
  bool narrow;  // as kNarrowScatter says; entries whose index is not in 0 .. m - 1 take no part
  void* sums;   // accumulators [batch, pieces, tiles: [m, columns of the tile]]

  // task = (batch * pieces + piece) * tiles + tile, then batch * chunks + chunk of rows of y
  int64_t pieces;
  int64_t chunk_rows, chunks;
};

}  // namespace sgap
