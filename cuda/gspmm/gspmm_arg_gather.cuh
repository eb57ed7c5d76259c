// The derivatives of gspmm with a maximum or minimum: they involve only the entries that attain it.
// With q = arg[row, l], a position in the values or -1, and the source row of entry q in x,
//
//   arg_gather            y[row, l]    = w[q] x[source, l]
//   arg_gather_to_x       y[source, l] = sum of w[q] d[row, l] over the entries q of source with
//                                        arg[row, l] = q: a walk along the transposed structure
//   arg_gather_to_values  y[q]         = sum over l with arg[row, l] = q of x[source, l] d[row, l]
//
// kTransposed  the messages go along A^T: entry q is at (source, row) of A, else at (row, source)
//
// Every sum has one fixed order: deterministic.
#pragma once

#include "gspmm.cuh"

namespace sgap {

// One lane for each element of the result.
template <class T, int kBlock, bool kTransposed>
__global__ void __launch_bounds__(kBlock)
    GspmmArgGatherKernel(const T* __restrict__ w, const Index* __restrict__ row_offsets,
                         const Index* __restrict__ column_indices, const T* __restrict__ x,
                         const Index* __restrict__ arg, T* __restrict__ y, long long matrix_rows,
                         long long m, long long n, long long w_stride, long long x_stride,
                         long long arg_stride, long long batches, long long capacity,
                         long long sharing) {
  MoveToStructure(sharing, matrix_rows, row_offsets, capacity, column_indices);
  const Size place = Size(blockIdx.x) * kBlock + threadIdx.x;
  if (place >= Size(m) * n) return;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Index q = arg[batch * arg_stride + place];
    Accumulator<T> found = 0;
    if (q >= 0) {
      const Index source =
          kTransposed ? RowBetween(row_offsets, 0, unsigned(matrix_rows), q) : column_indices[q];
      found = Widen(w[batch * w_stride + q]) *
              Widen(x[batch * x_stride + Size(unsigned(source)) * n + place % n]);
    }
    Narrow(found, y[batch * m * n + place]);
  }
}

// The terms w[q] d[row, l] of arg_gather_to_x, for one batch member, as a lane sees them.
template <class T, int kColumns, bool kVector, bool kPermuted>
struct AttainingMessages : Sums<Accumulator<T>, kColumns> {
  using Element = Accumulator<T>;

  const T* w;
  const Index* indices;
  const Index* permutation;
  const T* d;  // at the lane's first column, as arg
  const Index* arg;
  unsigned n;
  unsigned left;  // number of columns from the lane's first to the last

  __device__ AttainingMessages(const T* w, const Index* indices, const Index* permutation,
                               const T* d, const Index* arg, unsigned n, unsigned column)
      : w(w),
        indices(indices),
        permutation(permutation),
        d(d + column),
        arg(arg + column),
        n(n),
        left(n - column) {}

  __device__ void Take(unsigned p, Element (&sums)[kColumns]) const {
    const Index q = kPermuted ? permutation[p] : Index(p);
    const Size row = Size(unsigned(indices[p])) * n;
    const auto attaining = Load<kVector, kColumns>(arg + row, left);
    const auto pack = Load<kVector, kColumns>(d + row, left);
    const Accumulator<T> value = Widen(w[q]);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if ((kVector || j < left) && attaining.at[j] == q) sums[j] += value * Widen(pack.at[j]);
    }
  }
};

// {<x row, c col>, 1} and {<1/r row, c col>, r}, over the structure whose rows are the sources.
template <class T, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock, bool kVector,
          bool kPermuted>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    GspmmArgGatherToXKernel(const T* __restrict__ w, const Index* __restrict__ offsets,
                            const Index* __restrict__ indices,
                            const Index* __restrict__ permutation, const T* __restrict__ d,
                            const Index* __restrict__ arg, T* __restrict__ y, long long m,
                            long long n, long long w_stride, long long d_stride,
                            long long arg_stride, long long batches, long long capacity,
                            long long sharing) {
  MoveToStructure(sharing, m, offsets, capacity, indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const AttainingMessages<T, kColumns, kVector, kPermuted> messages(
        w + batch * w_stride, indices, permutation, d + batch * d_stride, arg + batch * arg_stride,
        unsigned(n), place.column);
    const SumRows<T, kColumns, kVector> rows{y + batch * m * n + place.column, unsigned(n),
                                             messages.left};
    ReduceRows<kWalk, kColumns, 2>(Group<kGroup>(), messages, rows, offsets, Size(m), place.worker,
                                   place.column < n);
  }
}

// {<g nnz, c col>, r}: r lanes share the features of an entry, c neighbouring ones at a time, and a
// group takes kNonzeros entries in turn. Entries of the padding get zero.
template <class T, int kNonzeros, int kGroup, int kColumns, int kBlock, bool kVector,
          bool kTransposed>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    GspmmArgGatherToValuesKernel(const Index* __restrict__ row_offsets,
                                 const Index* __restrict__ column_indices, const T* __restrict__ x,
                                 const T* __restrict__ d, const Index* __restrict__ arg,
                                 T* __restrict__ y, long long matrix_rows, long long nnz,
                                 long long n, long long x_stride, long long d_stride,
                                 long long arg_stride, long long batches, long long sharing) {
  MoveToStructure(sharing, matrix_rows, row_offsets, nnz, column_indices);
  const Group<kGroup> group;
  const Size first = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup * kNonzeros;
  const Size stored = matrix_rows > 0 ? row_offsets[matrix_rows] : 0;
  const Index first_row =
      first < stored ? RowBetween(row_offsets, 0, unsigned(matrix_rows), Index(first)) : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    Index i = first_row;
#pragma unroll 1
    for (Size q = first; q < first + kNonzeros; ++q) {
      const bool valid = q < stored;  // the same in all lanes of the group
      Accumulator<T> sum[1] = {};
      if (valid) {
        i = RowFrom(row_offsets, unsigned(i), unsigned(matrix_rows), Index(q));
        const Index j = column_indices[q];
        const Size row = Size(unsigned(kTransposed ? j : i)) * n;
        const Size source = Size(unsigned(kTransposed ? i : j)) * n;
#pragma unroll 2
        for (Size l = group.lane * kColumns; l < n; l += kGroup * kColumns) {
          const unsigned left = unsigned(n - l);
          const auto attaining = Load<kVector, kColumns>(arg + batch * arg_stride + row + l, left);
          const auto a = Load<kVector, kColumns>(x + batch * x_stride + source + l, left);
          const auto b = Load<kVector, kColumns>(d + batch * d_stride + row + l, left);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const bool inside = kVector || c < left;
            if (inside && attaining.at[c] == Index(q)) sum[0] += Widen(a.at[c]) * Widen(b.at[c]);
          }
        }
      }
      group.Reduce(sum);
      if (group.lane == 0 && q < nnz) Narrow(sum[0], y[batch * nnz + q]);
    }
  }
}

}  // namespace sgap
