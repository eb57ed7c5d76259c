// Reductions over a group: kGroup neighbouring lanes of a warp (Sgap, section 4), or, with kSide >
// 1, kGroup lanes at a distance of kSide, so that kSide groups are interleaved. Every lane of the
// group must call; the masks name exactly these lanes, so groups of one warp may diverge. Below
// also: over the groups of a block.
#pragma once

#include "types.cuh"

namespace sgap {

struct Add {
  template <class A>
  __device__ A operator()(A x, A y) const {
    return x + y;
  }
};

// The greater of two values; NaN if either is NaN.
struct Greater {
  __device__ float operator()(float x, float y) const {
#if __CUDA_ARCH__ >= 800
    float greater;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(x), "f"(y));
    return greater;
#else
    return x == x && y == y ? fmaxf(x, y) : __uint_as_float(0x7fffffff);
#endif
  }
  __device__ double operator()(double x, double y) const { return x > y || x != x ? x : y; }
};

struct Less {
  __device__ float operator()(float x, float y) const {
#if __CUDA_ARCH__ >= 800
    float less;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(less) : "f"(x), "f"(y));
    return less;
#else
    return x == x && y == y ? fminf(x, y) : __uint_as_float(0x7fffffff);
#endif
  }
  __device__ double operator()(double x, double y) const { return x < y || x != x ? x : y; }
};

// What lane l gets: the value of lane l xor distance, or of lane l + distance, of `width` lanes.
// Reductions of a type that is not a number have overloads for it.
template <class A>
__device__ inline A ShuffleXor(unsigned mask, A value, int distance, int width) {
  return __shfl_xor_sync(mask, value, distance, width);
}
template <class A>
__device__ inline A ShuffleDown(unsigned mask, A value, int distance, int width) {
  return __shfl_down_sync(mask, value, distance, width);
}

template <int kGroup, int kSide = 1>
struct Group {
  enum { kWarp = 32, kLanes = kGroup * kSide };  // of all interleaved groups
  static_assert(kLanes >= 1 && kLanes <= kWarp && (kLanes & (kLanes - 1)) == 0,
                "a group is 1, 2, 4, 8, 16 or 32 lanes, and so are those side by side");

  unsigned lane = threadIdx.x / kSide % kGroup;  // within the group
  unsigned side = threadIdx.x % kSide;           // which of the interleaved groups
  unsigned mask = (kLanes == kWarp ? ~0u : (1u << kLanes) - 1)
                  << (threadIdx.x % kWarp - threadIdx.x % kLanes);

  // Parallel reduction: every lane gets the sum over all lanes (or the combination by Combine),
  // always in the same order.
  template <class Combine = Add, class A, int kColumns>
  __device__ void Reduce(A (&sums)[kColumns]) const {
#pragma unroll
    for (int distance = kLanes / 2; distance >= kSide; distance /= 2) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        sums[j] = Combine()(sums[j], ShuffleXor(mask, sums[j], distance, kLanes));
      }
    }
  }

  // The methods below are for neighbouring lanes, kSide = 1.

  // Reduces several sums with fewer shuffles: as the lanes halve, each half goes on with half of
  // the sums, until one is left. Lane l ends with kCount / kGroup of the sums, from sum l * kCount
  // / kGroup on (with one, shared by neighbouring lanes, where there are more lanes than sums).
  template <class A, int kCount>
  __device__ void ReduceSpread(A (&sums)[kCount]) const {
    static_assert((kCount & (kCount - 1)) == 0, "sums that halve");
#pragma unroll
    for (int halves = 2; halves <= kGroup; halves *= 2) {
      const int distance = kGroup / halves;
      if (halves > kCount) {
        sums[0] += __shfl_xor_sync(mask, sums[0], distance, kGroup);
        continue;
      }
      const bool upper = lane & distance;
#pragma unroll
      for (int j = 0; j < kCount / halves; ++j) {
        const A low = sums[j], high = sums[j + kCount / halves];
        sums[j] = upper ? high : low;
        sums[j] += __shfl_xor_sync(mask, upper ? low : high, distance, kGroup);
      }
    }
  }

  // sums += `given` of the next lane (or the combination by Combine); the last lane adds nothing.
  template <class Combine = Add, class A, int kColumns>
  __device__ void AddNext(const A (&given)[kColumns], A (&sums)[kColumns]) const {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const A next = ShuffleDown(mask, given[j], 1, kGroup);
      if (lane + 1 < kGroup) sums[j] = Combine()(sums[j], next);
    }
  }

  // Segment reduction: lanes with equal keys, which must be neighbours, form a segment. The first
  // lane of each segment gets the sum over it (or the combination by Combine) and true.
  template <class Combine = Add, class Key, class A, int kColumns>
  __device__ bool ReduceSegments(Key key, A (&sums)[kColumns]) const {
#pragma unroll
    for (int distance = 1; distance < kGroup; distance *= 2) {
      const Key other = __shfl_down_sync(mask, key, distance, kGroup);
      const bool same = lane + distance < kGroup && other == key;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const A sum = ShuffleDown(mask, sums[j], distance, kGroup);
        if (same) sums[j] = Combine()(sums[j], sum);
      }
    }
    const Key previous = __shfl_up_sync(mask, key, 1, kGroup);
    return lane == 0 || previous != key;
  }
};

// Combines the values `own` of the kShare groups that share rows into those of the first group,
// lane by lane, halving the number of groups in each round: always in the same order. All threads
// of the block must call.
template <int kGroup, int kShare, int kBlock, int kCount, class A, class Combine>
__device__ inline void MergeShares(A (&own)[kCount], Combine combine) {
  if constexpr (kShare > 1) {
    __shared__ A given[kCount][kBlock];
    const unsigned share = threadIdx.x / kGroup % kShare;
#pragma unroll
    for (unsigned half = kShare / 2; half > 0; half /= 2) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) given[i][threadIdx.x] = own[i];
      __syncthreads();
      if (share >= half) continue;
      A other[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) other[i] = given[i][threadIdx.x + half * kGroup];
      combine(own, other);
    }
    __syncthreads();
  }
}

// Combines values one by one, for MergeShares.
template <class Combine>
struct CombineAll {
  template <class A, int kCount>
  __device__ void operator()(A (&own)[kCount], const A (&other)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) own[i] = Combine()(own[i], other[i]);
  }
};
using AddAll = CombineAll<Add>;

}  // namespace sgap
