// The extremum of the messages of each row of CSR, and the entry that attains it: gspmm with a
// maximum or minimum, for the points {<x row, c col>, 1} and {<1/r row, c col>, r} of Sgap, section
// 6. Where values are vectors of n columns, also the sum of products (of scalars, that is spmm).
// gspmm_nnz.cuh has the points of nonzeros.
//
// add        messages are x + value, else x * value
// minimum    the result is the minimum, else the maximum; a NaN counts as the extremum
// kGroup     r, lanes that share a row, each taking every r-th entry
// kWalk      rows that a group takes in turn: x, or worker_dim_r
// kVectors   an entry has a value for each column, [nnz, n], else one
// kColumns, kChunks, kBlock, kVector, kPermuted and the grid: see spmm.cuh
//
// `add` and `minimum` are arguments of the kernel, not template parameters, so that one program
// serves all messages. Reported positions are places in the values, also where these are permuted;
// -1 in a row without entries.
#pragma once

#include "spmm.cuh"

namespace sgap {

template <bool kVector, class T, int kColumns>
__device__ inline void StoreColumns(T* row, unsigned left, const Pack<T, kColumns>& pack) {
  if constexpr (kVector) {
    *reinterpret_cast<Pack<T, kColumns>*>(row) = pack;
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j < left) row[j] = pack.at[j];
    }
  }
}

// A message, negated for a minimum, and the position of its entry. Nothing found yet is -infinity
// at position -1, which as an unsigned number is beyond all others.
template <class A>
struct Found {
  A message;
  Index at;
};

template <class A>
__device__ inline void FindNothing(Found<A>& found) {
  found = {A(-__int_as_float(0x7f800000)), -1};
}

// Whether `other` replaces `found`: it is greater, or equal and earlier. The result does not depend
// on the order in which the entries of a row are compared. No branches: lanes would diverge.
template <class A>
__device__ inline bool TakesPlace(const Found<A>& other, const Found<A>& found) {
  const A x = other.message, y = found.message;
  const bool equal = (x == y) | ((x != x) & (y != y));
  const bool greater = !(x <= y) & (y == y);  // also a NaN, than what is none
  return greater | (equal & (unsigned(other.at) < unsigned(found.at)));
}

struct Better {
  template <class A>
  __device__ Found<A> operator()(const Found<A>& x, const Found<A>& y) const {
    return TakesPlace(y, x) ? y : x;
  }
};

template <class A>
__device__ inline Found<A> ShuffleXor(unsigned mask, Found<A> found, int distance, int width) {
  return {__shfl_xor_sync(mask, found.message, distance, width),
          __shfl_xor_sync(mask, found.at, distance, width)};
}
template <class A>
__device__ inline Found<A> ShuffleDown(unsigned mask, Found<A> found, int distance, int width) {
  return {__shfl_down_sync(mask, found.message, distance, width),
          __shfl_down_sync(mask, found.at, distance, width)};
}

__device__ inline float FusedMultiplyAdd(float x, float y, float z) { return fmaf(x, y, z); }
__device__ inline double FusedMultiplyAdd(double x, double y, double z) { return fma(x, y, z); }

// What is reduced to the extremum of each column.
template <class A, int kColumns>
struct Extrema {
  using Element = Found<A>;
  using Combine = Better;

  __device__ static void Clear(Element (&found)[kColumns]) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) FindNothing(found[j]);
  }
};

// The place of entry p in the values.
template <bool kPermuted>
__device__ inline Index PlaceOf(const Index* permutation, unsigned p) {
  return kPermuted ? permutation[p] : Index(p);
}

// The values of an entry for the columns of a lane, of which `values` are at the first; where an
// entry has one value, that is it.
template <bool kVectors, bool kVector, int kColumns, class T>
__device__ inline Pack<T, kVectors ? kColumns : 1> ValuesOf(const T* values, Index at, unsigned n,
                                                            unsigned left) {
  if constexpr (kVectors) {
    return Load<kVector, kColumns>(values + Size(unsigned(at)) * n, left);
  } else {
    return {{values[at]}};
  }
}

// The messages along the entries, for one batch member, as a lane sees them.
template <class T, int kColumns, bool kVector, bool kPermuted, bool kVectors = false>
struct Messages : Extrema<Accumulator<T>, kColumns> {
  using Element = Found<Accumulator<T>>;

  const T* values;  // of vectors at the lane's first column
  const Index* column_indices;
  const Index* permutation;
  const T* x;  // at the lane's first column
  unsigned n;
  unsigned left;  // number of columns from the lane's first to the last
  bool add;
  bool minimum;

  __device__ Messages(const T* values, const Index* column_indices, const Index* permutation,
                      const T* x, unsigned n, unsigned column, bool add, bool minimum)
      : values(kVectors ? values + column : values),
        column_indices(column_indices),
        permutation(permutation),
        x(x + column),
        n(n),
        left(n - column),
        add(add),
        minimum(minimum) {}

  // Compares the messages of entry p with those of earlier entries of its row. Positions in the
  // values ascend within a row, also those of the transpose, so an equal message comes too late.
  __device__ void Take(unsigned p, Element (&found)[kColumns]) const {
    using A = Accumulator<T>;
    const Index at = PlaceOf<kPermuted>(permutation, p);
    const auto own = ValuesOf<kVectors, kVector, kColumns>(values, at, n, left);
    const A sign = minimum ? A(-1) : A(1);
    const auto pack = Load<kVector, kColumns>(x + Size(unsigned(column_indices[p])) * n, left);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const A value = Widen(own.at[kVectors ? j : 0]);
      // One fused operation for both kinds, exact as one rounding: adding -0 changes no product.
      // The sign comes after it: the negated sum of negated numbers would be -0 where the sum is 0.
      const A scale = add ? A(1) : value, offset = add ? value : A(-0.0f);
      const A message = sign * FusedMultiplyAdd(Widen(pack.at[j]), scale, offset);
      const A best = found[j].message;
      const bool takes = (found[j].at < 0) | (!(message <= best) & (best == best));
      found[j].message = takes ? message : best;
      found[j].at = takes ? at : found[j].at;
    }
  }
};

// Rows of results: messages as they are, zero where there is none.
template <class T, int kColumns, bool kVector>
struct ExtremumRows {
  T* y;  // at the lane's first column, as arg
  Index* arg;
  unsigned n;
  unsigned left;
  bool minimum;

  template <class A>
  __device__ void Store(Size row, const Found<A> (&found)[kColumns]) const {
    Pack<T, kColumns> messages;
    Pack<Index, kColumns> positions;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const A message = minimum ? -found[j].message : found[j].message;
      Narrow(found[j].at < 0 ? A(0) : message, messages.at[j]);
      positions.at[j] = found[j].at;
    }
    StoreColumns<kVector>(y + row * n, left, messages);
    StoreColumns<kVector>(arg + row * n, left, positions);
  }
};

// What is added up in each column.
template <class A, int kColumns>
struct Sums {
  using Element = A;
  using Combine = Add;

  __device__ static void Clear(A (&sums)[kColumns]) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[j] = 0;
  }
};

// Rows of sums, at the lane's first column.
template <class T, int kColumns, bool kVector>
struct SumRows {
  T* y;
  unsigned n;
  unsigned left;

  template <class A>
  __device__ void Store(Size row, const A (&sums)[kColumns]) const {
    sgap::Store<kVector>(y + row * n, left, sums);
  }
};

// The products of vectors of values and rows of x, for one batch member, as a lane sees them.
template <class T, int kColumns, bool kVector, bool kPermuted>
struct Products : Sums<Accumulator<T>, kColumns> {
  using Element = Accumulator<T>;

  const T* values;  // at the lane's first column, as x
  const Index* column_indices;
  const Index* permutation;
  const T* x;
  unsigned n;
  unsigned left;  // number of columns from the lane's first to the last

  __device__ Products(const T* values, const Index* column_indices, const Index* permutation,
                      const T* x, unsigned n, unsigned column)
      : values(values + column),
        column_indices(column_indices),
        permutation(permutation),
        x(x + column),
        n(n),
        left(n - column) {}

  __device__ void Take(unsigned p, Element (&sums)[kColumns]) const {
    const Index at = PlaceOf<kPermuted>(permutation, p);
    const auto own = Load<kVector, kColumns>(values + Size(unsigned(at)) * n, left);
    const auto pack = Load<kVector, kColumns>(x + Size(unsigned(column_indices[p])) * n, left);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (kVector || j < left) sums[j] += Widen(own.at[j]) * Widen(pack.at[j]);
    }
  }
};

// The rows of a group, which has kWalk of them: each lane takes every kGroup-th entry, kAtOnce of
// them in flight. Entries: Messages or AttainingMessages; rows: what stores.
template <int kWalk, int kColumns, int kAtOnce, int kGroup, class Entries, class Rows>
__device__ inline void ReduceRows(const Group<kGroup>& group, const Entries& entries,
                                  const Rows& rows, const Index* row_offsets, Size m, Size worker,
                                  bool inside) {
#pragma unroll 1
  for (int step = 0; step < kWalk; ++step) {
    const Size row = worker * kWalk + step;
    const bool valid = inside && row < m;  // the same in all lanes of the group
    // The trip count beforehand, as in SpmmRowGroupKernel.
    const unsigned first = valid ? row_offsets[row] + group.lane : 0;
    const unsigned last = valid ? row_offsets[row + 1] : 0;
    const unsigned steps = first < last ? (last - first + kGroup - 1) / kGroup : 0;
    typename Entries::Element found[kColumns];
    Entries::Clear(found);
#pragma unroll kAtOnce
    for (unsigned i = 0; i < steps; ++i) entries.Take(first + i * kGroup, found);
    group.template Reduce<typename Entries::Combine>(found);
    if (valid && group.lane == 0) rows.Store(row, found);
  }
}

template <class T, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock, bool kVector,
          bool kPermuted, bool kVectors = false>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, SumBytes<T, kColumns, true>()))
    GspmmRowKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                   const Index* __restrict__ column_indices, const Index* __restrict__ permutation,
                   const T* __restrict__ x, T* __restrict__ y, Index* __restrict__ arg, long long m,
                   long long n, long long values_stride, long long x_stride, long long batches,
                   long long add, long long minimum, long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  // Entries that are loaded at once; of more some kernels spill.
  constexpr int kAtOnce =
      4 / (kVector && !kVectors ? 1 : 2) / (SumBytes<T, kColumns>() <= 16 ? 1 : 2);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Messages<T, kColumns, kVector, kPermuted, kVectors> messages(
        values + batch * values_stride, column_indices, permutation, x + batch * x_stride,
        unsigned(n), place.column, add != 0, minimum != 0);
    const Size to = batch * m * n + place.column;
    const ExtremumRows<T, kColumns, kVector> rows{y + to, arg + to, unsigned(n), messages.left,
                                                  minimum != 0};
    ReduceRows<kWalk, kColumns, kAtOnce>(Group<kGroup>(), messages, rows, row_offsets, Size(m),
                                         place.worker, place.column < n);
  }
}

template <class T, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock, bool kVector,
          bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, 2 * SumBytes<T, kColumns>()))
    GspmmSumsKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                    const Index* __restrict__ column_indices, const Index* __restrict__ permutation,
                    const T* __restrict__ x, T* __restrict__ y, long long m, long long n,
                    long long values_stride, long long x_stride, long long batches,
                    long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Products<T, kColumns, kVector, kPermuted> products(
        values + batch * values_stride, column_indices, permutation, x + batch * x_stride,
        unsigned(n), place.column);
    const SumRows<T, kColumns, kVector> rows{y + batch * m * n + place.column, unsigned(n),
                                             products.left};
    ReduceRows<kWalk, kColumns, 2>(Group<kGroup>(), products, rows, row_offsets, Size(m),
                                   place.worker, place.column < n);
  }
}

}  // namespace sgap
