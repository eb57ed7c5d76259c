"""The doctor's worker where JAX's CPU backend runs the launches, with a driver that stands in.

python doctor_on_cpu.py <cpu_stream.so> LAYER
"""

import os
import sys

FLAGS = os.environ.get("XLA_FLAGS", "")

from on_cpu import register_for_cpu  # noqa: E402  sets XLA_FLAGS: two devices

from sgap_jax.doctor import worker  # noqa: E402

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] += f" {FLAGS}"
    register_for_cpu(sys.argv[1])
    worker.main(sys.argv[2])
