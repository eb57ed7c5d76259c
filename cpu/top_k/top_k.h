// The k greatest scores of each row, by ascending column.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

// Of row r of the batch, the columns [0, limit) exist, with the limit clamped to [0, columns], and
// of these the ones whose score is not -infinity. Greater scores come first, then those of lower
// columns; -0 equals 0, and NaN is less than every number.
struct TopKArgs {
  Dtype dtype;
  const void* scores;      // [batch, rows, columns]
  const int32_t* limits;   // [batch or 1, rows]
  int64_t limits_stride;   // between elements of the batch
  const int32_t* offsets;  // [batch, rows + 1]: row r has room from here on for min(k, limit)
  int32_t* counts;         // [batch, rows]: how many were selected
  int32_t* indices;        // [batch, rows * k]
  void* values;            // [batch, rows * k], the scores
  int64_t rows, columns, k;
  int64_t task_rows, row_tasks;  // rows of a task, tasks of an element of the batch
  char* scratch;                 // TopKScratch(columns) bytes of the task's own
};

// Bytes that a task needs for rows of so many columns: a score, its key (of 8 bytes each at most)
// and its column, and a vector beyond each.
constexpr int64_t TopKScratch(int64_t columns) { return (columns + 16) * (8 + 8 + 4); }

inline int64_t TopKLimit(int32_t limit, int64_t columns) {
  return limit < 0 ? 0 : limit < columns ? limit : columns;
}

}  // namespace sgap
