// Reductions over a group: kGroup neighbouring lanes of a warp (Sgap, section 4).
// Every lane of the group must call; the masks name exactly these lanes, so groups of one warp may
// be at different places.
#pragma once

#include "types.cuh"

namespace sgap {

struct Add {
  template <class A>
  __device__ A operator()(A x, A y) const {
    return x + y;
  }
};

// NaN if either is.
struct Greater {
  __device__ float operator()(float x, float y) const {
    float greater;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(x), "f"(y));
    return greater;
  }
  __device__ double operator()(double x, double y) const { return x > y || x != x ? x : y; }
};

template <int kGroup>
struct Group {
  enum { kWarp = 32 };
  static_assert(kGroup >= 1 && kGroup <= kWarp && (kGroup & (kGroup - 1)) == 0,
                "a group is 1, 2, 4, 8, 16 or 32 lanes");

  unsigned lane = threadIdx.x % kGroup;  // within the group
  unsigned mask = (kGroup == kWarp ? ~0u : (1u << kGroup) - 1)
                  << (threadIdx.x % kWarp - threadIdx.x % kGroup);

  // Parallel reduction: the sum (or what else Combine makes of two) over all lanes, in every lane,
  // in the same order each time.
  template <class Combine = Add, class A, int kColumns>
  __device__ void Reduce(A (&sums)[kColumns]) const {
#pragma unroll
    for (int distance = kGroup / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        sums[j] = Combine()(sums[j], __shfl_xor_sync(mask, sums[j], distance, kGroup));
      }
    }
  }

  // Segment reduction: lanes with equal keys, which must be neighbours, are one segment. The first
  // lane of each gets the sum over the segment, and true.
  template <class A, int kColumns>
  __device__ bool ReduceSegments(Index key, A (&sums)[kColumns]) const {
#pragma unroll
    for (int distance = 1; distance < kGroup; distance *= 2) {
      const Index other = __shfl_down_sync(mask, key, distance, kGroup);
      const bool same = lane + distance < kGroup && other == key;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const A sum = __shfl_down_sync(mask, sums[j], distance, kGroup);
        if (same) sums[j] += sum;
      }
    }
    const Index previous = __shfl_up_sync(mask, key, 1, kGroup);
    return lane == 0 || previous != key;
  }
};

}  // namespace sgap
