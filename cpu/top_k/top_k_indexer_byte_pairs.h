// Scores of an indexer by bytes of some rows: from products of vectors, or of matrix tiles.
#pragma once

#include "cpu/simd/tiles.h"
#include "cpu/top_k/top_k_indexer_rounded.h"

namespace sgap::SGAP_ISA {

// Of a row, which columns of those before `limit` have a score of at least `least`.
struct RowSurvivors {
  int32_t* columns;
  int64_t count, limit;
  float least;
  float rounded_off;  // what a score of 16 bits may be off by
  float small;        // what one of bytes may be less than without rounding nevertheless
  // What one without rounding may be greater by, without the factor of a key: by heads with a
  // positive weight, where all sums over the heads begin, and by all heads.
  float raised, off;
  // Of a row without a positive weight, how much lower scores of 16 bits come out where their sums
  // begin higher (CertainZeros). Infinite for other rows.
  float lower;
};

// Some rows and heads, kTogether heads of a row and the columns of a panel at a time.
struct BytePairs {
  static constexpr int N = 16, kTogether = 4, kVectors = kPanelColumns / N;
  static constexpr int64_t kColumns = kPanelColumns + N;  // of a panel, with those of the sample
  using Ints = Vector<int32_t, N>;
  using Floats = Vector<float, N>;

  const int32_t* q;      // [rows, parts, words, kTogether]
  const float* weights;  // [rows, parts, kTogether]
  int64_t parts, words;  // parts of kTogether heads that a row has

  static int64_t Parts(int64_t heads) { return (heads + kTogether - 1) / kTogether; }

  static Ints Add(Ints sum, [[maybe_unused]] Ints keys, [[maybe_unused]] Ints values) {
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

  static const float* Factors(const char* panel, int64_t words) {
    return reinterpret_cast<const float*>(panel) + words * kPanelColumns;
  }

  // The scores of a panel's columns. Sums of products begin at start[rows, parts, kTogether], those
  // over the heads at `first`. So few sums that a processor begins the products of the next row
  // while it is busy with what follows on those of this one.
  [[gnu::always_inline]] inline void Score(int64_t row, const char* panel, const int32_t* start,
                                           float first, Floats* total) const {
    for (int v = 0; v < kVectors; ++v) total[v] = first - Floats{};
    for (int64_t pair = row * parts * kTogether; pair < (row + 1) * parts * kTogether;
         pair += kTogether) {
      const int32_t* own = q + pair * words;
      Ints sums[kTogether][kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        const Ints from = Kept(start[pair + i] - Ints{});
        for (int v = 0; v < kVectors; ++v) sums[i][v] = from;
      }
      for (int64_t d = 0; d < words; ++d) {
        Ints keys[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) keys[v] = Words(panel, d, v);
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) {
          const Ints value = Kept(own[d * kTogether + i] - Ints{});
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[i][v] = Add(sums[i][v], keys[v], value);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        const float weight = weights[pair + i];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const Ints positive = sums[i][v] > 0 ? sums[i][v] : Ints{};
          total[v] += __builtin_convertvector(positive, Floats) * weight;
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[v] *= BitCast<Floats>(Words(panel, words, v));
  }

  // To scores [rows, stride].
  [[gnu::noinline]] void Write(int64_t rows, const char* panel, const int32_t* start, float* scores,
                               int64_t stride) const {
    for (int64_t r = 0; r < rows; ++r, scores += stride) {
      Floats x[kVectors];
      Score(r, panel, start, 0, x);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Store<float, N>(scores + v * N, x[v]);
    }
  }

  // What kColumns columns from `first` on add to the rows' survivors: those of the panel, and those
  // of the sample, of which the scores [rows, stride] and the factors are known.
  [[gnu::noinline]] void Collect(int64_t rows, const char* panel, const int32_t* start,
                                 const float* sample_factors, const float* sample, int64_t stride,
                                 int64_t first, RowSurvivors* row) const {
    const auto factors = Load<float, N>(sample_factors);
    for (int64_t r = 0; r < rows; ++r, ++row, sample += stride) {
      Floats x[kVectors];
      Score(r, panel, start, row->raised, x);
      Keep(x, Load<float, N>(sample) + row->off * factors, first, *row);
    }
  }

  // Of kColumns columns from `first` on, those with a score of at least the row's.
  [[gnu::always_inline]] static inline void Keep(const Floats* others, Floats sampled,
                                                 int64_t first, RowSurvivors& row) {
    uint64_t found = 0;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      found |= uint64_t(LanesFrom<float, N>(others[v], row.least)) << (v * N);
    }
    uint64_t mask = Interleaved(LanesFrom<float, N>(sampled, row.least), found);
    const int64_t left = row.limit - first;
    if (left < kColumns) mask &= left <= 0 ? 0 : (uint64_t(1) << left) - 1;
    row.count += PackBits(mask, int32_t(first), row.columns + row.count);
  }

  // A bit for each column, from those of the sample and of the others.
  static uint64_t Interleaved(uint32_t sample, uint64_t others) {
    constexpr uint64_t kFirst = 0x1111111111111111;
    static_assert(kColumnsOfSample == 4 && kColumns == 64);
    return Deposit(sample, kFirst) | Deposit(others, ~kFirst);
  }
};

// The same on matrix tiles: kTogether heads of kRows rows, and the columns of a panel at a time.
// Products of some are computed and stored while those of the ones before them are added: a tile's
// store waits for its products, and a load of what it has stored for the store.
class TiledBytes {
  static constexpr int N = kTileColumns, kHeads = BytePairs::kTogether;
  static constexpr int kVectors = BytePairs::kVectors;
  static constexpr int64_t kPanelsTogether = 8;  // they stay in the first level of caches
  using Ints = BytePairs::Ints;
  using Floats = BytePairs::Floats;
  static_assert(N == BytePairs::N && kMostByteDepth <= kTileBytes);

 public:
  static constexpr int kRows = kTileRows / kHeads;

  static int64_t WholeRows(int64_t rows) { return (rows + kRows - 1) / kRows * kRows; }

  // Where heads from `head` on, a multiple of kHeads, of a row are among those of q.
  static int64_t Place(int64_t row, int64_t head, int64_t heads) {
    const int64_t tile = row / kRows * (heads / kHeads) + head / kHeads;
    return tile * kTileRows + row % kRows * kHeads;
  }

  // Of q and weights of `rows` rows, the former by Place(), with anything up to a multiple of kRows
  // rows. A product of least[rows, heads] or less counts as this one.
  TiledBytes(const BytePairs& pairs, int64_t rows, const int32_t* least)
      : pairs_(pairs), rows_(rows), least_(least), tiles_(Shapes(pairs.words)) {}

  // The scores of the columns of `panels` panels, which follow each other: each.Row(row, scores)
  // after each.Panel(panel), which are in order for a row, with sums over the heads from
  // each.First(row) on.
  template <typename Each>
  void Score(const char* panel, int64_t panels, Each&& each) {
    const int64_t groups = WholeRows(rows_) / kRows, count = panels * groups * pairs_.parts;
    Step next = {}, before = {}, added = {};
    for (int64_t i = 0; i < count + 2; ++i) {
      const Step now = next;
      if (i + 1 < count) Next(panels, groups, next);
      added.exists = i > 1;
      if (i % 2 == 0) Advance<0>(panel, now, added, each);
      if (i % 2 == 1) Advance<1>(panel, now, added, each);
      added = before, before = now;
    }
  }

 private:
  enum Tile { kProducts = 0, kQ = 6, kKeys = 7 };
  static_assert(kVectors == 3 && kRows == 4);

  struct Step {
    int64_t panel, group, part;
    bool exists;
  };

  static TileShapes Shapes(int64_t words) {
    TileShapes shapes;
    for (int i = 0; i < 2 * kVectors; ++i) shapes.Set(kProducts + i, kTileRows, kTileBytes);
    shapes.Set(kQ, kTileRows, 4 * words), shapes.Set(kKeys, words, kTileBytes);
    return shapes;
  }

  void Next(int64_t panels, int64_t groups, Step& step) const {
    if (++step.part < pairs_.parts) return;
    step.part = 0;
    if (++step.panel % kPanelsTogether != 0 && step.panel < panels) return;
    if (++step.group < groups) {
      step.panel = (step.panel - 1) / kPanelsTogether * kPanelsTogether;
    } else {
      step.group = 0;
    }
  }

  const char* Panel(const char* panels, int64_t panel) const {
    return panels + panel * 4 * (pairs_.words + 1) * kPanelColumns;
  }

  template <int kSet, typename Each>
  [[gnu::always_inline]] inline void Advance(const char* panels, const Step& now, const Step& added,
                                             Each&& each) {
    constexpr int kOwn = kProducts + kSet * kVectors, kOther = kProducts + (1 - kSet) * kVectors;
    const int64_t tile = now.group * pairs_.parts + now.part;
    const char* const panel = Panel(panels, now.panel);
    if (now.panel % kPanelsTogether == 0 || pairs_.parts > 1) {  // else the step before had this q
      tiles_.Load<kQ>(pairs_.q + tile * kTileRows * pairs_.words, 4 * pairs_.words);
    }
    Multiply<kOwn>(panel);
    Multiply<kOwn + 1>(panel + kTileBytes);
    Multiply<kOwn + 2>(panel + 2 * kTileBytes);
    const int64_t first = added.group * kRows, left = added.exists ? rows_ - first : 0;
    const float* const factors = BytePairs::Factors(Panel(panels, added.panel), pairs_.words);
    const int64_t pair = (first * pairs_.parts + added.part) * kHeads;
    each.Panel(added.panel);
    const auto& products = products_[kSet];
    auto& stored = products_[1 - kSet];
    if (left > 0) AddRow<0>(products, first, added.part, pair, factors, each);
    tiles_.Store<kOther>(stored[0], kTileBytes);
    if (left > 1) AddRow<1>(products, first, added.part, pair, factors, each);
    tiles_.Store<kOther + 1>(stored[1], kTileBytes);
    if (left > 2) AddRow<2>(products, first, added.part, pair, factors, each);
    tiles_.Store<kOther + 2>(stored[2], kTileBytes);
    if (left > 3) AddRow<3>(products, first, added.part, pair, factors, each);
  }

  template <int kTile>
  void Multiply(const char* keys) {
    tiles_.Load<kKeys>(keys, 4 * kPanelColumns);
    tiles_.Zero<kTile>();
    tiles_.DotBytes<kTile, kQ, kKeys>();
  }

  // Adds the products of a part of the heads of row `r` of some.
  template <int r, typename Each>
  [[gnu::always_inline]] inline void AddRow(const int32_t (&products)[kVectors][kTileRows][N],
                                            int64_t first, int64_t part, int64_t pair,
                                            const float* factors, Each&& each) {
    pair += r * pairs_.parts * kHeads;
    Floats x[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      x[v] = part == 0 ? each.First(first + r) - Floats{} : totals_[r][v];
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        Ints sum;
        __builtin_memcpy(&sum, products[v][r * kHeads + h], sizeof(sum));
        const Ints least = least_[pair + h] - Ints{};
        const Ints from_least = sum > least ? sum : least;
        x[v] += __builtin_convertvector(from_least, Floats) * pairs_.weights[pair + h];
      }
    }
    if (part + 1 < pairs_.parts) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) totals_[r][v] = x[v];
      return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) x[v] *= SGAP_ISA::Load<float, N>(factors + v * N);
    each.Row(first + r, x);
  }

  const BytePairs& pairs_;
  int64_t rows_;
  const int32_t* least_;
  Tiles tiles_;
  Floats totals_[kRows][kVectors];
  alignas(64) int32_t products_[2][kVectors][kTileRows][N];
};

}  // namespace sgap::SGAP_ISA
