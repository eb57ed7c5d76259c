// The rows of a dense operand, cut into tiles of columns that are each contiguous: what one tile
// gathers then fits in a cache, where rows a power of two apart would crowd into a few of its sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sgap {

// source [batch, rows, columns] -> packed: per batch element one [rows, width] per tile, one after
// another.
struct Packing {
  const void* source;
  void* packed;
  int64_t rows, columns, tile_columns;
  int64_t chunk_rows, chunks;  // task = batch * chunks + chunk of rows

  // Where a tile begins, within the batch element.
  int64_t TileOffset(int64_t first_column) const { return rows * first_column; }
};

// Of a source of `element` bytes a number, cut into tasks of some 64 KiB.
inline Packing PlanPacking(const void* source, void* packed, int64_t rows, int64_t columns,
                           int64_t tile_columns, int64_t element) {
  const int64_t fit = (64 << 10) / (columns * element), chunk_rows = fit > 1 ? fit : 1;
  const int64_t chunks = (rows + chunk_rows - 1) / chunk_rows;
  return {source, packed, rows, columns, tile_columns, chunk_rows, chunks};
}

namespace SGAP_ISA {

template <typename T>
void Pack(const Packing& packing, int64_t task) {
  const int64_t batch = task / packing.chunks, chunk = task % packing.chunks;
  const int64_t n = packing.columns, begin = chunk * packing.chunk_rows;
  const int64_t end =
      begin + packing.chunk_rows < packing.rows ? begin + packing.chunk_rows : packing.rows;
  const T* source = static_cast<const T*>(packing.source) + batch * packing.rows * n;
  T* packed = static_cast<T*>(packing.packed) + batch * packing.rows * n;
  for (int64_t first = 0; first < n; first += packing.tile_columns) {
    const int64_t width = n - first < packing.tile_columns ? n - first : packing.tile_columns;
    T* tile = packed + packing.TileOffset(first);
    for (int64_t r = begin; r < end; ++r) {
      __builtin_memcpy(tile + r * width, source + r * n + first, size_t(width) * sizeof(T));
    }
  }
}

}  // namespace SGAP_ISA

}  // namespace sgap
