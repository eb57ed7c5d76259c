// The columns of a dense operand in tiles, each walked by the tasks of all rows. A tile can be
// copied to a slab of memory of its own: what its tasks gather then fits in a cache, where rows a
// power of two apart would crowd into a few of its sets. Every thread has a slab and copies what it
// works on: lines that another core has written come slower than those of the operand itself.
// A slab holds accumulators: 16-bit numbers are widened once, and not at each use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/partition.h"
#include "cpu/simd/simd.h"

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
struct TileTask {
  int64_t batch, first, last;
  const RowTask* rows;
  int64_t walk;
  const void* x;     // of accumulators in a slab, else of the operand's type
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
void CopyTile(const T* x, int64_t rows, int64_t stride, int64_t columns, Accumulator<T>* slab) {
  constexpr int kWidth = kLanes<T>;
  if (columns == stride) {  // rows follow each other: as one
    columns = stride = rows * columns;
    rows = 1;
  }
  for (int64_t r = 0; r < rows; ++r, x += stride, slab += columns) {
    int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) {
      Store<Accumulator<T>, kWidth>(slab + c, Load<T, kWidth>(x + c));
    }
    for (; c < columns; ++c) slab[c] = LoadScalar(x + c);
  }
}

// Takes a slab for the task and fills it, unless it holds the tile already: a thread takes
// neighbouring tasks, most of them of one tile.
template <typename T>
TileTask BeginTask(const ColumnTiles& tiles, int64_t task) {
  TileTask begun;
  const int64_t walk = task / tiles.row_tasks;
  // Batch elements may share x: they follow each other.
  begun.batch = walk % tiles.batch;
  begun.walk = walk;
  begun.rows = tiles.tasks + task % tiles.row_tasks;
  begun.slab = tiles.slabs.count > 0 ? TakeSlab(tiles.slabs) : nullptr;
  begun.first = walk / tiles.batch * tiles.tile_columns;
  begun.last =
      begun.first + tiles.tile_columns < tiles.n ? begun.first + tiles.tile_columns : tiles.n;
  const T* x = static_cast<const T*>(tiles.x) + begun.batch * tiles.x_stride + begun.first;
  begun.x = x;
  begun.x_stride = tiles.n;
  if (begun.slab) {
    auto* const copy = static_cast<Accumulator<T>*>(begun.slab->memory);
    const int64_t columns = begun.last - begun.first;
    if (begun.slab->held != x) CopyTile(x, tiles.k, tiles.n, columns, copy);
    begun.slab->held = x;
    begun.x = copy;
    begun.x_stride = columns;
  }
  return begun;
}

// Calls body(x) with the tile's x, whose type is T or Accumulator<T>.
template <typename T, typename Body>
void WithOperand(const TileTask& tile, Body&& body) {
  if (std::is_same_v<T, Accumulator<T>> || tile.slab) {
    body(static_cast<const Accumulator<T>*>(tile.x));
  } else {
    body(static_cast<const T*>(tile.x));
  }
}

inline void EndTask(const TileTask& task) {
  if (task.slab) __atomic_store_n(&task.slab->busy, 0, __ATOMIC_RELEASE);
}

}  // namespace SGAP_ISA

}  // namespace sgap
