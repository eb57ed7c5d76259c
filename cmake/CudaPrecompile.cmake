# Machine code of the default schedules, in the package: sgap_jax/cubins. Needs NVRTC, no toolkit and no GPU.
#   AUTO  in wheels, where NVRTC is found; not in editable installs, which compile what they use
#   ON    always; an error where there is no NVRTC
# Code of CUDA 12's NVRTC (12.8 or later, for sm_100) also loads into drivers of CUDA 12.
set(SGAP_CUBINS AUTO CACHE STRING "Compile the default CUDA kernels at build time: AUTO, ON or OFF")
set_property(CACHE SGAP_CUBINS PROPERTY STRINGS AUTO ON OFF)
set(SGAP_CUBINS_OPS "" CACHE STRING "Only of these launch plans (a list of names); empty: of all")
set(SGAP_CUBINS_FOR "" CACHE STRING "Only what serves this GPU (sm_90, say); empty: every architecture")

set(SGAP_PRECOMPILE "${CMAKE_CURRENT_SOURCE_DIR}/cmake/precompile.py")
set(sgap_cubins "${CMAKE_CURRENT_BINARY_DIR}/cubins${SGAP_CUBINS_FOR}")
set(sgap_precompiles OFF)
if(SGAP_CUBINS STREQUAL "AUTO")
  if(SKBUILD_STATE STREQUAL "wheel")
    set(sgap_precompiles ON)
  endif()
elseif(SGAP_CUBINS)
  set(sgap_precompiles ON)
endif()

if(sgap_precompiles)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${SGAP_PRECOMPILE}" "${sgap_cubins}" --check
    OUTPUT_VARIABLE nvrtc_version
    ERROR_VARIABLE nvrtc_error
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE nvrtc_missing)
  if(NOT nvrtc_missing)
    message(STATUS "CUDA kernels: compiled now, with NVRTC ${nvrtc_version}")
  elseif(SGAP_CUBINS STREQUAL "AUTO" AND nvrtc_missing EQUAL 3) # NO_NVRTC of the script
    message(STATUS "CUDA kernels: no NVRTC here, so they are compiled where they run")
    set(sgap_precompiles OFF)
  else()
    message(FATAL_ERROR "SGAP_CUBINS=${SGAP_CUBINS}: ${nvrtc_error}")
  endif()
endif()

if(sgap_precompiles)
  file(GLOB_RECURSE sgap_cubin_sources CONFIGURE_DEPENDS cuda/*.cuh sgap_jax/schedules/*.py
       sgap_jax/launch/*.py sgap_jax/formats/levels.py)
  set(sgap_cubins_for "")
  if(SGAP_CUBINS_FOR)
    set(sgap_cubins_for --for "${SGAP_CUBINS_FOR}")
  endif()
  add_custom_command(
    OUTPUT "${sgap_cubins}.made"
    COMMAND "${Python_EXECUTABLE}" "${SGAP_PRECOMPILE}" "${sgap_cubins}" ${SGAP_CUBINS_OPS} ${sgap_cubins_for}
    COMMAND "${CMAKE_COMMAND}" -E touch "${sgap_cubins}.made"
    DEPENDS "${SGAP_PRECOMPILE}" ${sgap_cubin_sources}
    COMMENT "Compiling the default CUDA kernels"
    VERBATIM)
  add_custom_target(sgap_cubins ALL DEPENDS "${sgap_cubins}.made")
  install(DIRECTORY "${sgap_cubins}/" DESTINATION sgap_jax/cubins)
endif()
