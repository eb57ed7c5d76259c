"""Every default kernel compiles for the architectures of wheels without spills or local memory,
with as many registers as it had."""

import functools
import re

import golden_files
import pytest
from cuda_sources import require_nvrtc, resources_of

from sgap_jax.launch.defaults import LAUNCH_PLANS, NAMES, OF_ATTENTION, OF_VECTORS, default_calls
from sgap_jax.launch.precompiled import ARCHITECTURES

# Of a thread: a warp takes registers in units of 8 for each lane. NVRTC of another version may need
# that many more or fewer, which is no reason to look.
UNIT = 8

# For sm_80 ptxas takes as many registers as for sm_90 (at most 12 more, in 1,177 kernels), for
# sm_100 up to 58 more: there, only those with tensor cores, which take most. A part of the others
# compiles for sm_80 in test_architectures_cuda.py.
OF_TENSOR_CORES = (*OF_VECTORS, *OF_ATTENTION)
CASES = [
    (n, arch) for n in NAMES for arch in ARCHITECTURES if arch != "sm_80" or n in OF_TENSOR_CORES
]


@pytest.mark.parametrize(("name", "arch"), CASES)
@pytest.mark.seconds(all=45)
def test_default_kernels_stay_in_registers(name, arch, golden):
    require_nvrtc()
    sources = list(default_calls(name))
    assert len(sources) >= (6 if name in LAUNCH_PLANS else 2)  # at least a group of each size
    most = 64 if name in LAUNCH_PLANS else 128 if name in OF_VECTORS else 255
    found = resources_of(sources, arch)
    for kernel, (registers, stack, spills) in found.items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= most, kernel
    if arch == "sm_90":
        registers = {short(kernel): of_it for kernel, (of_it, _, _) in sorted(found.items())}
        assert len(registers) == len(found)
        golden.numbers("registers.json", name, registers, lambda before: UNIT)


def short(mangled):
    """The kernel and its template arguments, without the types of its parameters."""
    return re.fullmatch(r"_ZN4sgap\d+(\w+?E)EEvP\w+", mangled)[1]


def test_a_golden_number_may_differ_by_what_is_allowed(tmp_path):
    numbers = {"one": 40, "two": 8}
    golden_files.Golden(tmp_path, write=True).numbers("a.json", "k", numbers, None)
    check = functools.partial(golden_files.Golden(tmp_path).numbers, "a.json", "k")
    check({"one": 48, "two": 8}, lambda before: before / 5)
    for wrong in (
        {"one": 49, "two": 8},
        {"one": 31, "two": 8},
        {"one": 40},
        numbers | {"three": 1},
    ):
        with pytest.raises(AssertionError, match="a.json, k is not what it was"):
            check(wrong, lambda before: 8)
    with pytest.raises(AssertionError, match="no entry 'other'"):
        golden_files.Golden(tmp_path).numbers("a.json", "other", numbers, lambda before: 0)
