// The element types of the kernels. Code that needs them by value dispatches once per task.
#pragma once

#include <cstdint>

namespace sgap {

enum class Dtype : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

}  // namespace sgap

namespace sgap::SGAP_ISA {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<T>()) for the C++ type T of `dtype`.
template <typename Body>
inline void DispatchDtype(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::kFloat32:
      return body(TypeTag<float>());
    case Dtype::kFloat64:
      return body(TypeTag<double>());
    case Dtype::kBFloat16:
      return body(TypeTag<BFloat16>());
    case Dtype::kFloat16:
      return body(TypeTag<Float16>());
  }
}

// What sums of T are kept in.
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

}  // namespace sgap::SGAP_ISA
