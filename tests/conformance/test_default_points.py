"""Every default point compiles for every architecture without spills or local memory."""

import pytest
from cuda_sources import require_nvrtc, resources_of

from sgap_jax.launch.defaults import LAUNCH_PLANS, default_calls
from sgap_jax.launch.precompiled import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", LAUNCH_PLANS)
def test_default_points_stay_in_registers(name, arch):
    require_nvrtc()
    sources = list(default_calls(name))
    assert len(sources) >= 6  # at least a group of each size
    for kernel, (registers, stack, spills) in resources_of(sources, arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel
