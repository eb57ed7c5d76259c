// Functions that the loops printed by the compiler call (sgap_jax/compiler/cuda/print_cuda.py).
#pragma once

#include "group.cuh"
#include "row_search.cuh"

namespace sgap {

// The largest p in [low, high) with array[p] <= target, given array[low] <= target; low for an
// empty range.
template <class I>
__device__ inline I Search(const Index* array, I low, I high, I target) {
  const I most = 0x7fffffff;  // at least every element of the array
  if (low >= high) return low;
  return RowBetween(array, unsigned(low), unsigned(high), Index(target < most ? target : most));
}

// *at = Combine(*at, value), atomically.
template <class Combine>
struct Atomically {
  __device__ static void Update(float* at, float value) {
    int* bits = reinterpret_cast<int*>(at);
    int seen = *reinterpret_cast<volatile int*>(bits), before;
    do {
      before = seen;
      const float combined = Combine()(__int_as_float(before), value);
      seen = atomicCAS(bits, before, __float_as_int(combined));
    } while (seen != before);
  }

  __device__ static void Update(double* at, double value) {
    Size* bits = reinterpret_cast<Size*>(at);
    Size seen = *reinterpret_cast<volatile Size*>(bits), before;
    do {
      before = seen;
      const double combined = Combine()(__longlong_as_double(before), value);
      seen = atomicCAS(bits, before, Size(__double_as_longlong(combined)));
    } while (seen != before);
  }
};

template <>
struct Atomically<Add> {
  template <class A>
  __device__ static void Update(A* at, A value) {
    atomicAdd(at, value);
  }
};

// The update without atomics, for a thread that owns the element.
template <class Combine>
struct Alone {
  template <class A>
  __device__ static void Update(A* at, A value) {
    *at = Combine()(*at, value);
  }
};

// Parallel reduction: atomicAddGroup of Sgap, section 5. All lanes of a group have the same
// address.
template <class Combine, int kGroup, class Access = Atomically<Combine>, class A>
__device__ inline void GroupReduce(A* at, A value) {
  const Group<kGroup> group;
  A all[1] = {value};
  group.template Reduce<Combine>(all);
  if (group.lane == 0) Access::Update(at, all[0]);
}

// Segment reduction: segReduceGroup of Sgap, section 5. Lanes of equal index are neighbours; lanes
// of a negative index take no part.
template <class Combine, int kGroup, class I, class A>
__device__ inline void SegReduce(A* array, I index, A value) {
  const Group<kGroup> group;
  A all[1] = {value};
  const bool first = group.template ReduceSegments<Combine>(index, all);
  if (first && index >= 0) Atomically<Combine>::Update(array + index, all[0]);
}

}  // namespace sgap
