// The most probable entries of each row of a CSR structure that together have a probability, in two
// launches: NucleusSelectKernel finds the entries of each row and how many there are, and
// NucleusWriteKernel moves them up to where the rows before end, which a prefix sum of the counts
// says. And the totals of rows of scores that probabilities are relative to, in one.
//
// Grid: kBlock / kLanes rows for each block in x, z over the batch: kLanes lanes share a row. Sums
// are added in an order that depends on kLanes alone: deterministic.
#pragma once

#include "row_lanes.cuh"
#include "score_key.cuh"
#include "sparse_softmax.cuh"

namespace sgap {

// exp(score - peak): 0 for NaN and -infinity, 1 for infinity where that is the peak. The
// exponential is computed anyhow: a select after it is no branch.
template <class A>
__device__ inline A WeightUnder(A peak, A score) {
  const A weight = Exp(score == peak ? A(0) : score - peak);
  return score > Least<A>() ? weight : A(0);
}

// Rounded for itself: a difference with it must not contract.
__device__ inline float Product(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double Product(double x, double y) { return __dmul_rn(x, y); }

// greatest, total [batch, m]: the greatest score of each row, NaN apart, and the sum of the weights
// under it; -infinity and 0 where there is no number. Row i has the columns below limits[i]; limits
// are `limit_stride` apart in the batch (0: shared).
//
// A lane goes through its columns once: where its greatest score grows, its sum is scaled down.
template <class T, int kBlock, int kLanes>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    NucleusTotalsKernel(const T* __restrict__ scores, const Index* __restrict__ limits,
                        Accumulator<T>* __restrict__ greatest, Accumulator<T>* __restrict__ total,
                        long long m, long long n, long long batches, long long limit_stride) {
  using A = Accumulator<T>;
  enum { kTogether = 16 / sizeof(A) };  // columns of a lane that are loaded together
  __shared__ typename RowLanes<kLanes>::Shared shared;
  RowLanes<kLanes> lanes(shared);
  const Size row = RowOfLanes<kBlock, kLanes>();
  if (row >= m) return;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index limit = limits[batch * limit_stride + row];
    const unsigned count = limit < 0 ? 0 : limit < n ? limit : n;
    const T* own = scores + (batch * m + row) * n;
    A peak = Least<A>(), sum = 0;
#pragma unroll 1
    for (unsigned first = lanes.lane; first < count; first += kLanes * kTogether) {
      A x[kTogether];
      A above = peak;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const unsigned j = first + i * kLanes;
        x[i] = j < count ? Widen(own[j]) : Least<A>();
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) above = x[i] > above ? x[i] : above;  // NaN is not
      if (above > peak) sum *= WeightUnder(above, peak);
      peak = above;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum += WeightUnder(peak, x[i]);
    }
    const A row_peak = lanes.template Reduce<Larger>(peak);
    sum = lanes.Reduce(sum * WeightUnder(row_peak, peak));
    if (lanes.lane == 0) {
      greatest[batch * m + row] = row_peak;
      total[batch * m + row] = sum;
    }
  }
}

// The entries of a row that take part. Each lane holds the keys and weights of its first ones, and
// computes those of others where they are asked for: a row of kLanes * kHeld entries is read once.
template <class T, int kLanes>
struct NucleusEntries {
  using A = Accumulator<T>;
  using Key = ScoreKey<T>;
  enum { kHeld = 32 / sizeof(A) };
  static constexpr Key kKept = ~Key(0);  // of kept entries, which come first

  const T* values;
  const T* ranked;  // null where none is kept
  unsigned lane, count;
  A peak;
  A kept_weight = 0;  // of the lane's kept entries
  Key keys[kHeld];
  A weights[kHeld];  // 0 of kept entries

  __device__ NucleusEntries(const T* values, const T* ranked, unsigned lane, unsigned count, A peak)
      : values(values), ranked(ranked), lane(lane), count(count), peak(peak) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) kept_weight += Read(h * kLanes + lane, keys[h], weights[h]);
#pragma unroll 1
    for (unsigned i = kHeld * kLanes + lane; i < count; i += kLanes) {
      Key key;
      A weight;
      kept_weight += Read(i, key, weight);
    }
  }

  // Calls body(i, key, weight) for each kLanes entries, with the lane's one among them, until all
  // have been there; i may be beyond the last entry, and then the key and the weight are 0.
  template <class Body>
  __device__ void Each(Body body) const {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      if (h * kLanes < count) body(h * kLanes + lane, keys[h], weights[h]);
    }
#pragma unroll 1
    for (unsigned first = kHeld * kLanes; first < count; first += kLanes) {
      Key key;
      A weight;
      Read(first + lane, key, weight);
      body(first + lane, key, weight);
    }
  }

 private:
  // Returns the weight of a kept entry.
  __device__ A Read(unsigned i, Key& key, A& weight) const {
    key = 0;
    weight = 0;
    if (i >= count) return 0;
    const A score = Widen(values[i]);
    key = KeyOf(score);
    weight = WeightUnder(peak, score);
    if (!ranked || Widen(ranked[i]) != -Least<A>()) return 0;
    const A kept = weight;
    key = kKept;
    weight = 0;
    return kept;
  }
};

// Keys above `least` are stored, and of those that equal it the ones before which equal ones weigh
// less than `room`; or all.
template <class Key, class A>
struct Nucleus {
  bool all;
  Key least;
  A room;
};

// What is stored where the entries before one weigh less than p * total. The least key above which
// they do is found by bisection; that ends after as many steps as a key has bits, whatever the sums
// are. Every lane of the row gets the same.
template <class T, int kLanes>
__device__ inline Nucleus<ScoreKey<T>, Accumulator<T>> NucleusOf(
    const NucleusEntries<T, kLanes>& entries, Accumulator<T> total, Accumulator<T> p,
    RowLanes<kLanes>& lanes) {
  using A = Accumulator<T>;
  using Key = ScoreKey<T>;
  using Entries = NucleusEntries<T, kLanes>;
  A reach = Product(p, total), sum = 0;
  Key low = ~Key(0), high = 0;  // stay so where all entries are kept: nothing is bisected then
  entries.Each([&](unsigned i, Key key, A weight) {
    sum += weight;
    if (i >= entries.count || key == Entries::kKept) return;
    low = key < low ? key : low;
    high = key > high ? key : high;
  });
  if (entries.ranked) reach -= lanes.Reduce(entries.kept_weight);
  if (p >= 1 || lanes.Reduce(sum) < reach) return {true, 0, 0};
  low = lanes.template Reduce<Smaller>(low);
  high = lanes.template Reduce<Larger>(high);
  A weight_above = 0;  // of `high`
#pragma unroll 1
  while (low < high) {
    const Key middle = (low & high) + ((low ^ high) >> 1);  // low + high may overflow
    sum = 0;
    entries.Each([&](unsigned i, Key key, A weight) { sum += key > middle ? weight : A(0); });
    sum = lanes.Reduce(sum);
    if (sum < reach) {
      high = middle;
      weight_above = sum;
    } else {
      low = middle + 1;
    }
  }
  return {false, high, reach - weight_above};
}

// entries [batch, m, k]: which entries each row stores, counts [batch, m] how many. Row i has the
// entries from offsets[i] to offsets[i + 1], and the first k of these take part. The weight of one
// is exp(value - greatest). It is stored if those before it weigh less than p * total, or p is at
// least 1, or it is kept (`kept`: those whose `ranked` is infinite are, and come first), and if its
// index is in 0 .. n - 1.
//
// Offsets may hold anything: each is clamped to what there is, so that rows whose offsets fall have
// no entries, and no row has more than k. (Of falling offsets the CPU takes the running maximum:
// other entries may be stored there.)
template <class T, int kBlock, int kLanes>
__global__ void __launch_bounds__(kBlock, kTileThreads / kBlock)
    NucleusSelectKernel(const T* __restrict__ values, const T* __restrict__ ranked,
                        const Accumulator<T>* __restrict__ greatest,
                        const Accumulator<T>* __restrict__ total,
                        const Accumulator<T>* __restrict__ p, const Index* __restrict__ offsets,
                        const Index* __restrict__ indices, Index* __restrict__ counts,
                        Index* __restrict__ entries, long long m, long long k, long long n,
                        long long batches, long long kept) {
  using A = Accumulator<T>;
  using Key = ScoreKey<T>;
  __shared__ typename RowLanes<kLanes>::Shared shared;
  RowLanes<kLanes> lanes(shared);
  const Size row = RowOfLanes<kBlock, kLanes>();
  if (row >= m) return;
  const long long capacity = m * k;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index* ends = offsets + batch * (m + 1);
    const long long begin = ends[row] < 0 ? 0 : ends[row] < capacity ? ends[row] : capacity;
    const long long end = ends[row + 1] < capacity ? ends[row + 1] : capacity;
    const unsigned count = end <= begin ? 0 : end - begin < k ? end - begin : k;
    const Size first = batch * capacity + begin, at = batch * m + row;
    const NucleusEntries<T, kLanes> own(values + first, kept ? ranked + first : nullptr, lanes.lane,
                                        count, greatest[at]);
    const auto stored = NucleusOf<T, kLanes>(own, total[at], p[at], lanes);
    Index* out = entries + at * k;
    unsigned ties_before[1] = {0}, stored_before[1] = {0};
    own.Each([&](unsigned i, Key key, A weight) {
      const bool exists = i < count, tie[1] = {key == stored.least};
      unsigned rank[1], place[1];
      lanes.Rank(tie, ties_before, rank);
      const bool inside =
          stored.all || key > stored.least || (tie[0] && Product(weight, A(rank[0])) < stored.room);
      const Index index = exists && inside ? indices[first + i] : -1;
      const bool is_stored[1] = {index >= 0 && index < n};
      lanes.Rank(is_stored, stored_before, place);
      if (is_stored[0]) out[place[0]] = begin + i;
    });
    if (lanes.lane == 0) counts[at] = stored_before[0];
  }
}

// out_entries [batch, m k]: the entries [batch, m, k] of each row from offsets[row] on, and
// out_indices [batch, m k] their indices; zero from offsets[m] on.
template <int kBlock, int kLanes>
__global__ void __launch_bounds__(kBlock)
    NucleusWriteKernel(const Index* __restrict__ indices, const Index* __restrict__ entries,
                       const Index* __restrict__ offsets, Index* __restrict__ out_indices,
                       Index* __restrict__ out_entries, long long m, long long k,
                       long long batches) {
  const Size row = RowOfLanes<kBlock, kLanes>(), capacity = m * k;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index* ends = offsets + batch * (m + 1);
    const Index* read = indices + batch * capacity;
    Index* index = out_indices + batch * capacity;
    Index* entry = out_entries + batch * capacity;
    if (row < m) {
      const Index* own = entries + (batch * m + row) * k;
      const unsigned begin = ends[row], count = ends[row + 1] - begin;
      for (unsigned i = threadIdx.x % kLanes; i < count; i += kLanes) {
        index[begin + i] = read[own[i]];
        entry[begin + i] = own[i];
      }
    }
    Size i = unsigned(ends[m]) + Size(blockIdx.x) * kBlock + threadIdx.x;
    for (; i < capacity; i += Size(gridDim.x) * kBlock) {
      index[i] = 0;
      entry[i] = 0;
    }
  }
}

}  // namespace sgap
