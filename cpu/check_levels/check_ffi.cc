// Structures that are only known at run time. FFI targets sgap_check_csr_v1, which fails for one
// that is wrong, and sgap_valid_offsets_v1, which makes offsets valid.
#include <algorithm>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/structure.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

std::string At(const char* name, int64_t position) {
  return std::string(name) + "[" + std::to_string(position) + "]: ";
}

std::string CheckOffsets(const int32_t* offsets, int64_t m, int64_t nnz) {
  if (offsets[0] != 0) {
    return At("row_offsets", 0) + "expected 0, got " + std::to_string(offsets[0]);
  }
  for (int64_t r = 0; r < m; ++r) {
    if (offsets[r + 1] < offsets[r]) {
      return At("row_offsets", r + 1) + "expected at least " + std::to_string(offsets[r]) +
             " (row " + std::to_string(r) + " begins there), got " + std::to_string(offsets[r + 1]);
    }
  }
  if (offsets[m] > nnz) {
    return At("row_offsets", m) + "expected at most nnz=" + std::to_string(nnz) + ", got " +
           std::to_string(offsets[m]);
  }
  return "";
}

std::string CheckIndices(const int32_t* offsets, int64_t m, const int32_t* indices,
                         int64_t columns) {
  constexpr int64_t kBlock = 4096;
  const int64_t stored = offsets[m];
  for (int64_t begin = 0; begin < stored; begin += kBlock) {
    const int64_t end = std::min(stored, begin + kBlock);
    int32_t least = 0, greatest = 0;
    for (int64_t p = begin; p < end; ++p) {
      least = std::min(least, indices[p]);
      greatest = std::max(greatest, indices[p]);
    }
    if (least >= 0 && greatest < columns) continue;
    for (int64_t p = begin; p < end; ++p) {
      if (indices[p] >= 0 && indices[p] < columns) continue;
      const int64_t row = std::upper_bound(offsets, offsets + m + 1, p) - offsets - 1;
      return At("column_indices", p) + "(row " + std::to_string(row) +
             "): expected 0 <= column < " + std::to_string(columns) + ", got " +
             std::to_string(indices[p]);
    }
  }
  return "";
}

// Within a row, columns rise: neither unsorted nor stored twice.
std::string CheckOrder(const int32_t* offsets, int64_t m, const int32_t* indices) {
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t p = offsets[r] + 1; p < offsets[r + 1]; ++p) {
      if (indices[p] > indices[p - 1]) continue;
      return At("column_indices", p) + "(row " + std::to_string(r) + "): expected more than " +
             std::to_string(indices[p - 1]) + " before it, got " + std::to_string(indices[p]);
    }
  }
  return "";
}

ffi::Error CheckHandler(ffi::Buffer<ffi::S32> offsets, ffi::Buffer<ffi::S32> indices,
                        ffi::Result<ffi::Buffer<ffi::S32>> out, int64_t columns) {
  const auto shape = offsets.dimensions();
  if (shape.size() != 1 || shape[0] < 1 || indices.dimensions().size() != 1 ||
      out->element_count() != offsets.element_count()) {
    return ffi::Error::InvalidArgument(
        "check: expected offsets [m + 1], indices [nnz] and a result like offsets, got " +
        ShapeString(shape) + ", " + ShapeString(indices.dimensions()) + ", " +
        ShapeString(out->dimensions()));
  }
  const int64_t m = shape[0] - 1;
  std::string error = CheckOffsets(offsets.typed_data(), m, indices.dimensions()[0]);
  if (error.empty()) error = CheckIndices(offsets.typed_data(), m, indices.typed_data(), columns);
  if (error.empty()) error = CheckOrder(offsets.typed_data(), m, indices.typed_data());
  if (!error.empty()) return ffi::Error::InvalidArgument("SparseArray: " + error);
  std::copy_n(offsets.typed_data(), m + 1, out->typed_data());
  return ffi::Error::Success();
}

// Offsets within 0 .. nnz that do not fall: each is the largest up to it, clamped.
ffi::Error MakeOffsetsValidHandler(ffi::Buffer<ffi::S32> offsets,
                                   ffi::Result<ffi::Buffer<ffi::S32>> out, int64_t nnz) {
  const auto shape = offsets.dimensions();
  if (shape.size() < 1 || out->element_count() != offsets.element_count() || nnz < 0 ||
      nnz > INT32_MAX) {
    return ffi::Error::InvalidArgument("valid_offsets: expected offsets [..., n] and as many out");
  }
  const int64_t size = shape[shape.size() - 1];
  const int64_t count = size > 0 ? int64_t(offsets.element_count()) / size : 0;
  for (int64_t i = 0; i < count; ++i) {
    MakeValid(offsets.typed_data() + i * size, size, nnz, out->typed_data() + i * size);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MakeOffsetsValid, MakeOffsetsValidHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // offsets [..., n]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // valid ones
                                  .Attr<int64_t>("nnz"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(CheckCsr, CheckHandler,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // offsets [m + 1]
                                  .Arg<ffi::Buffer<ffi::S32>>()  // indices [nnz]
                                  .Ret<ffi::Buffer<ffi::S32>>()  // offsets again
                                  .Attr<int64_t>("columns"));

}  // namespace sgap
