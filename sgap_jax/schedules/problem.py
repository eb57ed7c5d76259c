"""`Problem`: the description of one call of an operation, on which the choice of a schedule
depends."""

import contextlib
import dataclasses
import re
from numbers import Integral, Number
from typing import Any

from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.row_statistics import RowStatistics

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
ROW_OPS = ("row_sum", "row_max", "row_broadcast", "sparse_softmax")
# Operations with dense columns that the lanes of a block divide among them.
TILED = ("spmm", "gspmm")
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# The names of JAX's dtypes, as a regular expression: this module imports neither NumPy nor JAX (see
# __post_init__).
_DTYPES = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|bfloat16|float(16|32|64)|float[468]_\w+|complex(64|128)"
)
_ARCH = re.compile(r"sm_(\d+)[af]?")
_TENSOR_CORES = 80  # the first architecture with the tensor-core instructions of our kernels


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of one operation, as far as it is known before the index arrays are read.

    Attributes:
      op: "spmm", "sddmm", "gspmm", "sparse_softmax", "row_sum", "row_max" or "attention", or
        "row_broadcast", a step of derivatives.
      shape: (m, k) of the sparse operand as the kernel walks it: for A^T B the shape of A^T.
      nnz: capacity of the index arrays (padding included).
      n: dense columns (spmm) or features that an entry reduces over (sddmm); else 1.
      batch: size of the batch, which shares the structure.
      dtype: the dtype of the values, or its name; the field holds the name.
      format: the format of the sparse operand, or its text; the field holds the format.
      platform: "cpu", "cuda", "rocm" or "tpu"; "gpu" would be ambiguous.
      permuted: the values are reached through a permutation, as in A^T B.
      rows: statistics of the row lengths, of a skewed pattern that is concrete where it is made
        (`A.row_statistics`; for A^T B those of `A.T`); else None.
      arch: the architecture of the GPU, such as "sm_75"; None: sm_80 or later, which have all
        instructions of the kernels.

    Raises ValueError for an unknown name, and for a size that is neither a non-negative integer nor
    a symbol of `jax.export`.
    """

    op: str
    shape: tuple[int, int]
    nnz: int
    n: int = 1
    batch: int = 1
    dtype: str = "float32"
    format: Format = CSR
    platform: str = "cpu"
    permuted: bool = False
    rows: RowStatistics | None = None
    arch: str | None = None

    def __post_init__(self) -> None:
        of_two = "; explain(spgemm, A, B) says how two matrices are multiplied, which no sizes tell"
        names = f"one of {', '.join(_OPS)}{of_two if self.op == 'spgemm' else ''}"
        self._check("op", self.op in _OPS, names)
        known = self.platform in _PLATFORMS
        self._check("platform", known, f"one of {', '.join(_PLATFORMS)}")
        if not isinstance(self.dtype, str):
            import numpy as np  # here, because a wheel's build chooses schedules without NumPy

            # np.dtype(None) is float64.
            self._check("dtype", self.dtype is not None, "a dtype or its name")
            try:
                object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
            except TypeError:
                self._check("dtype", False, "a dtype or its name")
        self._check("dtype", _DTYPES.fullmatch(self.dtype), "a dtype that JAX has, as 'float32'")
        if isinstance(self.format, str):
            with contextlib.suppress(ValueError):
                object.__setattr__(self, "format", Format.parse(self.format))
        self._check("format", isinstance(self.format, Format), "a Format or what it prints as")
        pair = isinstance(self.shape, tuple) and len(self.shape) == 2
        self._check("shape", pair and all(map(_is_size, self.shape)), "(m, k)")
        object.__setattr__(self, "shape", tuple(map(_as_size, self.shape)))
        for name in ("nnz", "n", "batch"):
            self._check(name, _is_size(getattr(self, name)), "an integer from 0 on")
            object.__setattr__(self, name, _as_size(getattr(self, name)))
        self._check("permuted", isinstance(self.permuted, bool), "a bool")
        known = self.rows is None or isinstance(self.rows, RowStatistics)
        self._check("rows", known, "RowStatistics or None")
        named = isinstance(self.arch, str) and _ARCH.fullmatch(self.arch)
        self._check("arch", self.arch is None or named, "None or a name like 'sm_90'")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Checks what was pickled: earlier versions held the text of the format."""
        Problem.__init__(self, **state)

    def _check(self, name: str, right: Any, expected: str) -> None:
        if not right:
            got = getattr(self, name)
            raise ValueError(f"Problem: {name}: expected {expected}, got {got!r}")

    @property
    def symbolic(self) -> bool:
        """Whether any size is a symbol of `jax.export`, which cannot be compared with a number."""
        sizes = (*self.shape, self.nnz, self.n, self.batch)
        return not all(isinstance(size, Integral) for size in sizes)

    @property
    def vector_length(self) -> int | None:
        """V for the format CVS(V), r for BCSR(r, c), which runs as vectors of r rows; else None."""
        return self.format.block_shape[0] if self.format.block_shape else None

    @property
    def has_tensor_cores(self) -> bool:
        """Whether the GPU has the instructions of the kernels on tensor cores (sm_80 and later)."""
        found = None if self.arch is None else _ARCH.fullmatch(self.arch)
        return found is None or int(found[1]) >= _TENSOR_CORES

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["format"] = str(self.format)
        if self.rows is None:
            del fields["rows"]
        if self.arch is None:
            del fields["arch"]
        return f"Problem({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _is_size(size: Any) -> bool:
    """Whether `size` is a non-negative integer or a symbol of `jax.export`; without JAX, a symbol
    is anything that can be divided but is neither a number nor an array."""
    if isinstance(size, Integral):
        return int(size) >= 0
    number = isinstance(size, Number) or hasattr(size, "shape")
    return hasattr(size, "__floordiv__") and not number


def _as_size(size: Any) -> Any:
    """An integer as Python's: NumPy's overflow in products of sizes, and schedules refuse them."""
    return int(size) if isinstance(size, Integral) else size
