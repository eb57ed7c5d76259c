#include "cuda/launch/launch_core.h"

#include <climits>
#include <utility>

namespace sgap {
namespace {

// Makes a stream's context current if it is not, for the lifetime of this object.
class StreamContext {
 public:
  StreamContext(const Driver& driver, void* stream) : driver_(driver) {
    CuResult result = driver.cuStreamGetCtx(stream, &context_);
    if (result != kCuSuccess) {
      error_ = DriverError(driver, "cuStreamGetCtx", "", result);
      return;
    }
    void* current = nullptr;
    result = driver.cuCtxGetCurrent(&current);
    if (result != kCuSuccess) {
      error_ = DriverError(driver, "cuCtxGetCurrent", "", result);
      return;
    }
    if (current == context_) return;
    result = driver.cuCtxPushCurrent(context_);
    pushed_ = result == kCuSuccess;
    if (!pushed_) error_ = DriverError(driver, "cuCtxPushCurrent", "", result);
  }
  ~StreamContext() {
    void* popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

  const std::string& error() const { return error_; }
  void* get() const { return context_; }

 private:
  const Driver& driver_;
  void* context_ = nullptr;
  bool pushed_ = false;
  std::string error_;
};

std::string Sizes(const std::array<int64_t, 3>& sizes) {
  return std::to_string(sizes[0]) + " x " + std::to_string(sizes[1]) + " x " +
         std::to_string(sizes[2]);
}

constexpr int64_t kMaxThreads = 1024;

}  // namespace

CubinLibrary::~CubinLibrary() {
  // No launch may still be running. When the process ends the driver may already be gone, so its
  // result is ignored.
  driver_.cuLibraryUnload(handle_);
}

std::shared_ptr<CubinLibrary> CubinLibrary::Of(const Driver& driver, const std::string& cubin,
                                               const std::string& kernel, std::string* error) {
  static std::mutex mutex;
  static auto* loaded = new std::vector<std::weak_ptr<CubinLibrary>>();  // outlives other statics
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = loaded->size(); i-- > 0;) {
    const std::shared_ptr<CubinLibrary> one = (*loaded)[i].lock();
    if (!one) {
      loaded->erase(loaded->begin() + i);
    } else if (&one->driver_ == &driver && one->cubin_ == cubin) {
      return one;
    }
  }
  void* handle = nullptr;
  const CuResult result =
      driver.cuLibraryLoadData(&handle, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (result != kCuSuccess) {
    *error = DriverError(driver, "cuLibraryLoadData", kernel, result);
    return nullptr;
  }
  auto library = std::make_shared<CubinLibrary>(driver, cubin, handle);
  loaded->push_back(library);
  return library;
}

std::string LaunchKernel::Check() const {
  if (plan_.cubin.empty()) return "cubin: expected a compiled kernel, got nothing";
  if (plan_.kernel.empty()) return "kernel: expected a name, got nothing";
  // A grid may be empty (no rows, no columns); the driver knows each device's own limits.
  for (int64_t size : plan_.grid) {
    if (size < 0 || size > INT_MAX) {
      return "grid: expected sizes in [0, 2147483647], got " + Sizes(plan_.grid);
    }
  }
  int64_t threads = 1;
  for (int64_t size : plan_.block) {
    if (size < 1 || size > kMaxThreads || (threads *= size) > kMaxThreads) {
      return "block: expected 1 to 1024 threads, got " + Sizes(plan_.block);
    }
  }
  if (plan_.shared_bytes < 0 || plan_.shared_bytes > INT_MAX) {
    return "shared_bytes: expected a size in [0, 2147483647], got " +
           std::to_string(plan_.shared_bytes);
  }
  return "";
}

std::string LaunchKernel::Load(const Driver& driver) {
  std::lock_guard<std::mutex> lock(mutex_);
  return LoadLocked(driver);
}

std::string LaunchKernel::LoadLocked(const Driver& driver) {
  if (kernel_ != nullptr) return "";
  std::string error;
  auto library = CubinLibrary::Of(driver, plan_.cubin, plan_.kernel, &error);
  if (!library) return error;
  void* kernel = nullptr;
  const CuResult result =
      driver.cuLibraryGetKernel(&kernel, library->handle(), plan_.kernel.c_str());
  if (result != kCuSuccess) return DriverError(driver, "cuLibraryGetKernel", plan_.kernel, result);
  library_ = std::move(library);
  kernel_ = kernel;
  return "";
}

// Attributes are known once the code is loaded: asking for them loads it where the driver would
// wait for the first launch, which may be in a graph capture.
std::string LaunchKernel::ReadAttributes(const Driver& driver, void* function) {
  int registers = 0, local_bytes = 0, version = 0;
  for (const auto& [attribute, value] : {std::pair(kCuNumRegs, &registers),
                                         {kCuLocalSizeBytes, &local_bytes},
                                         {kCuBinaryVersion, &version}}) {
    const CuResult result = driver.cuFuncGetAttribute(value, attribute, function);
    if (result != kCuSuccess) {
      return DriverError(driver, "cuFuncGetAttribute", plan_.kernel, result);
    }
  }
  attributes_ = std::to_string(registers) + " registers and " + std::to_string(local_bytes) +
                " local bytes a thread, code for sm_" + std::to_string(version);
  return "";
}

std::string LaunchKernel::FunctionOf(const Driver& driver, void* context, void** function) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [known, loaded] : functions_) {
    if (known == context) {
      *function = loaded;
      return "";
    }
  }
  if (std::string error = LoadLocked(driver); !error.empty()) return error;
  CuResult result = driver.cuKernelGetFunction(function, kernel_);
  if (result != kCuSuccess) {
    return DriverError(driver, "cuKernelGetFunction", plan_.kernel, result);
  }
  if (std::string error = ReadAttributes(driver, *function); !error.empty()) return error;
  if (plan_.shared_bytes > 0) {  // above 48 KiB, static included, the kernel must opt in
    result = driver.cuFuncSetAttribute(*function, kCuMaxDynamicSharedSizeBytes,
                                       static_cast<int>(plan_.shared_bytes));
    if (result != kCuSuccess) {
      return DriverError(
          driver, "cuFuncSetAttribute",
          plan_.kernel + ", " + std::to_string(plan_.shared_bytes) + " bytes of shared memory",
          result);
    }
  }
  functions_.emplace_back(context, *function);
  return "";
}

std::string LaunchKernel::Prepare(const Driver& driver, void* stream) {
  StreamContext context(driver, stream);
  if (!context.error().empty()) return context.error();
  void* function = nullptr;
  return FunctionOf(driver, context.get(), &function);
}

std::string LaunchKernel::Zero(const Driver& driver, void* stream,
                               const std::vector<DeviceBuffer>& outputs) {
  for (int64_t index : plan_.zero) {
    if (index < 0 || index >= static_cast<int64_t>(outputs.size())) {
      return "zero: expected positions of the " + std::to_string(outputs.size()) +
             " outputs, got " + std::to_string(index);
    }
    const DeviceBuffer& output = outputs[index];
    if (output.bytes == 0) continue;
    const CuResult result = driver.cuMemsetD8Async(reinterpret_cast<CuDevicePointer>(output.data),
                                                   0, output.bytes, stream);
    if (result != kCuSuccess) {
      return DriverError(driver, "cuMemsetD8Async",
                         plan_.kernel + ", output " + std::to_string(index) + " of " +
                             std::to_string(output.bytes) + " bytes",
                         result);
    }
  }
  return "";
}

std::string LaunchKernel::Launch(const Driver& driver, void* stream,
                                 const std::vector<void*>& inputs,
                                 const std::vector<DeviceBuffer>& outputs) {
  StreamContext context(driver, stream);
  if (!context.error().empty()) return context.error();
  const auto& grid = plan_.grid;
  const auto& block = plan_.block;
  // The driver rejects a launch of zero blocks; the outputs must be zeroed all the same.
  const bool blocks = grid[0] > 0 && grid[1] > 0 && grid[2] > 0;
  void* function = nullptr;
  std::string error = blocks ? FunctionOf(driver, context.get(), &function) : "";
  if (error.empty()) error = Zero(driver, stream, outputs);
  if (!error.empty() || !blocks) return error;
  // The driver wants the address of every argument and copies each before it returns.
  std::vector<const void*> arguments;
  arguments.reserve(inputs.size() + outputs.size() + plan_.scalars.size());
  for (void* const& input : inputs) arguments.push_back(&input);
  for (const DeviceBuffer& output : outputs) arguments.push_back(&output.data);
  for (const int64_t& scalar : plan_.scalars) arguments.push_back(&scalar);
  const auto size = [](int64_t value) { return static_cast<unsigned>(value); };
  const CuResult result =
      driver.cuLaunchKernel(function, size(grid[0]), size(grid[1]), size(grid[2]), size(block[0]),
                            size(block[1]), size(block[2]), size(plan_.shared_bytes), stream,
                            const_cast<void**>(arguments.data()), nullptr);
  if (result == kCuSuccess) return "";
  std::lock_guard<std::mutex> lock(mutex_);
  return DriverError(driver, "cuLaunchKernel",
                     plan_.kernel + ", grid " + Sizes(grid) + ", block " + Sizes(block) + ", " +
                         std::to_string(plan_.shared_bytes) + " bytes of shared memory, " +
                         attributes_,
                     result);
}

}  // namespace sgap
