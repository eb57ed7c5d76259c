// Sums, maxima and copies over the entries of each row; and what every operation on rows shares:
// column vectors and rows that are cut into pieces.
//
// A matrix of column vectors has block rows of V rows; its values are [vectors, V], and value j of
// a vector of block row b belongs to row b V + j. V is 1 for entries: each is a vector, each block
// row a row. Rows past the end of the matrix are never read, and get zeros in what has vectors.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/partition.h"

namespace sgap {

// Tasks run in three phases, each after all of the one before (ParallelPhases). Per batch:
//   row_tasks: whole block rows, done at once, and pieces of long ones, each leaving a partial
//     result;
//   split_rows: the partial results of a block row's pieces are combined, in order;
//   pieces: what needs the combined result.
struct RowPhases {
  const int32_t* offsets;  // [block rows + 1], of vectors
  int64_t rows, length;    // m and V
  const RowTask* tasks;
  int64_t row_tasks;
  const SplitRow* splits;
  int64_t split_rows;
  const RowTask* piece_tasks;
  int64_t pieces;
  int64_t batch;
  double* partials;  // [batch, pieces, 2, V]
  double* totals;    // [batch, split_rows, 2, V]
};

// kMaxOrZero gives zero, where kMax gives -infinity, for a row without entries. kSumOnePass reads a
// line of memory once where kSum, whose bits do not change, reads it for each register of a row.
enum class RowOperation : uint8_t { kSum, kSumOnePass, kMax, kMaxOrZero };

struct RowReduceArgs {
  Dtype dtype;
  RowOperation operation;
  const void* values;  // [batch, vectors, V]
  void* rows;          // [batch, m]
  int64_t numbers;     // vectors * V
  RowPhases phases;
};

struct RowBroadcastArgs {
  Dtype dtype;
  const int32_t* offsets;  // [block rows + 1]
  const void* rows;        // [batch, m]
  void* values;            // [batch, vectors, V]
  int64_t m, length, block_rows, vectors;

  // task = batch * chunks + chunk; a chunk is chunk_vectors consecutive vectors
  int64_t chunk_vectors, chunks;
};

}  // namespace sgap
