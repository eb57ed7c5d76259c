// Over nonzeros, not rows: gspmm with a maximum or minimum, and its derivative by x, for the points
// {<g nnz, c col>, 1} and {<g nnz, c col>, r} of Sgap, section 6.
//
// A group takes windows of g * r consecutive entries, whatever their rows, and reduces over the
// lanes of each row (segment reduction). Rows that begin and end in a window are stored. What a
// window has of other rows is a partial result, of which it has up to two: of window w, place 2 w
// is for the row that begins before it, and 2 w + 1 for the one that begins in it and ends beyond.
// A second launch combines those of each such row in their order, from what the reduction has for
// no entries, and writes the rows without entries. So nothing is added atomically: an extremum
// keeps its position, and the bits are the same at each call.
#pragma once

#include "gspmm_arg_gather.cuh"

namespace sgap {

// One window of a group. `row` is a row that begins at or before its first entry, and is moved on
// to the last one. Entries: Messages, Products or AttainingMessages; rows and partial: what
// stores.
template <int kNonzeros, int kColumns, int kGroup, class Entries, class Rows, class Partial>
__device__ inline void ReduceWindow(const Group<kGroup>& group, const Entries& entries,
                                    const Rows& rows, const Partial& partial,
                                    const Index* row_offsets, unsigned m, Size stored, Size number,
                                    bool inside, Index& row) {
  using Combine = typename Entries::Combine;
  constexpr Size kWindow = Size(kGroup) * kNonzeros;
  const Size window = number * kWindow, own = window + Size(group.lane) * kNonzeros;
  const bool valid = inside && own < stored;
  typename Entries::Element found[kColumns], head[kColumns];
  Entries::Clear(found);
  if constexpr (kNonzeros > 1) Entries::Clear(head);
  if (valid) {
    const unsigned last = unsigned(stored - own < kNonzeros ? stored : own + kNonzeros);
    row = RowFrom(row_offsets, unsigned(row), m, Index(own));
    bool began_before = row_offsets[row] < own;
    unsigned end = row_offsets[row + 1];
#pragma unroll 1
    for (unsigned p = unsigned(own); p < last; ++p) {
      if (kNonzeros > 1 && p == end) {
        if (!began_before) {
          rows.Store(unsigned(row), found);
        } else if (group.lane == 0) {  // no lane before it takes the head
          partial.Store(2 * number, found);
        } else {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) head[j] = found[j];
        }
        Entries::Clear(found);
        began_before = false;
        row = RowFrom(row_offsets, unsigned(row), m, Index(p));
        end = row_offsets[row + 1];
      }
      entries.Take(p, found);
    }
  }
  if constexpr (kNonzeros > 1) group.template AddNext<Combine>(head, found);
  // Lanes past the end have nothing to give, whatever row they are taken for.
  const bool leads = group.template ReduceSegments<Combine>(row, found);
  if (!leads || !valid) return;
  const bool begins = row_offsets[row] >= window, ends = row_offsets[row + 1] <= window + kWindow;
  if (begins && ends) {
    rows.Store(unsigned(row), found);
  } else {
    partial.Store(2 * number + begins, found);
  }
}

// The windows of a group, which has kWalk of them.
template <int kNonzeros, int kGroup, int kWalk>
struct Windows {
  Group<kGroup> group;
  const Index* row_offsets;
  unsigned m;
  Size stored, number;  // of entries; of the first window
  bool inside;
  Index first_row = 0;  // at or before the first entry

  __device__ Windows(const Index* row_offsets, Size m, Size worker, bool within)
      : row_offsets(row_offsets),
        m(unsigned(m)),
        stored(row_offsets[m]),
        number(worker * kWalk),
        inside(m > 0 && within) {
    const Size first = number * kGroup * kNonzeros;
    if (inside && first < stored) first_row = RowBetween(row_offsets, 0, this->m, Index(first));
  }

  template <int kColumns, class Entries, class Rows, class Partial>
  __device__ void Reduce(const Entries& entries, const Rows& rows, const Partial& partial) const {
    Index row = first_row;
#pragma unroll 1
    for (int step = 0; step < kWalk; ++step) {
      ReduceWindow<kNonzeros, kColumns>(group, entries, rows, partial, row_offsets, m, stored,
                                        number + step, inside, row);
    }
  }
};

template <class T, int kNonzeros, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock,
          bool kVector, bool kPermuted, bool kVectors = false>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, 2 * SumBytes<T, kColumns>()))
    GspmmNnzKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                   const Index* __restrict__ column_indices, const Index* __restrict__ permutation,
                   const T* __restrict__ x, T* __restrict__ y, Index* __restrict__ arg,
                   Accumulator<T>* __restrict__ partial, Index* __restrict__ partial_arg,
                   long long m, long long n, long long values_stride, long long x_stride,
                   long long batches, long long add, long long minimum, long long capacity,
                   long long places, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Windows<kNonzeros, kGroup, kWalk> windows(row_offsets, m, place.worker, place.column < n);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Messages<T, kColumns, kVector, kPermuted, kVectors> messages(
        values + batch * values_stride, column_indices, permutation, x + batch * x_stride,
        unsigned(n), place.column, add != 0, minimum != 0);
    const Size to = batch * m * n + place.column, other = batch * places * n + place.column;
    const ExtremumRows<T, kColumns, kVector> rows{y + to, arg + to, unsigned(n), messages.left,
                                                  minimum != 0};
    const ExtremumRows<Accumulator<T>, kColumns, kVector> parts{
        partial + other, partial_arg + other, unsigned(n), messages.left, minimum != 0};
    windows.template Reduce<kColumns>(messages, rows, parts);
  }
}

// Sums of products, of values that are vectors.
template <class T, int kNonzeros, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock,
          bool kVector, bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, 2 * SumBytes<T, kColumns>()))
    GspmmSumsNnzKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                       const Index* __restrict__ column_indices,
                       const Index* __restrict__ permutation, const T* __restrict__ x,
                       T* __restrict__ y, Accumulator<T>* __restrict__ partial, long long m,
                       long long n, long long values_stride, long long x_stride, long long batches,
                       long long capacity, long long places, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Windows<kNonzeros, kGroup, kWalk> windows(row_offsets, m, place.worker, place.column < n);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Products<T, kColumns, kVector, kPermuted> products(
        values + batch * values_stride, column_indices, permutation, x + batch * x_stride,
        unsigned(n), place.column);
    const SumRows<T, kColumns, kVector> rows{y + batch * m * n + place.column, unsigned(n),
                                             products.left};
    const SumRows<Accumulator<T>, kColumns, kVector> parts{
        partial + batch * places * n + place.column, unsigned(n), products.left};
    windows.template Reduce<kColumns>(products, rows, parts);
  }
}

// y[source, l] = sum of w[q] d[row, l] over the entries q of source with arg[row, l] = q.
template <class T, int kNonzeros, int kGroup, int kWalk, int kColumns, int kChunks, int kBlock,
          bool kVector, bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, 2 * SumBytes<T, kColumns>()))
    GspmmArgGatherToXNnzKernel(const T* __restrict__ w, const Index* __restrict__ offsets,
                               const Index* __restrict__ indices,
                               const Index* __restrict__ permutation, const T* __restrict__ d,
                               const Index* __restrict__ arg, T* __restrict__ y,
                               Accumulator<T>* __restrict__ partial, long long m, long long n,
                               long long w_stride, long long d_stride, long long arg_stride,
                               long long batches, long long capacity, long long places,
                               long long sharing) {
  MoveToStructure(sharing, m, offsets, capacity, indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Windows<kNonzeros, kGroup, kWalk> windows(offsets, m, place.worker, place.column < n);
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const AttainingMessages<T, kColumns, kVector, kPermuted> messages(
        w + batch * w_stride, indices, permutation, d + batch * d_stride, arg + batch * arg_stride,
        unsigned(n), place.column);
    const SumRows<T, kColumns, kVector> rows{y + batch * m * n + place.column, unsigned(n),
                                             messages.left};
    const SumRows<Accumulator<T>, kColumns, kVector> parts{
        partial + batch * places * n + place.column, unsigned(n), messages.left};
    windows.template Reduce<kColumns>(messages, rows, parts);
  }
}

// The partial results of gspmm and of its derivative.
template <class A, int kColumns, bool kVector>
struct ExtremumParts : Extrema<A, kColumns> {
  const A* partial;  // at the lane's first column, as arg
  const Index* arg;
  unsigned n;
  unsigned left;
  bool minimum;

  __device__ ExtremumParts(const A* partial, const Index* arg, unsigned n, unsigned left,
                           bool minimum)
      : partial(partial), arg(arg), n(n), left(left), minimum(minimum) {}

  __device__ void Take(Size place, Found<A> (&found)[kColumns]) const {
    const auto messages = Load<kVector, kColumns>(partial + place * n, left);
    const auto positions = Load<kVector, kColumns>(arg + place * n, left);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const A message = minimum ? -messages.at[j] : messages.at[j];
      found[j] = Better()(found[j], Found<A>{message, positions.at[j]});
    }
  }
};

template <class A, int kColumns, bool kVector>
struct SumParts : Sums<A, kColumns> {
  const A* partial;  // at the lane's first column
  unsigned n;
  unsigned left;

  __device__ SumParts(const A* partial, unsigned n, unsigned left)
      : partial(partial), n(n), left(left) {}

  __device__ void Take(Size place, A (&sums)[kColumns]) const {
    const auto found = Load<kVector, kColumns>(partial + place * n, left);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[j] += found.at[j];
  }
};

// The results of 32 rows that the first launch did not write. Of the block's kShare groups of
// kLanes lanes each has some of the rows to itself, those without entries and those with few
// partial results. Of a row with many, each group takes every kShare-th.
template <int kColumns, int kLanes, int kShare, class Parts, class Rows>
__device__ inline void MergeRows(const Parts& parts, const Rows& rows, const Index* row_offsets,
                                 Size m, unsigned window, bool inside) {
  enum { kRows = 32, kFew = 8 };
  const unsigned share = threadIdx.x / kLanes;
  const Size base = Size(blockIdx.x) * kRows, own = base + threadIdx.x % kRows;
  const Index begin = own < m ? row_offsets[own] : 0, end = own < m ? row_offsets[own + 1] : 0;
  const bool none = begin >= end;
  const unsigned low = unsigned(begin) / window, high = none ? low : unsigned(end - 1) / window;
  const bool many = high - low >= kFew;
  const unsigned few = __ballot_sync(~0u, own < m && !many && (none || low < high));
  const unsigned empty = __ballot_sync(~0u, none);
  unsigned shared = __ballot_sync(~0u, many);  // the same in all warps of the block
  typename Parts::Element found[kColumns];
#pragma unroll 1
  for (unsigned at = share; at - share < kRows; at += kShare) {
    const unsigned from = __shfl_sync(~0u, low, at), to = __shfl_sync(~0u, high, at);
    if (!inside || at >= kRows || !(few >> at & 1)) continue;
    Parts::Clear(found);
    if (!(empty >> at & 1)) {
#pragma unroll 1
      for (unsigned w = from; w <= to; ++w) parts.Take(2 * Size(w) + (w == from), found);
    }
    rows.Store(base + at, found);
  }
#pragma unroll 1
  for (; shared != 0; shared &= shared - 1) {
    const unsigned at = __ffs(shared) - 1;
    const unsigned from = __shfl_sync(~0u, low, at), to = __shfl_sync(~0u, high, at);
    Parts::Clear(found);
    if (inside) {
#pragma unroll 2
      for (unsigned w = from + share; w <= to; w += kShare) {
        parts.Take(2 * Size(w) + (w == from), found);
      }
    }
    MergeShares<kLanes, kShare, kLanes * kShare>(found, CombineAll<typename Parts::Combine>());
    if (share == 0 && inside) rows.Store(base + at, found);
  }
}

// Calls merge(batch, the lane's first column, the number of columns from there on) for each member
// of the batch and each tile of kLanes * kColumns columns of a block, which takes them in turn
// where a grid cannot have so many.
template <int kColumns, int kLanes, class Merge>
__device__ inline void ForEachTile(Size n, Size batches, const Merge& merge) {
  for (Size tile = blockIdx.y; tile * kLanes * kColumns < n; tile += gridDim.y) {
    const unsigned column = (unsigned(tile) * kLanes + threadIdx.x % kLanes) * kColumns;
    for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
      merge(batch, column, unsigned(n) - column);
    }
  }
}

// Grid: x over sets of 32 rows, y over tiles of kLanes * kColumns columns.
template <class T, int kColumns, int kLanes, int kShare, bool kVector>
__global__ void __launch_bounds__(kLanes* kShare, kThreads / (kLanes * kShare))
    GspmmMergeKernel(const Accumulator<T>* __restrict__ partial,
                     const Index* __restrict__ partial_arg, const Index* __restrict__ row_offsets,
                     const T*, const Index*, T* __restrict__ y, Index* __restrict__ arg,
                     long long m, long long n, long long minimum, long long window,
                     long long places, long long batches, long long sharing) {
  MoveToStructure(sharing, m, row_offsets);
  ForEachTile<kColumns, kLanes>(n, batches, [&](Size batch, unsigned column, unsigned left) {
    const Size to = batch * m * n + column, from = batch * places * n + column;
    const ExtremumParts<Accumulator<T>, kColumns, kVector> parts(partial + from, partial_arg + from,
                                                                 unsigned(n), left, minimum != 0);
    const ExtremumRows<T, kColumns, kVector> rows{y + to, arg + to, unsigned(n), left,
                                                  minimum != 0};
    MergeRows<kColumns, kLanes, kShare>(parts, rows, row_offsets, m, unsigned(window), column < n);
  });
}

template <class T, int kColumns, int kLanes, int kShare, bool kVector>
__global__ void __launch_bounds__(kLanes* kShare, kThreads / (kLanes * kShare))
    GspmmMergeSumsKernel(const Accumulator<T>* __restrict__ partial,
                         const Index* __restrict__ row_offsets, const T*, T* __restrict__ y,
                         long long m, long long n, long long window, long long places,
                         long long batches, long long sharing) {
  MoveToStructure(sharing, m, row_offsets);
  ForEachTile<kColumns, kLanes>(n, batches, [&](Size batch, unsigned column, unsigned left) {
    const SumParts<Accumulator<T>, kColumns, kVector> parts(partial + batch * places * n + column,
                                                            unsigned(n), left);
    const SumRows<T, kColumns, kVector> rows{y + batch * m * n + column, unsigned(n), left};
    MergeRows<kColumns, kLanes, kShare>(parts, rows, row_offsets, m, unsigned(window), column < n);
  });
}

}  // namespace sgap
