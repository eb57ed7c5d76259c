// Bitmaps: a bit for each place of a matrix, in words of 32 columns, lower columns in lower bits.
// What is selected by a condition is one, 1/32 of float32 scores, until it is known how many
// entries each row has.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

constexpr int64_t kWordColumns = 32;

// The bits of the numbers that are not 0: task t makes the words [t task_words, (t + 1)
// task_words). -0 counts as 0; subnormal numbers do not.
struct BitmapOfNonzeroArgs {
  const char* x;    // [rows, columns], numbers of element_bytes
  uint32_t* words;  // [rows, row_words]; bits behind the last column are 0
  int64_t rows, columns, row_words;
  int64_t task_words;
  int element_bytes;     // 1, 2, 4, 8 or 16
  uint64_t significant;  // the bits of an element that count, of 16 bytes those of each half
};

// The bits of the scores that are at least their row's bound, in the first limits[row] columns, and
// there of those that are kept, whatever they are. -infinity reaches no bound, nor does NaN, and
// nothing reaches one that is NaN; 0 and -0 are equal. Tasks as above.
struct BitmapOfScoresArgs {
  Dtype dtype;
  const void* scores;     // [rows, columns]
  const void* least;      // [rows], accumulators
  const int32_t* limits;  // [rows], clamped to [0, columns]
  const uint8_t* kept;    // [rows, columns], 0 or 1, or null
  uint32_t* words;        // [rows, row_words]
  int64_t rows, columns, row_words;
  int64_t task_words;
};

// The places of the bits that are set, by rows and ascending columns, and what a matrix has there.
// Tasks count their bits; from the counts the handler knows where a task's entries begin, and they
// are written; and when all are counted, the end.
enum class BitmapPhase : int { kCount, kWrite, kEnd };

struct BitmapEntriesArgs {
  const uint32_t* words;  // [rows, row_words]
  int32_t* offsets;       // [rows + 1]: of all entries, INT32_MAX at most
  int32_t* columns;       // [nse]: of the first nse, then zeros
  int32_t* entry_rows;    // [nse], the same, or null
  const char* x;          // [rows, x_columns], numbers of element_bytes, or null
  char* values;           // [nse]: those of x, then zeros
  int64_t x_columns;      // more than 32 (row_words - 1)
  int element_bytes;      // 1, 2, 4, 8 or 16
  int64_t rows, row_words, nse;
  int64_t task_words, tasks;
  BitmapPhase phase;
  int64_t* counts;     // [tasks]: made by the first phase
  int64_t begin, end;  // the task's entries in the second phase; all, in the third one
};

}  // namespace sgap
