// What the lanes that share a row do together: reductions, and ranks among those that keep
// something. The lanes are a warp, or all threads of a block.
#pragma once

#include "group.cuh"

namespace sgap {

// The greater and the lesser of two numbers or integers; neither number is NaN.
struct Larger {
  template <class A>
  __device__ A operator()(A x, A y) const {
    return x < y ? y : x;
  }
};
struct Smaller {
  template <class A>
  __device__ A operator()(A x, A y) const {
    return y < x ? y : x;
  }
};

// The row of a thread, of the kBlock / kLanes rows that a block has. Where kLanes are a warp, lanes
// of a row that does not exist may return: no method below has a barrier then.
template <int kBlock, int kLanes>
__device__ inline Size RowOfLanes() {
  static_assert(kLanes == 32 || kLanes == kBlock, "a warp, or a block");
  return Size(blockIdx.x) * (kBlock / kLanes) + threadIdx.x / kLanes;
}

// Every lane of the row must call each method. Of a block each method has one barrier. What warps
// share lies in one of two places, in turn: a call's writes go to the place that was read two calls
// ago, and the barrier of the call between orders them. So a block has one RowLanes for all it
// does.
template <int kLanes>
struct RowLanes {
  enum { kWarp = 32, kWarps = kLanes / kWarp, kBytes = 8, kMostFlags = 2 };
  static_assert(kLanes % kWarp == 0, "whole warps");

  struct Shared {
    alignas(kBytes) char of_warps[2][kBytes * kMostFlags * kWarps];
  };

  Shared& shared;
  unsigned turn = 0;
  const unsigned lane = threadIdx.x % kLanes;

  __device__ explicit RowLanes(Shared& shared) : shared(shared) {}

  // Every lane gets the sum over all lanes (or the combination by Combine), always in the same
  // order.
  template <class Combine = Add, class A>
  __device__ A Reduce(A own) {
    A all[1] = {own};
    Group<kWarp>().template Reduce<Combine>(all);
    if constexpr (kWarps > 1) {
      A* of_warps = InTurn<A>();
      if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = all[0];
      __syncthreads();
      all[0] = of_warps[0];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) all[0] = Combine()(all[0], of_warps[w]);
    }
    return all[0];
  }

  // For each flag f: rank[f] = before[f] + the number of lanes before this one that have it set;
  // then before[f] grows by the number of all lanes that have it set.
  template <int kFlags>
  __device__ void Rank(const bool (&set)[kFlags], unsigned (&before)[kFlags],
                       unsigned (&rank)[kFlags]) {
    static_assert(kFlags <= kMostFlags, "there is room for their counts");
    const unsigned below = (1u << threadIdx.x % kWarp) - 1, warp = threadIdx.x / kWarp;
    unsigned of_warp[kFlags];
#pragma unroll
    for (int f = 0; f < kFlags; ++f) {
      const unsigned own = __ballot_sync(~0u, set[f]);
      rank[f] = before[f] + __popc(own & below);
      of_warp[f] = __popc(own);
    }
    if constexpr (kWarps == 1) {
#pragma unroll
      for (int f = 0; f < kFlags; ++f) before[f] += of_warp[f];
    } else {
      unsigned* of_warps = InTurn<unsigned>();
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int f = 0; f < kFlags; ++f) of_warps[f * kWarps + warp] = of_warp[f];
      }
      __syncthreads();
      for (unsigned w = 0; w < kWarps; ++w) {
#pragma unroll
        for (int f = 0; f < kFlags; ++f) {
          const unsigned found = of_warps[f * kWarps + w];
          if (w < warp) rank[f] += found;
          before[f] += found;
        }
      }
    }
  }

 private:
  template <class A>
  __device__ A* InTurn() {
    static_assert(sizeof(A) <= kBytes, "there is room for it");
    A* const place = reinterpret_cast<A*>(shared.of_warps[turn]);
    turn ^= 1;
    return place;
  }
};

}  // namespace sgap
