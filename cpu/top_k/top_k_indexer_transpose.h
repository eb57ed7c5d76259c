// Keys that lie one after another, of 16 columns, to vectors of one feature each.
#pragma once

#include "cpu/top_k/top_k_indexer.h"

namespace sgap::SGAP_ISA {

// [lane / 2 of a, the same of b] and so on, from the lower or the upper half of each.
template <int kHalf, typename V, int... i>
inline V Alternate(V a, V b, std::integer_sequence<int, i...>) {
  constexpr int n = sizeof...(i);
  return Shuffle<(kHalf * n / 2 + i / 2 + i % 2 * n)...>(a, b);
}

// Vector i to the lanes i of all, by halves of what is left to exchange.
template <int N, typename V>
inline void Transpose(V* x) {
  constexpr auto kAll = std::make_integer_sequence<int, N>();
#pragma GCC unroll 4
  for (int round = 1; round < N; round *= 2) {
    V y[N];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      y[2 * i] = Alternate<0>(x[i], x[i + N / 2], kAll);
      y[2 * i + 1] = Alternate<1>(x[i], x[i + N / 2], kAll);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = y[i];
  }
}

// [a, b] or [c, d] of each four lanes of x = [a, b, c, d] and of y, kTogether lanes at a time.
template <int kHalf, int kTogether, int... i>
inline Vector<float, 16> MergeFours(Vector<float, 16> x, Vector<float, 16> y,
                                    std::integer_sequence<int, i...>) {
  return Shuffle<(i / kTogether % 2 * 16 + i / 4 * 4 + 2 * kHalf + i % 4 / (2 * kTogether) +
                  i % kTogether)...>(x, y);
}

// Eight elements from each of two places.
inline Vector<float, 16> LoadEights(const float* a, const float* b) {
#if defined(__AVX512F__)
  const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(a));
  return BitCast<Vector<float, 16>>(_mm512_insertf32x8(low, _mm256_loadu_ps(b), 1));
#else
  Vector<float, 16> x;
  std::memcpy(&x, a, 32), std::memcpy(reinterpret_cast<char*>(&x) + 32, b, 32);
  return x;
#endif
}

// Fours 0 and 2, or 1 and 3, of x and of y.
template <int kHalf, int... i>
inline Vector<float, 16> EachOtherFour(Vector<float, 16> x, Vector<float, 16> y,
                                       std::integer_sequence<int, i...>) {
  return Shuffle<(i / 8 * 16 + i % 8 / 4 * 8 + kHalf * 4 + i % 4)...>(x, y);
}

// Features d to d + 7 of the keys key(0) to key(15).
template <typename KeyOf>
inline void TransposeEights(KeyOf&& key, int64_t d, Vector<float, 16>* out) {
  constexpr auto kAll = std::make_integer_sequence<int, 16>();
  Vector<float, 16> x[8], y[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int first = i / 4 * 8 + i % 4;
    x[i] = LoadEights(key(first) + d, key(first + 4) + d);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const auto low = MergeFours<0, 1>(x[i], x[i + 1], kAll);
    const auto high = MergeFours<1, 1>(x[i], x[i + 1], kAll);
    const auto others = MergeFours<0, 1>(x[i + 2], x[i + 3], kAll);
    const auto high_others = MergeFours<1, 1>(x[i + 2], x[i + 3], kAll);
    y[i] = MergeFours<0, 2>(low, others, kAll), y[i + 1] = MergeFours<1, 2>(low, others, kAll);
    y[i + 2] = MergeFours<0, 2>(high, high_others, kAll);
    y[i + 3] = MergeFours<1, 2>(high, high_others, kAll);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = EachOtherFour<0>(y[i], y[i + 4], kAll);
    out[4 + i] = EachOtherFour<1>(y[i], y[i + 4], kAll);
  }
}

// Where the keys of some columns are, each of so many words. An address is computed where it is
// used: of those of a whole vector most would be in memory.
template <typename T>
inline auto KeysOfColumns(const T* keys, const int32_t* columns, int64_t words) {
  asm volatile("" : "+r"(columns));
  return [=](int j) { return reinterpret_cast<const float*>(keys) + columns[j] * words; };
}

}  // namespace sgap::SGAP_ISA
