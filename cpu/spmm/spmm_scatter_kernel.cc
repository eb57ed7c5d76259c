#include "cpu/spmm/scatter_pieces.h"
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
  using Piece = typename Row::Piece;

  // The rows of x of a block row, one after the other or in pairs.
  template <int kRows>
  static void LoadRows(const ScatterBlock<T>& block, Piece (*x)[kVectors]) {
#pragma GCC unroll 8
    for (int v = 0; v < kRows; v += Row::kRowsOfX) {
      const T* row = block.x + v * block.x_stride;
      if constexpr (Row::kPaired) {
        const T* second = kRows > 1 ? row + block.x_stride : Row::NoRow();
        LoadPairs<kVectors, kTail, /*kInOrder=*/true>(row, second, block.tail, x[v / 2]);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) x[v][i] = Row::LoadX(row, i, block.tail);
      }
    }
  }

  template <int kRows>
  static void Run(const ScatterBlock<T>& shared) {
    const ScatterBlock<T> block = shared;  // a copy: stores cannot change it
    constexpr int kPieces = (kRows + Row::kRowsOfX - 1) / Row::kRowsOfX;
    Piece x[kPieces][kVectors];
    LoadRows<kRows>(block, x);
    const int64_t last = block.end - 1;
    const auto add = [&](int64_t p, const auto& value) __attribute__((always_inline)) {
      const int64_t ahead = p + kAheadVectors < last ? p + kAheadVectors : last;
      Prefetch(block.sums + size_t(block.indices[ahead]) * size_t(block.sums_stride));
      Acc* sums = block.sums + size_t(block.indices[p]) * size_t(block.sums_stride);
      Sum row[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        row[i] = Sums::LoadX(sums, i, block.tail);
#pragma GCC unroll 8
        for (int v = 0; v < kPieces; ++v) row[i] = Row::PlusProduct(row[i], value[v], x[v][i]);
      }
      Sums::StoreRow(sums, row, block.tail);
    };
    if constexpr (Row::kPaired) {
      for (int64_t p = block.begin; p < block.end; ++p) {
        add(p, NeighbourPairs<kRows>(block.values + p * block.length));
      }
    } else if constexpr (kStaged<T>) {
      alignas(64) Acc staged[kStagedVectors * kRows];
      for (int64_t p = block.begin; p < block.end; p += kStagedVectors) {
        const int64_t left = block.end - p, count = left < kStagedVectors ? left : kStagedVectors;
        WidenValues<T, kRows>(block.values + p * block.length, block.length, count, staged);
        for (int64_t i = 0; i < count; ++i) add(p + i, staged + i * kRows);
      }
    } else {
      for (int64_t p = block.begin; p < block.end; ++p) {
        add(p, WideValues<T, kRows>(block.values + p * block.length));
      }
    }
  }
};

template <typename T, int kVectors, bool kTail>
ScatterFunction<T> ChooseRows(int64_t rows) {
  using Tile = ScatterTile<T, kVectors, kTail>;
  if constexpr (kVectors * 8 <= kSumRegisters * Tile::Row::kRowsOfX) {
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

// A row of N columns of x or of the sums, in the fewest vectors.
template <typename Acc, int N>
struct NarrowRow {
  static constexpr int kPart = N >= 8 ? 8 : N >= 4 ? 4 : N >= 2 ? 2 : 1;
  Vector<Acc, kPart> part;
  NarrowRow<Acc, N - kPart> rest;

  template <typename T>
  void LoadX(const T* x) {
    for (int i = 0; i < kPart; ++i) part[i] = LoadScalar(x + i);
    rest.LoadX(x + kPart);
  }
  // sums += value * this
  [[gnu::always_inline]] void AddTimes(Acc value, Acc* sums) const {
    Store<Acc, kPart>(sums, Load<Acc, kPart>(sums) + value * part);
    rest.AddTimes(value, sums + kPart);
  }
};

template <typename Acc>
struct NarrowRow<Acc, 0> {
  template <typename T>
  void LoadX(const T*) {}
  void AddTimes(Acc, Acc*) const {}
};

// The entries of a piece, an equal share of all; 16-bit values are widened some entries ahead.
template <typename T, int kColumns>
void NarrowScatter(const SpmmScatterArgs& args, int64_t number, const ScatterTask<T>& piece) {
  using Acc = Accumulator<T>;
  constexpr bool kWiden = !std::is_same_v<T, Acc>;
  constexpr int64_t kAhead = 256;
  alignas(64) Acc staged[kWiden ? kAhead : 1];
  const int32_t* const indices = args.indices;
  const auto size = uint32_t(args.m < INT32_MAX ? args.m : INT64_C(1) << 31);
  const int64_t before = args.offsets[0], entries = args.offsets[args.blocks] - before;
  const int64_t last = before + entries * (number + 1) / args.pieces;
  int64_t p = before + entries * number / args.pieces;
  if (p == last) return;
  Acc* const sums = piece.sums;
  int64_t first = 0, widened = p;  // of `values`: the first, the end
  const Acc* values = kWiden ? staged : reinterpret_cast<const Acc*>(piece.values);
  for (int64_t row = RowOfEntry(args.offsets, args.blocks, p); p < last; ++row) {
    const int64_t end = args.offsets[row + 1] < last ? args.offsets[row + 1] : last;
    if (p == end) continue;
    NarrowRow<Acc, kColumns> x;
    x.LoadX(piece.x + row * kColumns);
    while (p < end) {
      int64_t stop = end;
      if constexpr (kWiden) {
        if (p >= widened) {
          const int64_t count = last - p < kAhead ? last - p : kAhead;
          WidenValues<T, 1>(piece.values + p, 1, count, staged);
          widened = p + count;
          first = p;
        }
        stop = end < widened ? end : widened;
      }
      for (; p < stop; ++p) {
        const auto at = uint32_t(indices[p]);
        if (at < size) x.AddTimes(values[p - first], sums + size_t(at) * kColumns);
      }
    }
  }
}

template <typename T, int kColumns = kNarrowScatter>
void ChooseNarrow(const SpmmScatterArgs& args, int64_t number, const ScatterTask<T>& piece) {
  if (args.n == kColumns) return NarrowScatter<T, kColumns>(args, number, piece);
  if constexpr (kColumns > 1) ChooseNarrow<T, kColumns - 1>(args, number, piece);
}

template <typename T>
void ScatterPiece(const SpmmScatterArgs& args, int64_t task) {
  constexpr int kWidth = kLanes<T>;
  const auto piece = BeginPiece<T>(args, task);
  if (args.narrow) return ChooseNarrow<T>(args, task % args.pieces, piece);
  ScatterBlock<T> block;
  block.indices = args.indices;
  block.length = args.length;
  block.x_stride = args.n;
  block.sums_stride = piece.width;
  ForBlockRows(args, piece, [&](int64_t begin, int64_t end, int64_t first, int64_t rows) {
    block.begin = begin;
    block.end = end;
    for (int64_t row = 0, pass = 8; row < rows; row += pass) {
      while (pass > rows - row) pass /= 2;
      block.values = piece.values + row;
      for (int64_t column = 0; column < piece.width;) {
        const bool two = piece.width - column > kWidth && 2 * pass <= kSumRegisters;
        const int64_t wide = two ? 2 * kWidth : kWidth;
        const int64_t columns = piece.width - column < wide ? piece.width - column : wide;
        block.tail = int(columns % kWidth);
        block.x = piece.x + (first + row) * args.n + column;
        block.sums = piece.sums + column;
        ChooseBlock<T>(pass, two ? 2 : 1, block.tail != 0)(block);
        column += columns;
      }
    }
  });
}

}  // namespace

void SpmmScatter(const SpmmScatterArgs& args, int64_t task) {
  const int64_t scatters = args.batch * args.pieces * args.tiles;
  DispatchOwnDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    task < scatters ? ScatterPiece<T>(args, task) : AddPieces<T>(args, task - scatters);
  });
}

}  // namespace sgap::SGAP_ISA
