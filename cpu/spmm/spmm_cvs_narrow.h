// SpMM with column vectors on few columns, which would leave most lanes of a vector empty: the V
// rows of a vector are the lanes instead.
#pragma once

#include "cpu/simd/lane_sums.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {

// Up to how many columns a lane for each row takes fewer multiply-adds than one for each column.
constexpr int64_t kNarrowColumns = 4;

// y = A x: kColumns columns, kRows rows of each vector in the lanes.
template <typename T, int kRows, int kColumns>
struct LaneTile {
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, kRows>;

  static void Add(const VectorBlock<T>& block, int64_t p, Sum* sums) {
    const Sum value = Load<T, kRows>(block.values + p * block.length);
    const T* x = block.x + size_t(block.indices[p]) * size_t(block.x_stride);
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sums[c] += value * LoadScalar(x + c);
  }

  template <typename Out>
  static void StoreColumns(const VectorBlock<T>& block, const Sum* sums, Out* out) {
    if (kColumns == 1 && block.out_stride == 1 && block.rows >= kRows) {
      return Store<Out, kRows>(out, sums[0]);
    }
    for (int v = 0; v < kRows && v < block.rows; ++v, out += block.out_stride) {
      for (int c = 0; c < kColumns; ++c) StoreScalar<Out>(out + c, sums[c][v]);
    }
  }

  static void Run(const VectorBlock<T>& shared) {
    const VectorBlock<T> block = shared;
    constexpr int kChains = kSumsInFlight / kColumns > 4 ? 4 : kSumsInFlight / kColumns;
    Sum sums[kChains][kColumns] = {};
    int64_t p = block.begin;
    for (; p + kChains <= block.end; p += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) Add(block, p + c, sums[c]);
    }
    for (; p < block.end; ++p) Add(block, p, sums[0]);
    for (int chain = 1; chain < kChains; ++chain) {
      for (int c = 0; c < kColumns; ++c) sums[0][c] += sums[chain][c];
    }
    if (block.y) {
      StoreColumns(block, sums[0], block.y);
    } else {
      StoreColumns(block, sums[0], block.sums);
    }
  }
};

// y = A^T x on the only column of x: a vector and its rows of x are both contiguous. V is a
// multiple of kRows.
template <typename T, int kRows>
struct DotTile {
  using Acc = Accumulator<T>;
  using Sum = Vector<Acc, kRows>;

  static void Add(const VectorBlock<T>& block, int64_t p, Sum* sum, Acc* rest) {
    const int64_t first = block.indices[p] * block.length, left = block.x_rows - first;
    const T* x = block.x + first;
    const T* values = block.values + size_t(block.permutation[p]) * size_t(block.length);
    if (left < block.length) {  // the last block row is short
      for (int64_t v = 0; v < left; ++v) *rest += LoadScalar(values + v) * LoadScalar(x + v);
      return;
    }
    for (int64_t v = 0; v < block.length; v += kRows) {
      *sum += Load<T, kRows>(values + v) * Load<T, kRows>(x + v);
    }
  }

  static void Run(const VectorBlock<T>& shared) {
    const VectorBlock<T> block = shared;
    Sum sums[4] = {};
    Acc rest = 0;
    int64_t p = block.begin;
    for (; p + 4 <= block.end; p += 4) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) Add(block, p + c, sums + c, &rest);
    }
    for (; p < block.end; ++p) Add(block, p, sums, &rest);
    const auto four = FoldLanes<4, Acc, kRows>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    const Acc total = ((four[0] + four[2]) + (four[1] + four[3])) + rest;
    if (block.y) {
      StoreScalar(block.y, total);
    } else {
      *block.sums = total;
    }
  }
};

}  // namespace sgap::SGAP_ISA
