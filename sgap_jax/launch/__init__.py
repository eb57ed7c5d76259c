"""Launches of CUDA kernels: a plan for each operation, NVRTC, the kernel cache, the custom call.

The plans import no JAX: the build runs them to compile the kernels that a wheel carries.
"""
