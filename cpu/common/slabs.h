// Copies of a dense operand, or of a tile of its columns, as accumulators: what tasks read from a
// copy follows each other, and 16-bit values are widened once, not at each use. Every thread has a
// slab and copies what it works on: lines that another core has written come slower than those of
// the operand itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/machine.h"
#include "cpu/simd/simd.h"

namespace sgap {

// Memory that one thread at a time works with.
struct alignas(64) Slab {
  int32_t busy = 0;
  const void* held = nullptr;  // where in the operand begins what `memory` is a copy of
  void* memory;
};

struct Slabs {
  Slab* slabs;
  int64_t count;  // as many as threads; 0: no copies
};

namespace SGAP_ISA {

// The slab that this thread had last may hold the right columns, in this core's cache.
inline thread_local int64_t last_slab = 0;

inline Slab* TakeSlab(const Slabs& slabs) {
  int64_t i = last_slab < slabs.count ? last_slab : 0;
  while (__atomic_exchange_n(&slabs.slabs[i].busy, 1, __ATOMIC_ACQUIRE)) {
    i = i + 1 < slabs.count ? i + 1 : 0;
  }
  last_slab = i;
  return slabs.slabs + i;
}

// The same if one is free, or null: of several calls that run together each has slabs for its share
// of the threads (Pool::num_threads), but all threads may take tasks of one of them.
inline Slab* FreeSlab(const Slabs& slabs) {
  int64_t i = last_slab < slabs.count ? last_slab : 0;
  for (int64_t tried = 0; tried < slabs.count; ++tried) {
    if (!__atomic_exchange_n(&slabs.slabs[i].busy, 1, __ATOMIC_ACQUIRE)) {
      last_slab = i;
      return slabs.slabs + i;
    }
    i = i + 1 < slabs.count ? i + 1 : 0;
  }
  return nullptr;
}

inline void GiveBack(Slab* slab) { __atomic_store_n(&slab->busy, 0, __ATOMIC_RELEASE); }

// Lanes of floating-point instructions among narrower ones: on Intel a few of 64 bytes slow down
// all others (Xeon, family 6 model 167: with a column x copied in registers of 32 bytes products
// with vectors of 2 float16 and one column took 0.92 of the time).
template <typename T>
constexpr int kNarrowLanes = (kVectorBytes < 32 ? kVectorBytes : 32) / sizeof(Accumulator<T>);

// Rows of `columns` accumulators that follow each other, of rows that are `stride` apart.
template <typename T, int kWidth = kLanes<T>>
void CopyRows(const T* x, int64_t rows, int64_t stride, int64_t columns, Accumulator<T>* copy) {
  if constexpr (std::is_same_v<T, Float16> && kWidth > kNarrowLanes<T>) {
    if (columns < kWidth && ThisMachine().intel) {
      return CopyRows<T, kNarrowLanes<T>>(x, rows, stride, columns, copy);
    }
  }
  if (columns == stride) {  // rows follow each other: as one
    columns = stride = rows * columns;
    rows = 1;
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, copy += columns) {
    int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) {
      Store<Accumulator<T>, kWidth>(copy + c, Load<T, kWidth>(x + c));
    }
    for (; c < columns; ++c) copy[c] = LoadScalar(x + c);
  }
}

// The slab's copy of rows of x, made unless it holds them: a thread takes neighbouring tasks, most
// of them of the same rows.
template <typename T>
Accumulator<T>* CopyIn(Slab* slab, const T* x, int64_t rows, int64_t stride, int64_t columns) {
  auto* const copy = static_cast<Accumulator<T>*>(slab->memory);
  if (slab->held != x) CopyRows(x, rows, stride, columns, copy);
  slab->held = x;
  return copy;
}

}  // namespace SGAP_ISA

}  // namespace sgap
