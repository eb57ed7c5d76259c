"""Launch plans of top_k (cuda/top_k/top_k.cuh): the columns of each row, then the structure and its
values; the prefix sum of the counts between the two is XLA's."""

from sgap_jax.launch.kernel_call import TYPES, KernelCall

_SELECTING, _WRITING = 256, 128  # threads of a block


def select_plan(
    dtype: str, shape: tuple[int, int, int], k: int, *, shared_limits: bool = False
) -> KernelCall:
    """The launch that selects.

    Inputs: scores [batch, m, n], limits int32 [batch, m], or [1, m] with `shared_limits`. Outputs:
    counts int32 [batch, m], columns int32 [batch, m, k], those beyond a row's count not written.

    Args:
      dtype: of the scores, one of `TYPES`.
      shape: (batch, m, n).
      k: at most n.
    """
    batch, m, n = shape
    return KernelCall.of(
        "top_k.cuh",
        "TopKSelectKernel",
        [TYPES[dtype], _SELECTING],
        [f"const {TYPES[dtype]}", "const int", "int", "int"],
        (m, n, k, batch, 0 if shared_limits else m),
        blocks=(m, 1),
        threads=_SELECTING,
        batch=batch,
        structure=False,
    )


def write_plan(dtype: str, shape: tuple[int, int, int], k: int) -> KernelCall:
    """The launch that writes the structure.

    Inputs: scores [batch, m, n], columns int32 [batch, m, k], offsets int32 [batch, m + 1].
    Outputs: values [batch, m k] in `dtype`, indices int32 [batch, m k].
    """
    batch, m, n = shape
    return KernelCall.of(
        "top_k.cuh",
        "TopKWriteKernel",
        [TYPES[dtype], _WRITING],
        [f"const {TYPES[dtype]}", "const int", "const int", TYPES[dtype], "int"],
        (m, n, k, batch),
        blocks=(m, 1),
        threads=_WRITING,
        batch=batch,
        structure=False,
    )
