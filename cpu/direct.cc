// Operations on two concrete matrices as functions of the Python module: arrays in, arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/common/dtype.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_pieces.h"
#include "cpu/merge_rows/merge_rows.h"
#include "cpu/spgemm/spgemm.h"

namespace sgap {
namespace {

namespace nb = nanobind;

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Values as bytes: nanobind knows no bfloat16.
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Dtype DtypeOf(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "float64") return Dtype::kFloat64;
  if (name == "bfloat16") return Dtype::kBFloat16;
  if (name == "float16") return Dtype::kFloat16;
  throw std::invalid_argument("dtype: expected a floating-point type with kernels, got " + name);
}

size_t BytesOf(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

DirectMatrix MatrixOf(const Ints& offsets, const Ints& indices, const Bytes* values, Dtype dtype,
                      int64_t columns) {
  if (offsets.size() < 1) throw std::invalid_argument("offsets: expected one at least");
  if (columns < 0 || columns > INT32_MAX) throw std::invalid_argument("columns: out of range");
  if (values && values->size() != indices.size() * BytesOf(dtype)) {
    throw std::invalid_argument("values: expected one for each index");
  }
  return {offsets.data(),
          indices.data(),
          values ? values->data() : nullptr,
          int64_t(offsets.size()) - 1,
          int64_t(indices.size()),
          columns};
}

template <typename T>
nb::object ArrayOf(ResultArray& array, size_t size) {
  auto kept = std::make_unique<ResultArray>(std::move(array));
  void* const data = kept->data();
  nb::capsule owner(kept.get(),
                    [](void* memory) noexcept { delete static_cast<ResultArray*>(memory); });
  kept.release();
  BeforeXla(&finished_calls);  // whose calls may read it
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, owner));
}

nb::object OffsetsOf(RowResult& result) {
  return ArrayOf<int32_t>(result.offsets, size_t(result.rows) + 1);
}

// `isa` is in use for the time of a call, by the whole process; empty for the one that is.
class WithIsa {
 public:
  explicit WithIsa(const std::string& isa) : before_(isa.empty() ? "" : Kernels().isa) {
    if (!isa.empty()) SelectIsa(isa);
  }
  ~WithIsa() {
    if (!before_.empty()) SelectIsa(before_);
  }

 private:
  const std::string before_;
};

RowSums SumsOf(const std::string& name) {
  if (name.empty()) return RowSums::kAny;
  if (name == "hash") return RowSums::kHash;
  if (name == "hash, unsorted") return RowSums::kHashUnsorted;
  throw std::invalid_argument("sums: expected hash or hash, unsorted, got " + name);
}

// (offsets, indices, bytes of the values), or None where there would be too many entries.
nb::object Product(const Ints& a_offsets, const Ints& a_indices, const Bytes& a_values,
                   const Ints& b_offsets, const Ints& b_indices, const Bytes& b_values,
                   int64_t columns, const std::string& dtype, int64_t threads,
                   const std::string& isa, const std::string& sums) {
  const Dtype type = DtypeOf(dtype);
  const RowSums rows = SumsOf(sums);
  const DirectMatrix b = MatrixOf(b_offsets, b_indices, &b_values, type, columns);
  const DirectMatrix a = MatrixOf(a_offsets, a_indices, &a_values, type, b.rows);
  const WithIsa chosen(isa);
  RowResult result;
  bool fits;
  {
    const nb::gil_scoped_release released;
    fits = DirectProduct(a, b, type, rows, threads, result);
  }
  if (!fits) return nb::none();
  const size_t count = result.entries;
  return nb::make_tuple(OffsetsOf(result), ArrayOf<int32_t>(result.arrays[0], count),
                        ArrayOf<uint8_t>(result.arrays[1], count * BytesOf(type)));
}

struct Both {
  DirectMatrix a, b;
};

Both Operands(const DirectMatrix& a, const DirectMatrix& b) {
  if (a.rows != b.rows) throw std::invalid_argument("expected two of as many rows");
  return {a, b};
}

Merge MergeOf(const std::string& name) {
  if (name == "+") return Merge::kAdd;
  if (name == "-") return Merge::kSubtract;
  if (name == "*") return Merge::kMultiply;
  throw std::invalid_argument("merge: expected +, - or *, got " + name);
}

// The arrays of the result, or None where a row does not ascend.
nb::object RunMerge(const Both& operands, const std::string& merge, Dtype dtype, bool places,
                    int64_t threads, const std::string& isa) {
  const Merge kind = MergeOf(merge);
  const WithIsa chosen(isa);
  RowResult result;
  Merged done;
  {
    const nb::gil_scoped_release released;
    done = DirectMerge(operands.a, operands.b, kind, dtype, places, threads, result);
  }
  if (done == Merged::kNotAscending) return nb::none();
  if (done == Merged::kTooMany) {
    throw std::invalid_argument("expected fewer than 2147483647 entries; index arrays are int32");
  }
  const size_t count = result.entries;
  nb::object offsets = OffsetsOf(result);
  nb::object indices = ArrayOf<int32_t>(result.arrays[0], count);
  if (result.arrays.size() == 1) return nb::make_tuple(offsets, indices);
  if (result.arrays.size() == 2) {
    return nb::make_tuple(offsets, indices,
                          ArrayOf<uint8_t>(result.arrays[1], count * BytesOf(dtype)));
  }
  return nb::make_tuple(offsets, indices, ArrayOf<int32_t>(result.arrays[1], count),
                        ArrayOf<int32_t>(result.arrays[2], count));
}

nb::object MergeValues(const Ints& a_offsets, const Ints& a_indices, const Bytes& a_values,
                       const Ints& b_offsets, const Ints& b_indices, const Bytes& b_values,
                       int64_t columns, const std::string& merge, const std::string& dtype,
                       int64_t threads, const std::string& isa) {
  const Dtype type = DtypeOf(dtype);
  return RunMerge(Operands(MatrixOf(a_offsets, a_indices, &a_values, type, columns),
                           MatrixOf(b_offsets, b_indices, &b_values, type, columns)),
                  merge, type, /*places=*/false, threads, isa);
}

nb::object MergePlaces(const Ints& a_offsets, const Ints& a_indices, const Ints& b_offsets,
                       const Ints& b_indices, int64_t columns, const std::string& merge,
                       int64_t threads, const std::string& isa, bool places) {
  const Dtype none = Dtype::kFloat32;
  return RunMerge(Operands(MatrixOf(a_offsets, a_indices, nullptr, none, columns),
                           MatrixOf(b_offsets, b_indices, nullptr, none, columns)),
                  merge, none, places, threads, isa);
}

}  // namespace

void DefineDirect(nb::module_& module) {
  module.def("product", &Product, nb::arg("a_offsets"), nb::arg("a_indices"), nb::arg("a_values"),
             nb::arg("b_offsets"), nb::arg("b_indices"), nb::arg("b_values"), nb::arg("columns"),
             nb::arg("dtype"), nb::arg("threads"), nb::arg("isa") = "", nb::arg("sums") = "");
  module.def("merge", &MergeValues, nb::arg("a_offsets"), nb::arg("a_indices"), nb::arg("a_values"),
             nb::arg("b_offsets"), nb::arg("b_indices"), nb::arg("b_values"), nb::arg("columns"),
             nb::arg("merge"), nb::arg("dtype"), nb::arg("threads"), nb::arg("isa") = "");
  module.def("merge_places", &MergePlaces, nb::arg("a_offsets"), nb::arg("a_indices"),
             nb::arg("b_offsets"), nb::arg("b_indices"), nb::arg("columns"), nb::arg("merge"),
             nb::arg("threads"), nb::arg("isa") = "", nb::arg("places") = true);
}

}  // namespace sgap
