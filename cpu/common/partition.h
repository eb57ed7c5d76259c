// How rows are cut into tasks. The cut depends on the offsets and the chunk only, never on the
// number of threads, so results have the same bits on any machine size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
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

// The tasks of a call on rows, as its kernel sees them. A walk takes all row tasks once: for one
// batch element, say, or for one column tile of it.
struct RowTasks {
  const RowTask* tasks;
  int64_t row_tasks;
  const SplitRow* splits;
  int64_t split_rows;
  int64_t pieces;
  void* partials;      // what the pieces leave, in accumulators
  int32_t* remaining;  // pieces that are not done, [walks, split_rows]

  // The entries that a task reads, tasks being numbered walk by walk.
  std::pair<int64_t, int64_t> EntriesOf(int64_t task) const {
    const RowTask& rows = tasks[task % row_tasks];
    return {rows.entry_begin, rows.entry_end};
  }
};

namespace SGAP_ISA {

// Whether all other pieces of the task's row are done, on this walk over the rows.
inline bool IsLastPiece(const RowTasks& rows, int64_t walk, const RowTask& task) {
  int32_t* remaining = rows.remaining + walk * rows.split_rows + task.split;
  return __atomic_fetch_sub(remaining, 1, __ATOMIC_ACQ_REL) == 1;
}

// The row r with offsets[r] <= p < offsets[r + 1]; needs offsets[0] <= p < offsets[m].
inline int64_t RowOfEntry(const int32_t* offsets, int64_t m, int64_t p) {
  int64_t low = 0, high = m;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (offsets[middle] <= p ? low : high) = middle;
  }
  return low;
}

}  // namespace SGAP_ISA

struct RowPartition {
  std::vector<RowTask> tasks;
  std::vector<SplitRow> splits;
  int64_t pieces = 0;
};

// Cuts m rows, of valid offsets, into tasks of about `chunk` units of work, a row costing one unit
// plus one per entry. A row of at least two times `piece` entries, a chunk or more, becomes several
// tasks (pieces), whose partial results the last finisher adds in order.
RowPartition PartitionRows(const int32_t* offsets, int64_t m, int64_t chunk, int64_t piece);

// All pieces of a call leave at most so many bytes of partial results: rows are cut into longer
// pieces where those of a chunk would leave more.
constexpr size_t kMostPartialBytes = size_t(1) << 28;

// Owns what the RowTasks of a call point to, until its last task is done.
struct ProductPlan {
  RowPartition partition;
  std::unique_ptr<char[]> partials;
  std::unique_ptr<int32_t[]> remaining;

  // For `walks` walks, over all of which a piece leaves `piece_bytes` of partial results.
  RowTasks Cut(const int32_t* offsets, int64_t m, int64_t chunk, int64_t walks, size_t piece_bytes);
};

}  // namespace sgap
