"""What is asked of an operation: all that the selector looks at."""

import dataclasses
import re
from numbers import Integral

_OPS = (
    "spmm",
    "sddmm",
    "gspmm",
    "sparse_softmax",
    "row_sum",
    "row_max",
    "row_broadcast",
    "attention",
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of one operation, as far as it is known before the index arrays are read.

    Attributes:
      op: "spmm", "sddmm", "gspmm", "sparse_softmax", "row_sum", "row_max" or "attention", or
        "row_broadcast", a step of derivatives.
      shape: (m, k) of the sparse operand as the kernel walks it: for A^T B the shape of A^T.
      nnz: capacity of the index arrays (padding included).
      n: dense columns (spmm) or features that an entry reduces over (sddmm); else 1.
      batch: products that share the structure.
      dtype: the dtype of the values, or its name, which is kept.
      format: the format of the sparse operand, or its name, which is kept.
      platform: "cpu", "cuda", "rocm", "tpu", ...: "gpu" does not say which.
      permuted: the values are reached through a permutation, as in A^T B.

    Raises ValueError for another op and for the platform "gpu".
    """

    op: str
    shape: tuple[int, int]
    nnz: int
    n: int = 1
    batch: int = 1
    dtype: str = "float32"
    format: str = "CSR"
    platform: str = "cpu"
    permuted: bool = False

    def __post_init__(self) -> None:
        if self.op not in _OPS:
            raise ValueError(f"Problem: op: expected one of {', '.join(_OPS)}, got {self.op!r}")
        if self.platform == "gpu":
            raise ValueError("Problem: platform: expected 'cuda' or 'rocm', got 'gpu'")
        if not isinstance(self.dtype, str):
            import numpy as np  # a wheel's build asks for schedules, and has none

            object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        if not isinstance(self.format, str):
            object.__setattr__(self, "format", str(self.format))

    @property
    def symbolic(self) -> bool:
        """Whether a size is a symbol of `jax.export`, which rules cannot compare."""
        sizes = (*self.shape, self.nnz, self.n, self.batch)
        return not all(isinstance(size, Integral) for size in sizes)

    @property
    def vector_length(self) -> int | None:
        """V where the sparse operand is in CVS(V), r in BCSR(r, c), which runs as vectors."""
        vectors = re.match(r"(?:CVS|BCSR)\((\d+)", self.format)
        return int(vectors[1]) if vectors else None
