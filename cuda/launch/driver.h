// The driver functions that a launch calls, as a table that is filled from libcuda.so.1 where that
// exists: building needs neither CUDA headers nor the toolkit. Handles are opaque here.
#pragma once

#include <cstddef>
#include <string>

namespace sgap {

using CuResult = int;  // CUresult
using CuDevicePointer = unsigned long long;
constexpr CuResult kCuSuccess = 0;
// CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES and so on
constexpr int kCuLocalSizeBytes = 3, kCuNumRegs = 4, kCuBinaryVersion = 6;
constexpr int kCuMaxDynamicSharedSizeBytes = 8;

// Names are those of cuda.h; the symbols looked up are its versioned ones (cuCtxPushCurrent_v2).
struct Driver {
  CuResult (*cuInit)(unsigned flags);
  CuResult (*cuGetErrorName)(CuResult error, const char** name);
  CuResult (*cuGetErrorString)(CuResult error, const char** text);
  CuResult (*cuStreamGetCtx)(void* stream, void** context);
  CuResult (*cuCtxGetCurrent)(void** context);
  CuResult (*cuCtxPushCurrent)(void* context);
  CuResult (*cuCtxPopCurrent)(void** context);
  CuResult (*cuLibraryLoadData)(void** library, const void* code, int* jit_options,
                                void** jit_values, unsigned jit_count, int* library_options,
                                void** library_values, unsigned library_count);
  CuResult (*cuLibraryUnload)(void* library);
  CuResult (*cuLibraryGetKernel)(void** kernel, void* library, const char* name);
  CuResult (*cuKernelGetFunction)(void** function, void* kernel);
  CuResult (*cuFuncGetAttribute)(int* value, int attribute, void* function);
  CuResult (*cuFuncSetAttribute)(void* function, int attribute, int value);
  CuResult (*cuMemsetD8Async)(CuDevicePointer data, unsigned char value, size_t bytes,
                              void* stream);
  CuResult (*cuLaunchKernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z,
                             unsigned shared_bytes, void* stream, void** arguments, void** extra);
};

// Fills `driver` from a shared library and initialises it. Returns an empty string, or the error.
std::string OpenDriver(const char* library, Driver* driver);

// The driver of this machine, opened at the first call and never closed.
struct SystemDriver {
  Driver functions;
  std::string error;  // empty where `functions` can be called
};
const SystemDriver& GetSystemDriver();

// "cuLaunchKernel (spmm): CUDA_ERROR_INVALID_VALUE (1): invalid argument"
std::string DriverError(const Driver& driver, const char* call, const std::string& subject,
                        CuResult error);

}  // namespace sgap
