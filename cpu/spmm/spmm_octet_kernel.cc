// SpMM of column vectors of bfloat16 on matrix tiles: 1-D octet tiling (vectorSparse, section 5.3),
// with the tiles of cpu/simd/tiles.h in the place of tensor cores. For up to 16 rows of a block row
// and up to 64 columns, steps of up to 32 vectors: their values, transposed once for all columns,
// are A; the rows of x that they name are gathered and interleaved in pairs on the way: B.
//
// A tile's load of what has just been stored waits for the store, and so does a load of what a tile
// has just stored. To hide that, steps follow each other like this, across columns and block rows:
// gather step s; round and store the sums that left their tiles before; multiply step s - 1, and
// let its sums leave if it was the last.
#include "cpu/simd/gather.h"
#include "cpu/simd/tiles.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int kPanels = 2;  // of kTileDepth columns; a panel has two tiles of sums and of pairs
constexpr int64_t kPassColumns = kPanels * kTileDepth;

// Registers: sums of each panel's two tiles, values, and pairs, which take turns.
enum Tile { kSums, kValues = 2 * kPanels, kPairs };

// Vectors whose values are transposed at once: those of longer block rows again for each pass.
constexpr int64_t kPackedVectors = 1024;

// The gathered rows of a step.
struct Gathered {
  alignas(64) uint16_t tiles[2 * kPanels][kTileRows][kTileDepth];
};

// The vectors [begin, end) of one block row, up to 16 of its rows, in steps.
struct OctetRow {
  const BFloat16* values;  // of vector 0, at the first of the rows
  int64_t length, begin, end;
};

class OctetTask {
 public:
  OctetTask(const SpmmArgs& args, const TileTask& tile, int rows)
      : args_(args), tile_(tile), rows_(rows), step_(int(args.step)), tiles_(Shapes(rows, step_)) {}

  ~OctetTask() {
    FinishSums();
    FinishStep();
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
      return RunRow(block, rows_, static_cast<float*>(args_.partials) + slot * args_.n);
    }
    for (int64_t r = task.row_begin; r < task.row_end; ++r) {
      const int64_t first = r * args_.piece_rows + row, left = args_.m - first;
      if (left <= 0) break;
      block.begin = args_.offsets[r];
      block.end = args_.offsets[r + 1];
      RunRow(block, left < rows_ ? int(left) : rows_,
             static_cast<BFloat16*>(args_.y) + (tile_.batch * args_.m + first) * args_.n);
    }
  }

 private:
  static TileShapes Shapes(int rows, int step) {
    TileShapes shapes;
    for (int i = 0; i < 2 * kPanels; ++i) shapes.Set(kSums + i, rows, kTileBytes);
    shapes.Set(kValues, rows, step * sizeof(BFloat16));
    for (int i = kPairs; i < 8; ++i) shapes.Set(i, step / 2, kTileBytes);
    return shapes;
  }

  // Where sums go: `height` rows of `columns` values of y, or of the sums of a piece.
  struct Target {
    void* out;
    int height, columns;
  };

  // A step that is gathered and not yet multiplied.
  struct Step {
    const uint16_t* values = nullptr;  // packed; null: there is none
    int panels, buffer;
    bool first, last;  // of its sums
    Target target;
  };

  // A block row: `height` rows of y, or of the sums of a piece, from `out` on.
  template <typename Out>
  void RunRow(const OctetRow& row, int height, Out* out) {
    const int64_t vectors = row.end - row.begin;
    if (vectors == 0) {
      for (int i = 0; i < height; ++i, out += args_.n) {
        std::memset(out + tile_.first, 0, size_t(tile_.last - tile_.first) * sizeof(Out));
      }
      return;
    }
    const bool once = vectors <= kPackedVectors;
    const uint16_t* packed = once ? Pack(row, row.begin, row.end) : nullptr;
    for (int64_t column = tile_.first; column < tile_.last; column += kPassColumns) {
      const int64_t left = tile_.last - column;
      const int columns = int(left < kPassColumns ? left : kPassColumns);
      const Target target{out + column, height, columns};
      for (int i = 0; i < height; ++i) PrefetchToWrite(out + i * args_.n + column, columns);
      const BFloat16* x = static_cast<const BFloat16*>(tile_.x) + (column - tile_.first);
      for (int64_t p = row.begin; p < row.end; p += kPackedVectors) {
        const int64_t end = row.end - p < kPackedVectors ? row.end : p + kPackedVectors;
        if (!once) packed = Pack(row, p, end);
        if (columns == kPassColumns) {
          Multiply<2, false>(row, x, p, end, packed, target);
        } else if (columns == kTileDepth) {
          Multiply<1, false>(row, x, p, end, packed, target);
        } else if (columns > kTileDepth) {
          Multiply<2, true>(row, x, p, end, packed, target);
        } else {
          Multiply<1, true>(row, x, p, end, packed, target);
        }
      }
    }
  }

  template <typename Out>
  static void PrefetchToWrite(Out* row, int columns) {
    for (int c = 0; c < columns; c += 64 / int(sizeof(Out))) __builtin_prefetch(row + c, 1);
  }

  // The values of the vectors [begin, end): packed[step of vectors][row][vector], zero where there
  // is none. There are two such arrays, in turn: the step under way may read the one before.
  const uint16_t* Pack(const OctetRow& row, int64_t begin, int64_t end) {
    uint16_t* const packed = packed_[packs_++ % 2];
    const auto* values = reinterpret_cast<const uint16_t*>(row.values);
    for (int64_t p = begin, at = 0; p < end; p += 8, at += 8) {
      uint16_t* target = packed + at / kTileDepth * rows_ * kTileDepth + at % kTileDepth;
      const uint16_t* source = values + p * row.length;
      uint16_t some[8 * kTileRows];
      int64_t stride = row.length;
      if (end - p < 8) {
        std::memset(some, 0, sizeof(some));
        for (int64_t i = 0; i < end - p; ++i) {
          std::memcpy(some + i * rows_, source + i * stride, rows_ * sizeof(uint16_t));
        }
        source = some, stride = rows_;
      }
      switch (rows_) {
        case 16:
          TransposeEight<16>(source, stride, target);
          break;
        case 8:
          TransposeEight<8>(source, stride, target);
          break;
        case 4:
          TransposeEight<4>(source, stride, target);
          break;
        default:
          TransposeEight<2>(source, stride, target);
      }
    }
    // The rest of the last step.
    const int64_t count = end - begin, padded = (count + 7) / 8 * 8;
    for (int64_t at = padded; at % kTileDepth != 0; at += 8) {
      for (int i = 0; i < rows_; ++i) {
        std::memset(packed + (at / kTileDepth * rows_ + i) * kTileDepth + at % kTileDepth, 0, 16);
      }
    }
    return packed;
  }

  // Adds the vectors [begin, end), whose values are packed, on the columns from x on.
  template <int kOf, bool kTail>
  void Multiply(const OctetRow& row, const BFloat16* x, int64_t begin, int64_t end,
                const uint16_t* packed, const Target& target) {
    for (int64_t p = begin; p < end; p += step_) {
      Gather<kOf, kTail>(x, p, end, target.columns, &gathered_[buffer_]);
      FinishSums();
      FinishStep();
      const int64_t at = p - begin;
      step_under_way_ = {packed + at / kTileDepth * rows_ * kTileDepth + at % kTileDepth,
                         kOf,
                         buffer_,
                         p == row.begin,
                         row.end - p <= step_,
                         target};
      buffer_ ^= 1;
    }
  }

  template <int kOf, bool kTail>
  void Gather(const BFloat16* x, int64_t p, int64_t end, int columns, Gathered* to) const {
    const int32_t* indices = args_.indices + p;
    const size_t stride = tile_.x_stride;
    const auto row = [&](int i) {
      const BFloat16* at = x + size_t(indices[i]) * stride;
      asm volatile("" : "+r"(at));  // computed once for all panels
      return at;
    };
    const auto load = [&](const BFloat16* at, int panel) {
      if (kTail && panel == kOf - 1)
        return LoadTileRow(at + panel * kTileDepth, columns - panel * kTileDepth);
      return LoadTileRow(at + panel * kTileDepth);
    };
    const int count = end - p < step_ ? int(end - p) : step_;
    int pair = 0;
#pragma GCC unroll 4
    for (; 2 * pair + 2 <= count; ++pair) {
      const BFloat16 *first = row(2 * pair), *second = row(2 * pair + 1);
#pragma GCC unroll 2
      for (int h = 0; h < kOf; ++h) {
        StorePairs(load(first, h), load(second, h), to->tiles[2 * h][pair],
                   to->tiles[2 * h + 1][pair]);
      }
    }
    for (; pair < step_ / 2; ++pair) {
      for (int h = 0; h < kOf; ++h) {
        const TileRow last = 2 * pair < count ? load(row(2 * pair), h) : TileRow{};
        StorePairs(last, TileRow{}, to->tiles[2 * h][pair], to->tiles[2 * h + 1][pair]);
      }
    }
  }

  // Multiplies the step under way, if there is one.
  void FinishStep() {
    const Step& step = step_under_way_;
    if (!step.values) return;
    if (step.first) {
      tiles_.Zero<kSums + 0>(), tiles_.Zero<kSums + 1>();
      tiles_.Zero<kSums + 2>(), tiles_.Zero<kSums + 3>();
    }
    const Gathered& from = gathered_[step.buffer];
    tiles_.Load<kValues>(step.values, kTileBytes);
    tiles_.Load<kPairs + 0>(from.tiles[0], kTileBytes);
    tiles_.Dot<kSums + 0, kValues, kPairs + 0>();
    tiles_.Load<kPairs + 1>(from.tiles[1], kTileBytes);
    tiles_.Dot<kSums + 1, kValues, kPairs + 1>();
    if (step.panels > 1) {
      tiles_.Load<kPairs + 2>(from.tiles[2], kTileBytes);
      tiles_.Dot<kSums + 2, kValues, kPairs + 2>();
      tiles_.Load<kPairs + 0>(from.tiles[3], kTileBytes);
      tiles_.Dot<kSums + 3, kValues, kPairs + 0>();
    }
    if (step.last) {
      tiles_.Store<kSums + 0>(sums_[0], kTileBytes), tiles_.Store<kSums + 1>(sums_[1], kTileBytes);
      if (step.panels > 1) {
        tiles_.Store<kSums + 2>(sums_[2], kTileBytes);
        tiles_.Store<kSums + 3>(sums_[3], kTileBytes);
      }
      sums_of_ = step.target;
    }
    step_under_way_.values = nullptr;
  }

  // Stores the sums that have left their tiles, if there are any.
  void FinishSums() {
    if (!sums_of_.out) return;
    if (tile_.rows->piece >= 0) {
      StoreSums(static_cast<float*>(sums_of_.out));
    } else {
      StoreSums(static_cast<BFloat16*>(sums_of_.out));
    }
    sums_of_.out = nullptr;
  }

  template <typename Out>
  void StoreSums(Out* out) const {
    for (int i = 0; i < sums_of_.height; ++i, out += args_.n) {
      for (int at = 0; at < sums_of_.columns; at += kTileDepth) {
        const int h = at / kTileDepth, left = sums_of_.columns - at;
        StorePanel<Out>(sums_[2 * h][i], sums_[2 * h + 1][i], left < kTileDepth ? left : kTileDepth,
                        out + at);
      }
    }
  }

  const SpmmArgs& args_;
  const TileTask& tile_;
  const int rows_, step_;
  Tiles tiles_;
  Step step_under_way_;
  Target sums_of_ = {};
  int buffer_ = 0, packs_ = 0;
  Gathered gathered_[2];
  alignas(64) float sums_[2 * kPanels][kTileRows][kTileColumns];
  alignas(64) uint16_t packed_[2][kPackedVectors * kTileRows];
};

}  // namespace

void SpmmOctet(const SpmmArgs& args, int64_t task) {
  const TileTask tile = BeginTask<BFloat16>(args, task);
  const int rows = int(args.length < kTileRows ? args.length : kTileRows);
  {
    OctetTask octets(args, tile, rows);
    for (int64_t row = 0; row < args.length; row += rows) octets.Run(row);
  }
  if (tile.rows->piece >= 0 && IsLastPiece(args, tile.walk, *tile.rows)) {
    CombinePieces<BFloat16>(args, args.splits[tile.rows->split], tile.batch, tile.first,
                            tile.last - tile.first);
  }
  EndTask(tile);
}

}  // namespace sgap::SGAP_ISA
