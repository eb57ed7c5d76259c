"""Which schedule an operation gets when the caller names none."""

from sgap_jax.schedules.cpu import CpuTile
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Reference, Schedule

_SMALL_SDDMM = 1 << 17  # nonzeros


def choose_schedule(problem: Problem) -> Schedule:
    """The default schedule of a problem; pure Python, reads no array.

    Off the CPU there are no kernels yet: the plain-JAX lowering runs there.

    On the CPU one tile serves spmm. Measured on two Zen 5 cores (1 MB L2 each, 32 MB L3), float32,
    on uniform 0.1% and 1%, pruned 2048 x 1024 and 512 x 2048, wiki_squirrel and pubmed, n = 32, 128
    and 256: passes of 16 or 32 columns never gained, of 64 or 128 gained at most 1.13x and lost up
    to 1.6x; chunks of 2048 to 32768 nonzeros stayed within 0.83x to 1.13x of 8192.

    A small sddmm takes smaller chunks, so that both cores get an equal share. Measured there with
    d = 64: 2048 nonzeros against 8192 gave 1.90x on 42,000 nonzeros and 1.21x, 1.01x and 0.94x on
    about 100,000; from 200,000 on it lost 1 to 6%.
    """
    if problem.platform != "cpu":
        return Reference()
    if problem.op == "sddmm" and problem.nnz * problem.batch < _SMALL_SDDMM:
        return CpuTile(nonzeros=2048)
    return CpuTile()
