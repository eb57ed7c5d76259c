// Attention over column vectors on tensor cores, float16 and bfloat16: the fused forward pass in
// octet tiles (vectorSparse, sections 5.3 and 6.3), re-derived for m16n8k16. The meaning, masks and
// flags are those of attention.cuh.
//
// kLength   V, rows of a vector: 8, 16 or 32
// kRows     of these, 8, 16 or 32 that a warp takes, with kHeads heads of q that share keys and
//           values: kTiles = kHeads * kRows / 8 tiles of 8 rows, which share what is gathered
// kSteps    features of q and k in 32s, kPanels those of v in 64s
// kWarps    warps of a block, which share a block row, each taking every kWarps-th step of 16
//           vectors; merged in order, so the bits are the same at each call
// kVector   both depths are multiples of 8
//
// Operands are swapped, so that the vectors' rows are the 8 columns of an mma and the 16 vectors of
// a step its 16 rows. With g = lane / 4 and t = lane % 4, and own(r) = r / 2 * 4 + r % 2:
//
//   S^T += K Q^T   A rows g, g + 8 = vectors own(g), own(g) + 2; k = features 8t to 8t + 7 of each
//                  32, in an order that K and Q share: both load 16 bytes of a row
//   P^T            a lane has rows 2t and 2t + 1 of these two vectors: packed and turned by
//                  movmatrix, they are rows k = vectors 4t to 4t + 3 of the next mma's B
//   O^T += V^T P^T A = columns 8g to 8g + 7 of each 64, of the rows of v that vectors 4t to 4t + 3
//                  name: one line of 128 bytes each, halves joined by PRMT
//
// No shuffle but three for each maximum, and no shared memory but to merge warps. In a vector of
// which some rows are masked (is_causal), NaN and infinity in its row of v reach these rows too.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace sgap {

// exp(x - peak), zero under a peak of -infinity; for numbers that are rounded to 16 bits.
__device__ inline float FastTermUnder(float peak, float x) {
  float term;
  const float exponent = peak == Least<float>() ? Least<float>() : (x - peak) * 1.44269504f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(term) : "f"(exponent));
  return term;
}

// Sixteen vectors of a block row as a lane has them: those whose rows of k it loads, -1 where there
// is none, and those whose rows of v.
struct OctetColumns {
  Index own[2], quad[4];

  __device__ void Find(const Index* column_indices, unsigned p, unsigned last, Size end, unsigned g,
                       unsigned t) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      own[i] = At(column_indices, p + g / 2 * 4 + g % 2 + 2 * i, last, end);
#pragma unroll
    for (int i = 0; i < 4; ++i) quad[i] = At(column_indices, p + 4 * t + i, last, end);
  }
  static __device__ Index At(const Index* column_indices, unsigned p, unsigned last, Size end) {
    const Index column = p < last ? column_indices[p] : -1;
    return column >= 0 && Size(column) < end ? column : -1;
  }
};

// Of the rows that `columns` name, 8 numbers from `first` on of each kSpan: 16 bytes a lane.
template <bool kVector, int kSpan, class T, int kRows, int kSteps>
__device__ inline void LoadRows(const T* rows, Size stride, const Index (&columns)[kRows],
                                unsigned depth, unsigned first,
                                Pack<unsigned, 4> (&words)[kRows][kSteps]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const T* row = rows + Size(unsigned(columns[i])) * stride;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned at = s * kSpan + first;
      words[i][s] = LoadWords<kVector, 4>(row + at, columns[i] >= 0 && at < depth ? depth - at : 0);
    }
  }
}

// Of one row, features 8t to 8t + 7 of each 32: with those of the other lanes a B operand, of which
// this row is column g. Zeros where it does not exist.
template <bool kVector, class T, int kSteps>
__device__ inline void LoadOwn(const T* row, bool exists, unsigned depth, unsigned t,
                               Pack<unsigned, 4> (&words)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const unsigned at = s * 32 + t * 8;
    words[s] = LoadWords<kVector, 4>(row + at, exists && at < depth ? depth - at : 0);
  }
}

// Rows of k (or v) as the A operand of S^T: features 8t to 8t + 7 of each 32 of two vectors' rows.
template <class T, int kSteps, bool kVector>
struct KeyFragments {
  Pack<unsigned, 4> words[2][kSteps];

  __device__ void Load(const T* rows, Size stride, const Index (&columns)[2], unsigned depth,
                       unsigned t) {
    LoadRows<kVector, 32>(rows, stride, columns, depth, 8 * t, words);
  }
  // sums += these times the rows of q in `query`
  __device__ void Multiply(const Pack<unsigned, 4> (&query)[kSteps], float (&sums)[4]) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned a[4] = {words[0][s].at[2 * j], words[1][s].at[2 * j],
                               words[0][s].at[2 * j + 1], words[1][s].at[2 * j + 1]};
        const unsigned b[2] = {query[s].at[2 * j], query[s].at[2 * j + 1]};
        MultiplyAdd<T>(a, b, sums);
      }
    }
  }
};

// Rows of v as the A operand of O^T: columns 8g to 8g + 7 of each 64 of four vectors' rows.
template <class T, int kPanels, bool kVector>
struct ValueFragments {
  Pack<unsigned, 4> words[4][kPanels];

  __device__ void Load(const T* rows, Size stride, const Index (&columns)[4], unsigned depth,
                       unsigned g) {
    LoadRows<kVector, 64>(rows, stride, columns, depth, 8 * g, words);
  }
  // sums[4 * panel + pair] += columns 2 * pair and 2 * pair + 1 of the lane times p
  __device__ void Multiply(const unsigned (&p)[2], float (&sums)[4 * kPanels][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      unsigned a[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned x = words[2 * j][i / 4].at[i % 4], y = words[2 * j + 1][i / 4].at[i % 4];
        a[2 * j] = PackLow(x, y);
        a[2 * j + 1] = PackHigh(x, y);
      }
      MultiplyAdd<T>(a, p, sums[i]);
    }
  }
};

// The scores of rows `part` and part + 1 of a block row, which begins at first_row, with vectors
// `vector` and vector + 2; -infinity where an entry is masked.
template <int kLength>
__device__ inline void ScoreTile(const AttentionCall& call, Size first_row, unsigned part,
                                 unsigned vector, const Index (&columns)[2], float scale,
                                 const float* bias, float (&s)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Index column = columns[j / 2];
    const Size row = first_row + part + j % 2;
    const bool kept = column >= 0 && row < call.m && (!call.Has(kCausal) || Size(column) <= row);
    s[j] *= scale;
    if (kept && call.Has(kHasBias)) s[j] += bias[Size(vector + j / 2 * 2) * kLength + part + j % 2];
    if (!kept) s[j] = Least<float>();
  }
}

// Eight rows of one head: their queries, and the softmax as far as it is known.
template <class T, int kSteps, int kPanels, bool kVector>
struct OctetRows {
  Pack<unsigned, 4> query[kSteps];
  float sums[4 * kPanels][4];
  float total[2], peak[2];  // of rows 2t and 2t + 1; totals of the lane's vectors alone

  __device__ void Clear(const T* row, bool exists, unsigned depth, unsigned t) {
    LoadOwn<kVector>(row, exists, depth, t, query);
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = 0;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      total[e] = 0;
      peak[e] = Least<float>();
    }
  }
  // Scores of two vectors become terms of p; the sums are rescaled to the new peak.
  __device__ void Raise(float (&s)[4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float greatest = Greater()(s[e], s[2 + e]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        greatest = Greater()(greatest, __shfl_xor_sync(~0u, greatest, distance));
      }
      greatest = Greater()(greatest, peak[e]);
      const float factor = FastTermUnder(greatest, peak[e]);
      peak[e] = greatest;
      s[e] = FastTermUnder(greatest, s[e]);
      s[2 + e] = FastTermUnder(greatest, s[2 + e]);
      total[e] = total[e] * factor + s[e] + s[2 + e];
#pragma unroll
      for (int i = 0; i < 4 * kPanels; ++i) {
        sums[i][e] *= factor;
        sums[i][2 + e] *= factor;
      }
    }
  }
};

template <class T, int kLength, int kRows, int kHeads, int kSteps, int kPanels, int kWarps,
          bool kVector>
__global__ void __launch_bounds__(32 * kWarps, 1)
    AttentionOctetKernel(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                         const float* __restrict__ bias, const float* __restrict__ sinks,
                         const Index* __restrict__ lengths, const Index* __restrict__ row_offsets,
                         const Index* __restrict__ column_indices, T* __restrict__ out,
                         float* __restrict__ lse, long long m, long long keys, long long heads,
                         long long key_heads, long long depth, long long value_depth,
                         long long vectors, long long batch, long long scale_bits,
                         long long flags) {
  constexpr int kTiles = kHeads * kRows / 8, kOfHead = kRows / 8, kParts = kLength / kRows;
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const unsigned block_row = blockIdx.x / kParts, first_part = blockIdx.x % kParts * kRows;
  const Size block_at = Size(block_row) * kLength, first_row = block_at + first_part;
  const Size first_head = Size(blockIdx.y) * kHeads;
  const Size key_head = first_head / (call.heads / call.key_heads);
  const bool valid = first_row < call.m;
  const unsigned first = valid ? row_offsets[block_row] : 0;
  const unsigned last = valid ? row_offsets[block_row + 1] : 0;
  const float scale = float(__longlong_as_double(scale_bits));
  for (Size product = blockIdx.z; product < batch; product += gridDim.z) {
    const T* of_keys = call.Rows(k, kManyK, product, call.keys, call.key_heads, key_head, depth);
    const T* of_values =
        call.Rows(v, kManyV, product, call.keys, call.key_heads, key_head, value_depth);
    const Size end = call.End(lengths, product);
    OctetRows<T, kSteps, kPanels, kVector> rows[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Size row = first_row + i % kOfHead * 8 + g, head = first_head + i / kOfHead;
      rows[i].Clear(
          call.Rows(q, kManyQ, product, call.m, call.heads, row * call.heads + head, depth),
          row < call.m, depth, t);
    }
    OctetColumns columns;
    columns.Find(column_indices, first + warp * 16, last, end, g, t);
#pragma unroll 1
    for (unsigned p = first + warp * 16; p < last; p += kWarps * 16) {
      KeyFragments<T, kSteps, kVector> key;
      key.Load(of_keys, call.key_heads * depth, columns.own, depth, t);
      ValueFragments<T, kPanels, kVector> value;
      value.Load(of_values, call.key_heads * value_depth, columns.quad, value_depth, g);
      const Index own[2] = {columns.own[0], columns.own[1]};
      columns.Find(column_indices, p + kWarps * 16, last, end, g, t);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        float s[4] = {};
        key.Multiply(rows[i].query, s);
        const unsigned part = i % kOfHead * 8 + 2 * t;
        const float* own_bias = call.Bias(bias, product, first_head + i / kOfHead, kLength);
        ScoreTile<kLength>(call, block_at, first_part + part, p + g / 2 * 4 + g % 2, own, scale,
                           own_bias, s);
        rows[i].Raise(s);
        const unsigned b[2] = {TransposeMatrix(PackPair<T>(s[0], s[1])),
                               TransposeMatrix(PackPair<T>(s[2], s[3]))};
        value.Multiply(b, rows[i].sums);
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Size head = first_head + i / kOfHead;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Online<float, 8 * kPanels> state;
#pragma unroll
        for (int j = 0; j < 8 * kPanels; ++j) {
          state.numbers[j] = rows[i].sums[j / 2][j % 2 * 2 + e];
        }
        state.total() = rows[i].total[e];
        state.peak() = rows[i].peak[e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          state.total() += __shfl_xor_sync(~0u, state.total(), distance);
        }
        MergeShares<32, kWarps, 32 * kWarps>(state.numbers, MergeOnline());
        const Size row = first_row + i % kOfHead * 8 + 2 * t + e;
        if (row >= call.m || warp != 0) continue;
        if (call.Has(kHasSinks)) {
          const float sink = sinks[call.Of(kManySinks, product) * call.heads + head];
          state.Raise(Greater()(state.peak(), sink));
          state.total() += TermUnder(state.peak(), sink);
        }
        const float total = state.total(), inverse = total == 0 ? 0 : 1 / total;
        const Size at = (product * call.m + row) * call.heads + head;
#pragma unroll
        for (int s = 0; s < kPanels; ++s) {
          const unsigned column = s * 64 + g * 8;
          float chunk[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) chunk[j] = state.numbers[8 * s + j] * inverse;
          if (column < value_depth) {
            StoreWords<kVector>(out + at * value_depth + column, unsigned(value_depth) - column,
                                chunk);
          }
        }
        if (g == 0) lse[at] = total == 0 ? Least<float>() : state.peak() + Log(total);
      }
    }
  }
}

}  // namespace sgap
