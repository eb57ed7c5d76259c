// The product with the transpose of column vectors of V rows, walked by rows of the matrix:
//   y[batch, indices[p], :] += sum over v of values[batch, p, v] * x[batch, b V + v, :]
// for each vector p of block row b. The V rows of x stay in registers, so that each row of y that
// is loaded and stored takes V multiply-adds. Block rows are cut into pieces with sums of their
// own, which are added in order.
#pragma once

#include <cstdint>

#include "cpu/common/dtype.h"

namespace sgap {

struct SpmmScatterArgs {
  Dtype dtype;
  const void* values;      // [batch or 1, vectors, V]
  const int32_t* offsets;  // [block rows + 1]
  const int32_t* indices;  // [vectors]
  const void* x;           // [batch or 1, k, n]
  void* y;                 // [batch, m, n]
  int64_t m, k, n, length, blocks, batch;
  int64_t values_stride, x_stride;  // elements from one batch to the next, 0 where shared
  int64_t tile_columns, tiles;
  void* sums;  // accumulators [batch, pieces, tiles: [m, columns of the tile]]

  // task = (batch * pieces + piece) * tiles + tile, then batch * chunks + chunk of rows of y
  int64_t pieces;
  int64_t chunk_rows, chunks;
};

namespace SGAP_ISA {
void SpmmScatter(const SpmmScatterArgs& args, int64_t task);
}

}  // namespace sgap
