// FFI target sgap_launch_v1, which launches any kernel on any operands. The attributes are read
// once, at INSTANTIATE; XLA owns the kernel together with its executable, and frees it with that.
#include "cuda/launch/launch_ffi.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/launch/launch_core.h"

namespace sgap {
namespace {

namespace ffi = xla::ffi;

struct LaunchState {
  static ffi::TypeId id;
  explicit LaunchState(LaunchPlan plan) : kernel(std::move(plan)) {}
  LaunchKernel kernel;
};
ffi::TypeId LaunchState::id = {};  // assigned by RegisterState

ffi::Error Result(const std::string& error) {
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal("sgap_launch: " + error);
}

// Preparing and launching need the driver; compiling for a GPU of another machine does not.
ffi::Error NoDriver() {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "sgap_launch: " + GetSystemDriver().error);
}

bool ToSizes(ffi::Span<const int64_t> sizes, std::array<int64_t, 3>* out) {
  if (sizes.size() != out->size()) return false;
  std::copy(sizes.begin(), sizes.end(), out->begin());
  return true;
}

ffi::ErrorOr<std::unique_ptr<LaunchState>> Instantiate(
    std::string_view cubin, std::string_view kernel, ffi::Span<const int64_t> grid,
    ffi::Span<const int64_t> block, int64_t shared_bytes, ffi::Span<const int64_t> scalars,
    ffi::Span<const int64_t> zero) {
  LaunchPlan plan;
  plan.cubin = cubin;
  plan.kernel = kernel;
  plan.shared_bytes = shared_bytes;
  plan.scalars.assign(scalars.begin(), scalars.end());
  plan.zero.assign(zero.begin(), zero.end());
  if (!ToSizes(grid, &plan.grid) || !ToSizes(block, &plan.block)) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("sgap_launch: grid and block: expected three sizes each"));
  }
  auto state = std::make_unique<LaunchState>(std::move(plan));
  if (std::string error = state->kernel.Check(); !error.empty()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("sgap_launch: " + error));
  }
  const SystemDriver& driver = GetSystemDriver();
  if (driver.error.empty()) {
    ffi::Error loaded = Result(state->kernel.Load(driver.functions));
    if (loaded.failure()) return ffi::Unexpected(std::move(loaded));
  }
  return state;
}

ffi::Error Initialize(void* stream, LaunchState* state) {
  const SystemDriver& driver = GetSystemDriver();
  if (!driver.error.empty()) return NoDriver();
  return Result(state->kernel.Prepare(driver.functions, stream));
}

ffi::Error Execute(void* stream, LaunchState* state, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  const SystemDriver& driver = GetSystemDriver();
  if (!driver.error.empty()) return NoDriver();
  std::vector<void*> inputs(args.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto input = args.get<ffi::AnyBuffer>(i);
    if (input.has_error()) return input.error();
    inputs[i] = input->untyped_data();
  }
  std::vector<DeviceBuffer> outputs(rets.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto output = rets.get<ffi::AnyBuffer>(i);
    if (output.has_error()) return output.error();
    outputs[i] = {(*output)->untyped_data(), (*output)->size_bytes()};
  }
  return Result(state->kernel.Launch(driver.functions, stream, inputs, outputs));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::string_view>("cubin")
                           .Attr<std::string_view>("kernel")
                           .Attr<ffi::Span<const int64_t>>("grid")   // [3]
                           .Attr<ffi::Span<const int64_t>>("block")  // [3]
                           .Attr<int64_t>("shared_bytes")
                           .Attr<ffi::Span<const int64_t>>("scalars")  // [any number]
                           .Attr<ffi::Span<const int64_t>>("zero"));   // positions of outputs

// JAX registers queued handlers before or after queued types, depending on version and platform. So
// the type is registered here, when XLA asks the handler for its metadata: with the runtime that is
// about to use it.
XLA_FFI_Error* RegisterState(const XLA_FFI_Api* api) {
  static std::mutex mutex;
  static const XLA_FFI_Api* registered = nullptr;
  static constexpr XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<LaunchState>();
  std::lock_guard<std::mutex> lock(mutex);
  if (registered == api) return nullptr;
  XLA_FFI_Error* error =
      ffi::Ffi::RegisterTypeId(api, "sgap_launch_state_v1", &LaunchState::id, &info);
  if (error == nullptr) registered = api;
  return error;
}

}  // namespace

extern "C" XLA_FFI_Error* LaunchInstantiate(XLA_FFI_CallFrame* call_frame) {
  if (XLA_FFI_Error* error = RegisterState(call_frame->api)) return error;
  return kInstantiate(call_frame);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    LaunchInitialize, Initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::State<LaunchState>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(LaunchExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::State<LaunchState>>()
                                  .RemainingArgs()   // the kernel's inputs
                                  .RemainingRets(),  // the kernel's outputs
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace sgap
