// The inner loops of sddmm_kernel.cc, dot products of one row of x with rows of y, and what both
// kernels of SDDMM share: where sums go, with what multiplies each before its one rounding.
#pragma once

#include "cpu/common/slabs.h"
#include "cpu/sddmm/sddmm.h"
#include "cpu/simd/lane_sums.h"
#include "cpu/simd/pairs.h"

namespace sgap::SGAP_ISA {

// What a dot product takes of rows at a time, and adds up in one lane of a sum or in several: a
// register of pairs as they lie in memory, or of widened elements.
template <typename T>
using DotSum = Vector<Accumulator<T>, kLanes<T>>;
template <typename T>
using Piece = std::conditional_t<kInPairs<T>, Vector<uint32_t, 16>, DotSum<T>>;
template <typename T>
constexpr int kPieceElements = kInPairs<T> ? 2 * kLanes<T> : kLanes<T>;

template <typename T>
inline Piece<T> LoadPiece(const T* source) {
  if constexpr (kInPairs<T>) {
    Piece<T> piece;
    std::memcpy(&piece, source, sizeof(piece));
    return piece;
  } else {
    return Load<T, kLanes<T>>(source);
  }
}

// kPieces of them from `source` on, in an order of elements that depends on their number alone.
template <typename T, int kPieces>
inline void LoadPieces(const T* source, Piece<T>* x) {
  if constexpr (kInPairs<T>) {
#pragma GCC unroll 16
    for (int i = 0; i < kPieces; ++i) x[i] = LoadPiece(source + i * kPieceElements<T>);
  } else {
    LoadApart<T, kLanes<T>, kPieces>(source, x);
  }
}

// The last `remainder` elements of a row of `width`, fewer than a piece has; the rest is zero.
template <typename T>
inline Piece<T> LoadTail(const T* row, int64_t width, int remainder) {
  constexpr int kSize = kLanes<T>;
  if constexpr (kInPairs<T>) {
    const auto* bits = reinterpret_cast<const uint16_t*>(row);
    return BitCast<Piece<T>>(LoadBits<kPieceElements<T>>(bits + width - remainder, remainder));
  } else {
#if !defined(__AVX512F__)
    if (width >= kSize) {  // the last whole vector, without what was counted already
      const auto last = Load<T, kSize>(row + width - kSize);
      return LaneNumbers<Accumulator<T>, kSize>() < Accumulator<T>(kSize - remainder) ? DotSum<T>{}
                                                                                      : last;
    }
#endif
    return LoadPartial<T, kSize>(row + width - remainder, remainder);
  }
}

// sums + the products of a and b.
template <typename T>
inline DotSum<T> AddDots(DotSum<T> sums, Piece<T> a, Piece<T> b) {
  if constexpr (kInPairs<T>) {
    return DotPairs(sums, a, b);
  } else {
    return sums + a * b;
  }
}

// The first products of a sum.
template <typename T>
inline DotSum<T> FirstDots(Piece<T> a, Piece<T> b) {
  if constexpr (kInPairs<T>) {
    return DotPairs(DotSum<T>{}, a, b);
  } else {
    return a * b;
  }
}

// The rows of x and y of a batch element, as they are.
template <typename T>
struct OwnRows {
  using Number = T;

  const T *x, *y;
  int64_t width;

  // `count` rows of x, one after the other.
  const T* OfX(int64_t first, int64_t) const { return x + first * width; }
};

// The same as accumulators: those of y are in a slab, and behind them is room for some of x, which
// are converted where they are used: for many entries.
template <typename T>
struct WidenedRows {
  using Number = Accumulator<T>;

  const T* x;
  const Number* y;
  int64_t width;
  Number* room;

  const Number* OfX(int64_t first, int64_t count) const {
    CopyRows(x + first * width, 1, count * width, count * width, room);
    return room;
  }
};

// Calls run(rows) with the rows of x and y for a batch element: widened ones where there is a slab,
// which gives the same bits.
template <typename T, typename Run>
void WithRows(const SddmmArgs& args, int64_t batch, Run run) {
  const T* x = static_cast<const T*>(args.x) + batch * args.x_stride;
  const T* y = static_cast<const T*>(args.y) + batch * args.y_stride;
  if constexpr (std::is_same_v<T, Float16>) {
    if (Slab* const slab = FreeSlab(args.slabs)) {
      auto* const wide = CopyIn(slab, y, args.k, args.d, args.d);
      run(WidenedRows<T>{x, wide, args.d, wide + args.k * args.d});
      return GiveBack(slab);
    }
  }
  run(OwnRows<T>{x, y, args.d});
}

// Entries of one row of x whose dot products are added up together.
template <typename T>
struct DotGroup {
  static constexpr int kSize = kLanes<T> < 4 ? kLanes<T> : 4;

  const T* y;
  const int32_t* columns;  // rows of y
  const int32_t* ahead;    // rows of y to prefetch meanwhile
  int count;               // entries there are, up to kSize
};

// A row of x of kPieces pieces, held in registers (on a machine with enough of them).
template <int kPieces, typename T>
struct HeldRow {
  static constexpr int kElements = kPieceElements<T>, kWidth = kPieces * kElements;

  static constexpr int64_t Width(int64_t) { return kWidth; }

  HeldRow(const T* x, int64_t) { LoadPieces<T, kPieces>(x, held); }

  // dots[i]: lanes whose sum is the dot product of entry i.
  template <bool kPrefetch>
  void Dots(const DotGroup<T>& group, DotSum<T>* dots) const {
#pragma GCC unroll 4
    for (int i = 0; i < DotGroup<T>::kSize; ++i) {
      dots[i] = DotSum<T>{};
      if (i >= group.count) continue;
      if (kPrefetch) PrefetchRow(group.y + size_t(group.ahead[i]) * kWidth);
      dots[i] = Dot(group.y + size_t(group.columns[i]) * kWidth);
    }
  }

  DotSum<T> Dot(const T* y) const {
    Piece<T> row[kPieces];
    LoadPieces<T, kPieces>(y, row);
    if constexpr (kPieces == 1) {
      return FirstDots<T>(held[0], row[0]);
    } else {
      DotSum<T> sums[2] = {FirstDots<T>(held[0], row[0]), FirstDots<T>(held[1], row[1])};
#pragma GCC unroll 16
      for (int s = 2; s < kPieces; ++s) sums[s % 2] = AddDots<T>(sums[s % 2], held[s], row[s]);
      return sums[0] + sums[1];
    }
  }

  static void PrefetchRow(const T* y) {
#pragma GCC unroll 16
    for (int s = 0; s < kPieces; ++s) {
      if (s * kElements * sizeof(T) % 64 == 0) Prefetch(y + s * kElements);
    }
  }

  Piece<T> held[kPieces];
};

// A row of x of any width, each piece of which is loaded once for a group.
template <typename T>
struct AnyRow {
  static constexpr int kElements = kPieceElements<T>, kGroup = DotGroup<T>::kSize;

  static int64_t Width(int64_t width) { return width; }

  AnyRow(const T* x, int64_t width) : x(x), width(width) {}

  // Prefetching did not pay here.
  template <bool>
  void Dots(const DotGroup<T>& group, DotSum<T>* dots) const {
    if (group.count == kGroup) return Add<kGroup>(group.y, group.columns, dots);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
      dots[i] = DotSum<T>{};
      if (i < group.count) Add<1>(group.y, group.columns + i, dots + i);
    }
  }

  template <int kCount>
  void Add(const T* y, const int32_t* columns, DotSum<T>* dots) const {
    const T* rows[kCount];
    DotSum<T> sums[2][kCount] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) rows[i] = y + size_t(columns[i]) * width;
    const auto step = [&](auto pieces, int64_t at) {
      constexpr int kPieces = decltype(pieces)::value;
      Piece<T> left[kPieces], right[kPieces];
      LoadPieces<T, kPieces>(x + at, left);
#pragma GCC unroll 2
      for (int s = 0; s < kPieces; ++s) left[s] = Kept(left[s]);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        LoadPieces<T, kPieces>(rows[i] + at, right);
#pragma GCC unroll 2
        for (int s = 0; s < kPieces; ++s) sums[s][i] = AddDots<T>(sums[s][i], left[s], right[s]);
      }
    };
    constexpr int kTwo = 2 * kElements;
    int64_t at = 0;
    for (; at + kTwo <= width; at += kTwo) step(std::integral_constant<int, 2>(), at);
    if (at + kElements <= width) {
      step(std::integral_constant<int, 1>(), at);
      at += kElements;
    }
    if (const int rest = int(width - at); rest > 0) {
      const auto left = LoadTail(x, width, rest);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        sums[1][i] = AddDots<T>(sums[1][i], left, LoadTail(rows[i], width, rest));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) dots[i] = sums[0][i] + sums[1][i];
  }

  const T* x;
  int64_t width;
};

// Lane i: the sum of the lanes of dots[i].
template <typename T>
inline Vector<Accumulator<T>, DotGroup<T>::kSize> AddLanes(DotSum<T>* dots) {
  constexpr int kSize = DotGroup<T>::kSize;
  return FoldLanes<kSize, Accumulator<T>, kLanes<T>>(SumTransposed<kSize / 2>(dots));
}

template <typename T, bool kPlain>
struct ResultFactors {
  const T* weights = nullptr;  // one for each result, or null
  const T* weights_end = nullptr;
  Accumulator<T> scale = 1;  // of all

  ResultFactors From(int64_t n) const {
    return {weights ? weights + n : nullptr, weights_end, scale};
  }

  // Of the first `count` (1 to N) lanes; the others hold anything.
  template <int N>
  Vector<Accumulator<T>, N> Multiplied(Vector<Accumulator<T>, N> sums, int count) const {
    if (weights) {
      sums *= weights_end - weights >= N ? Load<T, N>(weights) : LoadPartial<T, N>(weights, count);
    }
    return sums * scale;
  }

  Accumulator<T> Multiplied(int64_t at, Accumulator<T> sum) const {
    return (weights ? sum * LoadScalar(weights + at) : sum) * scale;
  }

  // Those of `count` groups of kGroup values, `stride` values apart, whose weights go to `own`.
  template <int kGroup, int N>
  ResultFactors Gathered(int count, int64_t stride, T (&own)[N]) const {
    if (!weights) return *this;
    for (int i = 0; i < N; ++i) own[i] = T{};
    for (int i = 0; i < count; ++i) {
      __builtin_memcpy(own + i * kGroup, weights + i * stride, sizeof(T) * kGroup);
    }
    return {own, own + N, scale};
  }
};

// No factors, and known to the compiler: a branch at each store cost up to a tenth.
template <typename T>
struct ResultFactors<T, true> {
  ResultFactors From(int64_t) const { return {}; }

  template <int N>
  Vector<Accumulator<T>, N> Multiplied(Vector<Accumulator<T>, N> sums, int) const {
    return sums;
  }

  Accumulator<T> Multiplied(int64_t, Accumulator<T> sum) const { return sum; }

  template <int kGroup, int N>
  ResultFactors Gathered(int, int64_t, T (&)[N]) const {
    return {};
  }
};

template <typename T, bool kPlain>
struct Results : ResultFactors<T, kPlain> {
  using Factors = ResultFactors<T, kPlain>;
  using Acc = Accumulator<T>;

  T* out;

  Results(T* out, Factors factors) : Factors(factors), out(out) {}

  Results operator+(int64_t n) const { return {out + n, this->From(n)}; }

  template <int N>
  void Put(Vector<Acc, N> sums) const {
    Store<T, N>(out, this->template Multiplied<N>(sums, N));
  }

  // The first `count` (1 to N).
  template <int N>
  void PutPartial(Vector<Acc, N> sums, int count) const {
    StorePartial<T, N>(out, this->template Multiplied<N>(sums, count), count);
  }

  // The first `count` groups of kGroup values, `stride` values apart.
  template <int kGroup, int N>
  void PutGroups(Vector<Acc, N> sums, int count, int64_t stride) const {
    T parts[N], weights[N];
    const Results near(parts, this->template Gathered<kGroup>(count, stride, weights));
    near.template Put<N>(sums);
    for (int i = 0; i < count; ++i) {
      __builtin_memcpy(out + i * stride, parts + i * kGroup, sizeof(T) * kGroup);
    }
  }

  void PutScalar(int64_t at, Acc sum) const { StoreScalar(out + at, this->Multiplied(at, sum)); }
};

// Calls run(results) with the `count` results of one batch element, which begin at `out`.
template <typename Args, typename T, typename Run>
void WithResults(const Args& args, T* out, int64_t count, int64_t batch, Run run) {
  if (args.weights == nullptr && args.scale == nullptr) return run(Results<T, true>(out, {}));
  const T* weights = static_cast<const T*>(args.weights);
  if (weights) weights += batch * args.weights_stride;
  const auto* scale = static_cast<const Accumulator<T>*>(args.scale);
  run(Results<T, false>(out, {weights, weights ? weights + count : nullptr,
                              scale ? scale[batch * args.scale_stride] : Accumulator<T>(1)}));
}

}  // namespace sgap::SGAP_ISA
