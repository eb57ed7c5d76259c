"""The arithmetic of sparse arrays entry by entry: sums, products, powers, extrema, comparisons.

If A and B have the same pattern, their values are combined elementwise. If the patterns differ, the
place of each entry in the result is computed in NumPy where the structures are concrete; the values
move there with one gather or scatter and may be traced. Traced structures are joined by a counting
sort (capacity.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import (
    capacity,
    checks,
    construct,
    convert,
    direct,
    entries,
    row_statistics,
    structure,
)
from sgap_jax.formats.levels import CSC, CSR
from sgap_jax.formats.row_statistics import PatternStatistics
from sgap_jax.formats.stored import Array, CheckedLevel, StoredArray


def no_operator() -> TypeError:
    return TypeError(
        "SparseArray: of the operators that act on each entry there are +, -, *, /, ** and abs, "
        "and comparisons with a number; the nearest is A.with_values(f(A.values)) where entries "
        "are, or f(A.todense())"
    )


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
    if not is_sparse(B):
        if hasattr(B, "todense"):
            raise _refused(f"SparseArray * {type(B).__name__}", B)
        return _scaled(A, B, operator.mul, "SparseArray * x")
    what = "SparseArray * SparseArray"
    A, B = _alike(A, B, what)
    alike = _same_arrays(A, B)
    A, B = _each_once(A, what), _each_once(B, what)
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
    if is_sparse(x) or hasattr(x, "todense"):
        raise NotImplementedError(
            f"SparseArray / {type(x).__name__}: 0 / 0 where neither stores an entry; the nearest, "
            "for arrays of one pattern, is A.with_values(A.values / B.values)"
        )
    return _scaled(A, x, operator.truediv, "SparseArray / x")


def power(A: Array, n: Any) -> Array:
    what = "SparseArray ** n"
    bad = n is None or is_sparse(n) or np.ndim(n) or checks.is_traced(n)
    if bad or isinstance(n, complex | str) or not n > 0:
        raise NotImplementedError(
            f"{what}: n: expected a number > 0 that is known, got {n!r}; the nearest is "
            "A.todense()**n, or A.with_values(A.values**n) where entries are"
        )
    A = _each_once(A, what)
    return replace(A, values=A.values**n)


def absolute(A: Array) -> Array:
    A = _each_once(A, "abs(SparseArray)")
    return replace(A, values=abs(A.values))


def compared(A: Array, x: Any, holds: Callable, sign: str) -> Array:
    what = f"SparseArray {sign} {type(x).__name__}"
    if is_sparse(x) or x is None or isinstance(x, str) or np.ndim(x) or checks.is_traced(x):
        raise TypeError(f"{what}: expected a number that is known; {no_operator()}")
    x = checks.check_scalar(x, what)
    if holds(0, x):
        raise TypeError(
            f"{what}: true where nothing is stored, of {x}; the nearest is A.todense() {sign} x, "
            f"or A.with_values(A.values {sign} x) where entries are"
        )
    A = _each_once(A, what)
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


def is_sparse(x: Any) -> bool:
    return isinstance(x, StoredArray)


def _refused(what: str, x: Any, dense: str = "", values: str = "") -> NotImplementedError:
    nearest = f"{dense}, or A.with_values({values}) where entries are"
    if hasattr(x, "todense"):
        nearest = "with SparseArray.from_scipy, from_bcoo or from_bcsr of it"
    return NotImplementedError(f"{what}: the nearest is {nearest}")


def extremum(A: Array, B: Any, name: str) -> Array:
    """See `SparseArray.maximum` and `minimum`."""
    what = f"SparseArray.{name}"
    combine = jnp.maximum if name == "maximum" else jnp.minimum
    if not is_sparse(B):
        number = isinstance(B, int | float | np.generic | np.ndarray | jax.Array)
        if number and np.ndim(B) == 0 and not checks.is_traced(B) and np.isrealobj(B):
            if (B <= 0) if name == "maximum" else (B >= 0):
                A = _each_once(A, what)
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
    A, B = _alike(A, B, what)
    alike = _same_arrays(A, B)
    A, B = _each_once(A, what), _each_once(B, what)
    return _union_of(A, B, combine, what, alike)


def _union(A: Array, B: Any, combine: Callable, sign: str) -> Array:
    if not is_sparse(B):
        what = f"SparseArray {sign} {type(B).__name__}"
        raise _refused(what, B, f"A.todense() {sign} x", f"A.values {sign} x")
    what = f"SparseArray {sign} SparseArray"
    A, B = _alike(A, B, what)
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


def _each_once(A: Array, what: str) -> Array:
    """A with each coordinate once, for what is not linear in the elements: A itself where that was
    checked. Traced blocks that nobody has checked are refused."""
    arrays = [x for level in A.index_arrays for x in level]
    one_by_one = A.values.ndim == 1 and all(x.ndim == 1 for x in arrays)
    if one_by_one:
        return entries.sum_duplicates(A)
    if A.format.block_shape and not A.is_checked and checks.is_traced(*arrays):
        raise NotImplementedError(
            f"{what}: {A.format} of a traced structure may store a place twice, and this operation "
            "needs their sum; the nearest is A.asformat(CSR)"
        )
    return A


def _alike(A: Array, B: Array, what: str) -> tuple[Array, Array]:
    """A and B in the format of A; in CSR where A has vectors or blocks, which the traced structure
    of B, in another format, cannot be converted to."""
    if A.shape != B.shape:
        raise ValueError(f"{what}: expected two of one shape, got {A.shape} and {B.shape}")
    if A.format.block_shape and A.format != B.format and _is_traced(B):
        A = entries.asformat(A, CSR)
    return A, entries.asformat(B, A.format)


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
    """The union of two traced matrices, in a capacity for all entries of both; in CSR of vectors
    and blocks."""
    if A.format.block_shape:
        A, B = entries.asformat(A, CSR), entries.asformat(B, CSR)
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
    sizes = convert.level_sizes(A.shape, A.format)
    spared = construct.spares_offsets(A.format, sizes, len(first[0]) + len(second[0]))
    if len(first) == 2 and not spared and all(map(construct.strictly_sorted, (first, second))):
        return _merged(first, second, sizes)
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
