// Bitmaps: a mask in bits, in words of 32 columns, lower columns in lower bits; and the rows and
// columns of the bits that are set. How many are set before each word is a prefix sum, which XLA
// computes between the two launches.
//
// Grid: x is a tile of consecutive words, one for each thread; of BitmapEntriesKernel z is the
// batch. Each place has one writer: deterministic.
#pragma once

#include "types.cuh"

namespace sgap {

enum { kWordColumns = 32 };

// words [rows, ceil(columns / 32)] of a mask [rows, columns], whose bytes are 0 where a bit is not
// set. A warp makes 32 words one by one, each by a vote of lanes that have loaded a byte, and
// stores them together. Single bytes, because a row may begin at any address; all are loaded before
// the first vote.
template <int kBlock>
__global__ void __launch_bounds__(kBlock)
    BitmapOfMaskKernel(const unsigned char* __restrict__ mask, unsigned* __restrict__ words,
                       long long rows, long long columns) {
  const unsigned lane = threadIdx.x % 32;
  const Size own = Size(blockIdx.x) * kBlock + threadIdx.x, first = own - lane;
  const Size row_words = (columns + kWordColumns - 1) / kWordColumns;
  const Size padded = row_words * kWordColumns, size = rows * columns;
  Size column = first % row_words * kWordColumns + lane;
  Size at = first / row_words * columns + column;
  bool set[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    set[i] = column < columns && at < size && mask[at] != 0;
    column += kWordColumns;
    at += kWordColumns;
    if (column >= padded) {  // on to the next row
      column -= padded;
      at -= padded - columns;
    }
  }
  unsigned word = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const unsigned bits = __ballot_sync(~0u, set[i]);
    if (lane == i) word = bits;
  }
  if (own < rows * row_words) words[own] = word;
}

// The position of the bit that is set with `rank` others below it; 31 if there is none.
__device__ inline unsigned NthBit(unsigned word, unsigned rank) {
  unsigned position = 0;
#pragma unroll
  for (unsigned width = 16; width > 0; width /= 2) {
    const unsigned low = __popc(word >> position & ((1u << width) - 1));
    if (rank >= low) {
      rank -= low;
      position += width;
    }
  }
  return position;
}

// rows, columns [batch, nse]: of the first nse bits that are set in words [batch, count], row_words
// of them in each row; zeros behind the last one. begins [batch, count + 1]: how many bits are set
// before each word, the greatest Index if there are more. No place is written that is not below
// nse, whatever the arrays hold.
//
// A lane has a word, but the warp writes the entries of all its words in the order of their places:
// stores are coalesced, and none waits for the lane with most bits.
template <int kBlock>
__global__ void __launch_bounds__(kBlock)
    BitmapEntriesKernel(const unsigned* __restrict__ words, const Index* __restrict__ begins,
                        Index* __restrict__ rows, Index* __restrict__ columns, long long count,
                        long long row_words, long long nse, long long batches) {
  const unsigned lane = threadIdx.x % 32;
  const Size own = Size(blockIdx.x) * kBlock + threadIdx.x, threads = Size(gridDim.x) * kBlock;
  const Index own_row = own / Size(row_words);
  const Index own_column = own % Size(row_words) * kWordColumns;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index* begin_of = begins + batch * (count + 1);
    Index* row_of = rows + batch * nse;
    Index* column_of = columns + batch * nse;
    const unsigned total = begin_of[count];
    const unsigned own_word = own < count ? words[batch * count + own] : 0;
    const unsigned own_begin = own < count ? begin_of[own] : total;
    const unsigned begin = __shfl_sync(~0u, own_begin, 0);
    const unsigned last = __shfl_sync(~0u, own_begin + __popc(own_word), 31);
    const unsigned end = last < nse ? last : nse;
    for (unsigned first = begin; first < end; first += 32) {
      const unsigned place = first + lane;
      unsigned from = 0;  // the lane whose word has the entry: the last to begin before it or at it
#pragma unroll
      for (unsigned distance = 16; distance > 0; distance /= 2) {
        const unsigned its_begin = __shfl_sync(~0u, own_begin, from + distance);
        if (its_begin <= place) from += distance;
      }
      const unsigned rank = place - __shfl_sync(~0u, own_begin, from);
      const unsigned bit = NthBit(__shfl_sync(~0u, own_word, from), rank);
      const Index row = __shfl_sync(~0u, own_row, from);
      const Index column = __shfl_sync(~0u, own_column, from) + Index(bit);
      if (place < end) {
        row_of[place] = row;
        column_of[place] = column;
      }
    }
    for (Size place = total + own; place < nse; place += threads) {
      row_of[place] = 0;
      column_of[place] = 0;
    }
  }
}

}  // namespace sgap
