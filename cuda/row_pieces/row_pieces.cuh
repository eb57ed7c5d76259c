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
// between 0 and `entries`, with kOrdered the last not before the first, and its place below
// `places`; callers look at the row.
template <bool kOrdered = true>
__device__ inline RowPiece PieceAt(const Index* list, Size i, bool exists, Size entries,
                                   Size places) {
  if (!exists) return {-1, 0, 0, -1};
  const auto found = reinterpret_cast<const Pack<Index, 4>*>(list)[i];
  const unsigned end = unsigned(entries);
  const unsigned first = min(unsigned(found.at[1]), end), last = min(unsigned(found.at[2]), end);
  return {found.at[0], Index(first), Index(kOrdered ? max(first, last) : last),
          min(found.at[3], Index(places) - 1)};
}

// out[row, :] = the sum of the partial sums of its pieces, rounded once. Here a row is what one
// element of the list computes: `width` numbers, V rows of C for column vectors, all heads for
// gradients of attention. `size` is the number of elements of a member of the batch, whose last row
// may be cut off.
//
// Grid: x over the rows of several pieces and y over tiles of kLanes * kColumns numbers, both taken
// in turn: most lists have few such rows, and empty elements after them. kShare groups of lanes
// take every kShare-th piece.
template <class T, int kColumns, int kLanes, int kShare, bool kVector>
__global__ void __launch_bounds__(kLanes* kShare)
    SumPiecesKernel(const Accumulator<T>* __restrict__ partial, const Index* __restrict__ list,
                    const T*, T* __restrict__ out, long long pieces, long long elements,
                    long long places, long long width, long long size, long long rows,
                    long long batches, long long sharing) {
  using A = Accumulator<T>;
#if __CUDA_ARCH__ >= 1200
  constexpr int kAtOnce = sizeof(T) == 4 ? 4 : 2;  // of double and of 16 bits, four spill there
#else
  constexpr int kAtOnce = sizeof(A) > 4 ? 2 : 4;
#endif
  MoveToStructure(sharing, 4 * elements - 1, list);
  const unsigned lane = threadIdx.x % kLanes, share = threadIdx.x / kLanes;
  Size element = pieces + blockIdx.x;
  RowPiece own = PieceAt<false>(list, element, true, places, 0);
#pragma unroll 1
  while (unsigned(own.row) < rows) {  // the same in all threads of the block
    const Size step = kShare * Size(width), first = Size(unsigned(own.row)) * width;
    const Size end = Size(width) < size - first ? Size(width) : size - first;
#pragma unroll 1
    for (Size tile = blockIdx.y; tile * kLanes * kColumns < width; tile += gridDim.y) {
      const Size column = (tile * kLanes + lane) * kColumns;
      const unsigned left = column < end ? unsigned(end - column) : 0;
      for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
        const A* from = partial + (batch * places + unsigned(own.first) + share) * width + column;
        A sums[kColumns] = {};
#pragma unroll(kAtOnce)
        for (Index p = own.first + share; p < own.last; p += kShare, from += step) {
          const auto found = Load<kVector, kColumns>(from, left);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums[j] += found.at[j];
        }
        MergeShares<kLanes, kShare, kLanes * kShare>(sums, AddAll());
        if (share == 0 && left > 0) Store<kVector>(out + batch * size + first + column, left, sums);
      }
    }
    element += gridDim.x;
    own = PieceAt<false>(list, element, element < elements, places, 0);
  }
}

}  // namespace sgap
