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

template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionRowsBackwardKernel(
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
    T* __restrict__ dq, Accumulator<T>* __restrict__ dbias, long long m, long long keys,
    long long heads, long long key_heads, long long depth, long long value_depth, long long vectors,
    long long batches, long long scale_bits, long long flags, long long wrt_bias,
    long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const Group<kGroup> group;
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(row_offsets, call.m);
  constexpr int kAtOnce = own.kAtOnce;
  const Size head = blockIdx.y, key_head = head / (call.heads / call.key_heads);
  const A scale = A(__longlong_as_double(scale_bits));
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const GatheredRows<T> key_rows(
        call.Rows(k, kManyK, batch, call.keys, call.key_heads, key_head, depth),
        call.key_heads * depth);
    const GatheredRows<T> value_rows(
        call.Rows(v, kManyV, batch, call.keys, call.key_heads, key_head, value_depth),
        call.key_heads * value_depth);
    const A* own_bias = call.Bias(bias, batch, head, kLength);
    const Size end = call.End(lengths, batch);
    Keys query[kRows];
    Values cotangent[kRows];
    A of_lse[kRows], of_delta[kRows], sums[kRows][kSteps * kColumns] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Size row = own.row + r;
      const bool exists = row < call.m;
      query[r].Load(call.Rows(q, kManyQ, batch, call.m, call.heads, row * call.heads + head, depth),
                    exists, depth, group.lane);
      cotangent[r].Load(call.Rows(dout, kManyOut, batch, call.m, call.heads,
                                  row * call.heads + head, value_depth),
                        exists, value_depth, group.lane);
      of_lse[r] = exists ? call.OfRows(lse, kManyLse, batch, head)[row * call.heads] : Least<A>();
      of_delta[r] = exists ? call.OfRows(delta, kManyDelta, batch, head)[row * call.heads] : A(0);
    }
#pragma unroll 1
    for (unsigned step = 0; step < own.steps; ++step) {
      const unsigned first = own.At(step, 0);
      Index columns[kAtOnce];
      Keys key[kAtOnce];
      A s[kAtOnce * kRows], dp[kAtOnce * kRows];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        columns[a] = first + a < own.last ? column_indices[first + a] : -1;
        key[a].Load(key_rows[columns[a]], columns[a] >= 0, depth, group.lane);
        Values value;
        value.Load(value_rows[columns[a]], columns[a] >= 0, value_depth, group.lane);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          s[a * kRows + r] = query[r].Dot(key[a]);
          dp[a * kRows + r] = cotangent[r].Dot(value);
        }
      }
      group.Reduce(s);
      group.Reduce(dp);
      Score<kLength, kRows>(call, own.row, own.part, end, scale, own_bias, first, columns, s);
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          A p, ds;
          Differentiate(s[a * kRows + r], dp[a * kRows + r], of_lse[r], of_delta[r], p, ds);
          if (wrt_bias && columns[a] >= 0 && group.lane == 0) {
            const Size at = (batch * call.heads + head) * call.vectors + first + a;
            dbias[at * kLength + own.part + r] = ds;
          }
          if (s[a * kRows + r] != Least<A>()) key[a].AddTo(ds, sums[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      MergeShares<kGroup, kShare, kBlock>(sums[r], AddAll());
      const Size row = own.row + r;
      if (row >= call.m || own.share != 0) continue;
      const Size at = (batch * call.m + row) * call.heads + head;
      Keys::Store(dq + at * depth, depth, group.lane, scale, sums[r]);
    }
  }
}

// kAtOnce  entries of a key, rows of vectors, whose queries a group loads together
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
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const Group<kGroup> group;
  const unsigned share = threadIdx.x / kGroup % kShare;
  const Size column = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup / kShare;
  const bool valid = column < call.keys;
  const Size first = Size(unsigned(valid ? column_offsets[column] : 0)) * kLength;
  const Size last = Size(unsigned(valid ? column_offsets[column + 1] : 0)) * kLength;
  const Size key_head = blockIdx.y, heads_of_key = call.heads / call.key_heads;
  const unsigned rows_end = unsigned(call.m);
  const A scale = A(__longlong_as_double(scale_bits));
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const bool kept = valid && column < call.End(lengths, batch);
    Keys key;
    Values value;
    const Size of_column = column * call.key_heads + key_head;
    key.Load(call.Rows(k, kManyK, batch, call.keys, call.key_heads, of_column, depth), kept, depth,
             group.lane);
    value.Load(call.Rows(v, kManyV, batch, call.keys, call.key_heads, of_column, value_depth), kept,
               value_depth, group.lane);
    constexpr int kOfKey = kSteps * kColumns, kOfValue = kValueSteps * kColumns;
    A of_key[kOfKey] = {}, of_value[kOfValue] = {};
#pragma unroll 1
    for (Size head = key_head * heads_of_key; head < (key_head + 1) * heads_of_key; ++head) {
      const A* own_bias = call.Bias(bias, batch, head, kLength);
      const GatheredRows<T> query_rows(call.Rows(q, kManyQ, batch, call.m, call.heads, head, depth),
                                       call.heads * depth);
      const GatheredRows<T> cotangent_rows(
          call.Rows(dout, kManyOut, batch, call.m, call.heads, head, value_depth),
          call.heads * value_depth);
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
          const bool exists = rows[a] < rows_end && (!call.Has(kCausal) || column <= rows[a]);
          if (!exists) rows[a] = rows_end;
          query[a].Load(query_rows[rows[a]], exists, depth, group.lane);
          cotangent[a].Load(cotangent_rows[rows[a]], exists, value_depth, group.lane);
          s[a] = query[a].Dot(key);
          dp[a] = cotangent[a].Dot(value);
        }
        group.Reduce(s);
        group.Reduce(dp);
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a) {
          if (rows[a] >= rows_end) continue;  // the same in all lanes of the group
          s[a] *= scale;
          if (call.Has(kHasBias)) {
            const Size vector = Size(unsigned(permutation[(entry + a) / kLength]));
            s[a] += own_bias[vector * kLength + (entry + a) % kLength];
          }
          A p, ds;
          Differentiate(s[a], dp[a], *of_lse[rows[a]], *of_delta[rows[a]], p, ds);
          if (s[a] == Least<A>()) continue;
          query[a].AddTo(ds, of_key);
          cotangent[a].AddTo(p, of_value);
        }
      }
    }
    MergeShares<kGroup, kShare, kBlock>(of_key, AddAll());
    MergeShares<kGroup, kShare, kBlock>(of_value, AddAll());
    if (!valid || share != 0) continue;
    const Size at = (batch * call.keys + column) * call.key_heads + key_head;
    Keys::Store(dk + at * depth, depth, group.lane, scale, of_key);
    Values::Store(dv + at * value_depth, value_depth, group.lane, A(1), of_value);
  }
}

}  // namespace sgap
