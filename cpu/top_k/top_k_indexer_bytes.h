// Scores of an indexer from q and keys rounded to bytes, four products to a lane: twice as many as
// of 16 bits (top_k_indexer_rounded.h). What rounding may have taken from a product is added to it,
// so no score is less than without rounding. A sample of the columns gives each row a threshold,
// and only what reaches it is kept, while it is in a register.
#pragma once

#include "cpu/top_k/top_k_indexer_rounded.h"

namespace sgap::SGAP_ISA {

constexpr float kGreatestByte = 126.5f;  // rounded to 127 at most in any mode
constexpr uint32_t kByteOffsets = 0x80808080u;

// Writes a key to column j of a panel of bytes, each of them plus 128. Its norms are those of the
// integers.
template <typename T>
RoundedVector PackBytes(const T* key, int64_t depth, int64_t j, char* panel) {
  auto* out = reinterpret_cast<uint32_t*>(panel) + j;
  RoundedVector found = RoundVector<int8_t>(
      key, depth, kGreatestByte,
      [&](int64_t i, uint32_t word) { out[i * kPanelColumns] = word ^ kByteOffsets; });
  reinterpret_cast<float*>(panel)[ByteWords(depth) * kPanelColumns + j] = found.scale;
  found.norm /= found.scale, found.off /= found.scale;
  return found;
}

// Of a row, which columns of those before `limit` have a score of at least `least`.
struct RowSurvivors {
  int32_t* columns;
  int64_t count, limit;
  float least;
  float small;   // what a score may be less than without rounding nevertheless
  float raised;  // what it may be greater by, without the factor of a key
};

// Some rows by pairs of a row and a head, 8 of them and the columns of a panel at a time. kHeads
// of each row are together; a row has more only where that is 8.
template <int kHeads>
struct BytePairs {
  static constexpr int N = 16, kTogether = 8, kVectors = kPanelColumns / N;
  static constexpr int kRows = kTogether / kHeads;
  using Ints = Vector<int32_t, N>;
  using Floats = Vector<float, N>;

  const int32_t* q;      // [pairs / kTogether, words, kTogether]
  const float* weights;  // [pairs]
  int64_t parts, words;  // parts of kHeads that a row has

  static int64_t Parts(int64_t heads) { return kHeads < kTogether ? 1 : (heads + 7) / kTogether; }

  static Ints Add(Ints sum, Ints keys, [[maybe_unused]] Ints values) {
#if defined(__AVX512VNNI__)
    return BitCast<Ints>(_mm512_dpbusd_epi32(BitCast<__m512i>(sum), BitCast<__m512i>(keys),
                                             BitCast<__m512i>(values)));
#else
    return sum;
#endif
  }

  static Ints Words(const char* panel, int64_t word, int v) {
    Ints x;
    __builtin_memcpy(&x, panel + 4 * (word * kPanelColumns + v * N), sizeof(x));
    return x;
  }

  // Calls take(r, scores of the panel's columns) for the rows of a group of kRows. Sums of products
  // begin at start[pairs].
  template <typename Take>
  [[gnu::always_inline]] inline void Score(int64_t group, const char* panel, const int32_t* start,
                                           Take&& take) const {
    const int64_t count = kHeads < kTogether ? 1 : parts;
    Floats total[kRows][kVectors] = {};
    for (int64_t part = 0; part < count; ++part) {
      const int64_t first = (group * count + part) * kTogether;
      const int32_t* own = q + first * words;
      Ints sums[kTogether][kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; ++i) {
        const Ints from = Kept(start[first + i] - Ints{});
        for (int v = 0; v < kVectors; ++v) sums[i][v] = from;
      }
      for (int64_t d = 0; d < words; ++d) {
        Ints keys[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) keys[v] = Words(panel, d, v);
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) {
          const Ints value = Kept(own[d * kTogether + i] - Ints{});
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[i][v] = Add(sums[i][v], keys[v], value);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; ++i) {
        const float weight = weights[first + i];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const Ints positive = sums[i][v] > 0 ? sums[i][v] : Ints{};
          total[i / kHeads][v] += __builtin_convertvector(positive, Floats) * weight;
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[r][v] *= BitCast<Floats>(Words(panel, words, v));
      take(r, total[r]);
    }
  }

  // To scores [rows, stride].
  [[gnu::noinline]] void Write(int64_t group, const char* panel, const int32_t* start,
                               float* scores, int64_t stride) const {
    Score(group, panel, start, [&](int r, const Floats* x) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Store<float, N>(scores + r * stride + v * N, x[v]);
    });
  }

  // What the panel, whose first column that is, adds to the rows' survivors.
  [[gnu::noinline]] void Collect(int64_t group, const char* panel, const int32_t* start,
                                 int64_t first, RowSurvivors* rows) const {
    const Ints lanes = LaneNumbers<int32_t, N>() + int32_t(first);
    Score(group, panel, start, [&](int r, const Floats* x) {
      RowSurvivors& row = rows[r];
      const int64_t left = row.limit - first;
      int32_t* out = row.columns + row.count;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        uint32_t mask = LanesFrom<float, N>(x[v], row.least);
        if (left < kPanelColumns) {
          const int64_t own = left - v * N;
          mask &= own <= 0 ? 0 : own < N ? (1u << own) - 1 : ~0u;
        }
        PackLanes<int32_t, N>(mask, lanes + v * N, out);
        out += __builtin_popcount(mask);
      }
      row.count = out - row.columns;
    });
  }
};

// The memory of a task whose scores are of bytes.
struct ByteScratch {
  float* sample;
  int32_t *columns, *q, *start, *raised;
  float* weights;
  RowSurvivors* rows;
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
    sample = floats((at.rows + 7) * sample_stride);
    q = ints(pairs * ByteWords(args.depth)), start = ints(pairs), raised = ints(pairs);
    weights = floats(pairs);
    rows = reinterpret_cast<RowSurvivors*>(take((at.rows + 8) * int64_t(sizeof(RowSurvivors))));
    scores = floats(room), selection.keys = ints(room);
    memory = floats(0);
  }
};

// q and weights of a task's rows as BytePairs has them, zeros where there are none.
template <typename T>
void RoundToBytes(const TopKIndexerArgs& args, const IndexerRows& at, int64_t whole_rows,
                  int64_t whole_heads, const ByteScratch& own) {
  constexpr int64_t kTogether = 8;
  const int64_t words = ByteWords(args.depth);
  const KeyBounds keys = GreatestBounds(args, at, false), units = GreatestBounds(args, at, true);
  const float terms = float(args.depth + 2 * args.heads + 32) * 0x1p-22f;
  const T* from = static_cast<const T*>(args.q) + at.place * args.depth;
  const T* from_weights = static_cast<const T*>(args.weights) + at.place;
  int64_t i = 0;
  for (int64_t r = 0; r < whole_rows; ++r) {
    RowSurvivors& row = own.rows[r];
    row = {own.columns, 0, 0, __builtin_inff(), 0, 0};
    if (r < at.rows) row.columns += r * own.columns_stride, row.limit = at.Limit(args.top_k, r);
    RowBound bound;
    for (int64_t h = 0; h < whole_heads; ++h, ++i) {
      int32_t* out = own.q + i / kTogether * kTogether * words + i % kTogether;
      int32_t sum = 0;
      const auto write = [&](int64_t w, uint32_t word) {
        out[w * kTogether] = int32_t(word);
        for (int b = 0; b < 32; b += 8) sum += int8_t(word >> b);
      };
      float raised = 0;
      if (r < at.rows && h < args.heads) {
        const RoundedVector found = RoundVector<int8_t>(from, args.depth, kGreatestByte, write);
        const float weight = LoadScalar(from_weights);
        own.weights[i] = weight * found.scale;
        bound.Add(weight, found, keys);
        // |q . k - q' . k'| <= |q - q'| |k| + |q'| |k - k'|, and the rounding of sums.
        const float norm = found.norm / found.scale, off = found.off / found.scale;
        raised =
            1.01f * (off * units.norm + norm * units.off + terms * (norm + off) * units.norm) + 1;
        if (!(raised < 0x1p30f)) raised = 0, row.raised = __builtin_inff();
        row.raised += __builtin_fabsf(own.weights[i]) * raised;
        if (weight < 0) raised = -raised;
        from += args.depth, ++from_weights;
      } else {
        for (int64_t w = 0; w < words; ++w) write(w, 0);
        own.weights[i] = 0;
      }
      own.start[i] = -128 * sum;
      own.raised[i] = own.start[i] + int32_t(raised);
    }
    if (r >= at.rows) continue;
    row.small = bound.Small(keys, args.depth, args.heads);
    if (!bound.Holds(keys)) row.raised = __builtin_inff();
  }
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
  if (size < kLeastSampled || !(row.raised < kGreatestBound)) return none;
  const double expected = double(size) * double(k) / double(row.limit);
  const double rank = expected + 2.5 * __builtin_sqrt(expected) + 2;
  if (rank > 0.5 * double(size)) return none;
  // Of few, the greatest of each lane of kTogether vectors say it too.
  constexpr int kTogether = 8;
  const float* scores = sample;
  Vector<float, N> greatest[kTogether];
  int64_t count = size;
  double among = rank;
  if (rank < 0.5 * kTogether * N && size >= 2 * kTogether * N) {
    for (int j = 0; j < kTogether; ++j) greatest[j] = Load<float, N>(sample + j * N);
    for (int64_t i = kTogether * N; i + kTogether * N <= size; i += kTogether * N) {
#pragma GCC unroll 8
      for (int j = 0; j < kTogether; ++j) {
        const auto x = Load<float, N>(sample + i + j * N);
        greatest[j] = x > greatest[j] ? x : greatest[j];
      }
    }
    scores = reinterpret_cast<const float*>(greatest);
    count = kTogether * N;
    among = double(count) * (1 - __builtin_exp(-rank / double(count)));
  }
  for (int64_t i = 0; i < count; i += N) {
    const auto own = KeysOf<float, N>(Load<float, N>(scores + i));
    __builtin_memcpy(keys + i, &own, sizeof(own));
  }
  const auto from = int64_t(among);
  const float threshold = ScoreOf<float>(KeyOfRank(keys, count, from, int64_t(0)));
  // What is just as great is left.
  const float least = threshold - 2 * row.small - 0x1p-22f * __builtin_fabsf(threshold);
  const float half = 0.5f * row.raised;
  int64_t open = 0;
  for (int64_t i = 0; i < size; i += kPanelColumns, panels += BytePanelBytes(depth)) {
    const auto* factors = reinterpret_cast<const float*>(panels) + ByteWords(depth) * kPanelColumns;
    for (int64_t j = 0; j < kPanelColumns && i + j < size; j += N) {
      const auto x = Load<float, N>(sample + i + j) + half * Load<float, N>(factors + j);
      const uint32_t exist = size - i - j < N ? (1u << (size - i - j)) - 1 : ~0u;
      open += __builtin_popcount(LanesFrom<float, N>(x, least) & exist);
    }
  }
  return kOpenCost * kColumnsOfSample * open > row.limit ? none : least;
}

}  // namespace sgap::SGAP_ISA
