// The k greatest scores of each row, by ascending column, in two launches: TopKSelectKernel finds
// the columns of each row and how many there are, and TopKWriteKernel moves them up to where the
// rows before end, which a prefix sum of the counts says, and reads their scores.
//
// Grid: a block for each row in x, z over the batch. A row is read once for each 8 bits of its keys
// until the k-th greatest is known (radix select), and once to write. Counts are atomic in shared
// memory, but no result depends on their order: deterministic.
#pragma once

#include "row_lanes.cuh"
#include "score_key.cuh"

namespace sgap {

// Keys above `least` are selected, and of those that equal it the first `ties`.
template <class Key>
struct Selection {
  Key least;
  unsigned ties;
};

// What the threads of a block share.
template <int kBlock>
struct TopKShared {
  enum { kDigits = 256 };
  unsigned count[kDigits];        // of keys with each digit
  unsigned digit, wanted, found;  // of the last pass
  typename RowLanes<kBlock>::Shared lanes;
};

// The digit of the `wanted`-th greatest among counted keys, how many of those with it are wanted,
// and how many have it. Called by the first warp.
template <int kBlock>
__device__ inline void FindDigit(TopKShared<kBlock>& shared, unsigned wanted) {
  enum { kOwn = TopKShared<kBlock>::kDigits / 32 };
  const unsigned lane = threadIdx.x, first = (31 - lane) * kOwn;  // lane 0 has the greatest digits
  unsigned own = 0;
  for (unsigned d = 0; d < kOwn; ++d) own += shared.count[first + d];
  unsigned up_to = own;  // keys with digits from `first` on
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const unsigned before = __shfl_up_sync(~0u, up_to, distance);
    if (lane >= distance) up_to += before;
  }
  unsigned above = up_to - own;
  if (wanted <= above || wanted > up_to) return;
  unsigned digit = first + kOwn - 1;
  for (; above + shared.count[digit] < wanted; --digit) above += shared.count[digit];
  shared.digit = digit;
  shared.wanted = wanted - above;
  shared.found = shared.count[digit];
}

// The k greatest of `count` scores, 0 < k < count. Every thread of the block gets the same.
template <class T, int kBlock>
__device__ inline Selection<ScoreKey<T>> Greatest(const T* scores, unsigned count, unsigned k,
                                                  TopKShared<kBlock>& shared) {
  using Key = ScoreKey<T>;
  Key prefix = 0, known = 0;  // the bits of the k-th key so far, and which these are
  unsigned wanted = k;
#pragma unroll 1
  for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
    for (unsigned d = threadIdx.x; d < TopKShared<kBlock>::kDigits; d += kBlock) {
      shared.count[d] = 0;
    }
    __syncthreads();
    for (unsigned j = threadIdx.x; j < count; j += kBlock) {
      const Key key = KeyOf(Widen(scores[j]));
      if ((key & known) == prefix) atomicAdd(&shared.count[key >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x < 32) FindDigit(shared, wanted);
    __syncthreads();
    prefix |= Key(shared.digit) << shift;
    known |= Key(255) << shift;
    wanted = shared.wanted;
    const bool whole = shared.found == wanted;  // no key with this prefix is left out
    if (whole) break;
  }
  if (prefix == 0) return {0, 0};  // fewer than k scores are not -infinity
  // Where the loop ended early, the keys with the prefix are those from it on: all are selected.
  return known == ~Key(0) ? Selection<Key>{prefix, wanted} : Selection<Key>{prefix - 1, 0};
}

// columns [batch, m, k]: the selected columns of each row, counts [batch, m] of them. Row i has the
// columns below limits[i]; limits are `limit_stride` apart in the batch (0: shared).
template <class T, int kBlock>
__global__ void __launch_bounds__(kBlock)
    TopKSelectKernel(const T* __restrict__ scores, const Index* __restrict__ limits,
                     Index* __restrict__ counts, Index* __restrict__ columns, long long m,
                     long long n, long long k, long long batches, long long limit_stride) {
  __shared__ TopKShared<kBlock> shared;
  RowLanes<kBlock> lanes(shared.lanes);
  const Size row = blockIdx.x;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index limit = limits[batch * limit_stride + row];
    const unsigned count = limit < 0 ? 0 : limit < n ? limit : n;
    const T* own = scores + (batch * m + row) * n;
    Index* out = columns + (batch * m + row) * k;
    Selection<ScoreKey<T>> selection = {0, 0};
    if (k < count) selection = Greatest<T, kBlock>(own, count, k, shared);
    unsigned before[2] = {0, 0};  // above and equal, in the columns before
    for (unsigned first = 0; first < count; first += kBlock) {
      const unsigned j = first + threadIdx.x;
      const ScoreKey<T> key = j < count ? KeyOf(Widen(own[j])) : 0;
      const bool above = key > selection.least;
      const bool equal = key == selection.least && selection.ties > 0 && j < count;
      const bool found[2] = {above, equal};
      unsigned rank[2];
      lanes.Rank(found, before, rank);
      const unsigned e = rank[1] < selection.ties ? rank[1] : selection.ties;
      if (above || (equal && rank[1] < selection.ties)) out[rank[0] + e] = j;
    }
    const unsigned ties = before[1] < selection.ties ? before[1] : selection.ties;
    if (threadIdx.x == 0) counts[batch * m + row] = before[0] + ties;
  }
}

// indices [batch, m k]: the columns [batch, m, k] of each row from offsets[row] on, and values
// [batch, m k] their scores; zero from offsets[m] on.
template <class T, int kBlock>
__global__ void __launch_bounds__(kBlock)
    TopKWriteKernel(const T* __restrict__ scores, const Index* __restrict__ columns,
                    const Index* __restrict__ offsets, T* __restrict__ values,
                    Index* __restrict__ indices, long long m, long long n, long long k,
                    long long batches) {
  const Size row = blockIdx.x, capacity = m * k;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index* ends = offsets + batch * (m + 1);
    const unsigned begin = ends[row], count = ends[row + 1] - begin;
    const T* own = scores + (batch * m + row) * n;
    const Index* read = columns + (batch * m + row) * k;
    T* value = values + batch * capacity;
    Index* index = indices + batch * capacity;
    for (unsigned p = threadIdx.x; p < count; p += kBlock) {
      const Index column = read[p];
      index[begin + p] = column;
      value[begin + p] = own[column];
    }
    Size p = unsigned(ends[m]) + row * kBlock + threadIdx.x;
    for (; p < capacity; p += m * kBlock) {
      index[p] = 0;
      value[p] = T{};
    }
  }
}

}  // namespace sgap
