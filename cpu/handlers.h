// The FFI handlers of the module, one line each.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace sgap {

XLA_FFI_DECLARE_HANDLER_SYMBOL(SpmmCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SpmmCvs);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SddmmCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SddmmCvs);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SparseSoftmaxCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SparseSoftmaxJacobianCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RowSumCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RowMaxCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(RowBroadcastCsr);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CheckCsr);

}  // namespace sgap
