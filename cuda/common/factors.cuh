// What multiplies the sums of SDDMM before they are rounded: kWeighted, a weight of each; kScaled,
// a scale of all; both, in this order, or neither, which leaves no trace in the machine code.
#pragma once

#include "types.cuh"

namespace sgap {

template <class T, bool kWeighted, bool kScaled>
struct Factors {
  const T* weights;
  const Accumulator<T>* scale;

  // Those of a product, of operands that it shares where the stride is 0.
  __device__ Factors Of(Size product, Size weights_stride, Size scale_stride) const {
    return {weights + product * weights_stride, scale + product * scale_stride};
  }

  // Those of what follows the first `numbers`.
  __device__ Factors From(Size numbers) const { return {weights + numbers, scale}; }

  // sums *= the factors of the first kCount numbers, which exist and are aligned as a Pack.
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

  // The same of the first `rows`, which a vector has in the matrix; the others become zero, and are
  // not multiplied by it: there may be NaN in what they were made of.
  template <int kCount>
  __device__ void MultiplyRows(Accumulator<T> (&sums)[kCount], unsigned rows) const {
    Multiply(sums);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] = j < rows ? sums[j] : 0;
  }
};

}  // namespace sgap
