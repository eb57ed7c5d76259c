// SpMM of column vectors: a task in passes, each of some rows of a vector and as many columns as
// registers hold.
#include "cpu/spmm/spmm.h"
#include "cpu/spmm/spmm_cvs_narrow.h"
#include "cpu/spmm/spmm_cvs_rows.h"

namespace sgap::SGAP_ISA {
namespace {

template <typename T, typename X>
using BlockFunction = void (*)(const VectorBlock<T, X>&);

// What one pass over the vectors of a task computes, and its code.
template <typename T, typename X>
struct Pass {
  BlockFunction<T, X> run;
  int64_t rows, columns;
};

// SIMD registers of columns that a pass over `rows` rows has registers for, a power of two.
int64_t VectorsOfPass(int64_t rows, int64_t most) {
  int64_t vectors = 1;
  while (2 * vectors * rows <= kSumRegisters && vectors < 8) vectors *= 2;
  while (vectors > most) vectors /= 2;
  return vectors;
}

template <typename T, typename X, int kVectors, bool kTail>
BlockFunction<T, X> ChooseRows(int64_t rows) {
  using Tile = VectorTile<T, X, kVectors, kTail>;
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

// The code for `rows` rows of each vector; 0: for the transpose.
template <typename T, typename X, int kVectors>
BlockFunction<T, X> ChooseTail(int64_t rows, bool tail) {
  if (rows > 0)
    return tail ? ChooseRows<T, X, kVectors, true>(rows) : ChooseRows<T, X, kVectors, false>(rows);
  return tail ? &TransposedTile<T, X, kVectors, true>::Run
              : &TransposedTile<T, X, kVectors, false>::Run;
}

template <typename T, typename X>
BlockFunction<T, X> ChooseBlock(int64_t rows, int64_t vectors, bool tail) {
  switch (vectors) {
    case 1:
      return ChooseTail<T, X, 1>(rows, tail);
    case 2:
      return ChooseTail<T, X, 2>(rows, tail);
    case 4:
      return ChooseTail<T, X, 4>(rows, tail);
    default:
      return ChooseTail<T, X, 8>(rows, tail);
  }
}

// Where registers have 64 bytes, there are loops of their own for few columns. The sums of float32
// have the bits of the others.
template <typename T>
constexpr bool kMayHaveOwnLoops = kVectorBytes == 64 && sizeof(Accumulator<T>) == 4;

// The pass of A^T B with kColumns columns, if vectors of this length have a loop of their own.
template <typename T, typename X, int kColumns>
Pass<T, X> TransposedPass(int64_t length) {
  if constexpr (kColumns < 8) {
    if (length == 4) return {&TransposedFourTile<T, X, kColumns, 1>::Run, 1, kColumns};
  }
  if (length == 8) return {&TransposedFourTile<T, X, kColumns, 2>::Run, 1, kColumns};
  if (length == 16) return {&TransposedFourTile<T, X, kColumns, 4>::Run, 1, kColumns};
  return {};
}

template <typename T, typename X, int kRows>
Pass<T, X> NarrowPass(int64_t columns) {
  if constexpr (kMayHaveOwnLoops<T>) {
    // Of four columns and up to 8 rows it takes 0.72 to 0.95 of the time of LaneTile on Zen 5, of
    // 16 0.98 to 1.45; on Zen 4 0.93 to 1.1.
    const bool intel = ThisMachine().intel, quads = kRows < 16 && ThisMachine().whole;
    if (columns >= 4 && (intel || quads)) return {&QuadTile<T, X, kRows>::Run, kRows, 4};
    if (sizeof(T) == 2 && columns == 1 && intel) {
      return {&LaneTile<T, X, kRows, 1, true>::Run, kRows, 1};
    }
  }
  if (columns >= 4) return {&LaneTile<T, X, kRows, 4, false>::Run, kRows, 4};
  if (columns >= 2) return {&LaneTile<T, X, kRows, 2, false>::Run, kRows, 2};
  return {&LaneTile<T, X, kRows, 1, false>::Run, kRows, 1};
}

// The next pass, `rows` rows and `columns` columns being left.
template <typename T, typename X>
Pass<T, X> ChoosePass(const SpmmArgs& args, int64_t rows, int64_t columns) {
  constexpr int kWidth = kLanes<T>;
  if (args.transpose && args.n == 1 && args.length % 4 == 0) {
    if (kWidth >= 16 && args.length % 16 == 0) return {&DotTile<T, X, 16>::Run, 1, 1};
    if (kWidth >= 8 && args.length % 8 == 0) return {&DotTile<T, X, 8>::Run, 1, 1};
    return {&DotTile<T, X, 4>::Run, 1, 1};
  }
  if (!args.transpose && args.n <= kNarrowColumns && rows >= 4) {
    if (kWidth >= 16 && rows >= 16) return NarrowPass<T, X, 16>(columns);
    if (kWidth >= 8 && rows >= 8) return NarrowPass<T, X, 8>(columns);
    return NarrowPass<T, X, 4>(columns);
  }
  if constexpr (kMayHaveOwnLoops<T>) {
    if (columns == args.n && args.transpose) {
      Pass<T, X> found = {};
      if (columns == 2) found = TransposedPass<T, X, 2>(args.length);
      if (columns == 4) found = TransposedPass<T, X, 4>(args.length);
      if (columns == 8) found = TransposedPass<T, X, 8>(args.length);
      if (found.run) return found;
    } else if (columns == args.n && args.length == 2) {
      if (columns == 1) return {&TwoRowTile<T, X, 1>::Run, 2, 1};
      if (columns == 4) return {&TwoRowTile<T, X, 4>::Run, 2, 4};
    }
  }
  int64_t pass = kMaxRows;
  while (pass > rows) pass /= 2;
  const int64_t left = (columns + kWidth - 1) / kWidth;
  const int64_t vectors = VectorsOfPass(args.transpose ? 1 : pass, left);
  const int64_t width = columns < vectors * kWidth ? columns : vectors * kWidth;
  const bool tail = width % kWidth != 0;
  return {ChooseBlock<T, X>(args.transpose ? 0 : pass, vectors, tail), pass, width};
}

// Rows of a task: those of blocks, or of the transpose those of y.
struct Strip {
  int64_t begin, end;
};

// How many of them take all passes before others do. Where the results fit in half of the cores'
// caches, all of a task. Else as many as fill the first-level cache: a pass writes 128 bytes of
// each row, the prefetcher brings those behind them, and the next passes write these while they
// are near. Products of 98% sparse weights with 256 columns took 0.75 to 0.85 of the time so
// (Xeon, family 6 model 167), but 0.95 to 1.1 on Zen 4.
template <typename T>
int64_t RowsOfStrip(const SpmmArgs& args) {
  const Machine& machine = ThisMachine();
  const int64_t of_row = args.n * int64_t(sizeof(T));
  if (!machine.intel || 2 * args.m * of_row <= machine.cores * machine.l2_bytes) return INT64_MAX;
  const int64_t rows = machine.l1_bytes / (args.piece_rows * of_row);
  return rows > 1 ? rows : 1;
}

// Whether the passes over a strip's columns share a window of 16-bit values. With 128 columns that
// took 0.96 of the time for V = 4 and 0.98 for V = 8. Vectors that are longer than a pass takes
// rows do not share: V = 16 took 1.01 to 1.03 (128 and 256 columns; all measured on Zen 4).
template <typename T, typename X>
bool SharesValues(const SpmmArgs& args, int64_t columns) {
  if (sizeof(T) > 2 || kInPairs<X> || args.transpose || args.n <= kNarrowColumns) return false;
  if (args.piece_rows > kMaxRows) return false;
  return ChoosePass<T, X>(args, args.piece_rows, columns).columns < columns;
}

// The end of the block rows from strip.begin on that fit in one window. One that does not is a
// strip of its own, and each pass widens it anew.
int64_t EndOfWindow(const SpmmArgs& args, const Strip& strip) {
  int64_t end = strip.begin + 1;
  const int64_t most = int64_t(args.offsets[strip.begin]) + kSharedVectors;
  while (end < strip.end && args.offsets[end + 1] <= most) ++end;
  return end;
}

// A pass on every row of a strip, or on a piece of one row.
template <typename T, typename X>
void RunPass(const SpmmArgs& args, const TileTask& tile, const Strip& strip, const X* x,
             int64_t row, int64_t column, const Pass<T, X>& pass,
             StagedValues<T, kSharedVectors>* staged) {
  using Acc = Accumulator<T>;
  const RowTask& task = *tile.rows;
  const int64_t batch = tile.batch;
  VectorBlock<T, X> block;
  block.staged = staged;
  block.indices = args.indices;
  block.permutation = args.permutation;
  block.last = args.entries - 1;
  block.values = static_cast<const T*>(args.values) + batch * args.values_stride + row;
  block.length = args.length;
  block.x = x + (column - tile.first);
  block.x_stride = tile.x_stride;
  block.x_rows = args.k;
  block.prefetches = Prefetches(args.length, pass.columns, kLanes<T>, kInPairs<X>,
                                args.k * tile.x_stride * int64_t(sizeof(X)));
  block.tail = int(pass.columns % kLanes<T>);
  block.out_stride = args.n;
  if (task.piece >= 0) {
    block.begin = task.entry_begin;
    block.end = task.entry_end;
    block.rows = pass.rows;
    block.y = nullptr;
    const int64_t slot = (batch * args.pieces + task.piece) * args.piece_rows + row;
    block.sums = static_cast<Acc*>(args.partials) + slot * args.n + column;
    return pass.run(block);
  }
  for (int64_t r = strip.begin; r < strip.end; ++r) {
    const int64_t first = r * args.piece_rows + row;
    block.rows = args.m - first;
    if (block.rows <= 0) break;
    block.begin = args.offsets[r];
    block.end = args.offsets[r + 1];
    block.y = static_cast<T*>(args.y) + (batch * args.m + first) * args.n + column;
    pass.run(block);
  }
}

template <typename T, typename X>
void RunStrip(const SpmmArgs& args, const TileTask& tile, const Strip& strip, const X* x,
              StagedValues<T, kSharedVectors>* staged) {
  for (int64_t row = 0, taken = 0; row < args.piece_rows; row += taken) {
    for (int64_t column = tile.first; column < tile.last;) {
      const Pass<T, X> pass = ChoosePass<T, X>(args, args.piece_rows - row, tile.last - column);
      RunPass<T, X>(args, tile, strip, x, row, column, pass, staged);
      column += pass.columns;
      taken = pass.rows;
    }
  }
}

template <typename T, typename X>
void RunTile(const SpmmArgs& args, const TileTask& tile, const X* x) {
  const int64_t end = tile.rows->row_end, most = RowsOfStrip<T>(args);
  StagedValues<T, kSharedVectors> staged;
  staged.shared = SharesValues<T, X>(args, tile.last - tile.first);
  for (Strip strip = {tile.rows->row_begin, 0}; strip.begin < end; strip.begin = strip.end) {
    strip.end = end - strip.begin < most ? end : strip.begin + most;
    if (staged.shared) strip.end = EndOfWindow(args, strip);
    RunStrip<T, X>(args, tile, strip, x, &staged);
  }
  if (tile.rows->piece >= 0 && IsLastPiece(args, tile.walk, *tile.rows)) {
    CombinePieces<T>(args, args.splits[tile.rows->split], tile.batch, tile.first,
                     tile.last - tile.first);
  }
}

template <typename T>
void SpmmCvsTask(const SpmmArgs& args, int64_t task) {
  const TileTask tile = BeginTask<T>(args, task);
  WithOperand<T>(tile, [&](const auto* x) { RunTile<T>(args, tile, x); });
  EndTask(tile);
}

}  // namespace

void SpmmCvs(const SpmmArgs& args, int64_t task) {
  DispatchOwnDtype(args.dtype,
                   [&](auto tag) { SpmmCvsTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
