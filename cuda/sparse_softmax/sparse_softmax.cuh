// Softmax over the entries of each row, and the product with its Jacobian; points, grid, padding
// and accumulation are as in row_reduce.cuh.
//
// A group takes a row in windows of a few entries a lane. A row of one window stays in registers:
// read once, one exponential an entry. Over a longer row the first pass computes each lane's
// maximum and sum of exponentials together, rescaling the sum where the maximum grows; the second
// pass reads the entries again and writes. Separate passes for maximum and sum would read three
// times; rescaling costs only one exponential a window.
#pragma once

#include "row_reduce.cuh"

namespace sgap {

// Not the fast intrinsics: within 2 ulp.
__device__ inline float Exp(float x) { return expf(x); }
__device__ inline double Exp(double x) { return exp(x); }

// The terms of a row are exp(size * (sign * v - peak)), where size * sign is the scale and peak the
// greatest sign * v: no multiply and subtract that could contract. The sign is 1 or -1, but for
// scales below 2^-100: there a difference that overflows may still give a term that is not 0, so
// values are scaled down and `size` up.
template <class T, int kGroup, int kLength>
struct SoftmaxTerms {
  using A = Accumulator<T>;
  enum { kKept = sizeof(A) == 8 ? 1 : kLoads };  // several float64 exponentials would spill
  using Values = Window<T, kGroup, kKept, kLength>;

  A size, sign;

  __device__ explicit SoftmaxTerms(A scale) {
    const A magnitude = scale < 0 ? -scale : scale;
    const bool small = magnitude < A(0x1p-100);
    // No division: that took a fifth of a short call's predicted time.
    size = small ? magnitude * A(0x1p64) : magnitude;
    sign = small ? A(0x1p-64) : A(1);
    sign = scale < 0 ? -sign : sign;
  }

  // If the peak is -infinity all terms are zero; -infinity less itself would be NaN. The select is
  // on the exponent, not on the term, so that there is no branch around the exponential.
  __device__ A Term(A signed_value, A peak, bool present = true) const {
    const A exponent = (signed_value - peak) * size;
    return Exp(present && peak != Least<A>() ? exponent : Least<A>());
  }

  // Reads the signed values of a window, `left` of which belong to the row; returns the greatest of
  // these and peak.
  __device__ A Read(const T* entries, unsigned left, A peak, Values& window) const {
    window.Read(entries, left, Least<A>() * sign);
#pragma unroll
    for (A& value : window.at) {
      value *= sign;
      peak = Greater()(peak, value);
    }
    return peak;
  }

  // Replaces the signed values by their terms; returns the sum of these.
  __device__ A Exponentiate(unsigned left, A peak, Values& window) const {
    A sum = 0;
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      window.at[j] = Term(window.at[j], peak, j * kGroup < left);
      sum += window.at[j];
    }
    return sum;
  }
};

// out = softmax(scale * values) in each row; scale_bits holds the bits of a double. NaN or
// +infinity among scale * values makes a row NaN; a row of only -infinity gets zeros.
template <class T, int kGroup, int kRows, int kBlock, int kLength>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    SparseSoftmaxKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                        T* __restrict__ out, long long m, long long nnz, long long batches,
                        long long scale_bits, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets);
  using A = Accumulator<T>;
  const RowGroup<kGroup, kLength> group;
  const GroupRows<kGroup, kRows, kBlock, kLength> own(m);
  const SoftmaxTerms<T, kGroup, kLength> terms(__longlong_as_double(scale_bits));
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
#pragma unroll 1
    for (Size rows_at = own.begin; rows_at < own.end; ++rows_at) {
      const LaneRow<kLength> lane(row_offsets, rows_at, m, group);
      const T* read = values + batch * nnz + lane.first;
      T* write = out + batch * nnz + lane.first;
      typename SoftmaxTerms<T, kGroup, kLength>::Values window;
      A peak = Least<A>(), sum[1] = {0};
#pragma unroll 1
      for (unsigned p = 0; p < lane.left; p += window.kEntries) {
        const A before = peak;
        peak = terms.Read(read + Size(p) * kLength, lane.left - p, peak, window);
        if (p != 0) sum[0] *= terms.Term(before, peak);
        sum[0] += terms.Exponentiate(lane.left - p, peak, window);
      }
      A greatest[1] = {peak};
      group.template Reduce<Greater>(greatest);
      const A share = terms.Term(peak, greatest[0], lane.left != 0);
      sum[0] *= share;
      group.Reduce(sum);
      const A inverse = sum[0] == 0 ? A(0) : 1 / sum[0];
      const bool kept = lane.length <= window.kEntries;
      const A factor = kept ? share * inverse : inverse;
#pragma unroll 1
      for (unsigned p = 0; p < lane.left; p += window.kEntries) {
        if (!kept) {
          terms.Read(read + Size(p) * kLength, lane.left - p, peak, window);
          terms.Exponentiate(lane.left - p, greatest[0], window);
        }
#pragma unroll
        for (A& term : window.at) term *= factor;
        window.Write(write + Size(p) * kLength, lane.left - p);
      }
    }
    ClearPadding<kLength>(out + batch * nnz, row_offsets, m, nnz);
  }
}

// out = scale p (t - sum over the row of p t): the Jacobian of the softmax at probabilities p,
// applied to t.
template <class T, int kGroup, int kRows, int kBlock, int kLength>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    SparseSoftmaxJacobianKernel(const T* __restrict__ probabilities, const T* __restrict__ tangent,
                                const Index* __restrict__ row_offsets, T* __restrict__ out,
                                long long m, long long nnz, long long batches,
                                long long probabilities_stride, long long tangent_stride,
                                long long scale_bits, long long sharing) {
  MoveToStructure(sharing, (m + kLength - 1) / kLength, row_offsets);
  using A = Accumulator<T>;
  const RowGroup<kGroup, kLength> group;
  const GroupRows<kGroup, kRows, kBlock, kLength> own(m);
  const A scale = A(__longlong_as_double(scale_bits));
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
#pragma unroll 1
    for (Size rows_at = own.begin; rows_at < own.end; ++rows_at) {
      const LaneRow<kLength> lane(row_offsets, rows_at, m, group);
      const T* read_p = probabilities + batch * probabilities_stride + lane.first;
      const T* read_t = tangent + batch * tangent_stride + lane.first;
      T* write = out + batch * nnz + lane.first;
      Window<T, kGroup, kLoads, kLength> p, t;
      A dot[1] = {0};
#pragma unroll 1
      for (unsigned i = 0; i < lane.left; i += p.kEntries) {
        p.Read(read_p + Size(i) * kLength, lane.left - i, 0);
        t.Read(read_t + Size(i) * kLength, lane.left - i, 0);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) dot[0] += p.at[j] * t.at[j];
      }
      group.Reduce(dot);
      const bool kept = lane.length <= p.kEntries;
#pragma unroll 1
      for (unsigned i = 0; i < lane.left; i += p.kEntries) {
        if (!kept) {
          p.Read(read_p + Size(i) * kLength, lane.left - i, 0);
          t.Read(read_t + Size(i) * kLength, lane.left - i, 0);
        }
#pragma unroll
        for (int j = 0; j < kLoads; ++j) p.at[j] *= (t.at[j] - dot[0]) * scale;
        p.Write(write + Size(i) * kLength, lane.left - i);
      }
    }
    ClearPadding<kLength>(out + batch * nnz, row_offsets, m, nnz);
  }
}

}  // namespace sgap
