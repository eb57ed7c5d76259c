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

// Writes a key to column j of a panel of bytes, each of them plus 128. Its norms are those of the
// integers.
template <typename T>
RoundedVector PackBytes(const T* key, int64_t depth, float greatest, int64_t j, char* panel) {
  auto* out = reinterpret_cast<uint32_t*>(panel) + j;
  RoundedVector found = RoundVector<int8_t>(
      key, depth, GreatestOfByteKey(key, depth, greatest), kGreatestByte,
      [&](int64_t i, uint32_t word) { out[i * kPanelColumns] = word ^ kByteOffsets; });
  reinterpret_cast<float*>(panel)[ByteWords(depth) * kPanelColumns + j] = found.scale;
  found.norm /= found.scale, found.off /= found.scale;
  return found;
}

// The memory of a task whose scores are of bytes.
struct ByteScratch {
  float* sample;
  int32_t *columns, *q;
  int32_t *start, *lower;  // where sums begin: those of the sample, and of the other columns
  int32_t* begun;          // these as matrix tiles have them
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
    begun = ints(args.tiles ? pairs * kTileColumns : 0);
    weights = floats(pairs);
    rounded_q = ints(pairs * RoundedWords(args.depth)), higher = ints(pairs);
    rounded_weights = floats(pairs);
    rows = reinterpret_cast<RowSurvivors*>(take(at.rows * int64_t(sizeof(RowSurvivors))));
    scores = floats(room), selection.keys = ints(room);
    open = {ints(room), ints(room), floats(room), ints(room)};
    memory = floats(0);
  }
};

// Four vectors of up to kMostByteDepth elements, by the products of each two of them.
struct FewVectors {
  static constexpr int kCount = 4, N = 16;
  using Floats = Vector<float, N>;
  alignas(kVectorBytes) float x[kCount][kMostByteDepth];
  float products[kCount][kCount];

  void Multiply(int64_t depth) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) {
        Floats sum = {};
        for (int64_t d = 0; d < depth; d += N) {
          sum += Load<float, N>(x[i] + d) * Load<float, N>(x[j] + d);
        }
        products[i][j] = FoldLanes<1, float, N>(sum)[0];
      }
    }
  }

  // The greatest norm of a sum of some of the vectors times their weights, which are at most 1, or
  // a little more.
  float GreatestSum(const float* weights) const {
    const auto subsets = LaneNumbers<int32_t, N>();  // bit i: whether it has vector i
    Floats squares = {};
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j <= i; ++j) {
        const float both = products[i][j] * weights[i] * weights[j] * (i == j ? 1 : 2);
        squares += (subsets & (1 << i | 1 << j)) == (1 << i | 1 << j) ? both - Floats{} : Floats{};
      }
    }
    return 1.001f * __builtin_sqrtf(GreatestLane<float, N>(squares));
  }
};

// Adds what rounding may take from a score by some heads, of which these are the weights, q' and
// q - q': by those with a positive weight to `raised`, by all to `off`.
inline void AddOff(const float* weights, const FewVectors& values, const FewVectors& offs,
                   const KeyBounds& units, RowSurvivors& row) {
  constexpr int kCount = FewVectors::kCount;
  const auto greatest = [&](float least_weight) {
    float own[kCount], largest = 0x1p-100f;
    for (int i = 0; i < kCount; ++i) {
      own[i] = weights[i] > least_weight ? weights[i] : 0;
      const float size = __builtin_fabsf(own[i]);
      largest = size > largest ? size : largest;
    }
    for (float& weight : own) weight /= largest;  // of these: else their squares may be 0
    return largest * (offs.GreatestSum(own) * units.norm + values.GreatestSum(own) * units.off);
  };
  row.raised += greatest(0), row.off += greatest(-__builtin_inff());
}

// Which columns of a row without a positive weight have the score 0, by q and keys of 16 bits: each
// head's sum begins higher by all that rounding may take from it, so where it is not above 0 nor is
// the product without rounding. Where that holds for all heads, the score is 0. Other scores come
// out lower by at most Lower(), and are computed without rounding.
struct CertainZeros {
  bool known = true;  // no weight is positive, and no product or score is too small for a float32
  float lower = 0;    // how much lower a score comes out, without the factor of a key

  int32_t Add(float weight, const RoundedVector& q, int64_t depth, float terms) {
    const float most = GreatestInteger(depth) + 1, root = __builtin_sqrtf(float(depth));
    const float norm = q.norm / q.scale, off = q.off / q.scale;
    const float key = most * root, key_off = 0.52f * root;  // at most, in units of a key's integers
    const float higher = 1.01f * (off * key + norm * key_off + terms * (norm + off) * key) + 1;
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

// q and weights of a task's rows as BytePairs has them, zeros where there are none, and what a
// score of theirs may be greater by: without rounding it has, times the factor of the key,
//   (sum_h t_h w_h (q_h - q'_h)) . k + (sum_h t_h w_h q'_h) . (k - k')
// more, where t_h in [0, 1] is how much of the difference max(., 0) lets through; at most what some
// of the heads add together, of four at a time. Where a score is kept or not as it is computed,
// `raised` is this by heads with a positive weight. Products of the others begin lower by all that
// they may be off by instead, so that mostly nothing is left of them.
template <typename T>
void RoundToBytes(const TopKIndexerArgs& args, const IndexerRows& at, const ByteScratch& own) {
  constexpr int64_t kTogether = BytePairs::kTogether;
  static_assert(kTogether == FewVectors::kCount);
  const int64_t heads = BytePairs::Parts(args.heads) * kTogether;
  const int64_t words = ByteWords(args.depth), padded = 4 * words;
  const KeyBounds keys = GreatestBounds(args, at, false), units = GreatestBounds(args, at, true);
  // The rounding of sums, of each term of a product and of a score; and that before rounding to
  // integers.
  const float terms = float(args.depth + 2 * args.heads + 32) * 0x1p-22f;
  const float scaling = kGreatestByte * 0x1p-21f * __builtin_sqrtf(float(args.depth));
  const float most = GreatestInteger(args.depth);
  const T* from = static_cast<const T*>(args.q) + at.place * args.depth;
  const T* from_weights = static_cast<const T*>(args.weights) + at.place;
  FewVectors values, offs;
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
    for (int64_t h = 0; h < heads; ++h, ++i) {
      const int64_t place = i % kTogether;
      int32_t* out = own.q + (i - place) * words + place;
      int64_t stride = kTogether;
      if (args.tiles) {
        out = own.q + (TiledBytes::Place(r, h - place, heads) + place) * words;
        stride = 1;
      }
      float *value = values.x[place], *off = offs.x[place], lower = 0;
      Vector<float, 16> total = {};
      const auto write = [&](int64_t w, uint32_t word) { out[w * stride] = int32_t(word); };
      if (h < args.heads) {
        const float greatest = GreatestMagnitude(from, args.depth);
        const RoundedVector found =
            RoundVector<int8_t>(from, args.depth, greatest, kGreatestByte, write,
                                [&](int64_t d, const auto& x, const auto& y) {
                                  Store<float, 16>(value + d, x), Store<float, 16>(off + d, y);
                                  total += x;
                                });
        const float weight = LoadScalar(from_weights);
        own.weights[i] = weight * found.scale;
        int32_t* rounded = own.rounded_q + (i - place) * RoundedWords(args.depth) + place;
        const RoundedVector in_words = RoundVector<int16_t>(
            from, args.depth, greatest, most,
            [&](int64_t w, uint32_t word) { rounded[w * kTogether] = int32_t(word); });
        own.rounded_weights[i] = weight * in_words.scale;
        bound.Add(weight, in_words, keys);
        own.higher[i] = zeros.Add(weight, in_words, args.depth, terms);
        const float norm = found.norm / found.scale, unit_off = found.off / found.scale;
        const float sums = terms * (norm + unit_off) * units.norm;
        const float rounding = __builtin_fabsf(own.weights[i]) * (scaling * units.norm + sums);
        row.off += rounding;
        if (weight < 0) {
          lower = 1.01f * (unit_off * units.norm + norm * units.off + sums) + 1;
          if (!(lower < 0x1p30f)) lower = 0, row.off = __builtin_inff();
        } else {
          row.raised += rounding;
        }
        from += args.depth, ++from_weights;
      } else {
        for (int64_t w = 0; w < words; ++w) write(w, 0);
        for (int64_t d = 0; d < padded; ++d) value[d] = off[d] = 0;
        own.weights[i] = own.rounded_weights[i] = 0, own.higher[i] = 0;
        for (int64_t w = 0; w < RoundedWords(args.depth); ++w) {
          own.rounded_q[(i - place) * RoundedWords(args.depth) + w * kTogether + place] = 0;
        }
      }
      own.start[i] = -128 * int32_t(FoldLanes<1, float, 16>(total)[0]);
      own.lower[i] = own.start[i] - int32_t(lower);
      if (place + 1 == kTogether) {
        values.Multiply(padded), offs.Multiply(padded);
        AddOff(own.weights + i - place, values, offs, units, row);
      }
    }
    row.raised *= 1.01f, row.off *= 1.01f;
    row.small = bound.Small(keys, args.depth, args.heads);
    row.rounded_off = bound.Of(keys, args.depth, args.heads);
    if (zeros.known) row.lower = zeros.Lower(keys, args.depth) + row.small;
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
    tiled.Begin(own.start);
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
    tiled.Begin(own.lower);
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
