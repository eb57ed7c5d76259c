// The dense products of attention: a few rows against many keys, with the rows in registers.
#pragma once

#include "cpu/simd/exp.h"
#include "cpu/simd/gather.h"
#include "cpu/simd/lane_sums.h"

namespace sgap::SGAP_ISA {

// kRows rows, a power of two up to the lanes of a vector, against keys in blocks.
//
// A vector of scores has kPart = lanes / kRows keys: lane r * kPart + p belongs to row r and key p.
// To compute it without sums across lanes at each key, the rows lie interleaved: step s of `left`
// has kPart values of each row, which meet the same values of the key in every row's lanes.
template <typename Acc, int kRows>
struct AttentionTile {
  static constexpr int kSize = kLanes<Acc>, kPart = kSize / kRows;
  static constexpr bool kMany = kVectorBytes == 64;                           // 32 registers
  static constexpr int kTogether = kMany ? 16 : 8;                            // keys
  static constexpr int kFew = kTogether / 2 > kPart ? kTogether / 2 : kPart;  // of the last ones
  static constexpr int kTile = kRows >= 16                    ? 1
                               : (kMany ? 16 : 8) / kRows < 4 ? (kMany ? 16 : 8) / kRows
                                                              : 4;
  // A value that is loaded serves two vectors: with one there would be a load for each product.
  static constexpr int kRowsTogether = kRows >= 16 ? kRows / 2 : kRows;
  // Columns of a pass over keys: of one row, each adds to its own sum, of which eight hide the time
  // that a multiply-add takes.
  static constexpr int kKeyColumns = !kMany && kRows == 1 ? 8 : kRows / kRowsTogether * kTile;
  static constexpr int kAhead = 10;  // how many keys ahead of its loads a pass prefetches
  using V = Vector<Acc, kSize>;

  // Where the score of a key in a row is.
  static int At(int key, int row) { return key / kPart * kSize + row * kPart + key % kPart; }

  // rows [kRows, depth], `stride` apart -> left [depth / kPart, kSize]: parts of kPart values,
  // transposed.
  static void Interleave(const Acc* rows, int64_t stride, int64_t depth, Acc* left) {
    for (int64_t d = 0; d < depth; d += kSize) {
      V x[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) x[r] = Load<Acc, kSize>(rows + r * stride + d);
      ExchangeParts<kRows / 2>(x);
#pragma GCC unroll 16
      for (int s = 0; s < kRows; ++s) Store<Acc, kSize>(left + d * kRows + s * kSize, x[s]);
    }
  }

  // Part p of x[r] and part r of x[p] change places.
  template <int kDistance>
  static void ExchangeParts(V* x) {
    if constexpr (kDistance > 0) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if (r & kDistance) continue;
        const V a = x[r], b = x[r + kDistance];
        x[r] = Parts<kDistance, 0>(a, b, std::make_integer_sequence<int, kSize>());
        x[r + kDistance] =
            Parts<kDistance, kDistance>(a, b, std::make_integer_sequence<int, kSize>());
      }
      ExchangeParts<kDistance / 2>(x);
    }
  }

  // The parts of a and b whose number has the bit kDistance as kBit has it, those of b in the
  // places with that bit.
  template <int kDistance, int kBit, int... i>
  static V Parts(V a, V b, std::integer_sequence<int, i...>) {
    constexpr int kStep = kDistance * kPart;
    return Shuffle<(((i & kStep) ? kSize : 0) + ((i & ~kStep) | (kBit ? kStep : 0)))...>(a, b);
  }

  // kPart values in the lanes of every row.
  static V Repeated(const Acc* values) {
    if constexpr (!kMany && kPart == 1) {
      return *values - V{};
    } else if constexpr (!kMany && kPart < kSize && kPart * sizeof(Acc) == 8) {
      int64_t pair;
      __builtin_memcpy(&pair, values, sizeof(pair));
      return BitCast<V>(Vector<int64_t, kVectorBytes / 8>{} + pair);
    } else if constexpr (!kMany && 2 * kPart == kSize) {
      const auto half = Load<Acc, kPart>(values);
      return Concat<Acc, kPart>(half, half);
    } else {
      return LoadRepeated<Acc, kSize, kPart>(values);
    }
  }

  // scores = rows . keys for kKeys keys, of which `keys(j)` points to the j-th.
  template <int kKeys, typename Keys>
  static void Dots(const Acc* left, int64_t depth, Keys keys, Acc* scores) {
    V sums[kKeys] = {};
    constexpr int kSteps = kMany || kRows == 1 ? 4 : 2;
    const int64_t steps = depth / kPart;
    int64_t s = 0;
    for (; s + kSteps <= steps; s += kSteps) {
      V rows[kSteps];
#pragma GCC unroll 4
      for (int u = 0; u < kSteps; ++u) rows[u] = Load<Acc, kSize>(left + (s + u) * kSize);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        const Acc* key = keys(j) + s * kPart;
#pragma GCC unroll 4
        for (int u = 0; u < kSteps; ++u) {
          sums[j] += rows[u] * Repeated(key + u * kPart);
        }
      }
    }
    for (; s < steps; ++s) {
      const V rows = Load<Acc, kSize>(left + s * kSize);
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) {
        sums[j] += rows * Repeated(keys(j) + s * kPart);
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < kKeys / kPart; ++t) {
      if constexpr (kPart == 1) {
        Store<Acc, kSize>(scores + t * kSize, sums[t]);
      } else {
        Store<Acc, kSize>(scores + t * kSize, SumTransposed<kPart / 2>(sums + t * kPart));
      }
    }
  }

  // Prefetches the columns of one key.
  template <int kColumns>
  static void PrefetchColumns(const Acc* columns) {
    constexpr int kStep = kVectorBytes == 32 && kColumns > 1 ? 2 : 1;  // to the next line
    for (int c = 0; c < kColumns; c += kStep) Prefetch(columns + c * kSize);
  }

  // target[r, at ..] += sum over keys of weights(key, r) * keys[key][at ..], kColumns vectors, for
  // kTogetherRows rows from `first` on.
  template <int kColumns>
  static void AddKeysAt(const Acc* weights, const Acc* const* keys, int count, int64_t at,
                        int first, Acc* target, int64_t stride) {
    target += first * stride + at;
    V sums[kRowsTogether][kColumns];
    for (int r = 0; r < kRowsTogether; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        sums[r][c] = Load<Acc, kSize>(target + r * stride + c * kSize);
      }
    }
    for (int j = 0; j < count; ++j) {
      const Acc* key = keys[j] + at;
      const Acc* weight = weights + At(j, first);
      if (j + kAhead < count) PrefetchColumns<kColumns>(keys[j + kAhead] + at);
      V x[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) x[c] = Load<Acc, kSize>(key + c * kSize);
#pragma GCC unroll 16
      for (int r = 0; r < kRowsTogether; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) sums[r][c] += x[c] * weight[r * kPart];
      }
    }
    for (int r = 0; r < kRowsTogether; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        Store<Acc, kSize>(target + r * stride + c * kSize, sums[r][c]);
      }
    }
  }

  static void AddKeys(const Acc* weights, const Acc* const* keys, int count, int64_t depth,
                      Acc* target, int64_t stride) {
    constexpr int kColumns = kKeyColumns;
    for (int first = 0; first < kRows; first += kRowsTogether) {
      int64_t at = 0;
      for (; at + kColumns * kSize <= depth; at += kColumns * kSize) {
        AddKeysAt<kColumns>(weights, keys, count, at, first, target, stride);
      }
      for (; at < depth; at += kSize) AddKeysAt<1>(weights, keys, count, at, first, target, stride);
    }
  }

  // keys[key][at ..] += sum over r of weights(key, r) * rows[r, at ..], kColumns vectors.
  template <int kColumns>
  static void AddRowsAt(const Acc* weights, Acc* const* keys, int count, int64_t at,
                        const Acc* rows, int64_t stride) {
    V x[kRows][kColumns];
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        x[r][c] = Load<Acc, kSize>(rows + r * stride + at + c * kSize);
      }
    }
    for (int j = 0; j < count; ++j) {
      Acc* key = keys[j] + at;
      const Acc* weight = weights + At(j, 0);
      if (j + kAhead < count) PrefetchColumns<kColumns>(keys[j + kAhead] + at);
      V sums[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[c] = Load<Acc, kSize>(key + c * kSize);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sums[c] += x[r][c] * weight[r * kPart];
      }
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) Store<Acc, kSize>(key + c * kSize, sums[c]);
    }
  }

  static void AddRows(const Acc* weights, Acc* const* keys, int count, int64_t depth,
                      const Acc* rows, int64_t stride) {
    int64_t at = 0;
    for (; at + kTile * kSize <= depth; at += kTile * kSize) {
      AddRowsAt<kTile>(weights, keys, count, at, rows, stride);
    }
    for (; at < depth; at += kSize) AddRowsAt<1>(weights, keys, count, at, rows, stride);
  }

  // In every lane the maximum of its row's lanes, NaN ignored.
  static V GreatestOfRow(V x) { return GreatestWithin<kPart / 2>(x); }

  template <int kDistance>
  static V GreatestWithin(V x) {
    if constexpr (kDistance == 0) {
      return x;
    } else {
      const V partner = Partners<kDistance>(x, std::make_integer_sequence<int, kSize>());
      return GreatestWithin<kDistance / 2>(partner > x ? partner : x);
    }
  }

  template <int kDistance, int... i>
  static V Partners(V x, std::integer_sequence<int, i...>) {
    return Shuffle<(i ^ kDistance)...>(x, x);
  }

  // One value per row, in all of that row's lanes; `values` has kSize elements.
  static V OfRows(const Acc* values) {
    return OfRows(Load<Acc, kSize>(values), std::make_integer_sequence<int, kSize>());
  }

  template <int... i>
  static V OfRows(V values, std::integer_sequence<int, i...>) {
    return Shuffle<(i / kPart)...>(values, values);
  }
};

}  // namespace sgap::SGAP_ISA
