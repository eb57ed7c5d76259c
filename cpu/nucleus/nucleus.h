// The most probable entries of each row of a CSR structure that together have a probability, and
// the totals of rows that probabilities are relative to.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

// Row r of the batch has the entries [offsets[r], offsets[r + 1]), and the first k of these take
// part. Their weights are exp(value - greatest), 0 for NaN and -infinity. Greater values come
// first, and of equal ones the first entry. An entry is stored if those before it weigh less than
// p * total, or p is at least 1, or it is kept, and if its index is in [0, columns). Kept entries,
// those ranked as infinite, come before all others.
//
// A first phase marks and counts what each row stores, a second one (of the handler) turns counts
// into offsets, and a third one writes the entries.
struct NucleusArgs {
  Dtype dtype;
  const void* values;      // [batch, rows * k]
  const void* ranked;      // [batch, rows * k], or null where none is kept
  const void* greatest;    // [batch, rows], accumulators, as total and p are
  const void* total;       // [batch, rows]
  const void* p;           // [batch, rows]
  const int32_t* offsets;  // [batch, rows + 1], ascending, in 0 .. rows * k
  const int32_t* indices;  // [batch, rows * k]
  uint64_t* marks;         // [batch, rows, NucleusWords(k)]: a bit for each entry of a row
  int32_t* out_offsets;    // [batch, rows + 1]; the first phase writes counts from [1] on
  int32_t* out_indices;    // [batch, rows * k]
  int32_t* out_entries;    // [batch, rows * k]: where each stored entry was
  int64_t batch, rows, k, columns;
  int64_t task_rows, row_tasks;  // rows of a task; tasks of a matrix in the first and third phase
  char* scratch;                 // NucleusScratch(k) bytes of the task's own, in the first phase
};

constexpr int64_t NucleusWords(int64_t k) { return (k + 63) / 64; }

// Bytes for the key and the weight of each entry of a row, in four whole vectors at a time.
constexpr int64_t NucleusScratch(int64_t k) { return (k + 64) * (8 + 8); }

// Of each row the greatest of the scores in columns [0, limit), with the limit clamped to
// [0, columns], and the sum of their weights; -infinity and 0 where there is no number.
struct NucleusTotalsArgs {
  Dtype dtype;
  const void* scores;      // [batch, rows, columns]
  const int32_t* limits;   // [batch or 1, rows]
  int64_t limits_stride;   // between elements of the batch
  void *greatest, *total;  // [batch, rows], accumulators
  int64_t rows, columns;
  int64_t task_rows, row_tasks;  // rows of a task, tasks of an element of the batch
};

}  // namespace sgap
