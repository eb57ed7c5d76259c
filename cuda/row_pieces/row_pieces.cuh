// Long rows in pieces: a work list says which entries of which row each group computes, so that no
// group has more than `chunk` of them, and a second launch adds the sums of the pieces of a row, in
// their order. Deterministic. sgap_jax/launch/row_pieces.py has the sizes of the list,
// sgap_jax/primitives/_row_pieces.py makes it.
//
// The list has `elements`, of four numbers each: first `pieces` that a group computes, those of
// full chunks before the others, then the rows of several pieces.
#pragma once

#include "group.cuh"

namespace sgap {

struct RowPiece {
  Index row;    // the number of rows: no work
  Index first;  // the entries first to last - 1; of a row to be merged: the places of its sums
  Index last;
  Index place;  // of the sums of the piece among the partial sums; -1: the piece is all of its row
};

// Element i of a list; that of a group without work where `exists` is false. A list that a
// structure keeps may hold anything, as other arrays of a pytree: here its entries are brought
// between 0 and `entries`, the first not beyond the last. Callers look at the row and the place.
__device__ inline RowPiece PieceAt(const Index* list, Size i, bool exists, Size entries) {
  if (!exists) return {-1, 0, 0, -1};
  const auto found = reinterpret_cast<const Pack<Index, 4>*>(list)[i];
  const unsigned last = min(unsigned(found.at[2]), unsigned(entries));
  return {found.at[0], Index(min(unsigned(found.at[1]), last)), Index(last), found.at[3]};
}

// Whether a piece is all of its row: it has none of the places for partial sums.
__device__ inline bool AllOfRow(Index place, long long places) {
  return unsigned(place) >= unsigned(places);
}

// out[row, :] = the sum of the partial sums of its pieces, rounded once. Here a row is what one
// element of the list computes: `width` numbers, V rows of C for column vectors, all heads for
// gradients of attention. `size` is the number of elements of a member of the batch, whose last row
// may be cut off.
//
// Grid: x over the rows of several pieces and y over tiles of kLanes * kColumns numbers, both taken
// in turn: most lists have few such rows, and empty elements after them. kShare groups of lanes
// take every kShare-th piece; what they have is added by halves, each lane of the block a number,
// so that few steps follow the last load.
template <class T, int kColumns, int kLanes, int kShare, bool kVector>
__global__ void __launch_bounds__(kLanes* kShare)
    SumPiecesKernel(const Accumulator<T>* __restrict__ partial, const Index* __restrict__ list,
                    const T*, T* __restrict__ out, long long pieces, long long elements,
                    long long places, long long width, long long size, long long rows,
                    long long batches, long long sharing) {
  using A = Accumulator<T>;
  enum { kTile = kLanes * kColumns };
  static_assert(kColumns <= kShare, "a lane for each number of a tile");
#if __CUDA_ARCH__ >= 1200
  constexpr int kAtOnce = sizeof(T) == 4 ? 4 : 2;  // of double and of 16 bits, four spill there
#else
  constexpr int kAtOnce = sizeof(A) > 4 ? 2 : 4;
#endif
  MoveToStructure(sharing, 4 * elements - 1, list);
  __shared__ Pack<A, kColumns> given[kShare * kLanes];
  const A* const numbers = given[0].at + threadIdx.x;
  const unsigned lane = threadIdx.x % kLanes, share = threadIdx.x / kLanes;
  Size element = pieces + blockIdx.x;
  RowPiece own = PieceAt(list, element, true, places);
#pragma unroll 1
  while (unsigned(own.row) < rows) {  // the same in all threads of the block
    element += gridDim.x;
    const Index next = element < elements ? list[4 * element] : -1;  // most blocks have no other
    const Index start = own.first + Index(share);
    const Size before = Size(unsigned(own.row)) * width;
#pragma unroll 1
    for (Size tile = blockIdx.y; tile * kTile < width; tile += gridDim.y) {
      const Size column = tile * kTile + lane * kColumns, number = tile * kTile + threadIdx.x;
      const unsigned left = kVector ? kColumns : unsigned(width - column);
      const Index last = column < width ? own.last : 0;
      const unsigned steps = start < last ? unsigned(last - start + kShare - 1) / kShare : 0;
      for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
        const A* from = partial + (batch * places + start) * width + column;
        Pack<A, kColumns> sums = {};
#pragma unroll(kAtOnce)
        for (unsigned step = 0; step < steps; ++step, from += kShare * width) {
          const auto found = Load<kVector, kColumns>(from, left);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums.at[j] += found.at[j];
        }
        given[threadIdx.x] = sums;
        __syncthreads();
        if (threadIdx.x < kTile && number < width && before + number < size) {
          A each[kShare];
#pragma unroll
          for (int i = 0; i < kShare; ++i) each[i] = numbers[i * kTile];
#pragma unroll
          for (int half = kShare / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; ++i) each[i] += each[i + half];
          }
          Narrow(each[0], out[batch * size + before + number]);
        }
        __syncthreads();
      }
    }
    if (unsigned(next) >= rows) return;
    own = PieceAt(list, element, true, places);
  }
}

}  // namespace sgap
