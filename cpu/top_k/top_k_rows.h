// The selection of one row. A threshold from the row before, or from a sample of this one, leaves
// few more than k candidates in one pass over the scores; a search over their keys then finds the
// k-th greatest, and the candidates, which are by ascending column, are written from there up. The
// result is exact whatever the threshold is: with too few candidates the whole row is one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/compress.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

constexpr int64_t kLeastSampled = 64, kMostSampled = 1024;  // scores
constexpr int64_t kScoresOfSample = 16;                     // of the row for each of the sample
constexpr int kMostRowsWithoutTrial = 63;

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
  int64_t above, from;
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
  found.above += above_high, found.from += above_high;
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

// Pivots around the key of rank `rank` of `count`, by a few of the keys.
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
    pivots[j] = key > ~kGreatestKey<K> ? key : ~kGreatestKey<K> + 1;
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
  found = {range.low, range.above_high, range.from_low};
  return found;
}

template <typename K>
K KeyOfRank(const K* keys, int64_t count, int64_t k, int64_t slack) {
  return RankKeys(keys, count, k, slack).key;
}

// What the selection of a row needs: `size` scores and 16 more, their keys and columns. The rows of
// a task often have like scores: the threshold of the row before is tried, and after each trial
// that fails more rows go without one.
template <typename T>
struct RowScratch {
  using Acc = Accumulator<T>;
  Acc* scores;
  Key<Acc>* keys;
  int32_t* columns;
  Acc threshold = -Acc(__builtin_inf());
  int without_trial = 0, pause = 0;
  Acc margin = 0;           // candidates are all scores of at least the threshold less this
  Acc reached = 0;          // which was this, or -infinity where the whole row is
  double key_distance = 0;  // of neighbours between `reached` and the k-th score, on average
  double guess_apart = 0;   // in keys

  RowScratch(char* memory, int64_t size) {
    const int64_t room = size + 16;  // TopKScratch
    scores = reinterpret_cast<Acc*>(memory);
    keys = reinterpret_cast<Key<Acc>*>(scores + room);
    columns = reinterpret_cast<int32_t*>(keys + room);
  }

  // Where the k-th key of so many candidates may be, if rows before are like this one.
  KeyGuess Guess(int64_t candidates, int64_t k) const {
    constexpr double kClose = FewKeys<Key<Acc>>::kMost / 4 - 1.5;
    const bool close = guess_apart < 1.5 * kClose;
    const double apart = close && guess_apart > kClose ? kClose : guess_apart;
    return {double(KeyOf(reached)) + double(candidates - k) * key_distance, apart * key_distance,
            close};
  }

  char* End(int64_t size) const { return reinterpret_cast<char*>(columns + size + 16); }

  // How many candidates more than k are asked for.
  static int64_t Few(int64_t k) { return int64_t(4 * __builtin_sqrt(double(k))) + 4; }

  // A threshold that leaves k and a few more of a row like this one, whose k-th score is `kth` of
  // more candidates: on a straight line to the last of these.
  void TryNext(Acc kth, int64_t candidates, int64_t k) {
    const int64_t few = Few(k);
    Learn(kth, reached, candidates - k, few);
    if (candidates <= k + 2 * few) return;
    threshold = kth - (kth - reached) * (Acc(few) / Acc(candidates - k));
  }

  // The same for a row without a threshold, as short rows are at first: all its keys are at hand.
  void TryNextOfWhole(Acc kth, const Key<Acc>* keys, int64_t count, int64_t k) {
    const int64_t few = Few(k);
    if (without_trial > 0 || count < k + 2 * few) return;
    const Key<Acc> key = KeyOfRank(keys, count, k + few, few / 4);
    if (key <= kAbsent<Acc> + 1) return;
    threshold = ScoreOf<Acc>(key);
    Learn(kth, threshold, few, few);
  }

 private:
  // `apart` candidates are between the k-th score and another one.
  void Learn(Acc kth, Acc other, int64_t apart, int64_t few) {
    const double found = (double(KeyOf(kth)) - double(KeyOf(other))) / double(apart);
    key_distance = key_distance > 0 ? 0.75 * key_distance + 0.25 * found : found;
    guess_apart = 0.7 * __builtin_sqrt(double(few)) + 1;  // of these as many as the root are more
  }
};

// A score that about k scores of the row are not less than, rather more; NaN or -infinity for none.
template <typename T>
Accumulator<T> Threshold(const T* scores, int64_t count, int64_t k, const RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  constexpr Acc kNone = -Acc(__builtin_inf());
  if (count < 4 * kLeastSampled) return kNone;
  int64_t sample = count / kScoresOfSample;
  sample = sample < kLeastSampled ? kLeastSampled : sample > kMostSampled ? kMostSampled : sample;
  sample -= sample % N;
  const double expected = double(sample) * double(k) / double(count);
  const auto rank = int64_t(expected + 3 * __builtin_sqrt(expected) + 2);
  if (rank > sample / 2) return kNone;
  const int64_t step = count / sample;
  for (int64_t i = 0; i < sample; i += N) {
    Vector<Acc, N> x;
    for (int lane = 0; lane < N; ++lane) x[lane] = LoadScalar(scores + (i + lane) * step);
    const auto keys = KeysOf<Acc, N>(x);
    __builtin_memcpy(scratch.keys + i, &keys, sizeof(keys));
  }
  return ScoreOf<Acc>(KeyOfRank(scratch.keys, sample, rank, rank / 8 + 1));
}

// The scores of at least `least`, where subnormal numbers may count as 0, and their columns.
// Returns how many; few of a vector are expected, mostly kMostly at most. Prefetches the scores
// `next` further on.
template <typename T, int kMostly = kLanes<T> / 2>
int64_t Candidates(const T* scores, int64_t count, int64_t next, Accumulator<T> least,
                   const RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  Vector<int32_t, N> columns = LaneNumbers<int32_t, N>();
  Acc* const found_scores = scratch.scores;
  int32_t* const found_columns = scratch.columns;
  int64_t found = 0, i = 0;
  const auto append = [&](Vector<Acc, N> x) {
    found += unsigned(PackLanesFrom<Acc, N, kMostly>(x, least, columns, found_scores + found,
                                                     found_columns + found));
    columns += N;
  };
  for (; i + N <= count; i += N) {
    // To the second level of caches: more of them wait for memory at once.
    __builtin_prefetch(scores + next + i, 0, 2);
    append(Kept(Load<T, N>(scores + i)));
  }
  if (i < count) {
    Vector<Acc, N> x = LoadPartial<T, N>(scores + i, int(count - i));
    for (int lane = int(count - i); lane < N; ++lane) x[lane] = -Acc(__builtin_inf());
    append(x);
  }
  return found;
}

// At least k candidates and not many more, or fewer than k, where any score may be one.
template <typename T>
int64_t SomeCandidates(const T* scores, int64_t count, int64_t k, int64_t next,
                       RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  const auto found_from = [&](Acc least) -> int64_t {
    if (!(least > -Acc(__builtin_inf()))) return 0;
    scratch.reached = least - scratch.margin;
    constexpr int N = kLanes<T>;
    const auto candidates = 16 * k <= 5 * count ? Candidates<T, N / 2> : Candidates<T, N>;
    return candidates(scores, count, next, scratch.reached, scratch);
  };
  if (scratch.without_trial > 0) {
    --scratch.without_trial;
  } else if (scratch.threshold > -Acc(__builtin_inf())) {
    const int64_t found = found_from(scratch.threshold);
    if (found >= k && found <= 4 * k + 4 * kLeastSampled) {
      scratch.pause = 0;
      return found;
    }
    scratch.without_trial = scratch.pause;
    scratch.pause = 2 * scratch.pause + 1 < kMostRowsWithoutTrial ? 2 * scratch.pause + 1
                                                                  : kMostRowsWithoutTrial;
  }
  scratch.threshold = Threshold(scores, count, k, scratch);
  return found_from(scratch.threshold);
}

// Writes the scores and columns of `selected` of the candidates, which have these keys: those with
// a key above last.key and the first ones with that key, all of them without kTies. It may be to
// the front of the candidates themselves.
template <bool kTies, typename Acc, typename K>
void WriteSelected(const K* keys, const Acc* from_scores, const int32_t* from_columns,
                   int64_t count, const RankedKey<K>& last, int64_t selected, Acc* scores,
                   int32_t* columns) {
  constexpr int N = kKeyLanes<K>;
  const K least = last.key;
  int64_t ties = selected - last.above, written = 0;
  for (int64_t i = 0; i < count; i += N) {
    Vector<Acc, N> score;
    Vector<int32_t, N> column;
    __builtin_memcpy(&score, from_scores + i, sizeof(score));
    __builtin_memcpy(&column, from_columns + i, sizeof(column));
    uint32_t mask = KeysFrom(keys + i, count - i, least);
    if constexpr (kTies) {
      uint32_t equal = mask & ~KeysFrom<K>(keys + i, N, least + 1);
      for (; __builtin_popcount(equal) > ties; equal &= ~(1u << (31 - __builtin_clz(equal)))) {
        mask &= ~(1u << (31 - __builtin_clz(equal)));
      }
      ties -= __builtin_popcount(equal);
    }
    // Behind i + N nothing is written before it is read.
    written += PackLanes<Acc, N>(mask, score, column, scores + written, columns + written,
                                 selected - written);
  }
}

// Candidates, at least k of them or all that the row has. Returns how many.
template <typename T>
int64_t CandidatesOrAll(const T* scores, int64_t count, int64_t k, int64_t next,
                        RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  const int64_t candidates = SomeCandidates(scores, count, k, next, scratch);
  if (candidates >= k) return candidates;
  scratch.reached = -Acc(__builtin_inf());
  Vector<int32_t, N> columns = LaneNumbers<int32_t, N>();
  for (int64_t i = 0; i < count; i += N, columns += N) {
    const int64_t left = count - i;
    const auto x = left >= N ? Load<T, N>(scores + i) : LoadPartial<T, N>(scores + i, int(left));
    __builtin_memcpy(scratch.scores + i, &x, sizeof(x));
    __builtin_memcpy(scratch.columns + i, &columns, sizeof(columns));
  }
  return count;
}

// The keys of the candidates. These are the bits of positive numbers: they may be read as such,
// with __builtin_memcpy alone.
template <typename T>
const Key<Accumulator<T>>* KeysOfCandidates(int64_t candidates, const RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  if (scratch.reached > 0) return reinterpret_cast<const Key<Acc>*>(scratch.scores);
  for (int64_t i = 0; i < candidates; i += N) {
    Vector<Acc, N> x;
    __builtin_memcpy(&x, scratch.scores + i, sizeof(x));
    const auto keys = KeysOf<Acc, N>(x);
    __builtin_memcpy(scratch.keys + i, &keys, sizeof(keys));
  }
  return scratch.keys;
}

// The k greatest of `count` scores: their columns, and the scores too where `values` is no null.
// Returns how many. Prefetches the scores `next` further on: those of the row that comes next.
template <typename T>
int32_t SelectRow(const T* scores, int64_t count, int64_t k, int64_t next, RowScratch<T>& scratch,
                  int32_t* indices, T* values) {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  if (k <= 0) return 0;
  const int64_t candidates = CandidatesOrAll(scores, count, k, next, scratch);
  const K* keys = AfterPacking(KeysOfCandidates(candidates, scratch), candidates);
  const bool some = scratch.reached > -Acc(__builtin_inf());
  RankedKey<K> last{kAbsent<Acc> + 1, 0, candidates};  // all that are present
  if (!some) last.from = CountFrom(keys, candidates, last.key);
  int64_t selected = last.from;
  if (selected > k) {
    last = RankKeys(keys, candidates, k, 0, some ? scratch.Guess(candidates, k) : KeyGuess{});
    selected = k;
    const Acc kth = ScoreOf<Acc>(last.key);
    some ? scratch.TryNext(kth, candidates, k) : scratch.TryNextOfWhole(kth, keys, candidates, k);
  }
  const auto write =
      last.from == selected ? WriteSelected<false, Acc, K> : WriteSelected<true, Acc, K>;
  Acc* to = scratch.scores;
  if constexpr (std::is_same_v<T, Acc>) to = values ? values : to;
  write(keys, scratch.scores, scratch.columns, candidates, last, selected, to, indices);
  if constexpr (!std::is_same_v<T, Acc>) {  // the same bits, those of NaN too
    for (int64_t i = 0; values && i < selected; ++i) values[i] = scores[indices[i]];
  }
  return int32_t(selected);
}

}  // namespace sgap::SGAP_ISA
