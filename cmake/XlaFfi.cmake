# xla_ffi: the header-only XLA FFI API, found by asking the jax of the interpreter that builds us.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import jax; print(jax.ffi.include_dir())"
  OUTPUT_VARIABLE XLA_FFI_INCLUDE_DIR
  OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE xla_ffi_failed)
if(xla_ffi_failed OR NOT EXISTS "${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "${Python_EXECUTABLE} has no jax with the FFI headers: install 'jax>=0.10,<0.11' there")
endif()

add_library(xla_ffi INTERFACE)
target_include_directories(xla_ffi SYSTEM INTERFACE "${XLA_FFI_INCLUDE_DIR}")
