"""Launch plans of nuclei (cuda/nucleus/nucleus.cuh): the totals of rows of scores; and which of the
entries of each row are stored, then their indices and places; the prefix sum of the counts between
the two is XLA's."""

from sgap_jax.launch.kernel_call import TYPES, KernelCall

_THREADS = 256  # of a block
_WARP = 32
# A row is a warp's up to so many columns or bytes of accumulators, and a block's beyond: a warp
# adds without a barrier, and has up to so many bytes of a row in its registers.
_WARP_COLUMNS, _WARP_BYTES = 1024, 1024


def totals_plan(
    dtype: str, shape: tuple[int, int, int], *, shared_limits: bool = False
) -> KernelCall:
    """The launch that finds the greatest score of each row and the sum of exp(score - greatest).

    Inputs: scores [batch, m, n], limits int32 [batch, m], or [1, m] with `shared_limits`. Outputs:
    greatest and total [batch, m], in float32, or float64 for float64.

    Args:
      dtype: of the scores, one of `TYPES`.
      shape: (batch, m, n).
    """
    batch, m, n = shape
    wide = _accumulator(dtype)
    return _plan(
        "NucleusTotalsKernel",
        [TYPES[dtype]],
        [f"const {TYPES[dtype]}", "const int", wide, wide],
        (m, n, batch, 0 if shared_limits else m),
        lanes=_WARP if n <= _WARP_COLUMNS else _THREADS,
        rows=m,
        batch=batch,
    )


def select_plan(
    dtype: str, shape: tuple[int, int], k: int, n: int, *, kept: bool = False
) -> KernelCall:
    """The launch that selects among the entries of each row.

    Inputs: values and ranked [batch, m k], greatest, total and p [batch, m] in float32, or float64
    for float64, offsets int32 [batch, m + 1], indices int32 [batch, m k]. Outputs: counts int32
    [batch, m], entries int32 [batch, m, k], those beyond a row's count not written.

    Args:
      dtype: of the values, one of `TYPES`.
      shape: (batch, m).
      k: how many entries of a row take part at most.
      n: entries whose index is not in 0 .. n - 1 are left out.
      kept: whether entries that are ranked as infinite are stored whatever p is; otherwise `ranked`
        is not read.
    """
    batch, m = shape
    of_values, of_rows = f"const {TYPES[dtype]}", f"const {_accumulator(dtype)}"
    return _plan(
        "NucleusSelectKernel",
        [TYPES[dtype]],
        [*[of_values] * 2, *[of_rows] * 3, "const int", "const int", "int", "int"],
        (m, k, n, batch, int(kept)),
        lanes=_lanes_of_entries(k, 8 if dtype == "float64" else 4),
        rows=m,
        batch=batch,
    )


def write_plan(shape: tuple[int, int], k: int) -> KernelCall:
    """The launch that writes the structure.

    Inputs: indices int32 [batch, m k], entries int32 [batch, m, k], offsets int32 [batch, m + 1].
    Outputs: the new indices and where they were, int32 [batch, m k].
    """
    batch, m = shape
    return _plan(
        "NucleusWriteKernel",
        [],
        [*["const int"] * 3, "int", "int"],
        (m, k, batch),
        lanes=_lanes_of_entries(k, 4),
        rows=m,
        batch=batch,
    )


def _accumulator(dtype: str) -> str:
    return TYPES["float64" if dtype == "float64" else "float32"]


def _lanes_of_entries(k: int, itemsize: int) -> int:
    return _WARP if k * itemsize <= _WARP_BYTES else _THREADS


def _plan(
    kernel: str,
    types: list[str],
    pointers: list[str],
    scalars: tuple[int, ...],
    *,
    lanes: int,
    rows: int,
    batch: int,
) -> KernelCall:
    return KernelCall.of(
        "nucleus.cuh",
        kernel,
        [*types, _THREADS, lanes],
        pointers,
        scalars,
        blocks=(-(-rows * lanes // _THREADS), 1),
        threads=_THREADS,
        batch=batch,
        structure=False,
    )
