// How a call on rows is cut into tasks and phases, and its memory: partial results, slabs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/common/column_tiles.h"
#include "cpu/common/partition.h"
#include "cpu/common/structure.h"
#include "cpu/common/workspace.h"
#include "cpu/row_reduce/row_reduce.h"

namespace sgap {

// Owns what the RowTasks of a product point to, until its last task is done.
struct ProductPlan {
  RowPartition partition;
  std::unique_ptr<char[]> partials;
  std::unique_ptr<int32_t[]> remaining;

  // The rows are walked `walks` times, and a piece leaves `piece_bytes` of partial results in all.
  RowTasks Cut(const int32_t* offsets, int64_t m, int64_t chunk, int64_t walks,
               size_t piece_bytes) {
    partition = PartitionRows(offsets, m, chunk, /*split_rows=*/true);
    const auto split_rows = static_cast<int64_t>(partition.splits.size());
    if (partition.pieces > 0) {
      partials.reset(new char[size_t(partition.pieces) * piece_bytes]);
      remaining.reset(new int32_t[size_t(walks * split_rows)]);
      for (int64_t i = 0; i < walks * split_rows; ++i) {
        remaining[i] = partition.splits[i % split_rows].pieces;
      }
    }
    return {partition.tasks.data(),  static_cast<int64_t>(partition.tasks.size()),
            partition.splits.data(), split_rows,
            partition.pieces,        partials.get(),
            remaining.get()};
  }
};

// Owns the slabs of a product's tiles, until its last task is done.
struct TilePlan {
  std::unique_ptr<Slab[]> slabs;
  Workspace memory;

  // Of n, batch: tiles of so many columns, or of all where that is 0.
  static void Cut(int64_t tile_columns, ColumnTiles* tiles) {
    tiles->tile_columns = tile_columns == 0 ? tiles->n : std::min(tile_columns, tiles->n);
    tiles->tiles = (tiles->n + tiles->tile_columns - 1) / tiles->tile_columns;
    tiles->slabs = {};
  }

  // A slab for each of `threads`, x having `element` bytes a number. Where there is no memory for
  // them the product is slower, and as right.
  void AddSlabs(size_t element, int64_t threads, ColumnTiles* tiles) {
    const int64_t count = std::max<int64_t>(std::min(threads, tiles->Tasks()), 1);
    const size_t bytes = (size_t(tiles->k) * tiles->tile_columns * element + 63) / 64 * 64;
    memory = AcquireWorkspace(size_t(count) * bytes);
    if (!memory || bytes == 0) return;
    slabs.reset(new Slab[count]);
    for (int64_t i = 0; i < count; ++i)
      slabs[i].memory = static_cast<char*>(memory.get()) + i * bytes;
    tiles->slabs = {slabs.get(), count};
  }
};

// Vectors of a task that has about so many numbers.
inline int64_t ChunkOfVectors(int64_t chunk_nonzeros, int64_t length) {
  return chunk_nonzeros > length ? chunk_nonzeros / length : 1;
}

struct RowPlan {
  ValidOffsets offsets;
  RowPartition partition;
  std::vector<RowTask> piece_tasks;
  std::vector<double> partials, totals;

  // Block rows of `length` of the `rows` rows, `vectors` in all; a task has about chunk_nonzeros
  // numbers.
  RowPhases Cut(const int32_t* given, int64_t rows, int64_t length, int64_t vectors, int64_t batch,
                int64_t chunk_nonzeros) {
    const int64_t block_rows = (rows + length - 1) / length;
    offsets = ValidOffsets(given, block_rows, vectors);
    partition = PartitionRows(offsets.data(), block_rows, ChunkOfVectors(chunk_nonzeros, length),
                              /*split_rows=*/true);
    for (const RowTask& task : partition.tasks) {
      if (task.piece >= 0) piece_tasks.push_back(task);
    }
    partials.resize(size_t(batch) * partition.pieces * 2 * length);
    totals.resize(size_t(batch) * partition.splits.size() * 2 * length);
    RowPhases phases;
    phases.offsets = offsets.data();
    phases.rows = rows;
    phases.length = length;
    phases.tasks = partition.tasks.data();
    phases.row_tasks = static_cast<int64_t>(partition.tasks.size());
    phases.splits = partition.splits.data();
    phases.split_rows = static_cast<int64_t>(partition.splits.size());
    phases.piece_tasks = piece_tasks.data();
    phases.pieces = partition.pieces;
    phases.batch = batch;
    phases.partials = partials.data();
    phases.totals = totals.data();
    return phases;
  }
};

// Tasks per phase. Without `write` the pieces have nothing to do once they are combined.
inline std::vector<int64_t> PhaseTasks(const RowPhases& phases, bool write) {
  return {phases.batch * phases.row_tasks, phases.batch * phases.split_rows,
          write ? phases.batch * phases.pieces : 0};
}

}  // namespace sgap
