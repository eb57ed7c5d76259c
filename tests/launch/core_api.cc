// The launch core as C functions, for ctypes. Each returns "" or the error, valid until the next
// call.
#include "cuda/launch/launch_core.h"

namespace {

sgap::Driver driver;
thread_local std::string last;

const char* Keep(std::string text) {
  last = std::move(text);
  return last.c_str();
}

}  // namespace

extern "C" {

const char* core_open(const char* library) { return Keep(sgap::OpenDriver(library, &driver)); }

sgap::LaunchKernel* core_new(const char* cubin, const char* kernel, const int64_t* sizes,
                             const int64_t* scalars, int scalar_count, const int64_t* zero,
                             int zero_count) {
  sgap::LaunchPlan plan;
  plan.cubin = cubin;
  plan.kernel = kernel;
  plan.grid = {sizes[0], sizes[1], sizes[2]};
  plan.block = {sizes[3], sizes[4], sizes[5]};
  plan.shared_bytes = sizes[6];
  plan.scalars.assign(scalars, scalars + scalar_count);
  plan.zero.assign(zero, zero + zero_count);
  return new sgap::LaunchKernel(std::move(plan));
}

void core_delete(sgap::LaunchKernel* kernel) { delete kernel; }

const char* core_check(const sgap::LaunchKernel* kernel) { return Keep(kernel->Check()); }

const char* core_load(sgap::LaunchKernel* kernel) { return Keep(kernel->Load(driver)); }

const char* core_prepare(sgap::LaunchKernel* kernel, void* stream) {
  return Keep(kernel->Prepare(driver, stream));
}

const char* core_launch(sgap::LaunchKernel* kernel, void* stream, void** inputs, int input_count,
                        void** outputs, const size_t* bytes, int output_count) {
  std::vector<sgap::DeviceBuffer> buffers;
  for (int i = 0; i < output_count; ++i) buffers.push_back({outputs[i], bytes[i]});
  const std::vector<void*> arguments(inputs, inputs + input_count);
  return Keep(kernel->Launch(driver, stream, arguments, buffers));
}
}
