// Attention and its gradients with long rows in pieces (row_pieces.cuh): the kernels of
// attention.cuh and attention_backward.cuh on a work list in place of the offsets, whose entries
// are vectors. What a piece leaves is added in the order of the pieces: outputs by
// AttentionMergeKernel, by their log-sum-exp (Milakov and Gimelshein, 2018), gradients by
// SumPiecesKernel. Deterministic.
//
// The template parameters are those of attention.cuh; `partial` arrays have an element for each
// place of the list.
#pragma once

#include "attention_backward.cuh"

namespace sgap {

// The partial result of row r of a place: sums of v under the peak in partial [batch, places,
// kLength, heads, value_depth], total and peak in states [batch, places, kLength, heads, 2].
template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1)
    AttentionPiecesKernel(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                          const Accumulator<T>* __restrict__ bias,
                          const Accumulator<T>* __restrict__ sinks,
                          const Index* __restrict__ lengths, const Index* __restrict__ list,
                          const Index* __restrict__ column_indices, T* __restrict__ out,
                          Accumulator<T>* __restrict__ lse, Accumulator<T>* __restrict__ partial,
                          Accumulator<T>* __restrict__ states, long long m, long long keys,
                          long long heads, long long key_heads, long long depth,
                          long long value_depth, long long vectors, long long batches,
                          long long scale_bits, long long flags, long long pieces,
                          long long elements, long long places, long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list, vectors, column_indices);
  using A = Accumulator<T>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  using Sums = Features<A, kGroup, kValueSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(list, Size(pieces), call.vectors,
                                                                 call.m);
  const unsigned lane = threadIdx.x % kGroup;
  AttendRows<T, kGroup, kSteps, kValueSteps, kColumns, kBlock, kVector>(
      call, NoTerms(), own, q, k, v, bias, lengths, column_indices, batches,
      A(__longlong_as_double(scale_bits)), [&](Size batch, int r, auto& state) {
        if (AllOfRow(own.place, places)) {
          WriteRow<Values>(call, sinks, out, lse, batch, own.row + r, blockIdx.y, lane, state);
          return;
        }
        const Size row = (batch * places + unsigned(own.place)) * kLength + own.part + r;
        const Size at = row * call.heads + blockIdx.y;
        A values[kValueSteps * kColumns];
#pragma unroll
        for (int i = 0; i < kValueSteps * kColumns; ++i) values[i] = state.values[i];
        Sums::Store(partial + at * call.value_depth, call.value_depth, lane, A(1), values);
        if (lane == 0) {
          states[2 * at] = state.total();
          states[2 * at + 1] = state.peak();
        }
      });
}

// Rows of several pieces: merges their partial results, adds the sink, and writes out and lse.
//
// Grid: x over the elements of rows of several pieces times the kLength rows of each, taken in turn
// (most lists have few such rows, and empty elements after them), y over heads, z over sequences.
// Each of kShare warps takes every kShare-th piece.
template <class T, int kLength, int kValueSteps, int kColumns, int kShare, bool kVector>
__global__ void __launch_bounds__(32 * kShare, 1)
    AttentionMergeKernel(const Accumulator<T>* __restrict__ partial,
                         const Accumulator<T>* __restrict__ states,
                         const Accumulator<T>* __restrict__ sinks, const Index* __restrict__ list,
                         const T*, const Accumulator<T>*, T* __restrict__ out,
                         Accumulator<T>* __restrict__ lse, long long m, long long keys,
                         long long heads, long long key_heads, long long depth,
                         long long value_depth, long long vectors, long long batches,
                         long long scale_bits, long long flags, long long pieces,
                         long long elements, long long places, long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list);
  using A = Accumulator<T>;
  using Values = Features<T, 32, kValueSteps, kColumns, kVector>;
  using Sums = Features<A, 32, kValueSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const unsigned lane = threadIdx.x % 32, share = threadIdx.x / 32;
  Size turn = blockIdx.x;
  RowPiece own = PieceAt(list, pieces + turn / kLength, true, places);
#pragma unroll 1
  while (Size(unsigned(own.row)) * kLength < call.m) {  // the same in all threads, as below
    const unsigned part = turn % kLength;
    const Size row = Size(unsigned(own.row)) * kLength + part;
    for (Size batch = blockIdx.z; row < call.m && batch < batches; batch += gridDim.z) {
      Online<A, kValueSteps * kColumns> state;
      state.Clear();
      const auto at = [&](Index p) {
        return ((batch * places + unsigned(p)) * kLength + part) * call.heads + blockIdx.y;
      };
      // 32 pieces of the warp at once: each lane finds how much one of them weighs.
#pragma unroll 1
      for (Index from = own.first + share; from < own.last; from += 32 * kShare) {
        Online<A, kValueSteps * kColumns> other;
        other.Clear();
        A total[1] = {0}, peak[1] = {Least<A>()};
        const Index mine = from + Index(lane) * kShare;
        if (mine < own.last) {
          total[0] = states[2 * at(mine)];
          peak[0] = states[2 * at(mine) + 1];
        }
        const A own_peak = peak[0];
        Group<32>().template Reduce<Greater>(peak);
        const A weight = TermUnder(peak[0], own_peak);
        total[0] *= weight;
        Group<32>().Reduce(total);
        other.total() = total[0];
        other.peak() = peak[0];
        const Index left = (own.last - from + kShare - 1) / kShare, count = left < 32 ? left : 32;
#pragma unroll 2
        for (Index i = 0; i < count; ++i) {
          Sums sums;
          sums.Load(partial + at(from + i * kShare) * call.value_depth, true, call.value_depth,
                    lane);
          const A of_piece = __shfl_sync(~0u, weight, i);
#pragma unroll
          for (int j = 0; j < kValueSteps * kColumns; ++j) {
            other.values[j] += of_piece * sums.Number(j);
          }
        }
        MergeOnline()(state.values, other.values);
      }
      MergeShares<32, kShare, 32 * kShare>(state.values, MergeOnline());
      if (share == 0) WriteRow<Values>(call, sinks, out, lse, batch, row, blockIdx.y, lane, state);
    }
    turn += gridDim.x;
    const Size element = pieces + turn / kLength;
    if (element >= Size(elements)) return;
    own = PieceAt(list, element, true, places);
  }
}

// Partial sums of dq, scaled: [batch, places, kLength, heads, depth].
template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionRowsBackwardPiecesKernel(
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Index* __restrict__ list, const Index* __restrict__ column_indices, T* __restrict__ dq,
    Accumulator<T>* __restrict__ dbias, Accumulator<T>* __restrict__ partial, long long m,
    long long keys, long long heads, long long key_heads, long long depth, long long value_depth,
    long long vectors, long long batches, long long scale_bits, long long flags, long long wrt_bias,
    long long pieces, long long elements, long long places, long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list, vectors, column_indices);
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  using Sums = Features<A, kGroup, kSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(list, Size(pieces), call.vectors,
                                                                 call.m);
  const unsigned lane = threadIdx.x % kGroup;
  const A scale = A(__longlong_as_double(scale_bits));
  DifferentiateRows<T, kGroup, kSteps, kValueSteps, kColumns, kBlock, kVector>(
      call, NoTerms(), own, dout, delta, q, k, v, bias, lengths, lse, column_indices, dbias,
      batches, scale, wrt_bias, [&](Size batch, int r, const A(&sums)[kSteps* kColumns]) {
        if (AllOfRow(own.place, places)) {
          const Size at = (batch * call.m + own.row + r) * call.heads + blockIdx.y;
          Keys::Store(dq + at * call.depth, call.depth, lane, scale, sums);
          return;
        }
        const Size row = (batch * places + unsigned(own.place)) * kLength + own.part + r;
        const Size at = row * call.heads + blockIdx.y;
        Sums::Store(partial + at * call.depth, call.depth, lane, scale, sums);
      });
}

// Partial sums of dk, scaled, and dv: [batch, places, key_heads, depth] and [..., value_depth].
template <class T, int kLength, int kAtOnce, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionKeysBackwardPiecesKernel(
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Index* __restrict__ list, const Index* __restrict__ row_indices,
    const Index* __restrict__ permutation, T* __restrict__ dk, T* __restrict__ dv,
    Accumulator<T>* __restrict__ of_keys, Accumulator<T>* __restrict__ of_values, long long m,
    long long keys, long long heads, long long key_heads, long long depth, long long value_depth,
    long long vectors, long long batches, long long scale_bits, long long flags, long long pieces,
    long long elements, long long places, long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list, vectors, row_indices, permutation);
  using A = Accumulator<T>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const GroupColumn<kGroup, kShare, kBlock> own(list, Size(pieces), call.vectors, call.keys);
  const unsigned lane = threadIdx.x % kGroup;
  const A scale = A(__longlong_as_double(scale_bits));
  DifferentiateKeys<T, kLength, kAtOnce, kSteps, kValueSteps, kColumns, kVector>(
      call, NoTerms(), own, dout, delta, q, k, v, bias, lengths, lse, row_indices, permutation,
      batches, scale,
      [&](Size batch, const A(&key)[kSteps* kColumns], const A(&value)[kValueSteps* kColumns]) {
        const Size row = AllOfRow(own.place, places) ? batch * call.keys + own.column
                                                     : batch * places + unsigned(own.place);
        const Size at = row * call.key_heads + blockIdx.y;
        if (AllOfRow(own.place, places)) {
          StoreKey<kGroup, kColumns, kVector>(call, dk, dv, at, lane, scale, key, value);
        } else {
          StoreKey<kGroup, kColumns, kVector>(call, of_keys, of_values, at, lane, scale, key,
                                              value);
        }
      });
}

}  // namespace sgap
