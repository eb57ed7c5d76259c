"""Which elements a sparse result of `evaluate` stores: those that some term reaches.

Of concrete structures they are found once, in NumPy, as databases join relations: a term's pattern
is the join of the coordinates that its factors store on the indices that these share, projected to
the indices of the result; that of the expression is the union over its terms. Inside jit the union
of what one factor of each term stores has a static capacity, and may be more than is reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.compiler.notation.expr import Access, IndexVar, Term
from sgap_jax.formats import convert
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_nnz, is_traced
from sgap_jax.formats.levels import CSC, CSR, Compressed, Dense, Format, require_stored

_WHAT = "evaluate: the result"
# Rows of a join that are in memory at once, before repeated ones are left out.
_AT_ONCE = 1 << 22

# Coordinates [rows] along some indices. All relations have the index `_ROW`, along which the only
# coordinate is 0: there may be no other.
Relation = dict[IndexVar, np.ndarray]
_ROW = IndexVar("")


def pattern_of_result(
    output: Access,
    terms: Sequence[Term],
    values: Mapping[str, Any],
    sizes: Mapping[IndexVar, int],
    format: Format,
    capacity: int | None,
) -> SparseArray:
    """A SparseArray of ones in `format`, whose levels are Dense and Compressed.

    Raises:
      ValueError: traced structures without a capacity, more entries than it or than int32 counts.
      NotImplementedError: with a capacity or traced structures: a result that is no matrix, or a
        term that no factor covers.
    """
    shape = tuple(sizes[index] for index in output.indices)
    sparse = [values[x.tensor] for term in terms for x in term.factors]
    arrays = [level for A in sparse if isinstance(A, SparseArray) for level in A.index_arrays]
    if is_traced(*(x for level in arrays for x in level)):
        if capacity is None:
            raise ValueError(
                f"{_WHAT}: the structure of an operand is traced, and how much the result stores "
                "is a static size; give nse=, or pattern= (a result that was made outside jit)"
            )
        found = _covered(output, terms, values)
        coordinates: Any = jnp.stack(found, 1)
    else:
        outer = format.modes[: len(shape) - format.dense_modes]
        kept = [output.indices[mode] for mode in sorted(outer)]
        union = _distinct((_of_term(term, kept, values, sizes) for term in terms), sizes)
        coordinates = np.stack([union[index] for index in kept], 1)
        check_nnz(coordinates.shape[0] * math.prod(format.stored_shape(shape)), _WHAT)
        if format.dense_modes:
            return _with_dense_modes(coordinates, shape, format)
    try:
        return SparseArray.from_coordinates(coordinates, None, shape, format=format, nse=capacity)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(
            str(error).replace("SparseArray.from_coordinates", "evaluate", 1)
        ) from None


def _with_dense_modes(coordinates: np.ndarray, shape: tuple, format: Format) -> SparseArray:
    """The fibers at these coordinates, each with all of the dense modes."""
    outer = sorted(format.modes[: len(shape) - format.dense_modes])
    own = tuple(shape[mode] for mode in outer)
    fibers = SparseArray.from_coordinates(coordinates, None, own, format=_of_fibers(format))
    ones = np.ones((fibers.nnz, *format.stored_shape(shape)), np.float32)
    return SparseArray(jnp.asarray(ones), fibers.index_arrays, None, shape, format)


def result_format(format: Format, ndim: int) -> Format:
    """The format of a result of so many dimensions; its last levels may be Dense, as in results by
    fibers. Errors are those of `require_stored`."""
    what = "evaluate"
    if ndim == 0:
        raise ValueError(f"{what}: a result without indices is one number, and has no format")
    if not isinstance(format, Format) or not format.dense_modes or format.block_shape:
        return require_stored(format, ndim, what)
    if format.ndim != ndim:
        raise ValueError(f"{what}: format: {format} is for {format.ndim} indices, got {ndim}")
    require_stored(_of_fibers(format), ndim - format.dense_modes, what)
    return format


def _of_fibers(format: Format) -> Format:
    """The format of the fibers that a format with Dense last levels stores."""
    outer = format.modes[: format.ndim - format.dense_modes]
    return Format(format.levels[: len(outer)], tuple(map(sorted(outer).index, outer)))


def merged_format(format: Format) -> Format:
    """The format whose coordinates are merged, with the modes in the same order."""
    return format if merges(format) else stored_in_order(format.modes)


def merges(format: Format) -> bool:
    """Whether coordinates in a format are merged: each is stored once, in order."""
    levels = format.levels
    return not format.block_shape and all(level in (Dense(), Compressed()) for level in levels)


def stored_in_order(modes: tuple[int, ...]) -> Format:
    """CSR, CSC or CSF with the modes in this order."""
    if len(modes) == 2:
        return CSR if modes == (0, 1) else CSC
    return Format((Compressed(),) * len(modes), modes)


def in_merged_format(A: SparseArray) -> tuple[SparseArray, jax.Array | None]:
    """A concrete structure in a format that is merged, and where each of its entries is among the
    flat values of A: None if A is that structure, or a traced one."""
    if merges(A.format) or is_traced(*jax.tree.leaves(A.index_arrays)):
        return A, None
    numbers = np.arange(1, A.values.size + 1, dtype=np.int32).reshape(A.values.shape)
    found = A.with_values(numbers).asformat(stored_in_order(A.format.modes))
    if A.format.is_coordinate and found.nnz < A.nnz:
        raise ValueError("evaluate: pattern stores a coordinate twice; sum_duplicates() adds them")
    return found, found.values - 1


def _covered(output: Access, terms: Sequence[Term], values: Mapping[str, Any]) -> list[Any]:
    """For each index of the output the coordinates that one factor of each term stores."""
    found: list[list[Any]] = [[] for _ in output.indices]
    for term in terms:
        sparse = [x for x in term.factors if isinstance(values[x.tensor], SparseArray)]
        covers = [x for x in sparse if set(output.indices) <= set(x.indices)]
        if not covers:
            raise NotImplementedError(
                f"{_WHAT}: no sparse factor of {term} has all indices of the result, so how much "
                "it stores has no bound inside jit; give pattern= (a result that was made "
                "outside), or use spgemm(A, B, nse=) for a product of two matrices"
            )
        cover = min(covers, key=lambda x: values[x.tensor].nnz)
        coordinates = dict(zip(cover.indices, values[cover.tensor].coordinates(), strict=True))
        for own, index in zip(found, output.indices, strict=True):
            own.append(coordinates[index])
    return [jnp.concatenate(own) for own in found]


def _of_term(
    term: Term, kept: Sequence[IndexVar], values: Mapping[str, Any], sizes: Mapping[IndexVar, int]
) -> Relation:
    """The coordinates of the indices `kept` at which the product has a value."""
    left = [
        _relation(x.indices, convert.entries(values[x.tensor], _WHAT)[0])
        for x in dict.fromkeys(term.factors)
        if isinstance(values[x.tensor], SparseArray)
    ]
    there = {index for relation in left for index in relation}
    for index in kept:
        if index not in there:  # of dense operands only: all coordinates
            left.append(_relation([index], [np.arange(sizes[index], dtype=np.int32)]))
    left.sort(key=lambda relation: len(relation[_ROW]))
    found = left.pop(0)
    while left:
        place = next((n for n, other in enumerate(left) if len(other.keys() & found.keys()) > 1), 0)
        other = left.pop(place)
        needed = {_ROW, *kept, *(index for relation in left for index in relation)}
        found = _distinct(_joined(found, other, sizes, needed), sizes)
    return _distinct([{index: found[index] for index in (_ROW, *kept)}], sizes)


def _relation(indices: Iterable[IndexVar], coordinates: Sequence[np.ndarray]) -> Relation:
    row = np.zeros(len(coordinates[0]), np.int8)
    return {_ROW: row, **dict(zip(indices, coordinates, strict=True))}


def _joined(
    one: Relation, other: Relation, sizes: Mapping[IndexVar, int], needed: set[IndexVar]
) -> Iterator[Relation]:
    """The rows of both that are equal in the indices that both have, a part at a time."""
    shared = [index for index in one if index in other]
    keys = _keys([[x[index] for index in shared] for x in (one, other)], shared, sizes)
    order = np.argsort(keys[1], kind="stable")
    first = np.searchsorted(keys[1][order], keys[0], "left")
    counts = np.searchsorted(keys[1][order], keys[0], "right") - first
    ends = np.cumsum(counts)
    begin, columns = 0, {**other, **one}
    yield {index: columns[index][:0] for index in needed if index in columns}
    while begin < len(counts):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _AT_ONCE, "right")))
        each = counts[begin:end]
        left = np.repeat(np.arange(begin, end), each)
        within = np.arange(len(left)) - np.repeat(ends[begin:end] - each - before, each)
        right = order[np.repeat(first[begin:end], each) + within]
        yield {
            index: x[left] if index in one else x[right]
            for index, x in columns.items()
            if index in needed
        }
        begin = end


def _distinct(parts: Iterable[Relation], sizes: Mapping[IndexVar, int]) -> Relation:
    """The rows of all parts, each once, in their order; repeated ones are left out part by part."""
    found: Relation | None = None
    for part in parts:
        both = part
        if found is not None:
            both = {index: np.concatenate([found[index], part[index]]) for index in part}
        check_nnz(len(both[_ROW]), _WHAT)
        (keys,) = _keys([list(both.values())], list(both), sizes)
        _, first = np.unique(keys, return_index=True)
        found = {index: x[first] for index, x in both.items()}
    assert found is not None
    return found


def _keys(
    tables: Sequence[Sequence[np.ndarray]],
    indices: Sequence[IndexVar],
    sizes: Mapping[IndexVar, int],
) -> list[np.ndarray]:
    """A number for each row of each table; rows of the same coordinates have the same one."""
    found, room = [np.zeros(len(table[0]), np.int64) for table in tables], 1
    for n, index in enumerate(indices):
        size = 1 if index == _ROW else sizes[index]
        if room * size >= 1 << 62:  # the numbers so far, counted
            places = np.unique(np.concatenate(found), return_inverse=True)[1].reshape(-1)
            found = np.split(places, np.cumsum([len(x) for x in found])[:-1])
            room = len(places)
        found = [x * size + table[n] for x, table in zip(found, tables, strict=True)]
        room *= size
    return found
