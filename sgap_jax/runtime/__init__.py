"""The native library: loading, version guard, registration."""

from sgap_jax.runtime.native import info

__all__ = ["info"]
