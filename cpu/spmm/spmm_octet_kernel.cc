// SpMM of column vectors of bfloat16 on matrix tiles: 1-D octet tiling (vectorSparse, section 5.3),
// with the tiles of cpu/simd/tiles.h in the place of tensor cores. For up to 16 rows of a block row
// and up to 64 columns, steps of up to 32 vectors: their values, transposed once for all columns,
// are A; the rows of x that they name are gathered and interleaved in pairs on the way: B. A step
// is gathered while the one before it is multiplied: what has just been stored cannot be loaded
// into a tile yet.
#include "cpu/simd/tiles.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int kPanels = 2;  // of kTileDepth columns; a panel has two tiles of sums and of pairs
constexpr int64_t kPassColumns = kPanels * kTileDepth;

// Registers: sums of each panel's two tiles, values, and pairs, which take turns.
enum Tile { kSums, kValues = 2 * kPanels, kPairs };

// Vectors whose values are transposed at once: those of longer block rows again for each pass.
constexpr int64_t kPackedVectors = 2048;

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
  OctetTask(const SpmmArgs& args, const TileTask<BFloat16>& tile, int rows)
      : args_(args), tile_(tile), rows_(rows), step_(int(args.step)), tiles_(Shapes(rows, step_)) {}

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

  // A block row: `height` rows of y, or of the sums of a piece, from `out` on.
  template <typename Out>
  void RunRow(const OctetRow& row, int height, Out* out) {
    const int64_t vectors = row.end - row.begin;
    const bool once = vectors <= kPackedVectors;
    if (once) Pack(row, row.begin, row.end);
    for (int64_t column = tile_.first; column < tile_.last; column += kPassColumns) {
      const int64_t left = tile_.last - column;
      const int columns = int(left < kPassColumns ? left : kPassColumns);
      for (int i = 0; i < height; ++i) PrefetchToWrite(out + i * args_.n + column, columns);
      tiles_.Zero<kSums + 0>(), tiles_.Zero<kSums + 1>();
      tiles_.Zero<kSums + 2>(), tiles_.Zero<kSums + 3>();
      const BFloat16* x = tile_.x + (column - tile_.first);
      for (int64_t p = row.begin; p < row.end; p += kPackedVectors) {
        const int64_t end = row.end - p < kPackedVectors ? row.end : p + kPackedVectors;
        if (!once) Pack(row, p, end);
        if (columns == kPassColumns) {
          Multiply<2, false>(x, p, end, columns);
        } else if (columns == kTileDepth) {
          Multiply<1, false>(x, p, end, columns);
        } else if (columns > kTileDepth) {
          Multiply<2, true>(x, p, end, columns);
        } else {
          Multiply<1, true>(x, p, end, columns);
        }
      }
      StoreSums(height, columns, out + column);
    }
  }

  template <typename Out>
  static void PrefetchToWrite(Out* row, int columns) {
    for (int c = 0; c < columns; c += 64 / int(sizeof(Out))) __builtin_prefetch(row + c, 1);
  }

  // The values of the vectors [begin, end): packed[step of vectors][row][vector], zero where there
  // is none.
  void Pack(const OctetRow& row, int64_t begin, int64_t end) {
    const auto* values = reinterpret_cast<const uint16_t*>(row.values);
    for (int64_t p = begin, at = 0; p < end; p += 8, at += 8) {
      uint16_t* target = packed_ + at / kTileDepth * rows_ * kTileDepth + at % kTileDepth;
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
        std::memset(packed_ + (at / kTileDepth * rows_ + i) * kTileDepth + at % kTileDepth, 0, 16);
      }
    }
  }

  // Adds the vectors [begin, end), whose values are packed, on the columns from x on.
  template <int kOf, bool kTail>
  void Multiply(const BFloat16* x, int64_t begin, int64_t end, int columns) {
    const int64_t steps = (end - begin + step_ - 1) / step_;
    for (int64_t s = 0; s <= steps; ++s) {
      if (s < steps) Gather<kOf, kTail>(x, begin + s * step_, end, columns, &gathered_[s % 2]);
      if (s > 0) Dot<kOf>(s - 1, gathered_[(s - 1) % 2]);
    }
  }

  template <int kOf, bool kTail>
  void Gather(const BFloat16* x, int64_t p, int64_t end, int columns, Gathered* to) const {
    const int32_t* indices = args_.indices + p;
    const size_t stride = tile_.x_stride;
    const auto load = [&](int i, int panel) {
      const BFloat16* row = x + size_t(indices[i]) * stride + panel * kTileDepth;
      if (kTail && panel == kOf - 1) return LoadTileRow(row, columns - panel * kTileDepth);
      return LoadTileRow(row);
    };
    const int count = end - p < step_ ? int(end - p) : step_;
    int pair = 0;
#pragma GCC unroll 4
    for (; 2 * pair + 2 <= count; ++pair) {
#pragma GCC unroll 2
      for (int h = 0; h < kOf; ++h) {
        StorePairs(load(2 * pair, h), load(2 * pair + 1, h), to->tiles[2 * h][pair],
                   to->tiles[2 * h + 1][pair]);
      }
    }
    for (; pair < step_ / 2; ++pair) {
      for (int h = 0; h < kOf; ++h) {
        const TileRow row = 2 * pair < count ? load(2 * pair, h) : TileRow{};
        StorePairs(row, TileRow{}, to->tiles[2 * h][pair], to->tiles[2 * h + 1][pair]);
      }
    }
  }

  template <int kOf>
  void Dot(int64_t step, const Gathered& from) {
    const int64_t at = step * step_;
    tiles_.Load<kValues>(packed_ + at / kTileDepth * rows_ * kTileDepth + at % kTileDepth,
                         kTileBytes);
    tiles_.Load<kPairs + 0>(from.tiles[0], kTileBytes);
    tiles_.Dot<kSums + 0, kValues, kPairs + 0>();
    tiles_.Load<kPairs + 1>(from.tiles[1], kTileBytes);
    tiles_.Dot<kSums + 1, kValues, kPairs + 1>();
    if constexpr (kOf > 1) {
      tiles_.Load<kPairs + 2>(from.tiles[2], kTileBytes);
      tiles_.Dot<kSums + 2, kValues, kPairs + 2>();
      tiles_.Load<kPairs + 0>(from.tiles[3], kTileBytes);
      tiles_.Dot<kSums + 3, kValues, kPairs + 0>();
    }
  }

  template <typename Out>
  void StoreSums(int height, int columns, Out* out) {
    alignas(64) float sums[2 * kPanels][kTileRows][kTileColumns];
    tiles_.Store<kSums + 0>(sums[0], kTileBytes), tiles_.Store<kSums + 1>(sums[1], kTileBytes);
    if (columns > kTileDepth) {
      tiles_.Store<kSums + 2>(sums[2], kTileBytes), tiles_.Store<kSums + 3>(sums[3], kTileBytes);
    }
    for (int i = 0; i < height; ++i, out += args_.n) {
      for (int at = 0; at < columns; at += kTileDepth) {
        const int h = at / kTileDepth, left = columns - at;
        StorePanel<Out>(sums[2 * h][i], sums[2 * h + 1][i], left < kTileDepth ? left : kTileDepth,
                        out + at);
      }
    }
  }

  const SpmmArgs& args_;
  const TileTask<BFloat16>& tile_;
  const int rows_, step_;
  Tiles tiles_;
  Gathered gathered_[2];
  alignas(64) uint16_t packed_[kPackedVectors * kTileRows];
};

}  // namespace

void SpmmOctet(const SpmmArgs& args, int64_t task) {
  const TileTask<BFloat16> tile = BeginTask<BFloat16>(args, task);
  const int rows = int(args.length < kTileRows ? args.length : kTileRows);
  OctetTask octets(args, tile, rows);
  for (int64_t row = 0; row < args.length; row += rows) octets.Run(row);
  if (tile.rows->piece >= 0 && IsLastPiece(args, tile.walk, *tile.rows)) {
    CombinePieces<BFloat16>(args, args.splits[tile.rows->split], tile.batch, tile.first,
                            tile.last - tile.first);
  }
  EndTask(tile);
}

}  // namespace sgap::SGAP_ISA
