// The product C = A B of two sparse matrices by rows (Gustavson), at the entries of a given pattern
// of C:
//   out[b, p] = sum over entries e of row i of A, then entries q of row column(e) of B with
//               column(q) = j,  of a[b, e] * b[b, q]            for the entry p = (i, j) of C
// in this order, fused multiply-adds in the accumulator of the dtype, rounded once: the bits of the
// CPU's kernel, whatever the grid is.
//
// A team of lanes makes a hash table of the columns of a row of C, and goes through the products of
// the row, one for each lane at a time; how they are cut among the lanes does not depend on the
// rows of B. Lanes whose products are of one column add in turn, the lowest first.
//
// Grid: y is the size of the rows, which are listed by it: 0 for tables in global memory, a block
// for each row; 1 for a block with a table in shared memory; 2 for a warp, 3 for eight lanes. x
// takes the rows of a size in turn, z the batch. Indices are valid, or -1 for entries that take no
// part.
#pragma once

#include "row_products.cuh"

namespace sgap {

__device__ inline float MultiplyAdd(float x, float y, float sum) { return fmaf(x, y, sum); }
__device__ inline double MultiplyAdd(double x, double y, double sum) { return fma(x, y, sum); }

template <class T>
struct SpgemmOperands {
  const T *a_values, *b_values;
  SparseRows a, b, c;
  T* out;
  Size a_stride, b_stride, c_entries;  // from one element of the batch to the next
  bool complete;  // whether each product has a place: a row where one has none becomes NaN
};

// A sum for each column of a row of C. At most half of the slots are taken.
template <class A>
struct ColumnTable {
  Index* keys;  // a column plus one; 0 where there is none
  A* sums;
  unsigned slots;

  __device__ unsigned Begin(Index column) const {
    return __umulhi(unsigned(column) * 2654435769u, slots);
  }
  __device__ unsigned After(unsigned slot) const { return slot + 1 < slots ? slot + 1 : 0; }

  __device__ void Add(Index column) const {
    unsigned slot = Begin(column);
    for (;; slot = After(slot)) {
      const Index before = atomicCAS(keys + slot, 0, column + 1);
      if (before == 0 || before == column + 1) return;
    }
  }
  // The slot of a column, or `slots`.
  __device__ unsigned Find(Index column) const {
    unsigned slot = Begin(column);
    for (;; slot = After(slot)) {
      const Index key = keys[slot];
      if (key == column + 1) return slot;
      if (key == 0) return slots;
    }
  }
};

// What the teams of a block have in shared memory; each has its part.
template <class T, int kBlock, int kSlots>
struct SpgemmShared {
  Size ends[kBlock];  // of the products of each of A's entries
  Accumulator<T> sums[kSlots];
  Index keys[kSlots], begins[kBlock];
  unsigned turns[2 * kBlock];  // the lane whose turn it is, for slots modulo their number
};

template <int kLanes>
struct TeamParts {
  Size* ends;
  Index* begins;
  unsigned* turns;
};

// Adds the products of a row to its table. Returns whether this lane had one without a place.
template <class T, int kLanes>
__device__ inline bool AddProducts(const SpgemmOperands<T>& in, Size row, const T* a, const T* b,
                                   const ColumnTable<Accumulator<T>>& table,
                                   const Team<kLanes>& team, const TeamParts<kLanes>& own) {
  bool missing = false;
  EachProduct(in.a, in.b, row, team, own.ends, own.begins,
              [&](bool exists, unsigned e, Size q, Size) {
                unsigned slot = table.slots;
                Accumulator<T> x = 0, y = 0;
                const Index column = exists ? in.b.indices[q] : -1;
                if (column >= 0) {
                  slot = table.Find(column);
                  missing |= slot == table.slots;
                  x = Widen(a[e]);
                  y = Widen(b[q]);
                }
                bool left = slot < table.slots;
                unsigned* const next = own.turns + slot % (2 * kLanes);
                while (team.Any(left)) {
                  if (left) atomicMin(next, team.lane);
                  team.Meet();
                  const bool mine = left && *next == team.lane;
                  if (mine) table.sums[slot] = MultiplyAdd(x, y, table.sums[slot]);
                  team.Meet();
                  if (mine) *next = ~0u, left = false;
                }
              });
  return missing;
}

// The rows `first`, first + `stride`, ... below `last` of the list.
template <class T, int kLanes>
__device__ inline void MultiplyRows(const SpgemmOperands<T>& in, const Index* rows, Size first,
                                    Size last, Size stride, Size batches, Size z, Size depth,
                                    ColumnTable<Accumulator<T>> table, unsigned slots,
                                    const Team<kLanes>& team, const TeamParts<kLanes>& own) {
  using A = Accumulator<T>;
  const ColumnTable<A> whole = table;
  for (unsigned i = team.lane; i < 2 * kLanes; i += kLanes) own.turns[i] = ~0u;
#pragma unroll 1
  for (; first < last; first += stride) {
    const Size row = rows[first];
    const unsigned begin = in.c.offsets[row], end = in.c.offsets[row + 1];
    if (begin == end) continue;
    table.slots = 2 * (end - begin);
    if (slots == 0) {  // in global memory each row has slots of its own
      table.keys = whole.keys + 2 * Size(begin);
      table.sums = whole.sums + 2 * Size(begin);
    } else if (table.slots > slots) {  // some columns are repeated
      table.slots = slots;
    }
    for (unsigned i = team.lane; i < table.slots; i += kLanes) table.keys[i] = 0;
    team.Meet();
    for (unsigned p = begin + team.lane; p < end; p += kLanes) {
      const Index column = in.c.indices[p];
      if (column >= 0) table.Add(column);
    }
#pragma unroll 1
    for (Size batch = z; batch < batches; batch += depth) {
      for (unsigned i = team.lane; i < table.slots; i += kLanes) table.sums[i] = 0;
      team.Meet();
      const bool missing = AddProducts(in, row, in.a_values + batch * in.a_stride,
                                       in.b_values + batch * in.b_stride, table, team, own);
      const bool wrong = team.Any(missing) && in.complete;
      T* out = in.out + batch * in.c_entries;
      for (unsigned p = begin + team.lane; p < end; p += kLanes) {
        const Index column = in.c.indices[p];
        if (column >= 0) {
          Narrow(wrong ? A(__int_as_float(0x7fc00000)) : table.sums[table.Find(column)], out[p]);
        }
      }
      team.Meet();
    }
  }
}

// rows lists the rows of size 0, then 1, 2 and 3; those of a size s begin at sizes[s], and
// sizes[4] is their number. keys and sums [2 c_entries] are the tables of size 0.
template <class T, int kBlock, int kSlots>
__global__ void __launch_bounds__(kBlock, kThreads / kBlock)
    SpgemmKernel(const T* __restrict__ a_values, const T* __restrict__ b_values,
                 const Index* __restrict__ a_offsets, const Index* __restrict__ a_indices,
                 const Index* __restrict__ b_offsets, const Index* __restrict__ b_indices,
                 const Index* __restrict__ c_offsets, const Index* __restrict__ c_indices,
                 const Index* __restrict__ rows, const Index* __restrict__ sizes,
                 T* __restrict__ out, Index* keys, Accumulator<T>* sums, long long a_stride,
                 long long b_stride, long long c_entries, long long batches, long long complete) {
  using A = Accumulator<T>;
  __shared__ SpgemmShared<T, kBlock, kSlots> shared;
  const SpgemmOperands<T> in = {a_values,
                                b_values,
                                {a_offsets, a_indices},
                                {b_offsets, b_indices},
                                {c_offsets, c_indices},
                                out,
                                Size(a_stride),
                                Size(b_stride),
                                Size(c_entries),
                                complete != 0};
  const unsigned size = blockIdx.y;
  const Size last = sizes[size + 1];
  const auto multiply = [&](auto team, ColumnTable<A> table, unsigned slots, Size z, Size depth) {
    constexpr int kLanes = decltype(team)::kWidth;
    constexpr int kTeams = kBlock / kLanes;
    const TeamParts<kLanes> own = {shared.ends + team.number * kLanes,
                                   shared.begins + team.number * kLanes,
                                   shared.turns + team.number * 2 * kLanes};
    const Size first = sizes[size] + Size(blockIdx.x) * kTeams + team.number;
    MultiplyRows<T, kLanes>(in, rows, first, last, Size(gridDim.x) * kTeams, batches, z, depth,
                            table, slots, team, own);
  };
  const auto in_shared = [&](auto team) {
    constexpr int kOwn = kSlots / (kBlock / decltype(team)::kWidth);
    multiply(team, {shared.keys + team.number * kOwn, shared.sums + team.number * kOwn, 0}, kOwn,
             blockIdx.z, gridDim.z);
  };
  if (size == 0) {  // one table for the batch
    if (blockIdx.z == 0) multiply(Team<kBlock>(), {keys, sums, 0}, 0, 0, 1);
  } else if (size == 1) {
    in_shared(Team<kBlock>());
  } else if (size == 2) {
    in_shared(Team<32>());
  } else {
    in_shared(Team<8>());
  }
}

}  // namespace sgap
