"""What is asked of an operation: all that the selector looks at."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of one operation, as far as it is known before the index arrays are read.

    Attributes:
      op: "spmm", "sddmm", "sparse_softmax", "row_sum", ...
      shape: (m, k) of the sparse operand as the kernel walks it: for A^T B the shape of A^T.
      nnz: capacity of the index arrays (padding included).
      n: dense columns (spmm) or features that an entry reduces over (sddmm); else 1.
      batch: products that share the structure.
      dtype: name of the dtype of the values.
      format: name of the format of the sparse operand.
      platform: "cpu", "cuda", "tpu", ...
      permuted: the values are reached through a permutation, as in A^T B.
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

    @property
    def vector_length(self) -> int | None:
        """V where the sparse operand is in CVS(V), else None."""
        return int(self.format[4:-1]) if self.format.startswith("CVS(") else None
