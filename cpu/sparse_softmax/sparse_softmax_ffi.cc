// FFI targets sgap_sparse_softmax_csr_v1 and sgap_sparse_softmax_jacobian_csr_v1, and the same of
// column vectors, sgap_*_cvs_v1.
#include <algorithm>
#include <memory>
#include <string>

#include "cpu/common/ffi_arguments.h"
#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/row_plan.h"
#include "cpu/row_reduce/row_ffi.h"
#include "cpu/sparse_softmax/sparse_softmax.h"

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

// Zeros from the last vector on; the kernels write the rest.
void ClearPadding(ffi::AnyBuffer out, const VectorShape& shape, const int32_t* offsets) {
  const size_t element = ffi::ByteWidth(out.element_type());
  const size_t numbers = shape.Numbers();
  const size_t stored = size_t(offsets[shape.BlockRows()]) * shape.length;
  char* values = static_cast<char*>(out.untyped_data());
  for (int64_t b = 0; stored < numbers && b < out.dimensions()[0]; ++b) {
    std::fill_n(values + (b * numbers + stored) * element, (numbers - stored) * element, 0);
  }
}

// `out` as the operands are, of `batch` products.
std::string CheckResult(ffi::AnyBuffer out, const VectorShape& shape, ffi::DataType type,
                        int64_t batch) {
  if (shape.rank == 2) return Mismatch("result", out, type, {batch, shape.vectors});
  return Mismatch("result", out, type, {batch, shape.vectors, shape.length});
}

// Cuts `call` into phases and runs it.
template <typename Args>
ffi::Future Run(ffi::ThreadPool pool, std::shared_ptr<SoftmaxCall<Args>> call,
                const VectorShape& shape, ffi::AnyBuffer offsets, ffi::AnyBuffer out,
                Kernel<Args> kernel, int64_t number_work, int64_t chunk_nonzeros) {
  const int64_t batch = out.dimensions()[0];
  call->args.numbers = shape.Numbers();
  call->args.out = out.untyped_data();
  if (batch == 0 || shape.vectors == 0) return Finished();
  call->args.phases =
      call->plan.Cut(Ints(offsets), shape.rows, shape.length, shape.vectors, batch, chunk_nonzeros);
  ClearPadding(out, shape, call->args.phases.offsets);
  if (shape.rows == 0) return Finished();
  return ParallelPhases(pool, PhaseTasks(call->args.phases, /*write=*/true),
                        batch * (shape.Numbers() * number_work + shape.rows),
                        [call, kernel](int64_t task) { kernel(call->args, task); });
}

ffi::Future Softmax(ffi::ThreadPool pool, const VectorShape& shape, ffi::AnyBuffer values,
                    ffi::AnyBuffer offsets, ffi::AnyBuffer out, double scale,
                    int64_t chunk_nonzeros) {
  std::string error = CheckVectors("values", shape, values, offsets, chunk_nonzeros);
  if (error.empty()) error = CheckResult(out, shape, values.element_type(), values.dimensions()[0]);
  if (!error.empty()) return Failed("sparse_softmax: " + error);
  auto call = std::make_shared<SoftmaxCall<SparseSoftmaxArgs>>();
  call->args.dtype = *ToDtype(values.element_type());
  call->args.values = values.untyped_data();
  call->args.scale = scale;
  return Run(pool, std::move(call), shape, offsets, out, Kernels().sparse_softmax, kExpWork,
             chunk_nonzeros);
}

ffi::Future Jacobian(ffi::ThreadPool pool, const VectorShape& shape, ffi::AnyBuffer probabilities,
                     ffi::AnyBuffer tangent, ffi::AnyBuffer offsets, ffi::AnyBuffer out,
                     double scale, int64_t chunk_nonzeros) {
  const ffi::DataType type = probabilities.element_type();
  std::string error = CheckVectors("probabilities", shape, probabilities, offsets, chunk_nonzeros);
  if (error.empty()) {
    error = shape.rank == 2
                ? Mismatch("tangent", tangent, type, {kAnySize, shape.vectors})
                : Mismatch("tangent", tangent, type, {kAnySize, shape.vectors, shape.length});
  }
  if (!error.empty()) return Failed("sparse_softmax_jacobian: " + error);
  const int64_t p_batch = probabilities.dimensions()[0], t_batch = tangent.dimensions()[0];
  error = UnlikeBatches("probabilities and tangent", p_batch, t_batch);
  if (error.empty()) error = CheckResult(out, shape, type, p_batch == 1 ? t_batch : p_batch);
  if (!error.empty()) return Failed("sparse_softmax_jacobian: " + error);
  auto call = std::make_shared<SoftmaxCall<SparseSoftmaxJacobianArgs>>();
  call->args.dtype = *ToDtype(type);
  call->args.probabilities = probabilities.untyped_data();
  call->args.tangent = tangent.untyped_data();
  call->args.probabilities_stride = p_batch == 1 ? 0 : shape.Numbers();
  call->args.tangent_stride = t_batch == 1 ? 0 : shape.Numbers();
  call->args.scale = scale;
  return Run(pool, std::move(call), shape, offsets, out, Kernels().sparse_softmax_jacobian, 4,
             chunk_nonzeros);
}

ffi::Future SoftmaxHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                           ffi::Result<ffi::AnyBuffer> out, double scale, int64_t chunk_nonzeros) {
  return Softmax(pool, OfEntries(values, offsets), values, offsets, *out, scale, chunk_nonzeros);
}

ffi::Future SoftmaxCvsHandler(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer offsets,
                              ffi::Result<ffi::AnyBuffer> out, double scale, int64_t rows,
                              int64_t chunk_nonzeros) {
  return Softmax(pool, OfVectors(values, rows), values, offsets, *out, scale, chunk_nonzeros);
}

ffi::Future JacobianHandler(ffi::ThreadPool pool, ffi::AnyBuffer probabilities,
                            ffi::AnyBuffer tangent, ffi::AnyBuffer offsets,
                            ffi::Result<ffi::AnyBuffer> out, double scale, int64_t chunk_nonzeros) {
  return Jacobian(pool, OfEntries(probabilities, offsets), probabilities, tangent, offsets, *out,
                  scale, chunk_nonzeros);
}

ffi::Future JacobianCvsHandler(ffi::ThreadPool pool, ffi::AnyBuffer probabilities,
                               ffi::AnyBuffer tangent, ffi::AnyBuffer offsets,
                               ffi::Result<ffi::AnyBuffer> out, double scale, int64_t rows,
                               int64_t chunk_nonzeros) {
  return Jacobian(pool, OfVectors(probabilities, rows), probabilities, tangent, offsets, *out,
                  scale, chunk_nonzeros);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseSoftmaxCvs, SoftmaxCvsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // values [batch, vectors, V]
                                  .Arg<ffi::AnyBuffer>()  // offsets [ceil(m / V) + 1]
                                  .Ret<ffi::AnyBuffer>()  // probabilities [batch, vectors, V]
                                  .Attr<double>("scale")
                                  .Attr<int64_t>("rows")  // m
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(SparseSoftmaxJacobianCvs, JacobianCvsHandler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()  // probabilities [batch or 1, vectors, V]
                                  .Arg<ffi::AnyBuffer>()  // tangent [batch or 1, vectors, V]
                                  .Arg<ffi::AnyBuffer>()  // offsets [ceil(m / V) + 1]
                                  .Ret<ffi::AnyBuffer>()  // [batch, vectors, V]
                                  .Attr<double>("scale")
                                  .Attr<int64_t>("rows")  // m
                                  .Attr<int64_t>("chunk_nonzeros"));

}  // namespace sgap
