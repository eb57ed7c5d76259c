// mma.m8n8k4 (PTX ISA, 9.7.14.5.1): one warp computes four products D += A B, with A 8 x 4, B 4 x 8
// and D 8 x 8; values in float16, sums in float32. Product q belongs to octet q: the low group of
// lanes 4q to 4q + 3 and the high group of lanes 4q + 16 to 4q + 19. With t = lane % 4 a lane holds
//
//   row of A along its registers  row t of its half (high group: t + 4), k = 0 to 3
//   column of A                   rows 0 to 3 of its half, k = t
//   B the same, with columns for rows
//   D d[i]                        row (t & 1) + (i & 2) of its half, column (i & 4) + (t & 2) + (i
//   & 1)
//
// The instruction was made for sm_70. For sm_80 and later compilers expand it to some 20 shuffles
// and 32 multiply-adds on CUDA cores: no tensor core is used there.
#pragma once

#include "types.cuh"

namespace sgap {

// All lanes of the warp must call. A is held by columns, B by rows.
__device__ inline void MultiplyColumnsByRows(unsigned a0, unsigned a1, unsigned b0, unsigned b1,
                                             float (&d)[8]) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// A is held by rows, B by columns.
__device__ inline void MultiplyRowsByColumns(unsigned a0, unsigned a1, unsigned b0, unsigned b1,
                                             float (&d)[8]) {
  asm volatile(
      "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

}  // namespace sgap
