// The pieces of a product with the transpose of column vectors that scatters (SpmmScatterArgs), for
// its kernels: where a task's sums are, its block rows, and adding up the pieces.
#pragma once

#include "cpu/simd/simd.h"
#include "cpu/spmm/spmm.h"

namespace sgap::SGAP_ISA {

// Where the sums of a piece begin.
template <typename T>
Accumulator<T>* SumsOf(const SpmmScatterArgs& args, int64_t batch, int64_t piece) {
  return static_cast<Accumulator<T>*>(args.sums) + (batch * args.pieces + piece) * args.m * args.n;
}

// The first block row of a piece: pieces have about equally many vectors.
inline int64_t BlockOfPiece(const SpmmScatterArgs& args, int64_t piece) {
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

// What a task adds to: the columns of one tile of one piece, zeroed.
template <typename T>
struct ScatterTask {
  const T* values;       // of vector 0
  const T* x;            // at the first column
  Accumulator<T>* sums;  // [m, width]
  int64_t width, block_begin, block_end;
};

template <typename T>
ScatterTask<T> BeginPiece(const SpmmScatterArgs& args, int64_t task) {
  const int64_t tile = task % args.tiles, piece = task / args.tiles % args.pieces;
  const int64_t batch = task / args.tiles / args.pieces, first = tile * args.tile_columns;
  ScatterTask<T> begun;
  begun.width = args.n - first < args.tile_columns ? args.n - first : args.tile_columns;
  begun.values = static_cast<const T*>(args.values) + batch * args.values_stride;
  begun.x = static_cast<const T*>(args.x) + batch * args.x_stride + first;
  begun.sums = SumsOf<T>(args, batch, piece) + args.m * first;
  begun.block_begin = BlockOfPiece(args, piece);
  begun.block_end = BlockOfPiece(args, piece + 1);
  __builtin_memset(begun.sums, 0, size_t(args.m * begun.width) * sizeof(Accumulator<T>));
  return begun;
}

// Calls body(first vector, end, first row of x, rows) for the block rows that have vectors.
template <typename T, typename Body>
void ForBlockRows(const SpmmScatterArgs& args, const ScatterTask<T>& piece, Body&& body) {
  for (int64_t b = piece.block_begin; b < piece.block_end; ++b) {
    const int64_t begin = args.offsets[b], end = args.offsets[b + 1];
    if (begin == end) continue;
    const int64_t first = b * args.length, left = args.k - first;
    body(begin, end, first, left < args.length ? left : args.length);
  }
}

// `count` values of y, which follow each other: the sums of all pieces, `piece` apart, in their
// order.
template <typename T>
void AddPiecesOf(const Accumulator<T>* from, int64_t pieces, int64_t piece, int64_t count, T* y) {
  using Acc = Accumulator<T>;
  constexpr int kWidth = kLanes<T>;
  for (int64_t c = 0; c < count; c += kWidth) {
    const int left = int(count - c < kWidth ? count - c : kWidth);
    Vector<Acc, kWidth> total{};
    for (int64_t i = 0; i < pieces; ++i) {
      const Acc* part = from + i * piece + c;
      total += left == kWidth ? Load<Acc, kWidth>(part) : LoadPartial<Acc, kWidth>(part, left);
    }
    if (left == kWidth) {
      Store<T, kWidth>(y + c, total);
    } else {
      StorePartial<T, kWidth>(y + c, total, left);
    }
  }
}

// Rows of y.
template <typename T>
void AddPieces(const SpmmScatterArgs& args, int64_t task) {
  using Acc = Accumulator<T>;
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_rows;
  const int64_t end = begin + args.chunk_rows < args.m ? begin + args.chunk_rows : args.m;
  const Acc* sums = SumsOf<T>(args, batch, 0);
  T* const y = static_cast<T*>(args.y) + batch * args.m * args.n;
  const int64_t n = args.n, piece = args.m * n;
  if (args.tile_columns >= n) {  // rows follow each other
    return AddPiecesOf<T>(sums + begin * n, args.pieces, piece, (end - begin) * n, y + begin * n);
  }
  for (int64_t first = 0; first < n; first += args.tile_columns) {
    const int64_t width = n - first < args.tile_columns ? n - first : args.tile_columns;
    for (int64_t j = begin; j < end; ++j) {
      AddPiecesOf<T>(sums + args.m * first + j * width, args.pieces, piece, width,
                     y + j * n + first);
    }
  }
}

}  // namespace sgap::SGAP_ISA
