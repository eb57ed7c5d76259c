"""Prints the loop IR as one CUDA kernel, and makes its launch plan."""
