// Handlers of the launch target that also run on the CPU backend of JAX: they lend it a stream,
// 0x10 + the device's number, and leave everything else to the real handlers. Before EXECUTE comes
// INITIALIZE, as on a GPU; the CPU backend leaves that out.
#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Handler* handlers[3];
XLA_FFI_Api lent;
const XLA_FFI_Api* original = nullptr;

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, nullptr,
                                           args->ctx, 0};
  if (XLA_FFI_Error* error = original->XLA_FFI_DeviceOrdinal_Get(&device)) return error;
  args->stream = reinterpret_cast<void*>(static_cast<long>(0x10 + device.device_ordinal));
  return nullptr;
}

XLA_FFI_Error* Forward(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (original == nullptr) {  // first at registration, under Python's lock
    lent = *frame->api;
    lent.XLA_FFI_Stream_Get = GetStream;
    original = frame->api;
  }
  frame->api = &lent;
  XLA_FFI_Error* error = handler(frame);
  frame->api = original;
  return error;
}

}  // namespace

extern "C" {

void lend_streams_to(XLA_FFI_Handler* instantiate, XLA_FFI_Handler* initialize,
                     XLA_FFI_Handler* execute) {
  handlers[0] = instantiate;
  handlers[1] = initialize;
  handlers[2] = execute;
}

XLA_FFI_Error* cpu_instantiate(XLA_FFI_CallFrame* frame) { return Forward(handlers[0], frame); }
XLA_FFI_Error* cpu_initialize(XLA_FFI_CallFrame* frame) { return Forward(handlers[1], frame); }
XLA_FFI_Error* cpu_execute(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start == nullptr) {  // no question for metadata
    frame->stage = XLA_FFI_ExecutionStage_INITIALIZE;
    if (XLA_FFI_Error* error = Forward(handlers[1], frame)) return error;
    frame->stage = XLA_FFI_ExecutionStage_EXECUTE;
  }
  return Forward(handlers[2], frame);
}
}
