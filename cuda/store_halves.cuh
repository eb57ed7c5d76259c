// Sums of consecutive 16-bit numbers, rounded once and stored together. Said in C++, as Store does,
// the compiler makes stores of two and four bytes of it.
#pragma once

#include "mma.cuh"

namespace sgap {

// numbers is aligned as a Pack of them.
template <class T, int kCount>
__device__ inline void StoreHalves(T* numbers, const float (&sums)[kCount]) {
  static_assert(sizeof(T) == 2 && (kCount == 2 || kCount == 4 || kCount == 8), "4 to 16 bytes");
  unsigned words[kCount / 2] = {};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    T narrow;
    Narrow(sums[j], narrow);
    words[j / 2] |= Bits(narrow) << (16 * (j % 2));
  }
  if constexpr (kCount == 8) {
    asm volatile(
        "{ .reg .u64 at; cvta.to.global.u64 at, %0; "
        "st.global.v4.b32 [at], {%1, %2, %3, %4}; }" ::"l"(numbers),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  } else if constexpr (kCount == 4) {
    asm volatile(
        "{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v2.b32 [at], {%1, %2}; }" ::"l"(
            numbers),
        "r"(words[0]), "r"(words[1])
        : "memory");
  } else {
    *reinterpret_cast<unsigned*>(numbers) = words[0];
  }
}

// The columns of a lane in a row, as Store says.
template <bool kVector, class T, int kCount>
__device__ inline void StoreColumns(T* row, unsigned left, const float (&sums)[kCount]) {
  if constexpr (kVector) {
    StoreHalves(row, sums);
  } else {
    Store<false>(row, left, sums);
  }
}

}  // namespace sgap
