// The selection of one row. A threshold from a sample of the row leaves few more than k candidates
// in one pass over the scores; a search over their keys then finds the k-th greatest, and the
// candidates, which are by ascending column, are written from there up. The result is exact
// whatever the sample says: with too few candidates the whole row is one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/lane_sums.h"
#include "cpu/simd/merge_lanes.h"
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

// StoreLanes, which takes the lanes one by one with AVX2: there they are packed by a table.
template <typename T, int N, bool kSeldom = false>
inline void PackLanes(uint32_t mask, Vector<T, N> x, Vector<int32_t, N> numbers, T* target,
                      int32_t* target_numbers) {
#if defined(SGAP_KEY_SORT) && SGAP_KEY_SORT == 8
  if constexpr (N == 8 && sizeof(T) == 4) {
    MergeLanes::StoreBits(mask, BitCast<__m256i>(numbers), BitCast<__m256>(x), target_numbers,
                          reinterpret_cast<float*>(target));
    return;
  } else if constexpr (N == 4 && sizeof(T) == 8) {
    const uint32_t halves = (mask & 1) * 3 + (mask & 2) * 6 + (mask & 4) * 12 + (mask & 8) * 24;
    const auto set = [](uint32_t bits) {
      return _mm_loadl_epi64((const __m128i*)kSetBits.of[bits]);
    };
    const __m256i packed =
        _mm256_permutevar8x32_epi32(BitCast<__m256i>(x), _mm256_cvtepu8_epi32(set(halves)));
    const __m128 packed_numbers =
        _mm_permutevar_ps(BitCast<__m128>(numbers), _mm_cvtepu8_epi32(set(mask)));
    __builtin_memcpy(target, &packed, sizeof(packed));
    __builtin_memcpy(target_numbers, &packed_numbers, sizeof(packed_numbers));
    return;
  }
#endif
  StoreLanes<T, N, kSeldom>(mask, x, numbers, target, target_numbers);
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

constexpr int kFewKeys = 16;

// The key of rank `rank` (from 1 on) among those from `low` to `high`, which are kFewKeys at most.
template <typename K>
K KeyOfRankAmongFew(const K* keys, int64_t count, K low, K high, int64_t rank) {
  constexpr int N = kKeyLanes<K>;
  K few[kFewKeys + N];
  int32_t places[kFewKeys + N];
  int found = 0;
  for (int64_t i = 0; i < count; i += N) {
    const uint32_t mask = KeysFrom(keys + i, count - i, low) & ~KeysFrom<K>(keys + i, N, high + 1);
    if (mask == 0) continue;
    Vector<K, N> x;
    __builtin_memcpy(&x, keys + i, sizeof(x));
    PackLanes<K, N>(mask, x, LaneNumbers<int32_t, N>(), few + found, places + found);
    found += __builtin_popcount(mask);
  }
  for (int i = found; i < kFewKeys; ++i) few[i] = few[0];
  K above[kFewKeys] = {};
  for (int j = 0; j < found; ++j) {
    for (int i = 0; i < kFewKeys; ++i) above[i] += few[j] > few[i];
  }
  K least = high;
  for (int i = 0; i < kFewKeys; ++i) least = above[i] < K(rank) && few[i] < least ? few[i] : least;
  return least;
}

// The logarithm of x > 0, on a straight line between powers of two.
inline double Log2(double x) {
  const auto bits = BitCast<int64_t>(x);
  return double(bits) * 0x1p-52 - 1023;
}

// A key that at least k of `count` keys are not less than, and at most k + slack: the k-th greatest
// one where equal keys leave no other. 1 <= k <= count.
template <typename K>
K KeyOfRank(const K* keys, int64_t count, int64_t k, int64_t slack) {
  K low = keys[0], high = keys[0];
  for (int64_t i = 0; i < count; ++i) {
    low = keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
  // At least k keys are >= low, and fewer than k are > high.
  int64_t from_low = count, above_high = 0;
  for (int step = 1; low < high; ++step) {
    if (from_low - above_high <= kFewKeys) {
      return KeyOfRankAmongFew(keys, count, low, high, k - above_high);
    }
    using U = std::make_unsigned_t<K>;
    const U span = U(high) - U(low);
    U part = span / 2;
    if (step == 1 && count > k) {  // as if the logarithm of the count fell on a straight line
      part = U(double(span) * (Log2(double(count) / double(k)) / Log2(double(count))));
    } else if (step % 4 !=
               0) {  // on a straight line between the counts; else the middle, as a bound
      const double right = double(from_low - k) + 0.5;
      part = U(double(span) * (right / double(from_low - above_high)));
    }
    const K middle = K(U(low) + (part < span ? part + 1 : span));
    const int64_t found = CountFrom(keys, count, middle);
    if (found >= k && found <= k + slack) return middle;
    if (found > k) {
      low = middle;
      from_low = found;
    } else {
      high = middle - 1;
      above_high = found;
    }
  }
  return low;
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
  Acc margin = 0;   // candidates are all scores of at least the threshold less this
  Acc reached = 0;  // which was this, or -infinity where the whole row is

  RowScratch(char* memory, int64_t size) {
    const int64_t room = size + 16;  // TopKScratch
    scores = reinterpret_cast<Acc*>(memory);
    keys = reinterpret_cast<Key<Acc>*>(scores + room);
    columns = reinterpret_cast<int32_t*>(keys + room);
  }

  char* End(int64_t size) const { return reinterpret_cast<char*>(columns + size + 16); }

  // A threshold that leaves k and a few more of a row like this one, whose k-th score is `kth` of
  // more candidates: on a straight line to the last of these.
  void TryNext(Acc kth, int64_t candidates, int64_t k) {
    const auto few = int64_t(4 * __builtin_sqrt(double(k))) + 4;
    if (candidates <= k + 2 * few) return;
    threshold = kth - (kth - reached) * (Acc(few) / Acc(candidates - k));
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
// Returns how many. Prefetches the scores `next` further on.
template <typename T>
int64_t Candidates(const T* scores, int64_t count, int64_t next, Accumulator<T> least,
                   const RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  Vector<int32_t, N> columns = LaneNumbers<int32_t, N>();
  Acc* const found_scores = scratch.scores;
  int32_t* const found_columns = scratch.columns;
  int64_t found = 0, i = 0;
  const auto append = [&](Vector<Acc, N> x) {
    const uint32_t mask = LanesFrom<Acc, N>(x, least);
    PackLanes<Acc, N, true>(mask, x, columns, found_scores + found, found_columns + found);
    found += __builtin_popcount(mask);
    columns += N;
  };
  for (; i + N <= count; i += N) {
    // To the second level of caches: more of them wait for memory at once.
    __builtin_prefetch(scores + next + i, 0, 2);
    append(Load<T, N>(scores + i));
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
    return Candidates(scores, count, next, scratch.reached, scratch);
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

// Moves the scores and columns of the selected candidates to the front: those with keys above
// `kept`, of which there are `above`, and the first `ties` of those whose key equals it. Returns
// how many.
template <typename T, typename K>
int64_t Keep(const RowScratch<T>& scratch, int64_t count, K kept, int64_t above, int64_t ties) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  const K* keys = scratch.keys;
  int64_t selected = 0;
  // Behind i + N nothing is written before it is read.
  const auto move = [&](int64_t i, uint32_t mask) {
    Vector<Acc, N> score;
    Vector<int32_t, N> column;
    __builtin_memcpy(&score, scratch.scores + i, sizeof(score));
    __builtin_memcpy(&column, scratch.columns + i, sizeof(column));
    PackLanes<Acc, N>(mask, score, column, scratch.scores + selected, scratch.columns + selected);
    selected += __builtin_popcount(mask);
  };
  if (ties == CountFrom(keys, count, kept) - above) {
    for (int64_t i = 0; i < count; i += N) move(i, KeysFrom(keys + i, count - i, kept));
    return selected;
  }
  for (int64_t i = 0; i < count; i += N) {
    uint32_t mask = KeysFrom(keys + i, count - i, kept);
    uint32_t equal = mask & ~KeysFrom<K>(keys + i, N, kept + 1);
    for (; __builtin_popcount(equal) > ties; equal &= ~(1u << (31 - __builtin_clz(equal)))) {
      mask &= ~(1u << (31 - __builtin_clz(equal)));
    }
    ties -= __builtin_popcount(equal);
    move(i, mask);
  }
  return selected;
}

// Candidates, at least k of them or all that the row has, and their keys. Returns how many.
template <typename T>
int64_t CandidatesWithKeys(const T* scores, int64_t count, int64_t k, int64_t next,
                           RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  int64_t candidates = SomeCandidates(scores, count, k, next, scratch);
  if (candidates < k) {
    candidates = count;
    scratch.reached = -Acc(__builtin_inf());
    Vector<int32_t, N> columns = LaneNumbers<int32_t, N>();
    for (int64_t i = 0; i < count; i += N, columns += N) {
      const int64_t left = count - i;
      const auto x = left >= N ? Load<T, N>(scores + i) : LoadPartial<T, N>(scores + i, int(left));
      __builtin_memcpy(scratch.scores + i, &x, sizeof(x));
      __builtin_memcpy(scratch.columns + i, &columns, sizeof(columns));
    }
  }
  if (scratch.reached > 0) {  // the bits of positive numbers are their keys
    __builtin_memcpy(scratch.keys, scratch.scores, size_t(candidates) * sizeof(Acc));
    return candidates;
  }
  for (int64_t i = 0; i < candidates; i += N) {
    Vector<Acc, N> x;
    __builtin_memcpy(&x, scratch.scores + i, sizeof(x));
    const auto keys = KeysOf<Acc, N>(x);
    __builtin_memcpy(scratch.keys + i, &keys, sizeof(keys));
  }
  return candidates;
}

// The k greatest of `count` scores: their columns, and the scores too where `values` is no null.
// Returns how many. Prefetches the scores `next` further on: those of the row that comes next.
template <typename T>
int32_t SelectRow(const T* scores, int64_t count, int64_t k, int64_t next, RowScratch<T>& scratch,
                  int32_t* indices, T* values) {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  if (k <= 0) return 0;
  const int64_t candidates = CandidatesWithKeys(scores, count, k, next, scratch);
  const bool some = scratch.reached > -Acc(__builtin_inf());
  const K* keys = scratch.keys;
  K kept = kAbsent<Acc> + 1;  // all that are present
  int64_t most = some ? candidates : CountFrom(keys, candidates, kept);
  if (most > k) {
    kept = KeyOfRank(keys, candidates, k, 0);
    most = k;
    if (some) scratch.TryNext(ScoreOf<Acc>(kept), candidates, k);
  }
  const int64_t above = CountFrom<K>(keys, candidates, kept + 1);
  const int64_t selected = Keep(scratch, candidates, kept, above, most - above);
  __builtin_memcpy(indices, scratch.columns, size_t(selected) * sizeof(int32_t));
  if (!values) return int32_t(selected);
  if constexpr (std::is_same_v<T, Acc>) {
    __builtin_memcpy(values, scratch.scores, size_t(selected) * sizeof(T));
  } else {  // the same bits, those of NaN too
    for (int64_t i = 0; i < selected; ++i) values[i] = scores[indices[i]];
  }
  return int32_t(selected);
}

}  // namespace sgap::SGAP_ISA
