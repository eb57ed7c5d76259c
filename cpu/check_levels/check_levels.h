// What the checks of a structure's levels look at, piece by piece.
#pragma once

#include <cstdint>

namespace sgap {

enum class LevelCheck : uint8_t {
  kRange,   // values [begin, end) lie in [0, size)
  kRises,   // each value but the first is more than the one before
  kStays,   // each value but the first is not less than the one before
  kStarts,  // not a check: counts the falls of kRises or kStays that are allowed, because they are
            // where a segment starts, at offsets [begin, end)
  kTuples,  // kStays of tuples, one value from each of `levels` arrays, in lexicographic order
};

struct LevelPiece {
  LevelCheck check;
  bool strict;             // of kStarts: against kRises
  int level;               // that a fall counts for
  int64_t begin, end;      // begin > 0 but for kRange and kStarts
  const int32_t* numbers;  // coordinates or offsets
  const int32_t* offsets;  // of kStarts
  int64_t size;  // of kRange; of kRises and kStays likewise, were it not negative; of kStarts, how
                 // many coordinates there are
};

struct CheckLevelsArgs {
  const LevelPiece* pieces;
  int64_t* found;  // [pieces]: values out of range, falls, or (negative) falls that are allowed
  const int32_t* const* tuples;
  int levels;
};

}  // namespace sgap
