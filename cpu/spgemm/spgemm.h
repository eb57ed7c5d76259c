// The product C = A B of two sparse matrices by rows (Gustavson), sampled at a given pattern of C;
// and that pattern.
//   out[b, p] = sum over entries e of row i of A, then entries q of row column(e) of B with
//               column(q) = j,  of a[b, e] * b[b, q]            for the entry p = (i, j) of C
// in this order, in the accumulator of the dtype, rounded once.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"
#include "cpu/common/row_pieces.h"

namespace sgap {

// Index arrays in CSR, valid.
struct SparseRows {
  const int32_t* offsets;  // [rows + 1]
  const int32_t* indices;
};

// Rows of one task: consecutive ones, task = batch * row_tasks + index.
struct SpgemmArgs {
  Dtype dtype;
  SparseRows a, b, c;
  int64_t columns;       // of B and C
  const void* a_values;  // [batch or 1, a_entries]
  const void* b_values;  // [batch or 1, b_entries]
  void* out;             // [batch, c_entries]
  int64_t a_stride, b_stride, out_stride;
  bool complete;  // whether each product has a place: a row where one has none becomes NaN
  const int32_t* task_rows;  // [row_tasks + 1]
  int64_t row_tasks;
  int64_t slots;    // of a hash table in place of an array of all columns, a power of two; or 0
  int64_t longest;  // the most entries of a row of C
  char* scratch;    // SpgemmScratch() bytes, `filled` of them with `fill`
};

// Products and entries of A at most of a row whose shape is noted (repeated_rows.h), and bytes for
// shapes. Rows of more find their columns in less time than it takes to compare all products.
constexpr int64_t kRepeatedRowMost = 1 << 8, kRepeatedRowEntries = 1 << 6;
constexpr int64_t kRepeatedRowBytes = 1 << 16;

// Without a hash table, sums of all columns. With one, its slots, then the sums of one row of C
// with one in front for what has no place.
struct SpgemmScratch {
  int64_t filled, repeated, bytes;
  uint8_t fill;  // of the first `filled` bytes, between tasks

  SpgemmScratch(int64_t columns, int64_t slots, int64_t longest, int64_t accumulator_bytes)
      : filled(slots ? 2 * slots * 4 : columns * accumulator_bytes),
        repeated((Sums() + (slots ? (longest + 1) * accumulator_bytes : 0) + 63) / 64 * 64),
        bytes(repeated + kRepeatedRowBytes),
        fill(slots ? 0 : 0xff) {}
  int64_t Sums() const { return (filled + 63) / 64 * 64; }  // of one row, in bytes
};

// Slots of a hash table of up to `longest` columns, at most half of them taken.
inline int64_t SpgemmSlotsOf(int64_t longest) {
  int64_t slots = 64;
  while (slots < 2 * longest) slots *= 2;
  return slots;
}

// The same, or 0 where an array of all columns is not much more memory. All threads have one.
inline int64_t SpgemmSlots(int64_t columns, int64_t longest) {
  if (columns <= int64_t(1) << 20 || columns <= 16 * longest) return 0;
  return SpgemmSlotsOf(longest);
}

// Where the search for a column begins.
inline uint32_t SpgemmSlot(uint32_t column, int64_t slots) {
  return uint32_t(column * uint64_t(2654435769u) >> 8) & uint32_t(slots - 1);
}

// A set of columns as bits, and for each word of 64 whether it has some, twice: ascending columns
// come out in time linear in their number.
struct SpgemmPatternArgs {
  SparseRows a, b;
  int64_t columns;
  int32_t* counts;         // [rows] columns of each row of C, or null
  const int32_t* offsets;  // [rows + 1] where the columns of each row go, with room for them
  int32_t* indices;        // or null
  const int32_t* task_rows;
  uint64_t* scratch;  // ColumnSetWords() words, zero before and after a task
};

inline int64_t ColumnSetWords(int64_t columns) {
  const int64_t words = columns / 64 + 1, above = words / 64 + 1;
  return words + above + above / 64 + 1;
}

// How rows of A B are added up whose structure is not known: as is fastest, or in hash tables, with
// columns that ascend or as they come: in the order of their first products.
enum class RowSums : uint8_t { kAny, kHash, kHashUnsorted };

// Rows of A B whose structure is not known: columns and sums in one pass, ascending in each row.
// Short rows are sorted (sorted_rows.h), where the instruction set and the dtype have that; rows
// like one before them are added up in their places at once (repeated_rows.h). The sums of others
// are in an array of all columns with a flag for each column that has one, and for each 64 of them,
// or, where `slots` is not 0, in a hash table of up to so many slots, which rows of few products in
// a matrix of many columns fit in.
struct SpgemmRowsArgs {
  Dtype dtype;
  RowSums sums;  // but kAny: `slots` is not 0
  SparseRows a, b;
  int64_t columns;
  const void *a_values, *b_values;
  const int64_t* products;  // [rows + 1] before each row
  const int32_t* task_rows;
  int64_t slots, longest;  // a power of two; the most products of a row, at most the columns
  int32_t* counts;         // [rows] entries of each row
  int32_t* indices;        // of the task, with room for kSpgemmSlack more
  void* values;
  char* scratch;  // SpgemmRowsScratch() bytes, zero before and after a task
};

constexpr int64_t kSpgemmSlack = 64;

// Products of one row that are sorted, at most, and room for them and for what is written behind.
constexpr int64_t kSortedRowMost = 1 << 12, kSortedRowRoom = kSortedRowMost + 64;

// A key of 32 bits is a column and which product of its row it is: bits for the latter. No key is
// all ones.
inline int SortedRowBits(int64_t columns) {
  int bits = 12;
  while (bits > 0 && columns >> (32 - bits) != 0) --bits;
  return bits;
}

// Where the parts of the scratch begin, in bytes.
struct SpgemmRowsScratch {
  int64_t flags, groups, list, other, sorted, repeated, bytes;  // sums are first

  SpgemmRowsScratch(int64_t columns, int64_t slots, int64_t longest, int64_t accumulator_bytes) {
    const auto lines = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t sums = slots ? slots : columns + 64;
    flags = lines(sums * accumulator_bytes);
    groups = flags + lines(slots ? slots * 4 : columns + 64);
    list = groups + (slots ? 0 : lines(columns / 64 + 65));
    other = list + lines((longest + 1) * 4);
    sorted = other + lines((longest + 1) * 4);
    repeated = sorted + lines(4 * kSortedRowRoom * 4);
    bytes = repeated + lines(kRepeatedRowBytes);
  }
};

// A B of two concrete matrices, called by Python without XLA. False where there would be 2^31 - 1
// entries or more; throws std::bad_alloc.
bool DirectProduct(const DirectMatrix& a, const DirectMatrix& b, Dtype dtype, RowSums sums,
                   int64_t threads, RowResult& result);

}  // namespace sgap
