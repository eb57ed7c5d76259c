# sgap_add_isa_variants(<out_var> <sources...>): one object library per instruction set from the same sources.
# Each is compiled with SGAP_ISA=<isa>, the namespace of everything in it, so that the variants can share a module.
set(SGAP_ISA_FLAGS_baseline "")
set(SGAP_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SGAP_ISA_FLAGS_avx512
    -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)

set(SGAP_ISAS baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND SGAP_ISAS avx2 avx512)
endif()

function(sgap_add_isa_variants out_var)
  set(targets "")
  foreach(isa IN LISTS SGAP_ISAS)
    add_library(sgap_kernels_${isa} OBJECT ${ARGN})
    target_compile_definitions(sgap_kernels_${isa} PRIVATE SGAP_ISA=${isa} SGAP_ISA_${isa}=1)
    target_include_directories(sgap_kernels_${isa} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
    target_compile_options(sgap_kernels_${isa} PRIVATE ${SGAP_KERNEL_FLAGS} ${SGAP_ISA_FLAGS_${isa}})
    set_target_properties(sgap_kernels_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    list(APPEND targets sgap_kernels_${isa})
  endforeach()
  set(${out_var} ${targets} PARENT_SCOPE)
endfunction()
