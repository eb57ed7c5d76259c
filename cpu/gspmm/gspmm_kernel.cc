#include "cpu/gspmm/gspmm.h"
#include "cpu/gspmm/gspmm_folds.h"
#include "cpu/simd/lane_sums.h"

namespace sgap::SGAP_ISA {
namespace {

// Vectors of columns of one pass over the entries: with their positions half of the registers.
constexpr int kMaxVectors = kVectorBytes == 64 ? 8 : 4;

// Operands beyond this many bytes are not in the second-level cache, and their rows are worth
// asking for ahead of time: as many entries as for spmm.
constexpr int64_t kPrefetchBytes = 1 << 20;
constexpr int64_t kPrefetchEntries = 16;

// One batch of a call, from the first column of a block on.
template <typename T>
struct Operands {
  const T* values;
  const int32_t* indices;
  const int32_t* permutation;
  const T* x;
  const int32_t* picked;
  T* y;
  int32_t* arg;
  Accumulator<T>* partials;
  int32_t* partial_arg;
  size_t stride;  // n
  size_t column;
  int64_t last_entry;
  int tail;  // columns of a part of a vector
  bool prefetch;

  Operands(const GspmmArgs& args, int64_t batch)
      : values(static_cast<const T*>(args.values) + batch * args.values_stride),
        indices(args.indices),
        permutation(args.permutation),
        x(static_cast<const T*>(args.x) + batch * args.x_stride),
        picked(args.picked ? args.picked + batch * args.picked_stride : nullptr),
        y(static_cast<T*>(args.y) + batch * args.m * args.n),
        arg(args.arg ? args.arg + batch * args.m * args.n : nullptr),
        partials(static_cast<Accumulator<T>*>(args.partials) + batch * args.pieces * args.n),
        partial_arg(args.partial_arg ? args.partial_arg + batch * args.pieces * args.n : nullptr),
        stride(args.n),
        column(0),
        last_entry(args.nnz - 1),
        tail(0),
        prefetch(args.k * args.n * int64_t(sizeof(T)) > kPrefetchBytes) {}
};

// Whole vectors of columns, or a part of one (kTail). What a row keeps stays in registers only if
// all that touches it is inlined.
template <typename F, int kVectors, bool kTail>
struct Block {
  using T = typename F::Number;
  static constexpr int kSize = kLanes<T>;

  static int Count(const Operands<T>& at) { return kTail ? at.tail : kSize; }

  static void PrefetchRow(const Operands<T>& at, int64_t p) {
    const int64_t ahead =
        p + kPrefetchEntries < at.last_entry ? p + kPrefetchEntries : at.last_entry;
    const size_t row = size_t(at.indices[ahead]) * at.stride + at.column;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Prefetch(at.x + row + i * kSize);
      if constexpr (F::kPicks) Prefetch(at.picked + row + i * kSize);
    }
  }

  template <Taking kTaking>
  SGAP_INLINE static void Entry(const Operands<T>& at, int64_t p, F* folds) {
    const int32_t position = at.permutation ? at.permutation[p] : int32_t(p);
    const Accumulator<T> value = LoadScalar(at.values + position);
    const size_t row = size_t(at.indices[p]) * at.stride + at.column;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const auto x = LoadCount(at.x + row + i * kSize, Count(at));
      if constexpr (F::kPicks) {
        const auto picked = LoadPositions<T>(at.picked + row + i * kSize, Count(at));
        folds[i].Take(value, position, x, picked);
      } else {
        folds[i].template Take<kTaking>(value, position, x);
      }
    }
  }

  template <Taking kTaking>
  SGAP_INLINE static void Entries(const Operands<T>& at, int64_t begin, int64_t end, F* folds) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) folds[i].Start();
    int64_t p = begin;
    if (!F::kPicks && p < end) Entry<Taking::kFirst>(at, p++, folds);
    for (; p < end; ++p) {
      if (at.prefetch) PrefetchRow(at, p);
      Entry<kTaking>(at, p, folds);
    }
  }

  template <typename Out>
  SGAP_INLINE static void StoreTo(const Operands<T>& at, size_t row, const F* folds, Out* y,
                                  int32_t* arg) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const size_t to = row * at.stride + at.column + i * kSize;
      StoreCount(y + to, folds[i].kept, Count(at));
      if constexpr (F::kNotes) StorePositions<T>(arg + to, folds[i].at, Count(at));
    }
  }

  // Returns whether it has to be done again, with Taking::kExactly.
  template <Taking kTaking>
  static bool Run(const Operands<T>& at, const int32_t* offsets, const RowTask& rows) {
    F folds[kVectors];
    if (rows.piece >= 0) {
      Entries<kTaking>(at, rows.entry_begin, rows.entry_end, folds);
      StoreTo(at, rows.piece, folds, at.partials, at.partial_arg);
    } else {
      for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
        Entries<kTaking>(at, offsets[r], offsets[r + 1], folds);
        StoreTo(at, r, folds, at.y, at.arg);
      }
    }
    if constexpr (F::kPicks) {
      return false;
    } else {
      auto check = folds[0].check;
#pragma GCC unroll 8
      for (int i = 1; i < kVectors; ++i) check += folds[i].check;
      const auto sum = FoldLanes<1, Accumulator<T>, kSize>(check)[0];
      return sum != sum;
    }
  }
};

// Calls body(TypeTag<Block>()) for the next columns of `left`, and returns how many those are.
template <typename F, int kVectors, typename Body>
int64_t NextBlock(int64_t left, Body&& body) {
  constexpr int kSize = kLanes<typename F::Number>;
  if (left >= kVectors * kSize) {
    body(TypeTag<Block<F, kVectors, false>>());
    return kVectors * kSize;
  }
  if constexpr (kVectors > 1) return NextBlock<F, kVectors / 2>(left, body);
  body(TypeTag<Block<F, 1, true>>());
  return left;
}

// Calls body(TypeTag<Block>(), operands) for all columns, in blocks of at most kVectors.
template <typename F, int kVectors, typename Body>
void ForBlocks(const GspmmArgs& args, int64_t batch, Body&& body) {
  Operands<typename F::Number> at(args, batch);
  at.tail = int(args.n % kLanes<typename F::Number>);
  while (int64_t(at.column) < args.n) {
    at.column +=
        NextBlock<F, kVectors>(args.n - int64_t(at.column), [&](auto tag) { body(tag, at); });
  }
}

// The pieces of a split row in their order, whichever thread came last.
template <typename F>
void CombinePieces(const GspmmArgs& args, const SplitRow& split, int64_t batch) {
  using T = typename F::Number;
  ForBlocks<F, 1>(args, batch, [&](auto tag, const auto& at) {
    using B = typename decltype(tag)::type;
    F fold;
    for (int64_t piece = 0; piece < split.pieces; ++piece) {
      const size_t from = (split.first_piece + piece) * at.stride + at.column;
      F part;
      part.kept = LoadCount<Accumulator<T>>(at.partials + from, B::Count(at));
      if constexpr (F::kNotes) part.at = LoadPositions<T>(at.partial_arg + from, B::Count(at));
      if (piece == 0) {
        fold = part;
      } else {
        fold.Merge(part);
      }
    }
    B::StoreTo(at, split.row, &fold, at.y, at.arg);
  });
}

template <typename F>
void GspmmTask(const GspmmArgs& args, int64_t task) {
  const RowTask& rows = args.tasks[task % args.row_tasks];
  const int64_t batch = task / args.row_tasks;
  bool again = false;
  ForBlocks<F, kMaxVectors>(args, batch, [&](auto tag, const auto& at) {
    again |= decltype(tag)::type::template Run<Taking::kFast>(at, args.offsets, rows);
  });
  if constexpr (!F::kPicks) {
    if (again) {
      ForBlocks<F, 1>(args, batch, [&](auto tag, const auto& at) {
        decltype(tag)::type::template Run<Taking::kExactly>(at, args.offsets, rows);
      });
    }
  }
  if (rows.piece >= 0 && IsLastPiece(args, batch, rows)) {
    CombinePieces<F>(args, args.splits[rows.split], batch);
  }
}

template <typename T, bool kAdd, bool kMin>
void ExtremumTask(const GspmmArgs& args, int64_t task) {
  if (args.arg) {
    GspmmTask<ExtremumFold<T, kAdd, kMin, true>>(args, task);
  } else {
    GspmmTask<ExtremumFold<T, kAdd, kMin, false>>(args, task);
  }
}

}  // namespace

void Gspmm(const GspmmArgs& args, int64_t task) {
  DispatchDtype(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    switch (args.fold) {
      case Fold::kMaxProduct:
        return ExtremumTask<T, false, false>(args, task);
      case Fold::kMinProduct:
        return ExtremumTask<T, false, true>(args, task);
      case Fold::kMaxSum:
        return ExtremumTask<T, true, false>(args, task);
      case Fold::kMinSum:
        return ExtremumTask<T, true, true>(args, task);
      case Fold::kPicked:
        return GspmmTask<PickedFold<T>>(args, task);
    }
  });
}

}  // namespace sgap::SGAP_ISA
