// The FFI handlers of the module, one line each.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace sgap {

XLA_FFI_DECLARE_HANDLER_SYMBOL(SpmmCsr);

}  // namespace sgap
