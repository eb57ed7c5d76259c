// How rows are cut into tasks. The cut depends on the offsets and the chunk only, never on the
// number of threads, so results have the same bits on any machine size.
#pragma once

#include <cstdint>
#include <vector>

namespace sgap {

// Whole rows [row_begin, row_end) (piece < 0), or the part [entry_begin, entry_end) of the one row
// row_begin.
struct RowTask {
  int64_t row_begin;
  int64_t row_end;
  int64_t entry_begin;
  int64_t entry_end;
  int32_t piece;  // among the pieces of all split rows
  int32_t split;  // which split row
};

struct SplitRow {
  int64_t row;
  int32_t first_piece;
  int32_t pieces;
};

struct RowPartition {
  std::vector<RowTask> tasks;
  std::vector<SplitRow> splits;
  int64_t pieces = 0;
};

// Cuts m rows into tasks of about `chunk` units of work, a row costing one unit plus one per entry.
// With split_rows, a row of at least two chunks becomes several tasks (pieces), whose partial
// results the last finisher adds in order.
RowPartition PartitionRows(const int32_t* offsets, int64_t m, int64_t chunk, bool split_rows);

}  // namespace sgap
