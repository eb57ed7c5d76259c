// SpMM over CSR, C = A B: the four algorithms of Sgap, section 6, as points {<x nnz|row, c col>,
// r}.
//
// kColumns   c, dense columns of a lane; kVector: n is a multiple of it, so they are one vector
// kChunks    groups side by side along the dense columns of a block
// kGroup     r, lanes that reduce together
// kWalk      rows (windows of nonzeros) that a group takes in turn
// kPermuted  values[permutation[p]] belongs to entry p, as in A^T B; else permutation is not read
//
// Grid: x over the sparse operand, y over tiles of kChunks * kColumns columns, z over the batch (a
// stride of 0 for an operand that the batch shares). Entries from row_offsets[m] on are padding.
// Accumulates in float32, float64 for float64.
#pragma once

#include "group.cuh"
#include "row_search.cuh"

namespace sgap {

// The place of a group: its worker number along the sparse operand, and its dense columns.
template <int kGroup, int kColumns, int kChunks, int kBlock>
struct Place {
  Size group = (Size(blockIdx.x) * kBlock + threadIdx.x) / kGroup;
  Size worker = group / kChunks;
  unsigned column = (blockIdx.y * kChunks + unsigned(group % kChunks)) * kColumns;
};

// The operands of one batch member, as a lane sees them: b is at the lane's first column.
template <class T, int kColumns, bool kVector, bool kPermuted>
struct Operands {
  const T* values;
  const Index* column_indices;
  const Index* permutation;
  GatheredRows<T> b;
  unsigned n;
  unsigned left;  // number of columns from the lane's first to the last

  // sums += values[p] * B[column_indices[p], columns of the lane]
  __device__ void AddEntry(Index p, Accumulator<T> (&sums)[kColumns]) const {
    const Accumulator<T> value = Widen(values[kPermuted ? permutation[p] : p]);
    AddScaled<kVector>(value, b[column_indices[p]], left, sums);
  }

  // Loads entries p to p + kLoad - 1, p a multiple of kLoad: their values, and the lane's columns
  // of their rows of B. Entries from `last` on do not exist and become zeros.
  template <int kLoad>
  __device__ void LoadEntries(unsigned p, unsigned last, Pack<T, kLoad>& found,
                              Pack<T, kColumns> (&rows)[kLoad]) const {
    Pack<Index, kLoad> columns = {}, places = {};
    found = {};
    if (p + kLoad <= last) {
      columns = *reinterpret_cast<const Pack<Index, kLoad>*>(column_indices + p);
      if constexpr (kPermuted)
        places = *reinterpret_cast<const Pack<Index, kLoad>*>(permutation + p);
      if constexpr (!kPermuted) found = *reinterpret_cast<const Pack<T, kLoad>*>(values + p);
    } else {
#pragma unroll
      for (int i = 0; i < kLoad; ++i) {
        if (p + i >= last) continue;
        columns.at[i] = column_indices[p + i];
        if constexpr (kPermuted) places.at[i] = permutation[p + i];
        if constexpr (!kPermuted) found.at[i] = values[p + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kLoad; ++i) {
      if (kPermuted && p + i < last) found.at[i] = values[places.at[i]];
      rows[i] = Load<kVector, kColumns>(b[columns.at[i]], p + i < last ? left : 0);
    }
  }
};

// {<x row, c col>, 1}: a lane owns x rows. Deterministic.
template <class T, int kRows, int kColumns, int kChunks, int kBlock, bool kVector, bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, SumBytes<T, kColumns>()))
    SpmmRowKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                  const Index* __restrict__ column_indices, const Index* __restrict__ permutation,
                  const T* __restrict__ b, T* __restrict__ c, long long m, long long n,
                  long long values_stride, long long b_stride, long long batches,
                  long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<1, kColumns, kChunks, kBlock> place;
  if (place.column >= n) return;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Operands<T, kColumns, kVector, kPermuted> operands{
        values + batch * values_stride,
        column_indices,
        permutation,
        {b + batch * b_stride + place.column, Size(n)},
        unsigned(n),
        unsigned(n) - place.column};
#pragma unroll 1
    for (Size row = place.worker * kRows; row < (place.worker + 1) * kRows && row < m; ++row) {
      const Index last = row_offsets[row + 1];
      Accumulator<T> sums[kColumns] = {};
#pragma unroll 4
      for (Index p = row_offsets[row]; p < last; ++p) operands.AddEntry(p, sums);
      Store<kVector>(c + (batch * m + row) * n + place.column, operands.left, sums);
    }
  }
}

// {<1/g row, c col>, r}: g = kGroups * r lanes share a row, each taking every g-th entry.
// Deterministic where g = r; otherwise the groups of a row add atomically into zeros.
template <class T, class Out, int kGroups, int kGroup, int kWalk, int kColumns, int kChunks,
          int kBlock, bool kVector, bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, SumBytes<T, kColumns>()))
    SpmmRowGroupKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                       const Index* __restrict__ column_indices,
                       const Index* __restrict__ permutation, const T* __restrict__ b,
                       Out* __restrict__ c, long long m, long long n, long long values_stride,
                       long long b_stride, long long batches, long long capacity,
                       long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Group<kGroup> group;
  const unsigned start = unsigned(place.worker % kGroups) * kGroup;
  const bool inside = place.column < n;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Operands<T, kColumns, kVector, kPermuted> operands{
        values + batch * values_stride,
        column_indices,
        permutation,
        {b + batch * b_stride + place.column, Size(n)},
        unsigned(n),
        unsigned(n) - place.column};
#pragma unroll 1
    for (int step = 0; step < kWalk; ++step) {
      const Size row = place.worker / kGroups * kWalk + step;
      const bool valid = inside && row < m;  // the same in all lanes of the group
      const unsigned first = valid ? row_offsets[row] + start : 0;
      const unsigned last = valid ? row_offsets[row + 1] : 0;
      Accumulator<T> sums[kColumns] = {};
      // The trip count is computed beforehand: a loop that may end after each entry would wait for
      // one entry before it loads the next.
      const unsigned own = first + group.lane, share = kGroups * kGroup;
      const unsigned steps = own < last ? (last - own + share - 1) / share : 0;
#pragma unroll 4
      for (unsigned i = 0; i < steps; ++i) operands.AddEntry(Index(own + i * share), sums);
      group.Reduce(sums);
      if (!valid || group.lane != 0) continue;
      Out* out = c + (batch * m + row) * n + place.column;
      if constexpr (kGroups == 1) {
        Store<kVector>(out, operands.left, sums);
      } else if (first < last) {
        AddAtomically<kVector>(out, operands.left, sums);
      }
    }
  }
}

// Adds sums to a row: stored if the caller has all entries of the row (`whole`), else added
// atomically.
template <bool kVector, class A, int kColumns>
__device__ inline void AddToRow(A* out, unsigned left, bool whole, const A (&sums)[kColumns]) {
  if (whole) {
    Store<kVector>(out, left, sums);
  } else {
    AddAtomically<kVector>(out, left, sums);
  }
}

// {<g nnz, c col>, 1}: a lane owns kNonzeros consecutive entries and adds into zeros: atomically in
// rows that reach beyond them.
template <class T, int kNonzeros, int kColumns, int kChunks, int kBlock, bool kVector,
          bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, SumBytes<T, kColumns>()))
    SpmmNnzKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                  const Index* __restrict__ column_indices, const Index* __restrict__ permutation,
                  const T* __restrict__ b, Accumulator<T>* __restrict__ c, long long m, long long n,
                  long long values_stride, long long b_stride, long long batches,
                  long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<1, kColumns, kChunks, kBlock> place;
  const Size first = place.worker * kNonzeros;
  const Size stored = row_offsets[m];
  if (m == 0 || place.column >= n || first >= stored) return;
  const unsigned last = unsigned(stored - first < kNonzeros ? stored : first + kNonzeros);
  const Index first_row = RowBetween(row_offsets, 0, unsigned(m), Index(first));
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Operands<T, kColumns, kVector, kPermuted> operands{
        values + batch * values_stride,
        column_indices,
        permutation,
        {b + batch * b_stride + place.column, Size(n)},
        unsigned(n),
        unsigned(n) - place.column};
    Accumulator<T>* out = c + batch * m * n + place.column;
    unsigned p = unsigned(first);
    Index row = first_row;
    while (true) {
      const unsigned row_end = row_offsets[row + 1];
      const unsigned end = row_end < last ? row_end : last;
      const bool whole = row_end <= last && row_offsets[row] >= first;
      Accumulator<T> sums[kColumns] = {};
#pragma unroll 4
      for (; p < end; ++p) operands.AddEntry(Index(p), sums);
      AddToRow<kVector>(out + Size(unsigned(row)) * n, operands.left, whole, sums);
      if (p == last) break;
      row = RowFrom(row_offsets, unsigned(row), unsigned(m), Index(p));
    }
  }
}

// Processes a lane's entries [first, last), row after row. Stores the rows that begin and end
// there. Leaves in `sums` the partial sum of the last row, which it returns, and in `head` that of
// the first row if it began before `first` and ends here. `row` is the row of entry `first` or an
// earlier one. The first lane of a window (`leading`) has no lane before it to take the head, and
// adds it to the output itself.
template <int kLoad, class T, int kColumns, bool kVector, bool kPermuted>
__device__ inline Index AddEntries(const Operands<T, kColumns, kVector, kPermuted>& operands,
                                   const Index* row_offsets, unsigned m, unsigned first,
                                   unsigned last, Index row, bool leading, Accumulator<T>* out,
                                   Accumulator<T> (&sums)[kColumns],
                                   Accumulator<T> (&head)[kColumns]) {
  row = RowFrom(row_offsets, unsigned(row), m, Index(first));
  bool began_before = row_offsets[row] < first;
  unsigned end = row_offsets[row + 1];
#pragma unroll 1
  for (unsigned p = first; p < last; p += kLoad) {
    Pack<T, kLoad> values;
    Pack<T, kColumns> rows[kLoad];
    operands.LoadEntries(p, last, values, rows);
#pragma unroll
    for (int i = 0; i < kLoad; ++i) {
      if (p + i == end && p + i < last) {
        Accumulator<T>* at = out + Size(unsigned(row)) * operands.n;
        if (!began_before) {
          Store<kVector>(at, operands.left, sums);
        } else if (leading) {
          AddAtomically<kVector>(at, operands.left, sums);
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          if (began_before && !leading) head[j] = sums[j];
          sums[j] = 0;
        }
        began_before = false;
        row = RowFrom(row_offsets, unsigned(row), m, Index(p + i));
        end = row_offsets[row + 1];
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[j] += Widen(values.at[i]) * Widen(rows[i].at[j]);
    }
  }
  return row;
}

// {<g nnz, c col>, r}: a group owns windows of g * r consecutive entries, g in each lane. Rows that
// several lanes touch are reduced over the group; the first lane of each such row adds into zeros
// as above. With kLoad > 1 that many values and indices are loaded at once.
template <class T, int kNonzeros, int kGroup, int kWalk, int kLoad, int kColumns, int kChunks,
          int kBlock, bool kVector, bool kPermuted>
__global__ void __launch_bounds__(kBlock, BlocksOfSums(kBlock, SumBytes<T, kColumns, true>()))
    SpmmNnzGroupKernel(const T* __restrict__ values, const Index* __restrict__ row_offsets,
                       const Index* __restrict__ column_indices,
                       const Index* __restrict__ permutation, const T* __restrict__ b,
                       Accumulator<T>* __restrict__ c, long long m, long long n,
                       long long values_stride, long long b_stride, long long batches,
                       long long capacity, long long sharing) {
  MoveToStructure(sharing, m, row_offsets, capacity, column_indices, permutation);
  const Place<kGroup, kColumns, kChunks, kBlock> place;
  const Group<kGroup> group;
  constexpr Size kWindow = Size(kGroup) * kNonzeros;
  const Size stored = row_offsets[m], first = place.worker * kWalk * kWindow;
  const bool inside = m > 0 && place.column < n;
  const Index first_row =
      inside && first < stored ? RowBetween(row_offsets, 0, unsigned(m), Index(first)) : 0;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const Operands<T, kColumns, kVector, kPermuted> operands{
        values + batch * values_stride,
        column_indices,
        permutation,
        {b + batch * b_stride + place.column, Size(n)},
        unsigned(n),
        unsigned(n) - place.column};
    Accumulator<T>* out = c + batch * m * n + place.column;
    Index row = first_row;
#pragma unroll 1
    for (int step = 0; step < kWalk; ++step) {
      const Size window = first + step * kWindow, own = window + Size(group.lane) * kNonzeros;
      const bool valid = inside && own < stored;
      Accumulator<T> sums[kColumns] = {}, head[kColumns] = {};
      if (valid) {
        const unsigned last = unsigned(stored - own < kNonzeros ? stored : own + kNonzeros);
        row = AddEntries<kLoad>(operands, row_offsets, unsigned(m), unsigned(own), last, row,
                                group.lane == 0, out, sums, head);
      }
      if constexpr (kNonzeros > 1) group.AddNext(head, sums);
      // Lanes past the end are a segment of their own, of a row that does not exist.
      const bool leads = group.ReduceSegments(valid ? row : Index(m), sums);
      if (!leads || !valid) continue;
      const bool whole = row_offsets[row] >= window && row_offsets[row + 1] <= window + kWindow;
      AddToRow<kVector>(out + Size(unsigned(row)) * n, operands.left, whole, sums);
    }
  }
}

}  // namespace sgap
