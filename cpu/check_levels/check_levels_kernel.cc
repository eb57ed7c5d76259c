// One piece of a structure, without a branch per value.
#include "cpu/check_levels/check_levels.h"

namespace sgap::SGAP_ISA {
namespace {

// Vectors of 32-bit counts: no piece is longer than they hold.
int64_t OutOfRange(const int32_t* numbers, int64_t begin, int64_t end, int64_t size) {
  const uint32_t limit = size > INT32_MAX ? uint32_t{1} << 31 : static_cast<uint32_t>(size);
  uint32_t count = 0;
  for (int64_t p = begin; p < end; ++p) count += static_cast<uint32_t>(numbers[p]) >= limit;
  return count;
}

int64_t Falls(const int32_t* numbers, int64_t begin, int64_t end, bool strict) {
  uint32_t count = 0;
  if (strict) {
    for (int64_t p = begin; p < end; ++p) count += numbers[p] <= numbers[p - 1];
  } else {
    for (int64_t p = begin; p < end; ++p) count += numbers[p] < numbers[p - 1];
  }
  return count;
}

// One pass for both. However many numbers are out of range, the result is more than all falls.
int64_t FallsInRange(const int32_t* numbers, int64_t begin, int64_t end, bool strict,
                     int64_t size) {
  constexpr int64_t kPart = 1024;
  int64_t falls = 0, outside = 0;
  for (int64_t p = begin; p < end; p += kPart) {
    const int64_t stop = end - p < kPart ? end : p + kPart;
    falls += Falls(numbers, p, stop, strict);
    outside += OutOfRange(numbers, p - 1, stop, size);
  }
  return falls + (outside > 0 ? int64_t{1} << 40 : 0);
}

// Of segments that have an entry. Offsets may be anything: kRises and kStays tell of that.
int64_t FallsAtStarts(const LevelPiece& piece) {
  int64_t count = 0;
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const int64_t p = piece.offsets[i];
    if (p < 1 || p >= piece.size || piece.offsets[i + 1] <= p) continue;
    const int32_t before = piece.numbers[p - 1], here = piece.numbers[p];
    count += piece.strict ? here <= before : here < before;
  }
  return count;
}

int64_t FallsOfTuples(const CheckLevelsArgs& args, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t p = begin; p < end; ++p) {
    int level = 0;
    while (level < args.levels && args.tuples[level][p] == args.tuples[level][p - 1]) ++level;
    count += level < args.levels && args.tuples[level][p] < args.tuples[level][p - 1];
  }
  return count;
}

}  // namespace

void CheckLevels(const CheckLevelsArgs& args, int64_t task) {
  const LevelPiece& piece = args.pieces[task];
  switch (piece.check) {
    case LevelCheck::kRange:
      args.found[task] = OutOfRange(piece.numbers, piece.begin, piece.end, piece.size);
      break;
    case LevelCheck::kRises:
    case LevelCheck::kStays: {
      const bool strict = piece.check == LevelCheck::kRises;
      args.found[task] =
          piece.size < 0 ? Falls(piece.numbers, piece.begin, piece.end, strict)
                         : FallsInRange(piece.numbers, piece.begin, piece.end, strict, piece.size);
      break;
    }
    case LevelCheck::kStarts:
      args.found[task] = -FallsAtStarts(piece);
      break;
    case LevelCheck::kTuples:
      args.found[task] = FallsOfTuples(args, piece.begin, piece.end);
      break;
  }
}

}  // namespace sgap::SGAP_ISA
