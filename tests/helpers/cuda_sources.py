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
    (report,) = resources_of([source], arch).values()
    return report


def resources_of(sources, arch):
    """{mangled name: `resources`} of kernels whose sources are their headers and an instantiation.

    Sixteen are one program, which reads the headers once: half the time for small kernels.
    """
    sources = list(dict.fromkeys(sources))
    found = {}
    for first in range(0, len(sources), 16):
        lines = "\n".join(sources[first : first + 16]).splitlines()
        included = [line for line in lines if line.startswith("#include")]
        rest = [line for line in lines if line not in included]
        found |= _reports("\n".join((*dict.fromkeys(included), *rest)), arch)
    assert len(found) == len(sources)
    return found


def _reports(source, arch):
    options = (*INCLUDE, "--ptxas-options=-v")
    log = cached(
        ("ptxas", *_depends_on(source, arch), *options),
        lambda: nvrtc._compile(source, arch, options, "CUBIN")[1],
    )
    kernel = (
        r"entry function '(\w+)'.*\n.*properties for \1\n"
        r".* (\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers"
    )
    return {
        name: (int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in re.findall(kernel, log)
    }
