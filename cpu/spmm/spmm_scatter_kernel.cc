#include "cpu/common/machine.h"
#include "cpu/simd/gather.h"
#include "cpu/spmm/scatter_pieces.h"
#include "cpu/spmm/spmm_cvs_rows.h"
#include "cpu/spmm/spmm_rows.h"

namespace sgap::SGAP_ISA {

bool IndicesHold(const int32_t* indices, int64_t count, int64_t size);  // kernel_table.cc

namespace {

// The vectors [begin, end) of one block row and a block of columns of one piece's sums.
template <typename T>
struct ScatterBlock {
  const int32_t* indices;
  int64_t begin, end;
  int64_t vectors;  // in all
  const T* values;  // of vector 0, at the first of the rows
  int64_t length;
  const T* x;  // the first of the rows, at the first column
  int64_t x_stride;
  int tail;
  Accumulator<T>* sums;  // at the first column
  int64_t sums_stride;
  StagedValues<T, kStagedVectors>* staged;
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
    } else if constexpr (sizeof(T) == 2) {  // of 8 rows too: 0.94 to 0.99 of the time (Zen 4)
      for (int64_t p = block.begin; p < block.end;) {
        const int64_t count = block.staged->template Reach<kRows>(block.values, block.length,
                                                                  block.vectors, p, block.end);
        const Acc* values = block.staged->template At<kRows>(p);
        for (int64_t i = 0; i < count; ++i) add(p + i, values + i * kRows);
        p += count;
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
    if constexpr (kPart >= 4) {
      part = Load<T, kPart>(x);
    } else {
      for (int i = 0; i < kPart; ++i) part[i] = LoadScalar(x + i);
    }
    rest.LoadX(x + kPart);
  }
  // sums += value * this; the value may be in each lane of a vector
  template <typename Value>
  [[gnu::always_inline]] void AddTimes(Value value, Acc* sums) const {
    const auto old = Load<Acc, kPart>(sums);
    if constexpr (std::is_same_v<Value, Acc>) {
      Store<Acc, kPart>(sums, old + value * part);
    } else {
      Vector<Acc, kPart> lanes;
      __builtin_memcpy(&lanes, &value, sizeof(lanes));
      Store<Acc, kPart>(sums, old + lanes * part);
    }
    rest.AddTimes(value, sums + kPart);
  }
};

template <typename Acc>
struct NarrowRow<Acc, 0> {
  template <typename T>
  void LoadX(const T*) {}
  template <typename Value>
  void AddTimes(Value, Acc*) const {}
};

// The entries of a piece, an equal share of all.
struct EntryRange {
  int64_t begin, end;
};
inline EntryRange ShareOf(const SpmmScatterArgs& args, int64_t number) {
  const int64_t before = args.offsets[0], entries = args.offsets[args.blocks] - before;
  return {before + entries * number / args.pieces, before + entries * (number + 1) / args.pieces};
}

// Indices below this hold.
inline uint32_t SizeOf(const SpmmScatterArgs& args) {
  return uint32_t(args.m < INT32_MAX ? args.m : INT64_C(1) << 31);
}

// How many values are widened in one go: where the sums are beyond the first-level cache, 512 took
// 0.94 to 0.96 of the time of 1024 (four columns; Xeon, family 6 model 167), where they are in
// it 1.0.
constexpr int64_t kWidenedEntries = 512;

// Not inlined: the loop that calls it would keep its addresses in memory.
template <typename T>
[[gnu::noinline]] void WidenEntries(const T* values, int64_t count, Accumulator<T>* wide) {
  constexpr int kWidth = std::is_same_v<T, Float16> ? kNarrowLanes<T> : kLanes<T>;
  WidenNeighbours<T, kWidth>(values, count, kWidenedEntries, wide);
}

// How the value of an entry comes to all lanes.
enum class EntryValue {
  kRepeated,  // by its load
  // Widened ahead, where two instructions do not repeat and widen 16 bits where they are used, and
  // on Intel (float16 of 4 columns took 0.95 of the time there). Elsewhere it took 1.0 to 1.3 of
  // the time (measured on Zen 4).
  kAhead,
  // By a shuffle, four having been loaded at once: Zen 5 is bound by its loads. Of long rows it
  // took 0.55 to 0.95 of the time there (float32, float64 of up to 4 columns), of rows of fewer
  // than 16 entries 0.8 to 1.25, with 8 columns of float64 0.95 to 1.3.
  kOfFour,
};

// Two columns and more.
template <typename T, int kColumns, EntryValue kValue>
void NarrowScatter(const SpmmScatterArgs& args, int64_t number, const ScatterTask<T>& piece) {
  using Acc = Accumulator<T>;
  constexpr bool kAhead = kValue == EntryValue::kAhead;
  using Value = std::conditional_t<kAhead, Acc, T>;
  constexpr int kValueLanes = kColumns < 8 ? 4 : 8;
  alignas(64) Value staged[kAhead ? kWidenedEntries : 1];
  const int32_t* const indices = args.indices;
  const uint32_t size = SizeOf(args);
  auto [p, last] = ShareOf(args, number);
  if (p == last) return;
  Acc* const sums = piece.sums;
  int64_t first = 0, widened = p;  // of `values`: the first, the end
  const Value* values = kAhead ? staged : reinterpret_cast<const Value*>(piece.values);
  for (int64_t row = RowOfEntry(args.offsets, args.blocks, p); p < last; ++row) {
    const int64_t end = args.offsets[row + 1] < last ? args.offsets[row + 1] : last;
    if (p == end) continue;
    NarrowRow<Acc, kColumns> x;
    x.LoadX(piece.x + row * kColumns);
    while (p < end) {
      int64_t stop = end;
      if constexpr (kAhead) {
        if (end > widened) {
          const int64_t count = last - p < kWidenedEntries ? last - p : kWidenedEntries;
          WidenEntries<T>(piece.values + p, count, staged);
          widened = p + count;
          first = p;
          stop = end < widened ? end : widened;
        }
      }
      const auto add = [&](int64_t p, const auto& value) __attribute__((always_inline)) {
        const auto at = uint32_t(indices[p]);
        if (__builtin_expect(at < size, true)) x.AddTimes(value, sums + size_t(at) * kColumns);
      };
      if constexpr (kValue == EntryValue::kOfFour) {
        for (; p + 4 <= stop; p += 4) {
          const auto four = Kept(LoadRowRepeated<T, kValueLanes>(values + p));
          add(p, OneOfFour<0>(four)), add(p + 1, OneOfFour<1>(four));
          add(p + 2, OneOfFour<2>(four)), add(p + 3, OneOfFour<3>(four));
        }
      }
#pragma GCC unroll 1
      for (; p < stop; ++p) add(p, LoadInLanes<Value, kValueLanes>(values + (p - first)));
    }
  }
}

constexpr int64_t kShortRow = 16;  // entries on average

// Entries of one column that are looked at and staged together, and those staged in one go.
constexpr int64_t kStagedEntries = 256;
template <typename T>
constexpr int kStagedLanes = sizeof(T) == 2 ? kLanes<T> : int(64 / sizeof(T));

// What is staged for the entries of one column before they are added: nothing in long rows, whose
// element of x stays in a register; a copy of it for each entry; of 16 bits, each product. Float32
// holds a product of these that is in its range exactly, so sums have the bits of multiply-adds.
enum class Staged { kNothing, kCopies, kProducts };

// sums[indices[i]] += values[i] * (staged or x)[i], or staged[i], for the entries i < count.
// kFours: what is added is loaded four entries at a time, and taken out of registers.
template <typename T, Staged kStaged, bool kLooks, bool kFours>
[[gnu::always_inline]] inline void AddEntries(const int32_t* indices, const T* values,
                                              const Accumulator<T>* staged, int64_t count,
                                              uint32_t size, Accumulator<T>* sums) {
  using Acc = Accumulator<T>;
  const Acc first = staged[0];
  const auto add = [&](uint32_t at, const auto& values, const auto& staged,
                       int64_t i) __attribute__((always_inline)) {
    if (kLooks && at >= size) return;
    if constexpr (kStaged == Staged::kProducts) {
      sums[at] += staged[i];
    } else {
      sums[at] = MultiplyAdd(values[i], kStaged == Staged::kNothing ? first : staged[i], sums[at]);
    }
  };
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    uint64_t pairs[2];
    __builtin_memcpy(pairs, indices + i, sizeof(pairs));
    const auto add_four = [&](const auto& values, const auto& staged,
                              int64_t i) __attribute__((always_inline)) {
      add(uint32_t(pairs[0]), values, staged, i), add(pairs[0] >> 32, values, staged, i + 1);
      add(uint32_t(pairs[1]), values, staged, i + 2), add(pairs[1] >> 32, values, staged, i + 3);
    };
    if constexpr (kFours) {
      Vector<Acc, 4> four_values{}, four_staged{};
      if (kStaged != Staged::kProducts) four_values = Kept(Load<T, 4>(values + i));
      if (kStaged != Staged::kNothing) four_staged = Kept(Load<Acc, 4>(staged + i));
      add_four(four_values, four_staged, 0);
    } else {
      add_four(values, staged, i);
    }
  }
#pragma GCC unroll 1
  for (; i < count; ++i) add(uint32_t(indices[i]), values, staged, i);
}

// Stages the entries [begin, end), the first of which is of `row`. Returns the row of entry `end`.
// A row without entries takes the steps of a short one, and what is staged past a row's end, up to
// a register, is overwritten: so no branch depends on where short rows end. kCopies: of 16 bits the
// elements of x too, not products.
template <typename T, bool kCopies = false>
int64_t StageRows(const SpmmScatterArgs& args, const ScatterTask<T>& piece, int64_t row,
                  int64_t begin, int64_t end, Accumulator<T>* staged) {
  using Acc = Accumulator<T>;
  constexpr bool kProducts = !std::is_same_v<T, Acc> && !kCopies;
  constexpr int kWidth = kStagedLanes<T>;
  const int32_t* const offsets = args.offsets;
  const T* const values = piece.values;
  const int64_t stored = offsets[args.blocks];
  for (int64_t p = begin; p < end; ++row) {
    const int64_t row_end = offsets[row + 1] < end ? offsets[row + 1] : end;
    const auto x = LoadScalar(piece.x + row) - Vector<Acc, kWidth>{};
    do {
      if constexpr (kProducts) {
        const auto loaded = stored - p >= kWidth
                                ? Load<T, kWidth>(values + p)
                                : LoadPartial<T, kWidth>(values + p, int(stored - p));
        Store<Acc, kWidth>(staged + (p - begin), loaded * x);
      } else {
        Store<Acc, kWidth>(staged + (p - begin), x);
      }
      p += kWidth;
    } while (p < row_end);
    p = row_end;
  }
  return offsets[row] > end ? row - 1 : row;
}

// On Intel copies of x are staged first, and multiplied in narrow registers then: 0.88 to 0.91 of
// the time (R-MAT, rows of 8). Not inlined: the loop would keep its addresses in memory, which took
// up to 1.15 of the time.
template <typename T>
[[gnu::noinline]] int64_t StageProducts(const SpmmScatterArgs& args, const ScatterTask<T>& piece,
                                        int64_t row, int64_t begin, int64_t end,
                                        Accumulator<T>* staged) {
  using Acc = Accumulator<T>;
  if constexpr (sizeof(T) == 2 && kLanes<T> > kNarrowLanes<T>) {
    if (ThisMachine().intel) {
      constexpr int kWidth = kNarrowLanes<T>;
      const int64_t next = StageRows<T, true>(args, piece, row, begin, end, staged);
      const int64_t left = args.offsets[args.blocks] - begin;
      const T* const values = piece.values + begin;
      for (int64_t i = 0; i < end - begin; i += kWidth) {
        const auto loaded = left - i >= kWidth ? Load<T, kWidth>(values + i)
                                               : LoadPartial<T, kWidth>(values + i, int(left - i));
        Store<Acc, kWidth>(staged + i, Load<Acc, kWidth>(staged + i) * loaded);
      }
      return next;
    }
  }
  return StageRows(args, piece, row, begin, end, staged);
}

// One column: the entries of a piece in blocks, whose indices are looked at together, and one by
// one only where some do not hold. Rows of fewer entries than kShortRow, and those of 16 bits, are
// staged first. On Zen 4 that took 0.6 to 0.95 of the time of rows one after another, and 1.09
// where the processor remembers the lengths of few short rows from call to call. On Intel and Zen 5
// values of 16 bits in longer rows are widened in the place of their products, for the loop of
// float32: 0.95 and 0.91 of the time (weights of 2048 x 1024 at 90%). Zen 5 is bound by its loads:
// in fours (AddEntries) it took 0.80 to 0.95 of the time.
template <typename T, bool kFours>
void ScatterColumn(const SpmmScatterArgs& args, int64_t number, const ScatterTask<T>& piece) {
  using Acc = Accumulator<T>;
  constexpr bool kProducts = !std::is_same_v<T, Acc>;
  constexpr Staged kStaged = kProducts ? Staged::kProducts : Staged::kCopies;
  alignas(64) Acc staged[kStagedEntries + kStagedLanes<T>];
  const int32_t* const offsets = args.offsets;
  const int32_t* const indices = args.indices;
  const T* const values = piece.values;
  const uint32_t size = SizeOf(args);
  const bool whole = kVectorBytes == 64 && ThisMachine().whole;
  const bool products = kProducts && !whole && !ThisMachine().intel;
  const bool stages = products || offsets[args.blocks] < kShortRow * args.blocks;
  auto [p, last] = ShareOf(args, number);
  if (p == last) return;
  int64_t row = RowOfEntry(offsets, args.blocks, p);
  for (int64_t stop; p < last; p = stop) {
    stop = p + kStagedEntries < last ? p + kStagedEntries : last;
    const bool holds = IndicesHold(indices + p, stop - p, size);
    if (stages) {
      row = (kProducts ? StageProducts<T> : StageRows<T>)(args, piece, row, p, stop, staged);
      (holds ? AddEntries<T, kStaged, false, kFours>
             : AddEntries<T, kStaged, true, kFours>)(indices + p, values + p, staged, stop - p,
                                                     size, piece.sums);
      continue;
    }
    const Acc* wide = staged;
    if constexpr (kProducts) {
      WidenEntries<T>(values + p, stop - p, staged);
    } else {
      wide = values + p;
    }
    for (const int64_t first = p; p < stop; ++row) {
      const int64_t end = offsets[row + 1] < stop ? offsets[row + 1] : stop;
      const Acc x = LoadScalar(piece.x + row);
      (holds ? AddEntries<Acc, Staged::kNothing, false, kFours>
             : AddEntries<Acc, Staged::kNothing, true, kFours>)(indices + p, wide + (p - first), &x,
                                                                end - p, size, piece.sums);
      p = end;
    }
    if (offsets[row] > stop) --row;  // it goes on
  }
}

template <typename T, int kColumns = kNarrowScatter>
void ChooseNarrow(const SpmmScatterArgs& args, int64_t number, const ScatterTask<T>& piece) {
  if constexpr (kColumns == 1) {
    if constexpr (kVectorBytes == 64) {
      if (OnZen5()) return ScatterColumn<T, true>(args, number, piece);
    }
    ScatterColumn<T, false>(args, number, piece);
  } else if (args.n == kColumns) {
    constexpr bool kHalf = sizeof(T) == 2;
    if constexpr (kVectorBytes == 64 && kColumns * sizeof(Accumulator<T>) <= 32) {
      if (OnZen5() && args.offsets[args.blocks] >= kShortRow * args.blocks) {
        return NarrowScatter<T, kColumns, EntryValue::kOfFour>(args, number, piece);
      }
    }
    if constexpr (kHalf) {
      if (!kWidensInLanes || ThisMachine().intel) {
        return NarrowScatter<T, kColumns, EntryValue::kAhead>(args, number, piece);
      }
    }
    NarrowScatter<T, kColumns, EntryValue::kRepeated>(args, number, piece);
  } else {
    ChooseNarrow<T, kColumns - 1>(args, number, piece);
  }
}

template <typename T>
void ScatterPiece(const SpmmScatterArgs& args, int64_t task) {
  constexpr int kWidth = kLanes<T>;
  const auto piece = BeginPiece<T>(args, task);
  if (args.narrow) return ChooseNarrow<T>(args, task % args.pieces, piece);
  StagedValues<T, kStagedVectors> staged;
  ScatterBlock<T> block;
  block.staged = &staged;
  block.vectors = args.offsets[args.blocks];
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
