// The columns of a dense operand in tiles, each walked by the tasks of all rows. A tile can be
// copied to a slab of memory of its own: what its tasks gather then fits in a cache, where rows a
// power of two apart would crowd into a few of its sets. Every thread has a slab and copies what it
// works on: lines that another core has written come slower than those of the operand itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/partition.h"

namespace sgap {

// Memory that one thread at a time works with.
struct alignas(64) Slab {
  int32_t busy = 0;
  const void* held = nullptr;  // where in the operand the tile begins that `memory` is a copy of
  void* memory;
};

struct Slabs {
  Slab* slabs;
  int64_t count;  // as many as threads; 0: no copies
};

// The tasks of a product that walks its rows once for each tile of each batch element.
struct ColumnTiles : RowTasks {
  const void* x;     // [batch or 1, k, n]
  int64_t x_stride;  // elements from one batch to the next, 0 where shared
  int64_t batch, k, n;
  int64_t tile_columns, tiles;
  Slabs slabs;

  int64_t Walks() const { return batch * tiles; }
  int64_t Tasks() const { return Walks() * row_tasks; }
};

namespace SGAP_ISA {

// One task on the columns [first, last) of a tile; x points at the tile's first row and column.
template <typename T>
struct TileTask {
  int64_t batch, first, last;
  const RowTask* rows;
  int64_t walk;
  const T* x;
  int64_t x_stride;  // from one row to the next
  Slab* slab;
};

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

template <typename T>
void CopyTile(const T* x, int64_t rows, int64_t stride, int64_t columns, T* slab) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t r = 0; r < rows; ++r, x += stride, slab += columns) {
    int64_t c = 0;
    for (; c + kLine <= columns; c += kLine) __builtin_memcpy(slab + c, x + c, 64);
    if (c < columns) __builtin_memcpy(slab + c, x + c, size_t(columns - c) * sizeof(T));
  }
}

// Takes a slab for the task and fills it, unless it holds the tile already: a thread takes
// neighbouring tasks, most of them of one tile.
template <typename T>
TileTask<T> BeginTask(const ColumnTiles& tiles, int64_t task) {
  TileTask<T> begun;
  const int64_t walk = task / tiles.row_tasks;
  // Batch elements may share x: they follow each other.
  begun.batch = walk % tiles.batch;
  begun.walk = walk;
  begun.rows = tiles.tasks + task % tiles.row_tasks;
  begun.slab = tiles.slabs.count > 0 ? TakeSlab(tiles.slabs) : nullptr;
  begun.first = walk / tiles.batch * tiles.tile_columns;
  begun.last =
      begun.first + tiles.tile_columns < tiles.n ? begun.first + tiles.tile_columns : tiles.n;
  begun.x = static_cast<const T*>(tiles.x) + begun.batch * tiles.x_stride + begun.first;
  begun.x_stride = tiles.n;
  if (begun.slab) {
    T* const copy = static_cast<T*>(begun.slab->memory);
    const int64_t columns = begun.last - begun.first;
    if (begun.slab->held != begun.x) CopyTile(begun.x, tiles.k, tiles.n, columns, copy);
    begun.slab->held = begun.x;
    begun.x = copy;
    begun.x_stride = columns;
  }
  return begun;
}

template <typename T>
void EndTask(const TileTask<T>& task) {
  if (task.slab) __atomic_store_n(&task.slab->busy, 0, __ATOMIC_RELEASE);
}

}  // namespace SGAP_ISA

}  // namespace sgap
