// The selection of one row. A threshold from the row before, or from a sample of this one, leaves
// few more than k candidates in one pass over the scores; a search over their keys then finds the
// k-th greatest, and the candidates, which are by ascending column, are written from there up. The
// result is exact whatever the threshold is: with too few candidates the whole row is one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/compress.h"
#include "cpu/simd/simd.h"
#include "cpu/top_k/top_k_ranks.h"

namespace sgap::SGAP_ISA {

constexpr int64_t kLeastSampled = 64, kMostSampled = 1024;  // scores
constexpr int64_t kScoresOfSample = 16;                     // of the row for each of the sample
constexpr int kMostRowsWithoutTrial = 63;
constexpr int64_t kScoresOfFew = 8;   // at least so many of the row for each of few candidates
constexpr int64_t kBytesAhead = 512;  // of the row after the next, prefetched with the next one

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
  static int64_t Few(int64_t k) { return int64_t(3 * __builtin_sqrt(double(k))) + 3; }

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
// `next` further on. Those before column `first` have left `found`.
template <typename T, int kMostly = kLanes<T> / 2>
int64_t Candidates(const T* scores, int64_t count, int64_t next, Accumulator<T> least,
                   const RowScratch<T>& scratch, int64_t first = 0, int64_t found = 0) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  Vector<int32_t, N> columns = LaneNumbers<int32_t, N>() + int32_t(first);
  Acc* const found_scores = scratch.scores;
  int32_t* const found_columns = scratch.columns;
  int64_t i = first;
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

// The same where few of four vectors are expected. What it prefetches begins later and ends in the
// row after the next, which so begins to come while this one is searched.
template <typename T>
int64_t FewCandidates(const T* scores, int64_t count, int64_t next, Accumulator<T> least,
                      const RowScratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  const T* const ahead = scores + next + (next > 0 ? kBytesAhead / int64_t(sizeof(T)) : 0);
  int64_t found = 0, i = 0;
  for (; i + 4 * N <= count; i += 4 * N) {
    Vector<Acc, N> x[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      __builtin_prefetch(ahead + i + v * N, 0, 2);
      x[v] = Kept(Load<T, N>(scores + i + v * N));
    }
    found += PackLanesOfFour<Acc, N>(x, least, int32_t(i), scratch.scores + found,
                                     scratch.columns + found);
  }
  return Candidates<T>(scores, count, next, least, scratch, i, found);
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
    // After a trial that failed there may be many, such as equal ones.
    const bool seldom = scratch.pause == 0 && kScoresOfFew * (k + scratch.Few(k)) <= count;
    if (kPacksBits && seldom) return FewCandidates(scores, count, next, scratch.reached, scratch);
    const auto candidates = 16 * k <= 5 * count ? Candidates<T, N / 2> : Candidates<T, N>;
    return candidates(scores, count, next, scratch.reached, scratch, 0, 0);
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
// a key above last.key and the first ones with that key, all of them without kTies, and anything
// behind them, up to `room` in all. It may be to the front of the candidates themselves.
template <bool kTies, typename Acc, typename K>
void WriteSelected(const K* keys, const Acc* from_scores, const int32_t* from_columns,
                   int64_t count, const RankedKey<K>& last, int64_t selected, int64_t room,
                   Acc* scores, int32_t* columns) {
  constexpr int N = kKeyLanes<K>;
  const K least = last.key;
  int64_t ties = selected - last.above, written = 0;
  for (int64_t i = 0; i < count && written < selected; i += N) {
    Vector<Acc, N> score;
    Vector<int32_t, N> column;
    __builtin_memcpy(&score, from_scores + i, sizeof(score));
    __builtin_memcpy(&column, from_columns + i, sizeof(column));
    uint32_t mask = KeysFrom(keys + i, count - i, least);
    if constexpr (kTies) {
      uint32_t equal = mask & ~KeysFrom<K>(keys + i, N, least + 1);
      mask &= ~equal;
      for (; equal != 0 && ties > 0; equal &= equal - 1, --ties) mask |= equal & -equal;
    }
    // Behind i + N nothing is written before it is read.
    written +=
        PackLanes<Acc, N>(mask, score, column, scores + written, columns + written, room - written);
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
// Returns how many. There is room for `room` of each, where anything may be left behind them: it is
// that of rows of the same task that are written later. Prefetches the scores about `next` further
// on: those of the row that comes next.
template <typename T>
int32_t SelectRow(const T* scores, int64_t count, int64_t k, int64_t next, RowScratch<T>& scratch,
                  int64_t room, int32_t* indices, T* values) {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  if (k <= 0) return 0;
  const int64_t candidates = CandidatesOrAll(scores, count, k, next, scratch);
  const K* keys = AfterPacking(KeysOfCandidates(candidates, scratch), candidates);
  const bool some = scratch.reached > -Acc(__builtin_inf());
  RankedKey<K> last{kAbsent<Acc> + 1, 0, int32_t(candidates)};  // all that are present
  if (!some) last.from = int32_t(CountFrom(keys, candidates, last.key));
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
  write(keys, scratch.scores, scratch.columns, candidates, last, selected, room, to, indices);
  if constexpr (!std::is_same_v<T, Acc>) {  // the same bits, those of NaN too
    for (int64_t i = 0; values && i < selected; ++i) values[i] = scores[indices[i]];
  }
  return int32_t(selected);
}

}  // namespace sgap::SGAP_ISA
