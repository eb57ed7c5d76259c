// The gradients of attention_octet.cuh on tensor cores, float16 and bfloat16: of q (and the bias)
// by rows here, of k and v by keys in attention_octet_keys.cuh. Both walks form the same matrix
// products, of gathered rows and of rows that a warp owns:
//
//             gathered       owned      S            dP              sums
//   by rows   16 of k, v     8 of q     S^T = K Q^T  dP^T = V dO^T   dQ^T += K^T dS^T
//   by keys   16 of q, dout  8 of k, v  S = Q K^T    dP = dO V^T     dK^T += Q^T dS
//                                                                    dV^T += dO^T P
//
// The A operand of the last column's products is that of S or dP with each 8 x 8 submatrix
// transposed by movmatrix, so gathered rows are read once. p and ds are rounded to 16 bits for
// these products; dbias is not.
//
// kSteps, kValueSteps  features of q and k, and of v and dout, in units of 32; with kFull exactly
//                      these. The other parameters are those of attention_octet.cuh
//
// Each element of a result is summed in one fixed order: deterministic.
#pragma once

#include "attention_octet.cuh"

namespace sgap {

// Replaces a score by p and an element of dP by ds; zeros where an entry is masked. `lse` is from
// TermsUnder.
__device__ inline void FastDifferentiate(float lse, float delta, float& s, float& dp) {
  const bool kept = s != Least<float>();
  s = kept ? FastTerm(lse, s) : 0;
  dp = kept ? s * (dp - delta) : 0;
}
// The lse to subtract. A row with no entries has -infinity; +infinity makes all its terms zero.
__device__ inline float TermsUnder(float lse) { return lse == Least<float>() ? -lse : lse; }

// The values of a D fragment, packed and transposed as a B operand, k = 4t to 4t + 3.
template <class T>
__device__ inline void TurnTile(const float (&x)[4], unsigned (&b)[2]) {
  b[0] = TransposeMatrix(PackPair<T>(x[0], x[1]));
  b[1] = TransposeMatrix(PackPair<T>(x[2], x[3]));
}

// sums += (the gathered rows)^T times each tile's b. Of each 32 features a lane ends with 8 (g / 2)
// + g % 2 + {0, 2, 4, 6}, two in an mma, for the tile's rows 2t and 2t + 1.
template <class T, int kTiles, int kSteps, bool kVector>
__device__ inline void AddTransposed(const KeyFragments<T, kSteps, kVector>& rows,
                                     const unsigned (&b)[kTiles][2],
                                     float (&sums)[kTiles][2 * kSteps][4]) {
#pragma unroll
  for (int s = 0; s < 2 * kSteps; ++s) {
    unsigned a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a[j] = TransposeMatrix(rows.words[j / 2][s / 2].at[s % 2 * 2 + j % 2]);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) MultiplyAdd<T>(a, b[i], sums[i][s]);
  }
}

// Merges the sums of the warps that share a tile, and calls put(first feature, features that are
// left, 8 values) in each lane: lanes of even g have row 2t, lanes of odd g row 2t + 1. All threads
// of the block must call.
template <int kShare, int kBlock, int kCount, class Put>
__device__ inline void TurnSums(unsigned depth, float factor, const float (&sums)[kCount][4],
                                const Put& put) {
  const unsigned g = threadIdx.x % 32 / 4;
  const bool odd = g % 2;
#pragma unroll
  for (int s = 0; s < kCount; s += 2) {
    float own[8], chunk[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) own[j] = sums[s + j / 4][j % 4];
    MergeShares<32, kShare, kBlock>(own, AddAll());
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float kept = odd ? own[j + 1] : own[j], given = odd ? own[j] : own[j + 1];
      const float other = __shfl_xor_sync(~0u, given, 4);
      chunk[j] = (odd ? other : kept) * factor;
      chunk[j + 1] = (odd ? kept : other) * factor;
    }
    const unsigned at = s * 16 + g / 2 * 8;
    if (at < depth) put(at, depth - at, chunk);
  }
}

// The same, stored as the values of `row`, rounded, where it exists.
template <bool kVector, int kShare, int kBlock, class T, int kCount>
__device__ inline void StoreTransposed(T* row, bool exists, unsigned depth, float factor,
                                       const float (&sums)[kCount][4]) {
  TurnSums<kShare, kBlock>(depth, factor, sums,
                           [&](unsigned at, unsigned left, const float (&chunk)[8]) {
                             if (exists) StoreWords<kVector>(row + at, left, chunk);
                           });
}

// The same, stored in `row` or, where that is null, as they are in `partial`.
template <bool kVector, int kShare, int kBlock, class T, int kCount>
__device__ inline void StorePiece(T* row, float* partial, bool exists, unsigned depth, float factor,
                                  const float (&sums)[kCount][4]) {
  TurnSums<kShare, kBlock>(depth, factor, sums,
                           [&](unsigned at, unsigned left, const float (&chunk)[8]) {
                             if (!exists) return;
                             if (row != nullptr) {
                               StoreWords<kVector>(row + at, left, chunk);
                             } else {
                               Store<kVector>(partial + at, left, chunk);
                             }
                           });
}

// dq of the rows of a block, over its vectors: for each tile of 8 rows all threads call
// write(batch, tile, head, sums), with the sums of their warp before scaling. Writes dbias.
template <class T, int kSteps, int kValueSteps, bool kVector, int kLength, int kRows, int kHeads,
          int kWarps, int kNear, class Write>
__device__ __forceinline__ void DifferentiateOctets(
    const AttentionCall& call, const BlockVectors<kLength, kRows, kHeads, kWarps, kNear>& vectors,
    const T* __restrict__ dout, const float* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
    const Index* __restrict__ lengths, const float* __restrict__ lse,
    const Index* __restrict__ column_indices, float* __restrict__ dbias, long long batches,
    float scale, long long wrt_bias, const Write& write) {
  constexpr int kTiles = kHeads * kRows / 8, kOfHead = kRows / 8;
  const Size depth = call.depth, value_depth = call.value_depth;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  const unsigned g = lane / 4, t = lane % 4, first_part = vectors.part;
  const Size first_row = Size(vectors.block_row) * kLength + first_part;
  const Size first_head = vectors.first_head, key_head = blockIdx.y;
  const unsigned key_bytes = unsigned(call.key_heads * depth * sizeof(T));
  const unsigned value_bytes = unsigned(call.key_heads * value_depth * sizeof(T));
  const unsigned first = vectors.first, last = vectors.last;
  unsigned below[kOfHead][2];
#pragma unroll
  for (int i = 0; i < 2 * kOfHead; ++i)
    below[i / 2][i % 2] = KeptBelow(call, first_row + i / 2 * 8 + 2 * t + i % 2);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const T* of_keys = call.Rows(k, kManyK, batch, call.keys, call.key_heads, key_head, depth);
    const T* of_values =
        call.Rows(v, kManyV, batch, call.keys, call.key_heads, key_head, value_depth);
    const unsigned end = Indices(call.End(lengths, batch));
    Pack<unsigned, 4> query[kTiles][kSteps], cotangent[kTiles][kValueSteps];
    float of_lse[kTiles][2], of_delta[kTiles][2], sums[kTiles][2 * kSteps][4] = {};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Size row = first_row + i % kOfHead * 8, head = first_head + i / kOfHead;
      const Size own = (row + g) * call.heads + head;
      LoadOwn<kVector>(call.Rows(q, kManyQ, batch, call.m, call.heads, own, depth),
                       row + g < call.m, depth, t, query[i]);
      LoadOwn<kVector>(call.Rows(dout, kManyOut, batch, call.m, call.heads, own, value_depth),
                       row + g < call.m, value_depth, t, cotangent[i]);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Size at = (row + 2 * t + e) * call.heads;
        const bool exists = row + 2 * t + e < call.m;
        of_lse[i][e] =
            TermsUnder(exists ? call.OfRows(lse, kManyLse, batch, head)[at] : Least<float>());
        of_delta[i][e] = exists ? call.OfRows(delta, kManyDelta, batch, head)[at] : 0;
      }
    }
    OctetColumns columns;
    columns.Find(column_indices, first + warp * 16, last, end);
#pragma unroll 1
    for (unsigned p = first + warp * 16; p < last; p += kWarps * 16) {
      Index own[2];
      columns.Own(g, own);
      KeyFragments<T, kSteps, kVector> key;
      key.Load(of_keys, key_bytes, own, columns.All(), depth, t);
      KeyFragments<T, kValueSteps, kVector> value;
      value.LoadAny(of_values, value_bytes, own, value_depth, t);
      columns.Find(column_indices, p + kWarps * 16, last, end);
      const Size entry = Size(p + g / 2 * 4 + g % 2) * kLength + first_part + 2 * t;
      unsigned turned[kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        float s[4] = {}, ds[4] = {};
        key.Multiply(query[i], s);
        value.Multiply(cotangent[i], ds);
        const Size head = first_head + i / kOfHead, part = i % kOfHead * 8;
        ScoreTile<kLength>(call, below[i % kOfHead], own, scale,
                           call.Bias(bias, batch, head, kLength) + entry + part, s);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          FastDifferentiate(of_lse[i][j % 2], of_delta[i][j % 2], s[j], ds[j]);
        if (wrt_bias) {
          float* to_bias = dbias + (batch * call.heads + head) * call.vectors * kLength;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (own[j / 2] >= 0) to_bias[entry + part + j / 2 * 2 * kLength + j % 2] = ds[j];
          }
        }
        TurnTile<T>(ds, turned[i]);
      }
      AddTransposed(key, turned, sums);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      write(batch, i % kOfHead * 8, first_head + i / kOfHead, warp == 0, sums[i]);
  }
}

template <class T, int kLength, int kRows, int kHeads, int kSteps, int kValueSteps, int kWarps,
          int kNear, bool kVector, bool kFull>
__global__ void __launch_bounds__(32 * kWarps * kNear, 1) AttentionOctetRowsBackwardKernel(
    const T* __restrict__ dout, const float* __restrict__ delta, const T* __restrict__ q,
    const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
    const Index* __restrict__ lengths, const float* __restrict__ lse,
    const Index* __restrict__ row_offsets, const Index* __restrict__ column_indices,
    T* __restrict__ dq, float* __restrict__ dbias, long long m, long long keys, long long heads,
    long long key_heads, long long depth, long long value_depth, long long vectors,
    long long batches, long long scale_bits, long long flags, long long wrt_bias,
    long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  if (kFull) {
    depth = 32 * kSteps;
    value_depth = 32 * kValueSteps;
  }
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const float scale = float(__longlong_as_double(scale_bits));
  const BlockVectors<kLength, kRows, kHeads, kWarps, kNear> own(row_offsets, call);
  const unsigned row_of_lane = 2 * (threadIdx.x % 4) + threadIdx.x / 4 % 2;
  DifferentiateOctets<T, kSteps, kValueSteps, kVector>(
      call, own, dout, delta, q, k, v, bias, lengths, lse, column_indices, dbias, batches, scale,
      wrt_bias, [&](Size batch, unsigned tile, Size head, bool first, const auto& sums) {
        const Size part = own.part + tile + row_of_lane;
        const Size row = Size(own.block_row) * kLength + part;
        const bool stored = row < call.m && first;
        const Size at = (batch * call.m + row) * call.heads + head;
        StoreTransposed<kVector, kWarps, 32 * kWarps * kNear>(dq + at * depth, stored, depth, scale,
                                                              sums);
      });
}

// The same on a work list (row_pieces.cuh): partial sums of dq, scaled, are [batch, places,
// kLength, heads, depth].
template <class T, int kLength, int kRows, int kHeads, int kSteps, int kValueSteps, int kWarps,
          int kNear, bool kVector, bool kFull>
__global__ void __launch_bounds__(ThreadsOfPieces(kWarps, kNear), 1)
    AttentionOctetRowsBackwardPiecesKernel(
        const T* __restrict__ dout, const float* __restrict__ delta, const T* __restrict__ q,
        const T* __restrict__ k, const T* __restrict__ v, const float* __restrict__ bias,
        const Index* __restrict__ lengths, const float* __restrict__ lse,
        const Index* __restrict__ list, const Index* __restrict__ column_indices,
        T* __restrict__ dq, float* __restrict__ dbias, float* __restrict__ partial, long long m,
        long long keys, long long heads, long long key_heads, long long depth,
        long long value_depth, long long vectors, long long batches, long long scale_bits,
        long long flags, long long wrt_bias, long long pieces, long long elements, long long places,
        long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list, vectors, column_indices);
  if (kFull) {
    depth = 32 * kSteps;
    value_depth = 32 * kValueSteps;
  }
  const AttentionCall call{Size(m),     Size(keys),        Size(heads),   Size(key_heads),
                           Size(depth), Size(value_depth), Size(vectors), unsigned(flags)};
  const float scale = float(__longlong_as_double(scale_bits));
  const BlockVectors<kLength, kRows, kHeads, kWarps, kNear> own(list, Size(pieces), call);
  const unsigned row_of_lane = 2 * (threadIdx.x % 4) + threadIdx.x / 4 % 2;
  DifferentiateOctets<T, kSteps, kValueSteps, kVector>(
      call, own, dout, delta, q, k, v, bias, lengths, lse, column_indices, dbias, batches, scale,
      wrt_bias, [&](Size batch, unsigned tile, Size head, bool first, const auto& sums) {
        const Size part = own.part + tile + row_of_lane;
        const Size row = Size(own.block_row) * kLength + part;
        const bool stored = row < call.m && first;
        const Size place = (batch * places + unsigned(own.place)) * kLength + part;
        T* to = AllOfRow(own.place, places)
                    ? dq + ((batch * call.m + row) * call.heads + head) * depth
                    : nullptr;
        StorePiece<kVector, kWarps, 32 * kWarps * kNear>(
            to, partial + (place * call.heads + head) * depth, stored, depth, scale, sums);
      });
}

}  // namespace sgap
