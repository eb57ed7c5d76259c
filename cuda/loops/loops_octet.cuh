// Loop nests that a schedule binds to octet_mma, for the loops printed by the compiler
// (sgap_jax/compiler/cuda/print_mma.py): a warp's tile of the output in registers, the update of a
// step, and the store. All lanes of the warp must call, with the same arguments.
#pragma once

#include "loops.cuh"
#include "sddmm_octet.cuh"
#include "spmm_octet.cuh"

namespace sgap {

// *values += sums
template <class Access>
struct Added {
  template <int kCount>
  __device__ static void Put(float* values, unsigned left, const float (&sums)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < left) Access::Update(values + j, sums[j]);
    }
  }
};

// kLength rows by kColumns columns of C = A B, in steps of kVectors vectors of A. kVector: n is a
// multiple of the columns in 16 bytes.
template <class T, int kLength, int kColumns, int kVectors, bool kVector>
struct ProductTile {
  enum { kPanels = kColumns * sizeof(T) / 128 };
  using O = Octet<T, kLength, kPanels>;
  enum { kQuads = kVectors / O::kQuad };
  static_assert(kPanels * O::kPanel == kColumns && kQuads * O::kQuad == kVectors, "whole mma");

  float sums[O::kSums][4] = {};

  // Adds the products of `count` vectors, from `first` on, with the rows of B that they name.
  // `columns` columns exist from `column` on.
  __device__ void Multiply(const T* values, const Index* column_indices, unsigned first, int count,
                           const T* b, unsigned n, Size column, int columns) {
    const unsigned lane = threadIdx.x % 32;
    OctetLane<T, kLength, kPanels, kQuads, 1, 1, kVector> operands(
        column_indices, values, b + column + First(lane), first, count, n, Left(lane, columns),
        lane);
    Quad<T, kLength, kPanels> step[kQuads];
    operands.Find(0, step);
    operands.template Load<false>(step);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) step[q].MultiplyInto(sums);
  }

  template <class Access, class C>
  __device__ void Store(C* c, Size row, unsigned n, Size column, int columns) const {
    const unsigned lane = threadIdx.x % 32;
    StoreRows<T, kLength, kPanels, Access>(c + column + First(lane), row, row + kLength, n,
                                           Left(lane, columns), lane % 4, sums);
  }

  // The lane's first column, and the number of columns from it to the end.
  __device__ static unsigned First(unsigned lane) { return lane / 4 * O::kChunk; }
  __device__ static unsigned Left(unsigned lane, int columns) {
    return columns > int(First(lane)) ? columns - First(lane) : 0;
  }
};

// kVectors vectors by kLength rows of X Y^T at the entries of A, in steps of kStep features. kRows:
// the features of Y are contiguous (Y by rows); else its columns are. kVector: d is a multiple of
// the features of a load.
template <class T, int kLength, int kVectors, int kStep, bool kRows, bool kVector>
struct SampledTile {
  using Dots = OctetDots<T, kLength, kVectors, kStep, 1, kVector>;
  static_assert(Dots::kLoads * 4 * Dots::kFeatures == kStep && kVectors % 16 == 0, "whole mma");

  typename Dots::Sums sums = {};

  // Adds `features` features, from `feature` on, of block row `row` of X [., d] times the rows of Y
  // that `count` vectors from `first` on name; rows of Y are `stride` values apart.
  __device__ void Multiply(const T* x, Size row, unsigned d, const T* y, Size stride,
                           const Index* column_indices, unsigned first, int count, Size feature,
                           int features) {
    if (count <= 0) return;
    const unsigned g = threadIdx.x % 32 / 4;
    Dots dots;
    // An absent row is replaced by a row that is loaded anyway, which costs no traffic; its result
    // is not stored.
#pragma unroll
    for (int j = 0; j < Dots::kTiles; ++j) {
      const unsigned r = Dots::RowOf(j, g);
      dots.x_rows[j] = x + (row + (r < kLength ? r : kLength - 1)) * d + feature;
    }
    Size columns[Dots::kLoaded];
#pragma unroll
    for (int i = 0; i < Dots::kLoaded; ++i) {
      const int at = 8 * i + g;
      columns[i] = unsigned(column_indices[first + (at < count ? at : count - 1)]);
    }
    if constexpr (kRows) {
#pragma unroll
      for (int i = 0; i < Dots::kLoaded; ++i) dots.y_rows[i] = y + columns[i] * stride + feature;
      dots.Run(features, sums);
    } else {
      const int own = threadIdx.x % 4 * Dots::kFeatures;
      dots.left = features - own;
      typename Dots::Step step;
#pragma unroll
      for (int j = 0; j < Dots::kTiles; ++j) {
        dots.template LoadRow<false>(dots.x_rows[j] + own, 0, step.x[j]);
      }
#pragma unroll
      for (int l = 0; l < Dots::kLoads; ++l) {
        const int from = l * 4 * Dots::kFeatures;
        const T* above = y + (feature + own + from) * stride;
#pragma unroll
        for (int i = 0; i < Dots::kLoaded; ++i) {
          step.y[i][l] = LoadColumn(above + columns[i], stride, dots.left - from);
        }
      }
      Dots::Multiply(step, sums);
    }
  }

  // As LoadWords, for values that are `stride` apart.
  __device__ static typename Dots::Words LoadColumn(const T* values, Size stride, int left) {
    typename Dots::Words words = {};
#pragma unroll
    for (int j = 0; j < Dots::kFeatures; ++j) {
      if (j < left) {
        words.at[j / Dots::kInWord] |= Bits(values[j * stride])
                                       << (32 / Dots::kInWord * (j % Dots::kInWord));
      }
    }
    return words;
  }

  // Stores the sums to the values of the same vectors, times `scale` if it is not null.
  template <class Access, class C>
  __device__ void Store(C* values, const T* scale, unsigned first, int count) {
    const unsigned lane = threadIdx.x % 32, row = lane % 4 * Dots::kRows;
    if (row >= kLength) return;
#pragma unroll
    for (int i = 0; i < Dots::kLoaded; ++i) {
      const int at = 8 * i + lane / 4;
      if (at >= count) continue;
      const Size place = Size(first + at) * kLength + row;
      float own[Dots::kRows];
      Dots::Pick(sums, i / 2, i % 2, own);
      if (scale != nullptr) {
#pragma unroll
        for (int r = 0; r < Dots::kRows; ++r) own[r] *= Widen(scale[place + r]);
      }
      Access::Put(values + place, Dots::kRows, own);
    }
  }
};

}  // namespace sgap
