// What the checks of a structure's levels look at, piece by piece.
#pragma once

#include <cstdint>

namespace sgap {

enum class LevelCheck : uint8_t {
  kRange,   // numbers [begin, end) lie in [0, size)
  kRises,   // each but the first is more than the one before
  kStays,   // ... is not less than the one before
  kStarts,  // counts against kRises or kStays: that of `numbers` at offsets [begin, end) may fall
  kTuples,  // kStays of what `levels` arrays say together, the first most
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
  int64_t* found;  // [pieces]: numbers out of range, falls, or (negative) falls that may be
  const int32_t* const* tuples;
  int levels;
};

namespace SGAP_ISA {
void CheckLevels(const CheckLevelsArgs& args, int64_t task);
}  // namespace SGAP_ISA

}  // namespace sgap
