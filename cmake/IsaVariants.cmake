# sgap_add_isa_variants(<out_var> <table> <sources...>): one object library per instruction set from the same sources;
# those of SGAP_TILE_ISAS from the table of kernels and, among the sources, the *_octet*_kernel.cc and those of integers; the first of them also
# from the kernels of bfloat16 in pairs. Each is compiled with SGAP_ISA=<isa>, the namespace of everything in it, so that the variants can share a module.
set(SGAP_ISA_FLAGS_baseline "")
set(SGAP_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SGAP_ISA_FLAGS_avx512
    -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mprefer-vector-width=512)

# These have the kernels of SGAP_ISA_BASE, but for those of matrix tiles (cpu/simd/tiles.h), of bfloat16 in pairs
# (cpu/simd/pairs.h) and of integers (SGAP_INTEGER_KERNEL in cpu/kernels.def); those of pairs are those of SGAP_ISA_PAIRS.
# The assembler knows AMX; the compiler need not.
set(SGAP_ISA_FLAGS_avx512_bf16 ${SGAP_ISA_FLAGS_avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi2 -mbmi2)
set(SGAP_ISA_FLAGS_amx ${SGAP_ISA_FLAGS_avx512_bf16} -DSGAP_AMX=1)
set(SGAP_ISA_BASE avx512)
set(SGAP_ISA_PAIRS avx512_bf16)
set(SGAP_PAIR_SOURCES "/(spmm|spmm_cvs|spmm_scatter|sddmm|sddmm_cvs|sparse_softmax)_kernel\\.cc$")
set(SGAP_INTEGER_SOURCES "/(bitmap|top_k(_indexer)?)_kernel\\.cc$")

set(SGAP_ONLY_ISA "" CACHE STRING "One instruction set (baseline, avx2 or avx512) and no choice at load: a quick build for one machine")
set(SGAP_ISAS baseline)
set(SGAP_TILE_ISAS "")
set(SGAP_SEVERAL_ISAS 0)
if(SGAP_ONLY_ISA)
  if(NOT SGAP_ONLY_ISA MATCHES "^(baseline|avx2|avx512)$")
    message(FATAL_ERROR "SGAP_ONLY_ISA=${SGAP_ONLY_ISA}: expected baseline, avx2 or avx512")
  endif()
  set(SGAP_ISAS ${SGAP_ONLY_ISA})
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND SGAP_ISAS avx2 avx512)
  list(APPEND SGAP_TILE_ISAS avx512_bf16 amx)
  set(SGAP_SEVERAL_ISAS 1)
endif()

# An object library of kernels for one instruction set.
function(sgap_add_kernels name isa)
  add_library(${name} OBJECT ${ARGN})
  target_compile_definitions(${name} PRIVATE SGAP_ISA=${isa} SGAP_ISA_${isa}=1)
  if(isa IN_LIST SGAP_TILE_ISAS)
    target_compile_definitions(${name} PRIVATE SGAP_BASE_ISA=${SGAP_ISA_BASE} SGAP_PAIR_ISA=${SGAP_ISA_PAIRS})
  endif()
  target_include_directories(${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${SGAP_KERNEL_FLAGS} ${SGAP_ISA_FLAGS_${isa}})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

function(sgap_add_isa_variants out_var table)
  set(targets "")
  set(others ${ARGN})
  set(tiles ${ARGN})
  list(FILTER others EXCLUDE REGEX "_octet(_[a-z]+)?_kernel\\.cc$")
  list(FILTER tiles INCLUDE REGEX "_octet(_[a-z]+)?_kernel\\.cc$")
  set(pairs ${ARGN})
  list(FILTER pairs INCLUDE REGEX "${SGAP_PAIR_SOURCES}")
  set(integers ${ARGN})
  list(FILTER integers INCLUDE REGEX "${SGAP_INTEGER_SOURCES}")
  foreach(isa IN LISTS SGAP_ISAS SGAP_TILE_ISAS)
    if(isa STREQUAL SGAP_ISA_PAIRS)
      sgap_add_kernels(sgap_kernels_${isa} ${isa} ${table} ${tiles} ${integers} ${pairs})
      list(APPEND targets sgap_kernels_${isa})
    elseif(isa IN_LIST SGAP_TILE_ISAS)
      sgap_add_kernels(sgap_kernels_${isa} ${isa} ${table} ${tiles} ${integers})
      list(APPEND targets sgap_kernels_${isa})
    elseif(isa STREQUAL SGAP_ISA_BASE)
      sgap_add_kernels(sgap_kernels_${isa} ${isa} ${table} ${ARGN})
      list(APPEND targets sgap_kernels_${isa})
    else()
      sgap_add_kernels(sgap_kernels_${isa} ${isa} ${table} ${others})
      list(APPEND targets sgap_kernels_${isa}) # before the tiles: of what both have the linker takes the first
      sgap_add_kernels(sgap_tiles_${isa} ${isa} ${tiles})
      # A row of a tile is several registers here: -O3 compiles for 2.5 times as long as -O2, for schedules that no rule
      # chooses without a matrix unit.
      if(SGAP_OPTIMIZATION STREQUAL "-O3")
        target_compile_options(sgap_tiles_${isa} PRIVATE -O2)
      endif()
      list(APPEND targets sgap_tiles_${isa})
    endif()
  endforeach()
  set(${out_var} ${targets} PARENT_SCOPE)
endfunction()
