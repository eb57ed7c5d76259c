// Messages along entries and what a row keeps of them in one vector of columns (folds), and the
// arg-extremum gathers of the derivatives.
#include "cpu/gspmm/gspmm.h"
#include "cpu/row_reduce/row_reduce_loops.h"
#include "cpu/simd/gather.h"
#include "cpu/simd/lane_sums.h"

namespace sgap::SGAP_ISA {
namespace {

// Integers as wide as T's accumulators: what comparisons of those give.
template <typename T>
using Lane = std::conditional_t<sizeof(Accumulator<T>) == 4, int32_t, int64_t>;

template <typename T>
inline Vector<Lane<T>, kLanes<T>> LoadPositions(const int32_t* source, int count) {
  constexpr int kSize = kLanes<T>;
  Vector<int32_t, kSize> positions;
  if (count == kSize) {
    std::memcpy(&positions, source, sizeof(positions));
  } else {  // by the masked loads of floats, which move any bits
    const auto* bits = reinterpret_cast<const float*>(source);
    positions = BitCast<Vector<int32_t, kSize>>(LoadPartial<float, kSize>(bits, count));
  }
  return __builtin_convertvector(positions, Vector<Lane<T>, kSize>);
}

template <typename T>
inline void StorePositions(int32_t* target, Vector<Lane<T>, kLanes<T>> x, int count) {
  constexpr int kSize = kLanes<T>;
  const auto positions = __builtin_convertvector(x, Vector<int32_t, kSize>);
  if (count == kSize) {
    std::memcpy(target, &positions, sizeof(positions));
  } else {
    for (int i = 0; i < count; ++i) target[i] = positions[i];
  }
}

#define SGAP_INLINE __attribute__((always_inline)) inline

// How a message is combined with what is kept: it is the first; by one comparison, which is right
// unless a message other than the first is NaN, noting whether there was any, or where there is
// none for sure; or with NaN considered.
enum class Taking { kFirst, kFast, kOfNumbers, kExactly };

// Vectors of columns of one pass over the entries (kMost of a fold): with their positions half of
// the registers.
constexpr int kMaxVectors = kVectorBytes == 64 ? 8 : 4;

// The greatest message (the least with kMin) and, with kPositions, where the first of these is; a
// NaN is greater and less than every number.
template <typename T, bool kAdd, bool kMin, bool kPositions, bool kOfVectors>
struct ExtremumFold {
  using Number = T;
  using Messages = Vector<Accumulator<T>, kLanes<T>>;
  using Positions = Vector<Lane<T>, kLanes<T>>;
  static constexpr bool kGathers = false, kSums = false, kNotes = kPositions;
  static constexpr bool kVectorValues = kOfVectors;
  static constexpr int kMost = kMaxVectors;

  Messages kept = {};
  Positions at = Positions{} - 1;
  Messages check = {};  // NaN once a message was NaN or infinite

  template <typename Value>  // a scalar, or one for each column
  static Messages Message(Value value, Messages x) {
    if constexpr (kAdd) {
      return x + value;
    } else {
      return x * value;
    }
  }

  void Start() {
    kept = Messages{};
    at = Positions{} - 1;
  }

  template <Taking kTaking, typename Value>
  SGAP_INLINE void Take(Value value, Lane<T> position, Messages x) {
    ExtremumFold other;
    other.kept = Message(value, x);
    other.at = Positions{} + position;
    if constexpr (kTaking == Taking::kExactly) {
      Merge(other);
      return;
    }
    if constexpr (kTaking != Taking::kOfNumbers) check += other.kept * 0;
    if constexpr (kTaking == Taking::kFirst) {
      kept = other.kept;
      at = other.at;
    } else if constexpr (kMin) {
      at = other.kept < kept ? other.at : at;
      kept = other.kept < kept ? other.kept : kept;
    } else {
      at = other.kept > kept ? other.at : at;
      kept = other.kept > kept ? other.kept : kept;
    }
  }

  void Merge(const ExtremumFold& other) {
    Positions taken;
    if constexpr (kMin) {
      taken = (kept == kept) & ~(other.kept >= kept);
    } else {
      taken = (kept == kept) & ~(other.kept <= kept);
    }
    kept = taken ? other.kept : kept;
    at = taken ? other.at : at;
  }
};

// The sum of value * x, values being vectors; of scalars it is spmm.
template <typename T>
struct SumFold {
  using Number = T;
  using Sums = Vector<Accumulator<T>, kLanes<T>>;
  static constexpr bool kGathers = false, kSums = true, kNotes = false, kVectorValues = true;
  static constexpr int kMost = 8;

  Sums kept = {};

  void Start() { kept = Sums{}; }

  template <Taking kTaking>
  SGAP_INLINE void Take(Sums value, Lane<T>, Sums x) {
    kept += value * x;
  }

  void Merge(const SumFold& other) { kept += other.kept; }
};

// The sum of value * x over the entries that attained the extremum (an arg-extremum gather).
template <typename T>
struct ArgGatherFold {
  using Number = T;
  using Sums = Vector<Accumulator<T>, kLanes<T>>;
  using Positions = Vector<Lane<T>, kLanes<T>>;
  static constexpr bool kGathers = true, kSums = true, kNotes = false, kVectorValues = false;
  static constexpr int kMost = kMaxVectors;

  Sums kept = {};

  void Start() { kept = Sums{}; }

  SGAP_INLINE void Take(Accumulator<T> value, Lane<T> position, Sums x, Positions attaining) {
    kept += attaining == position ? value * x : Sums{};
  }

  void Merge(const ArgGatherFold& other) { kept += other.kept; }
};

// Rows of operands of more bytes are not in the second-level cache, and prefetching them pays: as
// many entries ahead as for spmm.
constexpr int64_t kPrefetchBytes = 1 << 20;
constexpr int64_t kPrefetchEntries = 16;

// One batch of a call, from the first column of a block on. X: the type of x, T or Accumulator<T>.
template <typename T, typename X = T>
struct Operands {
  const T* values;
  const int32_t* indices;
  const int32_t* permutation;
  const X* x;
  const int32_t* given_arg;
  T* y;
  int32_t* arg;
  Accumulator<T>* partials;
  int32_t* partial_arg;
  size_t stride;  // n
  size_t column;
  int64_t last_entry;
  int tail;  // columns of a part of a vector
  bool prefetch, prefetch_values;

  Operands(const GspmmArgs& args, int64_t batch, const X* x)
      : values(static_cast<const T*>(args.values) + batch * args.values_stride),
        indices(args.indices),
        permutation(args.permutation),
        x(x),
        given_arg(args.given_arg ? args.given_arg + batch * args.given_arg_stride : nullptr),
        y(static_cast<T*>(args.y) + batch * args.m * args.n),
        arg(args.arg ? args.arg + batch * args.m * args.n : nullptr),
        partials(static_cast<Accumulator<T>*>(args.partials) + batch * args.pieces * args.n),
        partial_arg(args.partial_arg ? args.partial_arg + batch * args.pieces * args.n : nullptr),
        stride(args.n),
        column(0),
        last_entry(args.nnz - 1),
        tail(0),
        prefetch(args.k * args.n * int64_t(sizeof(X)) > kPrefetchBytes),
        prefetch_values(args.vectors && permutation &&
                        args.nnz * args.n * int64_t(sizeof(T)) > kPrefetchBytes) {}
};

template <typename T>
const T* OwnX(const GspmmArgs& args, int64_t batch) {
  return static_cast<const T*>(args.x) + batch * args.x_stride;
}

// Scalar 16-bit values of some entries, widened together: each by itself takes as many instructions
// as the message it makes.
template <typename T>
struct WidenedValues {
  static constexpr int64_t kMost = 512;
  static constexpr int kSize = kLanes<T>;
  alignas(64) Accumulator<T> values[kMost + kSize];
  int64_t first = 0, end = 0;  // entries

  // Makes the values of entries from `begin` on, before `stop`, those of `begin` to the result.
  template <typename X>
  [[gnu::noinline]] void Widen(const Operands<T, X>& at, int64_t begin, int64_t stop) {
    first = begin;
    end = stop - begin < kMost ? stop : begin + kMost;
    int64_t p = begin;
    for (; p + kSize <= end; p += kSize) {
      Store<Accumulator<T>, kSize>(values + (p - begin),
                                   at.permutation ? Gather<T, kSize>(at.values, at.permutation + p)
                                                  : Load<T, kSize>(at.values + p));
    }
    for (; p < end; ++p) {
      values[p - begin] = LoadScalar(at.values + (at.permutation ? at.permutation[p] : p));
    }
  }
};

// Others are read where they are used.
struct OwnValues {};

// Whole vectors of columns, or a part of one (kTail). A row's fold stays in registers only if all
// code that touches it is inlined.
template <typename F, int kVectors, bool kTail, typename X = typename F::Number>
struct Block {
  using T = typename F::Number;
  using Operands = sgap::SGAP_ISA::Operands<T, X>;
  static constexpr int kSize = kLanes<T>;
  static constexpr bool kApart = !kTail && !F::kGathers;
  using Row = Vector<Accumulator<T>, kSize>;
  static constexpr bool kWidens = sizeof(T) == 2 && !F::kVectorValues;
  using Values = std::conditional_t<kWidens, WidenedValues<T>, OwnValues>;

  static int Count(const Operands& at) { return kTail ? at.tail : kSize; }

  // The cache lines of kVectors vectors, which need not begin with one.
  template <typename E>
  static void PrefetchLines(const E* from) {
    constexpr int kLine = 64 / sizeof(E), kCount = kVectors * kSize;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; i += kLine) Prefetch(from + i);
    if constexpr (kCount >= kLine) Prefetch(from + kCount - 1);
  }

  static void PrefetchRow(const Operands& at, int64_t p) {
    const int64_t ahead =
        p + kPrefetchEntries < at.last_entry ? p + kPrefetchEntries : at.last_entry;
    const size_t row = size_t(at.indices[ahead]) * at.stride + at.column;
    PrefetchLines(at.x + row);
    if constexpr (F::kGathers) PrefetchLines(at.given_arg + row);
  }

  static void PrefetchValues(const Operands& at, int64_t p) {
    const int64_t ahead =
        p + kPrefetchEntries < at.last_entry ? p + kPrefetchEntries : at.last_entry;
    PrefetchLines(at.values + size_t(at.permutation[ahead]) * at.stride + at.column);
  }

  template <typename E>
  SGAP_INLINE static void LoadRow(const Operands& at, const E* source, Row* x) {
    if constexpr (kApart) {
      LoadApart<E, kSize, kVectors>(source, x);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) x[i] = LoadCount(source + i * kSize, Count(at));
    }
  }

  template <Taking kTaking>
  SGAP_INLINE static void Entry(const Operands& at, [[maybe_unused]] const Values& widened,
                                int64_t p, F* folds) {
    const int32_t position = at.permutation ? at.permutation[p] : int32_t(p);
    const size_t row = size_t(at.indices[p]) * at.stride + at.column;
    if constexpr (F::kVectorValues && sizeof(T) >= 4) {
      // One vector after the other: all of a row would not fit in registers beside the folds.
      const T* values = at.values + size_t(position) * at.stride + at.column;
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        folds[i].template Take<kTaking>(LoadCount(values + i * kSize, Count(at)), position,
                                        LoadCount(at.x + row + i * kSize, Count(at)));
      }
      return;
    }
    Row x[kVectors];
    LoadRow(at, at.x + row, x);
    if constexpr (F::kVectorValues) {
      Row values[kVectors];
      LoadRow(at, at.values + size_t(position) * at.stride + at.column, values);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        folds[i].template Take<kTaking>(values[i], position, x[i]);
      }
    } else {
      Accumulator<T> value;
      if constexpr (kWidens) {
        value = widened.values[p - widened.first];
      } else {
        value = LoadScalar(at.values + position);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (F::kGathers) {
          const auto attaining = LoadPositions<T>(at.given_arg + row + i * kSize, Count(at));
          folds[i].Take(value, position, x[i], attaining);
        } else {
          folds[i].template Take<kTaking>(value, position, x[i]);
        }
      }
    }
  }

  // Those of one row; values up to `last` may be widened.
  template <Taking kTaking>
  SGAP_INLINE static void Entries(const Operands& at, Values& widened, int64_t begin, int64_t end,
                                  [[maybe_unused]] int64_t last, F* folds) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) folds[i].Start();
    int64_t p = begin;
    while (p < end) {
      int64_t stop = end;
      if constexpr (kWidens) {
        if (end > widened.end) {
          widened.Widen(at, p, last);
          stop = end < widened.end ? end : widened.end;
        }
      }
      if (!F::kSums && p == begin) Entry<Taking::kFirst>(at, widened, p++, folds);
      for (; p < stop; ++p) {
        if (at.prefetch) PrefetchRow(at, p);
        if (F::kVectorValues && at.prefetch_values) PrefetchValues(at, p);
        Entry<kTaking>(at, widened, p, folds);
      }
    }
  }

  template <typename Out>
  SGAP_INLINE static void StoreTo(const Operands& at, size_t row, const F* folds, Out* y,
                                  int32_t* arg) {
    Row kept[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) kept[i] = folds[i].kept;
    if constexpr (kApart) InOrder<X, kVectors>(kept);
    const size_t to = row * at.stride + at.column;
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) StoreCount(y + to + i * kSize, kept[i], Count(at));
    if constexpr (F::kNotes) {
      Vector<Lane<T>, kSize> places[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) places[i] = folds[i].at;
      if constexpr (kApart) InOrder<X, kVectors>(places);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) {
        StorePositions<T>(arg + to + i * kSize, places[i], Count(at));
      }
    }
  }

  // Returns whether it has to be done again, with Taking::kExactly.
  template <Taking kTaking>
  static bool Run(const Operands& at, const int32_t* offsets, const RowTask& rows) {
    F folds[kVectors];
    Values widened;
    if (rows.piece >= 0) {
      Entries<kTaking>(at, widened, rows.entry_begin, rows.entry_end, rows.entry_end, folds);
      StoreTo(at, rows.piece, folds, at.partials, at.partial_arg);
    } else {
      for (int64_t r = rows.row_begin; r < rows.row_end; ++r) {
        Entries<kTaking>(at, widened, offsets[r], offsets[r + 1], offsets[rows.row_end], folds);
        StoreTo(at, r, folds, at.y, at.arg);
      }
    }
    if constexpr (F::kSums) {
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
template <typename F, int kVectors, typename X, typename Body>
int64_t NextBlock(int64_t left, Body&& body) {
  constexpr int kSize = kLanes<typename F::Number>;
  if (left >= kVectors * kSize) {
    body(TypeTag<Block<F, kVectors, false, X>>());
    return kVectors * kSize;
  }
  if constexpr (kVectors > 1) return NextBlock<F, kVectors / 2, X>(left, body);
  body(TypeTag<Block<F, 1, true, X>>());
  return left;
}

// Calls body(TypeTag<Block>(), operands) for all columns of x, in blocks of at most kVectors.
template <typename F, int kVectors, typename X, typename Body>
void ForBlocks(const GspmmArgs& args, int64_t batch, const X* x, Body&& body) {
  Operands<typename F::Number, X> at(args, batch, x);
  at.tail = int(args.n % kLanes<typename F::Number>);
  while (int64_t(at.column) < args.n) {
    at.column +=
        NextBlock<F, kVectors, X>(args.n - int64_t(at.column), [&](auto tag) { body(tag, at); });
  }
}

// The pieces of a split row in their order, whichever thread came last.
template <typename F>
void CombinePieces(const GspmmArgs& args, const SplitRow& split, int64_t batch) {
  using T = typename F::Number;
  ForBlocks<F, 1>(args, batch, OwnX<T>(args, batch), [&](auto tag, const auto& at) {
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

// Whether none of `count` 16-bit floats is NaN or infinite.
template <typename T>
bool AllFinite(const T* values, int64_t count) {
  constexpr int kSize = kVectorBytes / 2;
  constexpr int16_t kInfinite = std::is_same_v<T, BFloat16> ? 0x7f80 : 0x7c00;
  using Bits = Vector<int16_t, kSize>;
  Bits greatest[4] = {};
  int64_t i = 0;
  for (; i + 4 * kSize <= count; i += 4 * kSize) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      Bits x;
      std::memcpy(&x, values + i + j * kSize, sizeof(x));
      x &= 0x7fff;
      greatest[j] = x > greatest[j] ? x : greatest[j];
    }
  }
  bool finite = true;
  for (; i < count; ++i) finite &= (values[i].bits & 0x7fff) < kInfinite;
  for (const Bits& some : greatest) {
    for (int j = 0; j < kSize; ++j) finite &= some[j] < kInfinite;
  }
  return finite;
}

// Whether no message of a task can be NaN, where rows of x are used so often that it takes little
// to find out: the check of each message takes as long as the comparison, and with what widens
// 16-bit rows longer than in float32.
template <typename F>
constexpr bool kMayBeOfNumbers = Block<F, 1, false>::kWidens && !F::kSums;

template <typename F>
bool OfNumbers(const GspmmArgs& args, const RowTask& rows, int64_t batch) {
  constexpr int64_t kUses = 8;
  if constexpr (kMayBeOfNumbers<F>) {
    if (args.permutation || args.nnz / kUses < args.k) return false;
    using T = typename F::Number;
    const Operands<T> at(args, batch, OwnX<T>(args, batch));
    uint8_t* const known = args.finite + batch;
    uint8_t finite = __atomic_load_n(known, __ATOMIC_RELAXED);
    if (finite == 0) {
      finite = AllFinite(at.x, args.k * args.n) ? 2 : 1;
      __atomic_store_n(known, finite, __ATOMIC_RELAXED);
    }
    return finite == 2 &&
           AllFinite(at.values + rows.entry_begin, rows.entry_end - rows.entry_begin);
  }
  return false;
}

// A task without NaN, with rows of x in float16 widened in a slab, if one is free.
template <typename F, typename T>
void NumbersTask(const GspmmArgs& args, const RowTask& rows, int64_t batch, const T* x) {
  const auto run = [&](auto tag, const auto& at) {
    decltype(tag)::type::template Run<Taking::kOfNumbers>(at, args.offsets, rows);
  };
  if constexpr (std::is_same_v<T, Float16>) {
    if (Slab* const slab = FreeSlab(args.slabs)) {
      const Accumulator<T>* const wide = CopyIn(slab, x, args.k, args.n, args.n);
      ForBlocks<F, F::kMost>(args, batch, wide, run);
      return GiveBack(slab);
    }
  }
  ForBlocks<F, F::kMost>(args, batch, x, run);
}

template <typename F>
void GspmmTask(const GspmmArgs& args, int64_t task) {
  const RowTask& rows = args.tasks[task % args.row_tasks];
  const int64_t batch = task / args.row_tasks;
  const auto* const x = OwnX<typename F::Number>(args, batch);
  bool again = false;
  if (OfNumbers<F>(args, rows, batch)) {
    if constexpr (kMayBeOfNumbers<F>) NumbersTask<F>(args, rows, batch, x);
  } else {
    ForBlocks<F, F::kMost>(args, batch, x, [&](auto tag, const auto& at) {
      again |= decltype(tag)::type::template Run<Taking::kFast>(at, args.offsets, rows);
    });
  }
  if constexpr (!F::kSums) {
    if (again) {
      ForBlocks<F, 1>(args, batch, x, [&](auto tag, const auto& at) {
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
  if (args.vectors) {  // with positions: one program serves both
    GspmmTask<ExtremumFold<T, kAdd, kMin, true, true>>(args, task);
  } else if (args.arg) {
    GspmmTask<ExtremumFold<T, kAdd, kMin, true, false>>(args, task);
  } else {
    GspmmTask<ExtremumFold<T, kAdd, kMin, false, false>>(args, task);
  }
}

// Columns of the matrix.
int64_t ColumnsOf(const ArgGatherArgs& args) { return args.transposed ? args.m : args.sources; }

template <typename T>
void ArgGatherTask(const ArgGatherArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_size;
  const int64_t end = args.m - begin < args.chunk_size ? args.m : begin + args.chunk_size;
  const T* values = static_cast<const T*>(args.values) + batch * args.values_stride;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const int32_t* arg = args.arg + batch * args.arg_stride + begin * args.n;
  T* y = static_cast<T*>(args.y) + (batch * args.m + begin) * args.n;
  const int64_t stored = args.offsets[args.matrix_rows];
  const auto columns = uint32_t(ColumnsOf(args));
  for (int64_t r = begin; r < end; ++r, arg += args.n, y += args.n) {
    for (int64_t c = 0; c < args.n; ++c) {
      const int64_t q = arg[c];
      if (q < 0 || q >= stored || uint32_t(args.indices[q]) >= columns) {
        y[c] = T{};
        continue;
      }
      const int64_t source =
          args.transposed ? RowOfEntry(args.offsets, args.matrix_rows, q) : args.indices[q];
      StoreScalar(y + c, LoadScalar(values + q) * LoadScalar(x + source * args.n + c));
    }
  }
}

// The sum of x * d where arg is q, over n columns.
template <typename T>
Accumulator<T> AttainedDot(const T* x, const T* d, const int32_t* arg, int64_t n, int32_t q) {
  const OneRow<T> all = {n};
  return Reduce(all, Accumulator<T>(0), Add(), [&](int64_t c, int count) {
    const auto attaining = LoadPositions<T>(arg + c, count) == Lane<T>(q);
    const auto product = LoadCount(x + c, count) * LoadCount(d + c, count);
    return attaining ? product : decltype(product){};
  })[0];
}

template <typename T>
void ArgGatherToValuesTask(const ArgGatherArgs& args, int64_t task) {
  const int64_t batch = task / args.chunks, begin = task % args.chunks * args.chunk_size;
  const int64_t stop = args.nnz - begin < args.chunk_size ? args.nnz : begin + args.chunk_size;
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const T* d = static_cast<const T*>(args.d) + batch * args.d_stride;
  const int32_t* arg = args.arg + batch * args.arg_stride;
  T* out = static_cast<T*>(args.out) + batch * args.nnz;
  const int64_t stored = args.offsets[args.matrix_rows];
  const int64_t end = stop < stored ? stop : stored > begin ? stored : begin;
  for (int64_t q = end; q < stop; ++q) out[q] = T{};
  if (begin == end) return;
  const auto columns = uint32_t(ColumnsOf(args));
  for (int64_t q = begin, i = RowOfEntry(args.offsets, args.matrix_rows, begin); q < end; ++i) {
    const int64_t row_end = args.offsets[i + 1] < end ? args.offsets[i + 1] : end;
    for (; q < row_end; ++q) {
      const int64_t j = args.indices[q];
      if (uint32_t(j) >= columns) {
        out[q] = T{};
        continue;
      }
      const int64_t row = (args.transposed ? j : i) * args.n;
      const int64_t source = (args.transposed ? i : j) * args.n;
      StoreScalar(out + q, AttainedDot(x + source, d + row, arg + row, args.n, int32_t(q)));
    }
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
      case Fold::kSumProduct:
        return GspmmTask<SumFold<T>>(args, task);
      case Fold::kArgGather:
        return GspmmTask<ArgGatherFold<T>>(args, task);
    }
  });
}

void GspmmArgGather(const ArgGatherArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { ArgGatherTask<typename decltype(tag)::type>(args, task); });
}

void GspmmArgGatherToValues(const ArgGatherArgs& args, int64_t task) {
  DispatchDtype(args.dtype,
                [&](auto tag) { ArgGatherToValuesTask<typename decltype(tag)::type>(args, task); });
}

}  // namespace sgap::SGAP_ISA
