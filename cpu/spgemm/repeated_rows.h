// Rows of A B whose products fall like those of a row before, all of them the same number of
// columns further: stencils on grids, prolongations, several unknowns of one node. Where the
// products of such a shape go among the columns of C's row is found once; then a row is a pass over
// its products that adds and, at the same time, looks whether they have the shape.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd/simd.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap::SGAP_ISA {
namespace {

template <typename T>
class RepeatedRows {
  using Acc = Accumulator<T>;
  static constexpr int64_t kMost = kRepeatedRowMost;

 public:
  // Columns are relative to that of the first product.
  struct Shape {
    int32_t entries, count;   // of A's row; of C's
    int32_t lengths[kMost];   // of B's rows
    int32_t columns[kMost];   // of each product
    uint16_t places[kMost];   // which of C's columns that is
    int32_t distinct[kMost];  // C's columns
  };

  RepeatedRows(const SparseRows& a, const SparseRows& b, const void* a_values, const void* b_values,
               int64_t first_row, char* memory)
      : a_(a),
        b_(b),
        a_values_(static_cast<const T*>(a_values)),
        b_values_(static_cast<const T*>(b_values)),
        first_row_(first_row),
        sums_(reinterpret_cast<Acc*>(memory)),
        shapes_(reinterpret_cast<Shape*>(memory + kMost * sizeof(double))) {}

  // The shape of the row, whose Sums() there are then; null where it has none of those noted. With
  // `columns`, those of C's row, `count` of them, are the shape's too.
  const Shape* Find(int64_t row, const int32_t* columns = nullptr, int64_t count = 0) {
    const int64_t begin = a_.offsets[row];
    for (int i = 0; i < noted_; ++i) {
      const Shape& shape = shapes_[i];
      if ((columns && shape.count != count) || !FitsShape(shape, row)) continue;
      if (!Adds(shape, a_.indices + begin, a_values_ + begin, columns)) continue;
      alone_ = 0;
      return &shape;
    }
    return nullptr;
  }
  // Whether the row may have a shape that is noted: it has as many entries, and B's rows do.
  bool Fits(int64_t row) const {
    for (int i = 0; i < noted_; ++i) {
      if (FitsShape(shapes_[i], row)) return true;
    }
    return false;
  }
  const Acc* Sums() const { return sums_; }
  int32_t Base(int64_t row) const { return b_.indices[b_.offsets[a_.indices[a_.offsets[row]]]]; }

  // Notes the shape of a row with these columns, ascending, if a row shortly before has it too; no
  // more after many rows that were like none.
  void Note(int64_t row, const int32_t* columns, int64_t count) {
    if (failures_ > kMostFailures || alone_ > kMostAlone) return;
    if (count == 0 || count > kMost) return;
    const int64_t entries = a_.offsets[row + 1] - a_.offsets[row];
    if (entries == 0 || entries > kMost) return;
    int64_t products = 0;
    for (int64_t e = 0; e < entries; ++e) products += Length(a_.indices[a_.offsets[row] + e]);
    if (products > kMost) return;
    for (int64_t back = 1; back <= 2 && row - back >= first_row_; ++back) {
      if (!Alike(row, row - back)) continue;
      Shape& shape = shapes_[next_];
      if (!Describe(row, columns, count, shape)) {
        shape.entries = -1;
        ++failures_;
        return;
      }
      next_ = (next_ + 1) % kShapes;
      noted_ = noted_ < kShapes ? noted_ + 1 : kShapes;
      return;
    }
    ++alone_;
  }

 private:
  static constexpr int kShapes = 4, kMostFailures = 4, kMostAlone = 32;
  static_assert(kMost * sizeof(double) + kShapes * sizeof(Shape) <= kRepeatedRowBytes);

  int64_t Length(int64_t k) const { return b_.offsets[k + 1] - b_.offsets[k]; }

  bool FitsShape(const Shape& shape, int64_t row) const {
    const int64_t begin = a_.offsets[row];
    if (shape.entries != a_.offsets[row + 1] - begin) return false;
    for (int32_t e = 0; e < shape.entries; ++e) {
      if (Length(a_.indices[begin + e]) != shape.lengths[e]) return false;
    }
    return true;
  }

  bool Adds(const Shape& shape, const int32_t* of_a, const T* factors, const int32_t* of_c) {
    const int32_t base = b_.indices[b_.offsets[of_a[0]]];
    int32_t differ = 0;
    if (of_c) {
      for (int32_t i = 0; i < shape.count; ++i) differ |= (of_c[i] - base) ^ shape.distinct[i];
      if (differ) return false;
    }
    for (int32_t i = 0; i < shape.count; ++i) sums_[i] = 0;
    const int32_t* expected = shape.columns;
    const uint16_t* places = shape.places;
    for (int32_t e = 0; e < shape.entries; ++e) {
      const Acc factor = LoadScalar(factors + e);
      const int64_t q = b_.offsets[of_a[e]];
      const int32_t length = shape.lengths[e];
      const int32_t* const columns = b_.indices + q;
      const T* const values = b_values_ + q;
      for (int32_t i = 0; i < length; ++i) {
        differ |= (columns[i] - base) ^ expected[i];
        Acc& sum = sums_[places[i]];
        sum = MultiplyAdd(factor, LoadScalar(values + i), sum);
      }
      expected += length, places += length;
    }
    return differ == 0;
  }

  // Whether two rows of A, of any number of entries, have one shape.
  bool Alike(int64_t row, int64_t other) const {
    const int64_t begin = a_.offsets[row], entries = a_.offsets[row + 1] - begin;
    if (a_.offsets[other + 1] - a_.offsets[other] != entries) return false;
    const int32_t *x = a_.indices + begin, *y = a_.indices + a_.offsets[other];
    for (int64_t e = 0; e < entries; ++e) {
      if (Length(x[e]) != Length(y[e])) return false;
    }
    if (Length(x[0]) == 0) return false;
    const int32_t apart = b_.indices[b_.offsets[x[0]]] - b_.indices[b_.offsets[y[0]]];
    for (int64_t e = 0; e < entries; ++e) {
      const int32_t* const of_x = b_.indices + b_.offsets[x[e]];
      const int32_t* const of_y = b_.indices + b_.offsets[y[e]];
      for (int64_t i = 0, length = Length(x[e]); i < length; ++i) {
        if (of_x[i] - of_y[i] != apart) return false;
      }
    }
    return true;
  }

  // False where a product is without a column. There is room, by Note.
  bool Describe(int64_t row, const int32_t* columns, int64_t count, Shape& shape) const {
    const int64_t begin = a_.offsets[row], entries = a_.offsets[row + 1] - begin;
    const int32_t base = Base(row);
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0 && columns[i - 1] >= columns[i]) return false;
      shape.distinct[i] = columns[i] - base;
    }
    int64_t products = 0;
    for (int64_t e = 0; e < entries; ++e) {
      const int64_t k = a_.indices[begin + e], length = Length(k);
      shape.lengths[e] = int32_t(length);
      for (int64_t q = b_.offsets[k]; q < b_.offsets[k + 1]; ++q) {
        const int32_t column = b_.indices[q];
        int64_t place = 0;
        for (int64_t size = count; size > 1;) {  // the last one that is not greater
          const int64_t half = size / 2;
          place = columns[place + half] <= column ? place + half : place;
          size -= half;
        }
        if (columns[place] != column) return false;
        shape.columns[products] = column - base;
        shape.places[products++] = uint16_t(place);
      }
    }
    shape.entries = int32_t(entries);
    shape.count = int32_t(count);
    return true;
  }

  const SparseRows a_, b_;
  const T *const a_values_, *const b_values_;
  const int64_t first_row_;
  Acc* const sums_;
  Shape* const shapes_;
  int noted_ = 0, next_ = 0, failures_ = 0;
  int alone_ = 0;  // rows like none before them, since the last one with a shape
};

}  // namespace
}  // namespace sgap::SGAP_ISA
