// Attention of many rows of a block row, where vectors have 32 or 64 bytes. Rows are taken in
// groups of as many as a vector has lanes, and the products take three groups or vectors of
// features (four where there are 32 registers), and four keys or rows, at once: 12 or 16 sums in
// registers, so that what is loaded serves three or four multiply-adds. Scores of a group lie as
// AttentionTile has them.
#pragma once

#include "cpu/attention/attention_rows.h"

namespace sgap::SGAP_ISA {

// Vectors of a product, or groups of its rows.
constexpr int kTileVectors = kVectorBytes == 64 ? 4 : 3;

// Calls body(how many as a constant, the first) for all of `count`: kTileVectors at a time, and the
// last ones in twos and threes rather than alone.
template <typename Body>
void ForTiles(int count, Body&& body) {
  static_assert(kTileVectors == 3 || kTileVectors == 4);
  int i = 0;
  for (; count - i == kTileVectors || count - i > kTileVectors + 1; i += kTileVectors) {
    body(std::integral_constant<int, kTileVectors>(), i);
  }
  if (count - i == 3 || count - i == 5) {
    body(std::integral_constant<int, 3>(), i);
    i += 3;
  }
  for (; count - i >= 2; i += 2) body(std::integral_constant<int, 2>(), i);
  if (i < count) body(std::integral_constant<int, 1>(), i);
}

template <typename Acc>
struct RowGroups {
  static constexpr int kRows = kLanes<Acc>;  // of a group
  static constexpr int kMost = kMostGroupedRows / kRows;
  static constexpr int kMostKeys = 64;  // of a block: its scores and values stay in the cache
  static constexpr int kTogether = 4, kColumns = kTileVectors;
  static constexpr int kRowsTogether = kRows < 4 ? kRows : 4;
  static constexpr int kAhead = 8;  // how many keys ahead of its loads a product prefetches
  using Tile = AttentionTile<Acc, kRows>;
  using V = typename Tile::V;

  // Where the scores of a key with the rows of a group begin.
  static constexpr int At(int group, int key) { return (group * kMostKeys + key) * kRows; }

  // How many of a block's keys, the first ones, some row of a group sees. No group sees fewer than
  // one before it: that of the diagonal of a causal mask would take twice the products it needs.
  struct Seen {
    int groups;
    int keys[kMost];

    // The first group that sees key j or a later one.
    int FirstOf(int j) const {
      int g = 0;
      while (g < groups && keys[g] <= j) ++g;
      return g;
    }
  };

  // scores = rows . keys, with keys in fours up to `padded`, of which `prefetch(j)` is called some
  // way ahead; those that a group does not see are left as they are. left [groups, depth, kRows]:
  // each group as AttentionTile::Interleave leaves it.
  template <typename Ahead>
  static void Dots(const Acc* left, const Seen& seen, int64_t depth, const Acc* const* keys,
                   int padded, Acc* scores, Ahead&& prefetch) {
    for (int j = 0; j < padded; j += kTogether) {
      prefetch(j + kAhead);
      const int first = seen.FirstOf(j);
      ForTiles(seen.groups - first, [&](auto count, int i) {
        const int g = first + i;
        DotsAt<decltype(count)::value>(left + g * depth * kRows, depth, keys + j,
                                       scores + At(g, j));
      });
    }
  }

  // target[row] += sum over keys of weights(key, row) * values[key], for all rows of the groups and
  // the keys that they see.
  static void AddKeys(const Acc* weights, const Seen& seen, const Acc* const* values, int count,
                      int64_t depth, Acc* target, int64_t stride) {
    alignas(64) Acc panel[kMostKeys * kColumns * kRows];
    const bool in_place = LieTogether(values, count, depth);
    ForTiles(int(depth / kRows), [&](auto columns, int first) {
      constexpr int kWide = decltype(columns)::value * kRows;
      for (int j = 0; j < count && !in_place; ++j) {
        const int ahead = j + kAhead < count ? j + kAhead : j;
        for (int c = 0; c < kWide; c += kRows) {
          Prefetch(values[ahead] + first * kRows + c);
          Prefetch(panel + ahead * kWide + c);  // stores wait for a line after another
          const V x = Load<Acc, kRows>(values[j] + first * kRows + c);
          Store<Acc, kRows>(panel + j * kWide + c, x);
        }
      }
      const Acc* const from = in_place ? values[0] + first * kRows : panel;
      for (int row = 0; row < seen.groups * kRows; row += kRowsTogether) {
        const int group = row / kRows, own = seen.keys[group] < count ? seen.keys[group] : count;
        AddKeysAt<decltype(columns)::value>(weights + At(group, 0) + row % kRows, from,
                                            in_place ? depth : kWide, own,
                                            target + row * stride + first * kRows, stride);
      }
    });
  }

  // keys[key] += sum over the rows of the groups that see it of weights(key, row) * rows[row]. Keys
  // may come again: nobody has checked a traced structure.
  static void AddRows(const Acc* weights, const Seen& seen, Acc* const* keys, int count,
                      int64_t depth, const Acc* rows, int64_t stride) {
    ForTiles(int(depth / kRows), [&](auto columns, int first) {
      constexpr int kOf = decltype(columns)::value;
      const auto add = [&](auto together, int j) {
        const int g = seen.FirstOf(j);
        const Acc* own = rows + g * kRows * stride + first * kRows;
        AddRowsAt<decltype(together)::value, kOf>(weights + At(g, j), seen.groups - g, keys + j,
                                                  first * kRows, own, stride);
      };
      int j = 0;
      for (; j + kTogether <= count; j += kTogether) {
        add(std::integral_constant<int, kTogether>(), j);
      }
      for (; j < count; ++j) add(std::integral_constant<int, 1>(), j);
    });
  }

 private:
  // Whether rows of `depth` lie one after the other, as those of a block in a copy do, and so close
  // that the cache holds a tile of their columns as it holds a panel.
  static bool LieTogether(const Acc* const* rows, int count, int64_t depth) {
    bool follow = depth <= kColumns * kRows;
    for (int j = 0; j < count; ++j) follow &= rows[j] == rows[0] + j * depth;
    return follow;
  }

  static V Everywhere(Acc x) { return Kept(x - V{}); }

  template <int kGroups>
  static void DotsAt(const Acc* left, int64_t depth, const Acc* const* keys, Acc* scores) {
    V sums[kTogether][kGroups] = {};
    const Acc* key[kTogether];
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) key[i] = keys[i];
    for (int64_t d = 0; d < depth; ++d) {
      V rows[kGroups];
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        rows[g] = Load<Acc, kRows>(left + (g * depth + d) * kRows);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        const V value = Everywhere(key[i][d]);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; ++g) sums[i][g] += rows[g] * value;
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) {
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) Store<Acc, kRows>(scores + At(g, i), sums[i][g]);
    }
  }

  // kRowsTogether rows of a group: weights [keys, kRows]; kOf vectors of values, `apart` from key
  // to key.
  template <int kOf>
  static void AddKeysAt(const Acc* weights, const Acc* values, int64_t apart, int count,
                        Acc* target, int64_t stride) {
    V sums[kRowsTogether][kOf];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsTogether; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) {
        sums[r][c] = Load<Acc, kRows>(target + r * stride + c * kRows);
      }
    }
    for (int j = 0; j < count; ++j, values += apart, weights += kRows) {
      V x[kOf];
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) x[c] = Load<Acc, kRows>(values + c * kRows);
#pragma GCC unroll 4
      for (int r = 0; r < kRowsTogether; ++r) {
        const V weight = Everywhere(weights[r]);
#pragma GCC unroll 4
        for (int c = 0; c < kOf; ++c) sums[r][c] += x[c] * weight;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRowsTogether; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) {
        Store<Acc, kRows>(target + r * stride + c * kRows, sums[r][c]);
      }
    }
  }

  // kKeys keys at `at`: weights(key, row) from those of the first row on.
  template <int kKeys, int kOf>
  static void AddRowsAt(const Acc* weights, int groups, Acc* const* keys, int64_t at,
                        const Acc* rows, int64_t stride) {
    V sums[kKeys][kOf] = {};
    for (int i = 0; i < kKeys; ++i)
      Prefetch(keys[i] + at), Prefetch(keys[i] + at + kOf * kRows - 1);
    for (int g = 0; g < groups; ++g, weights += kMostKeys * kRows) {
      for (int r = 0; r < kRows; ++r, rows += stride) {
        V x[kOf];
#pragma GCC unroll 4
        for (int c = 0; c < kOf; ++c) x[c] = Load<Acc, kRows>(rows + c * kRows);
#pragma GCC unroll 4
        for (int i = 0; i < kKeys; ++i) {
          const V weight = Everywhere(weights[i * kRows + r]);
#pragma GCC unroll 4
          for (int c = 0; c < kOf; ++c) sums[i][c] += x[c] * weight;
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {  // one after another: a key may come again
#pragma GCC unroll 4
      for (int c = 0; c < kOf; ++c) {
        Acc* const own = keys[i] + at + c * kRows;
        Store<Acc, kRows>(own, Load<Acc, kRows>(own) + sums[i][c]);
      }
    }
  }
};

// The scores of some groups of rows with up to kMostKeys keys, and where these and their values
// are.
template <typename Acc>
struct GroupedScores {
  using Groups = RowGroups<Acc>;
  static constexpr int kRows = Groups::kRows, kMostKeys = Groups::kMostKeys;
  using Terms = BlockTerms<Acc, kRows>;

  typename Groups::Seen seen;
  bool masks;         // whether a row may not see a key
  int count, padded;  // keys, and to a whole number of steps
  int known;          // of `keys` and `values`: with those that the next block begins with
  const Acc* keys[kMostKeys + Groups::kAhead];
  const Acc* values[kMostKeys + Groups::kAhead];
  alignas(64) Acc scores[Groups::kMost * kMostKeys * kRows];

  explicit GroupedScores(int groups) : seen{groups, {}} {}

  // The dot products of the rows with the vectors [begin, begin + count), count at least 1.
  void Products(const AttentionProblem& args, const AttentionRows& at, const Acc* left,
                int64_t begin, int64_t end) {
    const int64_t key_head = at.head / (args.heads / args.key_heads);
    const HeadKeys<Acc> k(args, args.k, at.batch, key_head), v(args, args.v, at.batch, key_head);
    const int64_t rest = end - begin, most = kMostKeys + Groups::kAhead;
    count = int(rest < kMostKeys ? rest : kMostKeys);
    padded = (count + Groups::kTogether - 1) / Groups::kTogether * Groups::kTogether;
    known = int(rest < most ? rest : most);
    PointAt(k.first, k.stride, args.indices + begin, known, keys);
    PointAt(v.first, v.stride, args.indices + begin, known, values);
    for (int j = known; j < padded; ++j) {
      keys[j] = keys[known - 1];
      values[j] = values[known - 1];
    }
    masks = Masks(args, at, begin);
    FindSeen(args, at, begin);
    Groups::Dots(left, seen, args.padded_depth, keys, padded, scores, [&](int j) {
      for (int i = j; i < j + Groups::kTogether && i < known; ++i) {
        PrefetchRow(keys[i], args.padded_depth);
        PrefetchRow(values[i], args.padded_value_depth);
      }
    });
  }

  // Makes scores of the products, group by group, and calls body(group, its rows, its terms) then.
  // The derivatives of a soft cap are written to `curbs`, unless that is null.
  template <typename Body>
  void ForGroups(const AttentionProblem& args, const AttentionRows& at, int64_t begin, Acc* curbs,
                 Body&& body) {
    for (int g = 0; g < seen.groups; ++g) {
      const int64_t row = at.row + g * kRows, left = at.height - g * kRows;
      const int64_t height = left < 0 ? 0 : left < kRows ? left : kRows;
      const AttentionRows own{at.batch, at.head, row, height, at.lane + g * kRows, kRows};
      Terms terms(args, own.batch, own.head, own.row, own.height);
      FinishScores<kRows>(args, own, begin, count, padded, masks, &terms, scores + Groups::At(g, 0),
                          curbs ? curbs + Groups::At(g, 0) : nullptr);
      body(g, own, terms);
    }
  }

 private:
  // The order of the columns is not relied on.
  void FindSeen(const AttentionProblem& args, const AttentionRows& at, int64_t begin) {
    for (int g = 0; g < seen.groups; ++g) seen.keys[g] = padded;
    if (!masks || !args.is_causal) return;
    int64_t last = PlaceOfRow(args, at) - 1;
    int found = 0;
    for (int g = 0; g < seen.groups; ++g) {
      last += kRows;
      for (int j = found; j < count; ++j) found = args.indices[begin + j] <= last ? j + 1 : found;
      seen.keys[g] = found;
    }
  }

  // Whether a row may not see a key.
  bool Masks(const AttentionProblem& args, const AttentionRows& at, int64_t begin) const {
    if (!args.is_causal && !args.lengths) return false;
    const int64_t first = SeenByAll(args, at);
    int32_t greatest = args.indices[begin];
    for (int j = 1; j < count; ++j) {
      const int32_t column = args.indices[begin + j];
      greatest = column > greatest ? column : greatest;
    }
    return greatest >= first;
  }
};

}  // namespace sgap::SGAP_ISA
