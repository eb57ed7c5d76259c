"""What a boolean function of rows and columns gives on whole blocks, from ranges of integers: so
that `from_function` evaluates entries only where a block is neither full nor empty."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_MOST = 1 << 62  # of bounds: beyond, integers may have wrapped


class _Unknown(Exception):
    """An operation whose range is not known here."""


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


class _Truth(NDArrayOperatorsMixin):
    """Booleans of which each block's are all true where `yes`, all false where `no`."""

    def __init__(self, yes: Any, no: Any) -> None:
        self.yes, self.no = yes, no

    __array_ufunc__ = _Ranges.__array_ufunc__
    __array__ = _Ranges.__array__
    __array_function__ = _Ranges.__array_function__

    def __bool__(self) -> bool:
        raise _Unknown


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
    raise _Unknown


def _integers(rule: Callable) -> Callable:
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
    np.equal: _integers(_equal),
    np.not_equal: _integers(lambda a, b: _not(_equal(a, b))),
    np.less: _integers(_less),
    np.greater: _integers(lambda a, b: _less(b, a)),
    np.less_equal: _integers(lambda a, b: _not(_less(b, a))),
    np.greater_equal: _integers(lambda a, b: _not(_less(a, b))),
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
    false, at all entries of a block of `height` x `width`. None where f does what has no rule, such
    as looking up its arguments in an array."""

    def ranges(size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        low = np.arange(0, size, step)
        return low, np.minimum(low + step, size) - 1

    rows = _Ranges(*(x[:, None] for x in ranges(L, height)))
    columns = _Ranges(*(x[None] for x in ranges(S, width)))
    try:
        found = f(rows, columns)
    except Exception:  # whatever a function does with arguments that are no arrays
        return None
    if not isinstance(found, _Truth):
        return None
    shape = (rows.low.shape[0], columns.low.shape[1])
    return tuple(np.broadcast_to(x, shape) for x in (found.yes, found.no))
