"""Puts the installed package in front of the checkout, whose own is not built.

    python benchmarks/gpu/use_installed.py SITE

Exits with 0 if this interpreter has a sgap_jax of its own with the checkout's Python sources, or a
sgap_jax and no tools to build another; SITE/sgap_jax is then a link to it. Else with 1: build one.
"""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def installed() -> pathlib.Path | None:
    """The folder of the sgap_jax that is installed, with its native library; None without."""
    # Not the checkout's, nor one of an earlier link.
    sys.path[:] = [p for p in sys.path if p and not pathlib.Path(p).resolve().is_relative_to(ROOT)]
    spec = importlib.util.find_spec("sgap_jax")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in map(pathlib.Path, places):
        if any(place.glob("_native*")):
            return place
    return None


def same_sources(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two folders have the same Python files."""
    each = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*.py")} for f in (one, other)]
    return each[0] == each[1]


def main(site: pathlib.Path) -> int:
    package = installed()
    if package is None:
        return 1
    if not same_sources(package, ROOT / "sgap_jax"):
        if importlib.util.find_spec("scikit_build_core") is not None:
            return 1
        print(f"{package} differs from this checkout, and there are no tools to build: it is used")
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    (site / "sgap_jax").symlink_to(package, target_is_directory=True)
    print(f"== using {package}")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
