// Rows of the selection, one after another. A threshold from a sample of the row leaves few more
// than k candidates in one pass over the scores; a bisection over their keys then finds the k-th
// greatest, and the candidates, which are by ascending column, are written from there up. The
// result is exact whatever the sample says: with too few candidates the whole row is one.
#include <cstdint>
#include <type_traits>

#include "cpu/simd/simd.h"
#include "cpu/top_k/top_k.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int64_t kLeastSampled = 64, kMostSampled = 512;  // scores

// Integers in the order of the scores: kAbsent for -infinity, then NaN, then the numbers.
template <typename Acc>
using Key = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
template <typename Acc>
constexpr Key<Acc> kAbsent = sizeof(Acc) == 4 ? INT32_MIN : INT64_MIN;

template <typename Acc>
inline Key<Acc> KeyOf(Acc score) {
  // In integers: arithmetic and comparisons take subnormal numbers for 0 on XLA's threads.
  constexpr Key<Acc> kMinusZero = kAbsent<Acc>, kGreatest = ~kAbsent<Acc>;
  const auto bits = BitCast<Key<Acc>>(score);
  const Key<Acc> number = bits == kMinusZero ? 0 : bits < 0 ? bits ^ kGreatest : bits;
  const Key<Acc> some = score == -Acc(__builtin_inf()) ? kAbsent<Acc> : number;
  return score != score ? kAbsent<Acc> + 1 : some;
}

template <typename K>
inline int64_t CountFrom(const K* keys, int64_t count, K least) {
  K found = 0;
  for (int64_t i = 0; i < count; ++i) found += keys[i] >= least;
  return found;
}

// The k-th greatest of `count` keys, of which at least k are present; 1 <= k.
template <typename K>
K KthGreatest(const K* keys, int64_t count, int64_t k) {
  K low = keys[0], high = keys[0];
  for (int64_t i = 0; i < count; ++i) {
    low = keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
  // At least k keys are >= low, and fewer than k are > high.
  while (low < high) {
    // The middle, rounded up: low + high may overflow.
    const K middle = (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1);
    const int64_t found = CountFrom(keys, count, middle);
    if (found == k) {  // the least of these; there may be none between it and middle
      K least = high;
      for (int64_t i = 0; i < count; ++i) {
        least = keys[i] >= middle && keys[i] < least ? keys[i] : least;
      }
      return least;
    }
    if (found > k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename T>
struct Scratch {
  using Acc = Accumulator<T>;
  Acc* scores;
  Key<Acc>* keys;
  int32_t* columns;

  Scratch(char* memory, int64_t size) {
    const int64_t room = size + 16;  // TopKScratch
    scores = reinterpret_cast<Acc*>(memory);
    keys = reinterpret_cast<Key<Acc>*>(scores + room);
    columns = reinterpret_cast<int32_t*>(keys + room);
  }
};

// A score that about k scores of the row are not less than, rather more; -infinity for none.
template <typename T>
Accumulator<T> Threshold(const T* scores, int64_t count, int64_t k, const Scratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr Acc kNone = -Acc(__builtin_inf());
  const int64_t sample = count / 4 < kMostSampled ? count / 4 : kMostSampled;
  const double expected = double(sample) * double(k) / double(count);
  const auto rank = int64_t(expected + 3 * __builtin_sqrt(expected) + 2);
  if (sample < kLeastSampled || rank > sample / 2) return kNone;
  const int64_t step = count / sample;
  for (int64_t i = 0; i < sample; ++i) {
    scratch.scores[i] = LoadScalar(scores + i * step);
    scratch.keys[i] = KeyOf(scratch.scores[i]);
  }
  const Key<Acc> least = KthGreatest(scratch.keys, sample, rank);
  for (int64_t i = 0; i < sample; ++i) {
    if (scratch.keys[i] == least) return scratch.scores[i];
  }
  return kNone;
}

// The scores of at least `least`, where subnormal numbers may count as 0, and their columns.
// Returns how many.
template <typename T>
int64_t Candidates(const T* scores, int64_t count, Accumulator<T> least,
                   const Scratch<T>& scratch) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  const Vector<int32_t, N> lanes = LaneNumbers<int32_t, N>();
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += N) {
    const int64_t left = count - i;
    Vector<Acc, N> x;
    if (left >= N) {
      x = Load<T, N>(scores + i);
    } else {
      x = LoadPartial<T, N>(scores + i, int(left));
      for (int lane = int(left); lane < N; ++lane) x[lane] = -Acc(__builtin_inf());
    }
    found += AppendFrom<Acc, N>(x, least, lanes + int32_t(i), scratch.scores + found,
                                scratch.columns + found);
  }
  return found;
}

// Moves the columns of the selected candidates to the front: those with keys above `kept`, and the
// first `ties` whose key equals it. Returns how many.
template <typename K>
int64_t Keep(K* keys, int32_t* columns, int64_t count, K kept, int64_t ties) {
  constexpr int N = kVectorBytes / sizeof(K);
  int64_t selected = 0, i = 0;
  if (ties == CountFrom(keys, count, kept) - CountFrom<K>(keys, count, kept + 1)) {
    // Writes nothing at or behind i + N.
    for (; i + N <= count; i += N) {
      Vector<K, N> x;
      Vector<int32_t, N> where;
      __builtin_memcpy(&x, keys + i, sizeof(x));
      __builtin_memcpy(&where, columns + i, sizeof(where));
      selected += AppendFrom<K, N>(x, kept, where, keys + selected, columns + selected);
    }
    ties = count;
  }
  for (; i < count; ++i) {
    const bool tie = keys[i] == kept && ties > 0;
    ties -= tie;
    columns[selected] = columns[i];
    selected += tie || keys[i] > kept;
  }
  return selected;
}

template <typename T>
int32_t SelectRow(const T* scores, int64_t count, int64_t k, const Scratch<T>& scratch,
                  int32_t* indices, T* values) {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  if (k <= 0) return 0;
  const Acc least = Threshold(scores, count, k, scratch);
  const bool some = least == least && least > -Acc(__builtin_inf());
  int64_t candidates = some ? Candidates(scores, count, least, scratch) : 0;
  K* keys = scratch.keys;
  if (candidates >= k) {
    for (int64_t i = 0; i < candidates; ++i) keys[i] = KeyOf(scratch.scores[i]);
  } else {
    candidates = count;
    for (int64_t i = 0; i < count; ++i) {
      keys[i] = KeyOf(LoadScalar(scores + i));
      scratch.columns[i] = int32_t(i);
    }
  }
  K kept = kAbsent<Acc> + 1;  // all that are present
  int64_t most = CountFrom(keys, candidates, kept);
  if (most > k) {
    kept = KthGreatest(keys, candidates, k);
    most = k;
  }
  const int64_t ties = most - CountFrom<K>(keys, candidates, kept + 1);
  const int64_t selected = Keep(keys, scratch.columns, candidates, kept, ties);
  for (int64_t i = 0; i < selected; ++i) {
    const int32_t column = scratch.columns[i];
    indices[i] = column;
    values[i] = scores[column];
  }
  return int32_t(selected);
}

}  // namespace

void TopK(const TopKArgs& args, int64_t task) {
  const int64_t batch = task / args.row_tasks;
  const int64_t begin = task % args.row_tasks * args.task_rows;
  const int64_t end = args.rows - begin < args.task_rows ? args.rows : begin + args.task_rows;
  DispatchDtype(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Scratch<T> scratch(args.scratch, args.columns);
    const int32_t* limits = args.limits + batch * args.limits_stride;
    const int32_t* offsets = args.offsets + batch * (args.rows + 1);
    int32_t* indices = args.indices + batch * args.rows * args.k;
    T* values = static_cast<T*>(args.values) + batch * args.rows * args.k;
    for (int64_t r = begin; r < end; ++r) {
      const T* scores = static_cast<const T*>(args.scores) + (batch * args.rows + r) * args.columns;
      args.counts[batch * args.rows + r] =
          SelectRow(scores, TopKLimit(limits[r], args.columns), args.k, scratch,
                    indices + offsets[r], values + offsets[r]);
    }
  });
}

}  // namespace sgap::SGAP_ISA
