#include "cpu/common/each_structure.h"

#include <algorithm>
#include <string>

namespace sgap {

const XLA_FFI_Buffer* StructureSlice::Part(xla::ffi::AnyBuffer buffer, int64_t count,
                                           size_t dropped) {
  const auto shape = buffer.dimensions();
  Owned& own = parts_.emplace_back();
  own.shape.assign(shape.begin() + dropped, shape.end());
  if (dropped == 0) own.shape[0] = count;
  const size_t bytes = structures_ == 0 ? 0 : buffer.size_bytes() / structures_;
  own.buffer = {XLA_FFI_Buffer_STRUCT_SIZE,
                nullptr,
                static_cast<XLA_FFI_DataType>(buffer.element_type()),
                static_cast<char*>(buffer.untyped_data()) + structure_ * bytes,
                static_cast<int64_t>(own.shape.size()),
                own.shape.data()};
  return &own.buffer;
}

void StructureCount::See(IndexArray buffer) {
  const auto shape = buffer.dimensions();
  if (shape.size() < 2) {
    single_ |= buffer.element_count() > 0;
    return;
  }
  several_counts_ |= found_ && *found_ != shape[0];
  found_ = shape[0];
}

void StructureCount::See(xla::ffi::AnyBuffer buffer) {
  if (buffer.dimensions().size() > 0) batches_.push_back(buffer.dimensions()[0]);
}

std::string StructureCount::Error() const {
  if (single_ || several_counts_) return "index arrays: expected all of them for each structure";
  for (const int64_t batch : batches_) {
    if (batch == 1 || (*found_ > 0 ? batch % *found_ == 0 : batch == 0)) continue;
    return "expected batches of 1 or a multiple of the " + std::to_string(*found_) +
           " structures, got " + std::to_string(batch);
  }
  return "";
}

}  // namespace sgap
