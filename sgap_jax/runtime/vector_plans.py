"""The launch plans of column vectors: for an operation, the plan of each kind of schedule."""

from collections.abc import Callable

from sgap_jax.runtime import sddmm_subwarp_cuda, spmm_subwarp_cuda
from sgap_jax.runtime.kernel_call import KernelCall
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.subwarp import SubwarpTile

# (problem, schedule, products) -> launch
VECTOR_PLANS: dict[str, dict[type[Schedule], Callable[..., KernelCall]]] = {
    "spmm": {SubwarpTile: spmm_subwarp_cuda.launch_plan},
    "sddmm": {SubwarpTile: sddmm_subwarp_cuda.launch_plan},
}
