"""CUDA sources in tests: where the headers are, and NVRTC or the reason why there is none."""

import functools
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
def ptx(source, arch="compute_90"):
    return nvrtc.ptx(source, arch, (INCLUDE, "--generate-line-info"))


def resources(source, arch):
    """Registers, and bytes of local memory and of spills, that ptxas reports for a kernel."""
    log = nvrtc.compile(source, arch=arch, options=(INCLUDE, "--ptxas-options=-v")).log
    stack, stores, loads = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )[0]
    registers = re.search(r"Used (\d+) registers", log)[1]
    return int(registers), int(stack), int(stores) + int(loads)
