// The gradients of attention of bfloat16 column vectors on matrix tiles. For some hundred keys of a
// block row: their scores, and as dot products of dout with the values the gradients of their
// probabilities; then probabilities p and gradients of scores ds, rounded to bfloat16, as weights
// of the keys in dq, and, 16 keys at a time, as weights of the rows in dk and dv. Sums are float32.
#include "cpu/attention/attention_backward.h"
#include "cpu/attention/attention_octets.h"

namespace sgap::SGAP_ISA {
namespace {

// Adds weights of kRows rows times the rows to the sums of keys.
template <int kRows>
class KeyOctets {
 public:
  explicit KeyOctets(Tiles& tiles) : tiles_(tiles) {}

  static TileShapes Shapes() {
    TileShapes shapes;
    for (int i = kPairs; i < kWeights; ++i) shapes.Set(i, kRows / 2, kTileBytes);
    shapes.Set(kWeights, kTileRows, kRows * sizeof(BFloat16));
    for (int i = kSums; i < 8; ++i) shapes.Set(i, kTileRows, kTileBytes);
    return shapes;
  }

  // Pairs of rows, of each 16 features in turn.
  struct Pairs {
    alignas(64) uint16_t tiles[2 * kMostOctetParts][kRows / 2][kTileDepth];

    void Pack(const BFloat16* rows, int64_t stride, int64_t height, int64_t depth) {
      for (int64_t part = 0; part == 0 || part * kTileDepth < depth; ++part) {
        const int64_t left = depth - part * kTileDepth;
        const auto load = [&](int r) {
          const BFloat16* row = rows + r * stride + part * kTileDepth;
          const int wide = int(left < kTileDepth ? left : kTileDepth);
          return r < height ? LoadTileRow(row, wide) : TileRow{};
        };
        for (int pair = 0; pair < kRows / 2; ++pair) {
          StorePairsInOrder(load(2 * pair), load(2 * pair + 1), tiles[2 * part][pair],
                            tiles[2 * part + 1][pair]);
        }
      }
    }
  };

  // sums of key j += weights[j] @ rows, for `count` keys; weights [keys, kRows].
  void Add(const uint16_t* weights, const Pairs& rows, const int32_t* indices, int count,
           int64_t depth, float* sums, int64_t stride) {
    for (int64_t d = 0; d < depth; d += kPass) {
      const bool both = depth - d >= kPass;
      const auto* pairs = rows.tiles + d / kTileColumns;
      tiles_.template Load<kPairs>(pairs[0], kTileBytes);
      tiles_.template Load<kPairs + 1>(pairs[1], kTileBytes);
      if (both) {
        tiles_.template Load<kPairs + 2>(pairs[2], kTileBytes);
        tiles_.template Load<kPairs + 3>(pairs[3], kTileBytes);
      }
      for (int j = 0; j < count; j += kTileRows) {
        tiles_.template Load<kWeights>(weights + j * kRows, kRows * sizeof(BFloat16));
        const int keys = count - j < kTileRows ? count - j : kTileRows;
        if (keys == kTileRows && IsRun(indices + j)) {
          float* const first = sums + size_t(indices[j]) * size_t(stride) + d;
          AddRun(first, stride * sizeof(float), both);
          continue;
        }
        auto& products = products_[j / kTileRows % 2];
        Multiply<0>(products), Multiply<1>(products);
        if (both) Multiply<2>(products), Multiply<3>(products);
        if (both) {
          AddRows<4>(products, indices + j, keys, sums + d, stride);
        } else {
          AddRows<2>(products, indices + j, keys, sums + d, stride);
        }
      }
    }
  }

 private:
  enum Tile { kPairs, kWeights = 4, kSums };
  static constexpr int64_t kPass = 4 * kTileColumns;  // features
  using Products = float[kTileRows][kPass];

  // Whether kTileRows keys follow each other: then their sums are tiles where they are.
  static bool IsRun(const int32_t* indices) {
    int32_t away = 0;
    for (int i = 0; i < kTileRows; ++i) away |= indices[i] ^ (indices[0] + i);
    return away == 0;
  }

  void AddRun(float* first, int64_t stride, bool both) {
    AddTile<0>(first, stride), AddTile<1>(first, stride);
    if (both) AddTile<2>(first, stride), AddTile<3>(first, stride);
  }

  template <int kTile>
  void AddTile(float* first, int64_t stride) {
    constexpr int kSum = kSums + kTile % 3;
    tiles_.template Load<kSum>(first + kTile * kTileColumns, stride);
    tiles_.template Dot<kSum, kWeights, kPairs + kTile>();
    tiles_.template Store<kSum>(first + kTile * kTileColumns, stride);
  }

  template <int kTile>
  void Multiply(Products& products) {
    constexpr int kSum = kSums + kTile % 3;
    tiles_.template Zero<kSum>();
    tiles_.template Dot<kSum, kWeights, kPairs + kTile>();
    tiles_.template Store<kSum>(products[0] + kTile * kTileColumns, sizeof(products[0]));
  }

  template <int kOf>
  static void AddRows(const Products& products, const int32_t* indices, int keys, float* sums,
                      int64_t stride) {
    for (int i = 0; i < keys; ++i) {
      float* row = sums + size_t(indices[i]) * size_t(stride);
#pragma GCC unroll 4
      for (int c = 0; c < kOf * kTileColumns; c += kTileColumns) {
        const auto own = Load<float, kTileColumns>(products[i] + c);
        Store<float, kTileColumns>(row + c, Load<float, kTileColumns>(row + c) + own);
      }
    }
  }

  Tiles& tiles_;
  alignas(64) Products products_[2];
};

template <int kRows>
class BackwardOctets {
  using Of = OctetScores<kRows>;
  using V = typename Of::V;
  static constexpr int kMostKeys = kRows > 8 ? 128 : 256;  // of a block
  static constexpr int kStep = kTileDepth * kRows;         // scores of a step

 public:
  BackwardOctets(const AttentionBackwardArgs& args, const BackwardPlace& place,
                 const KeySums<float>& key_sums)
      : args_(args),
        place_(place),
        key_sums_(key_sums),
        tiles_(octet_shapes_),
        octets_(tiles_),
        keys_(tiles_) {}

  // All rows of the task's piece in one head.
  void Run(int64_t head) {
    const bool first = place_.phase == 0, last = place_.phase == args_.pieces - 1;
    const PartialRows<BFloat16> partial(args_, place_, head);
    deltas_ = static_cast<float*>(args_.deltas) + SlotOfHead(args_, place_, head) * args_.rows;
    for (int64_t block = place_.block_begin; block < place_.block_end; ++block) {
      const int64_t end = args_.offsets[block + 1];
      const auto run = NextRun(args_, place_.keys, args_.offsets[block], end);
      if (run.begin == run.end && !first && !last) continue;
      ForOctetRows<kRows>(args_, place_.batch, head, block, [&](const AttentionRows& at) {
        float* const sums = partial.first + at.row * partial.stride;
        if (!first) LoadPartial(sums, partial.stride, at.height);
        fresh_ = first;
        if (first || run.begin != run.end) Begin(at, first);
        AddRuns(at, run, end);
        if (fresh_) std::memset(dq_, 0, size_t(kRows * args_.padded_depth) * sizeof(float));
        for (int64_t r = 0; r < at.height; ++r) {
          const float* row = dq_ + r * args_.padded_depth;
          if (last) {
            StoreRow<BFloat16>(row, args_.depth, float(args_.scale), Row(args_.dq, at, r));
          } else {
            StoreRow<float>(row, args_.padded_depth, 1, sums + r * partial.stride);
          }
        }
      });
    }
  }

 private:
  // Row r of the pass in dq.
  BFloat16* Row(void* dq, const AttentionRows& at, int64_t r) const {
    const int64_t row = (at.batch * args_.rows + at.row + r) * args_.row_heads + at.head;
    return static_cast<BFloat16*>(dq) + row * args_.depth;
  }

  void LoadPartial(const float* sums, int64_t stride, int64_t height) {
    const size_t bytes = size_t(args_.padded_depth) * sizeof(float);
    for (int64_t r = 0; r < kRows; ++r) {
      float* row = dq_ + r * args_.padded_depth;
      if (r < height) {
        std::memcpy(row, sums + r * stride, bytes);
      } else {
        std::memset(row, 0, bytes);
      }
    }
  }

  // What the keys meet: q, dout, lse and delta of the rows.
  void Begin(const AttentionRows& at, bool first) {
    const int64_t stride = args_.row_heads * args_.depth;
    const int64_t value_stride = args_.row_heads * args_.value_depth;
    const BFloat16* q = static_cast<const BFloat16*>(args_.q) + at.batch * args_.q_stride +
                        at.row * stride + at.head * args_.depth;
    const BFloat16* dout = static_cast<const BFloat16*>(args_.dout) + at.batch * args_.dout_stride +
                           at.row * value_stride + at.head * args_.value_depth;
    q_.Pack(q, stride, at.height, args_.depth);
    dout_.Pack(dout, value_stride, at.height, args_.value_depth);
    q_pairs_.Pack(q, stride, at.height, args_.depth);
    dout_pairs_.Pack(dout, value_stride, at.height, args_.value_depth);
    if (first) {
      LoadRows<BFloat16>(dout, value_stride, at.height, args_.value_depth, kRows,
                         args_.padded_value_depth, 1, wide_dout_);
      Deltas<BFloat16>(args_, at, wide_dout_, args_.padded_value_depth, deltas_ + at.row);
    }
    const float* stored = static_cast<const float*>(args_.lse) + at.batch * args_.lse_stride +
                          at.row * args_.row_heads + at.head;
    for (int r = 0; r < kRows; ++r) {
      const float lse = r < at.height ? stored[r * args_.row_heads] : Of::kLeast;
      sees_[r] = lse != Of::kLeast;
      lse_[r] = sees_[r] ? lse : 0;
      delta_[r] = sees_[r] ? deltas_[at.row + r] : 0;
    }
  }

  void AddRuns(const AttentionRows& at, sgap::SGAP_ISA::Run run, int64_t end) {
    const OctetKeys k(args_, args_.k, place_.batch, place_.key_head);
    const OctetKeys v(args_, args_.v, place_.batch, place_.key_head);
    while (run.begin < run.end) {
      const int64_t p = run.begin, left = run.end - p;
      AddBlock(at, p, int(left < kMostKeys ? left : kMostKeys), k, v);
      run.begin += left < kMostKeys ? left : kMostKeys;
      if (run.begin == run.end) run = NextRun(args_, place_.keys, run.end, end);
    }
  }

  // The vectors [p, p + count).
  void AddBlock(const AttentionRows& at, int64_t p, int count, const OctetKeys& k,
                const OctetKeys& v) {
    const int32_t* indices = args_.indices + p;
    BeginKeys(args_, key_sums_, indices, count);
    tiles_.Reshape(octet_shapes_);
    octets_.Dots(q_, k, indices, count, scores_);
    octets_.Dots(dout_, v, indices, count, slopes_);
    const float factor = Of::Finish(args_, at, p, count, scores_);
    const V lse = Of::OfRows(lse_), delta = Of::OfRows(delta_);
    const V sees = Of::OfRows(sees_);
    const auto slope = [&](float* scores, float* slopes, V* term) {
      // The product is rounded, as the forward kernel rounds the peak that lse is made of.
      const V s = Kept(Load<float, kTileColumns>(scores) * factor) - lse;
      const V x = Exp2OfNegative<kTileColumns>(s * float(kLog2E));
      *term = sees != 0 ? x : V{};
      const V ds = *term * (Load<float, kTileColumns>(slopes) - delta);
      const V own = *term == 0 ? V{} : ds;  // whatever a masked value holds
      if (args_.dbias) Store<float, kTileColumns>(slopes, own);
      return own;
    };
    const auto make = [&](int64_t step, auto&& beside) {
      weights_.Set(step, [&](int i, V* low, V* high) {
        const int64_t from = step * kStep + 2 * i * kTileColumns, next = from + kTileColumns;
        V first, second;
        *low = slope(scores_ + from, slopes_ + from, &first);
        *high = slope(scores_ + next, slopes_ + next, &second);
        StoreTwo<BFloat16>(reinterpret_cast<BFloat16*>(narrow_terms_ + from), first, second);
        StoreTwo<BFloat16>(reinterpret_cast<BFloat16*>(narrow_slopes_ + from), *low, *high);
        beside(i);
      });
    };
    octets_.Sums(weights_, k, indices, count, fresh_, dq_, args_.padded_depth, make);
    fresh_ = false;
    if (args_.dbias) StoreBias(at, p, count);
    tiles_.Reshape(key_shapes_);
    keys_.Add(narrow_terms_, dout_pairs_, indices, count, args_.padded_value_depth, key_sums_.v,
              key_sums_.v_row);
    keys_.Add(narrow_slopes_, q_pairs_, indices, count, args_.padded_depth, key_sums_.k,
              key_sums_.k_row);
  }

  void StoreBias(const AttentionRows& at, int64_t p, int count) {
    float* target = static_cast<float*>(args_.dbias) + at.lane +
                    ((at.batch * args_.row_heads + at.head) * args_.vectors + p) * args_.length;
    for (int j = 0; j < count; ++j, target += args_.length) {
      std::memcpy(target, slopes_ + j * kRows, kRows * sizeof(float));
    }
  }

  const AttentionBackwardArgs& args_;
  const BackwardPlace& place_;
  const KeySums<float>& key_sums_;
  const TileShapes octet_shapes_ = AttentionOctets<kRows>::Shapes();
  const TileShapes key_shapes_ = KeyOctets<kRows>::Shapes();
  Tiles tiles_;
  AttentionOctets<kRows> octets_;
  KeyOctets<kRows> keys_;
  float* deltas_ = nullptr;
  bool fresh_ = true;  // nothing is in dq_
  alignas(64) float scores_[kMostKeys * kRows], slopes_[kMostKeys * kRows];
  alignas(64) uint16_t narrow_terms_[kMostKeys * kRows], narrow_slopes_[kMostKeys * kRows];
  OctetWeights<kRows, kMostKeys> weights_;
  OctetPairs<kRows> q_, dout_;
  typename KeyOctets<kRows>::Pairs q_pairs_, dout_pairs_;
  alignas(64) float dq_[kRows * kMostOctetDepth], wide_dout_[kRows * kMostOctetDepth];
  float lse_[kRows], delta_[kRows], sees_[kRows];  // sees_: 1, or 0 for a row without keys
};

template <int kRows>
void BackwardTask(const AttentionBackwardArgs& args, const BackwardPlace& place) {
  const KeySums<float> sums = BeginSums<BFloat16>(args, place);
  const int64_t heads = args.heads / args.key_heads, first = place.key_head * heads;
  {
    BackwardOctets<kRows> octets(args, place, sums);
    for (int64_t head = first; head < first + heads; ++head) octets.Run(head);
  }
  if (place.phase == args.pieces - 1) EndSums<BFloat16>(args, place, sums, float(args.scale));
}

}  // namespace

void AttentionBackwardOctet(const AttentionBackwardArgs& args, int64_t task) {
  GroupTask own = FindGroup(args, args.pieces * args.pieces, task);
  if (CopyTask<BFloat16, BFloat16>(args, &own)) return;
  const BackwardPlace place = FindPlace(args, own);
  if (args.length == 4) return BackwardTask<4>(args, place);
  if (args.length == 8) return BackwardTask<8>(args, place);
  BackwardTask<16>(args, place);
}

}  // namespace sgap::SGAP_ISA
