// What a row keeps of its messages in one vector of columns, for gspmm_kernel.cc.
#pragma once

#include "cpu/row_reduce/row_reduce_loops.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// Integers of a size with T's accumulators: comparisons give them.
template <typename T>
using Lane = std::conditional_t<sizeof(Accumulator<T>) == 4, int32_t, int64_t>;

template <typename T>
inline Vector<Lane<T>, kLanes<T>> LoadPositions(const int32_t* source, int count) {
  constexpr int kSize = kLanes<T>;
  Vector<int32_t, kSize> positions;
  if (count == kSize) {
    std::memcpy(&positions, source, sizeof(positions));
  } else {  // by the masked loads of floats, which move any bits
    const auto* bits = reinterpret_cast<const float*>(source);
    positions = BitCast<Vector<int32_t, kSize>>(LoadPartial<float, kSize>(bits, count));
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

#define SGAP_INLINE __attribute__((always_inline)) inline

// How a message meets what is kept: as the first, by one comparison, which is right while no
// message but the first is NaN, or with a look at NaN.
enum class Taking { kFirst, kFast, kExactly };

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
  Messages check = {};  // NaN once a message was NaN or infinite

  static Messages Message(Accumulator<T> value, Messages x) {
    if constexpr (kAdd) {
      return x + value;
    } else {
      return x * value;
    }
  }

  void Start() {
    kept = Messages{};
    at = Positions{} - 1;
  }

  template <Taking kTaking>
  SGAP_INLINE void Take(Accumulator<T> value, Lane<T> position, Messages x) {
    ExtremumFold other;
    other.kept = Message(value, x);
    other.at = Positions{} + position;
    if constexpr (kTaking == Taking::kExactly) {
      Merge(other);
      return;
    }
    check += other.kept * 0;
    if constexpr (kTaking == Taking::kFirst) {
      kept = other.kept;
      at = other.at;
    } else if constexpr (kMin) {
      at = other.kept < kept ? other.at : at;
      kept = other.kept < kept ? other.kept : kept;
    } else {
      at = other.kept > kept ? other.at : at;
      kept = other.kept > kept ? other.kept : kept;
    }
  }

  void Merge(const ExtremumFold& other) {
    Positions taken;
    if constexpr (kMin) {
      taken = (kept == kept) & ~(other.kept >= kept);
    } else {
      taken = (kept == kept) & ~(other.kept <= kept);
    }
    kept = taken ? other.kept : kept;
    at = taken ? other.at : at;
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

  void Start() { kept = Sums{}; }

  SGAP_INLINE void Take(Accumulator<T> value, Lane<T> position, Sums x, Positions picked) {
    kept += picked == position ? value * x : Sums{};
  }

  void Merge(const PickedFold& other) { kept += other.kept; }
};

}  // namespace sgap::SGAP_ISA
