"""`SparseArray`, a sparse tensor as a frozen pytree whose leaves are values and index arrays."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from sgap_jax.formats import (
    capacity,
    checked,
    checks,
    construct,
    convert,
    entries,
    extrema,
    interop,
    parts,
)
from sgap_jax.formats.levels import COO, CSC, CSR, Compressed, Dense, Format, Singleton
from sgap_jax.formats.operators import INSTEAD, Operators
from sgap_jax.formats.row_statistics import PatternStatistics, RowStatistics
from sgap_jax.formats.stored import (
    CheckedIndices,
    CheckedLevel,
    CheckedTranspose,
    PreparedTranspose,
    ValidLevel,
    ValidTranspose,
)

Dtype = DTypeLike | None
Duplicates = Literal["sum", "error"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "index_arrays", "transposed"),
    meta_fields=("shape", "format", "statistics"),
)
@dataclass(frozen=True, eq=False, repr=False)
class SparseArray(Operators):
    """A sparse tensor: values [nnz] and, per level of its format, index arrays (int32).

    Build one with `from_scipy`, `from_dense`, `from_coordinates`, `from_arrays`, `from_topk`,
    `from_bcoo`, `from_bcsr` or `sgap_jax.read`; the bare constructor checks nothing (pytrees
    need that). The arrays of each format::

        format  index_arrays
        CSR     ((), (row_offsets [m + 1], column_indices [nnz]))
        CSC     ((), (column_offsets [k + 1], row_indices [nnz]))
        CVS(V)  ((), (row_offsets [ceil(m / V) + 1], column_indices [vectors])), values [vectors, V]
        BCSR(r, c)
                ((), (row_offsets [ceil(m / r) + 1], block columns [blocks])), values [blocks, r, c]
        COO     ((bounds [2], row_indices [nnz]), (column_indices [nnz],), ...)
        CSF(n)  ((bounds [2], indices [nodes]), (offsets [nodes + 1], indices [nodes']), ...)

    If Dense levels follow the stored ones, as in the results of `einsum(..., fibers=True)`, they
    have no index arrays, and the values are [nodes, R, ...].

    `transposed` is (offsets, indices, permutation) of the other orientation of a matrix, computed
    once: entry p of that orientation is entry permutation[p] of this one. With it, `.T` and
    gradients never sort. Entries from offsets[-1] on are padding: every operation ignores them.

    Differentiate with respect to `values`: `jax.grad(lambda v: f(A.with_values(v)))(A.values)`.
    Pass a SparseArray to a jitted function as an argument: a captured one becomes constants, which
    make the program large. `==` compares entries with a number, else identity; so does hash.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **kwargs: Any) -> SparseArray:
            # What SciPy's constructors take, and no fields: copying passes none, others all.
            if len(args) == 1 and not kwargs.keys() - {"shape", "dtype", "format"}:
                raise TypeError(
                    f"SparseArray: the bare constructor takes arrays of the format, got "
                    f"{type(args[0]).__name__}; from_dense, from_scipy, from_coordinates, "
                    "from_arrays and from_bcoo make one"
                )
            return super().__new__(cls)

    @classmethod
    def from_dense(
        cls,
        x: ArrayLike,
        *,
        format: Format | str = CSR,
        dtype: Dtype = None,
        nse: int | None = None,
    ) -> SparseArray:
        """The entries of a dense array that are != 0, which NaN is.

        `nse`: the capacity, how many entries the result can store (static); a traced matrix needs
        one, see `from_coordinates`. Differentiable in x at these entries.

        Raises ValueError for a traced array without a capacity, a concrete one with more entries
        than that, and a non-numeric one.
        """
        return cls(**interop.from_dense(x, format=format, dtype=dtype, nse=nse))

    @classmethod
    def from_scipy(
        cls,
        a: Any,
        *,
        format: Format | str = CSR,
        dtype: Dtype = None,
        duplicates: Duplicates = "sum",
    ) -> SparseArray:
        """Any SciPy sparse array or matrix. Sorts, keeps explicit zeros, copies.

        `duplicates`: "sum" adds equal coordinates (in float32 at least), "error" refuses them.
        Raises ValueError for corrupt index arrays.
        """
        return cls(**interop.from_scipy(a, format=format, dtype=dtype, duplicates=duplicates))

    @classmethod
    def from_coordinates(
        cls,
        coordinates: ArrayLike | tuple[ArrayLike, ...],
        values: ArrayLike | None = None,
        shape: tuple[int, ...] | None = None,
        *,
        format: Format | str = CSR,
        dtype: Dtype = None,
        duplicates: Duplicates = "sum",
        nse: int | None = None,
    ) -> SparseArray:
        """`coordinates` [nnz, ndim] in any order, `values` [nnz], or None for ones.

        A tuple of arrays has one [nnz] for each dimension, as `A.coordinates()` and `np.nonzero`
        give them, and so has a tuple of arrays and lists; a list, or a tuple of tuples or lists,
        has the coordinates of each entry.
        `shape` None is the least one that has these coordinates, which must be concrete.
        `duplicates`: "sum" adds equal coordinates (in float32 at least), "error" refuses them.
        `nse`: the capacity, how many entries the result can store (static); the rest of it is
        padding. None: as many as there are; for traced coordinates, as many as are given.

        Traced coordinates, of a matrix in CSR, CSC or COO, are sorted and merged inside jit: on the
        CPU by counting, in time linear in nnz, nse and the shape. Those out of range are left out,
        as BCOO's padding is. If `nse` is less than nnz, or `duplicates` is "error", the result is
        unchecked: the first `nse` entries in the format's order are stored, `overflow` says how
        many more there were, and `checked()` fails if there were any. Differentiable in values.

        Raises ValueError for wrong shapes and dtypes and, if concrete, for coordinates out of range
        and more entries than `nse`; NotImplementedError for a capacity in other formats.
        """
        fields = interop.from_coordinates(
            coordinates, values, shape, format=format, dtype=dtype, duplicates=duplicates, nse=nse
        )
        return cls(**fields)

    @classmethod
    def from_topk(
        cls,
        indices: ArrayLike,
        values: ArrayLike | None = None,
        *,
        shape: tuple[int, int],
        format: Format | str = CSR,
        dtype: Dtype = None,
        nse: int | None = None,
    ) -> SparseArray:
        """Row i has entries in the columns indices[i, :], with the values values[i, :].

        `values, indices = jax.lax.top_k(scores, k)` are such arrays [m, k]: in any order, and an
        index that is out of range is left out. Values None are ones. Equal indices of a row are
        summed. `shape` is (m, columns), the capacity m k by default; otherwise as
        `from_coordinates`. `sgap_jax.select.top_k` makes such an array of the scores, faster.
        """
        fields = interop.from_topk(
            indices, values, shape=shape, format=format, dtype=dtype, nse=nse
        )
        return cls(**fields)

    @classmethod
    def from_bcoo(
        cls,
        a: Any,
        *,
        format: Format | str = CSR,
        dtype: Dtype = None,
        duplicates: Duplicates = "sum",
        nse: int | None = None,
    ) -> SparseArray:
        """A `jax.experimental.sparse.BCOO` without batch and dense dimensions.

        Its out-of-range padding is dropped. Otherwise as `from_coordinates`, inside jit too.
        """
        fields = interop.from_bcoo(a, format=format, dtype=dtype, duplicates=duplicates, nse=nse)
        return cls(**fields)

    @classmethod
    def from_bcsr(
        cls,
        a: Any,
        *,
        format: Format | str = CSR,
        dtype: Dtype = None,
        duplicates: Duplicates = "sum",
    ) -> SparseArray:
        """A `jax.experimental.sparse.BCSR` without batch and dense dimensions.

        Concrete: sorted and merged as in `from_scipy`. Traced: taken as it is, as in `from_arrays`.
        """
        if checks.is_traced(getattr(a, "indices", None), getattr(a, "indptr", None)):
            interop.check_bcsr(a)
            array = cls.from_arrays(a.data, a.indptr, a.indices, shape=a.shape).asformat(format)
            return array if dtype is None else array.astype(dtype)
        return cls(**interop.from_bcsr(a, format=format, dtype=dtype, duplicates=duplicates))

    @classmethod
    def from_arrays(
        cls,
        values: ArrayLike | None,
        row_offsets: ArrayLike,
        column_indices: ArrayLike,
        *,
        shape: tuple[int, int],
        format: Format | str = CSR,
    ) -> SparseArray:
        """A SparseArray from the arrays of CSR, CVS(V) or BCSR(r, c), or of CSC: column offsets and
        row indices. Nothing is sorted or merged. Values None are ones.

        Concrete structure is validated: ValueError unless offsets rise from 0 to at most nnz, and
        indices are in range and rise strictly in each row. Traced structure cannot be checked now:
        an entry that is not valid takes no part in any operation, or is an error with `checked()`.
        Entries from row_offsets[m] on are padding. Values of vectors and blocks that lie outside
        the matrix are ignored, NaN too.
        """
        return cls(**construct.from_arrays(values, row_offsets, column_indices, shape, format))

    @property
    def overflow(self) -> jax.Array:
        """[] int32: how many entries did not fit in the capacity `nnz` of an array that was made
        inside jit. Ask the array itself: what is derived from it has what is stored."""
        return capacity.overflow(self)

    @property
    def row_lengths(self) -> jax.Array:
        """[m] int32: stored entries of each row, without padding."""
        return convert.row_lengths(self)

    def coordinates(self) -> tuple[jax.Array, ...]:
        """One [nnz] index array per dimension, in the order of the flattened values; padding, and
        values of vectors and blocks outside the matrix, get the size of the dimension."""
        return convert.coordinates(self)

    def asformat(self, format: Format | str, *, max_fill_in: float | None = None) -> SparseArray:
        """The same tensor in another format; to CSR, CSC and COO also on traced arrays, and without
        a sort.

        Between CSR, COO and CSF(2) the values are shared; to the other orientation they are
        permuted. From CVS(V) and BCSR(r, c) every value inside the matrix becomes an entry, zeros
        included; from BCSR(r, c) to CVS(r) each column of a block becomes a vector. Conversion to
        vectors or blocks stores each that has at least one entry; the zeros that fill it up are
        entries from then on. Conversion to vectors, to blocks, to CSF or to another order of a
        tensor's modes requires a concrete structure; the result's structure is then concrete too,
        also under `jit`. Values may be traced.

        `max_fill_in`: a limit, at least 1, on the stored values per entry: ValueError if
        `fill_in(A, format)` is larger, before the values are allocated. None: no limit.
        """
        return entries.asformat(self, format, max_fill_in)

    def sum(
        self,
        axis: int | tuple[int, ...] | None = None,
        dtype: Dtype = None,
        out: None = None,
        keepdims: bool = False,
        initial: None = None,
        where: None = None,
    ) -> jax.Array:
        """The dense sum over all axes, over one (axis=0 sums each column of a matrix, axis=1 or -1
        each row) or over a tuple of them. `np.sum(A, ...)` is the same.

        The result has `dtype`, by default that of `jnp.sum`, which widens integers and bool. Floats
        narrower than float32 are added up in float32 and rounded once. Differentiable in the
        values; ignores padding. `keepdims` keeps the summed axes with size 1. ValueError for an
        axis out of range or given twice, NotImplementedError for `out`, `initial` and `where`.
        """
        parts.refuse("SparseArray.sum", out=out, initial=initial, where=where)
        return parts.total(self, axis, dtype, keepdims)

    def mean(
        self,
        axis: int | tuple[int, ...] | None = None,
        dtype: Dtype = None,
        out: None = None,
        keepdims: bool = False,
        where: None = None,
    ) -> jax.Array:
        """`sum` divided by the number of elements of the dense array that are summed, stored or
        not; in `dtype`, by default that of `jnp.mean`, a float. `np.mean(A, ...)` is the same.
        Errors as of `sum`, and TypeError for bool as the dtype."""
        parts.refuse("SparseArray.mean", out=out, where=where)
        return parts.mean(self, axis, dtype, keepdims)

    def max(
        self,
        axis: int | tuple[int, ...] | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: None = None,
        where: None = None,
    ) -> jax.Array:
        """The greatest element of a matrix, of each column (axis=0) or of each row (axis=1), dense
        and in A's dtype. Zeros that are not stored count, as in SciPy; `row_max` is of the stored
        entries alone. NaN is greater than all. `np.max(A, ...)` is the same.

        Differentiable in the values: where elements tie, the gradient is that of the first one.
        ValueError for complex values and for no elements, NotImplementedError for a tensor and for
        `out`, `initial` and `where`.
        """
        parts.refuse("SparseArray.max", out=out, initial=initial, where=where)
        return extrema.extremum(self, "max", axis, keepdims)

    def min(
        self,
        axis: int | tuple[int, ...] | None = None,
        out: None = None,
        keepdims: bool = False,
        initial: None = None,
        where: None = None,
    ) -> jax.Array:
        """The least element, as `max`; NaN is less than all."""
        parts.refuse("SparseArray.min", out=out, initial=initial, where=where)
        return extrema.extremum(self, "min", axis, keepdims)

    def argmax(
        self, axis: int | None = None, out: None = None, *, keepdims: bool = False
    ) -> jax.Array:
        """Where the greatest element is, the first one of several: its row for axis=0, its column
        for axis=1, else its position in the flattened matrix. Integers as of `jnp.argmax`. Zeros
        that are not stored count. Errors as of `max`, and ValueError for a position that does not
        fit in the integers."""
        parts.refuse("SparseArray.argmax", out=out)
        return extrema.position(self, "argmax", axis, keepdims)

    def argmin(
        self, axis: int | None = None, out: None = None, *, keepdims: bool = False
    ) -> jax.Array:
        """Where the least element is, as `argmax`."""
        parts.refuse("SparseArray.argmin", out=out)
        return extrema.position(self, "argmin", axis, keepdims)

    def nonzero(self) -> tuple[jax.Array, ...]:
        """One int32 array per dimension: where the elements are != 0, in row-major order.
        ValueError if A is traced, since the length is not known then."""
        return entries.nonzero(self)

    def reshape(self, *shape: Any, order: str = "C") -> SparseArray:
        """The same elements in row-major order under another shape, of which one size may be -1.

        Entries stay entries. In A's format where the number of dimensions stays and entries are
        stored one by one, else in CSR, or COO of a tensor. A traced matrix reshapes to a matrix.
        Differentiable in the values. ValueError for a shape of another size.
        """
        return entries.reshape(self, shape, order)

    def sum_duplicates(self) -> SparseArray:
        """The same array with each coordinate once, and sorted: A itself where that was checked.
        The one of `graphs.from_edges(..., duplicates="keep")` has edges that repeat.
        Sums are in float32 at least; also for traced matrices, in the same capacity."""
        return entries.sum_duplicates(self)

    def eliminate_zeros(self, *, nse: int | None = None) -> SparseArray:
        """The same array without entries, vectors or blocks that are zero.

        Also for traced matrices in CSR, CSC and COO, where zeros become padding: `nse` is then the
        capacity, by default A's, and `overflow` counts what did not fit.
        """
        return entries.eliminate_zeros(self, nse)

    def diagonal(self, k: int = 0) -> jax.Array:
        """The k-th diagonal of a matrix, dense and in its dtype: entries (i, i + k), for k < 0
        (i - k, i), and zero where none is stored. [min(rows, columns)] for k = 0, empty for a k
        beyond the matrix. Differentiable in the values."""
        checks.check_concrete(k, "k", "SparseArray.diagonal", "it says how long the result is")
        return convert.diagonal(self, operator.index(k))

    def trace(self, offset: int = 0) -> jax.Array:
        """The sum of a diagonal, `A.diagonal(offset).sum()`."""
        return self.diagonal(offset).sum()

    def todense(self) -> jax.Array:
        """The dense array of this shape and dtype. Differentiable; ignores padding."""
        return convert.todense(self)

    toarray = todense

    def tocsr(self) -> SparseArray:
        """`asformat(CSR)`."""
        return self.asformat(CSR)

    def tocsc(self) -> SparseArray:
        """`asformat(CSC)`."""
        return self.asformat(CSC)

    def tocoo(self) -> SparseArray:
        """`asformat(COO)`."""
        return self.asformat(COO)

    def copy(self) -> SparseArray:
        """A itself, which nothing can write to."""
        return self

    def transpose(self, axes: int | Sequence[int] | None = None, *more: int) -> SparseArray:
        """`A.T`, which reverses all axes: `axes` are None or that order, as (1, 0) of a matrix, or
        1, 0 as NumPy also takes it; ValueError for another."""
        reverse = tuple(range(self.ndim))[::-1]
        named: Any = (axes, *more) if more else axes
        named = named.tolist() if hasattr(named, "tolist") else named
        given = reverse if named is None else named if isinstance(named, Sequence) else (named,)
        if tuple(i + self.ndim if i in range(-self.ndim, 0) else i for i in given) != reverse:
            raise ValueError(
                f"SparseArray.transpose: axes: expected None or {reverse}, got {named!r}"
            )
        return self.T

    def dot(self, other: Any) -> Any:
        """`A @ other`."""
        return self @ other

    def multiply(self, other: Any) -> SparseArray:
        """A * other, entry by entry, as SciPy names it."""
        return self * other

    def power(self, n: Any) -> SparseArray:
        """`A**n`."""
        return self**n

    def count_nonzero(self, axis: int | tuple[int, ...] | None = None) -> jax.Array:
        """How many elements are not zero, of A or along an axis: integers as of `sum` of bool.
        `A.nnz` counts what is stored, zeros and padding too, and is no array."""
        return (convert.by_entries(self) != 0).sum(axis)

    def conj(self) -> SparseArray:
        """The complex conjugate: A itself where its dtype is real."""
        complex_ = jnp.issubdtype(self.dtype, jnp.complexfloating)
        return self.with_values(jnp.conj(self.values)) if complex_ else self

    @property
    def H(self) -> SparseArray:
        """The conjugate transpose, `A.T.conj()`: of a real A its transpose, which shares all."""
        return self.T.conj()

    @property
    def real(self) -> SparseArray:
        """The real parts of the values, in A's structure."""
        return self.with_values(jnp.real(self.values))

    @property
    def imag(self) -> SparseArray:
        """The imaginary parts of the values, in A's structure."""
        return self.with_values(jnp.imag(self.values))

    def to_scipy(self) -> Any:
        """A SciPy csr_array, csc_array or coo_array, or a bsr_array for vectors and blocks that
        divide the shape; without padding. ValueError if traced.

        bfloat16 and float16, which SciPy does not support, become float32.
        """
        return interop.to_scipy(self)

    def to_bcsr(self) -> Any:
        """A `jax.experimental.sparse.BCSR`; also under jit."""
        return interop.to_bcsr(self)

    def to_bcoo(self) -> Any:
        """A `jax.experimental.sparse.BCOO`, with padding as BCOO marks it; also under jit."""
        return interop.to_bcoo(self)

    def checked(self, *, sorted: bool = True) -> SparseArray:
        """This array after a check of its structure; `is_checked` of the result is True.

        `sorted=False` checks that offsets rise and indices are in range, of CSR, CSC, vectors and
        blocks, and lets the entries of a row be in any order and repeat. Every operation takes such
        rows; `is_checked` stays False, since some are faster on sorted ones.

        Raises ValueError for a concrete structure that is not valid. A traced one is checked on the
        CPU when the compiled function runs, which fails (ValueError or JaxRuntimeError) before
        anything is computed from it; its transpose is computed anew from the checked arrays.
        NotImplementedError for traced CSF and for other platforms.
        """
        return checked.checked(self, checks.check_flag(sorted, "sorted", "SparseArray.checked"))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in INSTEAD:
                raise AttributeError(f"SparseArray.{name}: the nearest is {INSTEAD[name]}")
            return object.__getattribute__(self, name)  # raises the property's error, or Python's

    def __repr__(self) -> str:
        # Leaves may be anything (tracers, ShapeDtypeStruct, None, batched): never fail here.
        shape = getattr(self.values, "shape", ())
        block = len(self._tail)
        known = isinstance(shape, tuple) and len(shape) > block
        nnz = str(self.nnz) if known else "?"
        density = f"{self.density:.4g}" if known else "?"
        batch = f", batch={shape[: -1 - block]}" if known and len(shape) > 1 + block else ""
        dtype = getattr(self.values, "dtype", "?")
        return (
            f"SparseArray(shape={self.shape}, format={self.format}, nnz={nnz}, density={density}, "
            f"dtype={dtype}{batch})"
        )


_LEVELS: dict[str, Any] = {level.__name__: level for level in (Dense, Compressed, Singleton)}


def _written(static: tuple) -> bytes:
    shape, format, statistics = static
    levels = [[type(level).__name__, dataclasses.asdict(level)] for level in format.levels]
    written = [shape, levels, format.order]
    found = statistics.rows, statistics.columns
    if any(found):  # earlier versions read the three others
        written.append([s if s is None else dataclasses.asdict(s) for s in found])
    return json.dumps(written).encode()


def _read(text: bytes | bytearray) -> tuple:
    shape, levels, order, *rest = json.loads(bytes(text))
    made = tuple(_LEVELS[name](**fields) for name, fields in levels)
    found = (None if s is None else RowStatistics(**s) for s in (rest[0] if rest else ()))
    order = None if order is None else tuple(order)
    return tuple(shape), Format(made, order), PatternStatistics(*found)


def _of_children(aux_data: Any, children: Sequence[Any]) -> SparseArray:
    return SparseArray(*children, *aux_data)


# Exported programs contain these names: do not change them.
for _tuple in (CheckedIndices, CheckedLevel, CheckedTranspose, ValidLevel, ValidTranspose):
    jax.export.register_namedtuple_serialization(
        _tuple, serialized_name=f"sgap_jax.{_tuple.__name__}"
    )
jax.export.register_pytree_node_serialization(
    PreparedTranspose,
    serialized_name="sgap_jax.PreparedTranspose",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: tuple(tuple(map(tuple, x)) for x in json.loads(bytes(text))),
    from_children=lambda static, children: PreparedTranspose(*children, *static),
)
jax.export.register_pytree_node_serialization(
    SparseArray,
    serialized_name="sgap_jax.SparseArray",
    serialize_auxdata=_written,
    deserialize_auxdata=_read,
    from_children=_of_children,
)
