// What handlers take from their operands and attributes: element types, checks of shapes, errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "cpu/common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace sgap {

inline std::optional<Dtype> ToDtype(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F32:
      return Dtype::kFloat32;
    case xla::ffi::F64:
      return Dtype::kFloat64;
    case xla::ffi::BF16:
      return Dtype::kBFloat16;
    case xla::ffi::F16:
      return Dtype::kFloat16;
    default:
      return std::nullopt;
  }
}

inline xla::ffi::Future Failed(std::string message) {
  xla::ffi::Promise promise;
  promise.SetError(xla::ffi::Error::InvalidArgument(std::move(message)));
  return xla::ffi::Future(promise);
}

inline std::string ShapeString(xla::ffi::Span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Empty for a chunk in [1, 2^31): sums of it with sizes then stay far from the end of int64_t.
inline std::string BadChunk(int64_t chunk_nonzeros) {
  if (chunk_nonzeros >= 1 && chunk_nonzeros <= INT32_MAX) return "";
  return "chunk_nonzeros: expected 1 to 2147483647, got " + std::to_string(chunk_nonzeros);
}

// Empty for two batches that broadcast to one.
inline std::string UnlikeBatches(const char* names, int64_t first, int64_t second) {
  if (first == second || first == 1 || second == 1) return "";
  return std::string(names) + ": expected batches of 1 or one size, got " + std::to_string(first) +
         " and " + std::to_string(second);
}

// Empty for the V of column vectors.
inline std::string BadLength(int64_t length) {
  if (length >= 1 && length <= INT32_MAX) return "";
  return "values: expected vectors of 1 to 2147483647 numbers, got " + std::to_string(length);
}

inline int32_t* Ints(xla::ffi::AnyBuffer buffer) {
  return reinterpret_cast<int32_t*>(buffer.untyped_data());
}

inline size_t DtypeBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return 8;
    case Dtype::kFloat32:
      return 4;
    default:
      return 2;
  }
}

inline size_t AccumulatorBytes(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? sizeof(double) : sizeof(float);
}

constexpr int64_t kAnySize = -1;

// Empty where `buffer` has this type and shape, else a message naming `name`, what was expected and
// what came.
inline std::string Mismatch(const char* name, const xla::ffi::AnyBuffer& buffer,
                            xla::ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto got = buffer.dimensions();
  bool same = buffer.element_type() == type && got.size() == shape.size();
  for (size_t i = 0; same && i < shape.size(); ++i) {
    const int64_t want = shape.begin()[i];
    same = want == kAnySize ? got[i] >= 0 : got[i] == want;
  }
  if (same) return "";
  std::string expected = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t want = shape.begin()[i];
    expected += (i ? ", " : "") + (want == kAnySize ? std::string("?") : std::to_string(want));
  }
  return std::string(name) + ": expected type " + std::to_string(static_cast<int>(type)) +
         " shape " + expected + "], got type " +
         std::to_string(static_cast<int>(buffer.element_type())) + " shape " + ShapeString(got);
}

// The product of all dimensions but the last `own`; -1 where there are fewer.
inline int64_t Leading(xla::ffi::AnyBuffer buffer, size_t own) {
  const auto shape = buffer.dimensions();
  if (shape.size() < own) return -1;
  int64_t product = 1;
  for (size_t i = 0; i + own < shape.size(); ++i) product *= shape[i];
  return product;
}

// Empty where `buffer` has `batch` elements of this type and shape, as `other` has, else a message.
inline std::string NotEach(const char* name, const char* other, xla::ffi::AnyBuffer buffer,
                           xla::ffi::DataType type, int64_t batch,
                           std::initializer_list<int64_t> shape) {
  const auto got = buffer.dimensions();
  bool same = buffer.element_type() == type && Leading(buffer, shape.size()) == batch;
  for (size_t i = 0; same && i < shape.size(); ++i) {
    same = got[got.size() - shape.size() + i] == shape.begin()[i];
  }
  return same ? ""
              : std::string(name) + ": unlike " + other + " in type or shape, got " +
                    ShapeString(got);
}

// The operands of a product y [batch, m, n] of values [batch or 1, ...] and x [batch or 1, k, n],
// all checked.
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

// Calls kHandler, whose last argument is an attribute of type T that only some of its targets have:
// std::optional. kBind() binds all others. Looking up attributes in XLA's dictionary instead would
// take 0.1 us a call.
template <typename T, auto kHandler, auto kBind>
XLA_FFI_Error* CallWithOptional(XLA_FFI_CallFrame* frame, std::string_view name) {
  static auto* const with = kBind().template Attr<T>(std::string(name)).To(kHandler).release();
  static auto* const without =
      kBind().To([](auto... given) { return kHandler(given..., std::nullopt); }).release();
  for (int64_t i = 0; i < frame->attrs.size; ++i) {
    const XLA_FFI_ByteSpan* own = frame->attrs.names[i];
    if (std::string_view(own->ptr, own->len) == name) return with->Call(frame);
  }
  return without->Call(frame);
}

}  // namespace sgap
