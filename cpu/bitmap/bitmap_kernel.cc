// Bitmaps, 64 columns at a time.
#include <cstdint>

#include "cpu/bitmap/bitmap.h"
#include "cpu/simd/compress.h"
#include "cpu/simd/simd.h"
#include "cpu/top_k/top_k_ranks.h"

namespace sgap::SGAP_ISA {

namespace {

constexpr int64_t kColumnsTogether = 64;

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

struct SixteenBytes {
  uint64_t parts[2];
};

// Calls body(U()) for a type of 1, 2, 4, 8 or 16 bytes.
template <typename Body>
void OfBytes(int bytes, Body&& body) {
  switch (bytes) {
    case 1:
      return body(uint8_t());
    case 2:
      return body(uint16_t());
    case 4:
      return body(uint32_t());
    case 8:
      return body(uint64_t());
    default:
      return body(SixteenBytes());
  }
}

template <typename U>
bool HasBits(U x, uint64_t bits) {
  return (x & bits) != 0;
}

bool HasBits(SixteenBytes x, uint64_t bits) { return ((x.parts[0] | x.parts[1]) & bits) != 0; }

// A bit for each of up to 64 numbers, where any of these bits is set.
template <typename U>
uint64_t NonzeroBits(const U* x, int64_t count, uint64_t significant) {
#if defined(__AVX512BW__)
  if constexpr (sizeof(U) <= 8) {
    constexpr int N = 64 / sizeof(U);
    uint64_t bits = 0;
#pragma GCC unroll 8
    for (int i = 0; i < kColumnsTogether; i += N) {
      if (i >= count) break;
      const int64_t left = count - i;
      const uint64_t exist = left < N ? (uint64_t(1) << left) - 1 : ~uint64_t(0);
      uint64_t own;
      if constexpr (sizeof(U) == 1) {
        const __m512i lanes = _mm512_maskz_loadu_epi8(exist, x + i);
        own = _mm512_test_epi8_mask(lanes, _mm512_set1_epi8(char(significant)));
      } else if constexpr (sizeof(U) == 2) {
        const __m512i lanes = _mm512_maskz_loadu_epi16(__mmask32(exist), x + i);
        own = _mm512_test_epi16_mask(lanes, _mm512_set1_epi16(int16_t(significant)));
      } else if constexpr (sizeof(U) == 4) {
        const __m512i lanes = _mm512_maskz_loadu_epi32(__mmask16(exist), x + i);
        own = InRegister(_mm512_test_epi32_mask(lanes, _mm512_set1_epi32(int(significant))));
      } else {
        const __m512i lanes = _mm512_maskz_loadu_epi64(__mmask8(exist), x + i);
        own = InRegister(_mm512_test_epi64_mask(lanes, _mm512_set1_epi64(int64_t(significant))));
      }
      bits |= own << i;
    }
    return bits;
  }
#endif
  uint8_t found[kColumnsTogether] = {};
  if (count >= kColumnsTogether) {
    for (int i = 0; i < kColumnsTogether; ++i) found[i] = HasBits(x[i], significant);
  } else {
    for (int64_t i = 0; i < count; ++i) found[i] = HasBits(x[i], significant);
  }
  uint64_t bits = 0;
  for (int i = 0; i < kColumnsTogether; i += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, found + i, 8);
    bits |= (eight * 0x0102040810204080) >> 56 << i;  // byte j to bit j
  }
  return bits;
}

// A bit for each of up to 64 scores that are at least a bound: a number, or the key of one, with
// which their keys are compared.
template <typename T, typename Bound>
uint64_t ScoreBits(const T* scores, int64_t count, Bound least) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  const auto bits_of = [=](Vector<Acc, N> x) -> uint64_t {
    if constexpr (std::is_same_v<Bound, Acc>) return LanesFrom<Acc, N>(x, least);
    return LanesFrom<Key<Acc>, N>(KeysOf<Acc, N>(x), least);
  };
  uint64_t bits = 0;
  if (count >= kColumnsTogether) {
#pragma GCC unroll 16
    for (int i = 0; i < kColumnsTogether; i += N) bits |= bits_of(Load<T, N>(scores + i)) << i;
    return bits;
  }
  for (int64_t i = 0; i < count; i += N) {
    const int64_t left = Least(count - i, N);
    const uint64_t exist = (uint64_t(1) << left) - 1;
    bits |= (bits_of(LoadPartial<T, N>(scores + i, int(left))) & exist) << i;
  }
  return bits;
}

// The key of a bound; the least one of a number for -infinity.
template <typename Acc>
Key<Acc> KeyOfBound(Acc bound) {
  Vector<Acc, kLanes<Acc>> lanes = {};
  lanes[0] = bound;
  const Key<Acc> key = KeysOf<Acc, kLanes<Acc>>(lanes)[0];
  return key == kAbsent<Acc> ? key + 2 : key;
}

// Whether scores may be compared with a bound as numbers: not where threads take subnormal ones
// for 0, nor with -infinity.
template <typename Acc>
bool IsComparable(Acc bound) {
  constexpr Key<Acc> kLeastNormal = Key<Acc>(1) << (sizeof(Acc) == 4 ? 23 : 52);
  const auto bits = BitCast<Key<Acc>>(bound);
  return (bits & ~kAbsent<Acc>) >= kLeastNormal && bound != -Acc(__builtin_inf());
}

// Makes the words of a task: bits_of(row)(column) are those of 64 columns from a column on.
template <typename Args, typename BitsOf>
void MakeWords(const Args& args, int64_t task, BitsOf&& bits_of) {
  const int64_t begin = task * args.task_words;
  const int64_t end = Least(begin + args.task_words, args.rows * args.row_words);
  for (int64_t i = begin, row = begin / args.row_words; i < end; ++row) {
    const auto bits_at = bits_of(row);
    const int64_t row_begin = row * args.row_words;
    const int64_t row_end = Least(row_begin + args.row_words, end);
    for (; i < row_end; i += 2) {
      const uint64_t bits = bits_at((i - row_begin) * kWordColumns);
      args.words[i] = uint32_t(bits);
      if (i + 1 < row_end) args.words[i + 1] = uint32_t(bits >> kWordColumns);
    }
    i = row_end;
  }
}

// Up to two of `count` words.
uint64_t WordsAt(const uint32_t* words, int64_t count) {
  return count > 1 ? words[0] | uint64_t(words[1]) << kWordColumns : words[0];
}

int64_t CountBits(const uint32_t* words, int64_t count) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += __builtin_popcount(words[i]);
  return found;
}

// Of the entries [begin, end), whose columns are written, the row and the values.
void WriteOfRow(const BitmapEntriesArgs& args, int64_t row, int64_t begin, int64_t end) {
  if (args.entry_rows) {
    for (int64_t p = begin; p < end; ++p) args.entry_rows[p] = int32_t(row);
  }
  if (!args.x) return;
  OfBytes(args.element_bytes, [&](auto zero) {
    using U = decltype(zero);
    const U* x = reinterpret_cast<const U*>(args.x) + row * args.x_columns;
    U* values = reinterpret_cast<U*>(args.values);
    int64_t stop = end;  // of bits behind the last column, if a bitmap has any
    for (; stop > begin && args.columns[stop - 1] >= args.x_columns; --stop) values[stop - 1] = U{};
    for (int64_t p = begin; p < stop; ++p) values[p] = x[args.columns[p]];
  });
}

void Write(const BitmapEntriesArgs& args, int64_t task) {
  const int64_t first = task * args.task_words, all = args.rows * args.row_words;
  const int64_t last = Least(first + args.task_words, all);
  const int64_t end = Least(args.end, args.nse);  // others write behind it
  int64_t place = args.begin;
  for (int64_t i = first, row = first / args.row_words; i < last; ++row) {
    const int64_t row_end = Least((row + 1) * args.row_words, last);
    if (i == row * args.row_words) args.offsets[row] = int32_t(Least(place, INT32_MAX));
    const int64_t row_place = place;
    int32_t column = int32_t((i - row * args.row_words) * kWordColumns);
    for (; i < row_end && place < end; i += 2, column += kColumnsTogether) {
      const uint64_t bits = WordsAt(args.words + i, row_end - i);
      if (place + kColumnsTogether <= end) {
        place += PackBits(bits, column, args.columns + place);
      } else {
        int32_t found[kColumnsTogether];
        const int64_t count = PackBits(bits, column, found), room = end - place;
        for (int64_t j = 0; j < count && j < room; ++j) args.columns[place + j] = found[j];
        place += count;
      }
    }
    if (i < row_end) place += CountBits(args.words + i, row_end - i);  // they do not fit
    i = row_end;
    WriteOfRow(args, row, row_place, Least(place, end));
  }
}

// The task's part of the padding, and the end of the offsets.
void WriteEnd(const BitmapEntriesArgs& args, int64_t task) {
  if (task == 0) args.offsets[args.rows] = int32_t(Least(args.end, INT32_MAX));
  const int64_t used = Least(args.end, args.nse), rest = args.nse - used;
  const int64_t begin = used + rest * task / args.tasks;
  const int64_t end = used + rest * (task + 1) / args.tasks;
  const auto clear = [=](void* of, int64_t bytes) {
    if (of) {
      __builtin_memset(static_cast<char*>(of) + begin * bytes, 0, size_t((end - begin) * bytes));
    }
  };
  clear(args.columns, sizeof(int32_t));
  clear(args.entry_rows, sizeof(int32_t));
  clear(args.values, args.element_bytes);
}

}  // namespace

void BitmapOfNonzero(const BitmapOfNonzeroArgs& args, int64_t task) {
  OfBytes(args.element_bytes, [&](auto zero) {
    using U = decltype(zero);
    MakeWords(args, task, [&](int64_t row) {
      const U* x = reinterpret_cast<const U*>(args.x) + row * args.columns;
      return [&args, x](int64_t column) {
        return NonzeroBits(x + column, args.columns - column, args.significant);
      };
    });
  });
}

void BitmapOfScores(const BitmapOfScoresArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Acc = Accumulator<T>;
    MakeWords(args, task, [&](int64_t row) {
      const T* scores = static_cast<const T*>(args.scores) + row * args.columns;
      const Acc least = static_cast<const Acc*>(args.least)[row];
      const Key<Acc> key = KeyOfBound(least);
      const bool is_nan = key == kAbsent<Acc> + 1, is_comparable = IsComparable(least);
      const int64_t limit = Least(args.limits[row], args.columns);
      const uint8_t* kept = args.kept ? args.kept + row * args.columns : nullptr;
      return [=](int64_t column) {
        const int64_t left = limit - column;
        uint64_t bits = 0;
        if (left <= 0) return bits;
        if (is_comparable) {
          bits = ScoreBits(scores + column, left, least);
        } else if (!is_nan) {
          bits = ScoreBits(scores + column, left, key);
        }
        return kept ? bits | NonzeroBits(kept + column, left, 0xff) : bits;
      };
    });
  });
}

void BitmapEntries(const BitmapEntriesArgs& args, int64_t task) {
  if (args.phase == BitmapPhase::kWrite) return Write(args, task);
  if (args.phase == BitmapPhase::kEnd) return WriteEnd(args, task);
  const int64_t first = task * args.task_words, all = args.rows * args.row_words;
  args.counts[task] = CountBits(args.words + first, Least(args.task_words, all - first));
}

}  // namespace sgap::SGAP_ISA
