"""What a boolean function of rows and columns gives on whole blocks, from ranges of numbers: so
that `from_function` evaluates entries only where a block is neither full nor empty."""

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_MOST = 1 << 62  # of bounds: beyond, integers may have wrapped


class _Unknown(BaseException):
    """An operation whose range is not known here; no error, which a function may catch."""


class _Ranges(NDArrayOperatorsMixin):
    """Integers of which each block's are in [low, high]; the function's arguments are made of
    them. What NumPy does with it is computed by `_RULES`, or refused."""

    def __init__(self, low: Any, high: Any) -> None:
        self.low, self.high = low, high
        if max(np.abs(x).max(initial=0) for x in (low, high)) > _MOST:
            raise _Unknown

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _computed(ufunc, method, inputs, options)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _Unknown

    def __array_function__(self, *_: Any) -> Any:
        raise _Unknown

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else _Unknown  # NumPy looks for some


class _Compared(_Ranges):
    """Numbers that are compared and no more: floats, and integers of which sums may wrap."""


class _Truth(NDArrayOperatorsMixin):
    """Booleans of which each block's are all true where `yes`, all false where `no`."""

    def __init__(self, yes: Any, no: Any) -> None:
        self.yes, self.no = yes, no

    __array_ufunc__ = _Ranges.__array_ufunc__
    __array__ = _Ranges.__array__
    __array_function__ = _Ranges.__array_function__
    __getattr__ = _Ranges.__getattr__

    def __bool__(self) -> bool:
        raise _Unknown


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise _Unknown


class _Table(NDArrayOperatorsMixin):
    """An array that the function looks its arguments up in, in the place of that array. Ranges of
    indices give the ranges of what is there; whatever else depends on its elements is refused, so
    that the function cannot take it for a number of one place."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        array = self._array
        if not isinstance(index, _Ranges):
            return array[index]  # refused by an index that has no value
        low, high = (np.asarray(x) for x in (index.low, index.high))
        inside = low.dtype.kind in "iu" and low.min(initial=0) >= 0
        if array.ndim != 1 or not inside or high.max(initial=-1) >= len(array):
            raise _Unknown
        least, most = _extremes(array, low, high)
        if array.dtype == np.bool_:
            return _Truth(least, ~most)
        exact = array.dtype == np.int64
        return (_Ranges if exact else _Compared)(least, most)

    def __len__(self) -> int:
        return len(self._array)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else _Unknown  # NumPy looks for some

    __array_ufunc__ = __array_function__ = __array__ = __bool__ = _refuse
    __index__ = __int__ = __float__ = __complex__ = __iter__ = __contains__ = _refuse
    __repr__ = __str__ = __format__ = __dir__ = __sizeof__ = _refuse
    __class__ = property(_refuse)  # type: ignore[assignment]  # asked by `isinstance`
    __hash__ = None  # type: ignore[assignment]


# What tells a `_Table` from an array without asking it.
_TELLING = frozenset({"type", "id", "vars", "locals", "globals"})
_LARGEST = 1 << 31  # of what is looked up: sums and products of two do not wrap
_MOST_MINIMA = 1 << 24  # that are kept of a table


def _extremes(array: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[Any, Any]:
    """The least and the greatest of array[low .. high] for each pair of indices, from those of all
    runs of 1, 2, 4, ... elements."""
    level = np.frexp(high - low + 1)[1] - 1
    levels = int(level.max(initial=0)) + 1
    if levels * len(array) > _MOST_MINIMA:
        raise _Unknown
    integer = array.dtype.kind in "iu"
    if integer and len(array) and not -_LARGEST <= array.min() <= array.max() <= _LARGEST:
        raise _Unknown
    first = array.astype(np.int64) if integer else array
    found = []
    for extreme in (np.minimum, np.maximum):
        runs = np.empty((levels, len(array)), first.dtype)
        runs[0] = first
        for k in range(1, levels):
            half = 1 << (k - 1)
            runs[k] = runs[k - 1]
            extreme(runs[k - 1, :-half], runs[k - 1, half:], out=runs[k, :-half])
        found.append(extreme(runs[level, low], runs[level, high - (1 << level) + 1]))
    return found[0], found[1]


def _with_tables(x: Any, seen: dict[int, Any]) -> Any:
    """`x`, or a function like it in which arrays that it can look up are `_Table`s: of its closure,
    its globals and its default values, and of functions among these."""
    if id(x) in seen:
        return seen[id(x)]
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        x_array = np.asarray(x) if x.is_fully_addressable else None
    else:
        x_array = x if type(x) is np.ndarray else None
    if x_array is not None:
        known = x_array.dtype.kind in "biu" or x_array.dtype == np.float64
        if known and not (x_array.dtype == np.float64 and np.isnan(x_array).any()):
            seen[id(x)] = _Table(x_array)
            return seen[id(x)]
        return x
    of = functools.partial(_with_tables, seen=seen)
    if isinstance(x, tuple) and type(x) is tuple:
        return tuple(map(of, x))
    if type(x) is functools.partial:
        return functools.partial(of(x.func), *map(of, x.args), **_each(x.keywords, of))
    if not isinstance(x, types.FunctionType):
        return x
    code, outer = x.__code__, x.__globals__
    if not _TELLING.isdisjoint(_names(code)):
        raise _Unknown
    scope = dict(outer)
    made = types.FunctionType(code, scope, x.__name__, None, x.__closure__)
    seen[id(x)] = made  # a function may call itself
    scope |= {name: of(outer[name]) for name in _names(code) if name in outer}
    cells = tuple(_cell(cell, of) for cell in x.__closure__ or ())
    if cells:
        made = types.FunctionType(code, scope, x.__name__, None, cells)
        seen[id(x)] = made
    made.__defaults__ = None if x.__defaults__ is None else tuple(map(of, x.__defaults__))
    made.__kwdefaults__ = _each(x.__kwdefaults__ or {}, of)
    made.__dict__.update(x.__dict__)
    return made


def _each(named: dict[str, Any], of: Callable) -> dict[str, Any]:
    return {name: of(x) for name, x in named.items()}


def _names(code: types.CodeType) -> set[str]:
    """The names of globals that a function, and those that it makes, may read."""
    inner = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*inner)


def _cell(cell: Any, of: Callable) -> Any:
    try:
        held = cell.cell_contents
    except ValueError:  # empty yet
        return cell
    made = of(held)
    return cell if made is held else types.CellType(made)


def _computed(ufunc: Any, method: str, inputs: tuple, options: dict) -> Any:
    rule = _RULES.get(ufunc)
    if rule is None or method != "__call__" or options:
        raise _Unknown
    return rule(*(x if isinstance(x, _Ranges | _Truth) else _constant(x) for x in inputs))


def _constant(x: Any) -> Any:
    if isinstance(x, bool | np.bool_):
        return _Truth(np.asarray(bool(x)), np.asarray(not x))
    if isinstance(x, int | np.integer) and abs(int(x)) <= _MOST:
        return _Ranges(np.asarray(int(x)), np.asarray(int(x)))
    if isinstance(x, float) and abs(x) <= _MOST:  # np.float64 too
        return _Compared(np.asarray(float(x)), np.asarray(float(x)))
    raise _Unknown


def _integers(rule: Callable) -> Callable:
    def checked(*inputs: Any) -> Any:
        if not all(type(x) is _Ranges for x in inputs):
            raise _Unknown
        return rule(*inputs)

    return checked


def _numbers(rule: Callable) -> Callable:
    def checked(*inputs: Any) -> Any:
        if not all(isinstance(x, _Ranges) for x in inputs):
            raise _Unknown
        return rule(*inputs)

    return checked


def _booleans(rule: Callable) -> Callable:
    def checked(*inputs: Any) -> Any:
        if not all(isinstance(x, _Truth) for x in inputs):
            raise _Unknown
        return rule(*inputs)

    return checked


def _product(a: _Ranges, b: _Ranges) -> _Ranges:
    ends = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if any(np.abs(x.astype(float) * y.astype(float)).max(initial=0) > _MOST for x, y in ends):
        raise _Unknown
    products = np.stack(np.broadcast_arrays(*(x * y for x, y in ends)))
    return _Ranges(products.min(0), products.max(0))


def _divisor(b: _Ranges) -> int:
    if b.low.ndim or b.low != b.high or b.low <= 0:
        raise _Unknown
    return int(b.low)


def _quotient(a: _Ranges, b: _Ranges) -> _Ranges:
    return _Ranges(a.low // _divisor(b), a.high // _divisor(b))


def _remainder(a: _Ranges, b: _Ranges) -> _Ranges:
    m = _divisor(b)
    whole = a.low // m == a.high // m  # no multiple of m lies between
    return _Ranges(np.where(whole, a.low % m, 0), np.where(whole, a.high % m, m - 1))


def _magnitude(a: _Ranges) -> _Ranges:
    low = np.maximum(np.maximum(a.low, -a.high), 0)
    return _Ranges(low, np.maximum(np.abs(a.low), np.abs(a.high)))


def _equal(a: _Ranges, b: _Ranges) -> _Truth:
    yes = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _Truth(yes, (a.high < b.low) | (b.high < a.low))


def _less(a: _Ranges, b: _Ranges) -> _Truth:
    return _Truth(a.high < b.low, a.low >= b.high)


def _not(a: _Truth) -> _Truth:
    return _Truth(a.no, a.yes)


def _and(a: _Truth, b: _Truth) -> _Truth:
    return _Truth(a.yes & b.yes, a.no | b.no)


def _or(a: _Truth, b: _Truth) -> _Truth:
    return _not(_and(_not(a), _not(b)))


def _differ(a: _Truth, b: _Truth) -> _Truth:
    return _Truth(a.yes & b.no | a.no & b.yes, a.yes & b.yes | a.no & b.no)


_RULES: dict[Any, Callable] = {
    np.add: _integers(lambda a, b: _Ranges(a.low + b.low, a.high + b.high)),
    np.subtract: _integers(lambda a, b: _Ranges(a.low - b.high, a.high - b.low)),
    np.negative: _integers(lambda a: _Ranges(-a.high, -a.low)),
    np.positive: _integers(lambda a: a),
    np.multiply: _integers(_product),
    np.floor_divide: _integers(_quotient),
    np.remainder: _integers(_remainder),
    np.absolute: _integers(_magnitude),
    np.minimum: _integers(
        lambda a, b: _Ranges(np.minimum(a.low, b.low), np.minimum(a.high, b.high))
    ),
    np.maximum: _integers(
        lambda a, b: _Ranges(np.maximum(a.low, b.low), np.maximum(a.high, b.high))
    ),
    np.equal: _numbers(_equal),
    np.not_equal: _numbers(lambda a, b: _not(_equal(a, b))),
    np.less: _numbers(_less),
    np.greater: _numbers(lambda a, b: _less(b, a)),
    np.less_equal: _numbers(lambda a, b: _not(_less(b, a))),
    np.greater_equal: _numbers(lambda a, b: _not(_less(a, b))),
    np.bitwise_and: _booleans(_and),
    np.logical_and: _booleans(_and),
    np.bitwise_or: _booleans(_or),
    np.logical_or: _booleans(_or),
    np.bitwise_xor: _booleans(_differ),
    np.logical_xor: _booleans(_differ),
    np.invert: _booleans(_not),
    np.logical_not: _booleans(_not),
}


def of_blocks(
    f: Callable, L: int, S: int, height: int, width: int
) -> tuple[np.ndarray, ...] | None:
    """(full, empty), booleans [blocks of rows, blocks of columns]: where f is known to be true, or
    false, at all entries of a block of `height` x `width`. None where f does what has no rule."""

    def ranges(size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        low = np.arange(0, size, step)
        return low, np.minimum(low + step, size) - 1

    rows = _Ranges(*(x[:, None] for x in ranges(L, height)))
    columns = _Ranges(*(x[None] for x in ranges(S, width)))
    try:
        found = _with_tables(f, {})(rows, columns)
    except (Exception, _Unknown):  # whatever a function does with arguments that are no arrays
        return None
    if not isinstance(found, _Truth):
        return None
    shape = (rows.low.shape[0], columns.low.shape[1])
    return tuple(np.broadcast_to(x, shape) for x in (found.yes, found.no))
