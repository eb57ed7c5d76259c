// What both handlers of SDDMM ask of their batches and take from their factors. An absent one of
// those that multiply the sums has no elements.
#pragma once

#include <memory>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/structure.h"

namespace sgap {

// Empty for weights like `out` and a scale of one number, these and x and y of 1 batch or all of
// out's.
inline std::string BadFactors(xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer y,
                              xla::ffi::AnyBuffer weights, xla::ffi::AnyBuffer scale,
                              xla::ffi::AnyBuffer out) {
  namespace ffi = xla::ffi;
  const ffi::DataType type = out.element_type();
  const auto results = out.dimensions();
  for (const int64_t own : {x.dimensions()[0], y.dimensions()[0]}) {
    if (own != 1 && own != results[0]) {
      return "x and y: expected batches of 1 or that of the result, got " + std::to_string(own) +
             " for " + std::to_string(results[0]);
    }
  }
  std::string error;
  const auto one_or_all = [&](ffi::AnyBuffer factor) {
    return factor.dimensions().size() > 0 && factor.dimensions()[0] == 1 ? 1 : results[0];
  };
  if (weights.element_count() > 0) {
    const int64_t own = one_or_all(weights);
    error = results.size() == 2 ? Mismatch("weights", weights, type, {own, results[1]})
                                : Mismatch("weights", weights, type, {own, results[1], results[2]});
  }
  if (error.empty() && scale.element_count() > 0) {
    error =
        Mismatch("scale", scale, type == ffi::F64 ? ffi::F64 : ffi::F32, {one_or_all(scale), 1});
  }
  return error;
}

template <class Args>
void SetFactors(xla::ffi::AnyBuffer x, xla::ffi::AnyBuffer y, xla::ffi::AnyBuffer weights,
                xla::ffi::AnyBuffer scale, xla::ffi::AnyBuffer out, Args& args) {
  args.dtype = *ToDtype(x.element_type());
  args.x = x.untyped_data();
  args.y = y.untyped_data();
  args.out = out.untyped_data();
  args.m = x.dimensions()[1];
  args.k = y.dimensions()[1];
  args.d = x.dimensions()[2];
  args.x_stride = x.dimensions()[0] == 1 ? 0 : args.m * args.d;
  args.y_stride = y.dimensions()[0] == 1 ? 0 : args.k * args.d;
  const int64_t weighted = weights.element_count(), scaled = scale.element_count();
  args.weights = weighted > 0 ? weights.untyped_data() : nullptr;
  args.scale = scaled > 0 ? scale.untyped_data() : nullptr;
  args.weights_stride =
      weighted > 0 && weights.dimensions()[0] > 1 ? weighted / weights.dimensions()[0] : 0;
  args.scale_stride = scaled > 1 ? 1 : 0;
}

// Weights and results of a compacted structure, which the kernel reads and writes in place of those
// of the call.
struct SampledEntries {
  std::unique_ptr<char[]> weights, results;
  void* out;
  int64_t batch;
  size_t bytes;  // of an entry

  // Entries of `length` numbers.
  template <class Args>
  void Take(const CompactStructure& structure, int64_t batches, int64_t length, Args* args) {
    batch = batches;
    bytes = length * DtypeBytes(args->dtype);
    const int64_t weight_batch = args->weights_stride == 0 ? 1 : batch;
    weights = TakeEntries(args->weights, weight_batch, bytes, structure);
    results.reset(new char[batch * structure.nnz * bytes]);
    out = args->out;
    args->weights = weights.get();
    args->out = results.get();
  }

  void Put(const CompactStructure& structure) const {
    PutEntries(results.get(), batch, bytes, structure, out);
  }
};

}  // namespace sgap
