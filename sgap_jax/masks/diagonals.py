"""Boolean functions of j - i alone, such as windows and dilated ones: `from_function` evaluates
them once for each diagonal of the matrix."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

_MOST = 1 << 40  # of coefficients and constants; products with positions wrap as those of NumPy do

COMPARISONS = (
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    np.equal,
    np.not_equal,
)


class OtherFunction(BaseException):
    """The function is not known to be of the kind that a module evaluates; no error, which it may
    catch."""


class _Position(NDArrayOperatorsMixin):
    """a i + b j + c of the row i and the column j: the function's arguments, and what it makes of
    them by sums and by products with integers."""

    def __init__(self, a: int, b: int, c: int, diagonals: np.ndarray) -> None:
        if max(abs(a), abs(b), abs(c)) > _MOST:
            raise OtherFunction
        self.a, self.b, self.c, self.diagonals = a, b, c, diagonals

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _computed(ufunc, method, inputs, options)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise OtherFunction

    def __array_function__(self, *_: Any) -> Any:
        raise OtherFunction

    def __bool__(self) -> bool:
        raise OtherFunction

    def __getattr__(self, name: str) -> NoReturn:
        raise (
            AttributeError(name) if name.startswith("__") else OtherFunction
        )  # NumPy looks for some


class _OnDiagonals(NDArrayOperatorsMixin):
    """What depends on j - i alone: an element for each diagonal."""

    def __init__(self, at: np.ndarray) -> None:
        self.at = at

    __array_ufunc__ = _Position.__array_ufunc__
    __array__ = _Position.__array__
    __array_function__ = _Position.__array_function__
    __bool__ = _Position.__bool__
    __getattr__ = _Position.__getattr__


def _computed(ufunc: Any, method: str, inputs: tuple, options: dict) -> Any:
    if method != "__call__" or options or ufunc.nout != 1:
        raise OtherFunction
    if all(isinstance(x, _Position) or _is_integer(x) for x in inputs):
        exact = _linear(ufunc, inputs)
        if exact is not None:
            return exact
        if ufunc in COMPARISONS:  # of the difference with zero, which may depend on j - i alone
            inputs = _linear(np.subtract, inputs), 0
    return _OnDiagonals(ufunc(*map(_at_diagonals, inputs)))


def _is_integer(x: Any) -> bool:
    return isinstance(x, int | np.signedinteger) and not isinstance(x, bool)


def _linear(ufunc: Any, inputs: tuple) -> _Position | None:
    """Sums, differences and multiples of positions, or None."""
    diagonals = next(x.diagonals for x in inputs if isinstance(x, _Position))
    terms = [(x.a, x.b, x.c) if isinstance(x, _Position) else (0, 0, int(x)) for x in inputs]
    if ufunc is np.positive:
        return inputs[0]
    scales: tuple[int, ...]
    if ufunc is np.negative:
        scales = (-1,)
    elif ufunc is np.add or ufunc is np.subtract:
        scales = (1, 1 if ufunc is np.add else -1)
    elif ufunc is np.multiply and not all(isinstance(x, _Position) for x in inputs):
        number = next(int(x) for x in inputs if not isinstance(x, _Position))
        scales = tuple(number if isinstance(x, _Position) else 0 for x in inputs)
    else:
        return None
    a, b, c = (sum(s * t[n] for s, t in zip(scales, terms, strict=True)) for n in range(3))
    return _Position(a, b, c, diagonals)


def _at_diagonals(x: Any) -> Any:
    if isinstance(x, _OnDiagonals):
        return x.at
    if isinstance(x, _Position):
        if x.a + x.b:
            raise OtherFunction
        return x.b * x.diagonals + x.c
    if isinstance(x, bool | int | float | np.generic):
        return x
    raise OtherFunction


def stored_diagonals(f: Callable, L: int, S: int) -> np.ndarray | None:
    """The j - i, ascending, of the diagonals of [L, S] at which f is true; None where f is not
    known to depend on j - i alone."""
    try:
        diagonals = np.arange(1 - L, max(S, 1), dtype=np.int64)
        found = f(_Position(1, 0, 0, diagonals), _Position(0, 1, 0, diagonals))
    except (Exception, OtherFunction):  # whatever a function does with arguments that are no arrays
        return None
    if not isinstance(found, _OnDiagonals) or found.at.dtype != np.bool_:
        return None
    return diagonals[np.broadcast_to(found.at, diagonals.shape)]
