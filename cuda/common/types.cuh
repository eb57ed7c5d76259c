// Number types of the kernels, their accumulators, and vector loads and stores of a row's columns.
// No CUDA header and no library: NVRTC compiles this as it is.
#pragma once

namespace sgap {

using Index = int;                // row offsets, column indices, permutations
using Size = unsigned long long;  // every address: a row times its columns overflows 32 bits

// Whether a launch is for several structures. Kernels for one do not pay for that: with the code
// below they would take more registers.
#ifndef SGAP_SEVERAL_STRUCTURES
#define SGAP_SEVERAL_STRUCTURES 0
#endif

// The structure of the block's element of the batch, and of those that the block takes after it.
// `sharing` is 2^32 divided by the number of neighbouring elements that share a structure, rounded
// up, or 0 where all share one. It is exact for elements and numbers up to 65535 (GRID_Z).
__device__ inline Size StructureOfBlock(long long sharing) {
  return SGAP_SEVERAL_STRUCTURES ? Size(blockIdx.z) * Size(sharing) >> 32 : 0;
}

// The same, computed where it is used, inside of a loop too: before the loop it would take
// registers all the way through.
__device__ inline Size StructureHere(long long sharing) {
  if (SGAP_SEVERAL_STRUCTURES) asm volatile("mov.u64 %0, %0;" : "+l"(sharing));
  return StructureOfBlock(sharing);
}

// Moves pointers to the index arrays of the first of several structures of one capacity, which lie
// one after the other, to those of the block's structure. A structure of `rows` rows has rows + 1
// offsets; its other arrays have `capacity` elements.
template <class Offsets, class... Arrays>
__device__ inline void MoveToStructure(long long sharing, Size rows, Offsets& offsets,
                                       Size capacity = 0, Arrays&... arrays) {
  const Size structure = StructureOfBlock(sharing);
  offsets += structure * (rows + 1);
  ((arrays += structure * capacity), ...);
}

// Threads that must fit on a multiprocessor: 64 registers each. Without this bound ptxas aims at 32
// registers for some kernels, and spills.
enum { kThreads = 1024 };
// The same for kernels whose lanes hold the sums of many rows: 128 registers each.
enum { kTileThreads = 512 };

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

// Sums are carried in float32 or, for float64, in float64.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float Widen(float x) { return x; }
__device__ inline double Widen(double x) { return x; }
__device__ inline float Widen(float16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
__device__ inline float Widen(bfloat16 x) {
  float wide;
  asm("mov.b32 %0, {0, %1};" : "=f"(wide) : "h"(x.bits));
  return wide;
}

// Rounds to nearest, ties to even.
__device__ inline void Narrow(float x, float& narrow) { narrow = x; }
__device__ inline void Narrow(double x, double& narrow) { narrow = x; }
__device__ inline void Narrow(float x, float16& narrow) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
}
__device__ inline void Narrow(float x, bfloat16& narrow) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
#else
  const unsigned bits = __float_as_uint(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
  narrow.bits = x == x ? rounded >> 16 : 0x7fff;
#endif
}

// The largest power of two that divides `bytes`, at most 16.
__device__ constexpr int Alignment(int bytes) {
  return (bytes & -bytes) < 16 ? bytes & -bytes : 16;
}

// Consecutive values that one instruction loads or stores (several for more than 16 bytes, and for
// numbers of values that are no power of two).
template <class T, int kCount>
struct alignas(Alignment(sizeof(T) * kCount)) Pack {
  T at[kCount];
};

// The address of row `row`, with rows `bytes` apart: a 32 x 32 bit multiplication. From C++ the
// compiler would widen both factors before a loop, and multiply 64 by 64 bits in it.
template <class T>
__device__ inline const T* RowAt(const T* rows, Index row, unsigned bytes) {
  Size at;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(at) : "r"(row), "r"(bytes));
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(rows) + at);
}

// The rows of a matrix, each shorter than 4 GiB: a launch has at most 65535 tiles of columns of B,
// and at most 65535 heads of 512 features.
template <class T>
struct GatheredRows {
  const T* first;
  unsigned bytes;

  __device__ GatheredRows(const T* first, Size width)
      : first(first), bytes(unsigned(width * sizeof(T))) {}
  __device__ const T* operator[](Index row) const { return RowAt(first, row, bytes); }
};

// The columns of a lane in one row of a row-major matrix. With kVector all kColumns of them exist
// and are aligned as a Pack; otherwise only the first `left` exist.

// Loads them; columns that do not exist are zeros.
template <bool kVector, int kColumns, class T>
__device__ inline Pack<T, kColumns> Load(const T* row, unsigned left) {
  Pack<T, kColumns> pack = {};
  if constexpr (kVector) {
    if constexpr (sizeof(T) == 2 && kColumns % 2 == 0) {
      // Loaded as whole words: a conditional load of each 16-bit half would take two instructions.
      using Words = Pack<unsigned, sizeof(pack) / 4>;
      Words words = {};
      if (left > 0) words = *reinterpret_cast<const Words*>(row);
      pack = __builtin_bit_cast(Pack<T, kColumns>, words);
    } else {
      if (left > 0) pack = *reinterpret_cast<const Pack<T, kColumns>*>(row);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j < left) pack.at[j] = row[j];
    }
  }
  return pack;
}

// sums += scale * row
template <bool kVector, class T, int kColumns>
__device__ inline void AddScaled(Accumulator<T> scale, const T* row, unsigned left,
                                 Accumulator<T> (&sums)[kColumns]) {
  if constexpr (kVector) {
    const auto pack = *reinterpret_cast<const Pack<T, kColumns>*>(row);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) sums[j] += scale * Widen(pack.at[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j < left) sums[j] += scale * Widen(row[j]);
    }
  }
}

// row = sums, rounded once
template <bool kVector, class T, int kColumns>
__device__ inline void Store(T* row, unsigned left, const Accumulator<T> (&sums)[kColumns]) {
  Pack<T, kColumns> pack;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) Narrow(sums[j], pack.at[j]);
  if constexpr (kVector) {
    *reinterpret_cast<Pack<T, kColumns>*>(row) = pack;
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (j < left) row[j] = pack.at[j];
    }
  }
}

// For __launch_bounds__: blocks that must fit on a multiprocessor, for kernels whose lanes have
// sums of so many bytes. Up to 32 bytes a lane has 64 registers, up to 64 bytes 128, else 255.
__device__ constexpr int BlocksOfSums(int block, int bytes) {
  const int threads = bytes <= 32 ? int(kThreads) : bytes <= 64 ? int(kTileThreads) : 256;
  return threads > block ? threads / block : 1;
}

// The bytes of a lane's sums of kColumns columns; kTwice: each has another number beside it, for
// which the registers suffice with up to four.
template <class T, int kColumns, bool kTwice = false>
__device__ constexpr int SumBytes() {
  return int(sizeof(Accumulator<T>)) * kColumns * (kTwice && kColumns > 4 ? 2 : 1);
}

// For __launch_bounds__, of kernels that need all registers that `blocks` blocks on a
// multiprocessor leave: for sm_120 ptxas takes a few more, and would spill to let all these blocks
// run at once.
__device__ constexpr int BlocksAtOnce(int blocks) {
#if __CUDA_ARCH__ >= 1200
  return blocks > 1 ? blocks * 3 / 4 : 1;
#else
  return blocks;
#endif
}

#if __CUDA_ARCH__ >= 900
// An even number of sums, to an address that is aligned as a Pack of them.
template <int kColumns>
__device__ inline void AddVector(float* row, const float (&sums)[kColumns]) {
  if constexpr (kColumns % 4 == 0) {
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) {
      asm volatile(
          "{ .reg .u64 at; cvta.to.global.u64 at, %0; "
          "red.global.add.v4.f32 [at], {%1, %2, %3, %4}; }" ::"l"(row + j),
          "f"(sums[j]), "f"(sums[j + 1]), "f"(sums[j + 2]), "f"(sums[j + 3])
          : "memory");
    }
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      asm volatile(
          "{ .reg .u64 at; cvta.to.global.u64 at, %0; red.global.add.v2.f32 [at], {%1, %2}; }" ::
              "l"(row + j),
          "f"(sums[j]), "f"(sums[j + 1])
          : "memory");
    }
  }
}
__device__ constexpr bool HasVectorAdd() { return true; }
#else
template <class A, int kColumns>
__device__ void AddVector(A* row, const A (&sums)[kColumns]);  // never called
__device__ constexpr bool HasVectorAdd() { return false; }
#endif

// row += sums, one atomic addition for each sum, in no fixed order among lanes
template <bool kVector, class A, int kColumns>
__device__ inline void AddAtomically(A* row, unsigned left, const A (&sums)[kColumns]) {
  if constexpr (HasVectorAdd() && kVector && kColumns % 2 == 0 && sizeof(A) == sizeof(float)) {
    AddVector(row, sums);
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (kVector || j < left) atomicAdd(row + j, sums[j]);
    }
  }
}

}  // namespace sgap
