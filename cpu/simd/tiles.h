// Matrix tiles: eight registers of up to 16 rows of 64 bytes, and the product of two of them. The
// processor's own where it has them (Intel AMX), else in memory: with its dot products of bfloat16
// pairs (AVX512-BF16), else in vector arithmetic. All agree but for the rounding of sums.
//
//   C[i, j] += sum over p of A[i, 2p] B[p, 2j] + A[i, 2p + 1] B[p, 2j + 1]
//
// C: up to 16 x 16 float32; A: up to 16 rows of kTileDepth bfloat16; B: up to 16 rows, one for each
// pair of columns of A, in which the two values that a pair multiplies are next to each other. Or,
// with four signed bytes of A and of B in the place of each pair, 32-bit integers: exactly, modulo
// 2^32.
#pragma once

#include "cpu/simd/pairs.h"

namespace sgap::SGAP_ISA {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;
constexpr int kTileColumns = 16;

// Rows and bytes of a row of each register.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(int tile, int64_t of_rows, int64_t of_bytes) {
    rows[tile] = uint8_t(of_rows);
    bytes[tile] = uint16_t(of_bytes);
  }
};

#if defined(SGAP_AMX)

// The registers of this thread, for as long as the object lives: one at a time. The compiler knows
// nothing of them, so their instructions keep their order.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes) { Reshape(shapes); }
  Tiles(const Tiles&) = delete;
  ~Tiles() { asm volatile("tilerelease"); }

  // Gives the registers other shapes, and zeroes them: 45 ns.
  void Reshape(const TileShapes& shapes) {
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
  }

  template <int kTile>
  void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  void Load(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  void Store(void* rows, int64_t stride) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(rows), "r"(stride), "i"(kTile)
                 : "memory");
  }
  template <int kC, int kA, int kB>
  void Dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
  template <int kC, int kA, int kB>
  void DotBytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

#else

class Tiles {
  using Row = Vector<float, kTileColumns>;
  using Words = Vector<uint32_t, kTileColumns>;

 public:
  explicit Tiles(const TileShapes& shapes) : shapes_(shapes) {}
  Tiles(const Tiles&) = delete;

  void Reshape(const TileShapes& shapes) {
    shapes_ = shapes;
    std::memset(tiles_, 0, sizeof(tiles_));
  }

  template <int kTile>
  void Zero() {
    std::memset(tiles_[kTile], 0, sizeof(tiles_[kTile]));
  }
  template <int kTile>
  void Load(const void* rows, int64_t stride) {
    const char* row = static_cast<const char*>(rows);
    for (int i = 0; i < shapes_.rows[kTile]; ++i, row += stride) {
      std::memcpy(tiles_[kTile][i], row, shapes_.bytes[kTile]);
    }
  }
  template <int kTile>
  void Store(void* rows, int64_t stride) const {
    char* row = static_cast<char*>(rows);
    for (int i = 0; i < shapes_.rows[kTile]; ++i, row += stride) {
      std::memcpy(row, tiles_[kTile][i], shapes_.bytes[kTile]);
    }
  }
  template <int kC, int kA, int kB>
  void Dot() {
    int row = 0;
    for (; row + 8 <= shapes_.rows[kC]; row += 8) DotRows<kC, kA, kB, 8>(row);
    for (; row + 4 <= shapes_.rows[kC]; row += 4) DotRows<kC, kA, kB, 4>(row);
    for (; row < shapes_.rows[kC]; ++row) DotRows<kC, kA, kB, 1>(row);
  }
  template <int kC, int kA, int kB>
  void DotBytes() {
    for (int i = 0; i < shapes_.rows[kC]; ++i) {
      Words sum = BitCast<Words>(tiles_[kC][i]);
      for (int p = 0; p < shapes_.rows[kB]; ++p) {
        sum = DotFours(sum, Words{} + tiles_[kA][i][p], BitCast<Words>(tiles_[kB][p]));
      }
      std::memcpy(tiles_[kC][i], &sum, sizeof(Words));
    }
  }

 private:
  static Words DotFours(Words sum, Words a, Words b) {
    const auto byte = [](Words x, int bit) {
      return BitCast<Words>(BitCast<Vector<int32_t, kTileColumns>>(x << (24 - bit)) >> 24);
    };
    for (int bit = 0; bit < 32; bit += 8) sum += byte(a, bit) * byte(b, bit);
    return sum;
  }

  // kRows rows of C, in registers.
  template <int kC, int kA, int kB, int kRows>
  void DotRows(int first) {
    Row sums[kRows];
    for (int i = 0; i < kRows; ++i) sums[i] = BitCast<Row>(tiles_[kC][first + i]);
    for (int p = 0; p < shapes_.rows[kB]; ++p) {
      const Words b = BitCast<Words>(tiles_[kB][p]);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        sums[i] = DotPairs(sums[i], Words{} + tiles_[kA][first + i][p], b);
      }
    }
    for (int i = 0; i < kRows; ++i) std::memcpy(tiles_[kC][first + i], &sums[i], sizeof(Row));
  }

  TileShapes shapes_;
  alignas(64) uint32_t tiles_[8][kTileRows][kTileBytes / 4] = {};
};

#endif

// Rows x and y as two tile rows of pairs in the order of PairHalves.
inline void StorePairs(TileRow x, TileRow y, uint16_t* first, uint16_t* second) {
  constexpr auto kAll = std::make_integer_sequence<int, kTileDepth>();
  const TileRow pairs[2] = {PairHalves<0>(x, y, kAll), PairHalves<1>(x, y, kAll)};
  std::memcpy(first, &pairs[0], sizeof(TileRow));
  std::memcpy(second, &pairs[1], sizeof(TileRow));
}

// The same with the columns in order.
inline void StorePairsInOrder(TileRow x, TileRow y, uint16_t* first, uint16_t* second) {
  constexpr auto kAll = std::make_integer_sequence<int, kTileDepth>();
  const TileRow pairs[2] = {PairsInOrder<0>(x, y, kAll), PairsInOrder<1>(x, y, kAll)};
  std::memcpy(first, &pairs[0], sizeof(TileRow));
  std::memcpy(second, &pairs[1], sizeof(TileRow));
}

// Lane i: x[i] and, in the high half, y[i] as bfloat16.
template <int... i>
inline Vector<uint32_t, 16> NarrowPairs(Vector<float, 16> x, Vector<float, 16> y,
                                        std::integer_sequence<int, i...>) {
#if defined(__AVX512BF16__)
  const auto halves = BitCast<TileRow>(_mm512_cvtne2ps_pbh(BitCast<__m512>(y), BitCast<__m512>(x)));
  return BitCast<Vector<uint32_t, 16>>(Shuffle<(i / 2 + i % 2 * 16)...>(halves, halves));
#else
  return (RoundToBFloat16<16>(x) >> 16) | (RoundToBFloat16<16>(y) & 0xffff0000u);
#endif
}

inline Vector<uint32_t, 16> NarrowPairs(Vector<float, 16> x, Vector<float, 16> y) {
  return NarrowPairs(x, y, std::make_integer_sequence<int, kTileDepth>());
}

// The words of kCount rows of 16, one after the other, seen as [16, kCount]: transposed.
template <int kCount, int kRounds, int... i>
inline void TransposeWords(Vector<uint32_t, 16>* rows, std::integer_sequence<int, i...> lanes) {
  // A perfect shuffle, backwards, moves the lowest bit of a word's position to the highest.
  if constexpr (kRounds > 1) {
    Vector<uint32_t, 16> next[kCount];
#pragma GCC unroll 8
    for (int j = 0; j < kCount / 2; ++j) {
      next[j] = Shuffle<(2 * i)...>(rows[2 * j], rows[2 * j + 1]);
      next[j + kCount / 2] = Shuffle<(2 * i + 1)...>(rows[2 * j], rows[2 * j + 1]);
    }
    for (int j = 0; j < kCount; ++j) rows[j] = next[j];
    TransposeWords<kCount, kRounds / 2>(rows, lanes);
  }
}

template <int kCount>
inline void TransposeWords(Vector<uint32_t, 16>* rows) {
  TransposeWords<kCount, kCount>(rows, std::make_integer_sequence<int, 16>());
}

// Stores the row of a panel's two tiles as kTileDepth values of T.
template <typename T>
inline void StoreWholePanel(const float* first, const float* second, T* target) {
  constexpr auto kAll = std::make_integer_sequence<int, 16>();
  const auto a = SGAP_ISA::Load<float, 16>(first), b = SGAP_ISA::Load<float, 16>(second);
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {  // four rounded values are one word, moved at once
    using Words = Vector<uint64_t, 8>;
    const auto words = BitCast<Words>(_mm512_cvtne2ps_pbh(BitCast<__m512>(b), BitCast<__m512>(a)));
    const Words row = Shuffle<0, 4, 1, 5, 2, 6, 3, 7>(words, words);
    std::memcpy(target, &row, sizeof(row));
    return;
  }
#endif
  StoreTwo<T>(target, PanelColumns<0>(a, b, kAll), PanelColumns<1>(a, b, kAll));
}

// Stores the row of a panel's two tiles as `count` values of T.
template <typename T>
inline void StorePanel(const float* first, const float* second, int count, T* target) {
  if (count == kTileDepth) return StoreWholePanel<T>(first, second, target);
  constexpr auto kAll = std::make_integer_sequence<int, 16>();
  const auto a = SGAP_ISA::Load<float, 16>(first), b = SGAP_ISA::Load<float, 16>(second);
  const auto low = PanelColumns<0>(a, b, kAll), high = PanelColumns<1>(a, b, kAll);
  if (count >= 16) {
    SGAP_ISA::Store<T, 16>(target, low);
    if (count > 16) StorePartial<T, 16>(target + 16, high, count - 16);
  } else {
    StorePartial<T, 16>(target, low, count);
  }
}

// Four rows of 16 words each to 16 rows of 4 words, `stride` words apart.
inline void TransposeFour(const TileRow* rows, uint32_t* target, int64_t stride) {
  using Four = Vector<uint32_t, 4>;
  for (int part = 0; part < 4; ++part) {
    Four words[4];
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&words[i], reinterpret_cast<const char*>(rows + i) + part * 16, sizeof(Four));
    }
    const Four low[2] = {Shuffle<0, 4, 1, 5>(words[0], words[2]),
                         Shuffle<0, 4, 1, 5>(words[1], words[3])};
    const Four high[2] = {Shuffle<2, 6, 3, 7>(words[0], words[2]),
                          Shuffle<2, 6, 3, 7>(words[1], words[3])};
    const Four out[4] = {Shuffle<0, 4, 1, 5>(low[0], low[1]), Shuffle<2, 6, 3, 7>(low[0], low[1]),
                         Shuffle<0, 4, 1, 5>(high[0], high[1]),
                         Shuffle<2, 6, 3, 7>(high[0], high[1])};
    for (int i = 0; i < 4; ++i)
      std::memcpy(target + (part * 4 + i) * stride, &out[i], sizeof(Four));
  }
}

}  // namespace sgap::SGAP_ISA
