// SDDMM of column vectors of bfloat16 on matrix tiles: 1-D octet tiling (vectorSparse,
// section 6.3), with the tiles of cpu/simd/tiles.h in the place of tensor cores. The rows of x of a
// block row, two features next to each other, are B; the rows of y that 32 of its vectors name,
// gathered 64 features at a time, are A. A step is gathered while the one before it is multiplied:
// a tile's load of what has just been stored waits for the store.
#include "cpu/common/partition.h"
#include "cpu/sddmm/sddmm.h"
#include "cpu/sddmm/sddmm_dots.h"
#include "cpu/simd/tiles.h"

namespace sgap::SGAP_ISA {
namespace {

constexpr int kGroups = 2;  // of kTileRows vectors
constexpr int kStepVectors = kGroups * kTileRows;
constexpr int kParts = 2;  // of kTileDepth features
constexpr int kStepFeatures = kParts * kTileDepth;

// The most features of x that are kept as tiles; of wider rows a step makes its own again.
constexpr int64_t kKeptFeatures = 512;

// Registers: sums of each group, for up to 16 rows and the others; rows of y; rows of x.
enum Tile { kSums, kGathered = 4, kRows = 6 };

class DotTiles {
 public:
  DotTiles(const SddmmArgs& args, const BFloat16* x, const BFloat16* y)
      : args_(args),
        x_(x),
        y_(y),
        steps_((args.d + kStepFeatures - 1) / kStepFeatures),
        tiles_(Shapes(args.length)) {}

  // The vectors [begin, end) of block row `block`.
  template <bool kPlain>
  void Run(int64_t block, int64_t begin, int64_t end, Results<BFloat16, kPlain> results) {
    const int64_t first = block * args_.length, below = args_.m - first;
    height_ = int(below < args_.length ? below : args_.length);
    row_ = x_ + first * args_.d;
    const bool kept = args_.d <= kKeptFeatures;
    for (int64_t s = 0; kept && s < steps_; ++s) PackRows(s, packed_[s]);
    const int64_t all = (end - begin + kStepVectors - 1) / kStepVectors * steps_;
    for (int64_t i = 0; i <= all; ++i) {
      if (i < all) {
        const int64_t p = begin + i / steps_ * kStepVectors;
        Gather(p, end - p, i % steps_, gathered_[i % 2]);
      }
      if (i == 0) continue;
      const int64_t done = i - 1, p = begin + done / steps_ * kStepVectors, step = done % steps_;
      if (step == 0) ZeroSums();
      if (!kept) PackRows(step, packed_[0]);
      Dot(gathered_[done % 2], packed_[kept ? step : 0], Features(step) > kTileDepth);
      if (step + 1 == steps_) StoreSums(p, end - p, results);
    }
  }

 private:
  static TileShapes Shapes(int64_t length) {
    TileShapes shapes;
    const int64_t bytes = (length < kTileColumns ? length : kTileColumns) * sizeof(float);
    for (int i = kSums; i < kGathered; ++i) shapes.Set(i, kTileRows, bytes);
    for (int i = kGathered; i < kRows; ++i) shapes.Set(i, kTileRows, kTileBytes);
    for (int i = kRows; i < 8; ++i) shapes.Set(i, kTileDepth / 2, bytes);
    return shapes;
  }

  int Features(int64_t step) const {
    const int64_t left = args_.d - step * kStepFeatures;
    return left < kStepFeatures ? int(left) : kStepFeatures;
  }

  // A row of x as pairs of features: packed[part][pair][row].
  using Packed = uint32_t[kParts][kTileDepth / 2][2 * kTileColumns];

  void PackRows(int64_t step, Packed& packed) const {
    const int features = Features(step);
    for (int part = 0; part < kParts; ++part) {
      const int left = features - part * kTileDepth;
      for (int v = 0; v < args_.length; v += 4) {
        TileRow rows[4];
        for (int i = 0; i < 4; ++i) {
          const BFloat16* row = row_ + (v + i) * args_.d + step * kStepFeatures + part * kTileDepth;
          rows[i] = v + i < height_ && left > 0
                        ? LoadTileRow(row, left < kTileDepth ? left : kTileDepth)
                        : TileRow{};
        }
        TransposeFour(rows, &packed[part][0][v], 2 * kTileColumns);
      }
    }
  }

  // The rows of y of up to kStepVectors vectors from p on, zero where there is none.
  void Gather(int64_t p, int64_t left, int64_t step, uint16_t (*to)[kStepFeatures]) const {
    const int count = left < kStepVectors ? int(left) : kStepVectors;
    const int features = Features(step);
    const BFloat16* y = y_ + step * kStepFeatures;
    const int32_t* indices = args_.indices + p;
    if (count == kStepVectors && features == kStepFeatures) {
#pragma GCC unroll 8
      for (int i = 0; i < kStepVectors; ++i) {
        std::memcpy(to[i], y + size_t(indices[i]) * size_t(args_.d), sizeof(*to));
      }
      return;
    }
    for (int i = 0; i < kStepVectors; ++i) {
      for (int part = 0; part < kParts; ++part) {
        const int own = features - part * kTileDepth;
        const BFloat16* row = y + part * kTileDepth;
        if (i < count) row += size_t(indices[i]) * size_t(args_.d);
        const TileRow loaded = i < count && own > 0
                                   ? LoadTileRow(row, own < kTileDepth ? own : kTileDepth)
                                   : TileRow{};
        std::memcpy(to[i] + part * kTileDepth, &loaded, sizeof(loaded));
      }
    }
  }

  void ZeroSums() {
    tiles_.Zero<kSums + 0>(), tiles_.Zero<kSums + 1>();
    if (args_.length > kTileColumns) tiles_.Zero<kSums + 2>(), tiles_.Zero<kSums + 3>();
  }

  void Dot(const uint16_t (*gathered)[kStepFeatures], const Packed& packed, bool both) {
    constexpr int64_t kStride = sizeof(*gathered), kPackedStride = sizeof(packed[0][0]);
    for (int part = 0; part < (both ? 2 : 1); ++part) {
      tiles_.Load<kGathered + 0>(gathered[0] + part * kTileDepth, kStride);
      tiles_.Load<kRows + 0>(packed[part], kPackedStride);
      tiles_.Dot<kSums + 0, kGathered + 0, kRows + 0>();
      tiles_.Load<kGathered + 1>(gathered[kTileRows] + part * kTileDepth, kStride);
      tiles_.Dot<kSums + 1, kGathered + 1, kRows + 0>();
      if (args_.length <= kTileColumns) continue;
      tiles_.Load<kRows + 1>(packed[part][0] + kTileColumns, kPackedStride);
      tiles_.Dot<kSums + 2, kGathered + 0, kRows + 1>();
      tiles_.Dot<kSums + 3, kGathered + 1, kRows + 1>();
    }
  }

  template <bool kPlain>
  void StoreSums(int64_t p, int64_t left, Results<BFloat16, kPlain> results) {
    alignas(64) float sums[kStepVectors * 2 * kTileColumns + kTileColumns];
    const int64_t length = args_.length, stride = length * sizeof(float);
    tiles_.Store<kSums + 0>(sums, stride);
    tiles_.Store<kSums + 1>(sums + kTileRows * length, stride);
    if (length > kTileColumns) {
      tiles_.Store<kSums + 2>(sums + kTileColumns, stride);
      tiles_.Store<kSums + 3>(sums + kTileRows * length + kTileColumns, stride);
    }
    const int64_t count = (left < kStepVectors ? left : kStepVectors) * length;
    auto target = results + p * length;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      (target + i).template Put<16>(Load<float, 16>(sums + i));
    }
    if (i < count) (target + i).template PutPartial<16>(Load<float, 16>(sums + i), int(count - i));
    // Rows past the end of x: zero, whatever y holds.
    for (int64_t at = 0; height_ < length && at < count; at += length) {
      for (int64_t v = height_; v < length; ++v) target.out[at + v] = BFloat16{};
    }
  }

  const SddmmArgs& args_;
  const BFloat16 *x_, *y_, *row_ = nullptr;
  const int64_t steps_;
  int height_ = 0;
  Tiles tiles_;
  alignas(64) uint16_t gathered_[2][kStepVectors][kStepFeatures];
  alignas(64) Packed packed_[kKeptFeatures / kStepFeatures];
};

}  // namespace

void SddmmOctet(const SddmmArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, chunk = task % args.chunks;
  const int64_t numbers = args.entries * args.length;
  const int64_t blocks = (args.m + args.length - 1) / args.length;
  BFloat16* out = static_cast<BFloat16*>(args.out) + batch * numbers;
  const int64_t begin = chunk * args.chunk_entries;
  const int64_t stop =
      args.entries - begin < args.chunk_entries ? args.entries : begin + args.chunk_entries;
  const int64_t stored = args.d == 0 ? 0 : args.offsets[blocks];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t i = end * args.length; i < stop * args.length; ++i) out[i] = BFloat16{};
  if (begin == end) return;
  DotTiles tiles(args, static_cast<const BFloat16*>(args.x) + batch * args.x_stride,
                 static_cast<const BFloat16*>(args.y) + batch * args.y_stride);
  WithResults(args, out, numbers, batch, [&](auto results) {
    int64_t block = RowOfEntry(args.offsets, blocks, begin);
    for (int64_t p = begin; p < end; ++block) {
      const int64_t next = args.offsets[block + 1] < end ? args.offsets[block + 1] : end;
      if (next > p) tiles.Run(block, p, next, results);
      p = next;
    }
  });
}

}  // namespace sgap::SGAP_ISA
