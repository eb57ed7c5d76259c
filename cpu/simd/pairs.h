// Products of bfloat16 in pairs: one dot instruction (DotPairs) multiplies the two values of a pair
// in each of 16 lanes and adds both products to a float32 sum. Pairs are two neighbours of a row,
// or the values of two rows in one column; the instruction reads subnormal numbers as zero.
#pragma once

#include "cpu/simd/lane_sums.h"

namespace sgap::SGAP_ISA {

// Whether the kernels multiply values of T in pairs: where that takes one instruction.
#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kInPairs = std::is_same_v<T, BFloat16>;
#else
template <typename T>
constexpr bool kInPairs = false;
#endif

// What rounds sums in integer steps elsewhere is one instruction there. Like the dot products it
// reads subnormal numbers as zero.
#if defined(__AVX512BF16__)
template <>
inline Vector<uint16_t, 16> Narrow<BFloat16, 16>(Vector<float, 16> x) {
  return BitCast<Vector<uint16_t, 16>>(_mm512_cvtneps_pbh(BitCast<__m512>(x)));
}
template <>
inline Vector<uint16_t, 4> Narrow<BFloat16, 4>(Vector<float, 4> x) {
  const auto bits = BitCast<Vector<uint16_t, 8>>(_mm_cvtneps_pbh(BitCast<__m128>(x)));
  return Half<uint16_t, 8>(bits, 0);
}
template <>
inline Vector<uint16_t, 8> Narrow<BFloat16, 8>(Vector<float, 8> x) {
  return BitCast<Vector<uint16_t, 8>>(_mm256_cvtneps_pbh(BitCast<__m256>(x)));
}
#endif

using Pairs = Vector<uint32_t, 16>;

// A row of a matrix tile, or a panel of columns.
constexpr int kTileDepth = 32;
using TileRow = Vector<uint16_t, kTileDepth>;

// `count` values of a row as bits, up to kTileDepth; the rest is zero and is not read. With kPart
// fewer than all, which saves a branch.
template <bool kPart = false>
inline TileRow LoadTileRow(const BFloat16* source, int count) {
  if (kPart && count >= kTileDepth) __builtin_unreachable();
  return LoadBits<kTileDepth>(reinterpret_cast<const uint16_t*>(source), count);
}
inline TileRow LoadTileRow(const BFloat16* source) {
  TileRow row;
  std::memcpy(&row, source, sizeof(row));
  return row;
}

// Pairs (x[j], y[j]) of the columns of two rows: those of the first and of the second half of each
// 16 bytes, which the processor interleaves in one instruction. PanelColumns puts sums in order.
template <int kHalf, int... i>
inline TileRow PairHalves(TileRow x, TileRow y, std::integer_sequence<int, i...>) {
#if defined(__AVX512F__)
  return Shuffle<(i / 8 * 8 + kHalf * 4 + i % 8 / 2 + i % 2 * kTileDepth)...>(x, y);
#else  // 16 bytes at a time: else the compiler moves value by value
  using Eight = Vector<uint16_t, 8>;
  constexpr int kAt = kHalf * 4;
  TileRow pairs;
  for (int part = 0; part < kTileDepth; part += 8) {
    Eight a, b;
    std::memcpy(&a, reinterpret_cast<const uint16_t*>(&x) + part, sizeof(a));
    std::memcpy(&b, reinterpret_cast<const uint16_t*>(&y) + part, sizeof(b));
    const Eight both =
        Shuffle<kAt, kAt + 8, kAt + 1, kAt + 9, kAt + 2, kAt + 10, kAt + 3, kAt + 11>(a, b);
    std::memcpy(reinterpret_cast<uint16_t*>(&pairs) + part, &both, sizeof(both));
  }
  return pairs;
#endif
}

// The same with the columns in order: pairs of columns 0 .. 15 and 16 .. 31.
template <int kHalf, int... i>
inline TileRow PairsInOrder(TileRow x, TileRow y, std::integer_sequence<int, i...>) {
  return Shuffle<(kHalf * 16 + i / 2 + i % 2 * kTileDepth)...>(x, y);
}

// Columns 0 .. 15 (kHalf = 0) or 16 .. 31 of the sums of a panel, which were added up for the pairs
// of PairHalves.
template <int kHalf, int... i>
inline Vector<float, 16> PanelColumns(Vector<float, 16> first, Vector<float, 16> second,
                                      std::integer_sequence<int, i...>) {
  return Shuffle<(kHalf * 8 + i / 8 * 4 + i % 4 + (i / 4 % 2) * 16)...>(first, second);
}

// Rows of zeros, the partner of a row that has none.
alignas(64) inline constexpr BFloat16 kZeroRow[16 * 16] = {};

// Two rows of kVectors vectors of 16 columns as pairs, with kInOrder one vector after the other,
// else as PairHalves (of one vector both are the same). With kTail the last vector has `tail`.
template <int kVectors, bool kTail, bool kInOrder>
[[gnu::always_inline]] inline void LoadPairs(const BFloat16* x, const BFloat16* y, int tail,
                                             Pairs* pairs) {
  constexpr auto kAll = std::make_integer_sequence<int, kTileDepth>();
  const int last = (kVectors % 2 == 0 ? 16 : 0) + (kTail ? tail : 16);
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; i += 2) {
    const bool whole = i + 2 < kVectors || (kVectors % 2 == 0 && !kTail);
    const auto load = [&](const BFloat16* row) __attribute__((always_inline)) {
      return whole ? LoadTileRow(row + 16 * i) : LoadTileRow<true>(row + 16 * i, last);
    };
    const TileRow a = load(x), b = load(y);
    if constexpr (kVectors == 1) {
      pairs[0] = BitCast<Pairs>(PairsInOrder<0>(a, b, kAll));
    } else if constexpr (kInOrder) {
      pairs[i] = BitCast<Pairs>(PairsInOrder<0>(a, b, kAll));
      if (i + 1 < kVectors) pairs[i + 1] = BitCast<Pairs>(PairsInOrder<1>(a, b, kAll));
    } else {
      pairs[i] = BitCast<Pairs>(PairHalves<0>(a, b, kAll));
      pairs[i + 1] = BitCast<Pairs>(PairHalves<1>(a, b, kAll));
    }
  }
}

// Puts sums of the pairs that LoadPairs had not in order there.
template <int kVectors>
inline void PanelsInOrder(Vector<float, 16>* sums) {
  constexpr auto kAll = std::make_integer_sequence<int, 16>();
#pragma GCC unroll 4
  for (int i = 0; i + 1 < kVectors; i += 2) {
    const auto first = sums[i], second = sums[i + 1];
    sums[i] = PanelColumns<0>(first, second, kAll);
    sums[i + 1] = PanelColumns<1>(first, second, kAll);
  }
}

// kRows values of 32 / kRows vectors that follow each other, as they lie and with those of vectors
// 2 q and 2 q + 1 in pairs.
template <int kRows, int... i>
inline TileRow PairVectors(TileRow x, std::integer_sequence<int, i...>) {
  return Shuffle<(i / (2 * kRows) * 2 * kRows + i % 2 * kRows + i / 2 % kRows)...>(x, x);
}

// kRows (1, 2, 4 or 8) values of two vectors as kRows pairs.
template <int kRows>
inline void PairTwo(const BFloat16* x, const BFloat16* y, uint32_t* pairs) {
  using Eight = Vector<uint16_t, 8>;
  Eight a = {}, b = {};
  std::memcpy(&a, x, kRows * sizeof(*x));
  std::memcpy(&b, y, kRows * sizeof(*y));
  const Eight low = Shuffle<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
  std::memcpy(pairs, &low, (kRows < 4 ? kRows : 4) * sizeof(*pairs));
  if constexpr (kRows == 8) {
    const Eight high = Shuffle<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
    std::memcpy(pairs + 4, &high, sizeof(high));
  }
}

// kRows values of each of `count` vectors, which are `length` apart, in pairs of two vectors:
// pairs[q * kRows + v] has values v of vectors 2 q and 2 q + 1, zero for one that is not there. As
// many as fill whole registers may be written.
template <int kRows>
inline void PairValues(const BFloat16* values, int64_t length, int64_t count, uint32_t* pairs) {
  if (length == kRows) {
    const int64_t all = count * kRows;
    for (int64_t i = 0; i < all; i += kTileDepth) {
      const TileRow row = all - i >= kTileDepth ? LoadTileRow(values + i)
                                                : LoadTileRow<true>(values + i, int(all - i));
      const TileRow paired = PairVectors<kRows>(row, std::make_integer_sequence<int, kTileDepth>());
      std::memcpy(pairs + i / 2, &paired, sizeof(paired));
    }
    return;
  }
  int64_t i = 0;
  for (; i + 2 <= count; i += 2, values += 2 * length, pairs += kRows) {
    PairTwo<kRows>(values, values + length, pairs);
  }
  if (i < count) PairTwo<kRows>(values, kZeroRow, pairs);
}

// Two values that follow each other as a pair, or one beside zero.
inline uint32_t LoadPair(const BFloat16* values, int64_t count) {
  if (count == 1) return values->bits;
  uint32_t pair;
  std::memcpy(&pair, values, sizeof(pair));
  return pair;
}

// kCount values that follow each other, pair by pair.
template <int kCount>
struct NeighbourPairs {
  const BFloat16* at;
  explicit NeighbourPairs(const BFloat16* values) : at(values) {}
  uint32_t operator[](int pair) const { return LoadPair(at + 2 * pair, kCount - 2 * pair); }
};

// Calls body(TypeTag<T>()) as DispatchDtype, or where this instruction set only adds products in
// pairs to the kernels of another one, for bfloat16: the table sends all else to the other's.
template <typename Body>
inline void DispatchOwnDtype([[maybe_unused]] Dtype dtype, Body&& body) {
#if defined(SGAP_BASE_ISA)
  body(TypeTag<BFloat16>());
#else
  DispatchDtype(dtype, body);
#endif
}

}  // namespace sgap::SGAP_ISA
