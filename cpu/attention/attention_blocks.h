// Attention in blocks of keys that each query, or a few queries together, chose: BCSR(r, c) with
// few rows r. Row by row every row would load the keys of its blocks again. Here a task takes block
// after block, and against a block up to 64 of the rows that see it, wherever they lie. What is
// known of a row is kept in memory from one block to the next; a row meets its blocks in ascending
// order.
//
// A product has numbers of four rows, each repeated in the lanes of a register, and vectors of a
// panel, which is made once for a block and fits into the cache: of the keys transposed for scores,
// of the values for the sums of a row. So rows are used where they lie, but for the sums of keys in
// the backward pass, whose vectors are those of the rows: it gathers them.
#pragma once

#include "cpu/attention/attention_groups.h"

namespace sgap::SGAP_ISA {

inline int64_t Lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The keys before this one exist and are not padding.
inline int64_t KnownKeys(const AttentionProblem& args, int64_t batch) {
  const int64_t length = args.lengths ? args.lengths[batch * args.lengths_stride] : args.keys;
  return Lesser(length, args.keys);
}

// How many rows are taken together where they are gathered: a block row at least.
static_assert(kMostRowNumbers >= kMostBlockRows * kMostBlockDepth);
inline int MostRowsTogether(const AttentionProblem& args) {
  const int64_t depth =
      args.padded_depth > args.padded_value_depth ? args.padded_depth : args.padded_value_depth;
  return int(Lesser(kMostRowNumbers / (depth > 0 ? depth : 1), kMostGroupedRows));
}

// The block rows that see a block of keys, ascending.
struct SeeingRows {
  const int32_t *begin, *end;

  // Those of block rows [first, last).
  SeeingRows(const KeyBlocks& blocks, int64_t block, int64_t first, int64_t last)
      : begin(blocks.rows + blocks.offsets[block]), end(blocks.rows + blocks.offsets[block + 1]) {
    begin = LowerBound(begin, end, first);
    end = LowerBound(begin, end, last);
  }

  static const int32_t* LowerBound(const int32_t* low, const int32_t* high, int64_t least) {
    while (low < high) {
      const int32_t* middle = low + (high - low) / 2;
      *middle < least ? low = middle + 1 : high = middle;
    }
    return low;
  }
};

// Rows of numbers: those that `at` names, or the first ones.
template <typename Acc>
struct SomeRows {
  Acc* first;
  int64_t stride;
  const int64_t* at = nullptr;

  Acc* operator[](int i) const { return first + (at ? at[i] : i) * stride; }
};

// Some keys of a block, or their values, as vectors: [vectors, length, lanes].
template <typename Acc>
struct KeyPanel {
  static constexpr int kSize = kLanes<Acc>;
  static constexpr int kMostKeys = 256 / int(sizeof(Acc));  // a pass stays in the cache
  int64_t length;
  alignas(64) Acc numbers[kMostKeys * kMostBlockDepth];

  // Vectors are of keys, zero from `count` on, and follow each other by feature.
  void Transpose(const HeadKeys<Acc>& x, int64_t begin, int count, int64_t depth) {
    using Tile = AttentionTile<Acc, kSize>;
    length = depth;
    const Acc* const from = x.first + begin * x.stride;
    int j = 0;
    for (; j + kSize <= count; j += kSize) {
      Tile::Interleave(from + j * x.stride, x.stride, depth, numbers + j * depth);
    }
    if (j == count) return;
    alignas(64) Acc last[kSize * kMostBlockDepth] = {};
    for (int i = j; i < count; ++i) {
      __builtin_memcpy(last + (i - j) * depth, from + i * x.stride, size_t(depth) * sizeof(Acc));
    }
    Tile::Interleave(last, depth, depth, numbers + j * depth);
  }

  // Vectors are of features, and follow each other by key.
  void Copy(const HeadKeys<Acc>& x, int64_t begin, int count, int64_t depth) {
    length = count;
    for (int j = 0; j < count; ++j) {
      const Acc* const from = x.first + (begin + j) * x.stride;
      for (int64_t d = 0; d < depth; d += kSize) {
        Store<Acc, kSize>(numbers + d * count + j * kSize, Load<Acc, kSize>(from + d));
      }
    }
  }
};

// Some rows that see a block, and some of its keys.
template <typename Acc>
struct BlockPass {
  static constexpr int kSize = kLanes<Acc>, kMostKeys = KeyPanel<Acc>::kMostKeys;
  using V = Vector<Acc, kSize>;
  using Scores = Acc[kMostGroupedRows * kMostKeys];  // [rows, kMostKeys]

  int height;                      // rows
  int64_t rows[kMostGroupedRows];  // ascending
  int count, vectors;              // keys, and vectors of these
  int sees[kMostGroupedRows];      // how many of the keys each row sees, the first ones; ascends

  // Takes up to `most` rows, those of the block rows from `next` on, and returns the first block
  // row that the next pass is to take. A block row that comes again, as a traced structure may
  // store a block twice, is for the next pass, too.
  const int32_t* Take(const AttentionProblem& args, const int32_t* next, const int32_t* end,
                      int most) {
    height = 0;
    for (int64_t last = -1; next < end && *next != last && height + args.length <= most; ++next) {
      last = *next;
      const int64_t first = last * args.length;
      for (int64_t i = first; i < first + args.length && i < args.rows; ++i) rows[height++] = i;
    }
    return next;
  }

  // Keys [begin, begin + number) are next.
  void Meet(const AttentionProblem& args, int64_t begin, int number) {
    count = number;
    vectors = (count + kSize - 1) / kSize;
    for (int i = 0; i < height; ++i) {
      const int64_t ahead = args.is_causal ? rows[i] - begin + 1 : count;
      sees[i] = int(ahead < 0 ? 0 : Lesser(ahead, count));
    }
  }

  // What `from` [all rows, depth] has of the rows.
  void Gather(const Acc* from, int64_t depth, Acc* to) const {
    for (int i = 0; i < height; ++i, to += depth) {
      const Acc* const row = from + rows[i] * depth;
      for (int64_t d = 0; d < depth; d += kSize) {
        Store<Acc, kSize>(to + d, Load<Acc, kSize>(row + d));
      }
    }
  }

  // Returns how many vectors of scores have keys that row i sees, and sets the scores of the other
  // keys in the last of these to -inf.
  int MaskLast(Acc* own, int i) const {
    const int whole = sees[i] / kSize, rest = sees[i] % kSize;
    if (rest == 0) return whole;
    const V x = Load<Acc, kSize>(own + whole * kSize), least = V{} - Acc(__builtin_inf());
    using Number = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
    const auto seen = LaneNumbers<Number, kSize>() < Vector<Number, kSize>{} + Number(rest);
    Store<Acc, kSize>(own + whole * kSize, seen ? x : least);
    return whole + 1;
  }

  // Sets the scores of a row to zero from a vector on: it sees none of these keys.
  void ClearFrom(Acc* own, int vector) const {
    for (; vector < vectors; ++vector) Store<Acc, kSize>(own + vector * kSize, V{});
  }

  // scores = rows . keys, as far as rows see them.
  void Dots(SomeRows<const Acc> from, const KeyPanel<Acc>& keys, Acc* scores) const {
    const SomeRows<Acc> to{scores, kMostKeys};
    ForTiles(vectors, [&](auto columns, int first) {
      InFours(FirstThatSees(first * kSize, 0), height, [&](auto number, int i) {
        Multiply<decltype(number)::value, decltype(columns)::value, false>(from, i, keys, first, 0,
                                                                           int(keys.length), to);
      });
    });
  }

  // to[row] += the sum over keys of weights(row, key) * keys[key], as far as rows see them.
  void AddKeys(const Acc* weights, const KeyPanel<Acc>& keys, int64_t depth,
               SomeRows<Acc> to) const {
    const SomeRows<const Acc> from{weights, kMostKeys};
    ForTiles(int(depth / kSize), [&](auto columns, int first) {
      InFours(0, height, [&](auto number, int i) {
        constexpr int kRows = decltype(number)::value, kOf = decltype(columns)::value;
        Multiply<kRows, kOf, true>(from, i, keys, first, 0, sees[i], to);
        // Zero times what a row does not see may be NaN, and which rows go together depends on the
        // number of threads.
        for (int r = 1; r < kRows; ++r) {
          if (sees[i + r] > sees[i]) {
            Multiply<1, kOf, true>(from, i + r, keys, first, sees[i], sees[i + r], to);
          }
        }
      });
    });
  }

  // to[key] += the sum over rows of weights(row, key) * rows[row], as far as these see it.
  void AddRows(const Acc* weights, const Acc* from, int64_t depth, SomeRows<Acc> to) const {
    ForTiles(int(depth / kSize), [&](auto columns, int first) {
      int i = 0;
      InFours(0, count, [&](auto number, int j) {
        i = FirstThatSees(j, i);
        AddRowsAt<decltype(number)::value, decltype(columns)::value>(
            weights + i * kMostKeys + j, from + i * depth + first * kSize, depth, height - i, to, j,
            first);
      });
    });
  }

 private:
  static V Everywhere(Acc x) { return Kept(x - V{}); }

  // Calls body(how many as a constant, the first) for four at a time, and for each of the last.
  template <typename Body>
  static void InFours(int begin, int end, Body&& body) {
    for (; begin + 4 <= end; begin += 4) body(std::integral_constant<int, 4>(), begin);
    for (; begin < end; ++begin) body(std::integral_constant<int, 1>(), begin);
  }

  // The first row, from the i-th on, that sees key j or a later one.
  int FirstThatSees(int j, int i) const {
    while (i < height && sees[i] <= j) ++i;
    return i;
  }

  // to[i + r] [+]= the sum over begin <= j < end of from[i + r][j] * panel[j], of kOf of its
  // vectors from the first-th on.
  template <int kRows, int kOf, bool kAdds>
  static void Multiply(SomeRows<const Acc> from, int i, const KeyPanel<Acc>& panel, int first,
                       int begin, int end, SomeRows<Acc> to) {
    const Acc *weights[kRows], *numbers[kOf];
    Acc* targets[kRows];
    V sums[kRows][kOf] = {};
#pragma GCC unroll 4
    for (int c = 0; c < kOf; ++c) numbers[c] = panel.numbers + (first + c) * panel.length * kSize;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      weights[r] = from[i + r];
      targets[r] = to[i + r] + first * kSize;
#pragma GCC unroll 4
      for (int c = 0; c < kOf && kAdds; ++c) sums[r][c] = Load<Acc, kSize>(targets[r] + c * kSize);
    }
    for (int64_t j = begin; j < end; ++j) {
      V x[kOf];
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) x[c] = Load<Acc, kSize>(numbers[c] + j * kSize);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const V weight = Everywhere(weights[r][j]);
#pragma GCC unroll 4
        for (int c = 0; c < kOf; ++c) sums[r][c] += x[c] * weight;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) Store<Acc, kSize>(targets[r] + c * kSize, sums[r][c]);
    }
  }

  // Adds the last `count` rows to kKeys keys from the j-th on, kOf vectors from the first-th on.
  template <int kKeys, int kOf>
  static void AddRowsAt(const Acc* weights, const Acc* from, int64_t depth, int count,
                        SomeRows<Acc> to, int j, int first) {
    V sums[kKeys][kOf];
    Acc* targets[kKeys];
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) {
      targets[k] = to[j + k] + first * kSize;
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) sums[k][c] = Load<Acc, kSize>(targets[k] + c * kSize);
    }
    for (int i = 0; i < count; ++i, weights += kMostKeys, from += depth) {
      V x[kOf];
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) x[c] = Load<Acc, kSize>(from + c * kSize);
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) {
        const V weight = Everywhere(weights[k]);
#pragma GCC unroll 4
        for (int c = 0; c < kOf; ++c) sums[k][c] += x[c] * weight;
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) {
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) Store<Acc, kSize>(targets[k] + c * kSize, sums[k][c]);
    }
  }
};

}  // namespace sgap::SGAP_ISA
