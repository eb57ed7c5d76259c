// The gradients of attention.cuh: of q (and the bias) by rows, of k and v by keys, through the
// transposed structure. Each element of a result is summed by one group: no atomics, deterministic.
#pragma once

#include "attention.cuh"

namespace sgap {

// The probability p and the score's gradient ds of an entry, from its score s and dp = dout . v;
// zeros where the entry is masked.
template <class A>
__device__ inline void Differentiate(A s, A dp, A lse, A delta, A& p, A& ds) {
  const bool kept = s != Least<A>() && lse != Least<A>();
  p = kept ? Exp(s - lse) : A(0);
  ds = kept ? p * (dp - delta) : A(0);
}

// Sums ds k over the vectors of a group's rows, and writes ds to dbias with wrt_bias. For each row
// that exists the groups that share it call write(batch, r, sums).
template <class T, int kGroup, int kSteps, int kValueSteps, int kColumns, int kBlock, bool kVector,
          int kLength, int kRows, int kShare, class Terms, class Write>
__device__ __forceinline__ void DifferentiateRows(
    const AttentionCall& call, const Terms& terms,
    const GroupVectors<kLength, kRows, kGroup, kShare, kBlock>& own, const T* __restrict__ dout,
    const Accumulator<T>* __restrict__ delta, const T* __restrict__ q, const T* __restrict__ k,
    const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Index* __restrict__ column_indices, Accumulator<T>* __restrict__ dbias, long long batches,
    Accumulator<T> scale, bool wrt_bias, const Write& write) {
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  const Group<kGroup> group;
  constexpr int kAtOnce = GroupVectors<kLength, kRows, kGroup, kShare, kBlock>::kAtOnce;
  const Size head = blockIdx.y, key_head = head / (call.heads / call.key_heads);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const GatheredRows<T> key_rows(
        call.Rows(k, kManyK, batch, call.keys, call.key_heads, key_head, call.depth),
        call.key_heads * call.depth);
    const GatheredRows<T> value_rows(
        call.Rows(v, kManyV, batch, call.keys, call.key_heads, key_head, call.value_depth),
        call.key_heads * call.value_depth);
    const A* own_bias = call.Bias(bias, batch, head, kLength);
    const Size end = call.End(lengths, batch);
    const auto of_head = terms.Of(call, batch, head);
    Keys query[kRows];
    Values cotangent[kRows];
    A of_lse[kRows], of_delta[kRows], sums[kRows][kSteps * kColumns] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Size row = own.row + r;
      const bool exists = row < call.m;
      query[r].Load(
          call.Rows(q, kManyQ, batch, call.m, call.heads, row * call.heads + head, call.depth),
          exists, call.depth, group.lane);
      cotangent[r].Load(call.Rows(dout, kManyOut, batch, call.m, call.heads,
                                  row * call.heads + head, call.value_depth),
                        exists, call.value_depth, group.lane);
      of_lse[r] = exists ? call.OfRows(lse, kManyLse, batch, head)[row * call.heads] : Least<A>();
      of_delta[r] = exists ? call.OfRows(delta, kManyDelta, batch, head)[row * call.heads] : A(0);
    }
#pragma unroll 1
    for (unsigned step = 0; step < own.steps; ++step) {
      const unsigned first = own.At(step, 0);
      Index columns[kAtOnce];
      Keys key[kAtOnce];
      A s[kAtOnce * kRows], dp[kAtOnce * kRows], curbs[kAtOnce * kRows];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        columns[a] = first + a < own.last ? column_indices[first + a] : -1;
        key[a].Load(key_rows[columns[a]], columns[a] >= 0, call.depth, group.lane);
        Values value;
        value.Load(value_rows[columns[a]], columns[a] >= 0, call.value_depth, group.lane);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          s[a * kRows + r] = query[r].Dot(key[a]);
          dp[a * kRows + r] = cotangent[r].Dot(value);
        }
      }
      group.Reduce(s);
      group.Reduce(dp);
      Score<kLength, kRows>(call, of_head, own.row, own.part, end, scale, own_bias, first, columns,
                            s, curbs);
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          A p, ds;
          const A factor = of_head.template Factor<A>(own.row + r, columns[a]);
          Differentiate(s[a * kRows + r], dp[a * kRows + r] * factor, of_lse[r], of_delta[r], p,
                        ds);
          if (wrt_bias && columns[a] >= 0 && group.lane == 0) {
            const Size at = (batch * call.heads + head) * call.vectors + first + a;
            dbias[at * kLength + own.part + r] = ds;
          }
          if (s[a * kRows + r] != Least<A>()) key[a].AddTo(ds * curbs[a * kRows + r], sums[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      MergeShares<kGroup, kShare, kBlock>(sums[r], AddAll());
      if (own.row + r < call.m && own.share == 0) write(batch, r, sums[r]);
    }
  }
}

// Blocks of 128 threads that a multiprocessor must have registers for at once. Unasked, the
// compiler takes up to 19 registers more than it needs where a lane has one pack of one row's
// features.
template <class A, int kRows, int kPacks, bool kVector>
constexpr int kLeastBlocks = sizeof(A) == 4 && kRows == 1 && kPacks == 1 && kVector ? 5 : 1;

template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(
    kBlock, (kLeastBlocks<Accumulator<T>, kRows, kSteps * kValueSteps, kVector>))
    AttentionRowsBackwardKernel(
        const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta,
        const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
        const Accumulator<T>* __restrict__ bias, const Index* __restrict__ lengths,
        const Accumulator<T>* __restrict__ lse, const Index* __restrict__ row_offsets,
        const Index* __restrict__ column_indices, T* __restrict__ dq,
        Accumulator<T>* __restrict__ dbias, long long m, long long keys, long long heads,
        long long key_heads, long long depth, long long value_depth, long long vectors,
        long long batches, long long scale_bits, long long flags, long long wrt_bias,
        long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(row_offsets, call.m);
  const A scale = A(__longlong_as_double(scale_bits));
  DifferentiateRows<T, kGroup, kSteps, kValueSteps, kColumns, kBlock, kVector>(
      call, NoTerms(), own, dout, delta, q, k, v, bias, lengths, lse, column_indices, dbias,
      batches, scale, wrt_bias, [&](Size batch, int r, const A(&sums)[kSteps* kColumns]) {
        const Size at = (batch * call.m + own.row + r) * call.heads + blockIdx.y;
        Keys::Store(dq + at * call.depth, call.depth, threadIdx.x % kGroup, scale, sums);
      });
}

// Stores the sums of row `at` of dk, scaled, and of dv.
template <int kGroup, int kColumns, bool kVector, class T, int kOfKey, int kOfValue>
__device__ inline void StoreKey(const AttentionCall& call, T* dk, T* dv, Size at, unsigned lane,
                                Accumulator<T> scale, const Accumulator<T> (&of_key)[kOfKey],
                                const Accumulator<T> (&of_value)[kOfValue]) {
  Features<T, kGroup, kOfKey / kColumns, kColumns, kVector>::Store(dk + at * call.depth, call.depth,
                                                                   lane, scale, of_key);
  Features<T, kGroup, kOfValue / kColumns, kColumns, kVector>::Store(
      dv + at * call.value_depth, call.value_depth, lane, Accumulator<T>(1), of_value);
}

// The work of a group by keys: the vectors `first` to last - 1 of a column, of which it takes every
// kShare-th window.
template <int kGroup, int kShare, int kBlock>
struct GroupColumn {
  Size column;
  unsigned first, last, share = threadIdx.x / kGroup % kShare;
  Index place = -1;  // of its results among the partial ones, if it has a piece of the column

  // All vectors of a column.
  __device__ GroupColumn(const Index* column_offsets, Size keys) {
    column = Work();
    const bool valid = column < keys;
    first = valid ? column_offsets[column] : 0;
    last = valid ? column_offsets[column + 1] : 0;
  }
  // A piece of a column, of a work list (row_pieces.cuh).
  __device__ GroupColumn(const Index* list, Size pieces, Size vectors, Size keys) {
    const Size element = Work();
    const RowPiece piece = PieceAt(list, element, element < pieces, vectors);
    column = Size(unsigned(piece.row));
    const bool valid = column < keys;
    first = valid ? piece.first : 0;
    last = valid ? piece.last : 0;
    place = piece.place;
  }

 private:
  static __device__ Size Work() {
    return (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup / kShare;
  }
};

// Sums ds q and p dout over the vectors of a group's column; where that exists the groups that
// share it call write(batch, sums of ds q, sums of p dout).
//
// kAtOnce  entries of a key, rows of vectors, whose queries a group loads together
template <class T, int kLength, int kAtOnce, int kSteps, int kValueSteps, int kColumns,
          bool kVector, int kGroup, int kShare, int kBlock, class Terms, class Write>
__device__ __forceinline__ void DifferentiateKeys(
    const AttentionCall& call, const Terms& terms, const GroupColumn<kGroup, kShare, kBlock>& own,
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Index* __restrict__ row_indices, const Index* __restrict__ permutation, long long batches,
    Accumulator<T> scale, const Write& write) {
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  const Group<kGroup> group;
  const bool valid = own.column < call.keys;
  const Size column = own.column, first = Size(own.first) * kLength;
  const Size last = Size(own.last) * kLength;
  const unsigned share = own.share;
  const Size key_head = blockIdx.y, heads_of_key = call.heads / call.key_heads;
  const unsigned rows_end = unsigned(call.m);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const bool kept = valid && column < call.End(lengths, batch);
    Keys key;
    Values value;
    const Size of_column = column * call.key_heads + key_head;
    key.Load(call.Rows(k, kManyK, batch, call.keys, call.key_heads, of_column, call.depth), kept,
             call.depth, group.lane);
    value.Load(call.Rows(v, kManyV, batch, call.keys, call.key_heads, of_column, call.value_depth),
               kept, call.value_depth, group.lane);
    constexpr int kOfKey = kSteps * kColumns, kOfValue = kValueSteps * kColumns;
    A of_key[kOfKey] = {}, of_value[kOfValue] = {};
#pragma unroll 1
    for (Size head = key_head * heads_of_key; head < (key_head + 1) * heads_of_key; ++head) {
      const A* own_bias = call.Bias(bias, batch, head, kLength);
      const auto of_head = terms.Of(call, batch, head);
      const GatheredRows<T> query_rows(
          call.Rows(q, kManyQ, batch, call.m, call.heads, head, call.depth),
          call.heads * call.depth);
      const GatheredRows<T> cotangent_rows(
          call.Rows(dout, kManyOut, batch, call.m, call.heads, head, call.value_depth),
          call.heads * call.value_depth);
      const GatheredRows<A> of_lse(call.OfRows(lse, kManyLse, batch, head), call.heads);
      const GatheredRows<A> of_delta(call.OfRows(delta, kManyDelta, batch, head), call.heads);
#pragma unroll 1
      for (Size entry = first + share * kAtOnce; kept && entry < last; entry += kShare * kAtOnce) {
        Keys query[kAtOnce];
        Values cotangent[kAtOnce];
        unsigned rows[kAtOnce];
        A s[kAtOnce], dp[kAtOnce];
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
          const Size vector = (entry + a) / kLength;
          const bool there = entry + a < last;
          rows[a] = there ? unsigned(row_indices[vector]) * kLength + unsigned(entry + a) % kLength
                          : rows_end;
          const bool exists =
              rows[a] < rows_end && (!call.Has(kCausal) || of_head.Sees(rows[a], Index(column)));
          if (!exists) rows[a] = rows_end;
          query[a].Load(query_rows[rows[a]], exists, call.depth, group.lane);
          cotangent[a].Load(cotangent_rows[rows[a]], exists, call.value_depth, group.lane);
          s[a] = query[a].Dot(key);
          dp[a] = cotangent[a].Dot(value);
        }
        group.Reduce(s);
        group.Reduce(dp);
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
          if (rows[a] >= rows_end) continue;  // the same in all lanes of the group
          A curb;
          s[a] = of_head.Curb(s[a] * scale, curb);
          if (call.Has(kHasBias)) {
            const Size vector = Size(unsigned(permutation[(entry + a) / kLength]));
            s[a] += own_bias[vector * kLength + (entry + a) % kLength];
          }
          s[a] = of_head.Add(s[a], rows[a], Index(column));
          const A factor = of_head.template Factor<A>(rows[a], Index(column));
          A p, ds;
          Differentiate(s[a], dp[a] * factor, *of_lse[rows[a]], *of_delta[rows[a]], p, ds);
          if (s[a] == Least<A>()) continue;
          query[a].AddTo(ds * curb, of_key);
          cotangent[a].AddTo(p * factor, of_value);
        }
      }
    }
    MergeShares<kGroup, kShare, kBlock>(of_key, AddAll());
    MergeShares<kGroup, kShare, kBlock>(of_value, AddAll());
    if (valid && share == 0) write(batch, of_key, of_value);
  }
}

template <class T, int kLength, int kAtOnce, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionKeysBackwardKernel(
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Index* __restrict__ column_offsets, const Index* __restrict__ row_indices,
    const Index* __restrict__ permutation, T* __restrict__ dk, T* __restrict__ dv, long long m,
    long long keys, long long heads, long long key_heads, long long depth, long long value_depth,
    long long vectors, long long batches, long long scale_bits, long long flags,
    long long sharing) {
  MoveToStructure(sharing, keys, column_offsets, vectors, row_indices, permutation);
  using A = Accumulator<T>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const GroupColumn<kGroup, kShare, kBlock> own(column_offsets, call.keys);
  const A scale = A(__longlong_as_double(scale_bits));
  DifferentiateKeys<T, kLength, kAtOnce, kSteps, kValueSteps, kColumns, kVector>(
      call, NoTerms(), own, dout, delta, q, k, v, bias, lengths, lse, row_indices, permutation,
      batches, scale,
      [&](Size batch, const A(&of_key)[kSteps* kColumns],
          const A(&of_value)[kValueSteps* kColumns]) {
        const Size at = (batch * call.keys + own.column) * call.key_heads + blockIdx.y;
        StoreKey<kGroup, kColumns, kVector>(call, dk, dv, at, threadIdx.x % kGroup, scale, of_key,
                                            of_value);
      });
}

}  // namespace sgap
