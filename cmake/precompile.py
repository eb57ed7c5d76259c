"""The default points, compiled at build time: python precompile.py OUT [NAME ...] [--for GPU]

Fills the folder OUT with one archive for each architecture (sgap_jax/launch/precompiled.py), or
those alone that serve a GPU ("sm_86"), of all launch plans or of those named. Runs in the
interpreter of the build, which need have no JAX, and needs NVRTC: its wheel there, or a toolkit
(CUDA_HOME). With --check it looks for that, no more.
"""

import argparse
import importlib
import importlib.machinery
import os
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "sgap_jax"
NO_NVRTC = 3  # exit status


def import_from_source(name: str) -> types.ModuleType:
    """A module of the package's without running __init__.py, which needs the native library."""
    # The finder of an editable install may know another checkout of the package.
    standard = {importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter}
    standard.add(importlib.machinery.PathFinder)
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder in standard]
    for package in ("sgap_jax", "sgap_jax.launch"):
        module = types.ModuleType(package)
        module.__path__ = [str(PACKAGE.joinpath(*package.split(".")[1:]))]
        sys.modules.setdefault(package, module)
    return importlib.import_module(f"sgap_jax.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--for", metavar="GPU", dest="gpu")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    default_calls = import_from_source("launch.defaults")
    nvrtc, kernel_call, precompiled = (
        import_from_source(f"launch.{name}") for name in ("nvrtc", "kernel_call", "precompiled")
    )
    cubin = import_from_source("launch.cache").Cubin
    try:
        version = nvrtc.version()
    except nvrtc.NvrtcMissing as error:
        print(error, file=sys.stderr)
        sys.exit(NO_NVRTC)
    if args.check:
        print(version)
        return

    start, folder = time.perf_counter(), kernel_call.header_folder()
    include = kernel_call.include_options(folder)
    names = args.names or list(default_calls.NAMES)
    calls = [call for name in names for call in default_calls.default_calls(name).values()]
    workers = int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or os.cpu_count() or 1)
    archs = tuple(precompiled.serving(args.gpu)) if args.gpu else precompiled.ARCHITECTURES
    with ThreadPoolExecutor(workers) as pool:  # ctypes lets go of the interpreter's lock
        for arch in archs or precompiled.ARCHITECTURES:

            def compile(call, arch=arch):
                made = nvrtc.compile(call.source, arch=arch, options=include)
                texts = kernel_call.included_headers(call.source, folder)
                return precompiled.key(call, texts), cubin(made.name, made.cubin)

            path = precompiled.write(args.out, arch, version, dict(pool.map(compile, calls)))
            print(f"{path.name}: {len(calls)} kernels, {path.stat().st_size >> 10} kB")
    print(f"NVRTC {version}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
