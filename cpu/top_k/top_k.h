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
  void* values;            // [batch, rows * k], the scores; or null
  int64_t rows, columns, k;
  int64_t task_rows, row_tasks;  // rows of a task, tasks of an element of the batch
  char* scratch;                 // TopKScratch(columns) bytes of the task's own
};

// Bytes that a task needs for rows of so many columns: a score, its key (of 8 bytes each at most)
// and its column, and a vector beyond each.
constexpr int64_t TopKScratch(int64_t columns) { return (columns + 16) * (8 + 8 + 4); }

// The same of scores that are computed as they are needed, a few rows at a time, from q, keys and
// weights of one dtype, in its accumulators:
//   score[t, s] = sum over h of weights[t, h] * max(q[t, h] . keys[s], 0), NaN where one is
struct TopKIndexerArgs {
  TopKArgs top_k;       // with neither scores nor values
  const void* q;        // [batch, rows, heads, depth]
  const void* keys;     // [batch, columns, depth]
  const void* weights;  // [batch, rows, heads]
  int64_t batch, heads, depth;
  // The keys as the kernel reads them: [batch, panels], each of `panel_columns` keys. Null where
  // there are few rows: a task of the first phase then has one panel at a time, and writes the
  // scores of its columns.
  char* panels;
  int64_t panel_columns, panel_bytes;
  // Where keys are rounded too, else null: panels of bytes [batch, BytePanels(panels)], or null;
  // the bounds of a panel [batch, panels, 2, 2], of 16 bits and of bytes.
  char* byte_panels;
  float* bounds;
  // With byte_panels, the keys in 16 bits one after another, [batch, columns, RoundedWords(depth)],
  // and their scales [batch, columns].
  int32_t* rounded_keys;
  float* scales;
  int64_t panels_of_task;  // of the first phase
  int64_t panel_tasks;     // of an element of the batch
  void* scores;            // [batch, rows, panels * panel_columns] of few rows
  bool tiles;              // whether products of bytes are those of matrix tiles

  int64_t PanelCount() const { return (top_k.columns + panel_columns - 1) / panel_columns; }
};

// TopKIndexer has panels [depth, kPanelColumns] of accumulators, and behind each the same rounded
// to words of two integers [RoundedWords(depth), kPanelColumns] and a float for each column.
// TopKIndexerOctet, for bfloat16,
// has two tiles of 16 columns for each kPanelPart features, in which those of a pair of features
// lie next to each other.
constexpr int64_t kPanelColumns = 48;
constexpr int64_t kOctetPanelColumns = 32, kPanelPart = 32;
constexpr int64_t kPairsTogether = 16;  // a pair is a row and a head

constexpr int64_t kMostRoundedDepth = 1 << 12;  // of more, integers have few bits for their sums
constexpr int64_t RoundedWords(int64_t depth) { return (depth + 15) / 16 * 8; }
constexpr int64_t RoundedPanelBytes(int64_t depth) {
  return 4 * kPanelColumns * (RoundedWords(depth) + 1);
}

// A sample, the first of each kColumnsOfSample columns, has panels of bytes of its own: these
// first, then those of the other columns. A panel has words of four integers [ByteWords,
// kPanelColumns] and a float for each column.
constexpr int64_t kColumnsOfSample = 4;
constexpr int64_t ByteWords(int64_t depth) { return (depth + 15) / 16 * 4; }
constexpr int64_t BytePanelBytes(int64_t depth) {
  return 4 * kPanelColumns * (ByteWords(depth) + 1);
}
// Whether scores of bytes are faster: rows of as many heads as are together with zeros for few, of
// keys that are not long (what rounding takes grows), and of many columns for each selected one.
constexpr int64_t kColumnsOfBytes = 8, kMostByteDepth = 64;
constexpr bool ScoresBytes(int64_t columns, int64_t k, int64_t heads, int64_t depth) {
  const int64_t whole = (heads + 3) / 4 * 4;
  return 3 * whole <= 4 * heads && depth <= kMostByteDepth && k > 0 &&
         columns > kColumnsOfBytes * k;
}
constexpr int64_t SamplePanels(int64_t panels) {
  return (panels + kColumnsOfSample - 1) / kColumnsOfSample;
}
constexpr int64_t BytePanels(int64_t panels) { return kColumnsOfSample * SamplePanels(panels); }

// Bytes that a task needs for rounded q of so many pairs, and for the columns of a row whose scores
// are computed without rounding.
constexpr int64_t RoundedScratchBytes(int64_t pairs, int64_t columns, int64_t depth) {
  return 4 * pairs * (RoundedWords(depth) + 1) + 4 * 4 * (columns + 64) + 8 * 64 +
         4 * (depth + 1) * (pairs + 32);
}

// Bytes that a task needs for the columns that scores of bytes leave open, a sample, and a row.
constexpr int64_t ByteScratchBytes(int64_t rows, int64_t columns, int64_t heads, int64_t depth) {
  const int64_t panels = (columns + kPanelColumns - 1) / kPanelColumns;
  const int64_t pairs = 2 * (rows + 8) * heads + 8;
  return 4 * rows * (panels * kPanelColumns + 64) +
         4 * (rows + 8) * SamplePanels(panels) * kPanelColumns +
         4 * pairs * (ByteWords(depth) + RoundedWords(depth) + 5) + 64 * (rows + 8) +
         6 * 4 * (columns + 64) + 4 * (depth + 1) * (heads + 32) + 18 * 64;
}

// Bytes of scratch for a task of so many rows: their scores, q and weights, of at most 8 bytes
// each, and what the selection needs.
constexpr int64_t TopKIndexerScratch(int64_t rows, int64_t columns, int64_t heads, int64_t depth) {
  const int64_t pairs = (rows * heads + kPairsTogether - 1) / kPairsTogether * kPairsTogether;
  const int64_t wide = columns + kPanelColumns, deep = depth + kPanelPart;
  const int64_t words = 8 * (rows * wide + pairs * deep) + TopKScratch(columns) + 3 * 64 +
                        RoundedScratchBytes(pairs, columns, depth);
  const int64_t bytes = ByteScratchBytes(rows, columns, heads, depth);
  return words > bytes ? words : bytes;
}

// The same for a task of either phase where there are few rows.
constexpr int64_t FewRowsScratch(int64_t rows, int64_t columns, int64_t heads, int64_t depth) {
  const int64_t scoring = TopKIndexerScratch(rows, 0, heads, depth) + 8 * kPanelColumns * depth;
  return TopKScratch(columns) + scoring + 64;
}

inline int64_t TopKLimit(int32_t limit, int64_t columns) {
  return limit < 0 ? 0 : limit < columns ? limit : columns;
}

}  // namespace sgap
