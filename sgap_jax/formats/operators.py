"""The Python operators of `SparseArray`, and the error messages for names and operators of SciPy
and NumPy that it does not have; each message names the nearest thing that it has.

If A and B have the same pattern, their values are combined elementwise. If the patterns differ, the
place of each entry in the result is computed in NumPy where the structures are concrete; the values
move there with one gather or scatter and may be traced. Traced structures are joined by a counting
sort (capacity.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Self, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sgap_jax.formats import (
    capacity,
    checks,
    construct,
    convert,
    direct,
    entries,
    indexing,
    parts,
    row_statistics,
    structure,
)
from sgap_jax.formats.levels import CSC, CSR
from sgap_jax.formats.row_statistics import PatternStatistics
from sgap_jax.formats.stored import Array, CheckedLevel, StoredArray

_DENSE = "A.todense(), which has it"

# For each refused name an expression to use instead; some go on with ", which ..." or ", or ...".
INSTEAD = {
    "all": _DENSE,
    "any": _DENSE,
    "argsort": _DENSE,
    "at": "A.with_values(A.values.at[p].set(x)), which changes what is stored",
    "clip": "A.with_values(jnp.clip(A.values, -x, x))",
    "col": "A.asformat(COO).column_indices",
    "conjugate": "A.conj()",
    "coords": "A.coordinates()",
    "data": "A.values",
    "flatten": "A.reshape(-1)",
    "getcol": "A[:, j:j + 1]",
    "getnnz": "A.nnz, or A.row_lengths",
    "getrow": "A[i:i + 1]",
    "has_sorted_indices": "A.checked(), which fails where they are not",
    "indices": "A.column_indices, or A.row_indices of CSC",
    "indptr": "A.row_offsets, or A.column_offsets of CSC",
    "mT": "A.T",
    "nbytes": "sum(x.nbytes for x in jax.tree.leaves(A))",
    "prod": _DENSE,
    "ravel": "A.reshape(-1)",
    "round": "A.with_values(jnp.round(A.values))",
    "row": "A.asformat(COO).row_indices",
    "setdiag": "A.with_values(A.values.at[p].set(x)), which changes what is stored",
    "size": "A.nnz, or math.prod(A.shape)",
    "sort_indices": "A.asformat(COO).asformat(CSR), or A itself, which constructors sort",
    "std": _DENSE,
    "tobsr": "A.asformat(BCSR(r, c))",
    "todia": "A.to_scipy().todia()",
    "todok": "A.to_scipy().todok()",
    "tolil": "A.to_scipy().tolil()",
    "var": _DENSE,
}
# Functions of SciPy that keep zero.
_OF_ENTRIES = ("sqrt", "sin", "tan", "arcsin", "arctan", "sinh", "tanh", "expm1", "log1p", "sign")
_ROUNDING = ("floor", "ceil", "rint", "trunc")
INSTEAD |= {f: f"A.with_values(jnp.{f}(A.values))" for f in (*_OF_ENTRIES, *_ROUNDING)}


def no_operator() -> TypeError:
    return TypeError(
        "SparseArray: of the operators that act on each entry there are +, -, *, /, ** and abs, "
        "and comparisons with a number; the nearest is A.with_values(f(A.values)) where entries "
        "are, or f(A.todense())"
    )


def no_truth() -> ValueError:
    return ValueError(
        "SparseArray: neither true nor false; A.nnz > 0 says whether it stores anything, "
        "A is not None whether there is one"
    )


def no_length() -> TypeError:
    return TypeError("SparseArray: no len(): A.shape[0] counts rows, A.nnz what is stored")


def no_iteration() -> TypeError:
    return TypeError(
        "SparseArray: not iterable: a row for each step would be a program for each; the nearest "
        "is an operation on all rows, A[i:i + k] for some, or A.to_scipy() to look at them"
    )


def no_assignment() -> TypeError:
    return TypeError(
        "SparseArray: nothing is assigned to; the nearest is A.with_values(A.values.at[p].set(x)), "
        "which changes what is stored"
    )


def _equality(A: Array, other: Any, holds: Callable, sign: str) -> Any:
    """With a number or an array `==` and `!=` compare entries, with any other object identity."""
    if isinstance(other, np.ndarray | jax.Array) and np.ndim(other):
        raise TypeError(f"{no_operator()}; `is` asks for A itself, in a list too")
    if isinstance(other, int | float | complex | np.generic | np.ndarray | jax.Array):
        return compared(A, other, holds, sign)
    return holds(A is other, True)


class Operators(StoredArray):
    """The operators of `SparseArray`, the only subclass of this class."""

    # With these, NumPy arrays and scalars leave binary operators to the methods of this class.
    __array_ufunc__ = None
    __array_priority__ = 100

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        # Without this, np.asarray(A) would be an object array that holds A.
        raise TypeError(
            "SparseArray is no dense array: A.todense() is, A.values holds the stored entries"
        )

    @overload
    def __matmul__(self, other: Operators) -> Self: ...
    @overload
    def __matmul__(self, other: ArrayLike) -> jax.Array: ...
    def __matmul__(self, other: ArrayLike | Operators) -> jax.Array | Self:
        """A @ B for a dense vector or matrix: `spmv` or `spmm` with the default schedule; of a B
        [..., k, n] with leading axes, a product for each, as `np.matmul`. For a sparse B the sparse
        product, `spgemm`; with a sparse vector in place of one matrix a sparse vector, in COO
        (`evaluate`). A sparse vector A[i] has an inner product with a dense or sparse one."""
        if isinstance(other, Operators):
            return self._sparse_product(other)
        if self.ndim == 1 and np.shape(other) == self.shape:
            weighted = self * other
            return parts.total(weighted, None, weighted.dtype, False)
        return self._products(other)

    def __rmatmul__(self, other: ArrayLike) -> jax.Array:
        """B @ A = (A^T B^T)^T for a dense vector or matrix, or a B [..., r, m] of matrices."""
        shape = np.shape(other)
        if not shape:
            raise ValueError("B @ SparseArray: B: expected at least 1-d, got 0-d")
        if self.ndim == 1 and len(shape) == 1:
            return self @ other
        if len(shape) == 1:
            return self._products(other, transpose=True)
        if len(shape) == 2:
            return self._products(np.transpose(other), transpose=True).T
        rows = jnp.asarray(other).reshape(math.prod(shape[:-1]), shape[-1])
        return (rows @ self).reshape(*shape[:-1], self.shape[-1])

    def __add__(self, other: Any) -> Self:
        """A + B for arrays of the same shape; the result stores the union of their entries, also
        where a sum is zero, in the format of A.

        If both have the same index arrays (one pattern), which may be traced, their values are
        added. Of different patterns the union is made at once if they are concrete, also under jit;
        traced matrices of entries (CSR, CSC, COO) give one with a capacity for all entries of both.
        Values may be traced in all cases. ValueError for different shapes; NotImplementedError for
        other traced formats, and if B is dense or another library's sparse array.
        """
        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        """A - B, as A + B."""
        return subtract(self, other)

    def __rsub__(self, other: Any) -> Self:
        return subtract_from(self, other)

    def __mul__(self, other: Any) -> Self:
        """A * x for a scalar or a dense x that broadcasts to A's shape (`A * d[:, None]` scales
        rows), or A * B, entry by entry; x may be traced, and derivatives pass.

        A * x stores what A stores: NaN and infinity in x elsewhere are not seen. A * B stores the
        intersection of the entries (of two traced patterns the union, with zeros where only one
        stores an entry); shapes, formats and patterns as in A + B. ValueError otherwise.
        """
        return multiply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, x: ArrayLike) -> Self:
        """A / x for a scalar or a dense x, as A * x: 0 / 0 where nothing is stored stays zero, as
        in SciPy. ValueError otherwise."""
        return divide(self, x)

    def __pos__(self) -> Self:
        return self

    def __neg__(self) -> Self:
        return replace(self, values=-self.values)

    def __abs__(self) -> Self:
        A = _each_once(self)
        return replace(A, values=abs(A.values))

    def __pow__(self, n: Any) -> Self:
        """A**n for a number n > 0: each stored value to that power, as SciPy's arrays.
        NotImplementedError for others, which make ones or infinities of zeros."""
        return power(self, n)

    def maximum(self, other: Any) -> Self:
        """The elementwise maximum of two arrays of one shape, [same shape] in the format of this
        one and the promoted dtype: max(A[i, j], B[i, j]), with 0 where one stores nothing. It
        stores the union of their entries, also where the maximum is 0; patterns as in A + B. NaN
        propagates. Differentiable in both values; equal elements share the gradient.

        With a number that is known, at most zero (at least zero, of `minimum`), each stored element
        is compared with it, and a whole number beyond the range of the values' dtype as the end of
        that range. NotImplementedError for other scalars and for a dense array, with which
        what is not stored counts.
        """
        return extremum(self, other, "maximum")

    def minimum(self, other: Any) -> Self:
        """The elementwise minimum of two arrays; see `maximum`."""
        return extremum(self, other, "minimum")

    def __floordiv__(self, other: Any) -> NoReturn:
        raise no_operator()

    __rpow__ = __rtruediv__ = __rfloordiv__ = __mod__ = __rmod__ = __floordiv__

    def __gt__(self, x: Any) -> Self:
        """A > x for a number x that is known, with bool values in A's structure, as of SciPy's
        arrays; so are >=, <, <=, == and !=. TypeError where zero compares true with x, or x is
        traced or no number, which would give a dense result; with an object that is neither number
        nor array, == and != ask whether it is A itself."""
        return compared(self, x, operator.gt, ">")

    def __ge__(self, x: Any) -> Self:
        return compared(self, x, operator.ge, ">=")

    def __lt__(self, x: Any) -> Self:
        return compared(self, x, operator.lt, "<")

    def __le__(self, x: Any) -> Self:
        return compared(self, x, operator.le, "<=")

    def __eq__(self, other: object) -> Any:
        return _equality(self, other, operator.eq, "==")

    def __ne__(self, other: object) -> Any:
        return _equality(self, other, operator.ne, "!=")

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise no_truth()

    def __len__(self) -> NoReturn:
        raise no_length()

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise no_assignment()

    def __getitem__(self, index: Any) -> Any:
        """A part of A, as NumPy and SciPy index: A[i:j, k:l] (any step), A[i], A[i, j], A[:, j],
        A[idx] of an index array, A[mask] of a mask of one dimension, A[..., idx], A[rows, columns].

        Two integers give the element, [] and dense, and two index arrays, which broadcast as
        NumPy's and have two dimensions at most, the elements (rows[n], columns[n]), dense and of
        their shape; a column [r, 1] and a row [c] of indices, as `np.ix_` makes them, give the
        submatrix [r, c], sparse. One integer gives a sparse vector, in COO. Otherwise the format
        stays; of vectors and blocks it does for bounds at multiples of their sides, and becomes CSR
        for index arrays, integers and steps. Repeated indices repeat rows. Negative indices count
        from the end, and bounds of slices may be beyond it. Differentiable in the values.

        With concrete structure and indices nothing is compiled, for formats of entries. Indices and
        index arrays may be traced where the structure is concrete: the result's capacity is then
        enough for any, and those out of range give zeros. Of a traced matrix, slices and single
        rows have its capacity; `rows` takes one for others. Two index arrays into it are sorted
        with its entries.

        Raises IndexError for other indices, those out of range, a traced slice or mask, and bounds
        that cut vectors or blocks; ValueError for one index array into a traced structure;
        NotImplementedError for a traced tensor.
        """
        if index is Ellipsis:  # an nnx.Variable that holds A is read so, whatever its leaves are
            return self
        return indexing.item(self, index)

    def rows(self, index: Any, *, nse: int | None = None) -> Self:
        """The rows of a matrix at a slice or an index array [k], in a capacity: so that batches of
        as many rows share one compiled program, `step(X.rows(slice(i, i + 32)))`. `X[i:i + 32]` is
        SciPy's slice: its `nnz` differs from batch to batch, and a jitted step compiles for each.

        The result has shape [k, columns], in CSR, or in COO where A is. Negative indices count from
        the end; repeated ones repeat rows. The index array may be traced: an index out of range is
        then an empty row. Columns are `A.T.rows(index).T`.

        `nse`: how many entries the result can store (static). None is enough for any rows: for a
        slice as many as the slice of its length with most, else k times the longest row; a traced
        structure needs one. What does not fit is an error if all is concrete; otherwise `overflow`
        counts it and `checked()` fails. Differentiable in the values.

        Raises IndexError for indices out of range or of another kind, ValueError for an nse that is
        too small or missing.
        """
        return indexing.rows(self, index, nse)

    def __iter__(self) -> NoReturn:
        raise no_iteration()


def add(A: Array, B: Any) -> Array:
    return A if checks.is_zero(B) else _union(A, B, jnp.add, "+")


def subtract(A: Array, B: Any) -> Array:
    return A if checks.is_zero(B) else _union(A, B, jnp.subtract, "-")


def subtract_from(A: Array, x: Any) -> Array:
    """x - A."""
    if not checks.is_zero(x):
        raise _refused(f"{type(x).__name__} - SparseArray", x, "x - A.todense()", "x - A.values")
    return replace(A, values=-A.values)


def multiply(A: Array, B: Any) -> Array:
    if not _is_sparse(B):
        if hasattr(B, "todense"):
            raise _refused(f"SparseArray * {type(B).__name__}", B)
        return _scaled(A, B, operator.mul, "SparseArray * x")
    what = "SparseArray * SparseArray"
    B = _alike(A, B, what)
    alike = _same_arrays(A, B)
    A, B = _each_once(A), _each_once(B)
    if alike or _one_pattern(A, B, what):
        return replace(A, values=A.values * B.values)
    if _is_traced(A, B):
        return _joined(A, B, _product_where_both, what)
    found = _at_once(A, B, "*")
    if found is not None:
        return found
    levels, of_a, of_b = _places(A, B, what)
    both = np.ones(len(levels[0]), bool)
    for place in (of_a, of_b):
        own = np.zeros_like(both)
        own[place] = True
        both &= own
    from_a, from_b = (np.flatnonzero(both[place]).astype(np.int32) for place in (of_a, of_b))
    values = _products(A.values, B.values, from_a, from_b)
    return _stored(A, [level[both] for level in levels], values)


def divide(A: Array, x: Any) -> Array:
    if _is_sparse(x) or hasattr(x, "todense"):
        raise NotImplementedError(
            f"SparseArray / {type(x).__name__}: 0 / 0 where neither stores an entry; the nearest, "
            "for arrays of one pattern, is A.with_values(A.values / B.values)"
        )
    return _scaled(A, x, operator.truediv, "SparseArray / x")


def power(A: Array, n: Any) -> Array:
    what = "SparseArray ** n"
    bad = n is None or _is_sparse(n) or np.ndim(n) or checks.is_traced(n)
    if bad or isinstance(n, complex | str) or not n > 0:
        raise NotImplementedError(
            f"{what}: n: expected a number > 0 that is known, got {n!r}; the nearest is "
            "A.todense()**n, or A.with_values(A.values**n) where entries are"
        )
    A = _each_once(A)
    return replace(A, values=A.values**n)


def compared(A: Array, x: Any, holds: Callable, sign: str) -> Array:
    what = f"SparseArray {sign} {type(x).__name__}"
    if _is_sparse(x) or x is None or isinstance(x, str) or np.ndim(x) or checks.is_traced(x):
        raise TypeError(f"{what}: expected a number that is known; {no_operator()}")
    x = checks.check_scalar(x, what)
    if holds(0, x):
        raise TypeError(
            f"{what}: true where nothing is stored, of {x}; the nearest is A.todense() {sign} x, "
            f"or A.with_values(A.values {sign} x) where entries are"
        )
    A = _each_once(A)
    return replace(A, values=holds(A.values, x))


def _scaled(A: Array, x: Any, combine: Callable, what: str) -> Array:
    """combine(A, x) at A's entries."""
    if np.ndim(x) == 0 or x is None:
        return replace(A, values=combine(A.values, checks.check_scalar(x, what)))
    x = jnp.asarray(x)
    checks.check_numeric(x.dtype, what, "x")
    shape = (1,) * (A.ndim - x.ndim) + x.shape
    fits = len(shape) == A.ndim and all(
        n in (1, size) for n, size in zip(shape, A.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{what}: x: expected a scalar or an array that broadcasts to {A.shape}, got shape "
            f"{x.shape}; A.with_values takes a number for each entry"
        )
    return replace(A, values=_at_entries(A, x.reshape(shape), combine=combine))


@partial(jax.jit, static_argnames="combine")
def _at_entries(A: StoredArray, x: jax.Array, *, combine: Callable) -> jax.Array:
    values = structure.whole(A.values)
    if not x.size or not values.size:
        return combine(values, jnp.ones((), x.dtype))
    found = convert.coordinates(A)
    real = found[0] < A.shape[0]
    at = tuple(
        jnp.where(real, index, 0) if n > 1 else 0 for index, n in zip(found, x.shape, strict=True)
    )
    # Padding has a factor of 1, so that derivatives in x see none of it.
    factor = jnp.where(real, structure.whole(x)[at], jnp.ones((), x.dtype))
    return combine(values, factor.reshape(values.shape))


def _is_sparse(x: Any) -> bool:
    return isinstance(x, Operators)


def _refused(what: str, x: Any, dense: str = "", values: str = "") -> NotImplementedError:
    nearest = f"{dense}, or A.with_values({values}) where entries are"
    if hasattr(x, "todense"):
        nearest = "with SparseArray.from_scipy, from_bcoo or from_bcsr of it"
    return NotImplementedError(f"{what}: the nearest is {nearest}")


def extremum(A: Array, B: Any, name: str) -> Array:
    """See `SparseArray.maximum` and `minimum`."""
    what = f"SparseArray.{name}"
    combine = jnp.maximum if name == "maximum" else jnp.minimum
    if not _is_sparse(B):
        number = isinstance(B, int | float | np.generic | np.ndarray | jax.Array)
        if number and np.ndim(B) == 0 and not checks.is_traced(B) and np.isrealobj(B):
            if (B <= 0) if name == "maximum" else (B >= 0):
                A = _each_once(A)
                dtype = jnp.result_type(A.dtype, getattr(B, "dtype", type(B)))
                if jnp.issubdtype(dtype, jnp.integer):
                    # JAX would wrap a number that the dtype does not hold: to compare with it is to
                    # compare with the end of the range.
                    limits = jnp.iinfo(dtype)
                    B = jnp.asarray(min(max(int(B), limits.min), limits.max), dtype)
                return replace(A, values=combine(A.values, B))
        call = f"jnp.{name}({{}}, x)"
        of = f"{what} of {type(B).__name__}"
        raise _refused(of, B, call.format("A.todense()"), call.format("A.values"))
    B = _alike(A, B, what)
    alike = _same_arrays(A, B)
    A, B = _each_once(A), _each_once(B)
    return _union_of(A, B, combine, what, alike)


def _union(A: Array, B: Any, combine: Callable, sign: str) -> Array:
    if not _is_sparse(B):
        what = f"SparseArray {sign} {type(B).__name__}"
        raise _refused(what, B, f"A.todense() {sign} x", f"A.values {sign} x")
    what = f"SparseArray {sign} SparseArray"
    B = _alike(A, B, what)
    return _union_of(A, B, combine, what, _same_arrays(A, B))


def _union_of(A: Array, B: Array, combine: Callable, what: str, alike: bool) -> Array:
    """The union of the entries of two arrays of one format; `alike`: they have one pattern."""
    if alike or _one_pattern(A, B, what):
        return replace(A, values=combine(A.values, B.values))
    if _is_traced(A, B):
        return _joined(A, B, _OfAll(combine), what)
    found = _at_once(A, B, "+" if combine is jnp.add else "-" if combine is jnp.subtract else None)
    if found is not None:
        return found
    levels, of_a, of_b = _places(A, B, what)
    once, count = A.is_checked and B.is_checked, len(levels[0])
    values = _filled(A.values, B.values, of_a, of_b, combine=combine, count=count, once=once)
    return _stored(A, levels, values)


@partial(jax.jit, static_argnames=("combine", "count", "once"))
def _filled(
    a: Any, b: Any, of_a: Any, of_b: Any, *, combine: Callable, count: int, once: bool
) -> jax.Array:
    """`combine` of the values of two matrices, each spread over the entries of both. Entries with
    equal coordinates add up, unless each has coordinates of its own (`once`)."""

    def spread(x: Any, place: Any) -> jax.Array:
        zeros = jnp.zeros((count, *x.shape[1:]), x.dtype)
        own = structure.whole(x)[: place.shape[0]]  # without padding
        if once:
            return zeros.at[place].set(own, unique_indices=True, indices_are_sorted=True)
        return zeros.at[place].add(own)

    return combine(spread(a, of_a), spread(b, of_b))


@jax.jit
def _products(a: Any, b: Any, from_a: Any, from_b: Any) -> jax.Array:
    return structure.whole(a)[from_a] * structure.whole(b)[from_b]


def _each_once(A: Array) -> Array:
    """A with each coordinate once, for what is not linear in the elements: A itself where that was
    checked. Traced blocks that nobody has checked are refused."""
    arrays = [x for level in A.index_arrays for x in level]
    one_by_one = A.values.ndim == 1 and all(x.ndim == 1 for x in arrays)
    if one_by_one:
        return entries.sum_duplicates(A)
    if A.format.block_shape and not A.is_checked and checks.is_traced(*arrays):
        raise NotImplementedError(
            f"{A.format} of a traced structure may store a place twice, and this operation needs "
            "their sum; the nearest is A.asformat(CSR)"
        )
    return A


def _alike(A: Array, B: Array, what: str) -> Array:
    """B in the format of A."""
    if A.shape != B.shape:
        raise ValueError(f"{what}: expected two of one shape, got {A.shape} and {B.shape}")
    return entries.asformat(B, A.format)


def _same_arrays(A: StoredArray, B: StoredArray) -> bool:
    """Whether the index arrays of A and B are the same objects, traced or not."""
    pairs = _pairs(A, B)
    return all(x is y for x, y in pairs) and A.values.shape == B.values.shape


def _pairs(A: StoredArray, B: StoredArray) -> list[tuple[Any, Any]]:
    return [
        pair
        for levels in zip(A.index_arrays, B.index_arrays, strict=True)
        for pair in zip(*levels, strict=True)
    ]


def _is_traced(*arrays: StoredArray) -> bool:
    return checks.is_traced(*(x for A in arrays for level in A.index_arrays for x in level))


def _one_pattern(A: StoredArray, B: StoredArray, what: str) -> bool:
    """Whether A and B have equal index arrays, padding included; traced ones are equal only if
    they are the same objects."""
    if _same_arrays(A, B):
        return True
    convert.require_unbatched(A, f"{what}: the first")
    convert.require_unbatched(B, f"{what}: the second")
    if _is_traced(A, B):
        return False
    return all(x.shape == y.shape and np.array_equal(x, y) for x, y in _pairs(A, B))


def _joined(A: Array, B: Array, combine: Callable, what: str) -> Array:
    """The union of two traced matrices of entries, in a capacity for all entries of both."""
    capacity.require_sortable(A.format, A.ndim, what)
    checks.check_nnz(A.nnz + B.nnz, what)
    lists = [(convert.coordinates(X), X.values.reshape(-1)) for X in (A, B)]
    made = capacity.of_both(*lists, shape=A.shape, format=A.format, combine=combine)
    return replace(A, **made, statistics=PatternStatistics())


def _product_where_both(a: Any, b: Any, in_a: Any, in_b: Any) -> jax.Array:
    """a b where both store an entry: infinity times what is not stored is 0."""
    both = in_a & in_b
    zero = jnp.zeros((), a.dtype)
    return jnp.where(both, a, zero) * jnp.where(both, b, zero)


@dataclass(frozen=True)
class _OfAll:
    """`combine(a, b)`, where what is not stored is 0."""

    combine: Callable

    def __call__(self, a: Any, b: Any, in_a: Any, in_b: Any) -> jax.Array:
        found: jax.Array = self.combine(a, b)
        return found


def _places(
    A: StoredArray, B: StoredArray, what: str
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The union of the entries (vectors, blocks) of A and B: one array of coordinates for each
    level, sorted and without repeats; then the position in them of each entry of A, and of B."""
    first, second = (convert.stored_levels(X, what) for X in (A, B))
    if len(first) == 2 and all(map(construct.strictly_sorted, (first, second))):
        return _merged(first, second, convert.level_sizes(A.shape, A.format))
    levels = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    key = levels[0].astype(np.int64)
    for depth, level in enumerate(levels[1:]):
        if depth:  # two int32 coordinates fit in a key; replace them by their rank to add a third
            key = np.unique(key, return_inverse=True)[1].reshape(-1)
        key = key << 32 | level
    # With return_index the sort is stable, and merges two sorted sequences in one pass.
    _, where, place = np.unique(key, return_index=True, return_inverse=True)
    place = place.reshape(-1).astype(np.int32)
    return [level[where] for level in levels], place[: len(first[0])], place[len(first[0]) :]


def _merged(
    first: list[np.ndarray], second: list[np.ndarray], sizes: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """`_places` of sorted matrices, row by row."""
    a, b = ((construct.count_offsets(x[0], sizes[0]), x[1]) for x in (first, second))
    found = direct.places(a, b, sizes[1], "+")
    assert found is not None  # rows ascend
    offsets, indices, *places = found
    of_a, of_b = (np.flatnonzero(place >= 0).astype(np.int32) for place in places)
    return [construct.expand_offsets(offsets, indices.shape[0]), indices], of_a, of_b


def _at_once(A: Array, B: Array, sign: str | None) -> Array | None:
    """A + B, A - B or A * B of concrete matrices in CSR or CSC, structure and values in one pass;
    None of others."""
    if sign is None or A.format not in (CSR, CSC) or not (A.is_checked and B.is_checked):
        return None
    _, columns = convert.level_sizes(A.shape, A.format)
    dtype = jnp.result_type(A.values, B.values)
    if checks.is_traced(A.values, B.values):
        return None
    a, b = ((*X.index_arrays[1], X.values.astype(dtype)) for X in (A, B))
    found = direct.merged(a, b, columns, sign)
    if found is None:
        return None
    offsets, indices, values = found
    transposed = direct.later_transpose(offsets, indices, columns)
    arrays = ((), CheckedLevel(offsets, indices))
    statistics = PatternStatistics()
    if any(x is not None for X in (A, B) for x in (X.statistics.rows, X.statistics.columns)):
        counts = np.bincount(indices, minlength=columns)
        ends = np.append(0, np.cumsum(counts))
        statistics = row_statistics.of_pattern(np.asarray(offsets), ends)
        statistics = statistics.T if A.format == CSC else statistics
    return A._replaced(
        values=values, index_arrays=arrays, transposed=transposed, statistics=statistics
    )


def _stored(A: Array, levels: Sequence[np.ndarray], values: jax.Array) -> Array:
    """An array like A with these sorted level coordinates and these values."""
    checks.check_nnz(values.size, "SparseArray")
    sizes = convert.level_sizes(A.shape, A.format)
    return replace(A, values=values, **construct.index_fields(list(levels), sizes, A.format))
