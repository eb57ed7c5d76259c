// Bitmaps: a bit for each place of a matrix, in words of 32 columns, lower columns in lower bits.
// What is selected by a condition is one, 1/32 of float32 scores, until it is known how many
// entries each row has.
#pragma once

#include <cstdint>

namespace sgap {

constexpr int64_t kWordColumns = 32;

// The bitmap of a mask: task t makes the words [t task_words, (t + 1) task_words).
struct BitmapOfMaskArgs {
  const uint8_t* mask;  // [rows, columns], 0 or 1
  uint32_t* words;      // [rows, row_words]; bits behind the last column are 0
  int64_t rows, columns, row_words;
  int64_t task_words;
};

// The places of the bits that are set, by rows and ascending columns. Tasks count their bits, the
// handler turns counts into the places where tasks begin, and tasks write their entries.
enum class BitmapPhase : int { kCount, kWrite };

struct BitmapEntriesArgs {
  const uint32_t* words;  // [batch, rows, row_words]
  int32_t* offsets;       // [batch, rows + 1]: of all entries, INT32_MAX at most
  int32_t* entry_rows;    // [batch, nse]: of the first nse, then zeros
  int32_t* columns;       // [batch, nse], the same
  int64_t rows, row_words, nse;
  int64_t task_words, tasks;  // words of a task, tasks of a bitmap
  int64_t* begins;            // [batch, tasks + 1]: the first entry of each task
  BitmapPhase phase;
};

}  // namespace sgap
