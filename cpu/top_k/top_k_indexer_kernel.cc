// The selection from scores of a light indexer: the scores of a few rows are computed into the
// cache, and the rows are selected there. Where products of integers are faster, they are scores of
// values rounded to bytes (top_k_indexer_bytes.h) or 16 bits (top_k_indexer_rounded.h) first.
#include "cpu/top_k/top_k_indexer.h"
#include "cpu/top_k/top_k_indexer_bytes.h"
#include "cpu/top_k/top_k_indexer_rounded.h"
#include "cpu/top_k/top_k_indexer_transpose.h"

namespace sgap::SGAP_ISA {
namespace {

inline int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// The keys key(0), key(1), ... of as many lanes as a vector has to out[d * kStride + lane].
template <typename T, int64_t kStride, typename KeyOf>
void PackColumns(KeyOf&& key, int64_t depth, Accumulator<T>* out) {
  using Acc = Accumulator<T>;
  constexpr int N = kLanes<T>;
  for (int64_t d = 0; d < depth; d += N) {
    const int left = depth - d < N ? int(depth - d) : N;
    Vector<Acc, N> x[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      x[i] = left == N ? Load<T, N>(key(i) + d) : LoadPartial<T, N>(key(i) + d, left);
    }
    Transpose<N>(x);
    for (int i = 0; i < left; ++i) Store<Acc, N>(out + (d + i) * kStride, x[i]);
  }
}

// Writes a panel of keys, and behind it the same rounded, with the bounds of its columns. Of
// columns that do not exist there is something that nobody reads.
template <typename T>
void PackPanel(const TopKIndexerArgs& args, int64_t batch, int64_t panel, char* out) {
  using Acc = Accumulator<T>;
  const int64_t columns = args.top_k.columns, first = panel * kPanelColumns;
  const T* keys = static_cast<const T*>(args.keys) + batch * columns * args.depth;
  Acc* plain = reinterpret_cast<Acc*>(out);
  for (int64_t j = 0; j < kPanelColumns; j += kLanes<T>) {
    const auto key = [&](int64_t i) {
      return keys + Least(first + j + i, columns - 1) * args.depth;
    };
    PackColumns<T, kPanelColumns>(key, args.depth, plain + j);
  }
  if constexpr (kRoundsIndexer && std::is_same_v<Acc, float>) {
    if (!args.bounds) return;
    char* rounded = out + args.depth * kPanelColumns * int64_t(sizeof(Acc));
    float* bounds = args.bounds + 4 * (batch * args.PanelCount() + panel);
    for (int i = 0; i < 4; ++i) bounds[i] = 0;
    const auto add = [](const RoundedVector& found, float* greatest) {
      const float norm = found.norm + found.off;
      greatest[0] = norm > greatest[0] ? norm : greatest[0];
      greatest[1] = found.off > greatest[1] ? found.off : greatest[1];
    };
    const float most = GreatestInteger(args.depth);
    float greatest[kPanelColumns];
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const T* own = first + j < columns ? keys + (first + j) * args.depth : nullptr;
      int32_t* row = nullptr;
      if (own && args.byte_panels) {
        row = args.rounded_keys + (batch * columns + first + j) * RoundedWords(args.depth);
      }
      greatest[j] = own ? GreatestMagnitude(own, args.depth) : 0;
      const RoundedVector found = PackRounded(own, args.depth, greatest[j], most, j, rounded, row);
      if (row) args.scales[batch * columns + first + j] = found.scale;
      add(found, bounds);
    }
    if (!args.byte_panels) return;
    const int64_t panel_bytes = BytePanelBytes(args.depth);
    char* const bytes = args.byte_panels + batch * BytePanels(args.PanelCount()) * panel_bytes;
    for (int64_t j = 0; j < kPanelColumns && first + j < columns; ++j) {
      const T* own = keys + (first + j) * args.depth;
      const int64_t place = PlaceOfBytes(first + j, args.PanelCount());
      add(PackBytes(own, args.depth, greatest[j], place % kPanelColumns, args.tiles,
                    bytes + place / kPanelColumns * panel_bytes),
          bounds + 2);
    }
  }
}

// Calls body(panel) for those of a task of the first phase.
template <typename Body>
void ForPanels(const TopKIndexerArgs& args, int64_t task, Body&& body) {
  const int64_t first = task % args.panel_tasks * args.panels_of_task, panels = args.PanelCount();
  const int64_t last = first + args.panels_of_task < panels ? first + args.panels_of_task : panels;
  for (int64_t panel = first; panel < last; ++panel) body(panel);
}

// Products of the values as they are.
template <typename Acc>
struct PlainProducts {
  using Value = Acc;
  using Score = Acc;
  template <typename V>
  static V Add(V sum, V keys, V q) {
    return sum + keys * q;
  }
  template <typename V>
  static V Positive(V sum) {
    return sum < 0 ? V{} : sum;  // NaN stays
  }
};

// The rows of a task, by pairs of a row and a head, kTogether of them and kVectors vectors of the
// columns of a panel at a time. Of Products either plain or rounded values: the latter have a
// factor for each column.
template <typename Products, int kTogether, int kVectors, int64_t kColumns>
struct Pairs {
  using Value = typename Products::Value;
  using Acc = typename Products::Score;
  static constexpr bool kRounded = !std::is_same_v<Value, Acc>;
  static constexpr int N = kVectorBytes / sizeof(Acc);
  static_assert(kPairsTogether % kTogether == 0 && kColumns % (kVectors * N) == 0);
  using V = Vector<Acc, N>;
  using Values = Vector<Value, N>;

  const Value* q;      // [pairs / kTogether, depth, kTogether]
  const Acc* weights;  // [pairs]
  int64_t count, heads, depth;

  // The scores of a panel's columns, to scores [rows, stride] of these.
  void ScorePanel(const Value* panel, Acc* scores, int64_t stride) const {
    const Acc* factors = reinterpret_cast<const Acc*>(panel + depth * kColumns);
    for (int64_t c = 0; c < kColumns; c += kVectors * N) {
      Score(panel + c, factors + c, scores + c, stride);
    }
  }

  // Of the columns of kVectors vectors. Inlined, GCC 12 keeps a vector of the innermost loop in
  // memory with AVX2, which takes twice the time.
  [[gnu::noinline]] void Score(const Value* panel, const Acc* factors, Acc* scores,
                               int64_t stride) const {
    int64_t head = 0;
    Acc* row = scores;
    for (int64_t first = 0; first < count; first += kTogether) {
      Values sums[kTogether][kVectors] = {};
      const Value* own = q + first * depth;
      for (int64_t d = 0; d < depth; ++d) {
        Values keys[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          __builtin_memcpy(&keys[v], panel + d * kColumns + v * N, sizeof(Values));
        }
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) {
          const Values value =
              Kept(own[d * kTogether + i] - Values{});  // 0 + x takes an addition, for x of -0
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[i][v] = Products::Add(sums[i][v], keys[v], value);
        }
      }
      V total[kVectors] = {};
      if (head > 0) {
        for (int v = 0; v < kVectors; ++v) total[v] = Load<Acc, N>(row + v * N);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= count) break;
        const Acc weight = weights[first + i];
        const bool ends = ++head == heads;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          total[v] += Products::Positive(sums[i][v]) * weight;
          if (kRounded && ends) total[v] *= Load<Acc, N>(factors + v * N);
          if (ends || i + 1 == kTogether) Store<Acc, N>(row + v * N, total[v]);
          if (ends) total[v] = V{};
        }
        head = ends ? 0 : head;
        row += ends ? stride : 0;
      }
    }
  }
};

// Sums in registers: 24 of 32, or 12 of 16.
constexpr int kPairsOfRows = kVectorBytes == 64 ? 8 : 4;
template <typename Products>
using PairsOfRows = Pairs<Products, kPairsOfRows, 3, kPanelColumns>;

// q and weights of `count` pairs from `place` on as Pairs has them, zeros up to `whole`.
template <typename T, int kTogether>
void LoadPairs(const TopKIndexerArgs& args, int64_t place, int64_t count, int64_t whole,
               Accumulator<T>* q, Accumulator<T>* weights) {
  using Acc = Accumulator<T>;
  const T* from = static_cast<const T*>(args.q) + place * args.depth;
  const T* from_weights = static_cast<const T*>(args.weights) + place;
  for (int64_t i = 0; i < whole; i += kTogether, from += kTogether * args.depth) {
    const int64_t left = count - i;
    for (int64_t d = 0; d < args.depth; ++d, q += kTogether) {
      for (int j = 0; j < kTogether; ++j) {
        q[j] = j < left ? LoadScalar(from + j * args.depth + d) : Acc(0);
      }
    }
    for (int j = 0; j < kTogether; ++j) {
      weights[i + j] = j < left ? LoadScalar(from_weights + i + j) : Acc(0);
    }
  }
}

// q [heads, depth] and weights of one row, zeros up to `whole` heads. Whole vectors are written.
template <typename T>
void LoadHeads(const TopKIndexerArgs& args, int64_t place, int64_t whole, float* q,
               float* weights) {
  constexpr int N = 16;
  const T* from = static_cast<const T*>(args.q) + place * args.depth;
  const T* from_weights = static_cast<const T*>(args.weights) + place;
  const int64_t count = args.heads * args.depth;
  for (int64_t i = 0; i < count; i += N) Store<float, N>(q + i, LoadPart(from, count, i));
  for (int64_t i = count; i < whole * args.depth; ++i) q[i] = 0;
  for (int64_t h = 0; h < whole; ++h) {
    weights[h] = h < args.heads ? LoadScalar(from_weights + h) : 0;
  }
}

int64_t WholePairs(const IndexerRows& at) {
  return (at.pairs + kPairsTogether - 1) / kPairsTogether * kPairsTogether;
}

template <typename T>
void SelectPlainRows(const TopKIndexerArgs& args, const IndexerRows& at) {
  using Acc = Accumulator<T>;
  const int64_t whole = WholePairs(at);
  IndexerScratch<Acc> scratch(args.top_k, at, whole, args.depth * int64_t(sizeof(Acc)));
  Acc* q = reinterpret_cast<Acc*>(scratch.q);
  LoadPairs<T, kPairsOfRows>(args, at.place, at.pairs, whole, q, scratch.weights);
  const PairsOfRows<PlainProducts<Acc>> pairs{q, scratch.weights, at.pairs, args.heads, args.depth};
  const char* panel = args.panels + at.batch * args.PanelCount() * args.panel_bytes;
  for (int64_t j = 0; j < at.columns; j += kPanelColumns, panel += args.panel_bytes) {
    pairs.ScorePanel(reinterpret_cast<const Acc*>(panel), scratch.scores + j, at.stride);
  }
  SelectScored(args.top_k, at, scratch.scores, scratch.selection);
}

// The scores of the keys of some columns in 16 bits, by kTogether heads at a time, whose sums begin
// at start[heads], unless that is null. Up to a multiple of 32 of them are written, and columns
// behind the last one are that one.
template <int kTogether>
void ScoreRounded(const TopKIndexerArgs& args, int64_t batch, int32_t* columns, int64_t count,
                  const int32_t* q, const int32_t* start, const float* weights, int64_t heads,
                  float* out) {
  constexpr int N = 16, kVectors = 2, kSome = kVectors * N;
  using Ints = Vector<int32_t, N>;
  using Floats = Vector<float, N>;
  const int64_t words = RoundedWords(args.depth);
  const int32_t* keys = args.rounded_keys + batch * args.top_k.columns * words;
  const float* scales = args.scales + batch * args.top_k.columns;
  for (int64_t i = count; i % kSome != 0; ++i) columns[i] = columns[count - 1];
  for (int64_t i = 0; i < count; i += kSome) {
    if (i + kSome < count) {
#pragma GCC unroll 8
      for (int j = 0; j < kSome; ++j) __builtin_prefetch(keys + columns[i + kSome + j] * words);
    }
    Floats factors[kVectors], total[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) {
      for (int j = 0; j < N; ++j) factors[v][j] = scales[columns[i + v * N + j]];
    }
    const int32_t* own = q;
    for (int64_t first = 0; first < heads; first += kTogether) {
      Ints sums[kTogether][kVectors];
#pragma GCC unroll 8
      for (int h = 0; h < kTogether; ++h) {
        const Ints from = (start ? start[first + h] : 0) - Ints{};
        for (int v = 0; v < kVectors; ++v) sums[h][v] = from;
      }
      for (int64_t d = 0; d < words; d += 8) {
        Floats x[kVectors][8];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          TransposeEights(KeysOfColumns(keys, columns + i + v * N, words), d, x[v]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j, own += kTogether) {
#pragma GCC unroll 8
          for (int h = 0; h < kTogether; ++h) {
            const Ints value = Kept(own[h] - Ints{});
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
              sums[h][v] = RoundedProducts::Add(sums[h][v], BitCast<Ints>(x[v][j]), value);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int h = 0; h < kTogether; ++h) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          total[v] += RoundedProducts::Positive(sums[h][v]) * weights[first + h];
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) Store<float, N>(out + i + v * N, total[v] * factors[v]);
  }
}

// Feature `part` of the kPartsOfWord<T> in each 4 bytes.
template <typename T>
constexpr int kPartsOfWord = 4 / sizeof(T);
template <typename T>
inline Vector<float, 16> Widened(Vector<float, 16> words, int part) {
  if constexpr (std::is_same_v<T, float>) {
    return words;
  } else {
    const auto lanes = BitCast<Vector<uint32_t, 16>>(words) >> (16 * part);
    const auto halves = __builtin_convertvector(lanes, Vector<uint16_t, 16>);
    return Load<T, 16>(reinterpret_cast<const T*>(&halves));
  }
}

// The scores of the keys of 16 columns as Pairs has them, by q [heads, depth] of so many features
// of a multiple of 8 * kPartsOfWord<T>.
template <typename T, int kTogether>
Vector<float, 16> ScoreRowMajor(const T* keys, const int32_t* columns, int64_t depth,
                                const float* q, const float* weights, int64_t heads) {
  using V = Vector<float, 16>;
  using Products = PlainProducts<float>;
  constexpr int kParts = kPartsOfWord<T>;
  const int64_t words = depth / kParts;
  V total = {};
  for (int64_t first = 0; first < heads; first += kTogether) {
    const float* own = q + first * depth;
    V sums[kTogether] = {};
    for (int64_t word = 0; word < words; word += 8) {
      V x[8];
      TransposeEights(KeysOfColumns(keys, columns, words), word, x);
#pragma GCC unroll 16
      for (int j = 0; j < 8 * kParts; ++j, ++own) {
        const V values = Widened<T>(x[j / kParts], j % kParts);
#pragma GCC unroll 8
        for (int h = 0; h < kTogether; ++h) {
          sums[h] = Products::Add(sums[h], values, own[h * depth] - V{});
        }
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kTogether; ++h) total += Products::Positive(sums[h]) * weights[first + h];
  }
  return total;
}

// The scores of some columns of a row as SelectPlainRows has them, to the same bits. Behind the
// columns the last one is written up to a multiple of a vector.
template <typename T, int kTogether>
void ScoreColumnsOfRow(const TopKIndexerArgs& args, const IndexerRows& at, int64_t row,
                       int32_t* columns, int64_t count, float* memory, float* out) {
  constexpr int N = kLanes<float>;
  const int64_t whole = (args.heads + kTogether - 1) / kTogether * kTogether;
  const T* keys = static_cast<const T*>(args.keys) + at.batch * args.top_k.columns * args.depth;
  const auto key = [&](int64_t i) { return keys + columns[i] * args.depth; };
  const auto prefetch = [&](int64_t from) {
    for (int64_t i = from; i < from + N && i < count; ++i) {
      const char* bytes = reinterpret_cast<const char*>(key(i));
      for (int64_t b = 0; b < args.depth * int64_t(sizeof(T)); b += 64)
        __builtin_prefetch(bytes + b);
    }
  };
  prefetch(0), prefetch(N);
  float *panel = memory, *q = panel + args.depth * N, *weights = q + whole * args.depth;
  const int64_t place = at.place + row * args.heads;
  for (int64_t i = count; i % N != 0; ++i) columns[i] = columns[count - 1];
  if constexpr (N == 16) {
    if (args.depth % (8 * kPartsOfWord<T>) == 0) {
      LoadHeads<T>(args, place, whole, q, weights);
      for (int64_t i = 0; i < count; i += N) {
        prefetch(i + 2 * N);
        Store<float, N>(
            out + i, ScoreRowMajor<T, kTogether>(keys, columns + i, args.depth, q, weights, whole));
      }
      return;
    }
  }
  LoadPairs<T, kTogether>(args, place, args.heads, whole, q, weights);
  const Pairs<PlainProducts<float>, kTogether, 1, N> pairs{q, weights, args.heads, args.heads,
                                                           args.depth};
  for (int64_t i = 0; i < count; i += N) {
    PackColumns<T, N>([&](int64_t lane) { return key(i + lane); }, args.depth, panel);
    pairs.ScorePanel(panel, out + i, N);
  }
}

// SelectPlainRows by scores of rounded values. Returns how many rows, from the first one, are
// selected: of the next one the bound leaves open too many columns, or may not hold.
template <typename T>
int64_t SelectRoundedRows(const TopKIndexerArgs& args, const IndexerRows& at) {
  const TopKArgs& top_k = args.top_k;
  const int64_t whole = WholePairs(at), words = RoundedWords(args.depth);
  IndexerScratch<float> scratch(top_k, at, whole, 0);
  RoundedScratch own(scratch.selection.End(top_k.columns), whole, words, at.rows, top_k.columns);
  const KeyBounds keys = GreatestBounds(args, at, false);
  if (!RoundPairs<T, kPairsOfRows>(args, at, keys, whole, own, scratch.weights)) return 0;
  const PairsOfRows<RoundedProducts> pairs{own.q, scratch.weights, at.pairs, args.heads, words};
  const char* panel = args.panels + at.batch * args.PanelCount() * args.panel_bytes +
                      args.depth * kPanelColumns * int64_t(sizeof(float));
  for (int64_t j = 0; j < at.columns; j += kPanelColumns, panel += args.panel_bytes) {
    pairs.ScorePanel(reinterpret_cast<const int32_t*>(panel), scratch.scores + j, at.stride);
  }
  const auto score_columns = args.heads <= 4 ? ScoreColumnsOfRow<T, 4> : ScoreColumnsOfRow<T, 8>;
  const int32_t* offsets = top_k.offsets + at.batch * (top_k.rows + 1) + at.begin;
  int32_t* indices = top_k.indices + at.batch * top_k.rows * top_k.k;
  for (int64_t r = 0; r < at.rows; ++r) {
    const auto score = [&](int32_t* columns, int64_t count, float* out) {
      score_columns(args, at, r, columns, count, own.memory, out);
    };
    const int32_t found =
        SelectRounded(scratch.scores + r * at.stride, at.Limit(top_k, r), top_k.k, own.off[r],
                      scratch.selection, own.open, indices + offsets[r], score);
    if (found < 0) return r;
    top_k.counts[at.batch * top_k.rows + at.begin + r] = found;
  }
  return at.rows;
}

// By 16 bits, or in floats.
template <typename T>
void SelectWideRows(const TopKIndexerArgs& args, const IndexerRows& at) {
  int64_t done = 0;
  if constexpr (kRoundsIndexer && std::is_same_v<Accumulator<T>, float>) {
    // Of fewer columns most are left open.
    if (args.bounds && at.columns > 2 * args.top_k.k) done = SelectRoundedRows<T>(args, at);
  }
  if (done == at.rows) return;
  SelectPlainRows<T>(args, IndexerRows(args, at.batch, at.begin + done, at.rows - done));
}

// So many columns of a row are scored at a time until k zeros are found, where these are enough.
constexpr int64_t kZerosTogether = 128;

// The k greatest of a row's survivors, by 16 bits and of what these leave open in floats. False
// where others may be among them.
template <typename T>
bool SelectSurvivors(const TopKIndexerArgs& args, const IndexerRows& at, int64_t r,
                     ByteScratch& own, int32_t* indices) {
  constexpr int kTogether = BytePairs::kTogether;
  const RowSurvivors& row = own.rows[r];
  const int64_t k = args.top_k.k, count = row.count;
  if (count < k || !(row.least < kGreatestBound)) return false;
  const int64_t heads = BytePairs::Parts(args.heads) * kTogether;
  const int64_t words = RoundedWords(args.depth);
  // Whether 0 is the greatest score, and many columns of the sample have it.
  const bool zeros_first = row.lower < kGreatestBound && row.least >= -2 * row.small;
  const auto score_rounded = [&](int64_t from, int64_t some) {
    ScoreRounded<kTogether>(args, at.batch, row.columns + from, some,
                            own.rounded_q + r * heads * words,
                            zeros_first ? own.higher + r * heads : nullptr,
                            own.rounded_weights + r * heads, heads, own.scores + from);
  };
  RowScratch<float>& found = own.selection;
  found.scores = own.scores, found.columns = row.columns;
  const auto score_columns = args.heads <= 4 ? ScoreColumnsOfRow<T, 4> : ScoreColumnsOfRow<T, 8>;
  const auto score = [&](int32_t* columns, int64_t left, float* out) {
    score_columns(args, at, r, columns, left, own.memory, out);
  };
  int64_t scored = 0, zeros = 0;
  const int64_t together = zeros_first ? kZerosTogether : count;
  while (scored < count && !(zeros_first && zeros >= k)) {
    const int64_t some = Least(together, count - scored);
    score_rounded(scored, some);
    for (int64_t i = 0; zeros_first && i < some; ++i) zeros += own.scores[scored + i] == 0;
    scored += some;
  }
  float last = 0;
  if (zeros >= k) {
    SelectZeros(scored, k, -2 * row.lower, found, own.open, indices, score);
  } else {
    const float kth = ScoreOfRank(own.scores, count, k, found.keys);
    const float reach = Reach(row.rounded_off + (zeros_first ? row.lower : 0), kth);
    last =
        SelectBetween(count, k, kth - reach, kth + reach, count, found, own.open, indices, score);
  }
  return last >= row.least + row.small;
}

// By bytes, and those rows of which these say too little by SelectWideRows.
template <typename T>
void SelectByteRows(const TopKIndexerArgs& args, const IndexerRows& at) {
  const TopKArgs& top_k = args.top_k;
  const int64_t parts = BytePairs::Parts(args.heads);
  const int64_t rows = args.tiles ? TiledBytes::WholeRows(at.rows) : at.rows;
  ByteScratch own(top_k.scratch, args, at, rows * parts * BytePairs::kTogether);
  RoundToBytes<T>(args, at, own);
  const BytePairs pairs{own.q, own.weights, parts, ByteWords(args.depth)};
  const int64_t panel_bytes = BytePanelBytes(args.depth), panels = args.PanelCount();
  const char* const sample = args.byte_panels + at.batch * BytePanels(panels) * panel_bytes;
  const ByteScores scores{at,          own,    pairs,
                          panel_bytes, sample, sample + SamplePanels(panels) * panel_bytes};
  const auto refuse = [&](auto&& refused) {
    int64_t count = 0;
    for (int64_t r = 0; r < at.rows; ++r) count += refused(own.rows[r]);
    return 2 * count > at.rows;
  };
  if (refuse([](const RowSurvivors& row) { return !(row.off < kGreatestBound); })) {
    return SelectWideRows<T>(args, at);
  }
  if (args.tiles) {
    TiledBytes tiled(pairs, at.rows, own.start);
    scores.Sample(tiled);
  } else {
    scores.Sample(own.start);
  }
  for (int64_t r = 0; r < at.rows; ++r) {
    RowSurvivors& row = own.rows[r];
    row.least = ByteThreshold(own.sample + r * own.sample_stride, sample, args.depth, row, top_k.k,
                              own.selection.keys);
    if (!(row.least < kGreatestBound)) row.raised = row.off = 0;  // nothing is kept
  }
  if (refuse([](const RowSurvivors& row) { return !(row.least < kGreatestBound); })) {
    return SelectWideRows<T>(args, at);
  }
  if (args.tiles) {
    TiledBytes tiled(pairs, at.rows, own.lower);
    scores.Collect(tiled);
  } else {
    scores.Collect(own.lower);
  }
  const int32_t* offsets = top_k.offsets + at.batch * (top_k.rows + 1) + at.begin;
  int32_t* counts = top_k.counts + at.batch * top_k.rows + at.begin;
  int32_t* indices = top_k.indices + at.batch * top_k.rows * top_k.k;
  for (int64_t r = 0; r < at.rows; ++r) {
    const bool selected = SelectSurvivors<T>(args, at, r, own, indices + offsets[r]);
    counts[r] = selected ? int32_t(top_k.k) : -1;
  }
  for (int64_t r = 0, end; r < at.rows; r = end) {
    for (end = r + 1; end < at.rows && (counts[end] < 0) == (counts[r] < 0);) ++end;
    if (counts[r] < 0) {
      SelectWideRows<T>(args, IndexerRows(args, at.batch, at.begin + r, end - r));
    }
  }
}

template <typename T>
void SelectRows(const TopKIndexerArgs& args, int64_t task) {
  const IndexerRows at(args, task);
  if constexpr (kRoundsIndexer && std::is_same_v<Accumulator<T>, float>) {
    if (args.byte_panels && at.columns > kColumnsOfBytes * args.top_k.k) {
      return SelectByteRows<T>(args, at);
    }
  }
  SelectWideRows<T>(args, at);
}

// Of all rows, which are few, the scores of a task's columns.
template <typename T>
void ScoreColumns(const TopKIndexerArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const IndexerRows at(args, task / args.panel_tasks, 0, args.top_k.rows);
  const int64_t whole = WholePairs(at);
  Acc* panel = reinterpret_cast<Acc*>(AlignedLine(args.top_k.scratch));
  Acc* q = panel + kPanelColumns * args.depth;
  Acc* weights = q + whole * args.depth;
  LoadPairs<T, kPairsOfRows>(args, at.place, at.pairs, whole, q, weights);
  const PairsOfRows<PlainProducts<Acc>> pairs{q, weights, at.pairs, args.heads, args.depth};
  Acc* scores = static_cast<Acc*>(args.scores) + at.batch * args.top_k.rows * at.stride;
  ForPanels(args, task, [&](int64_t p) {
    if (p * kPanelColumns >= at.columns) return;
    PackPanel<T>(args, at.batch, p, reinterpret_cast<char*>(panel));
    pairs.ScorePanel(panel, scores + p * kPanelColumns, at.stride);
  });
}

template <typename T>
void SelectFew(const TopKIndexerArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const IndexerRows at(args, task);
  const Acc* scores = static_cast<const Acc*>(args.scores);
  RowScratch<Acc> scratch(AlignedLine(args.top_k.scratch), args.top_k.columns);
  SelectScored(args.top_k, at, scores + (at.batch * args.top_k.rows + at.begin) * at.stride,
               scratch);
}

}  // namespace

void TopKIndexer(const TopKIndexerArgs& args, int64_t task) {
  DispatchDtype(args.top_k.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t first_phase = args.batch * args.panel_tasks;
    if (task >= first_phase) {
      return args.scores ? SelectFew<T>(args, task - first_phase)
                         : SelectRows<T>(args, task - first_phase);
    }
    if (args.scores) return ScoreColumns<T>(args, task);
    const int64_t batch = task / args.panel_tasks;
    char* panels = args.panels + batch * args.PanelCount() * args.panel_bytes;
    ForPanels(args, task,
              [&](int64_t p) { PackPanel<T>(args, batch, p, panels + p * args.panel_bytes); });
  });
}

}  // namespace sgap::SGAP_ISA
