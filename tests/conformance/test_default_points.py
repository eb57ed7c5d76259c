"""Every default point compiles for every architecture without spills or local memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_sources import require_nvrtc, resources

from sgap_jax.launch.defaults import LAUNCH_PLANS, default_calls
from sgap_jax.launch.precompiled import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", LAUNCH_PLANS)
def test_default_points_stay_in_registers(name, arch):
    require_nvrtc()
    sources = list(default_calls(name))
    assert len(sources) >= 6  # at least a group of each size
    with ThreadPoolExecutor(2) as pool:  # the compiler releases the interpreter's lock
        found = pool.map(lambda source: resources(source, arch), sources)
        for source, (registers, stack, spills) in zip(sources, found, strict=True):
            assert (stack, spills) == (0, 0), source
            assert registers <= 64, source
