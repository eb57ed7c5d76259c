// FFI targets sgap_sparse_softmax_csr_v1 and sgap_sparse_softmax_jacobian_csr_v1, and the same
// handlers for column vectors, sgap_*_cvs_v1.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "cpu/common/each_structure.h"
#include "cpu/common/ffi_arguments.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/common/workspace.h"
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

// Zeros behind the last stored vector, which the kernels do not write.
void ClearPadding(ffi::AnyBuffer out, const VectorShape& shape, const int32_t* offsets) {
  const size_t element = ffi::ByteWidth(out.element_type());
  const size_t numbers = shape.Numbers();
  const size_t stored = size_t(offsets[shape.BlockRows()]) * shape.length;
  char* values = static_cast<char*>(out.untyped_data());
  for (int64_t b = 0; stored < numbers && b < out.dimensions()[0]; ++b) {
    std::fill_n(values + (b * numbers + stored) * element, (numbers - stored) * element, 0);
  }
}

// Empty for an `out` of the operands' shape and type with `batch` batch elements.
std::string CheckResult(ffi::AnyBuffer out, const VectorShape& shape, ffi::DataType type,
                        int64_t batch) {
  if (shape.rank == 2) return Mismatch("result", out, type, {batch, shape.vectors});
  return Mismatch("result", out, type, {batch, shape.vectors, shape.length});
}

// Cuts `call` into phases and runs it.
template <typename Args>
ffi::Future Run(const Pool& pool, std::shared_ptr<SoftmaxCall<Args>> call, const VectorShape& shape,
                ffi::AnyBuffer offsets, ffi::AnyBuffer out, Kernel<Args> kernel,
                int64_t number_work, int64_t chunk_nonzeros) {
  const int64_t batch = out.dimensions()[0];
  call->args.numbers = shape.Numbers();
  call->args.out = out.untyped_data();
  if (batch == 0 || shape.vectors == 0) return Finished();
  AdviseHugePages(call->args.out, out.size_bytes());
  call->args.phases =
      call->plan.Cut(Ints(offsets), shape.rows, shape.length, shape.vectors, batch, chunk_nonzeros);
  ClearPadding(out, shape, call->args.phases.offsets);
  if (shape.rows == 0) return Finished();
  return ParallelPhases(pool, PhaseTasks(call->args.phases, /*write=*/true),
                        batch * (shape.Numbers() * number_work + shape.rows),
                        [call, kernel](int64_t task) { kernel(call->args, task); });
}

ffi::Future SoftmaxHandler(Pool pool, ffi::AnyBuffer values, IndexArray offsets,
                           ffi::Result<ffi::AnyBuffer> out, double scale, int64_t chunk_nonzeros,
                           std::optional<int64_t> rows) {
  const VectorShape shape = ClaimedShape(values, offsets, rows);
  std::string error = CheckVectors("values", shape, values, offsets, chunk_nonzeros);
  if (error.empty()) {
    error = CheckResult(*out, shape, values.element_type(), values.dimensions()[0]);
  }
  if (!error.empty()) return Failed("sparse_softmax: " + error);
  auto call = std::make_shared<SoftmaxCall<SparseSoftmaxArgs>>();
  call->args.dtype = *ToDtype(values.element_type());
  call->args.values = values.untyped_data();
  call->args.scale = scale;
  return Run(pool, std::move(call), shape, offsets, *out, Kernels().SparseSoftmax, kExpWork,
             chunk_nonzeros);
}

ffi::Future JacobianHandler(Pool pool, ffi::AnyBuffer probabilities, ffi::AnyBuffer tangent,
                            IndexArray offsets, ffi::Result<ffi::AnyBuffer> out, double scale,
                            int64_t chunk_nonzeros, std::optional<int64_t> rows) {
  const VectorShape shape = ClaimedShape(probabilities, offsets, rows);
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
  if (error.empty()) error = CheckResult(*out, shape, type, p_batch == 1 ? t_batch : p_batch);
  if (!error.empty()) return Failed("sparse_softmax_jacobian: " + error);
  auto call = std::make_shared<SoftmaxCall<SparseSoftmaxJacobianArgs>>();
  call->args.dtype = *ToDtype(type);
  call->args.probabilities = probabilities.untyped_data();
  call->args.tangent = tangent.untyped_data();
  call->args.probabilities_stride = p_batch == 1 ? 0 : shape.Numbers();
  call->args.tangent_stride = t_batch == 1 ? 0 : shape.Numbers();
  call->args.scale = scale;
  return Run(pool, std::move(call), shape, offsets, *out, Kernels().SparseSoftmaxJacobian, 4,
             chunk_nonzeros);
}

auto BindSoftmax() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // values [batch, nnz] or [..., V]
      .Arg<IndexArray>()      // offsets [ceil(m / V) + 1]
      .Ret<ffi::AnyBuffer>()  // probabilities, as values
      .Attr<double>("scale")
      .Attr<int64_t>("chunk_nonzeros");
}

auto BindJacobian() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // probabilities [batch or 1, nnz] or [..., V]
      .Arg<ffi::AnyBuffer>()  // tangent [batch or 1, nnz] or [..., V]
      .Arg<IndexArray>()      // offsets [ceil(m / V) + 1]
      .Ret<ffi::AnyBuffer>()  // [batch, nnz] or [..., V]
      .Attr<double>("scale")
      .Attr<int64_t>("chunk_nonzeros");
}

}  // namespace

extern "C" XLA_FFI_Error* SparseSoftmaxFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<SoftmaxHandler>::Call, BindSoftmax>(frame, "rows");
}

extern "C" XLA_FFI_Error* SparseSoftmaxJacobianFfi(XLA_FFI_CallFrame* frame) {
  return CallWithOptional<int64_t, EachStructure<JacobianHandler>::Call, BindJacobian>(frame,
                                                                                       "rows");
}

}  // namespace sgap
