#include "cpu/spmm/spmm.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {
namespace {

// The vectors [begin, end) of one block row and a block of columns of one piece's sums.
template <typename T>
struct ScatterBlock {
  const int32_t* indices;
  int64_t begin, end;
  const T* values;  // of vector 0, at the first of the rows
  int64_t length;
  const T* x;  // the first of the rows, at the first column
  int64_t x_stride;
  int tail;
  Accumulator<T>* sums;  // at the first column
  int64_t sums_stride;
};

template <typename T>
using ScatterFunction = void (*)(const ScatterBlock<T>&);

template <typename T, int kVectors, bool kTail>
struct ScatterTile {
  using Acc = Accumulator<T>;
  using Row = VectorRow<T, T, kVectors, kTail>;
  using Sums = VectorRow<Acc, Acc, kVectors, kTail>;
  using Sum = typename Row::Sum;

  template <int kRows>
  static void Run(const ScatterBlock<T>& shared) {
    const ScatterBlock<T> block = shared;  // a copy: stores cannot change it
    Sum x[kRows][kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kRows; ++v) {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        x[v][i] = Row::LoadX(block.x + v * block.x_stride, i, block.tail);
      }
    }
    const int64_t last = block.end - 1;
    for (int64_t p = block.begin; p < block.end; ++p) {
      const int64_t ahead = p + kAheadVectors < last ? p + kAheadVectors : last;
      Prefetch(block.sums + size_t(block.indices[ahead]) * size_t(block.sums_stride));
      Acc* sums = block.sums + size_t(block.indices[p]) * size_t(block.sums_stride);
      const WideValues<T, kRows> value(block.values + p * block.length);
      Sum row[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        row[i] = Sums::LoadX(sums, i, block.tail);
#pragma GCC unroll 8
        for (int v = 0; v < kRows; ++v) row[i] += value[v] * x[v][i];
      }
      Row::StoreRow(sums, row, block.tail);
    }
  }
};

template <typename T, int kVectors, bool kTail>
ScatterFunction<T> ChooseRows(int64_t rows) {
  using Tile = ScatterTile<T, kVectors, kTail>;
  if constexpr (kVectors * 8 <= kSumRegisters) {
    if (rows == 8) return &Tile::template Run<8>;
  }
  if (rows == 4) return &Tile::template Run<4>;
  return rows == 2 ? &Tile::template Run<2> : &Tile::template Run<1>;
}

template <typename T>
ScatterFunction<T> ChooseBlock(int64_t rows, int64_t vectors, bool tail) {
  if (vectors == 2) return tail ? ChooseRows<T, 2, true>(rows) : ChooseRows<T, 2, false>(rows);
  return tail ? ChooseRows<T, 1, true>(rows) : ChooseRows<T, 1, false>(rows);
}

// Where the sums of a piece begin.
template <typename T>
Accumulator<T>* SumsOf(const SpmmScatterArgs& args, int64_t batch, int64_t piece) {
  return static_cast<Accumulator<T>*>(args.sums) + (batch * args.pieces + piece) * args.m * args.n;
}

// The first block row of a piece: pieces have about equally many vectors.
int64_t BlockOfPiece(const SpmmScatterArgs& args, int64_t piece) {
  if (piece == args.pieces) return args.blocks;
  const int64_t wanted = args.offsets[args.blocks] * piece / args.pieces;
  int64_t low = 0, high = args.blocks;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (args.offsets[middle] < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename T>
void ScatterPiece(const SpmmScatterArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kLanes<T>;
  const int64_t tile = task % args.tiles, piece = task / args.tiles % args.pieces;
  const int64_t batch = task / args.tiles / args.pieces;
  const int64_t first = tile * args.tile_columns;
  const int64_t width = args.n - first < args.tile_columns ? args.n - first : args.tile_columns;
  Acc* sums = SumsOf<T>(args, batch, piece) + args.m * first;
  __builtin_memset(sums, 0, size_t(args.m * width) * sizeof(Acc));
  ScatterBlock<T> block;
  block.indices = args.indices;
  block.length = args.length;
  block.x_stride = args.n;
  block.sums_stride = width;
  const T* values = static_cast<const T*>(args.values) + batch * args.values_stride;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride + first;
  const int64_t stop = BlockOfPiece(args, piece + 1);
  for (int64_t b = BlockOfPiece(args, piece); b < stop; ++b) {
    block.begin = args.offsets[b];
    block.end = args.offsets[b + 1];
    if (block.begin == block.end) continue;
    const int64_t left = args.k - b * args.length, rows = left < args.length ? left : args.length;
    for (int64_t row = 0, pass = 8; row < rows; row += pass) {
      while (pass > rows - row) pass /= 2;
      block.values = values + row;
      for (int64_t column = 0; column < width;) {
        const bool two = width - column > kWidth && 2 * pass <= kSumRegisters;
        const int64_t wide = two ? 2 * kWidth : kWidth;
        const int64_t columns = width - column < wide ? width - column : wide;
        block.tail = int(columns % kWidth);
        block.x = x + (b * args.length + row) * args.n + column;
        block.sums = sums + column;
        ChooseBlock<T>(pass, two ? 2 : 1, block.tail != 0)(block);
        column += columns;
      }
    }
  }
}

// Rows of y: the sums of all pieces, in their order.
template <typename T>
void AddPieces(const SpmmScatterArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kLanes<T>;
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_rows;
  const int64_t end = begin + args.chunk_rows < args.m ? begin + args.chunk_rows : args.m;
  const Acc* sums = SumsOf<T>(args, batch, 0);
  const int64_t piece = args.m * args.n;
  for (int64_t first = 0; first < args.n; first += args.tile_columns) {
    const int64_t width = args.n - first < args.tile_columns ? args.n - first : args.tile_columns;
    for (int64_t j = begin; j < end; ++j) {
      const Acc* from = sums + args.m * first + j * width;
      T* y = static_cast<T*>(args.y) + (batch * args.m + j) * args.n + first;
      for (int64_t c = 0; c < width; c += kWidth) {
        const int count = int(width - c < kWidth ? width - c : kWidth);
        Vector<Acc, kWidth> total{};
        for (int64_t i = 0; i < args.pieces; ++i) {
          const Acc* part = from + i * piece + c;
          total +=
              count == kWidth ? Load<Acc, kWidth>(part) : LoadPartial<Acc, kWidth>(part, count);
        }
        if (count == kWidth) {
          Store<T, kWidth>(y + c, total);
        } else {
          StorePartial<T, kWidth>(y + c, total, count);
        }
      }
    }
  }
}

}  // namespace

void SpmmScatter(const SpmmScatterArgs& args, int64_t task) {
  const int64_t scatters = args.batch * args.pieces * args.tiles;
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    task < scatters ? ScatterPiece<T>(args, task) : AddPieces<T>(args, task - scatters);
  });
}

}  // namespace sgap::SGAP_ISA
