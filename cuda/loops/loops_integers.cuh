// Functions that loops over integers call (sgap_jax/compiler/cuda/print_cuda.py). Integers are
// added, subtracted and multiplied as unsigned, so that they wrap: signed overflow is undefined.
#pragma once

#include "loops.cuh"

namespace sgap {

template <class A>
__device__ inline A WrappedSum(A x, A y) {
  return A(Size(x) + Size(y));
}

template <class A>
__device__ inline A WrappedDifference(A x, A y) {
  return A(Size(x) - Size(y));
}

template <class A>
__device__ inline A WrappedProduct(A x, A y) {
  return A(Size(x) * Size(y));
}

// The second operand may have another type: a shuffle widens it.
struct WrappedAdd {
  template <class A, class B>
  __device__ A operator()(A x, B y) const {
    return WrappedSum(x, A(y));
  }
};

struct GreaterInteger {
  template <class A, class B>
  __device__ A operator()(A x, B y) const {
    return x > A(y) ? x : A(y);
  }
};

struct LessInteger {
  template <class A, class B>
  __device__ A operator()(A x, B y) const {
    return x < A(y) ? x : A(y);
  }
};

// *at = Combine(*at, value), atomically.
template <class Combine>
struct AtomicInteger {
  __device__ static void Update(int* at, int value) {
    Swap(at, reinterpret_cast<unsigned*>(at), value);
  }

  __device__ static void Update(long long* at, long long value) {
    Swap(at, reinterpret_cast<Size*>(at), value);
  }

  __device__ static void Update(signed char* at, signed char value) { SwapByte(at, value); }
  __device__ static void Update(unsigned char* at, unsigned char value) { SwapByte(at, value); }

 private:
  template <class A, class Bits>
  __device__ static void Swap(A* at, Bits* bits, A value) {
    A seen = *reinterpret_cast<volatile A*>(at), before;
    do {
      before = seen;
      seen = A(atomicCAS(bits, Bits(before), Bits(Combine()(before, value))));
    } while (seen != before);
  }

  // Updates one byte through its aligned 32-bit word, all of which is allocated; the other three
  // bytes are written back unchanged.
  template <class A>
  __device__ static void SwapByte(A* at, A value) {
    const unsigned shift = unsigned(Size(at) % 4) * 8;
    unsigned* word = reinterpret_cast<unsigned*>(Size(at) / 4 * 4);
    unsigned seen = *reinterpret_cast<volatile unsigned*>(word), before;
    do {
      before = seen;
      const unsigned byte = (unsigned char)(Combine()(A(before >> shift), value));
      seen = atomicCAS(word, before, (before & ~(255u << shift)) | byte << shift);
    } while (seen != before);
  }
};

template <>
struct Atomically<WrappedAdd> : AtomicInteger<WrappedAdd> {};
template <>
struct Atomically<GreaterInteger> : AtomicInteger<GreaterInteger> {};
template <>
struct Atomically<LessInteger> : AtomicInteger<LessInteger> {};

}  // namespace sgap
