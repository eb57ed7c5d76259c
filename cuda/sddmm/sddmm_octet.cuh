// SDDMM over CVS(V) on tensor cores, values[p, v] = X[V b + v, :] . Y[column_indices[p], :] (times
// factors.cuh) for the vectors p of block row b: the 1-D octet tiling of vectorSparse, section 6.3,
// for the mma of sm_80 and later. Rows of Y are the 16 rows of an mma and rows of X its 8 columns,
// so that V = 8 fills it; V < 8 leaves columns idle, and V = 16 and 32 take 2 and 4 mma for each
// row of Y.
//
// Fragments are loaded directly from global memory. The order of a row's features along k is the
// one that suits the loads, the same for X and Y. With g = lane / 4, t = lane % 4 and c features a
// load, a lane has features c t, c t + 1, ... of rows g and g + 8 of Y and of row g of X, of every
// 4 c:
//
//      words of a load        0 | 1 | 2 | 3          4 for 16 bytes, 2 for 8
//      k = 2t (2t + 8) of mma  0  (0)  1  (1)        (tf32: k = t and t + 4)
//
// so a load of 16 bytes a lane is the whole operand of two mma, 64 consecutive bytes of each row,
// and there are no shuffles. Rows of X are assigned to columns of the mma in such an order that a
// lane ends with V / 4 consecutive rows, or 2, of each of its vectors, and its 4 neighbours with
// the other rows.
//
// kLength   V
// kVectors  vectors of a warp: a window of them, whatever their rows
// kStep     features of a step, whose loads are issued together; kStages steps are in flight
// kVector   d is a multiple of the features of a load, so each load is one vector
//
// Grid: x over windows, z over the batch. Rows past the end of X and entries from
// row_offsets[ceil(m / V)] on get zero. Accumulates in float32.
#pragma once

#include "factors.cuh"
#include "mma.cuh"
#include "row_search.cuh"

namespace sgap {

template <class T, int kLength, int kVectors, int kStep, int kStages, bool kVector>
struct OctetDots {
  enum { kColumns = 8, kTiles = kLength > kColumns ? kLength / kColumns : 1 };
  enum { kLoaded = kVectors / 8 };  // rows of Y that a lane loads
  enum { kWords = kStep * sizeof(T) % 64 == 0 ? 4 : 2 };
  enum { kInWord = 4 / sizeof(T), kFeatures = kWords * kInWord };
  enum { kLoads = kStep / (4 * kFeatures) };  // loads of a row in a step
  enum { kTrip = kStages * kStep };
  enum { kRows = 2 * kTiles };  // rows of a vector that a lane ends with
  using Words = Pack<unsigned, kWords>;
  using Sums = float[kVectors / 16][kTiles][4];

  struct Step {
    Words x[kTiles][kLoads], y[kLoaded][kLoads];
  };

  // An estimate of the registers: sums, words in flight, and the address of each row.
  enum { kRowsLoaded = kTiles + kLoaded };
  enum { kHeld = kVectors / 4 * kTiles + (kStages * kWords * kLoads + 2) * kRowsLoaded };

  // Rows of Y and X at the lane's next feature, and the number of features from there to the end of
  // a row (none if it is not positive).
  const T *y_rows[kLoaded], *x_rows[kTiles];
  int left;

  // The row of a block row that is column `column` of tile j.
  __device__ static unsigned RowOf(int j, unsigned column) {
    return column / 2 * kRows + 2 * j + column % 2;
  }

  template <bool kAll>
  __device__ void LoadRow(const T* row, int step, Words (&words)[kLoads]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int from = step * kStep + i * 4 * kFeatures;
      const unsigned some = left > from ? left - from : 0;
      words[i] = LoadWords<kVector, kWords>(row + from, kAll ? unsigned(kFeatures) : some);
    }
  }

  // Loads the features that are `step` steps ahead; with kAll all of them exist.
  template <bool kAll>
  __device__ void Load(int step, Step& words) const {
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) LoadRow<kAll>(y_rows[i], step, words.y[i]);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) LoadRow<kAll>(x_rows[j], step, words.x[j]);
  }

  __device__ static unsigned Operand(unsigned word) {
    if constexpr (sizeof(T) == sizeof(float)) {
      return RoundToTf32(__uint_as_float(word));
    } else {
      return word;
    }
  }

  __device__ static void Multiply(const Step& step, Sums& sums) {
#pragma unroll
    for (int at = 0; at < kLoads * kWords; at += 2) {
      const int load = at / kWords, word = at % kWords;
      unsigned b[kTiles][2];
#pragma unroll
      for (int j = 0; j < 2 * kTiles; ++j) {
        b[j / 2][j % 2] = Operand(step.x[j / 2][load].at[word + j % 2]);
      }
#pragma unroll
      for (int i = 0; i < kLoaded; i += 2) {
        unsigned a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = Operand(step.y[i + j % 2][load].at[word + j / 2]);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) MultiplyAdd<T>(a, b[j], sums[i / 2][j]);
      }
    }
  }

  // sums += the dot products of all rows over d features; all lanes of the warp must call.
  __device__ void Run(unsigned d, Sums& sums) {
    left = int(d);
    Advance(threadIdx.x % 4 * kFeatures);
    // Larger tiles have no registers left for a second loop without bounds checks.
    if (kVector && kHeld <= 80 && d > 0 && d % kTrip == 0) {
      RunTrips<true>(d, sums);
    } else {
      RunTrips<false>(d, sums);
    }
  }

  // The loop over the steps; with kAll all features of each step exist.
  template <bool kAll>
  __device__ void RunTrips(unsigned d, Sums& sums) {
    Step steps[kStages];
#pragma unroll
    for (int s = 0; s < kStages; ++s) Load<kAll>(s, steps[s]);
#pragma unroll 1
    for (unsigned at = 0; at < d; at += kTrip) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        if (!kAll && s > 0 && at + s * kStep >= d) break;
        Multiply(steps[s], sums);
        if (at + (kAll ? kTrip : (s + kStages) * kStep) < d) Load<kAll>(s + kStages, steps[s]);
      }
      Advance(kTrip);
    }
  }

  __device__ void Advance(int features) {
    left -= features;
#pragma unroll
    for (int i = 0; i < kLoaded; ++i) y_rows[i] += features;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) x_rows[j] += features;
  }

  // Copies the sums of the lane's rows of vector `half` of tile i.
  __device__ static void Pick(const Sums& sums, int i, int half, float (&own)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) own[r] = sums[i][r / 2][2 * half + r % 2];
  }

  // Stores these sums, times `factors`; the first `rows` rows of the vector exist.
  template <class Factors>
  __device__ static void Store(const Sums& sums, int i, int half, unsigned rows,
                               const Factors& factors, T* vector) {
    const unsigned row = threadIdx.x % 4 * kRows;
    if (row >= kLength) return;
    float own[kRows];
    Pick(sums, i, half, own);
    factors.From(row).Multiply(own);
    Pack<unsigned, kRows / kInWord> words = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      T rounded;
      Narrow(row + r < rows ? own[r] : 0.0f, rounded);
      words.at[r / kInWord] |= Bits(rounded) << (32 / kInWord * (r % kInWord));
    }
    *reinterpret_cast<decltype(words)*>(vector + row) = words;
  }
};

// The columns of a window's vectors, distributed over the lanes of a warp, which must call
// together.
template <int kVectors>
struct WindowColumns {
  enum { kWarp = 32, kParts = (kVectors + kWarp - 1) / kWarp };
  Index part[kParts];

  __device__ WindowColumns(const Index* column_indices, unsigned first, unsigned end) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const unsigned p = first + i * kWarp + threadIdx.x % kWarp;
      part[i] = p < end ? column_indices[p] : 0;
    }
  }

  // The column of vector `place` of the window; each lane may request another.
  __device__ Index At(unsigned place) const {
    Index column = 0;
#pragma unroll
    for (unsigned i = 0; i < kParts; ++i) {
      const Index found = __shfl_sync(~0u, part[i], place % kWarp);
      if (kParts == 1 || place / kWarp == i) column = found;
    }
    return column;
  }
};

template <class T, int kLength, int kVectors, int kStep, int kStages, int kBlock, bool kVector,
          bool kWeighted, bool kScaled>
__global__ void __launch_bounds__(
    kBlock,
    (OctetDots<T, kLength, kVectors, kStep, kStages, kVector>::kHeld <= 80 ? 512 : 256) / kBlock)
    SddmmOctetKernel(const Index* __restrict__ row_offsets,
                     const Index* __restrict__ column_indices, const T* __restrict__ x,
                     const T* __restrict__ y, const T* __restrict__ weights,
                     const Accumulator<T>* __restrict__ scale, T* __restrict__ values, long long m,
                     long long vectors, long long d, long long x_stride, long long y_stride,
                     long long weights_stride, long long scale_stride, long long batches,
                     long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets, vectors, column_indices);
  using Dots = OctetDots<T, kLength, kVectors, kStep, kStages, kVector>;
  const Factors<T, kWeighted, kScaled> all_factors{weights, scale};
  const unsigned lane = threadIdx.x % 32, g = lane / 4;
  const unsigned first = (blockIdx.x * (kBlock / 32) + threadIdx.x / 32) * kVectors;
  const unsigned end = first + kVectors < vectors ? first + kVectors : unsigned(vectors);
  const unsigned rows = unsigned((m + kLength - 1) / kLength), stored = row_offsets[rows];
  const unsigned last = rows == 0 ? 0 : end < stored ? end : stored;
  // Neither load waits for `stored`: padding finds a column and a row too, which are not used.
  const WindowColumns<kVectors> columns(column_indices, first, end);
  const bool any = rows > 0 && first < end;
  const unsigned first_row = any ? RowByWarp(row_offsets, 0, rows, Index(first)) : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    T* out = values + batch * vectors * kLength;
    const auto factors = all_factors.Of(batch, weights_stride, scale_stride);
    const unsigned padding = first < stored ? stored : first;
#pragma unroll 1
    for (Size at = Size(padding) * kLength + lane; at < Size(end) * kLength; at += 32) out[at] = {};
    unsigned row = first_row;
#pragma unroll 1
    for (unsigned p = first; p < last;) {  // one block row's vectors in this window at a time
      row = RowFrom(row_offsets, row, rows, Index(p));
      const unsigned next = row_offsets[row + 1];
      const unsigned stop = next > p && next < last ? next : last;
      const Size above = Size(row) * kLength;
      const unsigned left = unsigned(m - above < kLength ? m - above : kLength);
      // An absent row is replaced by a row that is loaded anyway, which costs no traffic; its
      // result is not stored.
      Dots dots;
#pragma unroll
      for (int j = 0; j < Dots::kTiles; ++j) {
        const unsigned r = Dots::RowOf(j, g);
        dots.x_rows[j] = x + batch * x_stride + (above + (r < left ? r : left - 1)) * d;
      }
#pragma unroll
      for (unsigned i = 0; i < Dots::kLoaded; ++i) {
        const unsigned at = first + 8 * i + g;
        const Index column = columns.At((at < p ? p : at < stop ? at : stop - 1) - first);
        dots.y_rows[i] = y + batch * y_stride + Size(unsigned(column)) * d;
      }
      typename Dots::Sums sums = {};
      dots.Run(unsigned(d), sums);
#pragma unroll
      for (unsigned i = 0; i < Dots::kLoaded; ++i) {
        const unsigned at = first + 8 * i + g;
        if (p <= at && at < stop) {
          const Size place = Size(at) * kLength;
          Dots::Store(sums, i / 2, i % 2, left, factors.From(place), out + place);
        }
      }
      p = stop;
    }
  }
}

}  // namespace sgap
