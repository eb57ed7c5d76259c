// Factors that multiply the sums of SDDMM before they are rounded. kWeighted: a weight for each
// sum; kScaled: one scale for all; both, in this order, or neither, which adds no machine code.
#pragma once

#include "types.cuh"

namespace sgap {

template <class T, bool kWeighted, bool kScaled>
struct Factors {
  const T* weights;
  const Accumulator<T>* scale;

  // The factors of element `batch` of the batch; a stride of 0: all elements share the operand.
  __device__ Factors Of(Size batch, Size weights_stride, Size scale_stride) const {
    return {weights + batch * weights_stride, scale + batch * scale_stride};
  }

  // The factors from `position` on.
  __device__ Factors From(Size position) const { return {weights + position, scale}; }

  // sums *= the first kCount factors, which must exist and be aligned as a Pack.
  template <int kCount>
  __device__ void Multiply(Accumulator<T> (&sums)[kCount]) const {
    if constexpr (kWeighted) {
      const auto own = Load<true, kCount>(weights, unsigned(kCount));
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] *= Widen(own.at[j]);
    }
    if constexpr (kScaled) {
      const Accumulator<T> all = *scale;
#pragma unroll
      for (int j = 0; j < kCount; ++j) sums[j] *= all;
    }
  }

  // Multiplies the sums of the first `rows` rows of a vector; the other rows do not exist in the
  // matrix. These are set to zero, not multiplied by it: they may hold NaN.
  template <int kCount>
  __device__ void MultiplyRows(Accumulator<T> (&sums)[kCount], unsigned rows) const {
    Multiply(sums);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] = j < rows ? sums[j] : 0;
  }
};

}  // namespace sgap
