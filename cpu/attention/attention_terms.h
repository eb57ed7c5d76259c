// What changes the scores of a block between the products and the softmax, and the probabilities
// after it: soft cap, distances, segments, dropout (ScoreTerms in cpu/attention/attention.h).
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/attention/attention_tiles.h"

namespace sgap::SGAP_ISA {

// tanh(x), within 4 ulp: the rational approximation of XLA's and Eigen's fast tanh.
template <int N>
inline Vector<float, N> Tanh(Vector<float, N> x) {
  using Floats = Vector<float, N>;
  constexpr float kMost = 7.90531110763549805f;  // from here on it is 1
  Floats inside = x > kMost ? Floats{} + kMost : x;
  inside = inside < -kMost ? Floats{} - kMost : inside;  // NaN stays
  const Floats square = inside * inside;
  Floats p = square * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * square + -8.60467152213735e-11f;
  p = p * square + 5.12229709037114e-08f;
  p = p * square + 1.48572235717979e-05f;
  p = p * square + 6.37261928875436e-04f;
  p = p * square + 4.89352455891786e-03f;
  Floats q = square * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * square + 2.26843463243900e-03f;
  q = q * square + 4.89352518554385e-03f;
  return inside * p / q;
}

template <int N>
inline Vector<double, N> Tanh(Vector<double, N> x) {
  for (int i = 0; i < N; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}

// A bijection of 32-bit numbers, each bit of which depends on all bits of x: "lowbias32" of
// https://nullprogram.com/blog/2018/07/31/.
template <typename Words>
inline Words Mixed(Words x, Words between) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x += between;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

constexpr uint32_t kGolden = 0x9e3779b9u;

// The terms of kRows rows of a head for the keys of one block. Lanes are those of AttentionTile:
// vector t of scores has kPart keys of each row.
template <typename Acc, int kRows>
class BlockTerms {
  using Tile = AttentionTile<Acc, kRows>;
  static constexpr int kSize = Tile::kSize, kPart = Tile::kPart;
  using V = typename Tile::V;
  using Ints = Vector<int32_t, kSize>;
  using Words = Vector<uint32_t, kSize>;
  using Wide = Vector<std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>, kSize>;

 public:
  // `height` of the rows from `row` on are in the matrix.
  BlockTerms(const AttentionProblem& args, int64_t batch, int64_t head, int64_t row, int64_t height)
      : terms_(args.terms), batch_(batch), head_(head) {
    if (!terms_.any) return;
    const int64_t offset = terms_.offset ? terms_.offset[batch * terms_.offset_stride] : 0;
    const uint32_t* seeds =
        terms_.seeds ? terms_.seeds + batch * terms_.seeds_stride + head * 2 : nullptr;
    const int32_t* segments =
        terms_.query_segments ? terms_.query_segments + batch * terms_.query_segments_stride + row
                              : nullptr;
    for (int lane = 0; lane < kSize; ++lane) {
      const int64_t r = lane / kPart;
      places_[lane] = uint32_t(row + r + offset);
      segments_[lane] = segments && r < height ? segments[r] : 0;
      for (int i = 0; i < 2 && seeds; ++i) {
        seeds_[i][lane] = Mixed<uint32_t>(uint32_t(row + r) * kGolden + seeds[i], 0);
      }
    }
  }

  // The columns [begin, begin + count), of whole vectors up to `padded`: then those of `count` - 1.
  void SetColumns(const AttentionProblem& args, int64_t begin, int count, int padded) {
    const int32_t* columns = args.indices + begin;
    for (int j = 0; j < padded; ++j) columns_[j] = columns[j < count ? j : count - 1];
  }

  bool Curbs() const { return terms_.softcap > 0; }
  bool Drops() const { return terms_.seeds; }

  // s = cap tanh(s / cap); the derivatives are written to `slopes`, unless that is null.
  void Curb(int padded, Acc* scores, Acc* slopes) const {
    const auto cap = Acc(terms_.softcap), inverse = Acc(1 / terms_.softcap);
    for (int i = 0; i < padded * kRows; i += kSize) {
      const V t = Tanh<kSize>(Load<Acc, kSize>(scores + i) * inverse);
      Store<Acc, kSize>(scores + i, t * cap);
      if (slopes) Store<Acc, kSize>(slopes + i, Acc(1) - t * t);
    }
  }

  // Adds what depends on the distance, and leaves out the keys of other segments.
  void Add(int padded, Acc* scores) const {
    if (terms_.slopes) {
      const Acc slope = *SlopeOfHead();
      for (int i = 0; i < padded * kRows; i += kSize) {
        Store<Acc, kSize>(scores + i, Load<Acc, kSize>(scores + i) - Far(i) * slope);
      }
    }
    if (terms_.table) {
      const Acc* table = static_cast<const Acc*>(terms_.table) + batch_ * terms_.table_stride +
                         head_ * terms_.range;
      for (int i = 0; i < padded * kRows; i += kSize) {
        const Ints places = TablePlaces(i);
        V found;
        for (int lane = 0; lane < kSize; ++lane) found[lane] = table[places[lane]];
        Store<Acc, kSize>(scores + i, Load<Acc, kSize>(scores + i) + found);
      }
    }
    if (terms_.query_segments) LeaveOut(padded, scores);
  }

  // The factors of the probabilities of vector i / kSize: 1 / (1 - rate), or zero.
  V Kept(int i) const {
    const Words mixed = Mixed(BitCast<Words>(ColumnsOf(i)) * kGolden + seeds_[0], seeds_[1]);
    const Wide kept = __builtin_convertvector(mixed < terms_.kept, Wide);
    return kept != 0 ? V{} + Acc(terms_.keep_scale) : V{};
  }

  // Adds the gradients of scores to those of the slope of the head and of its table: `sums`
  // [range + 1], the first of which is the slope's.
  void AddGradients(int padded, const Acc* gradients, double* sums) const {
    if (terms_.slopes) {
      V total = {};
      for (int i = 0; i < padded * kRows; i += kSize) {
        total -= Load<Acc, kSize>(gradients + i) * Far(i);
      }
      for (int lane = 0; lane < kSize; ++lane) sums[0] += double(total[lane]);
    }
    if (terms_.table) {
      for (int i = 0; i < padded * kRows; i += kSize) {
        const Ints places = TablePlaces(i);
        for (int lane = 0; lane < kSize; ++lane) {
          sums[1 + places[lane]] += double(gradients[i + lane]);
        }
      }
    }
  }

 private:
  const Acc* SlopeOfHead() const {
    return static_cast<const Acc*>(terms_.slopes) + batch_ * terms_.slopes_stride + head_;
  }

  // The numbers of kPart keys, in the lanes of every row.
  static Ints OfKeys(const int32_t* keys) {
    Ints found;
    char* bytes = reinterpret_cast<char*>(&found);
    constexpr int kBytes = kPart * sizeof(int32_t);
    for (int r = 0; r < kRows; ++r) std::memcpy(bytes + r * kBytes, keys, kBytes);
    return found;
  }

  Ints ColumnsOf(int i) const { return OfKeys(columns_ + i / kSize * kPart); }

  // Column less place of the row. Without overflow where both are within 2^30.
  Ints Distances(int i) const { return BitCast<Ints>(BitCast<Words>(ColumnsOf(i)) - places_); }

  V Far(int i) const {
    const V far = __builtin_convertvector(Distances(i), V);
    return far < 0 ? -far : far;
  }

  Ints TablePlaces(int i) const {
    const auto half = int32_t(terms_.range / 2), last = int32_t(terms_.range - 1);
    // Clipped before the sum, which could overflow.
    Ints d = Distances(i);
    d = d < -half ? Ints{} - half : d;
    d = d > last - half ? Ints{} + (last - half) : d;
    return d + half;
  }

  void LeaveOut(int padded, Acc* scores) const {
    alignas(64) int32_t found[kMostColumns];
    const int32_t* own = terms_.key_segments + batch_ * terms_.key_segments_stride;
    for (int j = 0; j < padded; ++j) found[j] = own[columns_[j]];
    for (int i = 0; i < padded * kRows; i += kSize) {
      const Wide same =
          __builtin_convertvector(OfKeys(found + i / kSize * kPart) == segments_, Wide);
      const V s = Load<Acc, kSize>(scores + i);
      Store<Acc, kSize>(scores + i, same != 0 ? s : V{} - Acc(__builtin_inf()));
    }
  }

  static constexpr int kMostColumns = 256 + 16;
  const ScoreTerms& terms_;
  int64_t batch_, head_;
  alignas(64) int32_t columns_[kMostColumns];
  Ints segments_;  // of the rows, as the others
  Words places_;   // among the keys
  Words seeds_[2];
};

}  // namespace sgap::SGAP_ISA
