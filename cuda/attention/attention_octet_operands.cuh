// The gathered operands of attention in octet tiles, as fragments of an mma: attention_octet.cuh
// has the layout.
#pragma once

#include "mma.cuh"

namespace sgap {

// A size clamped to 2^31, above every index, so that comparisons have 32 bits.
__device__ inline unsigned Indices(Size size) {
  return size < 1u << 31 ? unsigned(size) : 1u << 31;
}

// The columns of sixteen vectors of a block row: each lane looks up one, and shuffles give it the
// columns whose rows of k or v it loads; -1 where there is no vector.
struct OctetColumns {
  Index found;

  __device__ void Find(const Index* column_indices, unsigned p, unsigned last, unsigned end) {
    p += threadIdx.x % 16;
    found = p < last ? column_indices[p] : -1;
    found = unsigned(found) < end ? found : -1;
  }
  __device__ bool All() const { return __all_sync(~0u, found >= 0); }
  __device__ void Own(unsigned g, Index (&own)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = __shfl_sync(~0u, found, g / 2 * 4 + g % 2 + 2 * i);
  }
  __device__ void Quad(unsigned t, Index (&quad)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) quad[i] = __shfl_sync(~0u, found, 4 * t + i);
  }
};

// Loads 8 values of each kSpan, from value `first` on, of the rows that `columns` name: 16 bytes a
// lane. Rows are `bytes` apart. With kAll every row exists; otherwise absent rows give zeros.
template <bool kVector, bool kAll, int kSpan, class T, int kRows, int kSteps>
__device__ inline void LoadRowsOf(const T* rows, unsigned bytes, const Index (&columns)[kRows],
                                  unsigned depth, unsigned first,
                                  Pack<unsigned, 4> (&words)[kRows][kSteps]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const T* row = RowAt(rows + first, columns[i], bytes);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const unsigned at = s * kSpan + first;
      const bool exists = (kAll || columns[i] >= 0) && at < depth;
      words[i][s] = LoadWords<kVector, 4>(row + s * kSpan, exists ? depth - at : 0);
    }
  }
}

// As LoadRowsOf; `all`: no column of the warp is -1, which is so in most steps.
template <bool kVector, int kSpan, class T, int kRows, int kSteps>
__device__ inline void LoadRows(const T* rows, unsigned bytes, const Index (&columns)[kRows],
                                bool all, unsigned depth, unsigned first,
                                Pack<unsigned, 4> (&words)[kRows][kSteps]) {
  if (all) {
    LoadRowsOf<kVector, true, kSpan>(rows, bytes, columns, depth, first, words);
  } else {
    LoadRowsOf<kVector, false, kSpan>(rows, bytes, columns, depth, first, words);
  }
}

// Loads features 8t to 8t + 7 of each 32 of one row: together with the other lanes a B operand, of
// which this row is column g. Zeros where the row does not exist.
template <bool kVector, class T, int kSteps>
__device__ inline void LoadOwn(const T* row, bool exists, unsigned depth, unsigned t,
                               Pack<unsigned, 4> (&words)[kSteps]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const unsigned at = s * 32 + t * 8;
    words[s] = LoadWords<kVector, 4>(row + at, exists && at < depth ? depth - at : 0);
  }
}

// Rows of k (or v) as the A operand of S^T: features 8t to 8t + 7 of each 32, for two vectors.
template <class T, int kSteps, bool kVector>
struct KeyFragments {
  Pack<unsigned, 4> words[2][kSteps];

  __device__ void Load(const T* rows, unsigned bytes, const Index (&columns)[2], bool all,
                       unsigned depth, unsigned t) {
    LoadRows<kVector, 32>(rows, bytes, columns, all, depth, 8 * t, words);
  }
  // Loads the first row where a column is -1: for products whose results are dropped.
  __device__ void LoadAny(const T* rows, unsigned bytes, const Index (&columns)[2], unsigned depth,
                          unsigned t) {
    const Index some[2] = {columns[0] < 0 ? 0 : columns[0], columns[1] < 0 ? 0 : columns[1]};
    Load(rows, bytes, some, true, depth, t);
  }
  // sums += these rows times the rows of q in `query`
  __device__ void Multiply(const Pack<unsigned, 4> (&query)[kSteps], float (&sums)[4]) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned a[4] = {words[0][s].at[2 * j], words[1][s].at[2 * j],
                               words[0][s].at[2 * j + 1], words[1][s].at[2 * j + 1]};
        const unsigned b[2] = {query[s].at[2 * j], query[s].at[2 * j + 1]};
        MultiplyAdd<T>(a, b, sums);
      }
    }
  }
};

// Rows of v as the A operand of O^T: columns 8g to 8g + 7 of each 64, for four vectors.
template <class T, int kPanels, bool kVector>
struct ValueFragments {
  Pack<unsigned, 4> words[4][kPanels];

  __device__ void Load(const T* rows, unsigned bytes, const Index (&columns)[4], bool all,
                       unsigned depth, unsigned g) {
    LoadRows<kVector, 64>(rows, bytes, columns, all, depth, 8 * g, words);
  }
  // sums[4 * panel + pair] += columns 2 * pair and 2 * pair + 1 of the lane times p
  __device__ void Multiply(const unsigned (&p)[2], float (&sums)[4 * kPanels][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kPanels; ++i) {
      unsigned a[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned x = words[2 * j][i / 4].at[i % 4], y = words[2 * j + 1][i / 4].at[i % 4];
        a[2 * j] = PackLow(x, y);
        a[2 * j + 1] = PackHigh(x, y);
      }
      MultiplyAdd<T>(a, p, sums[i]);
    }
  }
};

}  // namespace sgap
