// SpMM over column vectors on tensor cores, C = A B: the 1-D octet tiling of vectorSparse, section
// 5.3, re-derived for the mma of sm_80 and later (the paper uses m8n8k4 of sm_70).
//
// kLength  V, rows of a vector: 2, 4, 8, 16 or 32
// kPanels  tile_n in panels of 64 columns (32 of float): 8 lanes load 16 bytes each of a row
// kQuads   tile_k in quads of 16 vectors; a lane loads the rows of four of them
// kStages  steps of tile_k vectors whose gathered rows are in registers or in flight
// kWarps   warps that share a block row by one tile_n: each takes every kWarps-th step
// kNear    neighbouring block rows of a block, a warp each (1 where kWarps share a block row): the
//          rows of B that several of them gather are then in the L1
// kBlocks  blocks that must fit on a multiprocessor: without this bound ptxas spills to fit more
// kVector  n is a multiple of the columns in 16 bytes
// kOrdered block rows are taken in the order of `order`; else `order` is not read
//
// Operands are swapped: C^T (16 columns x 8 rows) += B^T (16 columns x k) A^T (k x 8 rows), so that
// V = 8 fills an mma, and longer vectors share the gathered rows. A lane, g = lane / 4 and t = lane
// % 4, loads columns 8g to 8g + 7 (float: 4g to 4g + 3) of a panel, of the rows of B that vectors
// 4t to 4t + 3 of a quad name: each row is one line of 128 bytes. Pairs of columns make up four mma
// (two of float), and the order of the vectors along k is the same in both operands:
//
//   16-bit  A fragment: row g, g + 8 = columns 8g + 2i, 8g + 2i + 1; k = 2t, 2t + 1, 2t + 8, 2t + 9
//           = vectors 4t to 4t + 3: a PRMT joins two rows' halves
//           B fragment: 8 vectors x 8 rows as they are stored, turned by one movmatrix
//   float   the same with k = t, t + 4, two vectors an mma; values as they are stored
//
// A lane ends with 16 bytes of V / 4 rows of C (one, in lanes t < V, where V < 8 leaves columns
// idle).
//
// Grid: x over block rows (or pieces of these), kNear a block, y over tiles of columns, z over the
// batch. A vector that does not exist is a zero times a zero: nothing is loaded for it. Accumulates
// in float32, in an order that the schedule and the structure fix: deterministic.
#pragma once

#include "mma.cuh"
#include "row_pieces.cuh"

namespace sgap {

template <class T, int kLength, int kPanels>
struct Octet {
  enum {
    kQuad = 16,
    kChunk = 16 / sizeof(T),                 // columns of a lane in a panel
    kPanel = 8 * kChunk,                     // columns of a panel
    kTiles = kLength > 8 ? kLength / 8 : 1,  // mma that share an A fragment
    kRows = kLength > 4 ? kLength / 4 : 1,   // rows of C of a lane
    kPairs = kChunk / 2,                     // mma for one panel and one tile
    kHeld = sizeof(T) == 2 ? 2 : 4,          // vectors of a quad whose values a lane loads
    kSums = kPanels * kPairs * kTiles,       // mma accumulators of a lane
  };
};

// A lane's part of a quad: the columns of vectors 4t to 4t + 3, the rows of B that they name, and
// the values that the lane contributes.
template <class T, int kLength, int kPanels>
struct Quad {
  using O = Octet<T, kLength, kPanels>;
  Index columns[4];
  Pack<unsigned, 4> rows[4][kPanels];
  Pack<unsigned, O::kTiles> values[O::kHeld];

  __device__ void MultiplyInto(float (&sums)[O::kSums][4]) const {
    constexpr int kSteps = 16 / MmaOf<T>::kDepth;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      unsigned b[O::kTiles][2];
#pragma unroll
      for (int h = 0; h < O::kTiles; ++h) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned word = values[2 * s + j].at[h];
          b[h][j] = sizeof(T) == 2 ? TransposeMatrix(word) : RoundToTf32(__uint_as_float(word));
        }
      }
#pragma unroll
      for (int i = 0; i < kPanels * O::kPairs; ++i) {
        unsigned a[4];
        Columns(s, i / O::kPairs, i % O::kPairs, a);
#pragma unroll
        for (int h = 0; h < O::kTiles; ++h) MultiplyAdd<T>(a, b[h], sums[i * O::kTiles + h]);
      }
    }
  }

  // The A fragment of columns 2 * pair and 2 * pair + 1 of the lane in a panel.
  __device__ void Columns(int s, int panel, int pair, unsigned (&a)[4]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (sizeof(T) == 2) {
        const unsigned x = rows[2 * j][panel].at[pair], y = rows[2 * j + 1][panel].at[pair];
        a[2 * j] = PackLow(x, y);
        a[2 * j + 1] = PackHigh(x, y);
      } else {
        const Pack<unsigned, 4>& row = rows[2 * s + j][panel];
        a[2 * j] = RoundToTf32(__uint_as_float(row.at[2 * pair]));
        a[2 * j + 1] = RoundToTf32(__uint_as_float(row.at[2 * pair + 1]));
      }
    }
  }
};

// The loads of a lane for a block row, step after step. As soon as a stage's rows are requested,
// its column registers get the columns of the step it holds next, kStages later: no load waits for
// its address, and kStages steps are in flight.
template <class T, int kLength, int kPanels, int kQuads, int kStages, int kWarps, bool kVector>
struct OctetLane {
  using O = Octet<T, kLength, kPanels>;
  using Step = Quad<T, kLength, kPanels>[kQuads];
  enum { kStride = kWarps * kQuads * O::kQuad };  // distance in vectors between a warp's steps

  const Index* columns;
  const T* values;
  const char* b;       // at the lane's first column
  unsigned row_bytes;  // of B
  unsigned left;       // number of columns from the lane's first to the last
  int rows_left;       // vectors from the lane's first to the row's end; none if <= 0
  int values_left;

  // `vector` is the first vector of the warp's first step; `count` vectors of the block row are
  // from that one on. The operand pointers are at vector 0.
  __device__ OctetLane(const Index* column_indices, const T* all_values, const T* b,
                       unsigned vector, int count, unsigned n, unsigned left, unsigned lane)
      : b(reinterpret_cast<const char*>(b)), row_bytes(n * sizeof(T)), left(left) {
    const unsigned g = lane / 4, t = lane % 4;
    // Otherwise the compiler loads the first columns before the loop over the batch, and holds
    // them.
    asm volatile("mov.u32 %0, %0;" : "+r"(vector));
    columns = column_indices + vector + 4 * t;
    rows_left = left > 0 ? count - int(4 * t) : 0;
    const unsigned own = sizeof(T) == 2 ? g / 2 * 4 + g % 2 : 4 * t;
    // The lane's values of a vector: two rows for each mma that uses them, one for float.
    unsigned row = sizeof(T) == 2 ? O::kRows * t : O::kTiles * g;
    bool idle = false;
    if (kLength < 8) {  // row r is column 2r of the mma
      row = sizeof(T) == 2 ? t : g / 2;
      idle = row >= kLength || (sizeof(T) == 4 && g % 2 == 1);
    }
    values = all_values + Size(vector + own) * kLength + row;
    values_left = idle ? 0 : count - int(own);
  }

  // Loads the columns of the step that is `ahead` steps after the next.
  __device__ void Find(int ahead, Step& step) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = ahead * kStride + q * O::kQuad + j;
        if (rows_left > at) step[q].columns[j] = columns[at];
      }
    }
  }

  // A 32 x 32 bit multiplication: from C++ the compiler would widen both factors before the loop,
  // and multiply 64 by 64 bits in it.
  __device__ Size RowAt(Index column) const {
    Size bytes;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(column), "r"(row_bytes));
    return bytes;
  }

  // Loads the rows and values of the next step, whose columns were found. With kAll all of its
  // vectors exist, and all columns of all lanes.
  template <bool kAll>
  __device__ void Load(Step& step) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int j = 0; j < O::kHeld; ++j) {
        const int at = q * O::kQuad + (sizeof(T) == 2 ? 2 * j : j);
        const T* vector = values + at * kLength;
        const bool exists = (kAll && kLength >= 8) || values_left > at;
        if constexpr (kLength >= 8) {
          step[q].values[j] = LoadWords<true, O::kTiles>(vector, exists);
        } else {
          step[q].values[j].at[0] = exists ? Bits(*vector) : 0;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool found = kAll || rows_left > q * O::kQuad + j;
        const T* row = reinterpret_cast<const T*>(b + RowAt(step[q].columns[j]));
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
          const unsigned at = i * O::kPanel;
          const bool exists = kAll || (found && (kPanels == 1 || left > at));
          const unsigned width = kAll ? unsigned(O::kChunk) : left - at;
          step[q].rows[j][i] = LoadWords<kVector, 4>(row + at, exists ? width : 0);
        }
      }
    }
    Find(kStages, step);
    columns += kStride;
    values += kStride * kLength;
    rows_left -= kStride;
    values_left -= kStride;
  }

  // Multiplies step s, and loads the step that replaces the one multiplied before it.
  template <bool kAll>
  __device__ void Run(Step (&held)[kStages], int s, float (&sums)[O::kSums][4]) {
    Load<kAll>(held[(s + kStages - 1) % kStages]);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) held[s][q].MultiplyInto(sums);
  }
};

// Stores the lane's part of rows first_row to first_row + kLength - 1 of C; c is at the lane's
// first column.
template <class T, int kLength, int kPanels, class Access, class C>
__device__ inline void StoreRows(C* c, Size first_row, Size m, unsigned n, unsigned left,
                                 unsigned t,
                                 const float (&sums)[Octet<T, kLength, kPanels>::kSums][4]) {
  using O = Octet<T, kLength, kPanels>;
#pragma unroll
  for (int r = 0; r < O::kRows; ++r) {
    const Size row = first_row + O::kRows * t + r;
    if (t * O::kRows >= kLength || row >= m) continue;
    // The row's tile, and which of the lane's two columns of that tile it is.
    const int h = sizeof(T) == 2 ? r / 2 : r % O::kTiles;
    const int e = sizeof(T) == 2 ? r % 2 : r / O::kTiles;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const unsigned at = i * O::kPanel;
      if (left <= at) continue;
      float chunk[O::kChunk];
#pragma unroll
      for (int j = 0; j < O::kChunk; ++j) {
        chunk[j] = sums[(i * O::kPairs + j / 2) * O::kTiles + h][j % 2 * 2 + e];
      }
      Access::Put(c + row * n + at, left - at, chunk);
    }
  }
}

// Adds up the sums of a block's warps, pairwise, into the first warp's.
template <int kWarps, int kSums>
__device__ inline void AddWarps(unsigned warp, unsigned lane, float (&sums)[kSums][4]) {
  if constexpr (kWarps > 1) {
    constexpr unsigned kHalf = kWarps / 2;
    __shared__ Pack<float, 4> given[kHalf][kSums][32];
    __syncthreads();  // the previous batch member's sums have been read
#pragma unroll
    for (unsigned half = kHalf; half > 0; half /= 2) {
      if (warp >= half && warp < 2 * half) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          given[warp % kHalf][i][lane] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
        }
      }
      __syncthreads();
      if (warp < half) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
          const Pack<float, 4> more = given[(warp + half) % kHalf][i][lane];
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][j] += more.at[j];
        }
      }
    }
  }
}

// The operands and sizes of a call.
template <class T>
struct OctetCall {
  const T* values;
  const Index* column_indices;  // of the first structure
  const T* b;
  Size n, values_stride, b_stride, batches, capacity;
  long long sharing;
};

// Multiplies the vectors `first` to last - 1, a block row or a piece of one, by rows of B; the
// first of the kWarps warps that share them calls write(batch, column, left, sums) for each member
// of the batch.
template <class T, int kLength, int kPanels, int kQuads, int kStages, int kWarps, bool kVector,
          class Write>
__device__ __forceinline__ void MultiplyOctets(const OctetCall<T>& call, unsigned first,
                                               unsigned last, const Write& write) {
  using O = Octet<T, kLength, kPanels>;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
  const Size column = Size(blockIdx.y) * (kPanels * O::kPanel) + lane / 4 * O::kChunk;
  const unsigned left = column < call.n ? unsigned(call.n - column) : 0;
  constexpr unsigned kStep = kQuads * O::kQuad;
  const unsigned start = first + warp * kStep;
  const unsigned count = start < last ? last - start : 0;  // of the warp's steps and between them
  const int own = (count + kWarps * kStep - 1) / (kWarps * kStep);
  // Steps that have all their vectors, in a block that has all its columns. Only for at most two
  // quads: with more the compiler would issue all loads at once, and spill.
  constexpr bool kFew = kVector && kStages * kQuads <= 2;
  const bool wide = kFew && Size(blockIdx.y + 1) * (kPanels * O::kPanel) <= call.n;
  const int whole = wide ? (count + (kWarps - 1) * kStep) / (kWarps * kStep) : 0;

  for (Size batch = blockIdx.z; batch < call.batches; batch += gridDim.z) {
    OctetLane<T, kLength, kPanels, kQuads, kStages, kWarps, kVector> operands(
        call.column_indices + StructureHere(call.sharing) * call.capacity,
        call.values + batch * call.values_stride, call.b + batch * call.b_stride + column, start,
        int(count), unsigned(call.n), left, lane);
    Quad<T, kLength, kPanels> held[kStages][kQuads];
    float sums[O::kSums][4] = {};
#pragma unroll
    for (int s = 0; s < kStages; ++s) operands.Find(s, held[s]);
#pragma unroll
    for (int s = 0; s + 1 < kStages; ++s) operands.template Load<false>(held[s]);
    int i = 0;
#pragma unroll 1
    for (; i + 2 * (kStages - 1) < whole; i += kStages) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) operands.template Run<true>(held, s, sums);
    }
#pragma unroll 1
    for (; i < own; i += kStages) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        if (i + s >= own) break;
        operands.template Run<false>(held, s, sums);
      }
    }
    AddWarps<kWarps>(warp, lane, sums);
    if (warp == 0) write(batch, column, left, sums);
  }
}

// Which of the block rows (or pieces) of the grid a warp has.
template <int kWarps, int kNear>
__device__ inline Size OctetWork() {
  static_assert(kWarps == 1 || kNear == 1, "warps that share a block row have a block");
  return kNear == 1 ? Size(blockIdx.x) : Size(blockIdx.x) * kNear + threadIdx.x / 32;
}

template <class T, int kLength, int kPanels, int kQuads, int kStages, int kWarps, int kNear,
          int kBlocks, bool kVector, bool kOrdered>
__global__ void __launch_bounds__(32 * kWarps * kNear, BlocksAtOnce(kBlocks))
    SpmmOctetKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                    const Index* __restrict__ column_indices, const Index* __restrict__ order,
                    const T* __restrict__ b, T* __restrict__ c, long long m, long long n,
                    long long values_stride, long long b_stride, long long batches,
                    long long capacity, long long sharing) {
  const Size rows = (m + kLength - 1) / kLength, work = OctetWork<kWarps, kNear>();
  MoveToStructure(sharing, rows, row_offsets);
  if (kOrdered) order += StructureOfBlock(sharing) * rows;
  if (work >= rows) return;  // the same in all warps that share a block row
  const Size block_row = kOrdered ? Size(unsigned(order[work])) : work;
  const OctetCall<T> call{values,        column_indices,      b,
                          Size(n),       Size(values_stride), Size(b_stride),
                          Size(batches), Size(capacity),      sharing};
  MultiplyOctets<T, kLength, kPanels, kQuads, kStages, kWarps, kVector>(
      call, row_offsets[block_row], row_offsets[block_row + 1],
      [&](Size batch, Size column, unsigned left, auto& sums) {
        StoreRows<T, kLength, kPanels, Rounded<kVector>>(c + batch * m * n + column,
                                                         block_row * kLength, Size(m), unsigned(n),
                                                         left, threadIdx.x % 4, sums);
      });
}

// The same on a work list (row_pieces.cuh) of block rows. Sums of pieces that are all of their
// block row go to c, others to partial [batch, places, kLength, n], which SumPiecesKernel adds up.
template <class T, int kLength, int kPanels, int kQuads, int kStages, int kWarps, int kNear,
          int kBlocks, bool kVector>
__global__ void __launch_bounds__(32 * kWarps * kNear, BlocksAtOnce(kBlocks))
    SpmmOctetPiecesKernel(const T* __restrict__ values, const Index* __restrict__ list,
                          const Index* __restrict__ column_indices, const T* __restrict__ b,
                          T* __restrict__ c, float* __restrict__ partial, long long m, long long n,
                          long long values_stride, long long b_stride, long long batches,
                          long long capacity, long long pieces, long long elements,
                          long long places, long long sharing) {
  const Size work = OctetWork<kWarps, kNear>();
  MoveToStructure(sharing, 4 * elements - 1, list);
  const RowPiece own = PieceAt(list, work, work < pieces, capacity);
  const Size first_row = Size(unsigned(own.row)) * kLength;
  if (first_row >= m) return;  // the same in all warps that share a piece
  const OctetCall<T> call{values,        column_indices,      b,
                          Size(n),       Size(values_stride), Size(b_stride),
                          Size(batches), Size(capacity),      sharing};
  MultiplyOctets<T, kLength, kPanels, kQuads, kStages, kWarps, kVector>(
      call, own.first, own.last, [&](Size batch, Size column, unsigned left, auto& sums) {
        const unsigned t = threadIdx.x % 4;
        if (AllOfRow(own.place, places)) {
          StoreRows<T, kLength, kPanels, Rounded<kVector>>(c + batch * m * n + column, first_row,
                                                           Size(m), unsigned(n), left, t, sums);
        } else {
          const Size place = batch * places + unsigned(own.place);
          StoreRows<T, kLength, kPanels, Whole<kVector>>(partial + place * kLength * n + column, 0,
                                                         kLength, unsigned(n), left, t, sums);
        }
      });
}

}  // namespace sgap
