// What a row keeps of its messages in one vector of columns, for gspmm_kernel.cc.
#pragma once

#include "row_reduce_loops.h"
#include "simd.h"

namespace sgap::SGAP_ISA {

// Integers of a size with T's accumulators: comparisons give them.
template <typename T>
using Lane = std::conditional_t<sizeof(Accumulator<T>) == 4, int32_t, int64_t>;

template <typename T>
inline Vector<Lane<T>, kLanes<T>> LoadPositions(const int32_t* source, int count) {
  constexpr int kSize = kLanes<T>;
  Vector<int32_t, kSize> positions = {};
  if (count == kSize) {
    std::memcpy(&positions, source, sizeof(positions));
  } else {
    for (int i = 0; i < count; ++i) positions[i] = source[i];
  }
  return __builtin_convertvector(positions, Vector<Lane<T>, kSize>);
}

template <typename T>
inline void StorePositions(int32_t* target, Vector<Lane<T>, kLanes<T>> x, int count) {
  constexpr int kSize = kLanes<T>;
  const auto positions = __builtin_convertvector(x, Vector<int32_t, kSize>);
  if (count == kSize) {
    std::memcpy(target, &positions, sizeof(positions));
  } else {
    for (int i = 0; i < count; ++i) target[i] = positions[i];
  }
}

// The greatest message (the least with kMin) and, with kPositions, where the first of these is; a
// NaN is greater and less than every number.
template <typename T, bool kAdd, bool kMin, bool kPositions>
struct ExtremumFold {
  using Number = T;
  using Messages = Vector<Accumulator<T>, kLanes<T>>;
  using Positions = Vector<Lane<T>, kLanes<T>>;
  static constexpr bool kPicks = false, kNotes = kPositions;

  Messages kept = {};
  Positions at = Positions{} - 1;

  void Take(Accumulator<T> value, Lane<T> position, Messages x, bool first) {
    ExtremumFold other;
    if constexpr (kAdd) {
      other.kept = x + value;
    } else {
      other.kept = x * value;
    }
    if constexpr (kPositions) other.at = Positions{} + position;
    Merge(other, first);
  }

  void Merge(const ExtremumFold& other, bool first) {
    if (first) {
      *this = other;
      return;
    }
    Positions taken;
    if constexpr (kMin) {
      taken = (kept == kept) & ~(other.kept >= kept);
    } else {
      taken = (kept == kept) & ~(other.kept <= kept);
    }
    kept = taken ? other.kept : kept;
    if constexpr (kPositions) at = taken ? other.at : at;
  }
};

// The sum of value * x over the entries that were picked.
template <typename T>
struct PickedFold {
  using Number = T;
  using Sums = Vector<Accumulator<T>, kLanes<T>>;
  using Positions = Vector<Lane<T>, kLanes<T>>;
  static constexpr bool kPicks = true, kNotes = false;

  Sums kept = {};

  void Take(Accumulator<T> value, Lane<T> position, Sums x, Positions picked) {
    kept += picked == position ? value * x : Sums{};
  }

  void Merge(const PickedFold& other, bool) { kept += other.kept; }
};

}  // namespace sgap::SGAP_ISA
