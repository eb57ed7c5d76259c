"""The bits that the CPU kernels compute, for each instruction set that this processor has.

golden/checksums.json has a checksum for each case of kernel_results.py. Without fused multiply-adds
(the instruction set "baseline" of x86-64) every compiler gives the same bits. With them the
compiler chooses which product and sum become one instruction, so those checksums are kept by the
compiler and its version, and the test is skipped for one that has none yet. To add them: at a
commit whose results are right, run `python -m pytest --write-golden tests/freeze`.
"""

import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

import pytest

from sgap_jax import _native
from sgap_jax.runtime.native import native

NAME = "checksums.json"
PROGRAM = pathlib.Path(__file__).parents[1] / "helpers" / "kernel_results.py"


@functools.cache
def compiler():
    """Which compiler made the native library, such as "GCC 12", as it says in the file."""
    code = pathlib.Path(_native.__file__).read_bytes()
    for name in ("clang version", "GCC: ("):
        found = re.search(re.escape(name.encode()) + rb"[^\0]*?(\d+)\.\d+\.\d+", code)
        if found:
            return f"{name.split()[0].strip(':')} {found[1].decode()}"
    return "unknown compiler"


def key(isa):
    """The name under which checksums of an instruction set are kept."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        return isa if isa == "baseline" else f"{isa}, {compiler()}"
    return f"{isa} of {machine}, {compiler()}"


@functools.cache
def results(isa, processor=""):
    run = subprocess.run(
        [sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            **{"SGAP_CPU_ISA": isa, "SGAP_CPU_LIKE": processor, "JAX_PLATFORMS": "cpu"},
        },
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.tier("test")
@pytest.mark.parametrize("isa", native.supported_isas())
def test_bits(isa, golden):
    if not golden.write and key(isa) not in golden.keys(NAME):
        pytest.skip(f"no checksums of {key(isa)}")
    golden.entry(NAME, key(isa), results(isa))


@pytest.mark.tier("all")
def test_loops_of_other_processors_have_the_same_bits():
    isa = native.supported_isas()[-1]
    for processor in ("intel", "zen4", "zen5"):
        assert results(isa, processor) == results(isa), processor
