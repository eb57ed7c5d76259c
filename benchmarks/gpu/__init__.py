"""Benchmarks on one NVIDIA GPU: python -m benchmarks.gpu.run [--dry-run] (`make gpu-bench`)."""
