"""`StoredArray`, the base class of `SparseArray`: its fields, and the properties that need only
them.

The modules that convert and combine sparse arrays work on this class. `SparseArray` (array.py)
imports those modules and adds constructors, conversions and operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from sgap_jax.formats import checks
from sgap_jax.formats.levels import COO, CSC, CSR, Dense, Format
from sgap_jax.formats.row_statistics import PatternStatistics, RowStatistics

Array = TypeVar("Array", bound="StoredArray")


class CheckedLevel(NamedTuple):
    """The offsets and indices of a level, after a check."""

    offsets: Any
    indices: Any


class CheckedIndices(NamedTuple):
    """The indices of a level without offsets, after a check."""

    indices: Any


class CheckedTranspose(NamedTuple):
    """The index arrays of a matrix's transpose, and the permutation to it, after a check."""

    offsets: Any
    indices: Any
    permutation: Any


class ValidLevel(NamedTuple):
    """The offsets and indices of a level of which all entries are in range, but in any order and
    repeated: of graphs that keep repeated edges."""

    offsets: Any
    indices: Any


class ValidTranspose(NamedTuple):
    """The index arrays of the transpose of such a structure."""

    offsets: Any
    indices: Any
    permutation: Any


# Which work list: by the stored orientation (0) or the other one (1), of how many rows an element
# is, and the sizes rows, capacity, chunk and least (or 0) of sgap_jax/launch/row_pieces.py.
ListKey = tuple[int, int, int, int, int, int]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("offsets", "indices", "permutation", "lists"),
    meta_fields=("keys",),
)
@dataclass(frozen=True, eq=False)
class PreparedTranspose:
    """A `CheckedTranspose` with work lists of both orientations, which `prepare` made: whatever has
    another structure has another transpose, and so no list of this one.

    Attributes:
      lists: int32 [4 elements] for each key.
    """

    offsets: Any
    indices: Any
    permutation: Any
    lists: tuple[Any, ...]
    keys: tuple[ListKey, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.offsets, self.indices, self.permutation))

    def __getitem__(self, at: int) -> Any:
        return (self.offsets, self.indices, self.permutation)[at]


class MadeTranspose(NamedTuple):
    """The same, unchecked, of a structure that the program makes: an operation that does without
    them spares the sort."""

    offsets: Any
    indices: Any
    permutation: Any


class LaterTranspose:
    """A `CheckedTranspose` that is made when something needs it, once for all arrays that share
    the structure."""

    def __init__(self, make: Callable[[], tuple[Any, Any, Any]]) -> None:
        self._make: Callable[[], tuple[Any, Any, Any]] | None = make
        self._made: CheckedTranspose | None = None

    def made(self) -> CheckedTranspose:
        make = self._make
        if self._made is None and make is not None:
            self._made, self._make = CheckedTranspose(*make()), None
        assert self._made is not None
        return self._made


_CHECKED_TRANSPOSES = (CheckedTranspose, PreparedTranspose, LaterTranspose, type(None))


class _Transposed:
    """The field `transposed` of `StoredArray`: a `LaterTranspose` is made where it is read, which
    flattening of the pytree does too, and kept."""

    def __get__(self, of: Any, owner: Any = None) -> Any:
        if of is None:
            return self
        found = of.__dict__["transposed"]
        if isinstance(found, LaterTranspose):
            found = of.__dict__["transposed"] = found.made()
        return found

    def __set__(self, of: Any, value: Any) -> None:
        of.__dict__["transposed"] = value


@dataclass(frozen=True, eq=False, repr=False)
class StoredArray:
    """Values [nnz] and, for each level of the format, index arrays: see `SparseArray`."""

    # Set by sgap_jax/primitives/spmm.py and row_reduce.py, which import this package:
    # _products(B, transpose) is A B or A^T B; _row_sums(dtype, wide) sums each row of a matrix.
    # Set by spgemm.py there: _sparse_product(B) is A B for a sparse B.
    _products: ClassVar[Callable[..., jax.Array]]
    _row_sums: ClassVar[Callable[..., jax.Array]]
    _sparse_product: ClassVar[Callable[..., Any]]

    values: Any
    index_arrays: tuple[tuple[Any, ...], ...]
    transposed: tuple[Any, Any, Any] | PreparedTranspose | None
    shape: tuple[int, ...]
    format: Format
    # Of a skewed matrix whose pattern was concrete; else without any.
    statistics: PatternStatistics = PatternStatistics()

    @property
    def nnz(self) -> int:
        """Number of stored values (static), including padding and zeros in vectors and blocks."""
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
        """Whether the index arrays are known to be valid, sorted and without repeats (static): True
        for concrete constructors, for `checked()`, and for what is derived from these. False for
        arrays made inside jit or given to the bare constructor, of which operations ignore entries
        that are not valid, and for graphs that keep repeated edges."""
        levels = all(isinstance(x, CheckedLevel | CheckedIndices) for x in self.index_arrays if x)
        other = self.__dict__["transposed"]
        return levels and isinstance(other, _CHECKED_TRANSPOSES)

    @property
    def _every_entry_counts(self) -> bool:
        """Whether all entries but the padding are known to take part (static), though they may
        repeat: what reads entries one by one need not look for those that do not."""
        levels = all(isinstance(x, ValidLevel) for x in self.index_arrays if x)
        return self.is_checked or (levels and isinstance(self._made_transpose, ValidTranspose))

    @property
    def _made_transpose(self) -> tuple[Any, Any, Any] | None:
        """`transposed`, but None where it is still to be made."""
        other = self.__dict__["transposed"]
        return None if isinstance(other, LaterTranspose) else other

    def _replaced(self, **changes: Any) -> Self:
        """`replace`, which does not make the transpose."""
        return replace(self, **{"transposed": self.__dict__["transposed"], **changes})

    @property
    def T(self) -> Self:
        """The transpose. It shares all arrays with this one: nothing is computed or copied."""
        return self._replaced(
            shape=self.shape[::-1],
            format=self.format.transposed,
            statistics=self.statistics.T,
        )

    @property
    def row_statistics(self) -> RowStatistics | None:
        """Mean, deviation and longest of the row lengths (static), by which a schedule is chosen on
        CUDA, if the rows are skewed: the longest has 8 times the mean and 256 entries or more. None
        for all others, for traced patterns and for those with a capacity `nse`. Those of `A.T` are
        of the columns."""
        return self.statistics.rows

    @property
    def row_offsets(self) -> Any:
        """[m + 1] for CSR, [ceil(m / V) + 1] for CVS(V), [ceil(m / r) + 1] for BCSR(r, c)."""
        return self._offsets(CSR, "row_offsets")

    @property
    def column_offsets(self) -> Any:
        """[k + 1] for CSC; one per block column, plus one, for the transposes of CVS(V) and
        BCSR(r, c)."""
        return self._offsets(CSC, "column_offsets")

    @property
    def row_indices(self) -> Any:
        """[nnz] for CSC and COO; one per vector or block for the transposes of CVS(V) and
        BCSR(r, c)."""
        return self._indices(0, "row_indices", COO)

    @property
    def column_indices(self) -> Any:
        """[nnz] for CSR and COO; one per vector for CVS(V); the block column of each block for
        BCSR(r, c)."""
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
        return self._replaced(values=checks.to_jax_values(values, None, what))

    def astype(self, dtype: DTypeLike) -> Self:
        """The same structure with the values cast."""
        return self._replaced(values=self.values.astype(dtype))


# After the decorator, which would take it for the default of the field.
StoredArray.transposed = _Transposed()  # type: ignore[assignment]
