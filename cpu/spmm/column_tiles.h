// The columns of a dense operand in tiles, each walked by the tasks of all rows. A tile can be
// copied to a slab (cpu/common/slabs.h): what its tasks gather then fits in a cache, where rows a
// power of two apart would crowd into a few of its sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/common/partition.h"
#include "cpu/common/slabs.h"
#include "cpu/simd/pairs.h"
#include "cpu/simd/simd.h"

namespace sgap {

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

// Takes a slab for the task, with its tile, if one is free. bfloat16 waits for one where products
// are of pairs: without a packed tile these have other last bits.
template <typename T>
TileTask BeginTask(const ColumnTiles& tiles, int64_t task) {
  TileTask begun;
  const int64_t walk = task / tiles.row_tasks;
  // Batch elements may share x: they follow each other.
  begun.batch = walk % tiles.batch;
  begun.walk = walk;
  begun.rows = tiles.tasks + task % tiles.row_tasks;
  const bool waits = kInPairs<T> && tiles.slabs.count > 0;
  begun.slab = waits ? TakeSlab(tiles.slabs) : FreeSlab(tiles.slabs);
  begun.first = walk / tiles.batch * tiles.tile_columns;
  begun.last =
      begun.first + tiles.tile_columns < tiles.n ? begun.first + tiles.tile_columns : tiles.n;
  const T* x = static_cast<const T*>(tiles.x) + begun.batch * tiles.x_stride + begun.first;
  begun.x = x;
  begun.x_stride = tiles.n;
  if (begun.slab) {
    begun.x_stride = begun.last - begun.first;
    begun.x = CopyIn(begun.slab, x, tiles.k, tiles.n, begun.x_stride);
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
  if (task.slab) GiveBack(task.slab);
}

}  // namespace SGAP_ISA

}  // namespace sgap
