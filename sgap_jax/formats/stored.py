"""What a sparse array stores, and what follows from that alone: the base of `SparseArray`.

The modules that convert and combine sparse arrays take this class; `SparseArray` (array.py), which
stands above them, adds constructors, conversions and operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from sgap_jax.formats import checks
from sgap_jax.formats.levels import COO, CSC, CSR, Dense, Format

Array = TypeVar("Array", bound="StoredArray")


class CheckedLevel(NamedTuple):
    """Checked offsets and indices of a level."""

    offsets: Any
    indices: Any


class CheckedIndices(NamedTuple):
    """Checked indices of a level without offsets."""

    indices: Any


class CheckedTranspose(NamedTuple):
    """The checked other orientation of a matrix."""

    offsets: Any
    indices: Any
    permutation: Any


@dataclass(frozen=True, eq=False, repr=False)
class StoredArray:
    """Values [nnz] and, for each level of the format, index arrays: see `SparseArray`."""

    # The operations that stand above the formats (sgap_jax/primitives/spmm.py, row_reduce.py):
    # _products(B, transpose) is A B or A^T B, _row_sums(dtype, wide) the sum of each row of a
    # matrix.
    _products: ClassVar[Callable[..., jax.Array]]
    _row_sums: ClassVar[Callable[..., jax.Array]]

    values: Any
    index_arrays: tuple[tuple[Any, ...], ...]
    transposed: tuple[Any, Any, Any] | None
    shape: tuple[int, ...]
    format: Format

    @property
    def nnz(self) -> int:
        """Stored numbers (static), padding and the zeros inside vectors and blocks included."""
        return math.prod(self.values.shape[-1 - len(self._tail) :])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    @property
    def density(self) -> float:
        """nnz over the number of entries of the shape; 0 for an empty shape."""
        return checks.density(self.nnz, self.shape)

    @property
    def is_checked(self) -> bool:
        """Whether the index arrays were checked when they were made (static): those of concrete
        constructors and of `checked()`, and what is derived from them. Of others, made inside jit
        or given to the bare constructor, operations leave out what is not valid."""
        levels = all(isinstance(x, CheckedLevel | CheckedIndices) for x in self.index_arrays if x)
        return levels and isinstance(self.transposed, CheckedTranspose | None)

    @property
    def T(self) -> Self:
        """The transpose over the same arrays: nothing is computed or copied."""
        return replace(self, shape=self.shape[::-1], format=self.format.transposed)

    @property
    def row_offsets(self) -> Any:
        """[m + 1] of CSR, [ceil(m / V) + 1] of CVS(V), [ceil(m / r) + 1] of BCSR(r, c)."""
        return self._offsets(CSR, "row_offsets")

    @property
    def column_offsets(self) -> Any:
        """[k + 1] of CSC; of CVS(V).transposed and BCSR(r, c).transposed their block columns."""
        return self._offsets(CSC, "column_offsets")

    @property
    def row_indices(self) -> Any:
        """[nnz] of CSC and COO; one per vector or block of CVS(V) and BCSR(r, c) transposed."""
        return self._indices(0, "row_indices", COO)

    @property
    def column_indices(self) -> Any:
        """[nnz] of CSR and COO; of CVS(V) one for each vector, of BCSR(r, c) block columns."""
        return self._indices(1, "column_indices", CSR)

    def _offsets(self, format: Format, name: str) -> Any:
        stored = self.ndim == 2 and self.format.levels[0] == Dense()
        if not stored or self.format.modes != format.modes:
            raise AttributeError(
                f"SparseArray.{name} is not stored by {self.format}; "
                f"use A.asformat({format}).{name}"
            )
        return self.index_arrays[1][0]

    def _indices(self, mode: int, name: str, stored_by: Format) -> Any:
        modes = self.format.modes
        if self.ndim != 2 or (modes[0] == mode and not self.format.is_coordinate):
            raise AttributeError(
                f"SparseArray.{name} is not stored by {self.format} of shape {self.shape}; "
                f"use A.asformat({stored_by}).{name}, or A.coordinates() for a tensor"
            )
        return self.index_arrays[modes.index(mode)][-1]

    @property
    def _tail(self) -> tuple[int, ...]:
        return self.format.stored_shape(self.shape)

    def with_values(self, values: ArrayLike) -> Self:
        """The same structure with other values of any numeric dtype: [nnz], [vectors, V] for
        CVS(V), [blocks, r, c] for BCSR(r, c), [fibers, R] under a Dense level. ValueError
        otherwise."""
        what, tail = "SparseArray.with_values", self._tail
        stored = self.values.shape[-1 - len(tail)]
        values = checks.check_values(values, stored, what, tail)
        return replace(self, values=checks.to_jax_values(values, None, what))

    def astype(self, dtype: DTypeLike) -> Self:
        """The same structure with the values cast."""
        return replace(self, values=self.values.astype(dtype))
