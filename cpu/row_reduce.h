// Sums, maxima and copies over the entries of each row; and what every operation on rows shares:
// rows that are cut into pieces.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "partition.h"

namespace sgap {

// Tasks run in three phases, each after all of the one before (ParallelPhases). Per batch:
//   row_tasks: whole rows, done at once, and pieces of long rows, each leaving a partial result;
//   split_rows: the partial results of a row's pieces are combined, in order;
//   pieces: what needs the combined result.
struct RowPhases {
  const int32_t* offsets;  // [m + 1]
  const RowTask* tasks;
  int64_t row_tasks;
  const SplitRow* splits;
  int64_t split_rows;
  const RowTask* piece_tasks;
  int64_t pieces;
  int64_t batch;
  double* partials;  // [batch, pieces, 2]
  double* totals;    // [batch, split_rows, 2]
};

enum class RowOperation : uint8_t { kSum, kMax };

struct RowReduceArgs {
  Dtype dtype;
  RowOperation operation;
  const void* values;  // [batch, nnz]
  void* rows;          // [batch, m]
  int64_t m, nnz;
  RowPhases phases;
};

struct RowBroadcastArgs {
  Dtype dtype;
  const int32_t* offsets;  // [m + 1]
  const void* rows;        // [batch, m]
  void* values;            // [batch, nnz]
  int64_t m, nnz;

  // task = batch * chunks + chunk; a chunk is chunk_nonzeros consecutive entries
  int64_t chunk_nonzeros, chunks;
};

namespace SGAP_ISA {
void RowReduce(const RowReduceArgs& args, int64_t task);
void RowBroadcast(const RowBroadcastArgs& args, int64_t task);
}  // namespace SGAP_ISA

}  // namespace sgap
