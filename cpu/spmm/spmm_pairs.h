// The inner loops of spmm_kernel.cc in bfloat16 where the processor multiplies pairs
// (cpu/simd/pairs.h): two entries of a row at a time, whose rows of x are interleaved, an
// instruction for 16 columns. Nothing is widened:
//
//   y[r, c] += (values[p], values[p + 1]) . (x[indices[p], c], x[indices[p + 1], c])
#pragma once

#include "cpu/simd/pairs.h"
#include "cpu/spmm/spmm_rows.h"

namespace sgap::SGAP_ISA {

// Rows of A: sums of kVectors vectors of y in registers.
template <int kVectors, bool kTail>
struct PairedTile : Tile<BFloat16, BFloat16, 16, kVectors, kTail> {
  using Wide = Tile<BFloat16, BFloat16, 16, kVectors, kTail>;
  using typename Wide::Sum;
  using Block = RowBlock<BFloat16, BFloat16>;

  // The entries p and p + 1, or p alone, beside zeros.
  template <bool kBoth>
  static void Add(const Block& block, int64_t p, Sum* sums) {
    const auto row = [&](int64_t p) {
      return KeptPointer(block.x + size_t(block.indices[p]) * size_t(block.x_stride));
    };
    const auto values = Pairs{} + LoadPair(block.own_values + p, kBoth ? 2 : 1);
    Pairs x[kVectors];
    LoadPairs<kVectors, kTail, /*kInOrder=*/true>(row(p), kBoth ? row(p + 1) : kZeroRow, block.tail,
                                                  x);
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) sums[i] = DotPairs(sums[i], x[i], values);
  }

  template <Ahead kAhead>
  static void Run(const Block& shared) {
    const Block block = shared;  // a copy: stores cannot change it
    constexpr int kChains = kVectors <= 2 ? 4 : kVectors <= 4 ? 2 : 1;
    BFloat16* y = block.y;
    int64_t p = block.offsets[0];
    const auto add = [&](Sum* sums) __attribute__((always_inline)) {
      Wide::template PrefetchX<kAhead>(block, p, block.x_stride);
      Wide::template PrefetchX<kAhead>(block, p + 1, block.x_stride);
      Add<true>(block, p, sums);
      p += 2;
    };
    for (int64_t r = 0; r < block.rows; ++r, y += block.y_stride) {
      const int64_t end = block.offsets[r + 1];
      Sum sums[kVectors] = {};
      if (kChains > 1 && end - p >= 4 * kChains) {
        Sum chains[kChains][kVectors] = {};
        while (p + 2 * kChains <= end) {
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) add(chains[c]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) {
          sums[i] = chains[0][i];
#pragma GCC unroll 4
          for (int c = 1; c < kChains; ++c) sums[i] += chains[c][i];
        }
      }
      while (p + 2 <= end) add(sums);
      if (p < end) Add<false>(block, p++, sums);
      Wide::FinishInOrder(block, sums, y);
    }
  }
};

}  // namespace sgap::SGAP_ISA
