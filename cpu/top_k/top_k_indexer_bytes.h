// Scores of an indexer from q and keys rounded to bytes, four products to a lane: twice as many as
// of 16 bits (top_k_indexer_rounded.h). What rounding may have taken from a score is added to it,
// so none is less than without rounding. A sample of the columns gives each row a threshold, and
// only what reaches it is kept, of the other columns while it is in a register.
#pragma once

#include "cpu/top_k/top_k_indexer_byte_pairs.h"

namespace sgap::SGAP_ISA {

constexpr float kGreatestByte = 126.5f;  // rounded to 127 at most in any mode
constexpr uint32_t kByteOffsets = 0x80808080u;

// Where a column is among those of the panels of bytes.
inline int64_t PlaceOfBytes(int64_t column, int64_t panels) {
  const int64_t sampled = column / kColumnsOfSample, which = column % kColumnsOfSample;
  if (which == 0) return sampled;
  return SamplePanels(panels) * kPanelColumns + sampled * (kColumnsOfSample - 1) + which - 1;
}

// What a key's elements are taken to be at most, so that few keys have much longer integers than
// others: a row's bound is by the longest. The norm of most keys of normal numbers is about
// 0.72 + 0.3 sqrt(depth) times their greatest element.
template <typename T>
float GreatestOfByteKey(const T* key, int64_t depth, float greatest) {
  constexpr int N = 16;
  const float inverse = 1 / greatest;
  Vector<float, N> squares = {};
  for (int64_t d = 0; d < depth; d += N) {
    const auto part = LoadPart(key, depth, d) * inverse;
    squares += part * part;
  }
  const float norm = __builtin_sqrtf(FoldLanes<1, float, N>(squares)[0]);
  const float longer = norm / (0.72f + 0.3f * __builtin_sqrtf(float(depth)));
  return longer > 1 ? greatest * longer : greatest;
}

// Writes a key to column j of a panel of bytes, each of them plus 128 but for matrix tiles. Its
// norms are those of the integers.
template <typename T>
RoundedVector PackBytes(const T* key, int64_t depth, float greatest, int64_t j, bool tiles,
                        char* panel) {
  const uint32_t offsets = tiles ? 0 : kByteOffsets;
  auto* out = reinterpret_cast<uint32_t*>(panel) + j;
  RoundedVector found = RoundVector<int8_t>(
      key, depth, GreatestOfByteKey(key, depth, greatest), kGreatestByte,
      [&](int64_t i, uint32_t word) { out[i * kPanelColumns] = word ^ offsets; });
  reinterpret_cast<float*>(panel)[ByteWords(depth) * kPanelColumns + j] = found.scale;
  found.norm /= found.scale, found.off /= found.scale;
  return found;
}

// The memory of a task whose scores are of bytes.
struct ByteScratch {
  float* sample;
  int32_t *columns, *q;
  // Where sums begin, those of the sample and of the other columns; of matrix tiles, the least that
  // they count as.
  int32_t *start, *lower;
  float* weights;
  int32_t *rounded_q, *higher;  // in 16 bits, and where sums of these begin
  float* rounded_weights;
  RowSurvivors* rows;
  OpenColumns open;
  float* scores;
  int64_t columns_stride, sample_stride;
  RowScratch<float> selection;
  float* memory;  // for the scores of some columns

  ByteScratch(char* from, const TopKIndexerArgs& args, const IndexerRows& at, int64_t pairs)
      : selection(nullptr, 0) {
    const auto take = [&](int64_t bytes) {
      char* const begin = AlignedLine(from);
      from = begin + bytes;
      return begin;
    };
    const auto ints = [&](int64_t count) { return reinterpret_cast<int32_t*>(take(4 * count)); };
    const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(4 * count)); };
    const int64_t room = args.top_k.columns + 64;
    sample_stride = SamplePanels(args.PanelCount()) * kPanelColumns;
    columns_stride = at.stride + 64;
    columns = ints(at.rows * columns_stride);
    sample = floats(at.rows * sample_stride);
    q = ints(pairs * ByteWords(args.depth)), start = ints(pairs), lower = ints(pairs);
    weights = floats(pairs);
    rounded_q = ints(pairs * RoundedWords(args.depth)), higher = ints(pairs);
    rounded_weights = floats(pairs);
    rows = reinterpret_cast<RowSurvivors*>(take(at.rows * int64_t(sizeof(RowSurvivors))));
    scores = floats(room), selection.keys = ints(room);
    open = {ints(room), ints(room), floats(room), ints(room)};
    memory = floats(0);
  }
};

// Four heads of a row: vectors of up to kMostByteDepth elements each.
struct FewVectors {
  static constexpr int kCount = 4, N = 16, kPairs = kCount * (kCount + 1) / 2;
  using Floats = Vector<float, N>;
  alignas(kVectorBytes) float x[kCount][kMostByteDepth];

  // The products of each two, by lanes that are yet to be added: of i and j <= i at Pair(i, j).
  void Multiply(int64_t depth, Floats* sums) const {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) {
        Floats sum = {};
        for (int64_t d = 0; d < depth; d += N) {
          sum += Load<float, N>(x[i] + d) * Load<float, N>(x[j] + d);
        }
        sums[Pair(i, j)] = sum;
      }
    }
  }

  static constexpr int Pair(int i, int j) { return i * (i + 1) / 2 + j; }

  // Lane s: the square of the norm of the sum of those vectors times their weights that s has a bit
  // for, by products of each two.
  static Floats Squares(const float* products, const float* weights) {
    const auto subsets = LaneNumbers<int32_t, N>();
    Floats squares = {};
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) {
        const float both = products[Pair(i, j)] * (weights[i] * weights[j]) * (i == j ? 1 : 2);
        squares = (subsets & (1 << i | 1 << j)) == (1 << i | 1 << j) ? squares + both : squares;
      }
    }
    return squares;
  }
};

// What rounding may take from a score by some heads, of which these are the weights, and the
// products of q' and of q - q': by those with a positive weight, and by all. Of positive
// weights so small that their squares are lost it is less than RowSurvivors::small.
struct TakenByHeads {
  static constexpr int kCount = FewVectors::kCount, N = FewVectors::N;
  using Floats = FewVectors::Floats;
  float of_positive, of_all;

  TakenByHeads(const float* weights, const float* values, const float* offs,
               const KeyBounds& units) {
    constexpr int kAll = -1;
    int positive = 0;
    for (int i = 0; i < kCount; ++i) positive |= (weights[i] > 0) << i;
    Floats value, off;
    const auto square = [&](float largest, int some) {
      float own[kCount];
      const float inverse = 1 / largest;  // times this: else their squares may be 0
      for (int i = 0; i < kCount; ++i) own[i] = some >> i & 1 ? weights[i] * inverse : 0;
      value = FewVectors::Squares(values, own), off = FewVectors::Squares(offs, own);
    };
    float largest = Largest(weights, kAll);
    square(largest, kAll);
    of_all = largest * Greatest(value, off, kAll, units);
    const float of_these = Largest(weights, positive);
    if (of_these < 0x1p-30f * largest) largest = of_these, square(largest, positive);
    of_positive = largest * Greatest(value, off, positive, units);
  }

 private:
  static float Largest(const float* weights, int some) {
    float largest = 0x1p-100f;
    for (int i = 0; i < kCount; ++i) {
      const float size = some >> i & 1 ? __builtin_fabsf(weights[i]) : 0;
      largest = size > largest ? size : largest;
    }
    return largest;
  }

  // By the greatest norms of sums of some of the heads.
  static float Greatest(Floats values, Floats offs, int some, const KeyBounds& units) {
    const auto others = LaneNumbers<int32_t, N>() & ~some;
    const auto norm = [&](Floats squares) {
      return 1.001f * __builtin_sqrtf(GreatestLane<float, N>(others == 0 ? squares : Floats{}));
    };
    return norm(offs) * units.norm + norm(values) * units.off;
  }
};

// Which columns of a row without a positive weight have the score 0, by q and keys of 16 bits: each
// head's sum begins higher by all that rounding may take from it, so where it is not above 0 nor is
// the product without rounding. Where that holds for all heads, the score is 0. Other scores come
// out lower by at most Lower(), and are computed without rounding.
struct CertainZeros {
  bool known = true;  // no weight is positive, and no product or score is too small for a float32
  float lower = 0;    // how much lower a score comes out, without the factor of a key

  // Of q of so many features, in units of its integers, by the square root of that and the greatest
  // of these.
  int32_t Add(float weight, const RoundedVector& q, float root, float most, float terms) {
    const float key = (most + 1) * root, key_off = 0.52f * root;  // at most, in units of a key's
    const float higher =
        1.01f * (q.off * key + q.norm * key_off + terms * (q.norm + q.off) * key) + 1;
    const float unit = weight * q.scale;
    lower += higher * -unit;
    known = known && (weight == 0 || unit <= -0x1p-30f) && q.scale >= 0x1p-40f &&
            higher < 0x1.8p16f * root;  // and sums stay below 2^31
    return known ? int32_t(higher) : 0;
  }

  // A key's factor is at most that of the longest key if this had one element.
  float Lower(const KeyBounds& keys, int64_t depth) const {
    const float greatest = keys.norm > kLeastMagnitude ? keys.norm : kLeastMagnitude;
    return 1.01f * lower * greatest / GreatestInteger(depth);
  }
};

// Four heads of a row, rounded to bytes and to 16 bits: where they go to, and what they are off by.
// Zeros in place of heads that do not exist, or with an element that is not finite.
struct FourHeads {
  static constexpr int kCount = FewVectors::kCount, N = 16;
  using Floats = Vector<float, N>;
  using Ints = Vector<int32_t, N>;
  using Words = Vector<uint32_t, N>;
  using Four = Vector<float, kCount>;

  int32_t* bytes;    // [kCount, words] if `rows`, else [words, kCount]
  int32_t* rounded;  // [words, kCount]
  bool rows;
  FewVectors values, offs;  // in units of the integers
  // What belongs to one place of these is added up over the features: from 0 on the products of
  // each two `values`, from kOffs on those of each two `offs`, and what the functions name, for a
  // head.
  static constexpr int kOffs = N;
  static constexpr int SumPlace(int h) { return FewVectors::kPairs + h; }
  static constexpr int SquarePlace(int h) {  // of 16 bits; two behind either half's products
    return FewVectors::kPairs + (h < 2 ? kCount + h : kOffs + h - 2);
  }
  static constexpr int OffSquarePlace(int h) { return kOffs + FewVectors::kPairs + 2 + h; }
  alignas(kVectorBytes) float found[2 * N];
  Four greatest, byte_scale, scale;  // of an integer, and infinite where not all is finite

  template <typename T>
  void Round(const T* from, int64_t count, int64_t depth, float most) {
    for (int h = 0; h < kCount; ++h) {
      greatest[h] = h < count ? GreatestMagnitude(from + h * depth, depth) : kLeastMagnitude;
    }
    const Four by = kGreatestByte / greatest, by_rounded = most / greatest;
    byte_scale = greatest / kGreatestByte, scale = greatest / most;
    Floats sums[2 * N] = {};
    for (int64_t d = 0; d < depth; d += N) {
      Vector<int8_t, N> as_bytes[kCount];
      Vector<int16_t, N> as_halves[kCount];
#pragma GCC unroll 4
      for (int h = 0; h < kCount; ++h) {
        constexpr float kShift = 0x1.8p23f;  // the integer is in the lowest bits of x + this
        Floats x = {};
        if (h < count && greatest[h] < __builtin_inff()) x = LoadPart(from + h * depth, depth, d);
        const Floats scaled = x * by[h], shifted = scaled + kShift, value = shifted - kShift;
        as_bytes[h] = LowestBits<int8_t>(BitCast<Ints>(shifted));
        Store<float, N>(values.x[h] + d, value), Store<float, N>(offs.x[h] + d, scaled - value);
        sums[SumPlace(h)] += value;
        const Floats wide = x * by_rounded[h], shifted_wide = wide + kShift;
        const Floats rounded_wide = shifted_wide - kShift, off = wide - rounded_wide;
        as_halves[h] = LowestBits<int16_t>(BitCast<Ints>(shifted_wide));
        sums[SquarePlace(h)] += rounded_wide * rounded_wide;
        sums[OffSquarePlace(h)] += off * off;
      }
      Write(d, depth, as_bytes, as_halves, std::make_integer_sequence<int, N>());
    }
    values.Multiply(depth, sums), offs.Multiply(depth, sums + kOffs);
    Store<float, N>(found, SumTransposed<N / 2>(sums));
    Store<float, N>(found + N, SumTransposed<N / 2>(sums + N));
  }

 private:
  // 16 features from d on.
  template <int... i>
  void Write(int64_t d, int64_t depth, const Vector<int8_t, N>* as_bytes,
             const Vector<int16_t, N>* as_halves, std::integer_sequence<int, i...>) const {
    if (rows) {
      for (int h = 0; h < kCount; ++h) {
        __builtin_memcpy(bytes + h * ByteWords(depth) + d / 4, &as_bytes[h], N);
      }
    } else {
      const auto both = [&](int h) { return Concat<int8_t, N>(as_bytes[h], as_bytes[h + 1]); };
      const auto all = BitCast<Words>(Concat<int8_t, 2 * N>(both(0), both(2)));
      const Words words = Shuffle<(i % kCount * 4 + i / kCount)...>(all, all);
      __builtin_memcpy(bytes + d / 4 * kCount, &words, sizeof(words));
    }
    const auto both = [&](int h) {
      return BitCast<Words>(Concat<int16_t, N>(as_halves[h], as_halves[h + 1]));
    };
    const Words low = both(0), high = both(2);
    const Words words[2] = {
        Shuffle<(i % kCount * 8 + i / kCount)...>(low, high),
        Shuffle<(i % kCount * 8 + i / kCount + 4)...>(low, high),
    };
    __builtin_memcpy(rounded + d / 2 * kCount, words, sizeof(words));
  }
};

// q and weights of a task's rows as BytePairs has them, zeros where there are none, and what a
// score of theirs may be greater by: without rounding it has, times the factor of the key,
//   (sum_h t_h w_h (q_h - q'_h)) . k + (sum_h t_h w_h q'_h) . (k - k')
// more, where t_h in [0, 1] is how much of the difference max(., 0) lets through; at most what some
// of the heads add together, of four at a time. Where a score is kept or not as it is computed,
// `raised` is this by heads with a positive weight. Products of the others begin lower by all that
// they may be off by instead, so that mostly nothing is left of them. On matrix tiles they count as
// at least that much, l, as max(s - l, 0) = max(s, l) - l; `raised` has the sum of w_h (-l) too.
template <typename T>
void RoundToBytes(const TopKIndexerArgs& args, const IndexerRows& at, const ByteScratch& own) {
  constexpr int kTogether = BytePairs::kTogether;
  static_assert(kTogether == FourHeads::kCount);
  const int64_t heads = BytePairs::Parts(args.heads) * kTogether, depth = args.depth;
  const int64_t words = ByteWords(depth), rounded_words = RoundedWords(depth);
  const KeyBounds keys = GreatestBounds(args, at, false), units = GreatestBounds(args, at, true);
  const float root = __builtin_sqrtf(float(depth)), most = GreatestInteger(depth);
  // The rounding of sums, of each term of a product and of a score; and that before rounding to
  // integers.
  const float terms = float(depth + 2 * args.heads + 32) * 0x1p-22f;
  const float scaling = kGreatestByte * 0x1p-21f * root, rounded_scaling = most * 0x1p-21f * root;
  const T* from = static_cast<const T*>(args.q) + at.place * depth;
  const T* from_weights = static_cast<const T*>(args.weights) + at.place;
  FourHeads four;
  four.rows = args.tiles;
  int64_t i = 0;
  for (int64_t r = 0; r < at.rows; ++r) {
    RowSurvivors& row = own.rows[r];
    row = {own.columns + r * own.columns_stride,
           0,
           at.Limit(args.top_k, r),
           __builtin_inff(),
           0,
           0,
           0,
           0,
           __builtin_inff()};
    RowBound bound;
    CertainZeros zeros;
    float lifted = 0;  // of tiles: the sum of w_h (-l)
    for (int64_t first = 0; first < heads; first += kTogether, i += kTogether) {
      const int64_t left = args.heads - first, count = left < kTogether ? left : kTogether;
      four.bytes = own.q + (args.tiles ? TiledBytes::Place(r, first, heads) : i) * words;
      four.rounded = own.rounded_q + i * rounded_words;
      four.Round(from, count, depth, most);
      for (int h = 0; h < kTogether; ++h) {
        float lower = 0;
        own.weights[i + h] = own.rounded_weights[i + h] = 0, own.higher[i + h] = 0;
        const int32_t offsets = -128 * int32_t(four.found[FourHeads::SumPlace(h)]);
        own.start[i + h] = args.tiles ? 0 : offsets;
        if (h < count) {
          const float weight = LoadScalar(from_weights + h);
          const bool finite = four.greatest[h] < __builtin_inff();
          const auto found = [&](float scale, float square, float off_square, float more) {
            if (!finite) return RoundedVector{0, __builtin_inff(), __builtin_inff()};
            return RoundedVector{scale, 1.001f * __builtin_sqrtf(square),
                                 1.001f * __builtin_sqrtf(off_square) + more};
          };
          const int own_pair = FewVectors::Pair(h, h);
          const RoundedVector in_bytes = found(four.byte_scale[h], four.found[own_pair],
                                               four.found[FourHeads::kOffs + own_pair], scaling);
          own.weights[i + h] = weight * in_bytes.scale;
          RoundedVector in_words = found(four.scale[h], four.found[FourHeads::SquarePlace(h)],
                                         four.found[FourHeads::OffSquarePlace(h)], rounded_scaling);
          own.rounded_weights[i + h] = weight * in_words.scale;
          own.higher[i + h] = zeros.Add(weight, in_words, root, most, terms);
          if (finite) in_words.norm *= in_words.scale, in_words.off *= in_words.scale;
          bound.Add(weight, in_words, keys);
          const float sums = terms * (in_bytes.norm + in_bytes.off) * units.norm;
          const float rounding =
              __builtin_fabsf(own.weights[i + h]) * (scaling * units.norm + sums);
          row.off += rounding;
          if (weight < 0) {
            lower = 1.01f * (in_bytes.off * units.norm + in_bytes.norm * units.off + sums) + 1;
            if (!(lower < 0x1p30f)) lower = 0, row.off = __builtin_inff();
          } else {
            row.raised += rounding;
          }
        }
        own.lower[i + h] = args.tiles ? int32_t(lower) : offsets - int32_t(lower);
        if (args.tiles) lifted -= own.weights[i + h] * float(own.lower[i + h]);
      }
      const TakenByHeads taken(own.weights + i, four.found, four.found + FourHeads::kOffs, units);
      row.raised += taken.of_positive, row.off += taken.of_all;
      from += count * depth, from_weights += count;
    }
    row.raised = 1.01f * row.raised + lifted * (1 + terms), row.off *= 1.01f;
    row.small = bound.Small(keys, depth, args.heads);
    row.rounded_off = bound.Of(keys, depth, args.heads);
    if (zeros.known) row.lower = zeros.Lower(keys, depth) + row.small;
    if (!(row.rounded_off < kGreatestBound)) row.off = __builtin_inff();
  }
}

// The score of rank `rank` of numbers, with room for their keys.
inline float ScoreOfRank(const float* scores, int64_t count, int64_t rank, int32_t* keys) {
  constexpr int N = 16;
  // Bits of positive numbers are their keys, and those of negative ones are less.
  const int32_t bits = KeyOfRank(reinterpret_cast<const int32_t*>(scores), count, rank, int64_t(0));
  if (bits > 0) return ScoreOf<float>(bits);
  for (int64_t i = 0; i < count; i += N) {
    const auto own = KeysOf<float, N>(Load<float, N>(scores + i));
    __builtin_memcpy(keys + i, &own, sizeof(own));
  }
  return ScoreOf<float>(KeyOfRank(keys, count, rank, int64_t(0)));
}

// The cost of computing the score of a column that is left open, in those of bytes.
constexpr int64_t kOpenCost = 4;

// A score that more than k of a row's columns reach, by a sample of them, with its panels; infinite
// where that does not say so, or says that too many columns would stay open.
inline float ByteThreshold(const float* sample, const char* panels, int64_t depth,
                           const RowSurvivors& row, int64_t k, int32_t* keys) {
  constexpr int N = 16;
  const float none = __builtin_inff();
  const int64_t size = (row.limit + kColumnsOfSample - 1) / kColumnsOfSample;
  if (size < kLeastSampled || !(row.off < kGreatestBound)) return none;
  const double expected = double(size) * double(k) / double(row.limit);
  constexpr double kOthers = 1 - 1. / kColumnsOfSample;
  const double rank = expected + 3 * __builtin_sqrt(kOthers * expected) + 2;
  if (rank > 0.5 * double(size)) return none;
  // The greatest of each lane of some vectors say it too: few lanes have two that are so great.
  constexpr int kTogether = 16, kMostLanes = 2 * kTogether * N;
  const float* scores = sample;
  alignas(kVectorBytes) float greatest[kMostLanes];
  const int64_t lanes = size >= 2 * kMostLanes ? kMostLanes : kTogether * N;
  int64_t count = size;
  double among = rank;
  if (size >= 2 * lanes && rank < 0.5 * double(lanes)) {
    const int64_t times = size / lanes;
    for (int64_t from = 0; from < lanes; from += kTogether * N) {
      Vector<float, N> x[kTogether];
      for (int j = 0; j < kTogether; ++j) x[j] = Load<float, N>(sample + from + j * N);
      for (int64_t i = from + lanes; i < times * lanes; i += lanes) {
#pragma GCC unroll 16
        for (int j = 0; j < kTogether; ++j) {
          const auto y = Load<float, N>(sample + i + j * N);
          x[j] = y > x[j] ? y : x[j];
        }
      }
      for (int j = 0; j < kTogether; ++j) Store<float, N>(greatest + from + j * N, x[j]);
    }
    scores = greatest, count = lanes;
    double none_of = 1;
    for (int64_t i = 0; i < times; ++i) none_of *= 1 - rank / double(size);
    among = double(count) * (1 - none_of);
  }
  const float threshold = ScoreOfRank(scores, count, int64_t(among), keys);
  // What is just as great is left.
  const float least = threshold - 2 * row.small - 0x1p-22f * __builtin_fabsf(threshold);
  const float half = 0.5f * row.off;
  int64_t open = 0, seen = 0;  // of the first vector of each panel
  for (int64_t i = 0; i + N <= size; i += kPanelColumns, seen += N) {
    const float* factors = BytePairs::Factors(panels, ByteWords(depth));
    const auto x = Load<float, N>(sample + i) + half * Load<float, N>(factors);
    open += __builtin_popcount(LanesFrom<float, N>(x, least));
    panels += BytePanelBytes(depth);
  }
  return kOpenCost * open > seen ? none : least;
}

// The scores of a task's rows by bytes: of the sample, and survivors among all columns.
struct ByteScores {
  const IndexerRows& at;
  const ByteScratch& own;
  const BytePairs& pairs;
  int64_t panel_bytes;
  const char *sample, *others;  // panels

  void Sample(const int32_t* start) const {
    for (int64_t j = 0; j * kColumnsOfSample < at.columns; j += kPanelColumns) {
      pairs.Write(at.rows, sample + j / kPanelColumns * panel_bytes, start, own.sample + j,
                  own.sample_stride);
    }
  }

  void Collect(const int32_t* start) const {
    for (int64_t j = 0; j < at.columns; j += BytePairs::kColumns) {
      pairs.Collect(at.rows, others + j / BytePairs::kColumns * panel_bytes, start,
                    SampleFactors(j), own.sample + j / kColumnsOfSample, own.sample_stride, j,
                    own.rows);
    }
  }

  void Sample(TiledBytes& tiled) const {
    struct Each {
      float* scores;
      int64_t stride, panel;
      float First(int64_t) const { return 0; }
      void Panel(int64_t p) { panel = p; }
      void Row(int64_t row, const BytePairs::Floats* x) const {
        float* const out = scores + row * stride + panel * kPanelColumns;
#pragma GCC unroll 4
        for (int v = 0; v < BytePairs::kVectors; ++v) Store<float, 16>(out + v * 16, x[v]);
      }
    };
    constexpr int64_t kColumns = kPanelColumns * kColumnsOfSample;
    tiled.Score(sample, (at.columns + kColumns - 1) / kColumns,
                Each{own.sample, own.sample_stride, 0});
  }

  void Collect(TiledBytes& tiled) const {
    struct Each {
      const ByteScores& scores;
      RowSurvivors* rows;
      const float* sampled;  // of the panel
      int64_t stride, first;
      BytePairs::Floats factors;
      float First(int64_t row) const { return rows[row].raised; }
      void Panel(int64_t p) {
        first = p * BytePairs::kColumns;
        sampled = scores.own.sample + p * (BytePairs::kColumns / kColumnsOfSample);
        factors = Load<float, 16>(scores.SampleFactors(first));
      }
      void Row(int64_t row, const BytePairs::Floats* x) const {
        RowSurvivors& own = rows[row];
        const auto sample = Load<float, 16>(sampled + row * stride);
        BytePairs::Keep(x, sample + own.off * factors, first, own);
      }
    };
    tiled.Score(others, (at.columns + BytePairs::kColumns - 1) / BytePairs::kColumns,
                Each{*this, own.rows, own.sample, own.sample_stride, 0, {}});
  }

  // Those of the columns of the sample from column `first` on.
  const float* SampleFactors(int64_t first) const {
    const int64_t sampled = first / kColumnsOfSample;
    return BytePairs::Factors(sample + sampled / kPanelColumns * panel_bytes, pairs.words) +
           sampled % kPanelColumns;
  }
};

}  // namespace sgap::SGAP_ISA
