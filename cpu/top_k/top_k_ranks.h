// The key of a rank among the keys of scores: integers in their order. Few keys are compared with
// each other; of more, counts narrow the range where it lies, which starts from a guess.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/compress.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

// Integers in the order of the scores: kAbsent for -infinity, then NaN, then the numbers.
template <typename Acc>
using Key = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
template <typename Acc>
constexpr Key<Acc> kAbsent = sizeof(Acc) == 4 ? INT32_MIN : INT64_MIN;

template <typename Acc, int N>
inline Vector<Key<Acc>, N> KeysOf(Vector<Acc, N> scores) {
  // In integers: arithmetic and comparisons take subnormal numbers for 0 on XLA's threads.
  using Keys = Vector<Key<Acc>, N>;
  const Keys bits = BitCast<Keys>(scores), zero = {}, greatest = zero + ~kAbsent<Acc>;
  const Keys infinity = zero + BitCast<Key<Acc>>(Acc(__builtin_inf()));
  const Keys magnitude = bits & greatest;
  Keys keys = bits < 0 ? zero - magnitude - 1 : bits;
  keys = magnitude == 0 ? zero : keys;
  keys = bits == (infinity | ~greatest) ? zero + kAbsent<Acc> : keys;
  return magnitude > infinity ? zero + (kAbsent<Acc> + 1) : keys;
}

// A number whose key this is; NaN for those of -infinity and NaN.
template <typename Acc>
inline Acc ScoreOf(Key<Acc> key) {
  return BitCast<Acc>(Key<Acc>(key < 0 ? key ^ ~kAbsent<Acc> : key));
}

// The key of a number.
template <typename Acc>
inline Key<Acc> KeyOf(Acc score) {
  const auto bits = BitCast<Key<Acc>>(score);
  return bits < 0 ? bits ^ ~kAbsent<Acc> : bits;
}

template <typename K>
constexpr int kKeyLanes = kVectorBytes / sizeof(K);

// Bit i: whether keys[i] is at least `least`, for the first of `left` keys. A whole vector is read.
template <typename K>
inline uint32_t KeysFrom(const K* keys, int64_t left, K least) {
  constexpr int N = kKeyLanes<K>;
  Vector<K, N> x;
  __builtin_memcpy(&x, keys, sizeof(x));
  const uint32_t mask = LanesFrom<K, N>(x, least);
  return left < N ? mask & ((1u << left) - 1) : mask;
}

template <typename K>
inline int64_t CountFrom(const K* keys, int64_t count, K least) {
  constexpr int N = kKeyLanes<K>, kTogether = 4;
  using Keys = Vector<K, N>;
  int64_t found = 0, i = 0;
  if (count >= kTogether * N) {  // in the lanes: a mask as an integer takes two instructions more
    Keys below[kTogether] = {};
    for (; i + kTogether * N <= count; i += kTogether * N) {
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        Keys x;
        __builtin_memcpy(&x, keys + i + j * N, sizeof(x));
        below[j] = x < least ? below[j] + 1 : below[j];
      }
    }
    found = i - FoldLanes<1, K, N>((below[0] + below[1]) + (below[2] + below[3]))[0];
  }
  for (; i < count; i += N) {
    found += __builtin_popcount(KeysFrom(keys + i, count - i, least));
  }
  return found;
}

// A key that a rank ends at: `above` keys are greater than it, and `from` are not less.
template <typename K>
struct RankedKey {
  K key;
  int32_t above, from;  // all three are returned in registers
};

template <typename K>
constexpr K kGreatestKey = ~(K(1) << (8 * sizeof(K) - 1));

// Where the key of a rank lies: from_low keys are at least `low`, which are that many or more, and
// above_high are greater than `high`, which are fewer.
template <typename K>
struct KeyRange {
  K low = ~kGreatestKey<K>, high = kGreatestKey<K>;
  int64_t from_low, above_high = 0;
};

// Takes the least and the greatest key for bounds that are none yet.
template <typename K>
void Tighten(const K* keys, int64_t count, KeyRange<K>& range) {
  K low = kGreatestKey<K>, high = ~kGreatestKey<K>;
  for (int64_t i = 0; i < count; ++i) {
    K key;
    __builtin_memcpy(&key, keys + i, sizeof(key));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  range.low = range.low < low ? low : range.low;
  range.high = range.high > high ? high : range.high;
}

constexpr int kPivots = 4;

// Narrows the range of a rank to what lies between two of the pivots, which ascend from above its
// `low` to its `high`. These are counted together: of few keys a pass takes no longer than its sums
// and the branch behind them.
template <typename K>
void Narrow(const K* keys, int64_t count, int64_t rank, const K* pivots, KeyRange<K>& range) {
  constexpr int N = kKeyLanes<K>;
  using Keys = Vector<K, N>;
  Keys below[kPivots] = {}, least[kPivots], x;
#pragma GCC unroll 4
  for (int j = 0; j < kPivots; ++j) least[j] = Keys{} + pivots[j];
  const auto add = [&]() {
#pragma GCC unroll 4
    for (int j = 0; j < kPivots; ++j) below[j] = x < least[j] ? below[j] + 1 : below[j];
  };
  int64_t i = 0;
  for (; i + N <= count; i += N) {
    __builtin_memcpy(&x, keys + i, sizeof(x));
    add();
  }
  if (i < count) {  // lanes beyond the last key are below no pivot
    __builtin_memcpy(&x, keys + i, sizeof(x));
    x = LaneNumbers<K, N>() < Keys{} + K(count - i) ? x : Keys{} + kGreatestKey<K>;
    add();
  }
  K lows[kPivots + 1] = {range.low}, highs[kPivots + 1];
  int64_t from[kPivots + 2] = {range.from_low};
  int part = 0;
#pragma GCC unroll 4
  for (int j = 0; j < kPivots; ++j) {
    lows[j + 1] = pivots[j];
    highs[j] = pivots[j] - 1;
    from[j + 1] = count - FoldLanes<1, K, N>(below[j])[0];
    part += from[j + 1] >= rank;
  }
  highs[kPivots] = range.high;
  from[kPivots + 1] = range.above_high;
  range.low = lows[part], range.high = highs[part];
  range.from_low = from[part], range.above_high = from[part + 1];
}

// x, at an address that is known only with `count`, the sum of what was packed there. A processor
// begins a load that was packed a moment ago before it knows where the stores go, and begins anew
// from there if it was wrong, which takes longer than waiting does.
template <typename T>
inline const T* AfterPacking(const T* x, int64_t count) {
  return x + (uint64_t(count) >> 62);
}

// Up to kMost keys, and of each how many of them are greater.
template <typename K>
struct FewKeys {
  static constexpr int kMost = 32, N = kKeyLanes<K>, kVectors = kMost / N;
  using Keys = Vector<K, N>;
  alignas(kVectorBytes) K keys[kMost];
  Keys above[kVectors];
  int count;

  // The first of `from`, of which whole vectors are read.
  FewKeys(const K* from, int few) : count(few) {
    if (few <= kMost / 2) {
      Compare<kMost / 2>(from);
    } else {
      Compare<kMost>(from);
    }
  }

  // The key of rank `rank` (from 1 on): as many are above equal keys, which have the ranks from
  // there on.
  RankedKey<K> OfRank(int rank) const {
    int greater = rank - 1;
    uint32_t mask = Lanes(greater);
    while (mask == 0 && greater > 0) mask = Lanes(--greater);
    return {keys[__builtin_ctz(mask | 1u << (kMost - 1))], greater,
            greater + __builtin_popcount(mask)};
  }

 private:
  // The lanes of keys that `greater` of the others are above: equal ones, or none.
  uint32_t Lanes(int greater) const {
    uint32_t mask = 0;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      mask |= LanesFrom<K, N>(-(above[v] ^ K(greater)), 0) << (v * N);
    }
    return mask & (~0u >> (kMost - count));
  }

  template <int kLanes>
  void Compare(const K* from) {
    constexpr int kFirst = kLanes / N;
    Keys x[kFirst], more[kFirst] = {};
#pragma GCC unroll 16
    for (int v = 0; v < kFirst; ++v) {
      x[v] = Keys{};
      if (v * N < count) __builtin_memcpy(&x[v], from + v * N, sizeof(Keys));
      const auto exist = LaneNumbers<K, N>() < Keys{} + K(count - v * N);
      x[v] = exist ? x[v] : Keys{} + ~kGreatestKey<K>;
      __builtin_memcpy(keys + v * N, &x[v], sizeof(Keys));
    }
#pragma GCC unroll 4
    for (int j = 0; j < kLanes; ++j) {
#pragma GCC unroll 16
      for (int v = 0; v < kFirst; ++v) more[v] = x[v] < keys[j] ? more[v] + 1 : more[v];
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) above[v] = v < kFirst ? more[v] : Keys{} + K(kMost);
  }
};

// The key of rank `rank` in one pass if it is between `low` and `high`, with so few others that
// they are compared with each other. Returns whether it is.
template <typename K>
bool RankBetween(const K* keys, int64_t count, int64_t rank, K low, K high, RankedKey<K>& found) {
  if (low == ~kGreatestKey<K>) ++low;  // what lanes beyond the last key have
  if (low > high) return false;
  constexpr int N = kKeyLanes<K>;
  using U = std::make_unsigned_t<K>;
  using Keys = Vector<K, N>;
  constexpr int kFew = FewKeys<K>::kMost;
  alignas(kVectorBytes) K packed[kFew + N];
  int few = 0;
  Keys above = {};
  // Signed, how far a key is above `low`, taken from the greatest number.
  const U top = U(low) + U(kGreatestKey<K>);
  const K least = K(U(kGreatestKey<K>) - (U(high) - U(low)));
  for (int64_t i = 0; i < count; i += N) {
    Keys x;
    __builtin_memcpy(&x, keys + i, sizeof(x));
    x = LaneNumbers<K, N>() < Keys{} + K(count - i) ? x : Keys{} + ~kGreatestKey<K>;
    above = x > high ? above + 1 : above;
    const auto below_top = BitCast<Keys>(top - BitCast<Vector<U, N>>(x));
    few += PackLanesFrom<K, N>(below_top, least, x, packed + few);
    if (few > kFew) return false;
  }
  const int64_t above_high = FoldLanes<1, K, N>(above)[0];
  if (rank <= above_high || rank > above_high + few) return false;
  found = FewKeys<K>(AfterPacking(packed, few), few).OfRank(int(rank - above_high));
  found.above += int32_t(above_high), found.from += int32_t(above_high);
  return true;
}

// Where the key of a rank is expected: `apart` is about how far from there it often is, or 0 where
// nothing is known.
struct KeyGuess {
  double key = 0, apart = 0;
  bool close = false;  // as many keys as FewKeys has, or fewer, are within twice of that

  template <typename K>
  K At(double times) const {
    constexpr double kInfinity = sizeof(K) == 4 ? 0x7f800000 : 0x7ff0000000000000;
    const double x = key + times * apart;
    return K(x < -kInfinity ? -kInfinity : x < kInfinity ? x : kInfinity);
  }
};

// Pivots around the key of rank `rank` of `count`, by a few of the keys. Behind a key that several
// of these have comes the next greater one: if the rank is among equal keys, two pivots bound them.
template <typename K>
inline void SamplePivots(const K* keys, int64_t count, int64_t rank, K* pivots) {
  constexpr int kMost = FewKeys<K>::kMost;
  const double step = double(count) / kMost;
  alignas(kVectorBytes) K taken[kMost];
  for (int i = 0; i < kMost; ++i) {
    __builtin_memcpy(&taken[i], keys + int64_t(i * step), sizeof(K));
  }
  const FewKeys<K> sample(taken, kMost);
  const auto middle = int((double(rank) + 0.5) / step);
  for (int j = 0; j < kPivots; ++j) {
    const int place = middle + 6 - 3 * j;
    const K key = sample.OfRank(place < 1 ? 1 : place < kMost ? place : kMost).key;
    const K last = j > 0 ? pivots[j - 1] : ~kGreatestKey<K>;
    pivots[j] = key > last ? key : last < kGreatestKey<K> ? last + 1 : last;
  }
}

// A key that at least k of `count` keys are not less than, and at most k + slack: the k-th greatest
// one where equal keys leave no other. 1 <= k <= count. Unless they are k + slack at most, how many
// are greater is known too.
template <typename K>
RankedKey<K> RankKeys(const K* keys, int64_t count, int64_t k, int64_t slack,
                      const KeyGuess& guess = {}) {
  using U = std::make_unsigned_t<K>;
  constexpr int64_t kFew = FewKeys<K>::kMost;
  RankedKey<K> found;
  KeyRange<K> range;
  range.from_low = count;
  K pivots[kPivots];
  if (count <= kFew) {
    found = FewKeys<K>(keys, int(count)).OfRank(int(k));
    return found;
  }
  if (guess.apart > 0) {
    const K low = guess.At<K>(-2), high = guess.At<K>(2);
    if (guess.close && RankBetween(keys, count, k, low, high, found)) return found;
    for (int j = 0; j < kPivots; ++j) pivots[j] = guess.At<K>(2 * j + 1 - kPivots);
    Narrow(keys, count, k, pivots, range);
  } else {
    SamplePivots(keys, count, k, pivots);
    Narrow(keys, count, k, pivots, range);
  }
  for (int step = 0; range.from_low > k + slack && range.low < range.high; ++step) {
    const int64_t size = range.from_low - range.above_high;
    if (size <= kFew && RankBetween(keys, count, k, range.low, range.high, found)) return found;
    const bool bounded = range.from_low < count && range.above_high > 0;
    if (step == 0 && !bounded) Tighten(keys, count, range);
    const U span = U(range.high) - U(range.low);
    if (span == 0) break;
    if (step == 1 && guess.apart > 0) {  // the guess was wrong
      SamplePivots(keys, count, k, pivots);
      for (K& pivot : pivots) {
        pivot = pivot > range.low ? pivot : range.low + 1;
        pivot = pivot < range.high ? pivot : range.high;
      }
      Narrow(keys, count, k, pivots, range);
      continue;
    }
    // On a straight line between the counts; in turns with equal parts, as a bound.
    double first = 0.2, apart = 0.2;
    if (step % 2 == 0) {
      apart = 8 / double(size) + 1. / 32;
      first = (double(range.from_low - k) + 0.5) / double(size) - 1.5 * apart;
    }
    for (int j = 0; j < kPivots; ++j) {
      const double at = first + j * apart;
      const U part = U(double(span) * (at < 0 ? 0 : at < 0.99 ? at : 0.99));
      pivots[j] = K(U(range.low) + (part < span ? part + 1 : span));
    }
    Narrow(keys, count, k, pivots, range);
  }
  if (range.from_low == count) Tighten(keys, count, range);
  return {range.low, int32_t(range.above_high), int32_t(range.from_low)};
}

template <typename K>
K KeyOfRank(const K* keys, int64_t count, int64_t k, int64_t slack) {
  return RankKeys(keys, count, k, slack).key;
}

}  // namespace sgap::SGAP_ISA
