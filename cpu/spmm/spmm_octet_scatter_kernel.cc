// The product with the transpose of column vectors of bfloat16 on matrix tiles. The V rows of x of
// a block row, in pairs, stay in tiles; 16 vectors at a time, as they lie, are the other operand;
// and each row of the product is added to the row of y that its vector names.
#include "cpu/simd/tiles.h"
#include "cpu/spmm/scatter_pieces.h"

namespace sgap::SGAP_ISA {
namespace {

// Registers: pairs of rows of x for 64 columns, vectors, and sums, which take turns.
enum Tile { kPairs, kVectors = 4, kSums };
constexpr int64_t kPassColumns = 4 * kTileColumns;

class ScatterOctets {
 public:
  ScatterOctets(const SpmmScatterArgs& args, const ScatterTask<BFloat16>& piece)
      : args_(args), piece_(piece), tiles_(Shapes(args.length)) {}

  // The vectors [begin, end) of a block row whose `rows` rows of x begin with row `first`.
  void Run(int64_t begin, int64_t end, int64_t first, int64_t rows) {
    for (int64_t column = 0; column < piece_.width; column += kPassColumns) {
      const int64_t left = piece_.width - column;
      const int columns = int(left < kPassColumns ? left : kPassColumns);
      LoadPairs(piece_.x + first * args_.n + column, int(rows), columns);
      float* sums = piece_.sums + column;
      for (int64_t p = begin; p < end; p += kTileRows) {
        const int count = end - p < kTileRows ? int(end - p) : kTileRows;
        LoadVectors(p, count, int(rows));
        float (*products)[kTileRows][kTileColumns] = products_[p / kTileRows % 2];
        Multiply(products, columns);
        Add(products, p, count, columns, sums);
      }
    }
  }

 private:
  static TileShapes Shapes(int64_t length) {
    TileShapes shapes;
    for (int i = kPairs; i < kVectors; ++i) shapes.Set(i, (length + 1) / 2, kTileBytes);
    shapes.Set(kVectors, kTileRows, length * sizeof(BFloat16));
    for (int i = kSums; i < 8; ++i) shapes.Set(i, kTileRows, kTileBytes);
    return shapes;
  }

  void LoadPairs(const BFloat16* x, int rows, int columns) {
    alignas(64) uint16_t pairs[4][kTileRows][2 * kTileColumns];
    for (int pair = 0; 2 * pair < args_.length; ++pair) {
      for (int h = 0; h < 2; ++h) {
        const int left = columns - h * kTileDepth, wide = left < kTileDepth ? left : kTileDepth;
        const auto load = [&](int row) {
          const BFloat16* at = x + row * args_.n + h * kTileDepth;
          return row < rows && wide > 0 ? LoadTileRow(at, wide) : TileRow{};
        };
        StorePairsInOrder(load(2 * pair), load(2 * pair + 1), pairs[2 * h][pair],
                          pairs[2 * h + 1][pair]);
      }
    }
    tiles_.Load<kPairs + 0>(pairs[0], kTileBytes), tiles_.Load<kPairs + 1>(pairs[1], kTileBytes);
    tiles_.Load<kPairs + 2>(pairs[2], kTileBytes), tiles_.Load<kPairs + 3>(pairs[3], kTileBytes);
  }

  // Through a copy where fewer than 16 are left, or rows of x are: what the copy leaves out may be
  // infinite, or not be there.
  void LoadVectors(int64_t p, int count, int rows) {
    const BFloat16* vectors = piece_.values + p * args_.length;
    const int64_t length = args_.length, stride = length * sizeof(BFloat16);
    if (count == kTileRows && rows == length) return tiles_.Load<kVectors>(vectors, stride);
    alignas(64) uint16_t some[kTileRows * kTileDepth] = {};
    for (int i = 0; i < count; ++i) {
      std::memcpy(some + i * length, vectors + i * length, rows * sizeof(BFloat16));
    }
    tiles_.Load<kVectors>(some, stride);
  }

  void Multiply(float (*products)[kTileRows][kTileColumns], int columns) {
    MultiplyTile<0>(products[0]);
    if (columns > kTileColumns) MultiplyTile<1>(products[1]);
    if (columns > 2 * kTileColumns) MultiplyTile<2>(products[2]);
    if (columns > 3 * kTileColumns) MultiplyTile<3>(products[3]);
  }

  template <int kTile>
  void MultiplyTile(void* products) {
    tiles_.Zero<kSums + kTile % 3>();
    tiles_.Dot<kSums + kTile % 3, kVectors, kPairs + kTile>();
    tiles_.Store<kSums + kTile % 3>(products, kTileBytes);
  }

  void Add(const float (*products)[kTileRows][kTileColumns], int64_t p, int count, int columns,
           float* sums) const {
    using Sum = Vector<float, kTileColumns>;
    for (int i = 0; i < count; ++i) {
      float* row = sums + size_t(args_.indices[p + i]) * size_t(piece_.width);
      int c = 0;
      for (; c + kTileColumns <= columns; c += kTileColumns) {
        const Sum own = Load<float, kTileColumns>(products[c / kTileColumns][i]);
        Store<float, kTileColumns>(row + c, Load<float, kTileColumns>(row + c) + own);
      }
      for (; c < columns; ++c) row[c] += products[c / kTileColumns][i][c % kTileColumns];
    }
  }

  const SpmmScatterArgs& args_;
  const ScatterTask<BFloat16>& piece_;
  Tiles tiles_;
  alignas(64) float products_[2][4][kTileRows][kTileColumns];
};

}  // namespace

void SpmmOctetScatter(const SpmmScatterArgs& args, int64_t task) {
  const int64_t scatters = args.batch * args.pieces * args.tiles;
  if (task >= scatters) return AddPieces<BFloat16>(args, task - scatters);
  const auto piece = BeginPiece<BFloat16>(args, task);
  ScatterOctets octets(args, piece);
  ForBlockRows(args, piece, [&](auto... block) { octets.Run(block...); });
}

}  // namespace sgap::SGAP_ISA
