// A stable sort of entries by their keys, which are column indices or the number of columns: the
// order of the entries of a transposed structure, in linear time. It goes by 8 bits of the keys at
// a time, the lowest first, in three launches each: TransposeCountKernel counts the entries of each
// tile with each digit, TransposeStartKernel adds the counts of the tiles before, and
// TransposeMoveKernel moves each entry behind those with lower digits, and behind those of its own
// digit before it.
//
// Grid: x is a tile of consecutive entries, or of TransposeStartKernel a digit; z the batch. Keys
// may hold anything: places follow from the counts alone. Counts are atomic in shared memory, but
// no result depends on their order: deterministic.
#pragma once

#include "types.cuh"

namespace sgap {

enum { kDigits = 256 };

__device__ inline unsigned DigitOf(Index key, long long shift) {
  return unsigned(key) >> shift & (kDigits - 1);
}

// The sum of the values of the block's threads up to this one; `total` is that of all.
template <int kBlock>
__device__ inline Size UpToInBlock(Size own, Size (&of_warps)[kBlock / 32], Size& total) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Size up_to = own;
#pragma unroll
  for (unsigned distance = 1; distance < 32; distance *= 2) {
    const Size before = __shfl_up_sync(~0u, up_to, distance);
    if (lane >= distance) up_to += before;
  }
  if (lane == 31) of_warps[warp] = up_to;
  __syncthreads();
  total = 0;
  for (unsigned w = 0; w < kBlock / 32; ++w) {
    if (w < warp) up_to += of_warps[w];
    total += of_warps[w];
  }
  __syncthreads();  // before the next sum
  return up_to;
}

// counts [batch, kDigits, tiles]: of the keys [batch, entries] of each tile with each digit.
template <int kBlock, int kSteps>
__global__ void __launch_bounds__(kBlock)
    TransposeCountKernel(const Index* __restrict__ keys, Index* __restrict__ counts,
                         long long entries, long long shift, long long batches) {
  __shared__ unsigned count[kDigits];
  const Size tile = blockIdx.x, tiles = gridDim.x;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    for (unsigned d = threadIdx.x; d < kDigits; d += kBlock) count[d] = 0;
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Size p = (tile * kSteps + step) * kBlock + threadIdx.x;
      if (p < entries) atomicAdd(&count[DigitOf(keys[batch * entries + p], shift)], 1u);
    }
    __syncthreads();
    for (unsigned d = threadIdx.x; d < kDigits; d += kBlock) {
      counts[(batch * kDigits + d) * tiles + tile] = count[d];
    }
  }
}

// starts [batch, kDigits, tiles]: how many entries with the digit the tiles before have;
// totals [batch, kDigits]: how many all have. A block for each digit.
template <int kBlock>
__global__ void __launch_bounds__(kBlock)
    TransposeStartKernel(const Index* __restrict__ counts, Index* __restrict__ starts,
                         Index* __restrict__ totals, long long tiles, long long batches) {
  __shared__ Size of_warps[kBlock / 32];
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Size digit = batch * kDigits + blockIdx.x;
    Size before = 0, total;
    for (Size first = 0; first < tiles; first += kBlock, before += total) {
      const Size tile = first + threadIdx.x;
      const Size own = tile < tiles ? unsigned(counts[digit * tiles + tile]) : 0;
      const Size up_to = before + UpToInBlock<kBlock>(own, of_warps, total);
      if (tile < tiles) starts[digit * tiles + tile] = up_to - own;
    }
    if (threadIdx.x == 0) totals[digit] = before;
  }
}

// What the threads of a block share.
template <int kBlock, int kSteps>
struct MoveShared {
  unsigned place[kBlock / 32][kDigits];  // in the tile, of each warp's next entry with each digit
  unsigned shift_of[kDigits];            // from places in the tile to those among all
  Size of_warps[kBlock / 32];
  Index keys[kBlock * kSteps], entries[kBlock * kSteps];  // of the tile, sorted
};

// sorted_keys, sorted_entries [batch, entries]: keys and entries, each moved to its place. In the
// first pass the entries are 0, 1, 2, ..., and the operand is not read. A warp has consecutive
// entries, so those before one in its tile are of warps before, of steps before or of lanes before.
template <int kBlock, int kSteps>
__global__ void __launch_bounds__(kBlock)
    TransposeMoveKernel(const Index* __restrict__ keys, const Index* __restrict__ entries,
                        const Index* __restrict__ starts, const Index* __restrict__ totals,
                        Index* __restrict__ sorted_keys, Index* __restrict__ sorted_entries,
                        long long count, long long shift, long long batches) {
  static_assert(int(kBlock) == int(kDigits), "each thread has a digit");
  __shared__ MoveShared<kBlock, kSteps> shared;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
  const Size tile = blockIdx.x, tiles = gridDim.x, first = tile * (kBlock * kSteps);
  const unsigned own_first = warp * (32 * kSteps) + lane;
  const unsigned size = count - first < kBlock * kSteps ? count - first : kBlock * kSteps;
  unsigned* own_place = shared.place[warp];
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index* read_keys = keys + batch * count + first;
    const Index* read_entries = entries + batch * count + first;
    for (unsigned d = lane; d < kDigits; d += 32) own_place[d] = 0;
    __syncwarp();
    Index key[kSteps];
    unsigned rank[kSteps];  // among the warp's entries with the same digit
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const unsigned at = own_first + step * 32;
      key[step] = at < size ? read_keys[at] : 0;
      const unsigned digit = DigitOf(key[step], shift);
      unsigned same = __ballot_sync(~0u, at < size);  // lanes with the same digit
#pragma unroll
      for (int bit = 0; bit < 8; ++bit) {
        const unsigned set = __ballot_sync(~0u, digit >> bit & 1);
        same &= digit >> bit & 1 ? set : ~set;
      }
      rank[step] = own_place[digit] + __popc(same & below);
      __syncwarp();
      if (at < size && (same & below) == 0) own_place[digit] += __popc(same);
      __syncwarp();
    }
    __syncthreads();
    {
      const unsigned digit = threadIdx.x;
      unsigned in_tile = 0;
      for (unsigned w = 0; w < kBlock / 32; ++w) in_tile += shared.place[w][digit];
      // Two sums at once: of all entries, and of those of the tile.
      const Size own = Size(unsigned(totals[batch * kDigits + digit])) << 32 | in_tile;
      Size total;
      const Size before = UpToInBlock<kBlock>(own, shared.of_warps, total) - own;
      unsigned place = unsigned(before);
      const unsigned start = starts[(batch * kDigits + digit) * tiles + tile];
      shared.shift_of[digit] = unsigned(before >> 32) + start - place;
      for (unsigned w = 0; w < kBlock / 32; ++w) {
        const unsigned of_warp = shared.place[w][digit];
        shared.place[w][digit] = place;
        place += of_warp;
      }
    }
    __syncthreads();
    // By way of shared memory: neighbours are written together. Of the next batch member the first
    // barrier above orders what is written here after what this one reads.
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const unsigned at = own_first + step * 32;
      if (at >= size) continue;
      const unsigned place = own_place[DigitOf(key[step], shift)] + rank[step];
      shared.keys[place] = key[step];
      shared.entries[place] = shift == 0 ? Index(first + at) : read_entries[at];
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < size; i += kBlock) {
      const Index moved = shared.keys[i];
      const Size place = batch * count + (shared.shift_of[DigitOf(moved, shift)] + i);
      sorted_keys[place] = moved;
      sorted_entries[place] = shared.entries[i];
    }
  }
}

}  // namespace sgap
