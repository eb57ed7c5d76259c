// FFI targets sgap_sparse_softmax_csr_v1 and sgap_sparse_softmax_jacobian_csr_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "ffi_arguments.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "row_plan.h"
#include "sparse_softmax.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

// A term of a softmax takes about so many multiply-adds.
constexpr int64_t kExpWork = 16;

template <typename Args>
struct SoftmaxCall {
  Args args;
  RowPlan plan;
};

std::string CheckCut(ffi::AnyBuffer offsets, int64_t chunk_nonzeros) {
  std::string error = BadChunk(chunk_nonzeros);
  if (!error.empty()) return error;
  error = Mismatch("offsets", offsets, ffi::S32, {kAnySize});
  if (!error.empty() || offsets.dimensions()[0] >= 1) return error;
  return "offsets: expected at least one element, got 0";
}

// Zeros from offsets[m] on; the kernels write the rest.
void ClearPadding(ffi::AnyBuffer out, const int32_t* offsets, int64_t m) {
  const size_t element = ffi::ByteWidth(out.element_type());
  const size_t nnz = out.dimensions()[1], stored = offsets[m];
  char* values = static_cast<char*>(out.untyped_data());
  for (int64_t b = 0; stored < nnz && b < out.dimensions()[0]; ++b) {
    std::fill_n(values + (b * nnz + stored) * element, (nnz - stored) * element, 0);
  }
}

// Cuts `call` into phases and runs it.
template <typename Args>
ffi::Future Run(ffi::ThreadPool pool, std::shared_ptr<SoftmaxCall<Args>> call,
                ffi::AnyBuffer offsets, ffi::AnyBuffer out, Kernel<Args> kernel, int64_t entry_work,
                int64_t chunk_nonzeros) {
  const int64_t m = offsets.dimensions()[0] - 1, batch = out.dimensions()[0];
  call->args.nnz = out.dimensions()[1];
  call->args.out = out.untyped_data();
  if (batch == 0 || call->args.nnz == 0) return Finished();
  const auto* row_offsets = Ints(offsets);
  ClearPadding(out, row_offsets, m);
  if (m == 0) return Finished();
  call->args.phases = call->plan.Cut(row_offsets, m, batch, chunk_nonzeros);
  return ParallelPhases(pool, PhaseTasks(call->args.phases, /*write=*/true),
                        batch * (call->args.nnz * entry_work + m),
                        [call, kernel](int64_t task) { kernel(call->args, task); });
}

ffi::Future SoftmaxHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                           ffi::Result<ffi::AnyBuffer> out, double scale, int64_t chunk_nonzeros) {
  const ffi::DataType type = values.element_type();
  std::string error = CheckCut(offsets, chunk_nonzeros);
  if (!ToDtype(type)) error = "values: expected float32, float64, bfloat16 or float16";
  if (error.empty()) error = Mismatch("values", values, type, {kAnySize, kAnySize});
  if (error.empty()) {
    error = Mismatch("result", *out, type, {values.dimensions()[0], values.dimensions()[1]});
  }
  if (!error.empty()) return Failed("sparse_softmax: " + error);
  auto call = std::make_shared<SoftmaxCall<SparseSoftmaxArgs>>();
  call->args.dtype = *ToDtype(type);
  call->args.values = values.untyped_data();
  call->args.scale = scale;
  return Run(pool, std::move(call), offsets, *out, Kernels().sparse_softmax, kExpWork,
             chunk_nonzeros);
}

ffi::Future JacobianHandler(ffi::ThreadPool pool, ffi::AnyBuffer probabilities,
                            ffi::AnyBuffer tangent, ffi::AnyBuffer offsets,
                            ffi::Result<ffi::AnyBuffer> out, double scale, int64_t chunk_nonzeros) {
  const ffi::DataType type = probabilities.element_type();
  std::string error = CheckCut(offsets, chunk_nonzeros);
  if (!ToDtype(type)) error = "probabilities: expected float32, float64, bfloat16 or float16";
  if (error.empty()) error = Mismatch("probabilities", probabilities, type, {kAnySize, kAnySize});
  if (error.empty()) {
    error = Mismatch("tangent", tangent, type, {kAnySize, probabilities.dimensions()[1]});
  }
  if (!error.empty()) return Failed("sparse_softmax_jacobian: " + error);
  const int64_t p_batch = probabilities.dimensions()[0], t_batch = tangent.dimensions()[0];
  const int64_t batch = p_batch == 1 ? t_batch : p_batch, nnz = probabilities.dimensions()[1];
  if (t_batch != batch && t_batch != 1) {
    error = "probabilities and tangent: expected batches of 1 or one size, got " +
            std::to_string(p_batch) + " and " + std::to_string(t_batch);
  } else {
    error = Mismatch("result", *out, type, {batch, nnz});
  }
  if (!error.empty()) return Failed("sparse_softmax_jacobian: " + error);
  auto call = std::make_shared<SoftmaxCall<SparseSoftmaxJacobianArgs>>();
  call->args.dtype = *ToDtype(type);
  call->args.probabilities = probabilities.untyped_data();
  call->args.tangent = tangent.untyped_data();
  call->args.probabilities_stride = p_batch == 1 ? 0 : nnz;
  call->args.tangent_stride = t_batch == 1 ? 0 : nnz;
  call->args.scale = scale;
  return Run(pool, std::move(call), offsets, *out, Kernels().sparse_softmax_jacobian, 4,
             chunk_nonzeros);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseSoftmaxCsr, SoftmaxHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch, nnz]
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Ret<ffi::AnyBuffer>()  // probabilities [batch, nnz]
                                  .Attr<double>("scale")
                                  .Attr<int64_t>("chunk_nonzeros"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseSoftmaxJacobianCsr, JacobianHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // probabilities [batch or 1, nnz]
                                  .Arg<ffi::AnyBuffer>()  // tangent [batch or 1, nnz]
                                  .Arg<ffi::AnyBuffer>()  // offsets [m + 1]
                                  .Ret<ffi::AnyBuffer>()  // [batch, nnz]
                                  .Attr<double>("scale")
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
