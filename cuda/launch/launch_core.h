// One CUDA kernel of one executable: loaded once, prepared once per device, launched on a stream.
// It depends on the driver table alone, not on XLA or a CUDA header, so that tests can run it with
// a fake driver. Every method returns an empty string, or the call that failed with CUDA's error.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/launch/driver.h"

namespace sgap {

struct LaunchPlan {
  std::string cubin;
  std::string kernel;  // its name in the cubin
  std::array<int64_t, 3> grid;
  std::array<int64_t, 3> block;
  int64_t shared_bytes = 0;      // dynamic shared memory of a block
  std::vector<int64_t> scalars;  // the kernel's last arguments
  std::vector<int64_t> zero;     // outputs that are zeroed first, by position
};

struct DeviceBuffer {
  void* data;
  size_t bytes;
};

// A cubin that a driver has loaded, one for all kernels with the same bytes: the layers of a model
// launch few kernels many times. Unloaded with the last kernel.
class CubinLibrary {
 public:
  CubinLibrary(const Driver& driver, std::string cubin, void* handle)
      : driver_(driver), cubin_(std::move(cubin)), handle_(handle) {}
  ~CubinLibrary();
  CubinLibrary(const CubinLibrary&) = delete;

  // The one of `cubin`, loaded if it is not; null with an error.
  static std::shared_ptr<CubinLibrary> Of(const Driver& driver, const std::string& cubin,
                                          const std::string& kernel, std::string* error);

  void* handle() const { return handle_; }

 private:
  const Driver& driver_;
  const std::string cubin_;
  void* const handle_;
};

class LaunchKernel {
 public:
  explicit LaunchKernel(LaunchPlan plan) : plan_(std::move(plan)) {}
  LaunchKernel(const LaunchKernel&) = delete;
  LaunchKernel& operator=(const LaunchKernel&) = delete;

  // Rejects sizes that no launch can have.
  std::string Check() const;

  // Loads the cubin. Needs no device: a library is independent of contexts.
  std::string Load(const Driver& driver);

  // Loads the kernel into the context of `stream`, at once whatever CUDA_MODULE_LOADING says, and
  // reads its attributes for the errors of launches. Must not run during a graph capture.
  std::string Prepare(const Driver& driver, void* stream);

  // Zeroes outputs and launches, both on `stream`: no allocation, no copy, no wait. The kernel's
  // arguments are the inputs, the outputs, the scalars.
  std::string Launch(const Driver& driver, void* stream, const std::vector<void*>& inputs,
                     const std::vector<DeviceBuffer>& outputs);

 private:
  std::string LoadLocked(const Driver& driver);
  std::string FunctionOf(const Driver& driver, void* context, void** function);
  std::string ReadAttributes(const Driver& driver, void* function);
  std::string Zero(const Driver& driver, void* stream, const std::vector<DeviceBuffer>& outputs);

  const LaunchPlan plan_;
  std::mutex mutex_;  // guards the members below: each device launches from its own thread
  std::shared_ptr<CubinLibrary> library_;
  void* kernel_ = nullptr;
  std::string attributes_;                          // of the code that was loaded last
  std::vector<std::pair<void*, void*>> functions_;  // context, function
};

}  // namespace sgap
