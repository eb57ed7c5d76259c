// Attention over column vectors on tensor cores, float16 and bfloat16: the fused forward pass in
// octet tiles (vectorSparse, sections 5.3 and 6.3), re-derived for m16n8k16. Equations, masks and
// flags are those of attention.cuh.
//
// kLength   V, rows of a vector: 8, 16 or 32
// kRows     rows of a vector that a warp takes (8, 16 or 32), for kHeads heads of q that share keys
//           and values: kTiles = kHeads * kRows / 8 tiles of 8 rows, which share what is gathered
// kSteps    features of q and k, in units of 32; kPanels: features of v, in units of 64
// kWarps    warps that share a block row, each taking every kWarps-th step of 16 vectors; merged in
// a
//           fixed order: deterministic
// kNear     such sets of warps in a block: neighbouring block rows, all their parts and all heads
//           that share keys, so that keys and values which several of them gather are in the L1
// kVector   both depths are multiples of 8
// kFull     the depths are 32 * kSteps and 64 * kPanels: the loop has no bounds checks for features
//
// S are the scores, P = exp(S - maximum), O the output; A and B are the operands of an mma, of m x
// k and k x n. They are swapped, so that the vectors' rows are the 8 columns of an mma and the 16
// vectors of a step its 16 rows. With g = lane / 4 and t = lane % 4, and own(r) = r / 2 * 4 + r %
// 2:
//
//   S^T += K Q^T   A rows g, g + 8 = vectors own(g), own(g) + 2; k = features 8t to 8t + 7 of each
//                  32, in an order that K and Q share: both load 16 bytes of a row
//   P^T            a lane has rows 2t and 2t + 1 of these two vectors: packed and turned by
//                  movmatrix, they are rows k = vectors 4t to 4t + 3 of the next mma's B
//   O^T += V^T P^T A: a lane loads columns 8g to 8g + 7, of each 64, of the four rows of v that
//                  vectors 4t to 4t + 3 name, so that eight lanes read a line of 128 bytes; PRMT
//                  pairs the 16-bit values of two rows into a register
//
// Shuffles: six for the columns of a step, three for each maximum. Shared memory is used only to
// merge warps. If is_causal masks only some rows of a vector, NaN or infinity in the row of v that
// it names reaches the masked rows too (0 * NaN).
#pragma once

#include "attention.cuh"
#include "attention_octet_operands.cuh"

namespace sgap {

// exp(x - peak), approximate: for results that are rounded to 16 bits.
__device__ inline float FastTerm(float peak, float x) {
  float term;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(term) : "f"((x - peak) * 1.44269504f));
  return term;
}

// The causal bound of a row: columns from here on are masked.
__device__ inline unsigned KeptBelow(const AttentionCall& call, Size row) {
  if (row >= call.m) return 0;
  return call.Has(kCausal) ? Indices(row + 1) : 1u << 31;
}

// Turns the dot products of two vectors and the lane's two neighbouring rows into scores; -infinity
// where an entry is masked. The two vectors are two positions apart; `bias` is at the first one's.
template <int kLength>
__device__ inline void ScoreTile(const AttentionCall& call, const unsigned (&below)[2],
                                 const Index (&columns)[2], float scale, const float* bias,
                                 float (&s)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) s[j] *= scale;
  if (call.Has(kHasBias)) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (columns[j / 2] >= 0) s[j] += bias[j / 2 * 2 * kLength + j % 2];
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (unsigned(columns[j / 2]) >= below[j % 2]) s[j] = Least<float>();
  }
}

// Eight rows of one head: their queries and their running softmax.
template <class T, int kSteps, int kPanels, bool kVector>
struct OctetRows {
  Pack<unsigned, 4> query[kSteps];
  float sums[4 * kPanels][4];
  float total[2], peak[2];  // of rows 2t and 2t + 1; totals over the lane's vectors only

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
  // Raises the peak, rescales the sums to it, and replaces the scores of two vectors by the terms
  // exp(s - peak).
  __device__ void Raise(float (&s)[4]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float greatest = Greater()(s[e], s[2 + e]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        greatest = Greater()(greatest, __shfl_xor_sync(~0u, greatest, distance));
      }
      greatest = Greater()(greatest, peak[e]);
      // A peak of -infinity: no entry so far, and all terms are zero.
      const float under = greatest == Least<float>() ? 0 : greatest;
      const float factor = FastTerm(under, peak[e]);
      peak[e] = greatest;
      s[e] = FastTerm(under, s[e]);
      s[2 + e] = FastTerm(under, s[2 + e]);
      total[e] = total[e] * factor + s[e] + s[2 + e];
#pragma unroll
      for (int i = 0; i < 4 * kPanels; ++i) {
        sums[i][e] *= factor;
        sums[i][2 + e] *= factor;
      }
    }
  }
};

// The vectors `first` to last - 1 of a block row, and rows `part` to part + kRows - 1 of these,
// which the warps of a block take.
template <int kLength, int kRows, int kHeads, int kWarps, int kNear>
struct BlockVectors {
  unsigned block_row, part, first, last;
  Size first_head;   // of kHeads
  Index place = -1;  // of the block's results among the partial ones, if it has a piece

  // All of a block row; none where there are no keys.
  __device__ BlockVectors(const Index* row_offsets, const AttentionCall& call) {
    block_row = unsigned(Work(call));
    const bool valid = Size(block_row) * kLength + part < call.m && call.keys > 0;
    first = valid ? row_offsets[block_row] : 0;
    last = valid ? row_offsets[block_row + 1] : 0;
  }
  // A piece of a block row, of a work list (row_pieces.cuh).
  __device__ BlockVectors(const Index* list, Size pieces, const AttentionCall& call) {
    const Size element = Work(call);
    const RowPiece piece = PieceAt(list, element, element < pieces, call.vectors);
    block_row = piece.row;
    const bool valid = Size(block_row) * kLength + part < call.m && call.keys > 0;
    first = valid ? piece.first : 0;
    last = valid ? piece.last : 0;
    place = piece.place;
  }

 private:
  __device__ unsigned Work(const AttentionCall& call) {
    constexpr int kParts = kLength / kRows;
    const unsigned shared = unsigned(call.heads / call.key_heads), sets = shared / kHeads;
    unsigned at = blockIdx.x * kNear + (kNear > 1 ? threadIdx.x / (32 * kWarps) : 0);
    first_head = Size(blockIdx.y) * shared + at % sets * kHeads;
    at /= sets;
    part = at % kParts * kRows;
    return at / kParts;
  }
};

// The sizes of a call; with kFull the depths are constants.
template <int kSteps, int kPanels, bool kFull>
__device__ inline AttentionCall CallOf(Size m, Size keys, Size heads, Size key_heads, Size depth,
                                       Size value_depth, Size vectors, unsigned flags) {
  return {m,
          keys,
          heads,
          key_heads,
          kFull ? 32 * kSteps : depth,
          kFull ? 64 * kPanels : value_depth,
          vectors,
          flags};
}

// The running softmax of the rows of a block, over its vectors; for each row that exists the first
// warp calls write(batch, head, row of the block's rows, state): a lane has columns 8g to 8g + 7 of
// each 64.
template <class T, int kSteps, int kPanels, bool kVector, int kLength, int kRows, int kHeads,
          int kWarps, int kNear, class Write>
__device__ __forceinline__ void AttendOctets(
    const AttentionCall& call, const BlockVectors<kLength, kRows, kHeads, kWarps, kNear>& own,
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
    const float* __restrict__ bias, const Index* __restrict__ lengths,
    const Index* __restrict__ column_indices, long long batches, float scale, const Write& write) {
  constexpr int kTiles = kHeads * kRows / 8, kOfHead = kRows / 8;
  const Size depth = call.depth, value_depth = call.value_depth;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  const unsigned g = lane / 4, t = lane % 4;
  const Size first_row = Size(own.block_row) * kLength + own.part;
  const Size first_head = own.first_head, key_head = blockIdx.y;
  const unsigned key_bytes = unsigned(call.key_heads * depth * sizeof(T));
  const unsigned value_bytes = unsigned(call.key_heads * value_depth * sizeof(T));
  const unsigned first = own.first, last = own.last, first_part = own.part;
  unsigned below[kOfHead][2];
#pragma unroll
  for (int i = 0; i < 2 * kOfHead; ++i)
    below[i / 2][i % 2] = KeptBelow(call, first_row + i / 2 * 8 + 2 * t + i % 2);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const T* of_keys = call.Rows(k, kManyK, batch, call.keys, call.key_heads, key_head, depth);
    const T* of_values =
        call.Rows(v, kManyV, batch, call.keys, call.key_heads, key_head, value_depth);
    const unsigned end = Indices(call.End(lengths, batch));
    OctetRows<T, kSteps, kPanels, kVector> rows[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Size row = first_row + i % kOfHead * 8 + g, head = first_head + i / kOfHead;
      rows[i].Clear(call.Rows(q, kManyQ, batch, call.m, call.heads, row * call.heads + head, depth),
                    row < call.m, depth, t);
    }
    OctetColumns columns;
    columns.Find(column_indices, first + warp * 16, last, end);
#pragma unroll 1
    for (unsigned p = first + warp * 16; p < last; p += kWarps * 16) {
      Index own[2], quad[4];
      columns.Own(g, own);
      columns.Quad(t, quad);
      KeyFragments<T, kSteps, kVector> key;
      key.LoadAny(of_keys, key_bytes, own, depth, t);
      ValueFragments<T, kPanels, kVector> value;
      const bool all = columns.All();
      if (kPanels <= 2) value.Load(of_values, value_bytes, quad, all, value_depth, g);
      columns.Find(column_indices, p + kWarps * 16, last, end);
      const Size entry = Size(p + g / 2 * 4 + g % 2) * kLength + first_part + 2 * t;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        float s[4] = {};
        key.Multiply(rows[i].query, s);
        // Of wide heads the registers do not hold rows of k and rows of v together.
        if (kPanels > 2 && i == 0) value.Load(of_values, value_bytes, quad, all, value_depth, g);
        const float* own_bias = call.Bias(bias, batch, first_head + i / kOfHead, kLength);
        ScoreTile<kLength>(call, below[i % kOfHead], own, scale, own_bias + entry + i % kOfHead * 8,
                           s);
        rows[i].Raise(s);
        const unsigned b[2] = {TransposeMatrix(PackPair<T>(s[0], s[1])),
                               TransposeMatrix(PackPair<T>(s[2], s[3]))};
        value.Multiply(b, rows[i].sums);
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Online<float, 8 * kPanels> state;
#pragma unroll
        for (int j = 0; j < 8 * kPanels; ++j) {
          state.values[j] = rows[i].sums[j / 2][j % 2 * 2 + e];
        }
        state.total() = rows[i].total[e];
        state.peak() = rows[i].peak[e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          state.total() += __shfl_xor_sync(~0u, state.total(), distance);
        }
        MergeShares<32, kWarps, 32 * kWarps * kNear>(state.values, MergeOnline());
        const unsigned row = i % kOfHead * 8 + 2 * t + e;  // of those of the warp
        if (first_row + row < call.m && warp == 0)
          write(batch, first_head + i / kOfHead, row, state);
      }
    }
  }
}

// Ends the softmax of a row: its sink, its output and its lse.
template <bool kVector, class T, int kPanels8>
__device__ inline void WriteOctetRow(const AttentionCall& call, const float* sinks, T* out,
                                     float* lse, Size batch, Size row, Size head, unsigned g,
                                     Online<float, kPanels8>& state) {
  if (call.Has(kHasSinks)) {
    const float sink = sinks[call.Of(kManySinks, batch) * call.heads + head];
    state.Raise(Greater()(state.peak(), sink));
    state.total() += TermUnder(state.peak(), sink);
  }
  const float total = state.total(), inverse = total == 0 ? 0 : 1 / total;
  const Size at = (batch * call.m + row) * call.heads + head;
#pragma unroll
  for (int s = 0; s < kPanels8 / 8; ++s) {
    const unsigned column = s * 64 + g * 8;
    float chunk[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) chunk[j] = state.values[8 * s + j] * inverse;
    if (column < call.value_depth) {
      StoreWords<kVector>(out + at * call.value_depth + column, unsigned(call.value_depth) - column,
                          chunk);
    }
  }
  if (g == 0) lse[at] = total == 0 ? Least<float>() : state.peak() + Log(total);
}

template <class T, int kLength, int kRows, int kHeads, int kSteps, int kPanels, int kWarps,
          int kNear, bool kVector, bool kFull>
__global__ void __launch_bounds__(32 * kWarps * kNear, 1)
    AttentionOctetKernel(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                         const float* __restrict__ bias, const float* __restrict__ sinks,
                         const Index* __restrict__ lengths, const Index* __restrict__ row_offsets,
                         const Index* __restrict__ column_indices, T* __restrict__ out,
                         float* __restrict__ lse, long long m, long long keys, long long heads,
                         long long key_heads, long long depth, long long value_depth,
                         long long vectors, long long batches, long long scale_bits,
                         long long flags, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  const AttentionCall call = CallOf<kSteps, kPanels, kFull>(m, keys, heads, key_heads, depth,
                                                            value_depth, vectors, unsigned(flags));
  const BlockVectors<kLength, kRows, kHeads, kWarps, kNear> own(row_offsets, call);
  AttendOctets<T, kSteps, kPanels, kVector>(
      call, own, q, k, v, bias, lengths, column_indices, batches,
      float(__longlong_as_double(scale_bits)),
      [&](Size batch, Size head, unsigned row, auto& state) {
        const Size first_row = Size(own.block_row) * kLength + own.part;
        WriteOctetRow<kVector>(call, sinks, out, lse, batch, first_row + row, head,
                               threadIdx.x % 32 / 4, state);
      });
}

// For __launch_bounds__: with fewer neighbours in a block a lane has the registers that it has with
// eight.
__device__ constexpr int ThreadsOfPieces(int warps, int near) {
  return near > 1 && near < 8 ? 32 * 8 * warps : 32 * warps * near;
}

// The same on a work list: what a piece leaves is as in attention_pieces.cuh, whose kernel merges
// it.
template <class T, int kLength, int kRows, int kHeads, int kSteps, int kPanels, int kWarps,
          int kNear, bool kVector, bool kFull>
__global__ void __launch_bounds__(ThreadsOfPieces(kWarps, kNear), 1)
    AttentionOctetPiecesKernel(const T* __restrict__ q, const T* __restrict__ k,
                               const T* __restrict__ v, const float* __restrict__ bias,
                               const float* __restrict__ sinks, const Index* __restrict__ lengths,
                               const Index* __restrict__ list,
                               const Index* __restrict__ column_indices, T* __restrict__ out,
                               float* __restrict__ lse, float* __restrict__ partial,
                               float* __restrict__ states, long long m, long long keys,
                               long long heads, long long key_heads, long long depth,
                               long long value_depth, long long vectors, long long batches,
                               long long scale_bits, long long flags, long long pieces,
                               long long elements, long long places, long long sharing) {
  MoveToStructure(sharing, 4 * elements - 1, list, vectors, column_indices);
  const AttentionCall call = CallOf<kSteps, kPanels, kFull>(m, keys, heads, key_heads, depth,
                                                            value_depth, vectors, unsigned(flags));
  const BlockVectors<kLength, kRows, kHeads, kWarps, kNear> own(list, Size(pieces), call);
  const unsigned g = threadIdx.x % 32 / 4;
  AttendOctets<T, kSteps, kPanels, kVector>(
      call, own, q, k, v, bias, lengths, column_indices, batches,
      float(__longlong_as_double(scale_bits)),
      [&](Size batch, Size head, unsigned row, auto& state) {
        if (AllOfRow(own.place, places)) {
          const Size first_row = Size(own.block_row) * kLength + own.part;
          WriteOctetRow<kVector>(call, sinks, out, lse, batch, first_row + row, head, g, state);
          return;
        }
        const Size place = (batch * places + unsigned(own.place)) * kLength + own.part + row;
        const Size at = place * call.heads + head;
#pragma unroll
        for (int s = 0; s < kPanels; ++s) {
          const unsigned column = s * 64 + g * 8;
          float chunk[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) chunk[j] = state.values[8 * s + j];
          if (column < call.value_depth) {
            Store<kVector>(partial + at * call.value_depth + column,
                           unsigned(call.value_depth) - column, chunk);
          }
        }
        if (g == 0) {
          states[2 * at] = state.total();
          states[2 * at + 1] = state.peak();
        }
      });
}

}  // namespace sgap
