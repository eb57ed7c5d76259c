// The handlers of FFI target sgap_launch_v1, platform CUDA, one for each stage.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace sgap {

XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchInitialize);
XLA_FFI_DECLARE_HANDLER_SYMBOL(LaunchExecute);

}  // namespace sgap
