"""Which schedule an operation gets when the caller names none."""

from fractions import Fraction

from sgap_jax.schedules.atomic import AtomicParallelism
from sgap_jax.schedules.cpu import CpuTile
from sgap_jax.schedules.kernels import TILED
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.schedule import Reference, Schedule

_SMALL_SDDMM = 1 << 17  # nonzeros
_PACKED_BYTES = {"float32": 4, "float64": 8}
_SLAB_ROW = 128  # bytes: columns of a packed tile
_SLAB = 1280 << 10  # bytes of a packed tile
_ROW_USES = 40  # nonzeros per row of the dense operand
_PACKED_MOST = 64 << 20  # bytes of the copy, which XLA's memory analysis does not know of


def choose_schedule(problem: Problem) -> Schedule:
    """The default schedule of a problem; pure Python, reads no array.

    On CUDA a point of the atomic-parallelism space, as `_point` says; on other platforms the
    plain-JAX lowering.

    On the CPU one tile of all columns serves most of spmm. A dense operand beyond the second-level
    cache whose rows are used many times is packed into tiles of 128 bytes. Measured on two Zen 5
    cores (1 MB L2 each, 32 MB L3), float32: where chosen, 1.05x to 1.55x (n = 128 to 512) and up to
    2x (n = 2048) of one tile; with 20 uses of a row 0.8x to 1.2x, with 10 about 0.6x; with slabs of
    5 MB 0.7x to 0.85x. Tiles that are not packed gained at most 1.13x. Values behind a permutation
    are gathered again for each tile: no gain. Chunks of 2048 to 32768 nonzeros: 0.83x to 1.13x.

    A small sddmm takes smaller chunks, so that both cores get an equal share. Measured there with
    d = 64: 2048 nonzeros against 8192 gave 1.90x on 42,000 nonzeros and 1.21x, 1.01x and 0.94x on
    about 100,000; from 200,000 on it lost 1 to 6%.
    """
    if problem.platform == "cuda":
        return _point(problem)
    if problem.platform != "cpu":
        return Reference()
    if problem.op == "sddmm" and problem.nnz * problem.batch < _SMALL_SDDMM:
        return CpuTile(nonzeros=2048)
    if problem.op == "spmm" and _packing_pays(problem):
        return CpuTile(columns=_SLAB_ROW // _PACKED_BYTES[problem.dtype], packed=True)
    return CpuTile()


def _point(problem: Problem) -> AtomicParallelism:
    """The default on CUDA, the same bits at each call. Not measured here yet: the rules are those
    of the papers.

    sddmm does as dgSPARSE's kernels do (csrsddmm_ebalance.cuh): windows of 4 nonzeros, so that one
    search for a row serves 4, whatever the lengths of rows; 32 features a step, in float32 the 128
    bytes of a cache line. Fewer lanes where there are fewer features."""
    n, lengths = problem.n, problem.nnz / max(problem.shape[0], 1)
    # As wide as the columns divide: vector loads (Sgap, section 7.2, coarsenSz).
    col = 4 if n % 4 == 0 else 2 if n % 2 == 0 else 1
    if problem.op == "sddmm":
        return AtomicParallelism(nnz=4, col=col, group=min(_lanes(n / col), 32 // col))
    if problem.op not in TILED:
        return _rows(1, _lanes(lengths))
    return _rows(col, _lanes(lengths) if n <= 4 else min(_lanes(lengths), 8) if n <= 32 else 1)


def _lanes(work: float) -> int:
    """A group that has no more lanes than work, and at most a warp."""
    return int(min(1 << max(int(work), 1).bit_length() - 1, 32))


def _rows(col: int, group: int) -> AtomicParallelism:
    row = 1 if group == 1 else Fraction(1, group)
    return AtomicParallelism(row=row, col=col, group=group)


def _packing_pays(problem: Problem) -> bool:
    if problem.permuted or problem.dtype not in _PACKED_BYTES:
        return False
    k, row = problem.shape[1], problem.n * _PACKED_BYTES[problem.dtype]
    if problem.nnz < _ROW_USES * k or k * _SLAB_ROW > _SLAB:
        return False
    if problem.batch * k * row > _PACKED_MOST:
        return False
    return k * row >= (2 << 20 if row < 1024 else 1 << 20) and row >= 512
