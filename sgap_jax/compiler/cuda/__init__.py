"""The loop IR as one CUDA kernel and its launch."""
