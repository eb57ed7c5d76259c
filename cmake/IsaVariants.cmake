# sgap_add_isa_variants(<out_var> <table> <sources...>): one object library per instruction set from the same sources;
# those of SGAP_TILE_ISAS from the table of kernels and the *_octet*_kernel.cc among the sources. Each is compiled with SGAP_ISA=<isa>, the namespace of everything in it, so that the variants can share a module.
set(SGAP_ISA_FLAGS_baseline "")
set(SGAP_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SGAP_ISA_FLAGS_avx512
    -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)

# These have the kernels of SGAP_ISA_BASE, but for those of matrix tiles (cpu/simd/tiles.h). The assembler knows AMX;
# the compiler need not.
set(SGAP_ISA_FLAGS_avx512_bf16 ${SGAP_ISA_FLAGS_avx512} -mavx512bf16)
set(SGAP_ISA_FLAGS_amx ${SGAP_ISA_FLAGS_avx512_bf16} -DSGAP_AMX=1)
set(SGAP_ISA_BASE avx512)

set(SGAP_ISAS baseline)
set(SGAP_TILE_ISAS "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND SGAP_ISAS avx2 avx512)
  list(APPEND SGAP_TILE_ISAS avx512_bf16 amx)
endif()

function(sgap_add_isa_variants out_var table)
  set(targets "")
  set(tile_sources ${ARGN})
  list(FILTER tile_sources INCLUDE REGEX "_octet(_[a-z]+)?_kernel\\.cc$")
  foreach(isa IN LISTS SGAP_ISAS SGAP_TILE_ISAS)
    if(isa IN_LIST SGAP_TILE_ISAS)
      add_library(sgap_kernels_${isa} OBJECT ${table} ${tile_sources})
      target_compile_definitions(sgap_kernels_${isa} PRIVATE SGAP_BASE_ISA=${SGAP_ISA_BASE})
    else()
      add_library(sgap_kernels_${isa} OBJECT ${table} ${ARGN})
    endif()
    target_compile_definitions(sgap_kernels_${isa} PRIVATE SGAP_ISA=${isa} SGAP_ISA_${isa}=1)
    target_include_directories(sgap_kernels_${isa} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
    target_compile_options(sgap_kernels_${isa} PRIVATE ${SGAP_KERNEL_FLAGS} ${SGAP_ISA_FLAGS_${isa}})
    set_target_properties(sgap_kernels_${isa} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    list(APPEND targets sgap_kernels_${isa})
  endforeach()
  set(${out_var} ${targets} PARENT_SCOPE)
endfunction()
