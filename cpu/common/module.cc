// The Python module sgap_jax._native: FFI targets as capsules and what was built and chosen.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "cpu/common/handlers.h"
#include "cpu/common/isa.h"
#include "cpu/compiled/compiled.h"
#include "cuda/launch/launch_ffi.h"

namespace nb = nanobind;

namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// The names are ABI: exported programs refer to them. A change of meaning takes a new version.
nb::dict Targets() {
  nb::dict targets;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    targets[name] = Capsule(handler);
  };
  add("sgap_spmm_csr_v1", sgap::SpmmCsr);
  add("sgap_spmm_cvs_v1", sgap::SpmmCvs);
  add("sgap_spmm_cvs_scatter_v1", sgap::SpmmCvsScatter);
  add("sgap_gspmm_csr_v1", sgap::GspmmCsr);
  add("sgap_gspmm_pick_csr_v1", sgap::GspmmPickCsr);
  add("sgap_gspmm_pick_to_x_csr_v1", sgap::GspmmPickToXCsr);
  add("sgap_gspmm_pick_to_values_csr_v1", sgap::GspmmPickToValuesCsr);
  add("sgap_sddmm_csr_v1", sgap::SddmmCsr);
  add("sgap_sddmm_cvs_v1", sgap::SddmmCvs);
  add("sgap_sparse_softmax_csr_v1", sgap::SparseSoftmaxCsr);
  add("sgap_sparse_softmax_cvs_v1", sgap::SparseSoftmaxCvs);
  add("sgap_sparse_softmax_jacobian_csr_v1", sgap::SparseSoftmaxJacobianCsr);
  add("sgap_sparse_softmax_jacobian_cvs_v1", sgap::SparseSoftmaxJacobianCvs);
  add("sgap_attention_cvs_v1", sgap::AttentionCvs);
  add("sgap_attention_backward_cvs_v1", sgap::AttentionBackwardCvs);
  add("sgap_row_sum_csr_v1", sgap::RowSumCsr);
  add("sgap_row_sum_cvs_v1", sgap::RowSumCvs);
  add("sgap_row_max_csr_v1", sgap::RowMaxCsr);
  add("sgap_row_max_cvs_v1", sgap::RowMaxCvs);
  add("sgap_row_broadcast_csr_v1", sgap::RowBroadcastCsr);
  add("sgap_row_broadcast_cvs_v1", sgap::RowBroadcastCvs);
  add("sgap_check_csr_v1", sgap::CheckCsr);
  add("sgap_check_levels_v1", sgap::CheckLevels);
  add("sgap_valid_offsets_v1", sgap::MakeOffsetsValid);
  nb::dict compiled;
  compiled["instantiate"] = Capsule(sgap::CompiledInstantiate);
  compiled["execute"] = Capsule(sgap::Compiled);
  targets["sgap_compiled_v1"] = compiled;
  return targets;
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
  module.def("isa", [] { return std::string(sgap::Kernels().isa); });
  module.def("supported_isas", &sgap::SupportedIsas);
  module.def("ffi_api_version",
             [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
}
