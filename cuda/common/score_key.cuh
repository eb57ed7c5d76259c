// Integers in the order of scores, for selections among them.
#pragma once

#include "types.cuh"

namespace sgap {

// 0 for -infinity, 1 for NaN, then the numbers; -0 is 0. In integers, so that no mode of the float
// unit takes subnormal numbers for 0. No score has the greatest integer, which callers may
// use for what comes before all scores.
template <class Key>
__device__ inline Key KeyOfBits(Key bits, Key infinity) {
  const Key sign = Key(1) << (8 * sizeof(Key) - 1);
  if ((bits & ~sign) > infinity) return 1;
  if (bits == (sign | infinity)) return 0;
  if (bits == sign) return sign;
  return bits & sign ? ~bits : bits | sign;
}
__device__ inline unsigned KeyOf(float score) {
  return KeyOfBits(__float_as_uint(score), 0x7f800000u);
}
__device__ inline Size KeyOf(double score) {
  return KeyOfBits(Size(__double_as_longlong(score)), Size(0x7ff) << 52);
}

template <class T>
using ScoreKey = decltype(KeyOf(Accumulator<T>()));

}  // namespace sgap
