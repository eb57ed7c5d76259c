// The Python module sgap_jax._native: FFI targets as capsules and what was built and chosen.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "cpu/common/isa.h"
#include "cpu/common/machine.h"
#include "cpu/common/workspace.h"
#include "cpu/compiled/compiled.h"
#include "cuda/launch/launch_ffi.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace sgap {
#define SGAP_TARGET(name, Handler) XLA_FFI_DECLARE_HANDLER_SYMBOL(Handler);
#define SGAP_STAGED_TARGET(name, Instantiate, Execute) \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(Instantiate);         \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(Execute);
#include "cpu/kernels.def"

void DefineDirect(nb::module_& module);    // direct.cc
void DefineTestCall(nb::module_& module);  // test_call.cc
}  // namespace sgap

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Targets() {
  nb::dict targets;
#define SGAP_TARGET(name, Handler) targets[#name] = Capsule(sgap::Handler);
#define SGAP_STAGED_TARGET(name, Instantiate, Execute) \
  nb::dict name;                                       \
  name["instantiate"] = Capsule(sgap::Instantiate);    \
  name["execute"] = Capsule(sgap::Execute);            \
  targets[#name] = name;
#include "cpu/kernels.def"
  return targets;
}

nb::dict MachineRead() {
  const sgap::Machine& found = sgap::ThisMachine();
  nb::dict machine;
  machine["l1_bytes"] = found.l1_bytes;
  machine["l2_bytes"] = found.l2_bytes;
  machine["l3_bytes"] = found.l3_bytes;
  machine["cores"] = found.cores;
  machine["intel"] = found.intel;
  machine["whole"] = found.whole;
  return machine;
}

nb::dict CudaTargets() {
  nb::dict stages;
  stages["instantiate"] = Capsule(sgap::LaunchInstantiate);
  stages["initialize"] = Capsule(sgap::LaunchInitialize);
  stages["execute"] = Capsule(sgap::LaunchExecute);
  nb::dict targets;
  targets["sgap_launch_v1"] = stages;
  return targets;
}

// Python's hold on a kernel.
struct Hold {
  sgap::HeldKernelPtr kernel;
};

// What the FFI target sgap_compiled_v1 runs under this key, for as long as somebody holds it.
Hold Register(const std::string& key, const std::vector<uint64_t>& addresses,
              const std::vector<int64_t>& iterations, const std::vector<int64_t>& array_bytes,
              int64_t scratch_bytes, int64_t code) {
  if (addresses.size() != iterations.size()) {
    throw std::invalid_argument("register_compiled: one address and one count for each phase");
  }
  sgap::CompiledKernel kernel;
  for (const uint64_t address : addresses) {
    kernel.phases.push_back(reinterpret_cast<sgap::CompiledPhase>(address));
  }
  kernel.iterations = iterations;
  kernel.array_bytes = array_bytes;
  kernel.scratch_bytes = scratch_bytes;
  kernel.code = code;
  return {sgap::RegisterCompiled(key, std::move(kernel))};
}

// None where nobody holds it.
nb::object Find(const std::string& key) {
  sgap::HeldKernelPtr found = sgap::FindCompiled(key);
  return found ? nb::cast(Hold{std::move(found)}) : nb::none();
}

}  // namespace

NB_MODULE(_native, module) {
  const char* requested = std::getenv("SGAP_CPU_ISA");
  try {
    sgap::SelectIsa(requested ? requested : "");
    sgap::ThisMachine();
  } catch (const std::invalid_argument& error) {
    throw nb::import_error(error.what());
  }
  module.def("targets", &Targets, "FFI target names and their handlers, for platform cpu.");
  module.def("cuda_targets", &CudaTargets,
             "FFI target names and their handlers by stage, for platform CUDA.");
  module.def("register_compiled", &Register, nb::arg("key"), nb::arg("addresses"),
             nb::arg("iterations"), nb::arg("array_bytes"), nb::arg("scratch_bytes"),
             nb::arg("code"),
             "Names machine code of this process by its content, for sgap_compiled_v1. What comes "
             "back holds it, as executables do that run it.");
  module.def("find_compiled", &Find, nb::arg("key"));
  module.def("take_unused", &sgap::TakeUnused,
             "The `code` of kernels that nobody holds any more, each once.");
  nb::class_<Hold>(module, "Hold").def_prop_ro("taken", [](const Hold& hold) {
    return hold.kernel->taken.load(std::memory_order_relaxed);
  });
  sgap::DefineDirect(module);
  sgap::DefineTestCall(module);
  module.def("isa", [] { return std::string(sgap::Kernels().isa); });
  module.def("supported_isas", &sgap::SupportedIsas);
  module.def("machine", &MachineRead);
  module.def("keep_freed_memory", &sgap::KeepFreedMemory, nb::arg("bytes"));
  module.def("ffi_api_version",
             [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}
