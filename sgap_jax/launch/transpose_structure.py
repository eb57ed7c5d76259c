"""Launch plans of the sort behind the transposed structure
(cuda/transpose_structure/transpose_structure.cuh): three for each digit of the keys, which are
0 .. size."""

from sgap_jax.launch.kernel_call import KernelCall

_THREADS, _STEPS = 256, 8  # of a block, and entries of a thread
TILE = _THREADS * _STEPS
DIGITS = 256


def shifts(size: int) -> range:
    """Where the digits of keys 0 .. size begin, in bits, the lowest first."""
    return range(0, max(size.bit_length(), 1), (DIGITS - 1).bit_length())


def tiles(entries: int) -> int:
    return -(-entries // TILE)


def count_plan(batch: int, entries: int, shift: int) -> KernelCall:
    """The launch that counts.

    Input: keys int32 [batch, entries]. Output: counts int32 [batch, DIGITS, tiles].
    """
    return _plan(
        "TransposeCountKernel", [_THREADS, _STEPS], (1, 1), tiles(entries), (entries, shift), batch
    )


def start_plan(batch: int, entries: int) -> KernelCall:
    """The launch that adds the counts of the tiles before.

    Input: counts int32 [batch, DIGITS, tiles]. Outputs: starts, likewise, and totals int32
    [batch, DIGITS].
    """
    return _plan("TransposeStartKernel", [_THREADS], (1, 2), DIGITS, (tiles(entries),), batch)


def move_plan(batch: int, entries: int, shift: int) -> KernelCall:
    """The launch that moves keys and entries.

    Inputs: keys and entries int32 [batch, entries], starts and totals. With shift 0 the entries are
    0, 1, 2, ..., whatever the operand holds. Outputs: keys and entries, sorted.
    """
    return _plan(
        "TransposeMoveKernel", [_THREADS, _STEPS], (4, 2), tiles(entries), (entries, shift), batch
    )


def _plan(
    kernel: str,
    constants: list[str | int],
    arrays: tuple[int, int],
    blocks: int,
    scalars: tuple[int, ...],
    batch: int,
) -> KernelCall:
    """A launch with so many arrays of int32 as inputs and as outputs."""
    return KernelCall.of(
        "transpose_structure.cuh",
        kernel,
        constants,
        ["const int"] * arrays[0] + ["int"] * arrays[1],
        (*scalars, batch),
        blocks=(blocks, 1),
        threads=_THREADS,
        batch=batch,
        structure=False,
    )
