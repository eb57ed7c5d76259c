// Two matrices whose rows ascend, merged row by row: the union of their entries, or the
// intersection, with what becomes of the values, or where each entry was.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap {

enum class Merge : uint8_t { kAdd, kSubtract, kMultiply };

struct MergeRowsArgs {
  SparseRows a, b;
  bool intersection;
  Dtype dtype;
  Merge merge;           // of values; one that neither has is 0
  const void* a_values;  // or null: then there are places
  const void* b_values;
  const int32_t* task_rows;
  int32_t* counts;               // [rows], or null
  int32_t* indices;              // of the task; null to count only
  void* values;                  // with a_values
  int32_t *a_places, *b_places;  // without: entries of A and B, -1 for none
};

}  // namespace sgap
