// A sparse matrix whose stored groups move: the smallest are dropped, and as many places grow.
//
// The grid of a matrix has a cell for each group: an entry, vector or block. Of `stored` groups all
// but round(fraction stored) are kept, those of greatest norm; cells that hold no kept group grow
// by greatest score until as many are stored as there is room for. Only magnitudes count. Of equal
// ones the cells first in row-major order come first, and NaN is less than every number; an
// infinite score counts as the greatest finite one.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

// Phases, each of tasks for blocks of rows or of one task; Regrow runs a task of one phase.
enum class RegrowPhase : int {
  kOrder,       // rows: stored groups by ascending column, and their keys
  kKept,        // one: which norm the kept groups reach
  kMark,        // rows: the cells of kept groups
  kSample,      // one: a score that a few more cells reach than grow
  kCandidates,  // rows: these cells
  kEnough,      // one: whether they are too few
  kAllCells,    // rows: then every cell that is not kept is a candidate
  kGrown,       // one: which score the grown cells reach
  kCount,       // rows: groups of each row
  kOffsets,     // one: where rows begin
  kWrite,       // rows: the groups, by ascending column
};
constexpr int kRegrowPhases = 11;
constexpr bool IsOfRows(int phase) { return phase % 2 == 0; }

// One matrix of a batch, and the memory of its call.
struct RegrowMatrix {
  const int32_t* indices;  // [groups]
  const void* norms;       // [groups]
  const void* scores;      // [rows, columns]
  float fraction;
  int32_t* out_offsets;  // [rows + 1]
  int32_t* out_indices;  // [groups]
  int32_t* out_sources;  // [groups]: the position of a kept group before, -1 of any other

  const int32_t* offsets;  // [rows + 1], valid
  // Row r has stored[r] groups from offsets[r] on: as they are, or where `moved` those of `order`,
  // a column in the upper half and the position in the lower one.
  int64_t* order;   // [groups]
  uint8_t* moved;   // [rows]
  int32_t* stored;  // [rows]
  void* keys;       // [groups + 16], of norms in that order
  uint8_t* marks;   // [rows, mark_bytes]: a bit for each cell
  int32_t* kept;    // [rows]
  // Candidates by row and ascending column, those of a task together.
  int32_t* candidates;   // [rows], how many
  void* candidate_keys;  // [rows columns + 16]
  int32_t* candidate_columns;
  int64_t found;     // how many, of all tasks
  int64_t* begins;   // [row_tasks], of the candidates of a task
  int64_t* lengths;  // [row_tasks]
  int64_t* ties;     // [row_tasks]: groups of the last norm or score that a task may take

  int64_t keep, grow;           // how many
  int64_t kept_key, grown_key;  // the least that is taken
  double least;                 // the magnitude of candidates
  bool all_cells, again;        // whether every cell is a candidate, and was not at first
};

struct RegrowArgs {
  Dtype norms_dtype, scores_dtype;
  RegrowMatrix* matrices;  // [batch]
  int64_t batch, rows, columns, groups;
  int64_t task_rows, row_tasks;  // rows of a task, tasks of a matrix
  int64_t mark_bytes;            // of a row
  RegrowPhase phase;
  char* scratch;  // RegrowScratch(task_rows, columns) bytes of the task's own
};

// For the candidates of a task: keys and columns.
constexpr int64_t RegrowScratch(int64_t rows, int64_t columns) {
  return (rows * columns + 16) * (8 + 4);
}

}  // namespace sgap
