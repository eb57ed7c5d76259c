// Column vectors: a few rows of x against the rows of y that vectors name, as many sums as a vector
// has lanes, which one tree adds up; many rows go through sddmm_cvs_packed.h.
#include "cpu/common/partition.h"
#include "cpu/sddmm/sddmm.h"
#include "cpu/sddmm/sddmm_cvs_packed.h"
#include "cpu/sddmm/sddmm_dots.h"

namespace sgap::SGAP_ISA {
namespace {

// Vectors of x that are held in registers beside kLanes sums.
#if defined(__AVX512F__)
constexpr int kHeld = 8;
#else
constexpr int kHeld = 4;
#endif

// kRows rows of x against the rows of y that kColumns vectors name: kLanes dot products.
template <typename T, int kRows>
struct VectorDots {
  static constexpr int kSize = kLanes<T>, kColumns = kSize / kRows, kWide = kPieceElements<T>;
  static constexpr bool kHoldX = kRows <= kColumns;
  static constexpr int kFew = kHoldX ? kRows : kColumns, kMany = kSize / kFew;
  static constexpr int kSteps = kHeld / kFew > 1 ? kHeld / kFew : 1;
  using Sum = DotSum<T>;
  using Piece = sgap::SGAP_ISA::Piece<T>;

  const T* x[kRows];
  const T* y;
  int64_t width;

  // sums[c * kRows + r] += x[r] * y[columns[c]], kCount vectors of each from column `at` on. Those
  // of the side with fewer rows stay in registers, so that each one is loaded once.
  template <int kCount>
  void Add(const int32_t* columns, int64_t at, Sum* sums) const {
    const auto row = [&](bool of_x, int i) {
      return (of_x ? x[i] : y + size_t(columns[i]) * size_t(width)) + at;
    };
    Piece held[kFew][kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kFew; ++i) LoadPieces<T, kCount>(row(kHoldX, i), held[i]);
#pragma GCC unroll 16
    for (int j = 0; j < kMany; ++j) {
      Piece pieces[kCount];
      LoadPieces<T, kCount>(row(!kHoldX, j), pieces);
#pragma GCC unroll 16
      for (int s = 0; s < kCount; ++s) {
        const Piece piece = Kept(pieces[s]);
#pragma GCC unroll 16
        for (int i = 0; i < kFew; ++i) {
          Sum& sum = sums[kHoldX ? j * kRows + i : i * kRows + j];
          sum = AddDots<T>(sum, held[i][s], piece);
        }
      }
    }
  }

  void AddTail(const int32_t* columns, int remainder, Sum* sums) const {
    Piece right[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      right[c] = LoadTail(y + size_t(columns[c]) * size_t(width), width, remainder);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Piece left = LoadTail(x[r], width, remainder);
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) {
        Sum& sum = sums[c * kRows + r];
        sum = AddDots<T>(sum, left, right[c]);
      }
    }
  }

  // `count` columns, the first of them again in the place of those that lack.
  static const int32_t* Padded(const int32_t* columns, int count, int32_t* padded) {
    for (int c = 0; c < kColumns; ++c) padded[c] = columns[c < count ? c : 0];
    return padded;
  }

  // Lane c * kRows + r: the dot product of x[r] and y[columns[c]], rows of kWidth pieces.
  // Addresses are computed first: among the multiply-adds they cost up to 1.4x.
  template <int kWidth>
  __attribute__((always_inline)) Sum ShortDots(const int32_t* columns) const {
    const T* rows[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const T* row = y + size_t(columns[c]) * (kWidth * kWide);
      asm volatile("" : "+r"(row));
      rows[c] = row;
    }
    Sum sums[kSize];
    // Of bfloat16 two pieces at a time, which take an instruction each to be widened.
    constexpr int kStep = std::is_same_v<T, BFloat16> && !kInPairs<T> && kVectorBytes == 64 ? 2 : 1;
    static_assert(kWidth % kStep == 0);
#pragma GCC unroll 16
    for (int s = 0; s < kWidth; s += kStep) {
      const auto load = [&](bool of_x, int i, Piece* row) __attribute__((always_inline)) {
        LoadPieces<T, kStep>((of_x ? x[0] + i * kWidth * kWide : rows[i]) + s * kWide, row);
#pragma GCC unroll 2
        for (int t = 0; t < kStep; ++t) row[t] = Kept(row[t]);
      };
      Piece held[kFew][kStep];
#pragma GCC unroll 16
      for (int i = 0; i < kFew; ++i) load(kHoldX, i, held[i]);
#pragma GCC unroll 16
      for (int j = 0; j < kMany; ++j) {
        Piece piece[kStep];
        load(!kHoldX, j, piece);
#pragma GCC unroll 16
        for (int i = 0; i < kFew; ++i) {
          Sum& sum = sums[kHoldX ? j * kRows + i : i * kRows + j];
          sum = s == 0 ? FirstDots<T>(held[i][0], piece[0]) : AddDots<T>(sum, held[i][0], piece[0]);
          if constexpr (kStep == 2) sum = AddDots<T>(sum, held[i][1], piece[1]);
        }
      }
    }
    return SumTransposed<kSize / 2>(sums);
  }

  // The vectors of [columns, end) up to the first at a column from `limit` on, to `target`, kRows
  // values each. Returns where it stopped.
  template <int kWidth, typename Out>
  __attribute__((noinline)) const int32_t* RunShort(const int32_t* columns, const int32_t* end,
                                                    int64_t limit, Out target) const {
    const VectorDots dots = *this;  // a copy: stores cannot change it
    for (; columns < end && *columns < limit; columns += kColumns, target = target + kSize) {
      int32_t padded[kColumns];
      const int32_t* from = columns;
      if (end - columns < kColumns) from = Padded(columns, int(end - columns), padded);
      const Sum sums = dots.template ShortDots<kWidth>(from);
      if (from == padded) {
        target.template PutPartial<kSize>(sums, int(end - columns) * kRows);
        return end;
      }
      target.template Put<kSize>(sums);
    }
    return columns;
  }

  // As ShortDots for any width. Inlined, it was up to 1.3x slower: too few registers.
  __attribute__((noinline)) Sum Run(const int32_t* columns) const {
    Sum sums[kSize];
#pragma GCC unroll 16
    for (int i = 0; i < kSize; ++i) sums[i] = Sum{};
    int64_t at = 0;
    for (; at + kSteps * kWide <= width; at += kSteps * kWide) Add<kSteps>(columns, at, sums);
    if constexpr (kSteps > 1) {
      for (; at + kWide <= width; at += kWide) Add<1>(columns, at, sums);
    }
    if (at < width) AddTail(columns, int(width - at), sums);
    return SumTransposed<kSize / 2>(sums);
  }
};

// Short vectors reuse little of what they load. Where they are dense enough for many of a block row
// to be in a window of columns, some block rows go through such windows together: rows of y then
// come from the first-level cache (up to 1.5x as fast).
constexpr int64_t kWindowedDensity = 4;  // stored vectors: at least one in that many
constexpr int64_t kWindowBytes = 24 << 10;
constexpr int64_t kWindowVectors = 20;
constexpr int64_t kWindowBlocks = 64;

// Rows of a vector that one pass takes: with fewer a piece of y, with more one of x would be loaded
// too often for the kLanes sums that one tree adds up.
template <typename T>
constexpr int kMaxRows = kLanes<T> >= 16  ? 8
                         : kLanes<T> >= 8 ? 4
                         : kLanes<T> >= 4 ? 2
                                          : 1;

// kRows rows of x from `x` on, and of each vector those from `row` on. Returns where it stopped.
template <typename T, int kRows, typename Out>
int64_t RangeDots(const SddmmArgs& args, const T* x, const T* y, int64_t row, VectorRange range,
                  Out results) {
  using Dots = VectorDots<T, kRows>;
  constexpr int kColumns = Dots::kColumns, kSize = Dots::kSize;
  constexpr int kShort = 2 * kSize / Dots::kWide;  // pieces
  Dots dots;
  dots.y = y;
  dots.width = args.d;
  for (int r = 0; r < kRows; ++r) dots.x[r] = x + r * args.d;
  const bool whole = args.length == kRows;
  if (kRows > 1 && whole && (args.d == 2 * kSize || args.d == 4 * kSize)) {
    const int32_t *first = args.indices + range.begin, *end = args.indices + range.end;
    const auto target = results + range.begin * kRows;
    return (args.d == 2 * kSize
                ? dots.template RunShort<kShort>(first, end, range.limit, target)
                : dots.template RunShort<2 * kShort>(first, end, range.limit, target)) -
           args.indices;
  }
  int64_t p = range.begin;
  auto target = results + (p * args.length + row);
  for (; p < range.end && args.indices[p] < range.limit;
       p += kColumns, target = target + kColumns * args.length) {
    const int count = int(range.end - p < kColumns ? range.end - p : kColumns);
    const int32_t* columns = args.indices + p;
    int32_t padded[kColumns];
    if (count < kColumns) columns = Dots::Padded(columns, count, padded);
    const auto sums = dots.Run(columns);
    if (whole && count == kColumns) {
      target.template Put<kSize>(sums);
    } else if (kColumns == 2 && kRows > 1 && count == 2) {
      for (int c = 0; c < 2; ++c) {
        (target + c * args.length).template Put<kSize / 2>(Half<Accumulator<T>, kSize>(sums, c));
      }
    } else if (whole) {
      target.template PutPartial<kSize>(sums, count * kRows);
    } else {
      target.template PutGroups<kRows, kSize>(sums, count, args.length);
    }
  }
  return p < range.end ? p : range.end;
}

// A range of block row `block`, all rows of its vectors. Returns where it stopped.
template <typename Rows, typename R, bool kPlain>
int64_t BlockDots(const SddmmArgs& args, const Rows& operands, int64_t block, VectorRange range,
                  Results<R, kPlain> results) {
  using T = typename Rows::Number;
  const int64_t first = block * args.length, below = args.m - first;
  const int64_t rows = below < args.length ? below : args.length;  // that x has
  const bool packed =
      PackingPays<R>(args.offsets[block + 1] - args.offsets[block], args.length, args.d);
  const T *const x = operands.OfX(first, rows), *const y = operands.y;
  int64_t stop = range.begin;
  for (int64_t row = 0, taken = 0; row < rows; row += taken) {
    const int64_t left = rows - row;
    const T* x_row = x + row * args.d;
    const auto run = [&](auto rows_of_run) {
      taken = decltype(rows_of_run)::value;
      stop = RangeDots<T, decltype(rows_of_run)::value>(args, x_row, y, row, range, results);
    };
    const auto run_packed = [&](auto groups) {
      taken = PackedRows<T, decltype(groups)::value>::kRows;
      stop = PackedDots<T, decltype(groups)::value>(args, x_row, y, row, range, results);
    };
    if (packed && left >= PackedRows<T, 4>::kRows) {
      run_packed(std::integral_constant<int, 4>());
    } else if (packed && left >= PackedRows<T, 2>::kRows) {
      run_packed(std::integral_constant<int, 2>());
    } else if (kMaxRows<T> >= 8 && left >= 8) {
      run(std::integral_constant<int, kMaxRows<T> >= 8 ? 8 : 1>());
    } else if (kMaxRows<T> >= 4 && left >= 4) {
      run(std::integral_constant<int, kMaxRows<T> >= 4 ? 4 : 1>());
    } else if (kMaxRows<T> >= 2 && left >= 2) {
      run(std::integral_constant<int, kMaxRows<T> >= 2 ? 2 : 1>());
    } else {
      run(std::integral_constant<int, 1>());
    }
  }
  for (int64_t p = range.begin; rows < args.length && p < stop; ++p) {
    for (int64_t r = rows; r < args.length; ++r) results.out[p * args.length + r] = R{};
  }
  return stop;
}

// Columns of a window: as many as the first-level cache holds rows of y, or more for enough vectors
// of a block row; all where that is not worth it.
template <typename T>
int64_t WindowColumns(const SddmmArgs& args, int64_t blocks) {
  const int64_t cells = blocks * args.k, stored = args.offsets[blocks];
  if (args.length > 2 || stored * kWindowedDensity < cells) return args.k;
  const int64_t fit = kWindowBytes / (args.d * int64_t(sizeof(T)));
  const int64_t least = kWindowVectors * cells / stored + 1;
  return fit > least ? fit : least;
}

// The vectors [begin, end), none of which is padding.
template <typename Rows, typename Out>
void StoredDots(const SddmmArgs& args, const Rows& rows, int64_t begin, int64_t end, int64_t blocks,
                Out results) {
  int64_t block = RowOfEntry(args.offsets, blocks, begin);
  const int64_t window = WindowColumns<typename Rows::Number>(args, blocks);
  const int64_t most = window < args.k ? kWindowBlocks : 1;
  for (int64_t p = begin; p < end;) {
    int64_t at[kWindowBlocks], ends[kWindowBlocks], count = 0;
    const int64_t first = block;
    for (; count < most && p < end; ++count, ++block) {
      at[count] = p;
      p = ends[count] = args.offsets[block + 1] < end ? args.offsets[block + 1] : end;
    }
    bool more = true;
    for (int64_t limit = window; more; limit += window) {
      if (limit >= args.k) limit = INT64_MAX - window;
      more = false;
      for (int64_t i = 0; i < count; ++i) {
        if (at[i] >= ends[i]) continue;
        at[i] = BlockDots(args, rows, first + i, {at[i], ends[i], limit}, results);
        more |= at[i] < ends[i];
      }
    }
  }
}

template <typename T>
void SddmmCvsTask(const SddmmArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, chunk = task % args.chunks;
  const int64_t numbers = args.entries * args.length;
  T* out = static_cast<T*>(args.out) + batch * numbers;
  const int64_t blocks = (args.m + args.length - 1) / args.length;
  const int64_t begin = chunk * args.chunk_entries;
  const int64_t stop =
      args.entries - begin < args.chunk_entries ? args.entries : begin + args.chunk_entries;
  const int64_t stored = args.d == 0 ? 0 : args.offsets[blocks];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t i = end * args.length; i < stop * args.length; ++i) out[i] = T{};
  if (begin == end) return;
  WithRows<T>(args, batch, [&](const auto& rows) {
    WithResults(args, out, numbers, batch,
                [&](auto results) { StoredDots(args, rows, begin, end, blocks, results); });
  });
}

}  // namespace

void SddmmCvs(const SddmmArgs& args, int64_t task) {
  DispatchOwnDtype(args.dtype,
                   [&](auto tag) { SddmmCvsTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
