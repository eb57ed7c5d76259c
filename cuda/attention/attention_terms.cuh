// Attention and its gradients (attention.cuh, attention_backward.cuh) with terms that depend on the
// place of an entry, evaluated where its score is, so that nothing is stored for each entry: with
// d = j - i - offset,
//
//   s[j] = cap(scale q[i] . k[j]) + bias[i, j] - slope |d| + table[clip(d + range / 2)],
//
// -infinity where the segments of i and j differ; cap(x) = softcap tanh(x / softcap). Dropout
// multiplies probabilities, but not those of lse, by 0 or `factor`, which a number drawn for (seeds
// of the head, i, j) decides: the same as on the CPU (cpu/attention/attention_terms.h). ds is the
// gradient after the soft cap, from which those of the slope and of the table are summed.
#pragma once

#include "attention_backward.cuh"

namespace sgap {

// Which of the terms a call has, and which of their arrays differ between sequences.
enum TermFlag {
  kHasSlopes = 1,
  kHasTable = 2,
  kHasSegments = 4,
  kHasOffset = 8,
  kHasSeeds = 16,
  kManySlopes = 32,
  kManyTable = 64,
  kManyQuerySegments = 128,
  kManyKeySegments = 256,
  kManyOffset = 512,
  kManySeeds = 1024,
};

// The rational approximation of the CPU's kernels, within 4 ulp.
__device__ inline float Tanh(float x) {
  constexpr float kMost = 7.90531110763549805f;                      // from here on it is 1
  const float inside = x > kMost ? kMost : x < -kMost ? -kMost : x;  // NaN stays
  const float square = inside * inside;
  float p = square * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * square + -8.60467152213735e-11f;
  p = p * square + 5.12229709037114e-08f;
  p = p * square + 1.48572235717979e-05f;
  p = p * square + 6.37261928875436e-04f;
  p = p * square + 4.89352455891786e-03f;
  float q = square * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * square + 2.26843463243900e-03f;
  q = q * square + 4.89352518554385e-03f;
  return inside * p / q;
}
__device__ inline double Tanh(double x) { return tanh(x); }

// A bijection of 32-bit numbers, each bit of which depends on all bits of x: "lowbias32" of
// https://nullprogram.com/blog/2018/07/31/.
__device__ inline unsigned Mixed(unsigned x, unsigned between) {
  x ^= x >> 16;
  x = x * 0x7feb352du + between;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The terms of one head of one sequence, with the methods of NoTerms.
template <class A>
struct HeadTerms {
  A softcap, slope;
  const A* table;               // or null
  const Index* query_segments;  // or null
  const Index* key_segments;
  const unsigned* seeds;  // or null
  Index range, offset;
  unsigned kept;
  A factor;

  // Column less place of the row. Without overflow where both are within 2^30.
  __device__ int Distance(Size row, Index column) const {
    return int(unsigned(column) - unsigned(row) - unsigned(offset));
  }
  __device__ bool Sees(Size row, Index column) const { return column <= (long long)row + offset; }
  __device__ A Curb(A score, A& curb) const {
    curb = 1;
    if (softcap == 0) return score;
    const A t = Tanh(score * (1 / softcap));
    curb = 1 - t * t;
    return softcap * t;
  }
  __device__ A Add(A score, Size row, Index column) const {
    if (query_segments && query_segments[row] != key_segments[column]) return Least<A>();
    const int d = Distance(row, column), half = range / 2, last = range - 1 - half;
    score -= slope * A(d < 0 ? -d : d);
    if (table) score += table[(d < -half ? -half : d > last ? last : d) + half];
    return score;
  }
  template <class>
  __device__ A Factor(Size row, Index column) const {
    if (!seeds) return 1;
    constexpr unsigned kGolden = 0x9e3779b9u;
    const unsigned own = unsigned(row) * kGolden;
    const unsigned first = Mixed(own + seeds[0], 0), second = Mixed(own + seeds[1], 0);
    return Mixed(unsigned(column) * kGolden + first, second) < kept ? factor : A(0);
  }
};

// Arrays slopes [B, heads], table [B, heads, range], query_segments [B, m], key_segments [B, keys],
// offset [B] and seeds [B, heads, 2].
template <class A>
struct AttentionTerms {
  const A* slopes;
  const A* table;
  const Index* query_segments;
  const Index* key_segments;
  const Index* offset;
  const unsigned* seeds;
  A softcap, factor;
  Index range;
  unsigned kept, flags;

  // The numbers as a launch passes them.
  __device__ AttentionTerms(const A* slopes, const A* table, const Index* query_segments,
                            const Index* key_segments, const Index* offset, const unsigned* seeds,
                            long long softcap_bits, long long factor_bits, long long range,
                            long long kept, long long flags)
      : slopes(slopes),
        table(table),
        query_segments(query_segments),
        key_segments(key_segments),
        offset(offset),
        seeds(seeds),
        softcap(__longlong_as_double(softcap_bits)),
        factor(__longlong_as_double(factor_bits)),
        range(Index(range)),
        kept(unsigned(kept)),
        flags(unsigned(flags)) {}

  __device__ bool Has(TermFlag flag) const { return flags & flag; }
  __device__ Size Of(TermFlag many, Size batch) const { return Has(many) ? batch : 0; }

  __device__ HeadTerms<A> Of(const AttentionCall& call, Size batch, Size head) const {
    HeadTerms<A> own = {};
    own.softcap = softcap, own.range = range, own.kept = kept, own.factor = factor;
    if (Has(kHasSlopes)) own.slope = slopes[Of(kManySlopes, batch) * call.heads + head];
    if (Has(kHasTable)) own.table = table + (Of(kManyTable, batch) * call.heads + head) * range;
    if (Has(kHasSegments)) {
      own.query_segments = query_segments + Of(kManyQuerySegments, batch) * call.m;
      own.key_segments = key_segments + Of(kManyKeySegments, batch) * call.keys;
    }
    if (Has(kHasOffset)) own.offset = offset[Of(kManyOffset, batch)];
    if (Has(kHasSeeds)) own.seeds = seeds + (Of(kManySeeds, batch) * call.heads + head) * 2;
    return own;
  }
};

template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionTermsKernel(
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
    const Accumulator<T>* __restrict__ bias, const Accumulator<T>* __restrict__ sinks,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ slopes,
    const Accumulator<T>* __restrict__ table, const Index* __restrict__ query_segments,
    const Index* __restrict__ key_segments, const Index* __restrict__ offset,
    const unsigned* __restrict__ seeds, const Index* __restrict__ row_offsets,
    const Index* __restrict__ column_indices, T* __restrict__ out, Accumulator<T>* __restrict__ lse,
    long long m, long long keys, long long heads, long long key_heads, long long depth,
    long long value_depth, long long vectors, long long batches, long long scale_bits,
    long long flags, long long softcap_bits, long long factor_bits, long long range, long long kept,
    long long term_flags, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  using A = Accumulator<T>;
  using Values = Features<T, kGroup, kValueSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const AttentionTerms<A> terms(slopes, table, query_segments, key_segments, offset, seeds,
                                softcap_bits, factor_bits, range, kept, term_flags);
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(row_offsets, call.m);
  const unsigned lane = threadIdx.x % kGroup;
  AttendRows<T, kGroup, kSteps, kValueSteps, kColumns, kBlock, kVector>(
      call, terms, own, q, k, v, bias, lengths, column_indices, batches,
      A(__longlong_as_double(scale_bits)), [&](Size batch, int r, auto& state) {
        WriteRow<Values>(call, sinks, out, lse, batch, own.row + r, blockIdx.y, lane, state);
      });
}

template <class T, int kLength, int kRows, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionTermsRowsBackwardKernel(
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Accumulator<T>* __restrict__ slopes, const Accumulator<T>* __restrict__ table,
    const Index* __restrict__ query_segments, const Index* __restrict__ key_segments,
    const Index* __restrict__ offset, const unsigned* __restrict__ seeds,
    const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
    T* __restrict__ dq, Accumulator<T>* __restrict__ ds, long long m, long long keys,
    long long heads, long long key_heads, long long depth, long long value_depth, long long vectors,
    long long batches, long long scale_bits, long long flags, long long wrt_scores,
    long long softcap_bits, long long factor_bits, long long range, long long kept,
    long long term_flags, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  using A = Accumulator<T>;
  using Keys = Features<T, kGroup, kSteps, kColumns, kVector>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const AttentionTerms<A> terms(slopes, table, query_segments, key_segments, offset, seeds,
                                softcap_bits, factor_bits, range, kept, term_flags);
  const GroupVectors<kLength, kRows, kGroup, kShare, kBlock> own(row_offsets, call.m);
  const A scale = A(__longlong_as_double(scale_bits));
  DifferentiateRows<T, kGroup, kSteps, kValueSteps, kColumns, kBlock, kVector>(
      call, terms, own, dout, delta, q, k, v, bias, lengths, lse, column_indices, ds, batches,
      scale, wrt_scores, [&](Size batch, int r, const A(&sums)[kSteps* kColumns]) {
        const Size at = (batch * call.m + own.row + r) * call.heads + blockIdx.y;
        Keys::Store(dq + at * call.depth, call.depth, threadIdx.x % kGroup, scale, sums);
      });
}

template <class T, int kLength, int kAtOnce, int kGroup, int kSteps, int kValueSteps, int kColumns,
          int kShare, int kBlock, bool kVector>
__global__ void __launch_bounds__(kBlock, 1) AttentionTermsKeysBackwardKernel(
    const T* __restrict__ dout, const Accumulator<T>* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const Accumulator<T>* __restrict__ bias,
    const Index* __restrict__ lengths, const Accumulator<T>* __restrict__ lse,
    const Accumulator<T>* __restrict__ slopes, const Accumulator<T>* __restrict__ table,
    const Index* __restrict__ query_segments, const Index* __restrict__ key_segments,
    const Index* __restrict__ offset, const unsigned* __restrict__ seeds,
    const Index* __restrict__ column_offsets, const Index* __restrict__ row_indices,
    const Index* __restrict__ permutation, T* __restrict__ dk, T* __restrict__ dv, long long m,
    long long keys, long long heads, long long key_heads, long long depth, long long value_depth,
    long long vectors, long long batches, long long scale_bits, long long flags,
    long long softcap_bits, long long factor_bits, long long range, long long kept,
    long long term_flags, long long sharing) {
  MoveToStructure(sharing, keys, column_offsets, vectors, row_indices, permutation);
  using A = Accumulator<T>;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const AttentionTerms<A> terms(slopes, table, query_segments, key_segments, offset, seeds,
                                softcap_bits, factor_bits, range, kept, term_flags);
  const GroupColumn<kGroup, kShare, kBlock> own(column_offsets, call.keys);
  const A scale = A(__longlong_as_double(scale_bits));
  DifferentiateKeys<T, kLength, kAtOnce, kSteps, kValueSteps, kColumns, kVector>(
      call, terms, own, dout, delta, q, k, v, bias, lengths, lse, row_indices, permutation, batches,
      scale,
      [&](Size batch, const A(&of_key)[kSteps* kColumns],
          const A(&of_value)[kValueSteps* kColumns]) {
        const Size at = (batch * call.keys + own.column) * call.key_heads + blockIdx.y;
        StoreKey<kGroup, kColumns, kVector>(call, dk, dv, at, threadIdx.x % kGroup, scale, of_key,
                                            of_value);
      });
}

}  // namespace sgap
