"""`python -m sgap_jax info` prints what was chosen, versions and devices."""

from __future__ import annotations

import argparse

from sgap_jax.runtime import info


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sgap_jax")
    parser.add_argument("command", choices=["info"], help="info: versions, CPU kernels, devices")
    parser.parse_args()
    facts = info()
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        print(f"{name:<{width}}  {text}")


if __name__ == "__main__":
    main()
