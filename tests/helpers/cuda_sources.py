"""CUDA sources in tests: the headers' folders, and NVRTC or the reason why it is missing."""

import functools
import importlib.util
import pathlib
import re

import pytest
from result_cache import cached

from sgap_jax.launch import nvrtc
from sgap_jax.launch.kernel_call import include_options, included_headers

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "cuda"
INCLUDE = include_options(HEADERS)


def require_nvrtc():
    try:
        return nvrtc.version()
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error).splitlines()[0])


@functools.cache
def toolkit_headers():
    """Folders with cuda_fp16.h and the other CUDA headers: of a wheel, or of an installed
    toolkit."""
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(r) / "cu13" for r in (spec and spec.submodule_search_locations) or ()]
    roots += sorted(pathlib.Path("/usr/local").glob("cuda*"), reverse=True)
    folders = [root / "include" for root in roots]
    return [folder for folder in folders if (folder / "cuda_fp16.h").is_file()]


@functools.cache
def ptx(source, arch="compute_90", options=(), headers=HEADERS):
    toolkit = (f"--include-path={folder}" for folder in toolkit_headers())
    flags = (*include_options(headers), *toolkit, "--generate-line-info", *options)
    parts = ("ptx", *_depends_on(source, arch, headers), *flags)
    return cached(parts, lambda: nvrtc.ptx(source, arch, flags))


def _depends_on(source, arch, headers=HEADERS):
    """The parts of a compilation's cache key, except its options."""
    return (source, arch, nvrtc.version(), *included_headers(source, headers))


def resources(source, arch):
    """Registers, and bytes of local memory and of spills, that ptxas reports for a kernel."""
    options = (*INCLUDE, "--ptxas-options=-v")
    log = cached(
        ("ptxas", *_depends_on(source, arch), *options),
        lambda: nvrtc.compile(source, arch=arch, options=options).log,
    )
    stack, stores, loads = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )[0]
    registers = re.search(r"Used (\d+) registers", log)[1]
    return int(registers), int(stack), int(stores) + int(loads)
