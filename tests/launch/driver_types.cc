// Compiled where a CUDA toolkit is: the table of cuda/launch/driver.h against cuda.h. Handles and enums
// count by size, everything else by type.
#include <cuda.h>

#include <type_traits>

#include "cuda/launch/driver.h"

template <typename Ours, typename Theirs>
constexpr bool kSame =
    std::is_same_v<Ours, Theirs> ||
    (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs> &&
     std::is_pointer_v<std::remove_pointer_t<Ours>> ==
         std::is_pointer_v<std::remove_pointer_t<Theirs>>) ||
    (std::is_same_v<Ours, int> && std::is_enum_v<Theirs> && sizeof(Ours) == sizeof(Theirs));

template <typename Ours, typename Theirs>
constexpr bool kAgree = false;
template <typename... Ours, typename... Theirs>
constexpr bool kAgree<sgap::CuResult (*)(Ours...), CUresult (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (kSame<Ours, Theirs> && ...);
  } else {
    return false;
  }
}();

#define CHECK(function) \
  static_assert(kAgree<decltype(sgap::Driver::function), decltype(&::function)>, #function)
CHECK(cuInit);
CHECK(cuGetErrorName);
CHECK(cuGetErrorString);
CHECK(cuStreamGetCtx);
CHECK(cuCtxGetCurrent);
CHECK(cuCtxPushCurrent);
CHECK(cuCtxPopCurrent);
CHECK(cuLibraryLoadData);
CHECK(cuLibraryUnload);
CHECK(cuLibraryGetKernel);
CHECK(cuKernelGetFunction);
CHECK(cuFuncGetAttribute);
CHECK(cuFuncSetAttribute);
CHECK(cuMemsetD8Async);
CHECK(cuLaunchKernel);
static_assert(sgap::kCuSuccess == CUDA_SUCCESS);
static_assert(sgap::kCuMaxDynamicSharedSizeBytes ==
              CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

// The symbols that driver.cc looks up are those that cuda.h's names stand for.
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
constexpr bool Equal(const char* a, const char* b) {
  return *a == *b && (*a == 0 || Equal(a + 1, b + 1));
}
static_assert(Equal(TEXT(cuCtxPushCurrent), "cuCtxPushCurrent_v2"));
static_assert(Equal(TEXT(cuCtxPopCurrent), "cuCtxPopCurrent_v2"));
static_assert(Equal(TEXT(cuStreamGetCtx), "cuStreamGetCtx"));
static_assert(Equal(TEXT(cuLibraryLoadData), "cuLibraryLoadData"));
static_assert(Equal(TEXT(cuMemsetD8Async), "cuMemsetD8Async"));
static_assert(Equal(TEXT(cuLaunchKernel), "cuLaunchKernel"));
