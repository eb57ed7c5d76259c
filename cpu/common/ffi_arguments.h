// What handlers take from their operands and attributes: element types, checks of shapes, errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

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

// The attributes of a call by name, for a handler whose targets differ in them. Error() says what
// is wrong with them when all have been taken.
class Attributes {
 public:
  explicit Attributes(xla::ffi::Dictionary given) : given_(given) {}

  // One that every target of the handler has.
  template <typename T>
  T Take(const char* name) {
    ++taken_;
    const auto value = given_.get<T>(name);
    if (value.has_value()) return *value;
    if (error_.empty()) error_ = std::string(name) + ": " + value.error().message();
    return T();
  }

  // One that some targets lack.
  template <typename T>
  std::optional<T> Find(const char* name) {
    if (!given_.contains(name)) return std::nullopt;
    return Take<T>(name);
  }

  std::string Error() const {
    if (!error_.empty() || taken_ == given_.size()) return error_;
    return "expected " + std::to_string(taken_) + " attributes, got " +
           std::to_string(given_.size());
  }

 private:
  xla::ffi::Dictionary given_;
  size_t taken_ = 0;
  std::string error_;
};

}  // namespace sgap
