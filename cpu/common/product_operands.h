// What the handlers of a sparse operand times x [batch or 1, k, n] take from their operands.
#pragma once

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/structure.h"

namespace sgap {

// Of values [batch or 1, ...] and y [batch, m, n], which have been checked.
template <class Args>
void SetOperands(xla::ffi::AnyBuffer values, xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer y,
                 Args& args) {
  const int64_t value_batch = values.dimensions()[0];
  args.dtype = *ToDtype(values.element_type());
  args.values = values.untyped_data();
  args.x = x.untyped_data();
  args.y = y.untyped_data();
  args.m = y.dimensions()[1];
  args.k = x.dimensions()[1];
  args.n = x.dimensions()[2];
  args.values_stride = value_batch > 1 ? values.element_count() / value_batch : 0;
  args.x_stride = x.dimensions()[0] == 1 ? 0 : args.k * args.n;
}

// Of checked shapes, with indices in 0 .. size - 1; an empty permutation is none.
inline Structure OfArrays(xla::ffi::AnyBuffer offsets, xla::ffi::AnyBuffer indices,
                          xla::ffi::AnyBuffer permutation, int64_t size) {
  const int32_t* places = permutation.element_count() > 0 ? Ints(permutation) : nullptr;
  const int64_t rows = offsets.dimensions()[0] - 1, nnz = indices.dimensions()[0];
  return {Ints(offsets), Ints(indices), places, rows, nnz, size};
}

}  // namespace sgap
