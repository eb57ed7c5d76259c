// Bitmaps, 64 columns at a time.
#include <cstdint>

#include "cpu/bitmap/bitmap.h"
#include "cpu/simd/compress.h"

namespace sgap::SGAP_ISA {

namespace {

constexpr int64_t kColumnsTogether = 64;

int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// A bit for each of up to 64 bytes, 0 or 1 each.
uint64_t BitsOf(const uint8_t* bytes, int64_t count) {
#if defined(__AVX512BW__)
  const __mmask64 exist = count < kColumnsTogether ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
  const __m512i x = _mm512_maskz_loadu_epi8(exist, bytes);
  return _mm512_test_epi8_mask(x, x);
#else
  uint64_t bits = 0;
  for (int64_t i = 0; i < count && i < kColumnsTogether; i += 8) {
    uint64_t eight = 0;
    __builtin_memcpy(&eight, bytes + i, size_t(Least(count - i, 8)));
    bits |= (eight * 0x0102040810204080) >> 56 << i;  // byte j to bit j
  }
  return bits;
#endif
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

void Write(const BitmapEntriesArgs& args, int64_t batch, int64_t task) {
  const uint32_t* words = args.words + batch * args.rows * args.row_words;
  const int64_t* begins = args.begins + batch * (args.tasks + 1);
  int32_t* offsets = args.offsets + batch * (args.rows + 1);
  int32_t* columns = args.columns + batch * args.nse;
  int32_t* entry_rows = args.entry_rows + batch * args.nse;
  const int64_t first = task * args.task_words, all = args.rows * args.row_words;
  const int64_t last = Least(first + args.task_words, all);
  const int64_t end = Least(begins[task + 1], args.nse);  // others write behind it
  int64_t place = begins[task];
  for (int64_t i = first, row = first / args.row_words; i < last; ++row) {
    const int64_t row_end = Least((row + 1) * args.row_words, last);
    if (i == row * args.row_words) offsets[row] = int32_t(Least(place, INT32_MAX));
    const int64_t row_place = place;
    int32_t column = int32_t((i - row * args.row_words) * kWordColumns);
    for (; i < row_end && place < end; i += 2, column += kColumnsTogether) {
      const uint64_t bits = WordsAt(words + i, row_end - i);
      if (place + kColumnsTogether <= end) {
        place += PackBits(bits, column, columns + place);
      } else {
        int32_t found[kColumnsTogether];
        const int64_t count = PackBits(bits, column, found), room = end - place;
        for (int64_t j = 0; j < count && j < room; ++j) columns[place + j] = found[j];
        place += count;
      }
    }
    if (i < row_end) place += CountBits(words + i, row_end - i);  // they do not fit
    i = row_end;
    for (int64_t p = row_place, stop = Least(place, end); p < stop; ++p) {
      entry_rows[p] = int32_t(row);
    }
  }
  const int64_t total = begins[args.tasks];
  if (last == all) offsets[args.rows] = int32_t(Least(total, INT32_MAX));
  const int64_t used = Least(total, args.nse), rest = args.nse - used;
  for (int64_t p = rest * task / args.tasks; p < rest * (task + 1) / args.tasks; ++p) {
    columns[used + p] = entry_rows[used + p] = 0;
  }
}

}  // namespace

void BitmapOfMask(const BitmapOfMaskArgs& args, int64_t task) {
  const int64_t begin = task * args.task_words;
  const int64_t end = Least(begin + args.task_words, args.rows * args.row_words);
  for (int64_t i = begin, row = begin / args.row_words; i < end; ++row) {
    const int64_t row_begin = row * args.row_words;
    const int64_t row_end = Least(row_begin + args.row_words, end);
    for (; i < row_end; i += 2) {
      const int64_t column = (i - row_begin) * kWordColumns;
      const uint64_t bits = BitsOf(args.mask + row * args.columns + column, args.columns - column);
      args.words[i] = uint32_t(bits);
      if (i + 1 < row_end) args.words[i + 1] = uint32_t(bits >> kWordColumns);
    }
    i = row_end;
  }
}

void BitmapEntries(const BitmapEntriesArgs& args, int64_t task) {
  const int64_t batch = task / args.tasks, own = task % args.tasks;
  if (args.phase == BitmapPhase::kWrite) return Write(args, batch, own);
  const int64_t first = own * args.task_words, all = args.rows * args.row_words;
  args.begins[batch * (args.tasks + 1) + own + 1] =
      CountBits(args.words + batch * all + first, Least(args.task_words, all - first));
}

}  // namespace sgap::SGAP_ISA
