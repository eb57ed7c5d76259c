// The products of a row of A B, for a team of lanes: entries of a row of A, and of each the row of
// B that its column names. How they are cut among lanes does not depend on the lengths of B's rows.
#pragma once

#include "types.cuh"

namespace sgap {

struct SparseRows {
  const Index *offsets, *indices;
};

// kLanes threads side by side, which meet at barriers: of a block all, or some of a warp.
template <int kLanes>
struct Team {
  enum { kWidth = kLanes };
  unsigned lane = threadIdx.x % kLanes, number = threadIdx.x / kLanes;
  unsigned mask = kLanes >= 32
                      ? ~0u
                      : ((1u << kLanes % 32) - 1) << (threadIdx.x % 32 - threadIdx.x % kLanes % 32);

  __device__ void Meet() const {
    if constexpr (kLanes > 32) {
      __syncthreads();
    } else {
      __syncwarp(mask);
    }
  }
  // Whether any lane has it; a barrier.
  __device__ bool Any(bool own) const {
    if constexpr (kLanes > 32) {
      return __syncthreads_or(own);
    } else {
      __syncwarp(mask);
      return __any_sync(mask, own);
    }
  }
};

// The sum of the values of the lanes up to this one. `sums` has those of all lanes.
template <int kLanes>
__device__ inline Size UpTo(const Team<kLanes>& team, Size* sums, Size sum) {
  sums[team.lane] = sum;
  team.Meet();
#pragma unroll 1
  for (unsigned distance = 1; distance < kLanes; distance *= 2) {
    if (team.lane >= distance) sum += sums[team.lane - distance];
    team.Meet();
    sums[team.lane] = sum;
    team.Meet();
  }
  return sum;
}

// Calls each(exists, e, q, product) for the products of a row: e is the entry of A, q that of B,
// and products count from 0. All lanes call it at once, each for the product after that of the lane
// before; a lane whose product does not exist says so. Returns the number of products.
template <int kLanes, class Each>
__device__ inline Size EachProduct(const SparseRows& a, const SparseRows& b, Size row,
                                   const Team<kLanes>& team, Size* ends, Index* begins, Each each) {
  const unsigned last = a.offsets[row + 1];
  Size done = 0;
#pragma unroll 1
  for (unsigned first = a.offsets[row]; first < last; first += kLanes) {
    const unsigned e = first + team.lane;
    const Index k = e < last ? a.indices[e] : -1;
    Size end = 0;
    if (k >= 0) {
      const Index begin = b.offsets[k];
      end = unsigned(b.offsets[k + 1] - begin);
      begins[team.lane] = begin;
    }
    UpTo(team, ends, end);
    const Size total = ends[kLanes - 1];
#pragma unroll 1
    for (Size turn = 0; turn < total; turn += kLanes) {
      const Size product = turn + team.lane;
      unsigned entry = 0;  // the first whose products end after this one
      Size q = 0;
      if (product < total) {
#pragma unroll
        for (unsigned step = kLanes / 2; step > 0; step /= 2) {
          if (ends[entry + step - 1] <= product) entry += step;
        }
        q = begins[entry] + (product - (entry > 0 ? ends[entry - 1] : 0));
      }
      each(product < total, first + entry, q, done + product);
    }
    done += total;
    team.Meet();  // before the next entries
  }
  return done;
}

}  // namespace sgap
