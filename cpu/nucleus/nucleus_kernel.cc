// The most probable entries of each row that together have a probability (nucleus.h). A bisection
// over integers in the order of the values leaves a few of them, which are compared with each
// other.
#include "cpu/nucleus/nucleus.h"
#include "cpu/simd/compress.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/simd/simd.h"
#include "cpu/top_k/top_k_ranks.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int kColumnLanes = kVectorBytes / sizeof(int32_t);

// Of a row the keys above `key` are stored, and the first `ties` of those that equal it.
template <typename K>
struct LastStored {
  K key;
  int64_t ties;
};

// Up to kColumnLanes of `left` columns.
Vector<int32_t, kColumnLanes> LoadColumns(const int32_t* from, int64_t left) {
  Vector<int32_t, kColumnLanes> own = {};
  if (left >= kColumnLanes) {
    __builtin_memcpy(&own, from, sizeof(own));
  } else {
    for (int64_t lane = 0; lane < left; ++lane) own[lane] = from[lane];
  }
  return own;
}

// The logarithms of exp(x - peak), which is 0 for NaN and -infinity, and 1 for infinity.
template <typename V, typename Acc>
V LogWeights(V x, Acc peak) {
  const V log = x == peak ? V{} : x - peak, no_weight = V{} - Acc(__builtin_inf());
  return x > no_weight ? log : no_weight;
}

template <typename T>
struct NucleusRow {
  using Acc = Accumulator<T>;
  using K = Key<Acc>;
  static constexpr int N = kLanes<T>, kFew = 16;
  static constexpr int64_t kTogether = 4 * N;
  static constexpr K kFirst = kGreatestKey<K>;  // of kept entries, which no number has
  using Keys = Vector<K, N>;
  using Weights = Vector<Acc, N>;

  int64_t count, padded;  // to kTogether, with absent keys of no weight
  K* keys;
  Acc* weights;  // 0 of kept entries
  K least, greatest;
  int64_t kept = 0;
  Acc kept_weight, weight;  // of kept entries, and of the others

  NucleusRow(const T* values, const T* ranked, int64_t entries, Acc peak, char* scratch, int64_t k)
      : count(entries), padded((entries + kTogether - 1) / kTogether * kTogether) {
    keys = reinterpret_cast<K*>(scratch);
    weights = reinterpret_cast<Acc*>(keys + k + 64);  // NucleusScratch
    Order(values, ranked, peak);
    Weigh();
  }

  // What is stored where the entries before one weigh less than `reach`, kept ones among them.
  LastStored<K> Last(Acc reach, bool all) const {
    reach -= kept_weight;
    if (all || weight < reach) return {kAbsent<Acc>, count};
    if (!(reach > 0)) return {kFirst - 1, 0};
    K low = least, high = greatest;
    int64_t from_low = count, above_high = kept;  // how many keys are
    Acc above = 0;                                // what those above `high` weigh
    while (low < high && from_low - above_high > kFew) {
      const K middle = (low & high) + ((low ^ high) >> 1);  // low + high may overflow
      int64_t found;
      const Acc sum = Above(middle, found);
      // Either is as likely: without a branch.
      const bool below = sum < reach;
      high = below ? middle : high;
      above = below ? sum : above;
      above_high = below ? found : above_high;
      low = below ? low : middle + 1;
      from_low = below ? from_low : found;
    }
    if (from_low - above_high <= kFew) return OfFew(low, high, above, reach);
    int64_t i = 0;
    while (i + 1 < count && keys[i] != low) ++i;
    return {low, Ties(weights[i], reach - above)};
  }

  // Marks what is stored, if its index is below `columns`. Returns how much it is.
  int32_t Mark(const int32_t* indices, int32_t columns, LastStored<K> last, uint64_t* marks) const {
    int32_t stored = 0;
    for (int64_t i = 0; i < count; i += 64) {
      uint64_t word = 0;
      for (int64_t j = 0; j < 64 && i + j < count; j += kColumnLanes) {
        uint32_t from = 0, mask = 0;
        for (int lane = 0; lane < kColumnLanes; lane += N) {
          const Keys x = KeysAt(i + j + lane);
          from |= LanesFrom<K, N>(x, last.key) << lane;
          mask |= LanesFrom<K, N>(x, last.key + 1) << lane;
        }
        const int64_t left = count - i - j;
        const uint32_t exist = left < kColumnLanes ? (1u << left) - 1 : ~0u;
        uint32_t equal = from & ~mask & exist;
        mask &= exist;
        for (; equal != 0 && last.ties > 0; equal &= equal - 1, --last.ties) mask |= equal & -equal;
        const auto own = LoadColumns(indices + i + j, left);
        mask &= LanesFrom<int32_t, kColumnLanes>(own, 0);
        mask &= ~LanesFrom<int32_t, kColumnLanes>(own, columns);
        word |= uint64_t(mask) << j;
      }
      marks[i / 64] = word;
      stored += __builtin_popcountll(word);
    }
    return stored;
  }

 private:
  Keys KeysAt(int64_t i) const {
    Keys x;
    __builtin_memcpy(&x, keys + i, sizeof(x));
    return x;
  }

  Weights WeightsAt(int64_t i) const {
    Weights x;
    __builtin_memcpy(&x, weights + i, sizeof(x));
    return x;
  }

  static Weights LoadValues(const T* values, int64_t left) {
    return left >= N ? Load<T, N>(values) : LoadPartial<T, N>(values, int(left));
  }

  // Keys, their bounds, and logarithms of weights.
  void Order(const T* values, const T* ranked, Acc peak) {
    constexpr Acc kInfinity = Acc(__builtin_inf());
    const Keys absent = Keys{} + kAbsent<Acc>, first = Keys{} + kFirst;
    const Weights no_weight = Weights{} - kInfinity;
    Keys low = first, high = absent;
    for (int64_t i = 0; i < padded; i += N) {
      const int64_t left = count - i;
      Keys own = absent;
      Weights log = no_weight;
      if (left > 0) {
        const Weights x = LoadValues(values + i, left);
        own = KeysOf<Acc, N>(x);
        log = LogWeights(x, peak);
        if (ranked) own = LoadValues(ranked + i, left) == kInfinity ? first : own;
        const auto exist = LaneNumbers<K, N>() < Keys{} + K(left < N ? left : N);
        const Keys lower = exist ? own : first;
        low = lower < low ? lower : low;
        own = exist ? own : absent;
        log = exist ? log : no_weight;
        const Keys upper = own == first ? absent : own;
        high = upper > high ? upper : high;
      }
      __builtin_memcpy(keys + i, &own, sizeof(own));
      __builtin_memcpy(weights + i, &log, sizeof(log));
    }
    least = kFirst, greatest = kAbsent<Acc>;
    for (int lane = 0; lane < N; ++lane) {
      least = low[lane] < least ? low[lane] : least;
      greatest = high[lane] > greatest ? high[lane] : greatest;
    }
  }

  void Weigh() {
    Weights sums[4] = {}, kept_sums[4] = {};
    Keys kept_lanes = {};
    for (int64_t i = 0; i < padded; i += kTogether) {
      Weights x[4];
      __builtin_memcpy(x, weights + i, sizeof(x));
      ExpOfNegatives<N, 4>(x);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const auto first = KeysAt(i + v * N) == kFirst;
        kept_lanes -= first;
        kept_sums[v] += first ? x[v] : Weights{};
        x[v] = first ? Weights{} : x[v];
        sums[v] += x[v];
      }
      __builtin_memcpy(weights + i, x, sizeof(x));
    }
    weight = SumOf(sums);
    kept_weight = SumOf(kept_sums);
    kept = FoldLanes<1, K, N>(kept_lanes)[0];
  }

  static Acc SumOf(const Weights* sums) {
    return FoldLanes<1, Acc, N>((sums[0] + sums[1]) + (sums[2] + sums[3]))[0];
  }

  // What the keys above `key` weigh, and how many they are.
  Acc Above(K key, int64_t& found) const {
    Weights sums[4] = {};
    Keys counts[2] = {};
    for (int64_t i = 0; i < padded; i += kTogether) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const auto above = KeysAt(i + v * N) > key;
        sums[v] += above ? WeightsAt(i + v * N) : Weights{};
        counts[v % 2] -= above;
      }
    }
    found = FoldLanes<1, K, N>(counts[0] + counts[1])[0];
    return SumOf(sums);
  }

  // Of the keys from `low` to `high`, of which there are kFew at most.
  LastStored<K> OfFew(K low, K high, Acc above, Acc reach) const {
    constexpr int kVectors = kFew / N;
    K few_keys[kFew + N] = {};
    Acc few_weights[kFew + N] = {};
    int few = 0;
    for (int64_t i = 0; i < count; i += N) {
      const Keys x = KeysAt(i);
      uint32_t mask = LanesFrom<K, N>(x, low) & ~LanesFrom<K, N>(x, high + 1);
      if (count - i < N) mask &= (1u << (count - i)) - 1;
      PackLanes<K, N>(mask, x, few_keys + few);
      PackLanes<Acc, N>(mask, WeightsAt(i), few_weights + few);
      few += __builtin_popcount(mask);
    }
    const K* own_keys = AfterPacking(few_keys, few);
    const Acc* own_weights = AfterPacking(few_weights, few);
    Keys own[kVectors];
    Weights before[kVectors];
    __builtin_memcpy(own, own_keys, sizeof(own));
    for (Weights& x : before) x = Weights{} + above;
    for (int j = 0; j < few; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        before[v] += own[v] < own_keys[j] ? Weights{} + own_weights[j] : Weights{};
      }
    }
    K last = kFirst;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const auto exist = LaneNumbers<K, N>() < Keys{} + K(few - v * N);
      const Keys reached = exist & (before[v] < reach) ? own[v] : Keys{} + kFirst;
      const K own_last = ~GreatestLane<K, N>(~reached);
      last = own_last < last ? own_last : last;
    }
    Acc sums[kFew];
    __builtin_memcpy(sums, before, sizeof(sums));
    int at = 0;
    while (at + 1 < few && own_keys[at] != last) ++at;
    if (own_keys[at] != last) return {high, 0};  // sums that are no numbers
    return {last, Ties(own_weights[at], reach - sums[at])};
  }

  // How many entries of one weight are stored, the last of which reaches what is left.
  int64_t Ties(Acc one, Acc left) const {
    const Acc about = left / one;
    int64_t ties = about > 0 ? (about < Acc(count) ? int64_t(about) : count) : 0;
    while (ties < count && one * Acc(ties) < left) ++ties;
    while (ties > 0 && !(one * Acc(ties - 1) < left)) --ties;
    return ties;
  }
};

struct Rows {
  int64_t batch, begin, end;

  template <typename Args>
  Rows(const Args& args, int64_t task)
      : batch(task / args.row_tasks), begin(task % args.row_tasks * args.task_rows) {
    end = begin + args.task_rows < args.rows ? begin + args.task_rows : args.rows;
  }

  uint64_t* Marks(const NucleusArgs& args, int64_t r) const {
    return args.marks + (batch * args.rows + r) * NucleusWords(args.k);
  }
};

int64_t EntriesOf(const int32_t* offsets, int64_t r, int64_t k) {
  const int64_t count = offsets[r + 1] - offsets[r];
  return count < k ? count : k;
}

template <typename T>
void MarkRows(const NucleusArgs& args, const Rows& rows) {
  using Acc = Accumulator<T>;
  const int64_t first_row = rows.batch * args.rows, first = first_row * args.k;
  const int32_t* offsets = args.offsets + rows.batch * (args.rows + 1);
  int32_t* counts = args.out_offsets + rows.batch * (args.rows + 1) + 1;
  const auto* greatest = static_cast<const Acc*>(args.greatest) + first_row;
  const auto* total = static_cast<const Acc*>(args.total) + first_row;
  const auto* p = static_cast<const Acc*>(args.p) + first_row;
  const auto columns = int32_t(args.columns < INT32_MAX ? args.columns : INT32_MAX);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t begin = first + offsets[r];
    const T* ranked = args.ranked ? static_cast<const T*>(args.ranked) + begin : nullptr;
    const NucleusRow<T> row(static_cast<const T*>(args.values) + begin, ranked,
                            EntriesOf(offsets, r, args.k), greatest[r], args.scratch, args.k);
    const auto last = row.Last(p[r] * total[r], p[r] >= 1);
    counts[r] = row.Mark(args.indices + begin, columns, last, rows.Marks(args, r));
  }
}

void WriteRows(const NucleusArgs& args, int64_t task, const Rows& rows) {
  const int64_t capacity = args.rows * args.k;
  const int32_t* offsets = args.offsets + rows.batch * (args.rows + 1);
  const int32_t* places = args.out_offsets + rows.batch * (args.rows + 1);
  const int32_t* indices = args.indices + rows.batch * capacity;
  int32_t* out_indices = args.out_indices + rows.batch * capacity;
  int32_t* out_entries = args.out_entries + rows.batch * capacity;
  const auto lanes = LaneNumbers<int32_t, kColumnLanes>();
  int64_t place = places[rows.begin];
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const uint64_t* marks = rows.Marks(args, r);
    const int64_t count = EntriesOf(offsets, r, args.k);
    for (int64_t i = 0; i < count; i += kColumnLanes) {
      const auto mask = uint32_t(marks[i / 64] >> (i % 64)) & ((1u << kColumnLanes) - 1);
      if (mask == 0) continue;
      const int32_t entry = offsets[r] + int32_t(i);
      const auto own = LoadColumns(indices + entry, capacity - entry);
      place += PackLanes<int32_t, kColumnLanes>(mask, own, lanes + entry, out_indices + place,
                                                out_entries + place, places[rows.end] - place);
    }
  }
  // Each task has a share of the padding.
  const int64_t stored = places[args.rows], padding = capacity - stored;
  const int64_t share = task % args.row_tasks;
  const int64_t begin = stored + padding * share / args.row_tasks;
  const int64_t end = stored + padding * (share + 1) / args.row_tasks;
  __builtin_memset(out_indices + begin, 0, size_t(end - begin) * sizeof(int32_t));
  __builtin_memset(out_entries + begin, 0, size_t(end - begin) * sizeof(int32_t));
}

// The greatest of `count` scores, and what exp(score - greatest) add up to.
template <typename T>
void TotalOfRow(const T* scores, int64_t count, Accumulator<T>& greatest, Accumulator<T>& total) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  using V = Vector<Acc, N>;
  const V none = V{} - Acc(__builtin_inf());
  // Calls body(x) for four vectors at a time; lanes beyond the last score are -infinity.
  const auto each = [&](auto body) {
    int64_t i = 0;
    V x[4];
    for (; i + 4 * N <= count; i += 4 * N) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) x[v] = Load<T, N>(scores + i + v * N);
      body(x);
    }
    if (i == count) return;
    for (int v = 0; v < 4; ++v, i += N) {
      const int64_t left = count - i < N ? count - i : N;
      x[v] = none;
      if (left <= 0) continue;
      const V last = LoadPartial<T, N>(scores + i, int(left));
      x[v] = LaneNumbers<Key<Acc>, N>() < Vector<Key<Acc>, N>{} + Key<Acc>(left) ? last : none;
    }
    body(x);
  };
  V peaks[4] = {none, none, none, none}, sums[4] = {};
  each([&](const V* x) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) peaks[v] = x[v] > peaks[v] ? x[v] : peaks[v];  // NaN is not
  });
  const V first = peaks[0] > peaks[1] ? peaks[0] : peaks[1];
  const V second = peaks[2] > peaks[3] ? peaks[2] : peaks[3];
  const Acc peak = GreatestLane<Acc, N>(first > second ? first : second);
  each([&](V* x) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) x[v] = LogWeights(x[v], peak);
    ExpOfNegatives<N, 4>(x);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[v] += x[v];
  });
  greatest = peak;
  total = FoldLanes<1, Acc, N>((sums[0] + sums[1]) + (sums[2] + sums[3]))[0];
}

}  // namespace

void NucleusTotals(const NucleusTotalsArgs& args, int64_t task) {
  const Rows rows(args, task);
  DispatchDtype(args.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int32_t* limits = args.limits + rows.batch * args.limits_stride;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int64_t row = rows.batch * args.rows + r;
      const int64_t limit = limits[r] < 0 ? 0 : limits[r];
      TotalOfRow(static_cast<const T*>(args.scores) + row * args.columns,
                 limit < args.columns ? limit : args.columns,
                 static_cast<Accumulator<T>*>(args.greatest)[row],
                 static_cast<Accumulator<T>*>(args.total)[row]);
    }
  });
}

void Nucleus(const NucleusArgs& args, int64_t task) {
  const int64_t tasks = args.batch * args.row_tasks;
  if (task >= tasks) return WriteRows(args, task - tasks, Rows(args, task - tasks));
  const Rows rows(args, task);
  DispatchDtype(args.dtype,
                [&](auto type) { MarkRows<typename decltype(type)::type>(args, rows); });
}

}  // namespace sgap::SGAP_ISA
