#include "cpu/common/machine.h"
#include "cpu/simd/gather.h"
#include "cpu/spmm/spmm.h"
#include "cpu/spmm/spmm_gathered.h"
#include "cpu/spmm/spmm_narrow_rows.h"
#include "cpu/spmm/spmm_pairs.h"
#include "cpu/spmm/spmm_rows.h"

namespace sgap::SGAP_ISA {

bool IndicesHold(const int32_t* indices, int64_t count, int64_t size);  // kernel_table.cc

namespace {

// Sums held in registers: half of the 32 of AVX-512, half of the 16 of the others.
constexpr int kMaxVectors = kVectorBytes == 64 ? 16 : 8;

// Values are taken through a buffer where they are permuted or narrow. Of 16 bits fewer at a time,
// if a row has not more: between two uses of a line of the buffer, rows of x go through the cache.
// With registers of 32 bytes that did not pay, nor on Intel and Zen 5, where each piece takes some
// branches that the processor does not foresee: 1024 at a time took 0.95 of the time with 32
// columns on Intel (weights of 2048 x 1024 at 90%; Granite Rapids), 0.79 to 1.0 with 4 to 128 on
// Zen 5.
constexpr int64_t kStagedValues = 1024;
constexpr int64_t kStagedHalves = kVectorBytes == 64 ? 256 : kStagedValues;
inline int64_t StagedHalves() { return ThisMachine().whole ? kStagedValues : kStagedHalves; }

// How few columns go through the rows of a task.
enum class RowLoop {
  kLong,        // straight from x: this many entries a row on average
  kPredicted,   // straight from x, a branch a row; 2 to 4 columns only
  kMasked,      // the same, the last eight entries of a row without one; up to 16 columns
  kGroups,      // straight from x, a branch a row; one column only
  kBranchFree,  // products of all entries first
};
constexpr int64_t kLongRow = 16;
// Rows whose lengths the processor remembers from call to call, and entries a row below which not
// even forgetting them costs more: there 2 to 4 columns took half the time of kBranchFree (measured
// on Zen 5, where a first call took a quarter more).
constexpr int64_t kFewRows = 1 << 15;
constexpr int64_t kTinyRow = 4;
// On Intel kMasked takes the place of kPredicted from so many rows on: 0.5 to 0.75 of the time with
// 10,000 to 33,000 rows of 4 to 10 entries (1.0 with those of a circuit, which are alike), 1.0 to
// 1.2 with 4096 and fewer (Xeon, family 6 model 167; float32). With 5 to 8 columns it takes the
// place of Tile::Run: 0.64 to 0.91 of the time with 6000 to 33,000 rows of 4.5 to 10 entries, 0.94
// to 1.05 with longer ones and with alike ones, 1.5 with rows of 2.4, and 0.96 to 1.07 where B is
// beyond the second-level cache and was not prefetched. With 9 to 16 columns it took 0.85 to 1.1,
// of float64 0.74 to 1.2.
constexpr int64_t kRememberedRows = 1 << 12;
constexpr int64_t kMostMasked = 8;  // columns
// Zen 5 remembers more: from so many rows on, with 5 to 16 columns, or 8 of float64, kMasked takes
// 0.64 to 0.95 of the time there (float16 0.70 to 1.0, bfloat16 with up to 8 columns 0.86 to 1.05);
// 1.02 to 1.5 with 10,000 to 20,000 rows. With up to 4 columns it took 0.6 to 1.4, of kBranchFree
// with other bits.
constexpr int64_t kRememberedRowsZen5 = 3 << 13;
template <typename T>
constexpr int64_t kMostMaskedZen5 = sizeof(T) == 8 ? 8 : 16;  // columns
// One column with a matrix of up to so many rows, or of tiny ones, goes through them in groups.
// Against kBranchFree that took 0.75 to 0.95 of the time (measured on Zen 4; float64 0.60 to 0.90).
// With 64-byte vectors kBranchFree sums a row of up to 16 float32 at once, and is the faster where
// the processor cannot remember the rows: 0.76 of the time of groups with 200,000 rows. Without
// AVX2 groups of float32 took 1.05 to 1.2 times as long.
template <typename T>
constexpr int64_t kMostGrouped = sizeof(T) == 8 || kVectorBytes == 32 ? INT64_MAX
                                 : kVectorBytes == 64                 ? 1 << 16
                                                                      : 0;

// Products with one column look at indices on the way if they are of short rows, or of rows of so
// many entries with an x of more than a quarter of the first-level cache. On Zen 3 that took 0.85
// to 0.95 of the time with a pass over the indices of the task before; 1.0 to 1.15 in other rows,
// and with a smaller x. On Zen 5 long rows took 0.88 to 1.01 with any x. Where indices are in a
// register to be gathered by, looking costs little, but for 16 bits in loops without even steps:
// there it took 1.05 to 1.2 of the time.
constexpr int64_t kLookedRow = 48;

// Whether one column is gathered by GatheredColumn, which has no branch on how many entries a row
// has after its whole steps: of more rows than the processor remembers, or of long rows.
template <typename T>
bool EvenSteps(const SpmmArgs& args) {
  return args.m > kRememberedRows || (sizeof(T) <= 4 && args.entries >= kLookedRow * args.m);
}

// Whether the loops look at indices on the way, in place of a pass over them before. With 2 to 4
// columns and long rows that took 0.85 to 0.96 of the time on Intel (Xeon, family 6 model 167)
// where values and indices are beyond the second-level cache, and 1.0 to 1.1 where they are not; on
// Zen 4 0.91 to 1.0 there.
template <typename T, typename X>
bool Looks(const SpmmArgs& args, RowLoop loop, int64_t rows, int64_t entries) {
  const Machine& machine = ThisMachine();
  if (!args.wrong || args.n > 4 || loop == RowLoop::kGroups) return false;
  if (args.n > 1) {
    const int64_t bytes = args.entries * int64_t(sizeof(T) + sizeof(int32_t));
    return kVectorBytes == 64 && loop == RowLoop::kLong && bytes > machine.l2_bytes;
  }
  if (NarrowTile<T, X, 1>::kGathered && machine.gathers) {
    if (sizeof(T) > 2 || EvenSteps<T>(args)) return true;
  }
  return loop != RowLoop::kLong || OnZen5() ||
         (entries >= kLookedRow * rows && args.k * int64_t(sizeof(X)) > machine.l1_bytes / 4);
}

// Rows of a B (or of the block of its columns) that has more bytes than the second-level cache are
// not there, and prefetching them pays. Not so on Zen 5 in rows of one and two registers, where it
// sees as far ahead itself: without prefetching, graphs took 0.74 to 1.0 of the time with 5 to 32
// columns of float32, 0.76 to 1.0 of 16 bits, 0.82 to 1.07 with 8 and 16 of float64.
template <typename T>
Ahead AheadOf(int64_t columns, int64_t bytes) {
  const Machine& machine = ThisMachine();
  if (bytes <= machine.l2_bytes) return Ahead::kNothing;
  if (OnZen5() && columns <= 2 * kLanes<T>) return Ahead::kNothing;
  return machine.intel ? Ahead::kStarts : Ahead::kRows;
}

// Whether there is code for kMasked, of 5 columns and more and of up to 4.
constexpr bool kMasks = kVectorBytes == 64;
template <typename T>
constexpr bool kMasksFew = kMasks && std::is_same_v<T, float>;

template <typename T, typename X>
using BlockFunction = void (*)(const RowBlock<T, X>&);

// Whether blocks of so many columns take pairs of entries, whose values are read as they are.
template <typename T, typename X>
bool InPairs(int64_t columns, const int32_t* permutation) {
  return kInPairs<T> && std::is_same_v<T, X> && columns > 8 && !permutation;
}

template <typename T, typename X, int kWidth, int kVectors>
BlockFunction<T, X> ChooseTail(bool tail, Ahead ahead, [[maybe_unused]] bool pairs) {
  const auto choose = [ahead](auto rows) -> BlockFunction<T, X> {
    using Rows = decltype(rows);
    switch (ahead) {
      case Ahead::kNothing:
        return &Rows::template Run<Ahead::kNothing>;
      case Ahead::kRows:
        return &Rows::template Run<Ahead::kRows>;
      default:
        return &Rows::template Run<Ahead::kStarts>;
    }
  };
  if constexpr (kInPairs<T> && std::is_same_v<T, X> && kWidth == 16) {
    if (pairs) {
      return tail ? choose(PairedTile<kVectors, true>()) : choose(PairedTile<kVectors, false>());
    }
  }
  return tail ? choose(Tile<T, X, kWidth, kVectors, true>())
              : choose(Tile<T, X, kWidth, kVectors, false>());
}

// Columns one pass over the rows can take.
template <typename T>
constexpr int64_t kMaxColumns = kMaxVectors * kLanes<T>;

// The code for a block of `columns` columns, at most kMaxColumns. Up to 8 columns take a narrower
// vector.
template <typename T, typename X>
BlockFunction<T, X> ChooseBlock(int64_t columns, Ahead ahead, bool pairs) {
  constexpr int kWidth = kLanes<T>;
  const bool tail = columns % kWidth != 0;
  const int64_t vectors = (columns + kWidth - 1) / kWidth;
  if constexpr (kWidth > 8) {
    if (columns <= 8) return ChooseTail<T, X, 8, 1>(columns < 8, ahead, pairs);
  }
  switch (vectors) {
    case 1:
      return ChooseTail<T, X, kWidth, 1>(tail, ahead, pairs);
    case 2:
      return ChooseTail<T, X, kWidth, 2>(tail, ahead, pairs);
    case 3:
      return ChooseTail<T, X, kWidth, 3>(tail, ahead, pairs);
    case 4:
      return ChooseTail<T, X, kWidth, 4>(tail, ahead, pairs);
    case 5:
      return ChooseTail<T, X, kWidth, 5>(tail, ahead, pairs);
    case 6:
      return ChooseTail<T, X, kWidth, 6>(tail, ahead, pairs);
    case 7:
      return ChooseTail<T, X, kWidth, 7>(tail, ahead, pairs);
    case 8:
      return ChooseTail<T, X, kWidth, 8>(tail, ahead, pairs);
    default:
      return ChooseTail<T, X, kWidth, kMaxVectors>(false, ahead, pairs);
  }
}

// Columns of the next block of a tile that has `left` columns to go.
template <typename T>
int64_t NextBlock(int64_t left) {
  constexpr int64_t kHalf = 8 * kLanes<T>;
  return left >= kMaxColumns<T> ? kMaxColumns<T> : left > kHalf ? kHalf : left;
}

// The last row r in [row, rows] up to which the entries from `row` on are at most `most`.
int64_t RowsWithin(const int32_t* offsets, int64_t row, int64_t rows, int64_t most) {
  const int64_t end = int64_t(offsets[row]) + most;
  int64_t low = row, step = 1;
  while (low + step <= rows && offsets[low + step] <= end) {
    low += step;
    step *= 2;
  }
  int64_t high = low + step <= rows ? low + step : rows + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (offsets[middle] <= end ? low : high) = middle;
  }
  return low;
}

template <typename T>
void StoreColumns(const Accumulator<T>* sums, int64_t columns, T* y) {
  constexpr int kWidth = kLanes<T>;
  int64_t c = 0;
  for (; c + kWidth <= columns; c += kWidth) {
    Store<T, kWidth>(y + c, Load<Accumulator<T>, kWidth>(sums + c));
  }
  if (c < columns) {
    StorePartial<T, kWidth>(y + c, Load<Accumulator<T>, kWidth>(sums + c), int(columns - c));
  }
}

// One task on one block of columns: the block's code, and how values come to it.
template <typename T, typename X>
class BlockTask {
  using Acc = Accumulator<T>;
  // Long rows of few columns widen values where they use them.
  static constexpr bool kOwnValues = !std::is_same_v<T, Acc>;

 public:
  // The block has the columns from `column` on. With `looks`, of a product with up to four columns
  // only, the loops look at the indices.
  BlockTask(const SpmmArgs& args, const TileTask& tile, const X* x, int64_t column, int64_t columns,
            RowLoop loop, bool looks)
      : values_(static_cast<const T*>(args.values) + tile.batch * args.values_stride),
        permutation_(args.permutation),
        ordered_(args.ordered),
        even_steps_(EvenSteps<T>(args)),
        columns_(columns),
        ahead_(AheadOf<T>(columns, args.k * columns * int64_t(sizeof(X)))),
        own_(InPairs<T, X>(columns, permutation_)),
        run_(ChooseBlock<T, X>(columns, ahead_, own_)) {
    block_.own_values = values_;
    block_.indices = args.indices;
    block_.last_entry = args.entries - 1;
    block_.x = x + (column - tile.first);
    block_.x_stride = tile.x_stride;
    block_.y_stride = args.n;
    block_.tail = int(columns % (columns <= 8 && kLanes<T> > 8 ? 8 : kLanes<T>));
    block_.carry = nullptr;
    constexpr int64_t kMost = int64_t(1) << 31;
    block_.size = uint32_t(args.k < kMost ? args.k : kMost);
    block_.entry_end = tile.rows->entry_end;
    block_.wrong = &wrong_;
    if (args.n == 1) {
      looks ? UseNarrow<1, false, true>(loop) : UseNarrow<1, false>(loop);
    } else if (columns == 4) {
      looks ? UseNarrow<4, false, true>(loop) : UseNarrow<4, false>(loop);
    } else if (columns < 4) {
      looks ? UseNarrow<4, true, true>(loop) : UseNarrow<4, true>(loop);
    } else if (loop == RowLoop::kMasked && ahead_ == Ahead::kNothing && !own_) {
      if constexpr (kMasks) run_ = ChooseMasked(columns);
    } else if (loop == RowLoop::kLong && ahead_ == Ahead::kNothing && !own_ && OnZen5()) {
      if (tile.x_stride == columns) run_ = AdjacentOr(run_, columns);
    }
  }

  // y rows [0, rows) from entries [offsets[0], offsets[rows]).
  void Rows(const int32_t* offsets, int64_t rows, T* y) {
    if ((std::is_same_v<T, Acc> || own_) && !permutation_ && !ordered_ && !multiply_) {
      block_.values = std::is_same_v<T, Acc> ? reinterpret_cast<const Acc*>(values_) : nullptr;
      block_.first_entry = 0;
      Run(offsets, rows, y);
      return;
    }
    for (int64_t r = 0; r < rows;) {
      int64_t next = sizeof(T) == 2 ? RowsWithin(offsets, r, rows, StagedHalves()) : r;
      if (next == r) next = RowsWithin(offsets, r, rows, kStagedValues);
      if (next > r) {
        Stage(offsets[r], offsets[next]);
        Run(offsets + r, next - r, y + r * block_.y_stride);
      } else {
        Acc sums[kMaxColumns<T>] = {};
        Sum(offsets[r], offsets[r + 1], sums);
        StoreColumns<T>(sums, columns_, y + r * block_.y_stride);
        next = r + 1;
      }
      r = next;
    }
  }

  // Adds the entries [begin, end) of one row to sums.
  void Sum(int64_t begin, int64_t end, Acc* sums) {
    block_.carry = sums;
    for (int64_t p = begin; p < end; p += kStagedValues) {
      const int64_t piece_end = p + kStagedValues < end ? p + kStagedValues : end;
      const int32_t piece[2] = {int32_t(p), int32_t(piece_end)};
      Stage(p, piece_end);
      Run(piece, 1, nullptr);
    }
    block_.carry = nullptr;
  }

  // Whether an index was found to be wrong.
  bool wrong() const { return wrong_; }

 private:
  template <int kSlots, bool kTail, bool kLooks = false>
  void UseNarrow(RowLoop loop) {
    using Tile = NarrowTile<T, X, kSlots>;
    block_.tail = int(columns_ % 4);
    if constexpr (kOwnValues) own_ = loop == RowLoop::kLong && !permutation_;
#if SGAP_GATHERED_COLUMN
    if constexpr (Tile::kGathered) {
      const bool in_place = own_ || !kOwnValues;
      if (loop == RowLoop::kLong && in_place && even_steps_ && ThisMachine().gathers) {
        run_ = &GatheredColumn<T>::template Run<kLooks>;
        return;
      }
    }
#endif
    if constexpr (kOwnValues) {
      if (own_) {
        run_ = &Tile::template RunLongOwn<kTail, kLooks>;
        return;
      }
    }
    // Loads and instructions bound these loops on Intel (Xeon, family 6 model 167) and Zen 5: with
    // two indices a load they took 0.81 to 0.97 and 0.92 to 0.99 of the time.
    if constexpr (kSlots == 4 && !kTail && kVectorBytes == 64 && std::is_same_v<T, float>) {
      if (loop == RowLoop::kLong && block_.x_stride == 4 && (ThisMachine().intel || OnZen5())) {
        run_ = &NarrowTile<T, X, 4, true>::template RunLong<false, kLooks>;
        return;
      }
      if (loop == RowLoop::kMasked && block_.x_stride == 4) {
        run_ = &NarrowTile<T, X, 4, true>::template RunMasked<false>;
        return;
      }
    }
    if constexpr (kSlots == 1 && std::is_same_v<X, Acc> && !kOwnValues) {
      if (loop == RowLoop::kGroups) {
        run_ = &Tile::RunGroups;
        return;
      }
    }
    if (loop == RowLoop::kLong) {
      run_ = &Tile::template RunLong<kTail, kLooks>;
    } else if (kSlots == 4 && (loop == RowLoop::kPredicted || loop == RowLoop::kMasked)) {
      run_ = &Tile::template RunPredicted<kTail>;
      if constexpr (kMasksFew<T>) {
        if (loop == RowLoop::kMasked) run_ = &Tile::template RunMasked<kTail>;
      }
    } else {
      run_ = &Tile::RunShort;
      multiply_ = permutation_ ? &Tile::template MultiplyAll<kTail, true, false>
                               : &Tile::template MultiplyAll<kTail, false, kLooks>;
    }
  }

  // 5 columns and more, as many as LoopOf takes.
  static BlockFunction<T, X> ChooseMasked(int64_t columns) {
    if constexpr (kMostMaskedZen5<T> > 8) {
      if (columns > 8) {
        return columns < 16 ? &Tile<T, X, 16, 1, true>::RunMasked
                            : &Tile<T, X, 16, 1, false>::RunMasked;
      }
    }
    return columns < 8 ? &Tile<T, X, 8, 1, true>::RunMasked : &Tile<T, X, 8, 1, false>::RunMasked;
  }

  // Where rows of x are one register, Zen 5 is bound by its loads. With two indices a load and four
  // values, long rows took 0.82 to 0.89 of the time with 8 and 16 columns of float32 and 8 of
  // float64, 0.90 to 0.99 with 8 of 16 bits (16 of float16 0.97 to 1.05), 0.92 to 1.06 with 32 of
  // float32; rows of fewer than 16 entries 0.97 to 1.4.
  static BlockFunction<T, X> AdjacentOr(BlockFunction<T, X> otherwise, int64_t columns) {
    if constexpr (kVectorBytes == 64) {
      if (columns == 8) return &Tile<T, X, 8, 1, false>::RunAdjacent;
    }
    if constexpr (kVectorBytes == 64 && std::is_same_v<T, float>) {
      if (columns == 16) return &Tile<T, X, 16, 1, false>::RunAdjacent;
    }
    return otherwise;
  }

  void Stage(int64_t begin, int64_t end) {
    block_.values = staged_;
    block_.first_entry = begin;
    if (own_) return;
    if (multiply_) {
      multiply_(block_, values_, permutation_, begin, end, staged_);
      return;
    }
    int64_t p = begin;
    if (sizeof(T) < sizeof(Acc)) {  // several are widened together
      constexpr int kWidth = kLanes<T>;
      const auto widen = [&](int64_t p) {
        const auto values = permutation_ ? Gather<T, kWidth>(values_, permutation_ + p)
                                         : Load<T, kWidth>(values_ + p);
        Store<Acc, kWidth>(staged_ + (p - begin), values);
      };
      for (; p + kWidth <= end; p += kWidth) {
        // The next piece: of loads in bursts the processor sees no stream.
        if (!permutation_) Prefetch(values_ + p + kStagedValues);
        widen(p);
      }
      if (p < end && end - begin >= kWidth) {  // the last ones, some for the second time
        widen(end - kWidth);
        p = end;
      }
    }
    for (; p < end; ++p) {
      staged_[p - begin] = LoadScalar(values_ + (permutation_ ? permutation_[p] : p));
    }
  }

  void Run(const int32_t* offsets, int64_t rows, T* y) {
    block_.offsets = offsets;
    block_.rows = rows;
    block_.y = y;
    run_(block_);
  }

  const T* values_;
  const int32_t* permutation_;
  bool ordered_;
  bool even_steps_;
  int64_t columns_;
  Ahead ahead_;
  bool own_;  // whether `run_` reads values as they are
  bool wrong_ = false;
  BlockFunction<T, X> run_;
  void (*multiply_)(const RowBlock<T, X>&, const T*, const int32_t*, int64_t, int64_t,
                    Acc*) = nullptr;
  RowBlock<T, X> block_;
  Acc staged_[kStagedValues * 4 + NarrowTile<T, X, 4>::kPadding];
};

// Adds the pieces of a split row in their order, so that bits do not depend on which thread came
// last.
template <typename T>
void CombinePieces(const SpmmArgs& args, const SplitRow& split, int64_t batch, int64_t column,
                   int64_t columns) {
  using Acc = Accumulator<T>;
  const Acc* partials = static_cast<const Acc*>(args.partials) +
                        (batch * args.pieces + split.first_piece) * args.n + column;
  T* y = static_cast<T*>(args.y) + (batch * args.m + split.row) * args.n + column;
  for (int64_t c = 0; c < columns; c += kMaxColumns<T>) {
    const int64_t width = columns - c < kMaxColumns<T> ? columns - c : kMaxColumns<T>;
    Acc sums[kMaxColumns<T>] = {};
    for (int64_t i = 0; i < split.pieces; ++i) {
      for (int64_t j = 0; j < width; ++j) sums[j] += partials[i * args.n + c + j];
    }
    StoreColumns<T>(sums, width, y + c);
  }
}

template <typename T>
RowLoop LoopOf(const SpmmArgs& args, int64_t rows, int64_t entries) {
  if (entries >= kLongRow * rows) return RowLoop::kLong;
  const bool tiny = entries <= kTinyRow * rows;
  if (args.n == 1 && !args.permutation && std::is_same_v<T, Accumulator<T>>) {
    const bool grouped = args.m <= kMostGrouped<T> || (kMostGrouped<T> > 0 && tiny);
    return grouped ? RowLoop::kGroups : RowLoop::kBranchFree;
  }
  if (tiny) return RowLoop::kPredicted;
  const bool on_intel = kMasksFew<T> && ThisMachine().intel && args.m > kRememberedRows;
  const bool on_zen5 = kMasks && OnZen5() && args.m > kRememberedRowsZen5;
  const int64_t most = on_intel ? kMostMasked : on_zen5 ? kMostMaskedZen5<T> : 0;
  if (args.n > 4 && args.n <= most && args.tiles == 1) return RowLoop::kMasked;
  if (args.m > kFewRows) return RowLoop::kBranchFree;
  return on_intel && args.n > 1 ? RowLoop::kMasked : RowLoop::kPredicted;
}

template <typename T, typename X>
void RunTile(const SpmmArgs& args, const TileTask& tile, const X* x) {
  using Acc = Accumulator<T>;
  const RowTask& rows = *tile.rows;
  T* y = static_cast<T*>(args.y) + (tile.batch * args.m + rows.row_begin) * args.n;
  const int64_t count = rows.row_end - rows.row_begin, entries = rows.entry_end - rows.entry_begin;
  const RowLoop loop = LoopOf<T>(args, count, entries);
  const auto stop = [&args] { __atomic_store_n(args.wrong, 1, __ATOMIC_RELAXED); };
  const bool looks = Looks<T, X>(args, loop, count, entries);
  if (args.wrong && !looks && !IndicesHold(args.indices + rows.entry_begin, entries, args.k)) {
    return stop();
  }
  for (int64_t column = tile.first; column < tile.last;) {
    const int64_t columns = NextBlock<T>(tile.last - column);
    BlockTask<T, X> block(args, tile, x, column, columns, loop, looks);
    if (rows.piece < 0) {
      block.Rows(args.offsets + rows.row_begin, rows.row_end - rows.row_begin, y + column);
    } else {
      Acc sums[kMaxColumns<T>] = {};
      block.Sum(rows.entry_begin, rows.entry_end, sums);
      const int64_t slot = tile.batch * args.pieces + rows.piece;
      StoreColumns<Acc>(sums, columns, static_cast<Acc*>(args.partials) + slot * args.n + column);
    }
    if (block.wrong()) return stop();
    column += columns;
  }
  if (rows.piece >= 0 && IsLastPiece(args, tile.walk, rows)) {
    CombinePieces<T>(args, args.splits[rows.split], tile.batch, tile.first, tile.last - tile.first);
  }
}

template <typename T>
void SpmmTask(const SpmmArgs& args, int64_t task) {
  const TileTask tile = BeginTask<T>(args, task);
  WithOperand<T>(tile, [&](const auto* x) { RunTile<T>(args, tile, x); });
  EndTask(tile);
}

}  // namespace

void Spmm(const SpmmArgs& args, int64_t task) {
  DispatchOwnDtype(args.dtype,
                   [&](auto tag) { SpmmTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
