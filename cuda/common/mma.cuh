// Tensor cores: D += A B by one warp, with A 16 x kDepth and B kDepth x 8, and the functions that
// load, round and pack its fragments.
//
// With g = lane / 4 and t = lane % 4 (PTX ISA, 9.7.14) a lane holds
//
//           float16, bfloat16: kDepth = 16,           float as tf32: kDepth = 8,
//           two values a register, at k and k + 1     one value a register
//   A a[0]  row g,     k = 2t                         row g,     k = t
//     a[1]  row g + 8, k = 2t                         row g + 8, k = t
//     a[2]  row g,     k = 2t + 8                     row g,     k = t + 4
//     a[3]  row g + 8, k = 2t + 8                     row g + 8, k = t + 4
//   B b[0]  k = 2t,     column g                      k = t,     column g
//     b[1]  k = 2t + 8, column g                      k = t + 4, column g
//   D d[0], d[1]  row g,     columns 2t and 2t + 1    the same
//     d[2], d[3]  row g + 8, columns 2t and 2t + 1
//
// The order of k is free as long as A and B have the same. Rows of A and columns of B are
// independent: values in one of them, NaN included, reach no other row or column of D.
#pragma once

#include "types.cuh"

namespace sgap {

template <class T>
struct MmaOf {
  enum { kDepth = 16 };
};
template <>
struct MmaOf<float> {
  enum { kDepth = 8 };
};

// All lanes of the warp must call. Sums are carried in float32; a tensor core rounds them toward
// zero.
template <class T>
__device__ void MultiplyAdd(const unsigned (&a)[4], const unsigned (&b)[2], float (&d)[4]);

template <>
__device__ inline void MultiplyAdd<float16>(const unsigned (&a)[4], const unsigned (&b)[2],
                                            float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void MultiplyAdd<bfloat16>(const unsigned (&a)[4], const unsigned (&b)[2],
                                             float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Registers must come from RoundToTf32.
template <>
__device__ inline void MultiplyAdd<float>(const unsigned (&a)[4], const unsigned (&b)[2],
                                          float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds to nearest, ties away from zero: without it the tensor core truncates the low bits.
__device__ inline unsigned RoundToTf32(float x) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// Packs two 16-bit values in a register: the lower halves of x and y, or the upper ones.
__device__ inline unsigned PackLow(unsigned x, unsigned y) { return __byte_perm(x, y, 0x5410); }
__device__ inline unsigned PackHigh(unsigned x, unsigned y) { return __byte_perm(x, y, 0x7632); }

// Rounds two values to 16 bits and packs them, the first in the lower half.
template <class T>
__device__ inline unsigned PackPair(float low, float high) {
  T first, second;
  Narrow(low, first);
  Narrow(high, second);
  return unsigned(first.bits) | unsigned(second.bits) << 16;
}

// Transposes an 8 x 8 matrix of 16-bit values: a lane gives columns 2t and 2t + 1 of row g, and
// gets rows 2t and 2t + 1 of column g. All lanes of the warp must call.
__device__ inline unsigned TransposeMatrix(unsigned pair) {
  unsigned turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

__device__ inline unsigned Bits(float x) { return __float_as_uint(x); }
__device__ inline unsigned Bits(float16 x) { return x.bits; }
__device__ inline unsigned Bits(bfloat16 x) { return x.bits; }

// Loads consecutive values as kWords registers, with zeros from value `left` on. With kVector all
// of them exist, aligned as a Pack, or none does; otherwise the first `left` exist.
template <bool kVector, int kWords, class T>
__device__ inline Pack<unsigned, kWords> LoadWords(const T* values, unsigned left) {
  enum { kInWord = 4 / sizeof(T) };
  Pack<unsigned, kWords> words = {};
  if constexpr (kVector) {
    if (left > 0) words = *reinterpret_cast<const Pack<unsigned, kWords>*>(values);
  } else {
#pragma unroll
    for (int j = 0; j < kWords * kInWord; ++j) {
      if (j < left) words.at[j / kInWord] |= Bits(values[j]) << (32 / kInWord * (j % kInWord));
    }
  }
  return words;
}

// Rounds sums once and stores them in one instruction: 4, 8 or 16 bytes, aligned as a Pack of them.
// Assembly, since from C++ the compiler makes several stores where it cannot see that the address
// is aligned.
template <class T, int kCount>
__device__ inline void StoreTogether(T* values, const float (&sums)[kCount]) {
  enum { kInWord = 4 / sizeof(T), kWords = kCount / kInWord };
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "4, 8 or 16 bytes");
  unsigned words[kWords] = {};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    T narrow;
    Narrow(sums[j], narrow);
    words[j / kInWord] |= Bits(narrow) << (32 / kInWord * (j % kInWord));
  }
  if constexpr (kWords == 4) {
    asm volatile(
        "{ .reg .u64 at; cvta.to.global.u64 at, %0; "
        "st.global.v4.b32 [at], {%1, %2, %3, %4}; }" ::"l"(values),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile(
        "{ .reg .u64 at; cvta.to.global.u64 at, %0; st.global.v2.b32 [at], {%1, %2}; }" ::"l"(
            values),
        "r"(words[0]), "r"(words[1])
        : "memory");
  } else {
    *reinterpret_cast<unsigned*>(values) = words[0];
  }
}

// Stores a lane's values of a row: with kVector all of them, otherwise the first `left`.
template <bool kVector, class T, int kCount>
__device__ inline void StoreWords(T* row, unsigned left, const float (&sums)[kCount]) {
  if constexpr (kVector) {
    StoreTogether(row, sums);
  } else {
    Store<false>(row, left, sums);
  }
}

// The store policy that overwrites the values of a row with the rounded sums.
template <bool kVector>
struct Rounded {
  template <class T, int kCount>
  __device__ static void Put(T* row, unsigned left, const float (&sums)[kCount]) {
    StoreWords<kVector>(row, left, sums);
  }
};

// The store policy that keeps the sums in float32, for another launch that adds to them.
template <bool kVector>
struct Whole {
  template <int kCount>
  __device__ static void Put(float* row, unsigned left, const float (&sums)[kCount]) {
    Store<kVector>(row, left, sums);
  }
};

}  // namespace sgap
