// Attention of bfloat16 on matrix tiles, for kRows rows of a block row: octet tiling (vectorSparse,
// sections 5.3 and 6.3) of the two kinds of products, with the tiles of cpu/simd/tiles.h in the
// place of tensor cores. Scores are dot products of the rows with gathered keys, 16 at a time;
// sums are weights, such as probabilities, times gathered values, 32 at a time. What a step has
// gathered is multiplied while the next one gathers: a tile's load of what has just been stored
// waits for the store. Keys that follow each other need no gathering for scores.
#pragma once

#include "cpu/attention/attention_rows.h"
#include "cpu/simd/gather.h"
#include "cpu/simd/tiles.h"

namespace sgap::SGAP_ISA {

constexpr double kLog2E = 1.4426950408889634;
constexpr int64_t kMostOctetParts = kMostOctetDepth / kTileDepth;

// Keys or values of a head: whole parts of 32 features, as they lie or copied.
struct OctetKeys {
  const BFloat16* first;
  size_t stride;
  int64_t depth;

  OctetKeys(const AttentionProblem& args, const KeyRows& x, int64_t batch, int64_t key_head)
      : depth(x.padded) {
    if (x.copies) {
      const int64_t slot = (batch * args.key_heads + key_head) % x.slots;
      first = static_cast<const BFloat16*>(x.copies) + slot * args.keys * x.padded;
      stride = size_t(x.padded);
    } else {
      first = static_cast<const BFloat16*>(x.source) + batch * x.batch_stride + key_head * x.depth;
      stride = size_t(args.row_key_heads * x.depth);
    }
  }

  const BFloat16* Row(int32_t index) const { return first + size_t(index) * stride; }
};

// Rows as the B operand of dot products: pairs of features, of each 32 in turn.
template <int kRows>
struct OctetPairs {
  alignas(64) uint32_t parts[kMostOctetParts][kTileDepth / 2][kRows];

  // rows [height, depth], `stride` apart; the others, and features past the last, are zero.
  void Pack(const BFloat16* rows, int64_t stride, int64_t height, int64_t depth) {
    for (int64_t part = 0; part == 0 || part * kTileDepth < depth; ++part) {
      const int64_t left = depth - part * kTileDepth;
      const int wide = int(left < kTileDepth ? left : kTileDepth);
      for (int v = 0; v < kRows; v += 4) {
        TileRow some[4];
        for (int i = 0; i < 4; ++i) {
          const BFloat16* row = rows + (v + i) * stride + part * kTileDepth;
          some[i] = v + i < height ? LoadTileRow(row, wide) : TileRow{};
        }
        TransposeFour(some, &parts[part][0][v], kRows);
      }
    }
  }
};

// Weights of a block of keys as the A operand: of each 32 keys in turn.
//
// They come from scores [keys, kRows], of which a vector has kKeys keys. Pairs are made lane by
// lane of two vectors, so a pair has two keys that are kKeys apart.
template <int kRows, int kMostKeys>
struct OctetWeights {
  static constexpr int kKeys = kTileColumns / kRows;
  alignas(64) uint32_t steps[kMostKeys / kTileDepth][kRows][kTileColumns];

  // The first key of a pair, among those of its step.
  static constexpr int KeyOfPair(int pair) { return pair / kKeys * 2 * kKeys + pair % kKeys; }

  // The weights of 32 keys: weights(i, &low, &high) gives vectors 2 i and 2 i + 1 of 2 * kRows.
  template <typename Weights>
  void Set(int64_t step, Weights&& weights) {
    Vector<uint32_t, 16> pairs[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      Vector<float, kTileColumns> low, high;
      weights(i, &low, &high);
      pairs[i] = NarrowPairs(low, high);
    }
    TransposeWords<kRows>(pairs);
    std::memcpy(steps[step], pairs, sizeof(pairs));
  }
};

// The tile registers, and gathered rows.
template <int kRows>
class AttentionOctets {
 public:
  static constexpr int kKeys = kTileColumns / kRows;  // of a vector of scores

  explicit AttentionOctets(Tiles& tiles) : tiles_(tiles) {}

  static TileShapes Shapes() {
    TileShapes shapes;
    for (int i = kSums; i < kGathered; ++i) shapes.Set(i, kRows, kTileBytes);
    shapes.Set(kGathered, kTileRows, kTileBytes);
    for (int i = kLeft; i < 8; ++i) shapes.Set(i, kTileRows, kRows * sizeof(float));
    return shapes;
  }

  // scores[j * kRows + r] = row r . key j, for `count` keys, 1 or more; whole groups of 16 keys are
  // stored.
  void Dots(const OctetPairs<kRows>& rows, const OctetKeys& keys, const int32_t* indices, int count,
            float* scores) {
    for (int64_t d = 0; d < keys.depth; d += kChunk) {
      if (keys.depth - d >= kChunk) {
        DotsOfChunk<2>(rows, keys, d, indices, count, scores);
      } else {
        DotsOfChunk<1>(rows, keys, d, indices, count, scores);
      }
    }
  }

  // sums[r * stride + d] += the sum over `count` keys of weights(j, r) * value j at d, for all
  // features of the values; or = where `fresh`. before(step, beside) is called for each 32 keys
  // before their weights are read. It calls beside(i) once for each i below kRows, between its own
  // computations: that gathers a share of the values, so that loads and arithmetic overlap.
  template <int kMostKeys, typename Before>
  void Sums(const OctetWeights<kRows, kMostKeys>& weights, const OctetKeys& values,
            const int32_t* indices, int count, bool fresh, float* sums, int64_t stride,
            Before&& before) {
    for (int64_t d = 0; d < values.depth; d += kChunk) {
      SumsOfChunk(weights, values, d, indices, count, fresh, sums + d, stride, before);
    }
  }

 private:
  // All eight: of the rows and of the scores there is one, loaded and stored the more often.
  enum Tile { kSums, kWeights = 4, kGathered, kLeft, kScores };
  static constexpr int64_t kGroup = kTileRows * kRows;  // scores of 16 keys
  static constexpr int64_t kChunk = 2 * kTileDepth;     // features of a step

  // Scores of kParts parts of the features, from d on, added to those of the features before.
  template <int kParts>
  void DotsOfChunk(const OctetPairs<kRows>& rows, const OctetKeys& all, int64_t d,
                   const int32_t* indices, int64_t count, float* scores) {
    constexpr int64_t kStride = kRows * sizeof(float);
    const OctetKeys keys = all;  // in registers: the compiler takes tiles to write anywhere
    const auto* const left = rows.parts + d / kTileDepth;
    const int64_t groups = (count + kTileRows - 1) / kTileRows;
    struct {
      const char* keys;
      int64_t stride;
    } turns[2] = {};
    for (int64_t group = 0; group < groups + 2; ++group) {
      auto& turn = turns[group % 2];
      if (group >= 2) {
        // The scores of a group are stored when its successor is gathered, not to wait for them.
        float* const own = scores + (group - 2) * kGroup;
        if (group > 2) tiles_.template Store<kScores>(own - kGroup, kStride);
        if (d == 0) {
          tiles_.template Zero<kScores>();
        } else {
          tiles_.template Load<kScores>(own, kStride);
        }
        for (int part = 0; part < kParts; ++part) {
          tiles_.template Load<kLeft>(left[part], kStride);
          tiles_.template Load<kGathered>(turn.keys + part * kTileBytes, turn.stride);
          tiles_.template Dot<kScores, kGathered, kLeft>();
        }
      }
      if (group >= groups) continue;
      const int64_t j = group * kTileRows;
      if (count - j >= kTileRows && FollowEachOther(indices + j)) {
        turn.keys = reinterpret_cast<const char*>(keys.Row(indices[j]) + d);
        turn.stride = int64_t(keys.stride * sizeof(BFloat16));
      } else {
        auto& to = gathered_[group % 2];
        Gather<kParts>(keys, indices + j, count - j, d, to);
        turn.keys = reinterpret_cast<const char*>(to);
        turn.stride = sizeof(to[0]);
      }
    }
    tiles_.template Store<kScores>(scores + (groups - 1) * kGroup, kStride);
  }

  // Sums of the features from d on, one part of them or two.
  template <int kMostKeys, typename Before>
  void SumsOfChunk(const OctetWeights<kRows, kMostKeys>& weights, const OctetKeys& all, int64_t d,
                   const int32_t* indices, int count, bool fresh, float* sums, int64_t stride,
                   Before&& before) {
    using Pairing = OctetWeights<kRows, kMostKeys>;
    const OctetKeys values = all;
    const bool both = values.depth - d >= kChunk;
    const int64_t steps = (count + kTileDepth - 1) / kTileDepth;
    tiles_.template Zero<kSums>(), tiles_.template Zero<kSums + 1>();
    if (both) tiles_.template Zero<kSums + 2>(), tiles_.template Zero<kSums + 3>();
    for (int64_t s = 0; s <= steps; ++s) {
      if (s < steps) {
        const int32_t* const own = indices + s * kTileDepth;
        const int64_t left = count - s * kTileDepth;
        auto& to = pairs_[s % 2];
        const bool whole = left >= kTileDepth;
        if (!whole) GatherLastPairs<Pairing>(values, own, left, d, both, to);
        const auto share = [&](int i) __attribute__((always_inline)) {
          if (whole) GatherPairs<Pairing>(values, own, d, i, both, to);
        };
        if (d == 0) {
          before(s, share);
        } else {
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) share(i);
        }
      }
      if (s == 0) continue;
      const auto& pairs = pairs_[(s - 1) % 2];
      tiles_.template Load<kWeights>(weights.steps[s - 1], kTileBytes);
      AddProduct<0>(pairs), AddProduct<1>(pairs);
      if (both) AddProduct<2>(pairs), AddProduct<3>(pairs);
    }
    StoreSums<0>(fresh, sums, stride);
    if (both) StoreSums<2>(fresh, sums + kTileDepth, stride);
  }

  // Whether kTileRows keys lie one after the other, as those of a band or of a block do: a tile is
  // loaded from where they lie then.
  static bool FollowEachOther(const int32_t* indices) {
    using Numbers = Vector<int32_t, kTileRows>;
    Vector<uint32_t, kTileRows> own;
    std::memcpy(&own, indices, sizeof(own));
    const auto other = own - LaneNumbers<uint32_t, kTileRows>() != own[0];
    return LanesFrom<int32_t, kTileRows>(other ? Numbers{} + 1 : Numbers{}, 1) == 0;
  }

  // Up to kTileRows keys, kParts parts of each; zero where there is none.
  template <int kParts>
  static void Gather(const OctetKeys& keys, const int32_t* indices, int64_t count, int64_t d,
                     uint16_t (*to)[kChunk]) {
    constexpr size_t kBytes = kParts * kTileBytes;
    if (count >= kTileRows) {
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) std::memcpy(to[i], keys.Row(indices[i]) + d, kBytes);
      return;
    }
    for (int i = 0; i < count; ++i) std::memcpy(to[i], keys.Row(indices[i]) + d, kBytes);
    for (int64_t i = count; i < kTileRows; ++i) std::memset(static_cast<void*>(to[i]), 0, kBytes);
  }

  using PairTiles = uint16_t[2 * kChunk / kTileDepth][kTileRows][kTileDepth];

  // kTileDepth keys, of which pairs are those of `Pairing`: one of kRows shares of the pairs.
  template <typename Pairing>
  [[gnu::always_inline]] static void GatherPairs(const OctetKeys& keys, const int32_t* indices,
                                                 int64_t d, int share, bool both, PairTiles& to) {
    constexpr int kShare = kTileRows / kRows;
#pragma GCC unroll 4
    for (int pair = share * kShare; pair < (share + 1) * kShare; ++pair) {
      const int j = Pairing::KeyOfPair(pair);
      const BFloat16 *x = keys.Row(indices[j]) + d, *y = keys.Row(indices[j + kKeys]) + d;
      StorePairs(LoadTileRow(x), LoadTileRow(y), to[0][pair], to[1][pair]);
      if (!both) continue;
      StorePairs(LoadTileRow(x + kTileDepth), LoadTileRow(y + kTileDepth), to[2][pair],
                 to[3][pair]);
    }
  }

  // Fewer keys, all of their pairs.
  template <typename Pairing>
  [[gnu::noinline]] static void GatherLastPairs(const OctetKeys& keys, const int32_t* indices,
                                                int64_t count, int64_t d, bool both,
                                                PairTiles& to) {
    for (int part = 0; part < (both ? 2 : 1); ++part, d += kTileDepth) {
      const auto load = [&](int j) {
        return j < count ? LoadTileRow(keys.Row(indices[j]) + d) : TileRow{};
      };
      for (int pair = 0; pair < kTileRows; ++pair) {
        const int j = Pairing::KeyOfPair(pair);
        StorePairs(load(j), load(j + kKeys), to[2 * part][pair], to[2 * part + 1][pair]);
      }
    }
  }

  template <int kTile>
  void AddProduct(const PairTiles& pairs) {
    tiles_.template Load<kGathered>(pairs[kTile], kTileBytes);
    tiles_.template Dot<kSums + kTile, kWeights, kGathered>();
  }

  template <int kFirst>
  void StoreSums(bool fresh, float* sums, int64_t stride) {
    alignas(64) float tiles[2][kRows][kTileColumns];
    tiles_.template Store<kSums + kFirst>(tiles[0], kTileBytes);
    tiles_.template Store<kSums + kFirst + 1>(tiles[1], kTileBytes);
    for (int r = 0; r < kRows; ++r, sums += stride) {
      alignas(64) float row[kTileDepth];
      StorePanel<float>(tiles[0][r], tiles[1][r], kTileDepth, row);
      for (int c = 0; c < kTileDepth; c += kTileColumns) {
        auto x = Load<float, kTileColumns>(row + c);
        if (!fresh) x += Load<float, kTileColumns>(sums + c);
        Store<float, kTileColumns>(sums + c, x);
      }
    }
  }

  Tiles& tiles_;
  alignas(64) uint16_t gathered_[2][kTileRows][kChunk];
  alignas(64) PairTiles pairs_[2];
};

// Vectors of scores [keys, kRows].
template <int kRows>
struct OctetScores {
  using V = Vector<float, kTileColumns>;
  static constexpr int kKeys = kTileColumns / kRows;
  static constexpr float kLeast = -__builtin_inff();

  // Makes scores of the dot products of `count` keys. Returns f: the score of entry i is
  // scores[i] * f. Entries of the keys from `count` up to a multiple of 32 become -inf.
  static float Finish(const AttentionProblem& args, const AttentionRows& at, int64_t begin,
                      int count, float* scores) {
    const float scale = float(args.scale);
    const bool plain = !args.bias && !args.is_causal && !args.lengths && scale > 0;
    for (int i = 0; !plain && i < count * kRows; i += kTileColumns) {
      Store<float, kTileColumns>(scores + i, Load<float, kTileColumns>(scores + i) * scale);
    }
    const auto place = [](int key, int row) { return key * kRows + row; };
    if (args.bias) AddBias(args, at, begin, count, place, scores);
    if (args.is_causal || args.lengths) Mask<kRows>(args, at, begin, count, place, scores);
    const int padded = (count + kTileDepth - 1) / kTileDepth * kTileDepth;
    for (int i = count * kRows; i < padded * kRows; ++i) scores[i] = kLeast;
    return plain ? scale : 1;
  }

  // The greatest in each lane of `peak` and of the scores of `count` keys, NaN ignored. Four at a
  // time: one maximum after the other would take as long as the exponentials.
  static V Greatest(const float* scores, int count, V peak) {
    V peaks[4] = {peak, peak, peak, peak};
    for (int i = 0; i < count * kRows; i += 4 * kTileColumns) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) {
        const V s = Load<float, kTileColumns>(scores + i + u * kTileColumns);
        peaks[u] = s > peaks[u] ? s : peaks[u];
      }
    }
    for (int u = 1; u < 4; ++u) peaks[0] = peaks[u] > peaks[0] ? peaks[u] : peaks[0];
    return peaks[0];
  }

  // In every lane the maximum, or the sum, of its row's lanes; the maximum ignores NaN.
  template <int kDistance = kTileColumns / 2>
  static V GreatestOfRow(V x) {
    if constexpr (kDistance < kRows) {
      return x;
    } else {
      const V partner = Partners<kDistance>(x, std::make_integer_sequence<int, kTileColumns>());
      return GreatestOfRow<kDistance / 2>(partner > x ? partner : x);
    }
  }

  template <int kDistance = kTileColumns / 2>
  static V SumOfRow(V x) {
    if constexpr (kDistance < kRows) {
      return x;
    } else {
      const V partner = Partners<kDistance>(x, std::make_integer_sequence<int, kTileColumns>());
      return SumOfRow<kDistance / 2>(partner + x);
    }
  }

  // One value per row, in all of that row's lanes.
  static V OfRows(const float* values) { return LoadRepeated<float, kTileColumns, kRows>(values); }

 private:
  template <int kDistance, int... i>
  static V Partners(V x, std::integer_sequence<int, i...>) {
    return Shuffle<(i ^ kDistance)...>(x, x);
  }
};

// Calls body(AttentionRows) for each kRows rows of a block row.
template <int kRows, typename Body>
void ForOctetRows(const AttentionProblem& args, int64_t batch, int64_t head, int64_t block,
                  Body&& body) {
  for (int64_t lane = 0; lane < args.length; lane += kRows) {
    const int64_t row = block * args.length + lane, below = args.rows - row;
    const int64_t height = below < 0 ? 0 : below < kRows ? below : kRows;
    body(AttentionRows{batch, head, row, height, lane, kRows});
  }
}

}  // namespace sgap::SGAP_ISA
