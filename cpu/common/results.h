// Where sums go, and what multiplies each before its one rounding.
#pragma once

#include "cpu/simd/simd.h"

namespace sgap::SGAP_ISA {

template <typename T, bool kPlain>
struct ResultFactors {
  const T* weights = nullptr;  // one for each number that goes out, or null
  const T* weights_end = nullptr;
  Accumulator<T> scale = 1;  // of all

  ResultFactors From(int64_t n) const {
    return {weights ? weights + n : nullptr, weights_end, scale};
  }

  // Of the first `count` (1 to N); the other lanes are any.
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

  // Those of `count` groups of kGroup numbers, `stride` numbers apart, whose weights go to `own`.
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

// None. It is known to the compiler: a branch at each store cost up to a tenth.
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

  // The first `count` groups of kGroup numbers, to every `stride` numbers.
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

// run(results) with those of one batch of an SDDMM, `count` from `out` on.
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
