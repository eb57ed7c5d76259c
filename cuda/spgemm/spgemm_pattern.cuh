// The structure of C = A B of two sparse matrices, in two launches: SpgemmCountKernel counts the
// columns of each row, and SpgemmIndicesKernel writes them, ascending, to where a prefix sum of the
// counts says.
//
// A row of few products has them sorted in shared memory, by eight lanes or a warp. Others take a
// block, which notes columns as bits: as many columns at a time as it has bits.
//
// Grid: y is the size of the rows, which are listed by it: 0 for a block, 1 for a warp, 2 for eight
// lanes; x takes the rows of a size in turn, z the batch. Indices are valid, or -1 for entries that
// take no part.
#pragma once

#include "row_products.cuh"

namespace sgap {

enum : Index { kNoColumn = 0x7fffffff };  // no matrix has so many

// Sorts `size` keys, a power of two, at least as many as there are lanes.
template <int kLanes>
__device__ inline void Sort(const Team<kLanes>& team, Index* keys, unsigned size) {
#pragma unroll 1
  for (unsigned run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (unsigned distance = run / 2; distance > 0; distance /= 2) {
      for (unsigned pair = team.lane; pair < size / 2; pair += kLanes) {
        const unsigned i = 2 * pair - pair % distance, j = i + distance;
        const Index low = keys[i], high = keys[j];
        if ((low > high) == ((i & run) == 0)) keys[i] = high, keys[j] = low;
      }
      team.Meet();
    }
  }
}

// Where the columns of a row go. Without kWrite they are counted alone.
template <bool kWrite>
struct RowColumns {
  Index* indices;
  Size at, capacity;

  __device__ void Put(Size nth, Index column) const {
    if (kWrite && at + nth < capacity) indices[at + nth] = column;
  }
};

// The columns of a row of at most `room` products, a power of two. Returns how many there are.
template <bool kWrite, int kLanes>
__device__ inline Size SortedColumns(const SparseRows& a, const SparseRows& b, Size row,
                                     const Team<kLanes>& team, Size* ends, Index* begins,
                                     Index* keys, unsigned room, const RowColumns<kWrite>& out) {
  const auto gather = [&](bool exists, unsigned, Size q, Size product) {
    if (!exists || product >= room) return;
    const Index column = b.indices[q];
    keys[product] = column < 0 ? Index(kNoColumn) : column;
  };
  const unsigned products = unsigned(EachProduct(a, b, row, team, ends, begins, gather));
  unsigned size = kLanes;
  while (size < products && size < room) size *= 2;
  for (unsigned i = products + team.lane; i < size; i += kLanes) keys[i] = kNoColumn;
  team.Meet();
  Sort(team, keys, size);
  const unsigned share = size / kLanes, first = team.lane * share;
  const auto is_new = [&](unsigned i) {
    return keys[i] != kNoColumn && (i == 0 || keys[i] != keys[i - 1]);
  };
  Size count = 0;
  for (unsigned i = first; i < first + share; ++i) count += is_new(i);
  Size before = UpTo(team, ends, count) - count;
  if (kWrite) {
    for (unsigned i = first; i < first + share; ++i) {
      if (is_new(i)) out.Put(before++, keys[i]);
    }
  }
  const Size total = ends[kLanes - 1];
  team.Meet();
  return total;
}

// The columns of any row, noted in `words` words of bits.
template <bool kWrite, int kLanes>
__device__ inline Size NotedColumns(const SparseRows& a, const SparseRows& b, Size row,
                                    Size columns, const Team<kLanes>& team, Size* ends,
                                    Index* begins, unsigned* bits, unsigned words,
                                    const RowColumns<kWrite>& out) {
  Size total = 0;
#pragma unroll 1
  for (Size first = 0; first < columns; first += Size(words) * 32) {
    const Size left = (columns - first + 31) / 32;
    const unsigned used = left < words ? unsigned(left) : words;
    for (unsigned i = team.lane; i < used; i += kLanes) bits[i] = 0;
    team.Meet();
    EachProduct(a, b, row, team, ends, begins, [&](bool exists, unsigned, Size q, Size) {
      const Index column = exists ? b.indices[q] : -1;
      if (column < 0 || Size(column) < first) return;
      const Size bit = column - first;
      if (bit / 32 < used) atomicOr(bits + bit / 32, 1u << bit % 32);
    });
    team.Meet();
    const unsigned share = (used + kLanes - 1) / kLanes;
    const unsigned begin = team.lane * share;
    const unsigned end = begin + share < used ? begin + share : used;
    Size count = 0;
    for (unsigned i = begin; i < end; ++i) count += __popc(bits[i]);
    Size before = total + UpTo(team, ends, count) - count;
    if (kWrite) {
      for (unsigned i = begin; i < end; ++i) {
        for (unsigned word = bits[i]; word != 0; word &= word - 1) {
          out.Put(before++, Index(first + i * 32 + (__ffs(word) - 1)));
        }
      }
    }
    total += ends[kLanes - 1];
    team.Meet();
  }
  return total;
}

template <int kBlock, int kWords>
struct PatternShared {
  Size ends[kBlock];
  Index begins[kBlock];
  unsigned words[kWords];  // bits, or the keys of all teams
};

// Calls each(row, columns of the row) in one thread for the rows of the block's size, in an element
// of the batch; `place(row)` is where the columns go.
template <bool kWrite, int kBlock, int kWords, class Place, class Each>
__device__ inline void EachRow(const SparseRows& a, const SparseRows& b, const Index* rows,
                               const Index* sizes, Size columns,
                               PatternShared<kBlock, kWords>& shared, Place place, Each each) {
  const auto run = [&](auto team, unsigned room) {
    constexpr int kLanes = decltype(team)::kWidth;
    constexpr int kTeams = kBlock / kLanes;
    Size* ends = shared.ends + team.number * kLanes;
    Index* begins = shared.begins + team.number * kLanes;
    const Size last = sizes[blockIdx.y + 1], stride = Size(gridDim.x) * kTeams;
    Size at = sizes[blockIdx.y] + Size(blockIdx.x) * kTeams + team.number;
#pragma unroll 1
    for (; at < last; at += stride) {
      const Size row = rows[at];
      const RowColumns<kWrite> out = place(row);
      Size count;
      if constexpr (kLanes == kBlock) {
        count =
            NotedColumns<kWrite>(a, b, row, columns, team, ends, begins, shared.words, kWords, out);
      } else {
        Index* keys = reinterpret_cast<Index*>(shared.words) + team.number * room;
        count = SortedColumns<kWrite>(a, b, row, team, ends, begins, keys, room, out);
      }
      if (team.lane == 0) each(row, count);
    }
  };
  if (blockIdx.y == 0) {
    run(Team<kBlock>(), 0);
  } else if (blockIdx.y == 1) {
    run(Team<32>(), kWords / (kBlock / 32) / 2);
  } else {
    run(Team<8>(), kWords / (kBlock / 8) / 4);
  }
}

// counts [batch, m]: the columns of each row. Index arrays have the batch in front; a_entries and
// b_entries are their lengths, k is the number of A's columns.
template <int kBlock, int kWords>
__global__ void __launch_bounds__(kBlock, BlocksAtOnce(kThreads / kBlock))
    SpgemmCountKernel(const Index* __restrict__ a_offsets, const Index* __restrict__ a_indices,
                      const Index* __restrict__ b_offsets, const Index* __restrict__ b_indices,
                      const Index* __restrict__ rows, const Index* __restrict__ sizes,
                      Index* __restrict__ counts, long long m, long long k, long long columns,
                      long long a_entries, long long b_entries, long long batches) {
  __shared__ PatternShared<kBlock, kWords> shared;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const SparseRows a = {a_offsets + batch * (m + 1), a_indices + batch * a_entries};
    const SparseRows b = {b_offsets + batch * (k + 1), b_indices + batch * b_entries};
    EachRow<false>(
        a, b, rows + batch * m, sizes + batch * 4, columns, shared,
        [](Size) { return RowColumns<false>{nullptr, 0, 0}; },
        [&](Size row, Size count) { counts[batch * m + row] = Index(count); });
    __syncthreads();
  }
}

// indices [batch, capacity]: the columns of each row from offsets[row] on, as far as they fit.
template <int kBlock, int kWords>
__global__ void __launch_bounds__(kBlock, BlocksAtOnce(kThreads / kBlock))
    SpgemmIndicesKernel(const Index* __restrict__ a_offsets, const Index* __restrict__ a_indices,
                        const Index* __restrict__ b_offsets, const Index* __restrict__ b_indices,
                        const Index* __restrict__ rows, const Index* __restrict__ sizes,
                        const Index* __restrict__ offsets, Index* __restrict__ indices, long long m,
                        long long k, long long columns, long long a_entries, long long b_entries,
                        long long capacity, long long batches) {
  __shared__ PatternShared<kBlock, kWords> shared;
  for (Size batch = blockIdx.z; batch < batches; batch += gridDim.z) {
    const SparseRows a = {a_offsets + batch * (m + 1), a_indices + batch * a_entries};
    const SparseRows b = {b_offsets + batch * (k + 1), b_indices + batch * b_entries};
    EachRow<true>(
        a, b, rows + batch * m, sizes + batch * 4, columns, shared,
        [&](Size row) {
          const Size at = unsigned(offsets[batch * (m + 1) + row]);
          return RowColumns<true>{indices + batch * capacity, at, Size(capacity)};
        },
        [](Size, Size) {});
    __syncthreads();
  }
}

}  // namespace sgap
