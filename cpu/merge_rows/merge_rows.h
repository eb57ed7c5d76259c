// Two matrices whose rows ascend, merged row by row: the union of their entries, or the
// intersection, with what becomes of the values, or where each entry was. Called by Python without
// XLA.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/row_pieces.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap {

enum class Merge : uint8_t { kAdd, kSubtract, kMultiply };  // the last is an intersection

struct MergeRowsArgs {
  SparseRows a, b;
  int64_t columns;
  Dtype dtype;
  Merge merge;           // of values; one that neither has is 0
  const void* a_values;  // or null: then there may be places
  const void* b_values;
  const int32_t* task_rows;
  int32_t* counts;               // [rows]
  int32_t* indices;              // of the task, with room for kMergeSlack more
  void* values;                  // with a_values
  int32_t *a_places, *b_places;  // or null; without: entries of A and B, -1 for none
};

constexpr int64_t kMergeSlack = 16;

enum class Merged : uint8_t { kDone, kNotAscending, kTooMany };

// A + B, A - B (union) or A * B (intersection): values of `dtype` where A has values, else with
// `places` for each entry of the result which entry of A and of B it has, -1 for none.
// kNotAscending where a row of A or B does not ascend; kTooMany for 2^31 - 1 entries or more.
// Throws std::bad_alloc.
Merged DirectMerge(const DirectMatrix& a, const DirectMatrix& b, Merge merge, Dtype dtype,
                   bool places, int64_t threads, RowResult& result);

}  // namespace sgap
