#include "spmm_cvs.h"
#include "spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {
namespace {

// Rows of a vector that one pass takes: the largest power of two up to this many.
constexpr int64_t kMaxRows = 8;

template <typename T>
using BlockFunction = void (*)(const VectorBlock<T>&);

// Vectors of columns that a pass over `rows` rows has registers for, a power of two.
int64_t VectorsOfPass(int64_t rows) {
  int64_t vectors = 1;
  while (2 * vectors * rows <= kSumRegisters && vectors < 8) vectors *= 2;
  return vectors;
}

template <typename T, int kVectors, bool kTail>
BlockFunction<T> ChooseRows(int64_t rows) {
  using Tile = VectorTile<T, kVectors, kTail>;
  if constexpr (kVectors * 8 <= kSumRegisters) {
    if (rows == 8) return &Tile::template Run<8>;
  }
  if constexpr (kVectors * 4 <= kSumRegisters) {
    if (rows == 4) return &Tile::template Run<4>;
  }
  if constexpr (kVectors * 2 <= kSumRegisters) {
    if (rows == 2) return &Tile::template Run<2>;
  }
  return &Tile::template Run<1>;
}

template <typename T>
BlockFunction<T> ChooseBlock(int64_t rows, int64_t vectors, bool tail) {
  switch (vectors) {
    case 1:
      return tail ? ChooseRows<T, 1, true>(rows) : ChooseRows<T, 1, false>(rows);
    case 2:
      return tail ? ChooseRows<T, 2, true>(rows) : ChooseRows<T, 2, false>(rows);
    case 4:
      return tail ? ChooseRows<T, 4, true>(rows) : ChooseRows<T, 4, false>(rows);
    default:
      return tail ? ChooseRows<T, 8, true>(rows) : ChooseRows<T, 8, false>(rows);
  }
}

// A pass: kRows rows of the vectors and a block of columns, for every block row of a task.
template <typename T>
void RunPass(const SpmmCvsArgs& args, const RowTask& task, int64_t batch, int64_t row, int64_t rows,
             int64_t column, int64_t columns, int64_t vectors) {
  using Acc = Accumulator<T>;
  const T* values = static_cast<const T*>(args.values) + batch * args.values_stride + row;
  VectorBlock<T> block;
  block.indices = args.indices;
  block.last = args.vectors - 1;
  block.length = args.length;
  block.x = static_cast<const T*>(args.x) + batch * args.x_stride + column;
  block.x_stride = args.n;
  block.tail = int(columns % kLanes<T>);
  block.out_stride = args.n;
  const auto run = ChooseBlock<T>(rows, vectors, block.tail != 0);
  if (task.piece >= 0) {
    block.begin = task.entry_begin;
    block.end = task.entry_end;
    block.values = values + block.begin * args.length;
    block.rows = rows;
    block.y = nullptr;
    const int64_t slot = (batch * args.pieces + task.piece) * args.length + row;
    block.sums = static_cast<Acc*>(args.partials) + slot * args.n + column;
    return run(block);
  }
  for (int64_t b = task.row_begin; b < task.row_end; ++b) {
    const int64_t first = b * args.length + row;
    block.rows = args.m - first;
    if (block.rows <= 0) break;
    block.begin = args.offsets[b];
    block.end = args.offsets[b + 1];
    block.values = values + block.begin * args.length;
    block.y = static_cast<T*>(args.y) + (batch * args.m + first) * args.n + column;
    run(block);
  }
}

// Adds the pieces of a split block row in their order, so that bits do not depend on which thread
// came last.
template <typename T>
void CombinePieces(const SpmmCvsArgs& args, const SplitRow& split, int64_t batch, int64_t column,
                   int64_t columns) {
  using Acc = Accumulator<T>;
  const int64_t first = split.row * args.length, piece = args.length * args.n;
  for (int64_t v = 0; v < args.length && first + v < args.m; ++v) {
    const Acc* partials = static_cast<const Acc*>(args.partials) +
                          (batch * args.pieces + split.first_piece) * piece + v * args.n + column;
    T* y = static_cast<T*>(args.y) + (batch * args.m + first + v) * args.n + column;
    for (int64_t c = 0; c < columns; ++c) {
      Acc sum = 0;
      for (int64_t i = 0; i < split.pieces; ++i) sum += partials[i * piece + c];
      StoreScalar<T>(y + c, sum);
    }
  }
}

template <typename T>
void SpmmCvsTask(const SpmmCvsArgs& args, int64_t task) {
  const RowTask& rows = args.tasks[task % args.row_tasks];
  const int64_t tile = task / args.row_tasks % args.tiles;
  const int64_t batch = task / args.row_tasks / args.tiles;
  const int64_t first = tile * args.tile_columns;
  const int64_t last = first + args.tile_columns < args.n ? first + args.tile_columns : args.n;
  for (int64_t row = 0; row < args.length;) {
    int64_t pass = kMaxRows;
    while (pass > args.length - row) pass /= 2;
    for (int64_t column = first; column < last;) {
      const int64_t left = (last - column + kLanes<T> - 1) / kLanes<T>;
      int64_t vectors = VectorsOfPass(pass);
      while (vectors > left) vectors /= 2;
      const int64_t wide = vectors * kLanes<T>;
      const int64_t columns = last - column < wide ? last - column : wide;
      RunPass<T>(args, rows, batch, row, pass, column, columns, vectors);
      column += columns;
    }
    row += pass;
  }
  if (rows.piece < 0) return;
  int32_t* remaining = args.remaining + (batch * args.tiles + tile) * args.split_rows + rows.split;
  if (__atomic_fetch_sub(remaining, 1, __ATOMIC_ACQ_REL) == 1) {
    CombinePieces<T>(args, args.splits[rows.split], batch, first, last - first);
  }
}

}  // namespace

void SpmmCvs(const SpmmCvsArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { SpmmCvsTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
