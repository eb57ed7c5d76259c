// Softmax over the entries of each row, and the product with its Jacobian; points, grid, padding
// and accumulation are those of row_reduce.cuh.
//
// A group takes a row in windows of kKept entries a lane. A row of one window stays in registers:
// read once, one exponential an entry. Over a longer one the first pass carries each lane's maximum
// and sum of exponentials together, the sum being rescaled where the maximum grows; the second
// reads again and writes. Passes of their own for maximum and sum would read three times, and the
// rescaling costs one exponential a window.
#pragma once

#include "row_reduce.cuh"

namespace sgap {

enum { kKept = 4 };

// Not the fast intrinsics: within 2 ulp.
__device__ inline float Exp(float x) { return expf(x); }
__device__ inline double Exp(double x) { return exp(x); }

// The entries p, p + kGroup, ... of a window that lie before `last`, in a lane's registers.
template <class T, int kGroup>
struct Window {
  using A = Accumulator<T>;
  enum { kEntries = kGroup * kKept };

  A at[kKept];

  __device__ void Read(const T* entries, unsigned p, unsigned last) {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      at[j] = p + j * kGroup < last ? Widen(entries[p + j * kGroup]) : A(0);
    }
  }

  __device__ void Write(T* entries, unsigned p, unsigned last) const {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (p + j * kGroup < last) Narrow(at[j], entries[p + j * kGroup]);
    }
  }
};

// The terms of a row are exp(size * (sign * v - peak)), peak being the greatest sign * v: no
// overflow whatever the scale, and no multiply and subtract that could contract.
template <class T, int kGroup>
struct SoftmaxRow {
  using A = Accumulator<T>;

  A size, sign;
  unsigned last;

  // Under a peak of -infinity all terms are zero, where -infinity less itself would be NaN.
  __device__ A Term(A signed_value, A peak) const {
    return peak == Least<A>() ? A(0) : Exp((signed_value - peak) * size);
  }

  __device__ A Peak(const Window<T, kGroup>& window, unsigned p, A peak) const {
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      if (p + j * kGroup < last) peak = Greater()(peak, sign * window.at[j]);
    }
    return peak;
  }

  // The window's values become terms; returns their sum.
  __device__ A Terms(Window<T, kGroup>& window, unsigned p, A peak) const {
    A sum = 0;
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      window.at[j] = p + j * kGroup < last ? Term(sign * window.at[j], peak) : A(0);
      sum += window.at[j];
    }
    return sum;
  }
};

// out = softmax(scale * values), row by row; scale_bits are those of a double. NaN and the greatest
// infinity make their row NaN; a row that is all the least infinity gets zeros.
template <class T, int kGroup, int kRows, int kBlock>
__global__ void __launch_bounds__(kBlock)
    SparseSoftmaxKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                        T* __restrict__ out, long long m, long long nnz, long long products,
                        long long scale_bits) {
  using A = Accumulator<T>;
  const Group<kGroup> group;
  const GroupRows<kGroup, kRows, kBlock> own(m);
  const A scale = A(__longlong_as_double(scale_bits));
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
    const T* read = values + product * nnz;
    T* write = out + product * nnz;
#pragma unroll 1
    for (Size row = own.begin; row < own.end; ++row) {
      const unsigned begin = row_offsets[row], first = begin + group.lane;
      const SoftmaxRow<T, kGroup> terms{scale < 0 ? -scale : scale, A(scale < 0 ? -1 : 1),
                                        unsigned(row_offsets[row + 1])};
      Window<T, kGroup> window;
      A peak = Least<A>(), sum[1] = {0};
#pragma unroll 1
      for (unsigned p = first; p < terms.last; p += window.kEntries) {
        window.Read(read, p, terms.last);
        const A before = peak;
        peak = terms.Peak(window, p, peak);
        if (p != first) sum[0] *= terms.Term(before, peak);
        sum[0] += terms.Terms(window, p, peak);
      }
      A greatest[1] = {peak};
      group.template Reduce<Greater>(greatest);
      const A share = first < terms.last ? terms.Term(peak, greatest[0]) : A(0);
      sum[0] *= share;
      group.Reduce(sum);
      const A inverse = sum[0] == 0 ? A(0) : 1 / sum[0];
      const bool kept = terms.last - begin <= window.kEntries;
      const A factor = kept ? share * inverse : inverse;
#pragma unroll 1
      for (unsigned p = first; p < terms.last; p += window.kEntries) {
        if (!kept) {
          window.Read(read, p, terms.last);
          terms.Terms(window, p, greatest[0]);
        }
#pragma unroll
        for (A& term : window.at) term *= factor;
        window.Write(write, p, terms.last);
      }
    }
    ClearPadding(write, row_offsets[m], nnz);
  }
}

// out = scale p (t - sum over the row of p t): the softmax with probabilities p, along t.
template <class T, int kGroup, int kRows, int kBlock>
__global__ void __launch_bounds__(kBlock)
    SparseSoftmaxJacobianKernel(const T* __restrict__ probabilities, const T* __restrict__ tangent,
                                const Index* __restrict__ row_offsets, T* __restrict__ out,
                                long long m, long long nnz, long long products,
                                long long probabilities_stride, long long tangent_stride,
                                long long scale_bits) {
  using A = Accumulator<T>;
  const Group<kGroup> group;
  const GroupRows<kGroup, kRows, kBlock> own(m);
  const A scale = A(__longlong_as_double(scale_bits));
  for (Size product = blockIdx.z; product < products; product += gridDim.z) {
    const T* read_p = probabilities + product * probabilities_stride;
    const T* read_t = tangent + product * tangent_stride;
    T* write = out + product * nnz;
#pragma unroll 1
    for (Size row = own.begin; row < own.end; ++row) {
      const unsigned begin = row_offsets[row], last = row_offsets[row + 1];
      const unsigned first = begin + group.lane;
      Window<T, kGroup> p, t;
      A dot[1] = {0};
#pragma unroll 1
      for (unsigned at = first; at < last; at += p.kEntries) {
        p.Read(read_p, at, last);
        t.Read(read_t, at, last);
#pragma unroll
        for (int j = 0; j < kKept; ++j) dot[0] += p.at[j] * t.at[j];
      }
      group.Reduce(dot);
      const bool kept = last - begin <= p.kEntries;
#pragma unroll 1
      for (unsigned at = first; at < last; at += p.kEntries) {
        if (!kept) {
          p.Read(read_p, at, last);
          t.Read(read_t, at, last);
        }
#pragma unroll
        for (int j = 0; j < kKept; ++j) p.at[j] *= (t.at[j] - dot[0]) * scale;
        p.Write(write, at, last);
      }
    }
    ClearPadding(write, row_offsets[m], nnz);
  }
}

}  // namespace sgap
