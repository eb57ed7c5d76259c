// Rows of A B whose products fall like those of a row before, all of them the same number of
// columns further: stencils on grids, prolongations, several unknowns of one node. Where the
// products of such a shape go among the columns of C's row is found once; then a row is a pass over
// its products that adds and, at the same time, looks whether they have the shape.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/simd/simd.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap::SGAP_ISA {
namespace {

#if defined(__AVX2__)
// The first n of eight lanes, n from 0 on.
inline __m256i FirstLanes(int64_t n) {
  alignas(64) static constexpr int32_t kLanes[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_loadu_si256((const __m256i*)(kLanes + 8 - (n < 8 ? n : 8)));
}
#endif

// Whether some columns are not those expected, further by a base.
class Difference {
 public:
#if defined(__AVX2__)
  // `expected` can be read up to a multiple of eight.
  void Look(const int32_t* columns, int32_t base, const int32_t* expected, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
      const __m256i lanes = FirstLanes(n - i);
      const __m256i found =
          _mm256_sub_epi32(_mm256_maskload_epi32(columns + i, lanes), _mm256_set1_epi32(base));
      const __m256i right = _mm256_loadu_si256((const __m256i*)(expected + i));
      found_ =
          _mm256_or_si256(found_, _mm256_andnot_si256(_mm256_cmpeq_epi32(found, right), lanes));
    }
  }
  void Note(__m256i bits) { found_ = _mm256_or_si256(found_, bits); }
  bool Any() const { return !_mm256_testz_si256(found_, found_); }

 private:
  __m256i found_ = _mm256_setzero_si256();
#else
  void Look(const int32_t* columns, int32_t base, const int32_t* expected, int64_t n) {
    for (int64_t i = 0; i < n; ++i) found_ |= (columns[i] - base) ^ expected[i];
  }
  bool Any() const { return found_ != 0; }

 private:
  int32_t found_ = 0;
#endif
};

#if defined(__AVX2__)
// Eight vectors of eight become their columns.
inline void Transpose(__m256 (&v)[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}
#endif

template <typename T>
class RepeatedRows {
  using Acc = Accumulator<T>;
  static constexpr int64_t kMost = kRepeatedRowMost, kMostEntries = kRepeatedRowEntries;

 public:
  // Columns are relative to that of the first product.
  struct Shape {
    int32_t entries, count;                     // of A's row; of C's
    int32_t lengths[kMostEntries];              // of B's rows
    int32_t columns[kMost + 8 * kMostEntries];  // of each product, rows of B in whole eights
    uint16_t places[kMost];                     // which of C's columns that is
    int32_t distinct[kMost];                    // C's columns
  };

  RepeatedRows(const SparseRows& a, const SparseRows& b, const void* a_values, const void* b_values,
               int64_t first_row, char* memory)
      : a_(a),
        b_(b),
        a_values_(static_cast<const T*>(a_values)),
        b_values_(static_cast<const T*>(b_values)),
        first_row_(first_row),
        shapes_(reinterpret_cast<Shape*>(memory)),
        joined_(shapes_ + kShapes) {}

  // The shape of the row, whose sums are in `out` then; null, and nothing written, where it has
  // none of those noted. With `columns`, those of C's row, `count` of them, are the shape's too.
  const Shape* Find(int64_t row, T* out, const int32_t* columns = nullptr, int64_t count = 0) {
    for (int n = 0, i = after_[last_]; n < noted_; ++n, i = i + 1 < noted_ ? i + 1 : 0) {
      const Shape& shape = shapes_[i];
      if ((columns && shape.count != count) || !FitsShape(shape, row)) continue;
      if (!HasColumns(shape, columns)) continue;
      Sum(shape, a_values_ + a_.offsets[row], out);
      alone_ = 0;
      same_ = i == last_ ? same_ + 1 : 0;
      in_turns_ = i == before_ && i != last_ ? in_turns_ + 1 : 0;
      before_ = last_;
      last_ = after_[last_] = i;
      const int32_t base = b_.indices[rows_of_b_[0]];
      apart_ = base - base_, base_ = base;
      return &shape;
    }
    same_ = in_turns_ = 0;
    return nullptr;
  }

  // How many rows from `row` on, below `last`, have the shape of the rows before them, or one of
  // two shapes in turn, and have their sums in `out` now, one row behind the other: eight, sixteen
  // or none. `out` may be written up to `room`. With `c`, the columns of C's rows are the shapes'
  // too.
  int64_t FindEight([[maybe_unused]] int64_t row, [[maybe_unused]] int64_t last,
                    [[maybe_unused]] T* out, [[maybe_unused]] int64_t room,
                    [[maybe_unused]] const SparseRows* c = nullptr) {
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>) {
      if (same_ >= kLikely && row + 8 <= last) {
        const Shape& shape = shapes_[last_];
        if (Eight(shape, row, {shape, shape}, 1, c, out, room)) return 8;
        same_ = 0;
      }
      if (in_turns_ >= kLikely && row + 16 <= last) {
        const Shape &one = shapes_[before_], &other = shapes_[last_];
        if (Join(apart_) && Eight(*joined_, row, {one, other}, 2, c, out, room)) {
          return 16;
        }
        in_turns_ = 0;
      }
    }
#endif
    return 0;
  }
  // The shape of row i of as many as were found at once.
  const Shape& ShapeOf(int64_t i, int64_t found) const {
    return shapes_[found == 16 && i % 2 == 0 ? before_ : last_];
  }

  // Whether the row may have a shape that is noted: it has as many entries, and B's rows do.
  bool Fits(int64_t row) {
    for (int i = 0; i < noted_; ++i) {
      if (FitsShape(shapes_[i], row)) return true;
    }
    return false;
  }
  int32_t Base(int64_t row) const { return b_.indices[b_.offsets[a_.indices[a_.offsets[row]]]]; }

  // Notes the shape of a row with these columns, ascending, if a row shortly before has it too; no
  // more after many rows that were like none.
  void Note(int64_t row, const int32_t* columns, int64_t count) {
    if (failures_ > kMostFailures || alone_ > kMostAlone) return;
    if (count == 0 || count > kMost) return;
    const int64_t entries = a_.offsets[row + 1] - a_.offsets[row];
    if (entries == 0 || entries > kMostEntries) return;
    int64_t products = 0;
    for (int64_t e = 0; e < entries; ++e) products += Length(a_.indices[a_.offsets[row] + e]);
    if (products > kMost) return;
    for (int64_t back = 1; back <= 2 && row - back >= first_row_; ++back) {
      if (!Alike(row, row - back)) continue;
      Shape& shape = shapes_[next_];
      joined_of_[0] = -1;
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
  static constexpr int kShapes = 4, kMostFailures = 4, kMostAlone = 32, kLikely = 2;
  static constexpr int64_t kMostEightEntries = 32, kMostEightCount = 64;
  static_assert((kShapes + 1) * sizeof(Shape) <= kRepeatedRowBytes);

  int64_t Length(int64_t k) const { return b_.offsets[k + 1] - b_.offsets[k]; }

  // Notes where the rows of B begin, too.
  bool FitsShape(const Shape& shape, int64_t row) {
    const int64_t begin = a_.offsets[row];
    if (shape.entries != a_.offsets[row + 1] - begin) return false;
    int32_t differ = 0;
    for (int32_t e = 0; e < shape.entries; ++e) {
      const int32_t* const ends = b_.offsets + a_.indices[begin + e];
      rows_of_b_[e] = ends[0];
      differ |= (ends[1] - ends[0]) ^ shape.lengths[e];
    }
    return differ == 0;
  }

  // Of a row that fits.
  bool HasColumns(const Shape& shape, const int32_t* of_c) const {
    const int32_t base = b_.indices[rows_of_b_[0]];
    Difference difference;
    const int32_t* expected = shape.columns;
    for (int32_t e = 0; e < shape.entries; ++e) {
      difference.Look(b_.indices + rows_of_b_[e], base, expected, shape.lengths[e]);
      expected += InEights(shape.lengths[e]);
    }
    if (of_c) difference.Look(of_c, base, shape.distinct, shape.count);
    return !difference.Any();
  }

  // Of the row that was looked at last.
  void Sum(const Shape& shape, const T* factors, T* out) const {
    Acc sums[kMost];
    for (int32_t i = 0; i < shape.count; i += 8) {
      for (int32_t j = 0; j < 8; ++j) sums[i + j] = 0;
    }
    const uint16_t* places = shape.places;
    for (int32_t e = 0; e < shape.entries; ++e) {
      const Acc factor = LoadScalar(factors + e);
      const T* const values = b_values_ + rows_of_b_[e];
      const int32_t length = shape.lengths[e];
      for (int32_t i = 0; i < length; ++i) {
        Acc& sum = sums[places[i]];
        sum = MultiplyAdd(factor, LoadScalar(values + i), sum);
      }
      places += length;
    }
    // Not in a loop of any length, which would become a call.
    int32_t i = 0;
    const auto store = [&](int32_t n) {
      for (int32_t j = 0; j < n; ++j) StoreScalar(out + i + j, sums[i + j]);
      i += n;
    };
    while (i + 8 <= shape.count) store(8);
    if (shape.count & 4) store(4);
    if (shape.count & 2) store(2);
    if (shape.count & 1) store(1);
  }

#if defined(__AVX2__)
  // The shapes of a row or of two.
  struct Pair {
    const Shape &one, &other;
  };

  // Eight times a row, or two rows as one, in the lanes of vectors, which take what lies in memory
  // row by row by transpositions of 8 x 8. Sums are added in the order of one row.
  bool Eight(const Shape& shape, int64_t row, Pair pair, int64_t rows, const SparseRows* c,
             float* out, int64_t room) const {
    const int64_t entries = shape.entries, count = shape.count;
    const int64_t begin = a_.offsets[row];
    if (entries > kMostEightEntries || count > kMostEightCount) return false;
    for (int64_t r = row; r < row + 8 * rows; r += 8) {
      if (!InSteps(a_.offsets + r, pair.one.entries, pair.other.entries)) return false;
      if (c && !InSteps(c->offsets + r, pair.one.count, pair.other.count)) return false;
    }
    int32_t rows_of_b[kMostEightEntries][8];
    int32_t differ = 0;
    for (int64_t lane = 0; lane < 8; ++lane) {
      const int32_t* const of_a = a_.indices + begin + lane * entries;
      for (int64_t e = 0; e < entries; ++e) {
        const int32_t* const ends = b_.offsets + of_a[e];
        rows_of_b[e][lane] = ends[0];
        differ |= (ends[1] - ends[0]) ^ shape.lengths[e];
      }
    }
    if (differ) return false;

    Difference difference;
    int32_t bases[8];
    for (int lane = 0; lane < 8; ++lane) {
      bases[lane] = b_.indices[rows_of_b[0][lane]];
      if (!c) continue;
      const int32_t* const of_c = c->indices + c->offsets[row] + lane * count;
      difference.Look(of_c, bases[lane], shape.distinct, count);
    }
    __m256 factors[kMostEightEntries], sums[kMostEightCount], eight[8];
    for (int64_t i = 0; i < InEights(int32_t(count)); ++i) sums[i] = _mm256_setzero_ps();
    for (int64_t e = 0; e < entries; e += 8) {
      const __m256i lanes = FirstLanes(entries - e);
      for (int i = 0; i < 8; ++i) {
        eight[i] = _mm256_maskload_ps(a_values_ + begin + i * entries + e, lanes);
      }
      Transpose(eight);
      for (int i = 0; i < 8; ++i) factors[e + i] = eight[i];
    }
    const int32_t* expected = shape.columns;
    const uint16_t* places = shape.places;
    for (int64_t e = 0; e < entries; ++e) {
      const int32_t length = shape.lengths[e];
      for (int32_t from = 0; from < length; from += 8, expected += 8) {
        const int32_t n = length - from < 8 ? length - from : 8;
        const __m256i lanes = FirstLanes(n);
        const __m256i right = _mm256_loadu_si256((const __m256i*)expected);
        __m256i same = lanes;
        for (int i = 0; i < 8; ++i) {
          const int64_t q = rows_of_b[e][i] + from;
          const __m256i columns = _mm256_sub_epi32(_mm256_maskload_epi32(b_.indices + q, lanes),
                                                   _mm256_set1_epi32(bases[i]));
          same = _mm256_and_si256(same, _mm256_cmpeq_epi32(columns, right));
          eight[i] = _mm256_maskload_ps(b_values_ + q, lanes);
        }
        difference.Note(_mm256_xor_si256(same, lanes));
        Transpose(eight);
        for (int32_t i = 0; i < n; ++i) {
          __m256& sum = sums[*places++];
          sum = _mm256_fmadd_ps(factors[e], eight[i], sum);
        }
      }
    }
    if (difference.Any()) return false;
    Write(sums, count, out, room);
    return true;
  }

  // Row after row: what is written behind one is the next one's.
  static void Write(__m256* sums, int64_t count, float* out, int64_t room) {
    const int64_t vectors = (count + 7) / 8;
    for (int64_t v = 0; v < vectors; ++v) {
      __m256 eight[8];
      for (int i = 0; i < 8; ++i) eight[i] = sums[8 * v + i];
      Transpose(eight);
      for (int i = 0; i < 8; ++i) sums[8 * v + i] = eight[i];
    }
    for (int64_t lane = 0; lane < 8; ++lane, out += count, room -= count) {
      for (int64_t v = 0; v < vectors; ++v) {
        const __m256 part = sums[8 * v + lane];
        if (8 * v + 8 <= room) {
          _mm256_storeu_ps(out + 8 * v, part);
        } else {
          std::memcpy(out + 8 * v, &part, size_t(count - 8 * v) * sizeof(float));
        }
      }
    }
  }

  // Whether the next eight offsets are so far apart, in turn.
  static bool InSteps(const int32_t* offsets, int32_t one, int32_t other) {
    const __m256i from = _mm256_loadu_si256((const __m256i*)offsets);
    const __m256i to = _mm256_loadu_si256((const __m256i*)(offsets + 1));
    const __m256i steps = _mm256_set_epi32(other, one, other, one, other, one, other, one);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_sub_epi32(to, from), steps)) == -1;
  }

  // Makes the shape of two rows, of which the other one is so many columns further. False where
  // there is no room for it.
  bool Join(int32_t apart) {
    if (joined_of_[0] == before_ && joined_of_[1] == last_ && joined_apart_ == apart) return true;
    const Shape &one = shapes_[before_], &other = shapes_[last_];
    Shape& both = *joined_;
    both.entries = both.count = 0;
    int64_t products = 0;
    int32_t* columns = both.columns;
    for (const Shape* shape : {&one, &other}) {
      const int32_t further = shape == &one ? 0 : apart, before = both.count;
      const int32_t* of_row = shape->columns;
      const uint16_t* places = shape->places;
      for (int32_t e = 0; e < shape->entries; ++e) {
        const int32_t length = shape->lengths[e];
        if (both.entries == kMostEntries || products + length > kMost) return Unjoin();
        both.lengths[both.entries++] = length;
        for (int32_t i = 0; i < length; ++i) {
          columns[i] = of_row[i] + further;
          both.places[products++] = uint16_t(*places++ + before);
        }
        columns += InEights(length), of_row += InEights(length);
      }
      if (before + shape->count > kMost) return Unjoin();
      for (int32_t i = 0; i < shape->count; ++i) {
        both.distinct[both.count++] = shape->distinct[i] + further;
      }
    }
    joined_of_[0] = before_, joined_of_[1] = last_, joined_apart_ = apart;
    return true;
  }
  bool Unjoin() {
    joined_of_[0] = -1;
    return false;
  }
#endif

  static int32_t InEights(int32_t length) { return (length + 7) / 8 * 8; }

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
    int32_t* of_row = shape.columns;
    for (int64_t e = 0; e < entries; ++e) {
      const int64_t k = a_.indices[begin + e];
      shape.lengths[e] = int32_t(Length(k));
      for (int64_t q = b_.offsets[k]; q < b_.offsets[k + 1]; ++q) {
        const int32_t column = b_.indices[q];
        int64_t place = 0;
        for (int64_t size = count; size > 1;) {  // the last one that is not greater
          const int64_t half = size / 2;
          place = columns[place + half] <= column ? place + half : place;
          size -= half;
        }
        if (columns[place] != column) return false;
        of_row[q - b_.offsets[k]] = column - base;
        shape.places[products++] = uint16_t(place);
      }
      of_row += InEights(shape.lengths[e]);
    }
    shape.entries = int32_t(entries);
    shape.count = int32_t(count);
    return true;
  }

  const SparseRows a_, b_;
  const T *const a_values_, *const b_values_;
  const int64_t first_row_;
  Shape* const shapes_;
  int32_t rows_of_b_[kMostEntries];  // where they begin, of the row that was looked at last
  // The shapes of the last two rows that had one, and which followed each.
  int last_ = 0, before_ = 0, after_[kShapes] = {};
  // Rows until now with the shape of the row before, or of the one before that and not of that.
  int same_ = 0, in_turns_ = 0;
  // The first column of the row found last, and how much further that is than of the one before.
  int32_t base_ = 0, apart_ = 0;
  Shape* const joined_;
  int32_t joined_of_[2] = {-1, -1}, joined_apart_ = 0;
  int noted_ = 0, next_ = 0, failures_ = 0;
  int alone_ = 0;  // rows like none before them, since the last one with a shape
};

}  // namespace
}  // namespace sgap::SGAP_ISA
