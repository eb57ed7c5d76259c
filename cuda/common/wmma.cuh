// wmma m8n32k16 (PTX ISA, 9.7.14.4): D += A B by one warp, with A 8 x 16, B 16 x 32 and D 8 x 32;
// values in float16 or bfloat16, sums in float32. The layout of a fragment over the lanes is not
// documented, so fragments are loaded from shared memory and D is stored there.
//
// A matrix in shared memory begins at a multiple of 32 bytes, its rows (or columns) at multiples of
// 16. All lanes of the warp must call, with the same arguments. As with mma, values in a row of A
// or in a column of B reach no other row or column of D, NaN included.
#pragma once

#include "types.cuh"

namespace sgap {

// Whether a matrix is stored by rows or by columns.
enum class Along { kRow, kColumn };

// The instruction holds four copies of A in a warp for float16, one for bfloat16.
template <class T, Along kAlong>
struct WmmaA;
template <Along kAlong>
struct WmmaA<float16, kAlong> {
  unsigned at[8];
};
template <Along kAlong>
struct WmmaA<bfloat16, kAlong> {
  unsigned at[2];
};
template <class T, Along kAlong>
struct WmmaB {
  unsigned at[8];
};

// Macros, since the text of an instruction cannot depend on a template argument.
#define SGAP_LOAD_2(kind, at)                                                 \
  asm volatile("wmma.load." kind " {%0, %1}, [%2], %3;"                       \
               : "=r"(at[0]), "=r"(at[1])                                     \
               : "r"((unsigned)__cvta_generic_to_shared(start)), "r"(leading) \
               : "memory")
#define SGAP_LOAD_8(kind, at)                                                                  \
  asm volatile("wmma.load." kind " {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"                \
               : "=r"(at[0]), "=r"(at[1]), "=r"(at[2]), "=r"(at[3]), "=r"(at[4]), "=r"(at[5]), \
                 "=r"(at[6]), "=r"(at[7])                                                      \
               : "r"((unsigned)__cvta_generic_to_shared(start)), "r"(leading)                  \
               : "memory")

// `leading`: distance in values from one row (or column) to the next.
template <Along kAlong>
__device__ inline void LoadFragment(const float16* start, unsigned leading,
                                    WmmaA<float16, kAlong>& a) {
  if constexpr (kAlong == Along::kRow) {
    SGAP_LOAD_8("a.sync.aligned.row.m8n32k16.shared.f16", a.at);
  } else {
    SGAP_LOAD_8("a.sync.aligned.col.m8n32k16.shared.f16", a.at);
  }
}

template <Along kAlong>
__device__ inline void LoadFragment(const bfloat16* start, unsigned leading,
                                    WmmaA<bfloat16, kAlong>& a) {
  if constexpr (kAlong == Along::kRow) {
    SGAP_LOAD_2("a.sync.aligned.row.m8n32k16.shared.bf16", a.at);
  } else {
    SGAP_LOAD_2("a.sync.aligned.col.m8n32k16.shared.bf16", a.at);
  }
}

template <Along kAlong>
__device__ inline void LoadFragment(const float16* start, unsigned leading,
                                    WmmaB<float16, kAlong>& b) {
  if constexpr (kAlong == Along::kRow) {
    SGAP_LOAD_8("b.sync.aligned.row.m8n32k16.shared.f16", b.at);
  } else {
    SGAP_LOAD_8("b.sync.aligned.col.m8n32k16.shared.f16", b.at);
  }
}

template <Along kAlong>
__device__ inline void LoadFragment(const bfloat16* start, unsigned leading,
                                    WmmaB<bfloat16, kAlong>& b) {
  if constexpr (kAlong == Along::kRow) {
    SGAP_LOAD_8("b.sync.aligned.row.m8n32k16.shared.bf16", b.at);
  } else {
    SGAP_LOAD_8("b.sync.aligned.col.m8n32k16.shared.bf16", b.at);
  }
}

#undef SGAP_LOAD_2
#undef SGAP_LOAD_8

#define SGAP_SUMS(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define SGAP_WORDS(x) \
  "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7])
#define SGAP_MULTIPLY_8(kind)                               \
  asm volatile("wmma.mma.sync.aligned." kind                \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, "        \
               "{%8, %9, %10, %11, %12, %13, %14, %15}, "   \
               "{%16, %17, %18, %19, %20, %21, %22, %23}, " \
               "{%0, %1, %2, %3, %4, %5, %6, %7};"          \
               : SGAP_SUMS(d)                               \
               : SGAP_WORDS(a.at), SGAP_WORDS(b.at))
#define SGAP_MULTIPLY_2(kind)                                         \
  asm volatile("wmma.mma.sync.aligned." kind                          \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, "                  \
               "{%8, %9}, {%10, %11, %12, %13, %14, %15, %16, %17}, " \
               "{%0, %1, %2, %3, %4, %5, %6, %7};"                    \
               : SGAP_SUMS(d)                                         \
               : "r"(a.at[0]), "r"(a.at[1]), SGAP_WORDS(b.at))

// The two layouts that suit a gather: C = A B with columns of A and rows of B in memory, and X Y^T
// with rows of both.
__device__ inline void MultiplyAdd(const WmmaA<float16, Along::kColumn>& a,
                                   const WmmaB<float16, Along::kRow>& b, float (&d)[8]) {
  SGAP_MULTIPLY_8("col.row.m8n32k16.f32.f32");
}
__device__ inline void MultiplyAdd(const WmmaA<float16, Along::kRow>& a,
                                   const WmmaB<float16, Along::kColumn>& b, float (&d)[8]) {
  SGAP_MULTIPLY_8("row.col.m8n32k16.f32.f32");
}
__device__ inline void MultiplyAdd(const WmmaA<bfloat16, Along::kColumn>& a,
                                   const WmmaB<bfloat16, Along::kRow>& b, float (&d)[8]) {
  SGAP_MULTIPLY_2("col.row.m8n32k16.f32.bf16.bf16.f32");
}
__device__ inline void MultiplyAdd(const WmmaA<bfloat16, Along::kRow>& a,
                                   const WmmaB<bfloat16, Along::kColumn>& b, float (&d)[8]) {
  SGAP_MULTIPLY_2("row.col.m8n32k16.f32.bf16.bf16.f32");
}

// Stores D by rows, which are `leading` values (a multiple of 4) apart.
__device__ inline void StoreFragment(float* start, unsigned leading, const float (&d)[8]) {
  asm volatile(
      "wmma.store.d.sync.aligned.row.m8n32k16.shared.f32 [%0], "
      "{%1, %2, %3, %4, %5, %6, %7, %8}, %9;" ::"r"((unsigned)__cvta_generic_to_shared(start)),
      "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3]), "f"(d[4]), "f"(d[5]), "f"(d[6]), "f"(d[7]),
      "r"(leading)
      : "memory");
}

#undef SGAP_MULTIPLY_2
#undef SGAP_MULTIPLY_8
#undef SGAP_WORDS
#undef SGAP_SUMS

}  // namespace sgap
