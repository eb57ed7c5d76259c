// The selection from scores of a light indexer in bfloat16, whose products are those of matrix
// tiles (cpu/simd/tiles.h): 16 pairs of a row and a head by 32 keys at a time.
#include "cpu/simd/tiles.h"
#include "cpu/top_k/top_k_indexer.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int64_t kTileWords = kTileRows * kTileBytes / 4;
static_assert(kOctetPanelColumns == 2 * kTileColumns && kPanelPart == kTileDepth &&
              kPairsTogether == kTileRows);

// The values from `d` on of a row, up to kTileDepth; zeros past its end and where there is none.
inline TileRow PartOfRow(const BFloat16* row, bool exists, int64_t d, int64_t depth) {
  if (!exists) return TileRow{};
  return LoadTileRow(row + d, int(depth - d < kTileDepth ? depth - d : kTileDepth));
}

// Writes some panels of keys; columns that do not exist have zeros.
void PackPanels(const TopKIndexerArgs& args, int64_t batch, int64_t first) {
  const int64_t columns = args.top_k.columns, panels = args.PanelCount();
  const int64_t last = first + args.panels_of_task < panels ? first + args.panels_of_task : panels;
  const auto* keys = static_cast<const BFloat16*>(args.keys) + batch * columns * args.depth;
  for (int64_t p = first; p < last; ++p) {
    auto* out = reinterpret_cast<uint32_t*>(args.panels + (batch * panels + p) * args.panel_bytes);
    for (int64_t j = 0; j < kOctetPanelColumns; j += 4) {
      const int64_t column = p * kOctetPanelColumns + j;
      uint32_t* tile = out + j / kTileColumns * kTileWords + j % kTileColumns;
      for (int64_t d = 0; d < args.depth; d += kTileDepth, tile += 2 * kTileWords) {
        TileRow rows[4];
        for (int i = 0; i < 4; ++i) {
          const BFloat16* key = keys + (column + i) * args.depth;
          rows[i] = PartOfRow(key, column + i < columns, d, args.depth);
        }
        TransposeFour(rows, tile, kTileColumns);
      }
    }
  }
}

// The scores of a task's rows. Products of a group of pairs are stored while those of the next one
// are computed, and read while those after that are: a tile's store waits for its products, and a
// load of what it has stored waits for the store.
class IndexerScores {
  using V = Vector<float, kTileColumns>;

 public:
  IndexerScores(const IndexerRows& at, const IndexerScratch<float>& scratch, int64_t heads,
                int64_t parts)
      : at_(at), scratch_(scratch), heads_(heads), parts_(parts), tiles_(Shapes()) {}

  // Of the columns of the panels, which follow each other.
  void Compute(const char* panels, int64_t panel_bytes) {
    const int64_t groups = (at_.pairs + kTileRows - 1) / kTileRows;
    const int64_t count = (at_.columns + kOctetPanelColumns - 1) / kOctetPanelColumns * groups;
    const char* panel = panels;
    int64_t group = 0, added = 0, column = 0;
    for (int64_t i = 0; i < count + 2; ++i) {
      if (i < count) {
        if (i % 2 == 0) Multiply<0>(panel, group);
        if (i % 2 == 1) Multiply<1>(panel, group);
        if (++group == groups) group = 0, panel += panel_bytes;
      }
      if (i > 0 && i <= count) {
        if (i % 2 == 0) Store<1>();
        if (i % 2 == 1) Store<0>();
      }
      if (i < 2) continue;
      Add(products_[i % 2], added, column);
      if (++added == groups) added = 0, column += kOctetPanelColumns;
    }
  }

 private:
  enum Tile { kProducts, kPairs = 4, kKeys = 6 };

  static TileShapes Shapes() {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) shapes.Set(i, kTileRows, kTileBytes);
    return shapes;
  }

  template <int kSet>
  void Multiply(const char* panel, int64_t group) {
    constexpr int kFirst = kProducts + 2 * kSet;
    const char* q = scratch_.q + group * parts_ * kTileWords * 4;
    tiles_.Zero<kFirst>(), tiles_.Zero<kFirst + 1>();
    for (int64_t part = 0; part < parts_; ++part) {
      if (group == 0 || parts_ > 1) {
        tiles_.Load<kKeys>(panel + part * 8 * kTileWords, kTileBytes);
        tiles_.Load<kKeys + 1>(panel + part * 8 * kTileWords + 4 * kTileWords, kTileBytes);
      }
      tiles_.Load<kPairs + kSet>(q + part * 4 * kTileWords, kTileBytes);
      tiles_.Dot<kFirst, kPairs + kSet, kKeys>();
      tiles_.Dot<kFirst + 1, kPairs + kSet, kKeys + 1>();
    }
  }

  template <int kSet>
  void Store() {
    tiles_.Store<kProducts + 2 * kSet>(products_[kSet][0], kTileBytes);
    tiles_.Store<kProducts + 2 * kSet + 1>(products_[kSet][1], kTileBytes);
  }

  // Adds the products of a group of pairs to the scores of their rows.
  void Add(const float (&products)[2][kTileRows][kTileColumns], int64_t group, int64_t column) {
    const int64_t first = group * kTileRows, left = at_.pairs - first;
    const int64_t count = left < kTileRows ? left : kTileRows;
    int64_t head = first % heads_;
    float* row = scratch_.scores + first / heads_ * at_.stride + column;
    for (int64_t i = 0; i < count;) {
      const int64_t end = heads_ - head < count - i ? i + heads_ - head : count;
      V low = {}, high = {};
      if (head > 0) {
        low = Load<float, kTileColumns>(row), high = Load<float, kTileColumns>(row + kTileColumns);
      }
      head += end - i;
      for (; i < end; ++i) {
        const V x = Load<float, kTileColumns>(products[0][i]);
        const V y = Load<float, kTileColumns>(products[1][i]);
        const float weight = scratch_.weights[first + i];
        low += (x < 0 ? V{} : x) * weight;  // NaN stays
        high += (y < 0 ? V{} : y) * weight;
      }
      SGAP_ISA::Store<float, kTileColumns>(row, low);
      SGAP_ISA::Store<float, kTileColumns>(row + kTileColumns, high);
      if (head == heads_) head = 0, row += at_.stride;
    }
  }

  const IndexerRows& at_;
  const IndexerScratch<float>& scratch_;
  int64_t heads_, parts_;
  Tiles tiles_;
  alignas(64) float products_[2][2][kTileRows][kTileColumns];
};

void SelectRows(const TopKIndexerArgs& args, int64_t task) {
  const IndexerRows at(args, task);
  const int64_t whole = (at.pairs + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t parts = (args.depth + kTileDepth - 1) / kTileDepth;
  IndexerScratch<float> scratch(args.top_k, at, whole, parts * kTileBytes);
  for (int64_t i = 0; i < whole; ++i) {
    const bool exists = i < at.pairs;
    const auto* own = static_cast<const BFloat16*>(args.q) + (at.place + i) * args.depth;
    const auto* weights = static_cast<const BFloat16*>(args.weights) + at.place;
    char* out = scratch.q + (i / kTileRows * parts * kTileRows + i % kTileRows) * kTileBytes;
    for (int64_t part = 0; part < parts; ++part) {
      const TileRow values = PartOfRow(own, exists, part * kTileDepth, args.depth);
      std::memcpy(out + part * kTileRows * kTileBytes, &values, sizeof(values));
    }
    scratch.weights[i] = exists ? LoadScalar(weights + i) : 0.0f;
  }
  const char* panels = args.panels + at.batch * args.PanelCount() * args.panel_bytes;
  IndexerScores(at, scratch, args.heads, parts).Compute(panels, args.panel_bytes);
  SelectScored(args.top_k, at, scratch.scores, scratch.selection);
}

}  // namespace

void TopKIndexerOctet(const TopKIndexerArgs& args, int64_t task) {
  const int64_t packing = args.batch * args.panel_tasks;
  if (task >= packing) return SelectRows(args, task - packing);
  PackPanels(args, task / args.panel_tasks, task % args.panel_tasks * args.panels_of_task);
}

}  // namespace sgap::SGAP_ISA
