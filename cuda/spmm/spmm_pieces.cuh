// SpMM over CSR with long rows in pieces (row_pieces.cuh): the points {<1 row, c col>, 1} and
// {<1/r row, c col>, r} of spmm.cuh, a group for each piece in place of each row. Deterministic.
// The parameters are those of spmm.cuh.
#pragma once

#include "row_pieces.cuh"
#include "spmm.cuh"

namespace sgap {

// Sums of pieces that are all of their row go to c, others to partial [batch, places, n].
template <class T, int kGroup, int kColumns, int kChunks, int kBlock, bool kVector, bool kPermuted>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    SpmmPiecesKernel(const T* __restrict__ values, const Index* __restrict__ list,
                     const Index* __restrict__ column_indices,
                     const Index* __restrict__ permutation, const T* __restrict__ b,
                     T* __restrict__ c, Accumulator<T>* __restrict__ partial, long long m,
                     long long n, long long values_stride, long long b_stride, long long batches,
                     long long capacity, long long pieces, long long elements, long long places,
                     long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list, capacity, column_indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Group<kGroup> group;
  const bool exists = place.column < n && place.worker < pieces;
  const RowPiece own = PieceAt(list, place.worker, exists, capacity);
  const bool valid = unsigned(own.row) < unsigned(m);  // the same in all lanes of the group
  const Index first = own.first + group.lane, last = own.last;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Operands<T, kColumns, kVector, kPermuted> operands{
        values + batch * values_stride,
        column_indices,
        permutation,
        {b + batch * b_stride + place.column, Size(n)},
        unsigned(n),
        unsigned(n) - place.column};
    Accumulator<T> sums[kColumns] = {};
    if constexpr (kGroup == 1) {
#pragma unroll 4
      for (Index p = first; p < last; ++p) operands.AddEntry(p, sums);
    } else {
      // The trip count beforehand, as in SpmmRowGroupKernel.
      const unsigned steps = first < last ? unsigned(last - first + kGroup - 1) / kGroup : 0;
#pragma unroll 4
      for (unsigned i = 0; i < steps; ++i) operands.AddEntry(Index(first + i * kGroup), sums);
    }
    group.Reduce(sums);
    if (!valid || group.lane != 0) continue;
    if (AllOfRow(own.place, places)) {
      const Size row = batch * m + unsigned(own.row);
      Store<kVector>(c + row * n + place.column, operands.left, sums);
    } else {
      const Size row = batch * places + unsigned(own.place);
      Store<kVector>(partial + row * n + place.column, operands.left, sums);
    }
  }
}

}  // namespace sgap
