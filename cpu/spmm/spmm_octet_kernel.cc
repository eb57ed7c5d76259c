// SpMM of column vectors of bfloat16 on matrix tiles: 1-D octet tiling (vectorSparse, section 5.3),
// with the tiles of cpu/simd/tiles.h in the place of tensor cores. For up to 16 rows of a block row
// and up to 64 columns, steps of up to 32 vectors: their values, transposed once for all columns,
// are A; the rows of x that they name are gathered and interleaved in pairs on the way: B.
//
// A tile's load of what has just been stored waits for the store, and so does a load of what a tile
// has just stored. To hide that, steps follow each other like this, across columns and block rows:
// gather step s and, in between, round and store sums that left their tiles two steps before;
// multiply step s - 1, and let its sums leave if it was the last. Gathering waits for the caches,
// rounding for the ports of shuffles: one after the other they took 1.1 to 1.3 of the time.
#include "cpu/simd/tiles.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {
namespace {

// Steps are one function where the processor has tiles. Elsewhere that would fill megabytes.
#if defined(SGAP_AMX)
#define SGAP_IN_TILES [[gnu::always_inline]] inline
constexpr int kUnrolled = 16;
#else
#define SGAP_IN_TILES [[gnu::noinline]]
constexpr int kUnrolled = 1;
#endif

constexpr int kPanels = 2;  // of kTileDepth columns; a panel has two tiles of sums and of pairs
constexpr int64_t kPassColumns = kPanels * kTileDepth;

// Registers: sums of each panel's two tiles; values and pairs of a step of 32 vectors and of one of
// 16, which takes half of the time: a product takes as long as its pairs have rows.
enum Tile { kSums, kValues = 2 * kPanels, kPairs, kHalfValues, kHalfPairs };
constexpr int kHalfStep = kTileDepth / 2;

// Vectors whose values are transposed at once: those of longer block rows again for each pass.
constexpr int64_t kPackedVectors = 1024;

// The vector of a step whose value is number k of a row of A: what three rounds of TransposeStep
// make of vectors in their order. `kStep` vectors of kRows values.
template <int kRows, int kStep>
constexpr int VectorAt(int k) {
  constexpr int kPart = kRows < 8 ? 8 / kRows : 1;  // vectors in 16 bytes
  constexpr int kParts = kStep / 8;
  return k % 8 / kPart * (kParts * kPart) + k / 8 * kPart + k % kPart;
}

// Row r of the first eight rows of A, or row 8 + r, from the registers that have halves of both.
template <int kHalf, int... i>
inline TileRow JoinHalves(TileRow first, TileRow second, std::integer_sequence<int, i...>) {
  using Parts = Vector<uint64_t, 8>;
  return BitCast<TileRow>(
      Shuffle<(i / 2 * 4 + kHalf * 2 + i % 2)...>(BitCast<Parts>(first), BitCast<Parts>(second)));
}

// kRows values of each of up to kStep of `count` vectors, which are `length` apart, as rows of A in
// the order of VectorAt; zero where there is no vector.
template <int kRows, int kStep>
void TransposeStep(const uint16_t* values, int64_t length, int64_t count, uint16_t* target) {
  constexpr auto kAll = std::make_integer_sequence<int, kTileDepth>();
  TileRow rows[kRows] = {};
  if (length == kRows) {
    constexpr int kWidth = kRows < kTileRows ? kStep : kTileDepth;  // values of a register
    constexpr int kApart = kRows < kTileRows ? 1 : kTileDepth / kStep;
    const int64_t all = count * kRows;
    for (int i = 0; i < kRows / kApart; ++i, values += kWidth) {
      const int64_t left = all - i * kWidth;
      if (left >= kWidth) {
        std::memcpy(&rows[i * kApart], values, kWidth * sizeof(*values));
      } else if (left > 0) {
        rows[i * kApart] = LoadBits<kTileDepth>(values, int(left));
      }
    }
  } else {
    for (int i = 0; i < kStep && i < count; ++i) {  // of 16 rows: half of a register
      const int at = kRows == kTileRows ? i / 2 * (kTileDepth / kStep) : 0;
      std::memcpy(reinterpret_cast<char*>(&rows[at]) + i % 2 * 32, values + i * length, 32);
    }
  }
  // A value's place is its register, then its place in 16 bytes. Each round moves the highest bit
  // of this place to the lowest.
  for (int round = 0; round < 3; ++round) {
    TileRow next[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows / 2; ++i) {
      next[2 * i] = PairHalves<0>(rows[i], rows[i + kRows / 2], kAll);
      next[2 * i + 1] = PairHalves<1>(rows[i], rows[i + kRows / 2], kAll);
    }
    for (int i = 0; i < kRows; ++i) rows[i] = next[i];
  }
  if constexpr (kRows == kTileRows) {
    constexpr auto kParts = std::make_integer_sequence<int, 8>();
    for (int i = 0; i < 8; ++i) {
      const TileRow first = rows[i], second = rows[8 + i];
      rows[i] = JoinHalves<0>(first, second, kParts);
      rows[8 + i] = JoinHalves<1>(first, second, kParts);
    }
  }
  for (int i = 0; i < kRows; ++i) std::memcpy(target + i * kTileDepth, &rows[i], sizeof(TileRow));
}

// The gathered rows of a step.
struct Gathered {
  alignas(64) uint16_t tiles[2 * kPanels][kTileRows][kTileDepth];
};

// Interleaves rows 2 p and 2 p + 1, for p up to kStep / 2, on kOf panels of columns. With kTail the
// last panel has fewer than kTileDepth: `columns` in all. Calls between(0) to between(3) on its
// way.
template <int kOf, bool kTail, int kStep, typename RowOf, typename Between>
SGAP_IN_TILES void GatherRows(RowOf row_of, int columns, Gathered* to, Between between) {
  const auto load = [&](const BFloat16* row, int panel) {
    const BFloat16* at = row + panel * kTileDepth;
    if (kTail && panel == kOf - 1) return LoadTileRow(at, columns - panel * kTileDepth);
    return LoadTileRow(at);
  };
#pragma GCC unroll kUnrolled
  for (int pair = 0; pair < kStep / 2; ++pair) {
    const BFloat16 *first = row_of(2 * pair), *second = row_of(2 * pair + 1);
#pragma GCC unroll 2
    for (int h = 0; h < kOf; ++h) {
      StorePairs(load(first, h), load(second, h), to->tiles[2 * h][pair],
                 to->tiles[2 * h + 1][pair]);
    }
    constexpr int kPart = kStep / 8;
    if (pair % kPart == kPart - 1) between(pair / kPart);
  }
}

// The vectors [begin, end) of one block row, and kRows of its rows.
struct OctetRow {
  const BFloat16* values;  // of vector 0, at the first of the rows
  int64_t length, begin, end;
};

template <int kRows>
class OctetTask {
 public:
  OctetTask(const SpmmArgs& args, const TileTask& tile)
      : args_(args), tile_(tile), step_(int(args.step)), tiles_(Shapes()) {}

  ~OctetTask() {
    FinishSums();
    FinishStep();
    FinishSums();
    FinishSums();
  }

  // The rows of each vector from `row` on.
  void Run(int64_t row) {
    const RowTask& task = *tile_.rows;
    OctetRow block{
        static_cast<const BFloat16*>(args_.values) + tile_.batch * args_.values_stride + row,
        args_.length, task.entry_begin, task.entry_end};
    if (task.piece >= 0) {
      const int64_t slot = (tile_.batch * args_.pieces + task.piece) * args_.piece_rows + row;
      return RunRow(block, kRows, static_cast<float*>(args_.partials) + slot * args_.n);
    }
    for (int64_t r = task.row_begin; r < task.row_end; ++r) {
      const int64_t first = r * args_.piece_rows + row, left = args_.m - first;
      if (left <= 0) break;
      block.begin = args_.offsets[r];
      block.end = args_.offsets[r + 1];
      RunRow(block, left < kRows ? int(left) : kRows,
             static_cast<BFloat16*>(args_.y) + (tile_.batch * args_.m + first) * args_.n);
    }
  }

 private:
  static TileShapes Shapes() {
    TileShapes shapes;
    for (int i = 0; i < 2 * kPanels; ++i) shapes.Set(kSums + i, kRows, kTileBytes);
    shapes.Set(kValues, kRows, kTileBytes);
    shapes.Set(kPairs, kTileRows, kTileBytes);
    shapes.Set(kHalfValues, kRows, kTileBytes / 2);
    shapes.Set(kHalfPairs, kTileRows / 2, kTileBytes);
    return shapes;
  }

  // Where sums go: `height` rows of `columns` values of y, or of the sums of a piece.
  struct Target {
    void* out;  // null: nowhere
    int height, columns;
  };

  // A step that is gathered and not yet multiplied.
  struct Step {
    const uint16_t* values = nullptr;    // packed; null: there is none
    bool half, two_panels, first, last;  // first, last: of its sums
    int buffer;
    Target target;
  };

  // Sums that have left their tiles.
  struct Sums {
    Target target = {};
    const float (*tiles)[kTileRows][kTileColumns];
  };

  // A block row: `height` rows of y, or of the sums of a piece, from `out` on.
  template <typename Out>
  SGAP_IN_TILES void RunRow(const OctetRow& row, int height, Out* out) {
    const int64_t vectors = row.end - row.begin;
    if (vectors == 0) {
      for (int i = 0; i < height; ++i, out += args_.n) {
        std::memset(out + tile_.first, 0, size_t(tile_.last - tile_.first) * sizeof(Out));
      }
      return;
    }
    const int64_t most = MostPacked();
    const bool once = vectors <= most;
    const uint16_t* packed = once ? Pack(row, row.begin, row.end) : nullptr;
    for (int64_t column = tile_.first; column < tile_.last; column += kPassColumns) {
      const int64_t left = tile_.last - column;
      const int columns = int(left < kPassColumns ? left : kPassColumns);
      const Target target{out + column, height, columns};
      const BFloat16* x = static_cast<const BFloat16*>(tile_.x) + (column - tile_.first);
      for (int64_t p = row.begin; p < row.end; p += most) {
        const int64_t end = row.end - p < most ? row.end : p + most;
        if (!once) packed = Pack(row, p, end);
        if (columns == kPassColumns) {
          Multiply<2, false>(row, x, p, end, packed, target);
        } else if (columns > kTileDepth) {
          MultiplyTail<2>(row, x, p, end, packed, target);
        } else {
          MultiplyTail<1>(row, x, p, end, packed, target);
        }
      }
    }
  }

  // The most vectors of packed_: the rows of A of a half step take as much room as of a whole one.
  int64_t MostPacked() const { return kPackedVectors * step_ / kTileDepth; }

  // Whether a step is a half one where `count` vectors are left.
  bool IsHalf(int64_t count) const { return count <= kHalfStep || step_ == kHalfStep; }

  // The values of the vectors [begin, end), step by step as TransposeStep leaves them. There are
  // two such arrays, in turn: the step under way may read the one before.
  const uint16_t* Pack(const OctetRow& row, int64_t begin, int64_t end) {
    uint16_t* const packed = packed_[packs_++ % 2];
    uint16_t* target = packed;
    for (int64_t p = begin; p < end; p += step_, target += kRows * kTileDepth) {
      const auto* values = reinterpret_cast<const uint16_t*>(row.values) + p * row.length;
      if (IsHalf(end - p)) {
        TransposeStep<kRows, kHalfStep>(values, row.length, end - p, target);
      } else {
        TransposeStep<kRows, kTileDepth>(values, row.length, end - p, target);
      }
    }
    return packed;
  }

  // Adds the vectors [begin, end), whose values are packed, on the columns from x on.
  template <int kOf, bool kTail>
  SGAP_IN_TILES void Multiply(const OctetRow& row, const BFloat16* x, int64_t begin, int64_t end,
                              const uint16_t* packed, const Target& target) {
    for (int64_t p = begin; p < end; p += step_, packed += kRows * kTileDepth) {
      const bool half = IsHalf(end - p);
      if (half) {
        Gather<kOf, kTail, kHalfStep>(x, p, end, target.columns);
      } else {
        Gather<kOf, kTail, kTileDepth>(x, p, end, target.columns);
      }
      FinishStep();
      const bool last = row.end - p <= step_;
      step_under_way_ = {packed, half, kOf > 1, p == row.begin, last, buffer_, target};
      buffer_ ^= 1;
    }
  }

  template <int kOf>
  [[gnu::noinline]] void MultiplyTail(const OctetRow& row, const BFloat16* x, int64_t begin,
                                      int64_t end, const uint16_t* packed, const Target& target) {
    Multiply<kOf, true>(row, x, begin, end, packed, target);
  }

  // Gathers the vectors from p on, and stores the sums that are ready.
  template <int kOf, bool kTail, int kStep>
  SGAP_IN_TILES void Gather(const BFloat16* x, int64_t p, int64_t end, int columns) {
    if (kTail || end - p < kStep) return GatherSome<kOf, kTail, kStep>(x, p, end, columns);
    const int32_t* indices = args_.indices + p;
    const size_t stride = tile_.x_stride;
    GatherAndStore<kOf, kTail, kStep>([&](int i) { return x + size_t(indices[i]) * stride; },
                                      columns);
  }

  // The same where there may be fewer than kStep: zeros in the place of the others.
  template <int kOf, bool kTail, int kStep>
  [[gnu::noinline]] void GatherSome(const BFloat16* x, int64_t p, int64_t end, int columns) {
    const int32_t* indices = args_.indices + p;
    const size_t stride = tile_.x_stride;
    const BFloat16* rows[kStep];
    for (int i = 0; i < kStep; ++i) {
      rows[i] = i < end - p ? x + size_t(indices[i]) * stride : kZeroRow;
    }
    GatherAndStore<kOf, kTail, kStep>([&](int i) { return rows[i]; }, columns);
  }

  template <int kOf, bool kTail, int kStep, typename RowOf>
  SGAP_IN_TILES void GatherAndStore(RowOf row_of, int columns) {
    constexpr auto kVector = VectorAt<kRows, kStep>;
    GatherRows<kOf, kTail, kStep>([&](int i) { return row_of(kVector(i)); }, columns,
                                  gathered_ + buffer_, [&](int part) { StoreReady(part); });
    NextSums();
  }

  // Multiplies the step under way, if there is one.
  SGAP_IN_TILES void FinishStep() {
    const Step& step = step_under_way_;
    if (!step.values) return;
    if (step.first) {
      tiles_.template Zero<kSums + 0>(), tiles_.template Zero<kSums + 1>();
      tiles_.template Zero<kSums + 2>(), tiles_.template Zero<kSums + 3>();
    }
    if (step.half) {
      AddProducts<kHalfValues, kHalfPairs>(step);
    } else {
      AddProducts<kValues, kPairs>(step);
    }
    if (step.last) {
      auto* const sums = sums_[next_sums_ ^= 1];
      tiles_.template Store<kSums + 0>(sums[0], kTileBytes);
      tiles_.template Store<kSums + 1>(sums[1], kTileBytes);
      if (step.two_panels) {
        tiles_.template Store<kSums + 2>(sums[2], kTileBytes);
        tiles_.template Store<kSums + 3>(sums[3], kTileBytes);
      }
      left_ = {step.target, sums};
    }
    step_under_way_.values = nullptr;
  }

  template <int kA, int kB>
  SGAP_IN_TILES void AddProducts(const Step& step) {
    const Gathered& from = gathered_[step.buffer];
    tiles_.template Load<kA>(step.values, kTileBytes);
    tiles_.template Load<kB>(from.tiles[0], kTileBytes);
    tiles_.template Dot<kSums + 0, kA, kB>();
    tiles_.template Load<kB>(from.tiles[1], kTileBytes);
    tiles_.template Dot<kSums + 1, kA, kB>();
    if (!step.two_panels) return;
    tiles_.template Load<kB>(from.tiles[2], kTileBytes);
    tiles_.template Dot<kSums + 2, kA, kB>();
    tiles_.template Load<kB>(from.tiles[3], kTileBytes);
    tiles_.template Dot<kSums + 3, kA, kB>();
  }

  // Stores the sums that are ready, if there are any; those that have just left their tiles are
  // next.
  void FinishSums() {
    for (int part = 0; part < 4; ++part) StoreReady(part);
    NextSums();
  }

  void NextSums() {
    ready_ = left_;
    left_.target.out = nullptr;
  }

  // A quarter of their rows.
  SGAP_IN_TILES void StoreReady(int part) {
    const Target& target = ready_.target;
    if (!target.out) return;
    constexpr int kPart = kRows < 4 ? 1 : kRows / 4;
    const int first = part * kPart, last = first + kPart;
    const int end = last < target.height ? last : target.height;
    if (tile_.rows->piece >= 0) return StoreRows(first, end, static_cast<float*>(target.out));
    auto* const out = static_cast<BFloat16*>(target.out);
    if (target.columns < kPassColumns) return StoreRows(first, end, out);
    for (int i = first; i < end; ++i) {
      StoreWholePanel(ready_.tiles[0][i], ready_.tiles[1][i], out + i * args_.n);
      StoreWholePanel(ready_.tiles[2][i], ready_.tiles[3][i], out + i * args_.n + kTileDepth);
    }
  }

  template <typename Out>
  [[gnu::noinline]] void StoreRows(int first, int end, Out* out) const {
    for (int i = first; i < end; ++i) {
      for (int at = 0; at < ready_.target.columns; at += kTileDepth) {
        const int h = at / kTileDepth, left = ready_.target.columns - at;
        StorePanel<Out>(ready_.tiles[2 * h][i], ready_.tiles[2 * h + 1][i],
                        left < kTileDepth ? left : kTileDepth, out + i * args_.n + at);
      }
    }
  }

  const SpmmArgs& args_;
  const TileTask& tile_;
  const int step_;
  Tiles tiles_;
  Step step_under_way_;
  Sums left_, ready_;
  int buffer_ = 0, packs_ = 0, next_sums_ = 0;
  Gathered gathered_[2];
  alignas(64) float sums_[2][2 * kPanels][kTileRows][kTileColumns];
  alignas(64) uint16_t packed_[2][kPackedVectors * kTileRows];
};

template <int kRows>
void RunOctets(const SpmmArgs& args, const TileTask& tile) {
  OctetTask<kRows> octets(args, tile);
  for (int64_t row = 0; row < args.length; row += kRows) octets.Run(row);
}

}  // namespace

void SpmmOctet(const SpmmArgs& args, int64_t task) {
  const TileTask tile = BeginTask<BFloat16>(args, task);
  switch (args.length) {
    case 2:
      RunOctets<2>(args, tile);
      break;
    case 4:
      RunOctets<4>(args, tile);
      break;
    case 8:
      RunOctets<8>(args, tile);
      break;
    default:
      RunOctets<kTileRows>(args, tile);
  }
  if (tile.rows->piece >= 0 && IsLastPiece(args, tile.walk, *tile.rows)) {
    CombinePieces<BFloat16>(args, args.splits[tile.rows->split], tile.batch, tile.first,
                            tile.last - tile.first);
  }
  EndTask(tile);
}

}  // namespace sgap::SGAP_ISA
