"""The kernels of top_k compile for every architecture without spills; launches are as planned."""

import pytest
from cuda_sources import require_nvrtc, resources_of
from tolerance import DTYPES

from sgap_jax.launch.precompiled import ARCHITECTURES
from sgap_jax.launch.top_k import select_plan, write_plan
from sgap_jax.schedules.schedule import GRID_Z


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_spills(arch):
    require_nvrtc()
    plans = [plan(dtype, (2, 90, 70), 8) for plan in (select_plan, write_plan) for dtype in DTYPES]
    for kernel, (registers, stack, spills) in resources_of([p.source for p in plans], arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 64, kernel


def test_a_block_for_each_row_and_z_for_the_batch():
    call = select_plan("float32", (3, 90, 70), 8)
    assert call.grid == (90, 1, 3) and call.scalars == (90, 70, 8, 3, 90)
    assert select_plan("float32", (3, 90, 70), 8, shared_limits=True).scalars[-1] == 0
    call = write_plan("float32", (1 << 20, 90, 70), 8)
    assert call.grid == (90, 1, GRID_Z) and call.scalars == (90, 70, 8, 1 << 20)
    # The kernel is the same for all sizes.
    assert call.source == write_plan("float32", (1, 2, 3), 1).source
