"""CUDA sources in tests: where the headers are, and NVRTC or the reason why there is none."""

import functools
import importlib.util
import pathlib
import re

import pytest

from sgap_jax.runtime import nvrtc

INCLUDE = f"--include-path={pathlib.Path(__file__).resolve().parents[1] / 'cuda'}"


def require_nvrtc():
    try:
        return nvrtc.version()
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error).splitlines()[0])


@functools.cache
def toolkit_headers():
    """Folders with cuda_fp16.h and the like: of a wheel, or of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(r) / "cu13" for r in (spec and spec.submodule_search_locations) or ()]
    roots += sorted(pathlib.Path("/usr/local").glob("cuda*"), reverse=True)
    folders = [root / "include" for root in roots]
    return [folder for folder in folders if (folder / "cuda_fp16.h").is_file()]


@functools.cache
def ptx(source, arch="compute_90", options=()):
    include = (INCLUDE, *(f"--include-path={folder}" for folder in toolkit_headers()))
    return nvrtc.ptx(source, arch, (*include, "--generate-line-info", *options))


def resources(source, arch):
    """Registers, and bytes of local memory and of spills, that ptxas reports for a kernel."""
    log = nvrtc.compile(source, arch=arch, options=(INCLUDE, "--ptxas-options=-v")).log
    stack, stores, loads = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )[0]
    registers = re.search(r"Used (\d+) registers", log)[1]
    return int(registers), int(stack), int(stores) + int(loads)
