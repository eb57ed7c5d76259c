"""Boolean functions that change along a row only where linear functions of row and column cross,
such as a window and the first keys: `from_function` evaluates them once for each piece of a row."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from sgap_jax.masks.diagonals import COMPARISONS, OtherFunction

_MOST_SLOPE = 1 << 29  # of a column, which is below 2^31: sums of forms fit in int64
_MOST = 1 << 60  # of what is added
_MOST_FORMS = 8  # of one number
_MOST_CUTS = 32  # of a row
_MOST_ENDS = 1 << 22  # of all rows: 32 MB

_CONNECTIVES = (
    np.bitwise_and,
    np.logical_and,
    np.bitwise_or,
    np.logical_or,
    np.bitwise_xor,
    np.logical_xor,
    np.invert,
    np.logical_not,
)

# b j + c of the column j; c is a number, or [L, 1] numbers of the rows.
Form = tuple[int, Any]


class _Cuts(list):
    """Columns, one or [L, 1], at which the pieces of a row begin; not more than `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most


class _Number(NDArrayOperatorsMixin):
    """An integer that is the same one of its forms at all columns between two cuts of a row: the
    function's arguments, and what it makes of them. `cuts` is the list of all, which grows."""

    def __init__(self, forms: Sequence[Form], cuts: _Cuts) -> None:
        if len(forms) > _MOST_FORMS:
            raise OtherFunction
        self.forms, self.cuts = _bounded(forms), cuts

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _computed(ufunc, method, inputs, options)

    def __array__(self, *_: Any, **__: Any) -> Any:
        """The number of each row, which may look up others in an array."""
        ((b, c),) = self.forms
        if b or np.ndim(c) == 0:
            raise OtherFunction
        return c.copy()

    def __array_function__(self, *_: Any) -> Any:
        raise OtherFunction

    def __bool__(self) -> bool:
        raise OtherFunction

    def __getattr__(self, name: str) -> NoReturn:
        raise (
            AttributeError(name) if name.startswith("__") else OtherFunction
        )  # NumPy looks for some


class _Truth(NDArrayOperatorsMixin):
    """A boolean that is the same at all columns between two cuts of a row."""

    def __init__(self, cuts: _Cuts) -> None:
        self.cuts = cuts

    __array_ufunc__ = _Number.__array_ufunc__
    __array_function__ = _Number.__array_function__
    __bool__ = _Number.__bool__
    __getattr__ = _Number.__getattr__

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise OtherFunction


def _computed(ufunc: Any, method: str, inputs: tuple, options: dict) -> Any:
    if method != "__call__" or options:
        raise OtherFunction
    cuts = next(x.cuts for x in inputs if isinstance(x, _Number | _Truth))
    if ufunc in _CONNECTIVES:
        if not all(isinstance(x, _Truth) or _of_rows(x).dtype == np.bool_ for x in inputs):
            raise OtherFunction
        return _Truth(cuts)
    forms = [_forms(x) for x in inputs]
    if ufunc in COMPARISONS:
        _cut(cuts, *forms)
        return _Truth(cuts)
    if ufunc in (np.minimum, np.maximum):
        _cut(cuts, *forms)
        return _Number([*forms[0], *forms[1]], cuts)
    if ufunc is np.absolute:
        negative = [(-b, -c) for b, c in forms[0]]
        _cut(cuts, forms[0], [(0, 0)])
        return _Number([*forms[0], *negative], cuts)
    return _Number(_linear(ufunc, forms), cuts)


def _of_rows(x: Any) -> np.ndarray:
    """A number, or [L, 1] of them."""
    x = np.asarray(x)
    if x.ndim and x.shape[1:] != (1,):
        raise OtherFunction
    return x


def _forms(x: Any) -> Sequence[Form]:
    if isinstance(x, _Number):
        return x.forms
    if isinstance(x, int) and not isinstance(x, bool):
        return _bounded([(0, x)])
    c = _of_rows(x)
    if not np.issubdtype(c.dtype, np.signedinteger):
        raise OtherFunction
    return _bounded([(0, c.astype(np.int64) if c.ndim else int(c))])


def _bounded(forms: Sequence[Form]) -> Sequence[Form]:
    for b, c in forms:
        if abs(b) > _MOST_SLOPE or np.max(c, initial=0) > _MOST or np.min(c, initial=0) < -_MOST:
            raise OtherFunction
    return forms


def _linear(ufunc: Any, forms: list[Sequence[Form]]) -> Sequence[Form]:
    """Sums, differences and multiples, and quotients by a number of what rows alone say."""
    if ufunc is np.positive:
        return forms[0]
    if ufunc is np.negative:
        return [(-b, -c) for b, c in forms[0]]
    if ufunc in (np.add, np.subtract):
        sign = 1 if ufunc is np.add else -1
        return [(b + sign * d, c + sign * e) for b, c in forms[0] for d, e in forms[1]]
    if ufunc is np.multiply:
        forms = sorted(forms, key=lambda own: not (_scalar(own)))
    number = _scalar(forms[0] if ufunc is np.multiply else forms[-1])
    if number is None:
        raise OtherFunction
    if ufunc is np.multiply:
        most = _MOST // max(abs(number[0]), 1)
        if any(np.abs(c).max(initial=0) > most for _, c in forms[1]):
            raise OtherFunction
        return [(number[0] * b, number[0] * c) for b, c in forms[1]]
    if ufunc in (np.floor_divide, np.remainder) and number[0] > 0:
        if any(b for b, _ in forms[0]):
            raise OtherFunction
        return [(0, ufunc(c, number[0])) for _, c in forms[0]]
    raise OtherFunction


def _scalar(forms: Sequence[Form]) -> tuple[int] | None:
    """The number that is the only form, in a tuple."""
    b, c = forms[0]
    return (int(c),) if len(forms) == 1 and b == 0 and np.ndim(c) == 0 else None


def _cut(cuts: _Cuts, left: Sequence[Form], right: Sequence[Form]) -> None:
    """Cuts where a form of one is that of the other, and behind: the sign of their difference does
    not change in between."""
    for b, c in left:
        for d, e in right:
            slope, rest = (b - d, c - e) if b > d else (d - b, e - c)
            if slope:
                cuts += [-(rest // slope), -rest // slope + 1]
    if len(cuts) > cuts.most:
        raise OtherFunction


def pieces_of_rows(f: Callable, L: int, S: int) -> np.ndarray | None:
    """The columns [L, pieces + 1] at which the pieces of each row begin, and S: f is the same on
    all of a piece. None where f is not known to be such a function, or where the ends of pieces
    would take more memory than blocks of pairs."""
    cuts = _Cuts(min(_MOST_CUTS, S // 4 - 2, _MOST_ENDS // max(L, 1) - 2))
    try:
        found = f(_Number([(0, np.arange(L)[:, None])], cuts), _Number([(1, 0)], cuts))
        ends = [np.broadcast_to(cut, (L, 1)) for cut in [0, S, *cuts]]
    except (Exception, OtherFunction):  # whatever a function does with arguments that are no arrays
        return None
    if not isinstance(found, _Truth):
        return None
    return np.sort(np.clip(np.concatenate(ends, 1), 0, S), 1)
