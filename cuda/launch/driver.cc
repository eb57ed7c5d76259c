#include "cuda/launch/driver.h"

#include <dlfcn.h>

namespace sgap {
namespace {

struct Symbol {
  const char* name;
  void** slot;
};

template <typename Function>
Symbol Slot(const char* name, Function* function) {
  static_assert(sizeof(*function) == sizeof(void*));
  return {name, reinterpret_cast<void**>(function)};
}

}  // namespace

std::string OpenDriver(const char* library, Driver* driver) {
  const Symbol symbols[] = {
      Slot("cuInit", &driver->cuInit),
      Slot("cuGetErrorName", &driver->cuGetErrorName),
      Slot("cuGetErrorString", &driver->cuGetErrorString),
      Slot("cuStreamGetCtx", &driver->cuStreamGetCtx),
      Slot("cuCtxGetCurrent", &driver->cuCtxGetCurrent),
      Slot("cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent),
      Slot("cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent),
      Slot("cuLibraryLoadData", &driver->cuLibraryLoadData),
      Slot("cuLibraryUnload", &driver->cuLibraryUnload),
      Slot("cuLibraryGetKernel", &driver->cuLibraryGetKernel),
      Slot("cuKernelGetFunction", &driver->cuKernelGetFunction),
      Slot("cuFuncGetAttribute", &driver->cuFuncGetAttribute),
      Slot("cuFuncSetAttribute", &driver->cuFuncSetAttribute),
      Slot("cuMemsetD8Async", &driver->cuMemsetD8Async),
      Slot("cuLaunchKernel", &driver->cuLaunchKernel),
  };
  // Never closed: kernels and contexts belong to it until the process ends.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    return std::string("no NVIDIA driver: ") + library + " does not load (" +
           (why ? why : "no reason given") +
           "). Install a driver of CUDA 12.0 (525) or later, or run on the CPU";
  }
  for (const Symbol& symbol : symbols) {
    *symbol.slot = dlsym(handle, symbol.name);
    if (*symbol.slot == nullptr) {
      return std::string(library) + " has no " + symbol.name +
             ": a driver of CUDA 12.0 (525) or later is needed";
    }
  }
  const CuResult result = driver->cuInit(0);
  return result == kCuSuccess ? "" : DriverError(*driver, "cuInit", "", result);
}

const SystemDriver& GetSystemDriver() {
  static const SystemDriver* driver = [] {
    auto* opened = new SystemDriver();
    opened->error = OpenDriver("libcuda.so.1", &opened->functions);
    return opened;
  }();
  return *driver;
}

std::string DriverError(const Driver& driver, const char* call, const std::string& subject,
                        CuResult error) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(error, &name);  // null for a code newer than the driver
  driver.cuGetErrorString(error, &text);
  return std::string(call) + (subject.empty() ? "" : " (" + subject + ")") + ": " +
         (name ? name : "CUDA error") + " (" + std::to_string(error) + ")" +
         (text ? std::string(": ") + text : "");
}

}  // namespace sgap
