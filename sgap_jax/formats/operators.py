"""The Python operators of `SparseArray`, and the error messages for names and operators of SciPy
and NumPy that it does not have; each message names the nearest thing that it has."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, Self, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sgap_jax.formats import arithmetic, indexing, parts
from sgap_jax.formats.stored import Array, StoredArray

_DENSE = "A.todense(), which has it"

# For each refused name an expression to use instead; some go on with ", which ..." or ", or ...".
INSTEAD = {
    "all": _DENSE,
    "any": _DENSE,
    "argsort": _DENSE,
    "at": "A.with_values(A.values.at[p].set(x)), which changes what is stored",
    "block_until_ready": "jax.block_until_ready(A)",
    "clip": "A.with_values(jnp.clip(A.values, -x, x))",
    "coalesce": "A.sum_duplicates()",
    "col": "A.asformat(COO).column_indices",
    "col_indices": "A.column_indices",
    "cpu": "jax.device_put(A, jax.devices('cpu')[0])",
    "cuda": "jax.device_put(A, jax.devices()[0])",
    "detach": "A.with_values(jax.lax.stop_gradient(A.values))",
    "conjugate": "A.conj()",
    "coords": "A.coordinates()",
    "crow_indices": "A.row_offsets",
    "data": "A.values",
    "devices": "A.values.devices()",
    "flatten": "A.reshape(-1)",
    "getcol": "A[:, j:j + 1]",
    "getnnz": "A.nnz, or A.row_lengths",
    "getrow": "A[i:i + 1]",
    "has_sorted_indices": "A.checked(), which fails where they are not",
    "indices": "A.column_indices, or A.row_indices of CSC",
    "indptr": "A.row_offsets, or A.column_offsets of CSC",
    "item": "A[i, j], or A.sum(), which are arrays of JAX",
    "mT": "A.T",
    "matmul": "A @ B",
    "mm": "A @ B",
    "mv": "A @ x, or A @ B",
    "nbytes": "sum(x.nbytes for x in jax.tree.leaves(A))",
    "nse": "A.nnz",
    "numpy": "np.asarray(A.todense())",
    "prod": _DENSE,
    "ravel": "A.reshape(-1)",
    "resize": "A[:i, :j], or SparseArray.from_coordinates with another shape",
    "round": "A.with_values(jnp.round(A.values))",
    "row": "A.asformat(COO).row_indices",
    "setdiag": "A.with_values(A.values.at[p].set(x)), which changes what is stored",
    "sharding": "A.values.sharding",
    "size": "A.nnz, or math.prod(A.shape)",
    "sort_indices": "A.asformat(COO).asformat(CSR), or A itself, which constructors sort",
    "std": _DENSE,
    "squeeze": "A.reshape(-1)",
    "swapaxes": "A.T",
    "t": "A.T",
    "to": "jax.device_put(A, jax.devices()[0]), or A.astype(dtype)",
    "to_dense": "A.todense()",
    "to_sparse_coo": "A.asformat(COO)",
    "to_sparse_csr": "A.asformat(CSR)",
    "tobsr": "A.asformat(BCSR(r, c))",
    "todia": "A.to_scipy().todia()",
    "todok": "A.to_scipy().todok()",
    "tolil": "A.to_scipy().tolil()",
    "tolist": "A.todense().tolist()",
    "var": _DENSE,
    "view": "A.reshape(-1), or A.astype(dtype)",
}
# Functions of SciPy that keep zero.
_OF_ENTRIES = ("sqrt", "sin", "tan", "arcsin", "arctan", "sinh", "tanh", "expm1", "log1p", "sign")
_ROUNDING = ("floor", "ceil", "rint", "trunc")
INSTEAD |= {f: f"A.with_values(jnp.{f}(A.values))" for f in (*_OF_ENTRIES, *_ROUNDING)}


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


def no_logic() -> TypeError:
    return TypeError(
        "SparseArray: no operators &, |, ^ and ~: of arrays of bool A * B is A & B, and "
        "A.maximum(B) is A | B; of masks there are masks.intersection and masks.union; the others "
        "are those of A.todense()"
    )


def no_assignment() -> TypeError:
    return TypeError(
        "SparseArray: nothing is assigned to; the nearest is A.with_values(A.values.at[p].set(x)), "
        "which changes what is stored"
    )


def _equality(A: Array, other: Any, holds: Callable, sign: str) -> Any:
    """With a number or an array `==` and `!=` compare entries, with any other object identity."""
    if isinstance(other, np.ndarray | jax.Array) and np.ndim(other):
        raise TypeError(f"{arithmetic.no_operator()}; `is` asks for A itself, in a list too")
    if isinstance(other, int | float | complex | np.generic | np.ndarray | jax.Array):
        return arithmetic.compared(A, other, holds, sign)
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
        return arithmetic.add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        """A - B, as A + B."""
        return arithmetic.subtract(self, other)

    def __rsub__(self, other: Any) -> Self:
        return arithmetic.subtract_from(self, other)

    def __mul__(self, other: Any) -> Self:
        """A * x for a scalar or a dense x that broadcasts to A's shape (`A * d[:, None]` scales
        rows), or A * B, entry by entry; x may be traced, and derivatives pass.

        A * x stores what A stores: NaN and infinity in x elsewhere are not seen. A * B stores the
        intersection of the entries (of two traced patterns the union, with zeros where only one
        stores an entry); shapes, formats and patterns as in A + B. ValueError otherwise.
        """
        return arithmetic.multiply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, x: ArrayLike) -> Self:
        """A / x for a scalar or a dense x, as A * x: 0 / 0 where nothing is stored stays zero, as
        in SciPy. ValueError otherwise."""
        return arithmetic.divide(self, x)

    def __pos__(self) -> Self:
        return self

    def __neg__(self) -> Self:
        return replace(self, values=-self.values)

    def __abs__(self) -> Self:
        return arithmetic.absolute(self)

    def __pow__(self, n: Any) -> Self:
        """A**n for a number n > 0: each stored value to that power, as SciPy's arrays.
        NotImplementedError for others, which make ones or infinities of zeros."""
        return arithmetic.power(self, n)

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
        return arithmetic.extremum(self, other, "maximum")

    def minimum(self, other: Any) -> Self:
        """The elementwise minimum of two arrays; see `maximum`."""
        return arithmetic.extremum(self, other, "minimum")

    def __floordiv__(self, other: Any) -> NoReturn:
        raise arithmetic.no_operator()

    __rpow__ = __rtruediv__ = __rfloordiv__ = __mod__ = __rmod__ = __floordiv__
    __divmod__ = __rdivmod__ = __floordiv__

    def __and__(self, other: Any) -> NoReturn:
        raise no_logic()

    def __invert__(self) -> NoReturn:
        raise no_logic()

    __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __and__

    def __gt__(self, x: Any) -> Self:
        """A > x for a number x that is known, with bool values in A's structure, as of SciPy's
        arrays; so are >=, <, <=, == and !=. TypeError where zero compares true with x, or x is
        traced or no number, which would give a dense result; with an object that is neither number
        nor array, == and != ask whether it is A itself."""
        return arithmetic.compared(self, x, operator.gt, ">")

    def __ge__(self, x: Any) -> Self:
        return arithmetic.compared(self, x, operator.ge, ">=")

    def __lt__(self, x: Any) -> Self:
        return arithmetic.compared(self, x, operator.lt, "<")

    def __le__(self, x: Any) -> Self:
        return arithmetic.compared(self, x, operator.le, "<=")

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
        for index arrays, integers and steps, and always for a traced structure. Repeated indices
        repeat rows. Negative indices count from the end, and bounds of slices may be beyond it.
        Differentiable in the values.

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
