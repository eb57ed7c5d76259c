// Messages along the entries p of row r, and what a row keeps of them. Entry p has the position
// q(p) in the values and the message x[b, indices[p], :] * values[b, q(p)], or the sum of the two.
// Values are scalars, or vectors of n columns, which combine with x column by column.
//
//   extremum:    y[b, r, :] is the greatest (least) message, arg[b, r, :] the position of the first
//                entry that attains it; 0 and -1 in a row without entries
//   kSumProduct: y[b, r, :] is the sum of the products; of values that are vectors
//   kArgGather:  y[b, r, :] is the sum of the products of those entries p for which
//                given_arg[b, indices[p], :], the arg of an extremum, is q(p)
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/partition.h"
#include "cpu/common/slabs.h"

namespace sgap {

enum class Fold : uint8_t { kMaxProduct, kMinProduct, kMaxSum, kMinSum, kSumProduct, kArgGather };

struct GspmmArgs : RowTasks {
  Dtype dtype;
  Fold fold;
  bool vectors;                // whether values are vectors
  const void* values;          // [batch or 1, nnz], or [batch or 1, nnz, n]
  const int32_t* offsets;      // [m + 1]
  const int32_t* indices;      // [nnz]
  const int32_t* permutation;  // [nnz], or null: q(p) = p
  const void* x;               // [batch or 1, k, n]
  const int32_t* given_arg;    // [batch or 1, k, n], for kArgGather
  void* y;                     // [batch, m, n]
  int32_t* arg;                // [batch, m, n], of an extremum; null where not wanted
  int64_t m, k, n, nnz;
  int64_t values_stride, x_stride, given_arg_stride;  // from one batch to the next, 0 where shared

  // task = batch * row_tasks + row task
  // partials: [batch, pieces, n]; remaining: [batch, split_rows]
  int32_t* partial_arg;  // [batch, pieces, n], with arg

  // [batch]: whether that element of x has neither NaN nor infinity, which its first task that asks
  // finds out: 0 (not known), 1 (it has some) or 2.
  uint8_t* finite;

  Slabs slabs;  // of such an x in 16 bits, as accumulators
};

// Arg-extremum gathers: what the derivatives of an extremum need at the entries that attained it,
// by their positions in the values (arg). Entry q is at (i, j) of the matrix; row and source are i
// and j, or j and i with `transposed`.
struct ArgGatherArgs {
  Dtype dtype;
  bool transposed;
  const int32_t* offsets;  // [rows of the matrix + 1], valid
  const int32_t* indices;  // [nnz], columns; an entry whose column is out of range takes no part
  const void* x;           // [batch or 1, sources, n]
  const int32_t* arg;      // [batch or 1, m, n], m rows of the result of gspmm
  int64_t matrix_rows, m, sources, n, nnz;
  int64_t x_stride, arg_stride;  // elements from one batch to the next, 0 where shared

  // task = batch * chunks + chunk; a chunk is chunk_size consecutive rows (GspmmArgGather), or
  // entries
  int64_t chunk_size, chunks;

  // GspmmArgGather: y[b, row, :] = values[b, q] * x[b, source, :], q = arg[b, row, :]
  const void* values;  // [batch or 1, nnz]
  int64_t values_stride;
  void* y;  // [batch, m, n]

  // GspmmArgGatherToValues: out[b, q] = sum over l with arg[b, row, l] = q of x[b, source, l] *
  // d[b, row, l]
  const void* d;  // [batch or 1, m, n]
  int64_t d_stride;
  void* out;  // [batch, nnz]
};

}  // namespace sgap
