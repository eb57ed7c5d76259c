"""The launch plans of column vectors: for an operation, the plan of each kind of schedule."""

from collections.abc import Callable

from sgap_jax.launch import sddmm_octet as sddmm_octet_cuda
from sgap_jax.launch import sddmm_paper as sddmm_paper_cuda
from sgap_jax.launch import sddmm_subwarp as sddmm_subwarp_cuda
from sgap_jax.launch import spmm_octet as spmm_octet_cuda
from sgap_jax.launch import spmm_paper as spmm_paper_cuda
from sgap_jax.launch import spmm_subwarp as spmm_subwarp_cuda
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.schedules.paper import PaperOctetTile, WarpTile
from sgap_jax.schedules.schedule import Schedule
from sgap_jax.schedules.tiles import OctetTile, SubwarpTile

# (problem, schedule, products or, of sddmm, shapes of operands) -> launch
VECTOR_PLANS: dict[str, dict[type[Schedule], Callable[..., KernelCall]]] = {
    "spmm": {
        OctetTile: spmm_octet_cuda.launch_plan,
        SubwarpTile: spmm_subwarp_cuda.launch_plan,
        WarpTile: spmm_paper_cuda.launch_plan,
        PaperOctetTile: spmm_paper_cuda.launch_plan,
    },
    "sddmm": {
        OctetTile: sddmm_octet_cuda.launch_plan,
        SubwarpTile: sddmm_subwarp_cuda.launch_plan,
        WarpTile: sddmm_paper_cuda.launch_plan,
        PaperOctetTile: sddmm_paper_cuda.launch_plan,
    },
}
