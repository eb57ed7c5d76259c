"""Sparse formats as values: a tuple of levels, one per stored dimension, plus a mode order.

The vocabulary is that of TACO (Kjolstad et al., OOPSLA 2017, section 3; Chou et al., OOPSLA 2018):

    Dense()        every coordinate 0 .. size-1 is present; nothing is stored
    Compressed()   offsets delimit, for each parent position, a segment of stored coordinates
    Singleton()    exactly one stored coordinate per parent position
    Dense(size)    at the end: a dense block, as in BCSR and vectorSparse's column vectors

A `Format` can describe more than this package can store; `require_stored` refuses the others.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dense:
    """All coordinates are present. `size` is given only for a trailing block."""

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            object.__setattr__(self, "size", _positive("Dense", "size", self.size))

    def __str__(self) -> str:
        return "Dense" if self.size is None else f"Dense({self.size})"


@dataclass(frozen=True)
class Compressed:
    """Segments of sorted coordinates. `unique=False`: a coordinate may repeat, as COO's rows do."""

    unique: bool = True

    def __str__(self) -> str:
        return "Compressed" if self.unique else "Compressed(unique=False)"


@dataclass(frozen=True)
class Singleton:
    """One coordinate per parent position."""

    def __str__(self) -> str:
        return "Singleton"


Level = Dense | Compressed | Singleton


@dataclass(frozen=True)
class Format:
    """Levels from the outermost inwards, and the mode (dimension) that each of them stores.

    `order[l]` is the mode stored by level `l`; None is the natural order 0, 1, 2, ... Trailing
    dense blocks come after the levels that `order` speaks of. A level may be given by its class:
    `Format((Dense, Compressed)) == CSR`.

    Raises ValueError for something that is not a level or an order that is not a permutation.
    """

    levels: tuple[Level, ...]
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        levels = tuple(level() if isinstance(level, type) else level for level in self.levels)
        if not levels or not all(isinstance(level, Level) for level in levels):
            raise ValueError(
                "Format: levels: expected Dense, Compressed and Singleton levels, "
                f"got {self.levels!r}"
            )
        sizes = [isinstance(level, Dense) and level.size is not None for level in levels]
        if sizes != sorted(sizes):
            raise ValueError(
                "Format: levels: expected no other level after the trailing block Dense(size), "
                f"got ({', '.join(map(str, levels))})"
            )
        object.__setattr__(self, "levels", levels)
        if self.order is not None:
            order = tuple(operator.index(mode) for mode in self.order)
            natural = tuple(range(self.ndim))
            if tuple(sorted(order)) != natural:
                raise ValueError(f"Format: order: expected a permutation of {natural}, got {order}")
            # The natural order is always None, so that equal formats compare and hash equal.
            object.__setattr__(self, "order", None if order == natural else order)

    @staticmethod
    def parse(text: str) -> Format:
        """The format that prints as `text`, such as CVS(8) or BCSR(4, 2).transposed; ValueError if
        there is none. COO in natural order prints the same for any number of modes: `parse("COO")`
        is that of a matrix."""
        try:
            found = _evaluated(ast.parse(text, mode="eval").body) if isinstance(text, str) else None
        except (SyntaxError, TypeError, KeyError, AttributeError, RecursionError, MemoryError):
            found = None
        if not isinstance(found, Format) or str(found).replace(" ", "") != text.replace(" ", ""):
            raise ValueError(f"Format: expected what a format prints as, got {text!r}")
        return found

    @property
    def ndim(self) -> int:
        """Number of tensor modes: levels less trailing blocks."""
        return len(self.levels) - len(self.block_shape)

    @property
    def modes(self) -> tuple[int, ...]:
        """`order` written out."""
        return tuple(range(self.ndim)) if self.order is None else self.order

    @property
    def transposed(self) -> Format:
        """The format of the transpose (modes reversed) over the same arrays."""
        return Format(self.levels, tuple(self.ndim - 1 - mode for mode in self.modes))

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Sizes of the trailing dense block, along the modes in their stored order: (V,) for
        CVS(V), (r, c) for BCSR(r, c), () for formats without vectors or blocks."""
        sizes = (level.size for level in self.levels if isinstance(level, Dense))
        return tuple(size for size in sizes if size is not None)

    @property
    def dense_modes(self) -> int:
        """How many of the last modes are dense under the stored ones: 1 for (Compressed,
        Compressed, Dense), which stores whole dense fibers; 0 for all named formats."""
        levels = self.levels
        count = next((n for n, x in enumerate(reversed(levels)) if x != Dense()), len(levels))
        return count if count < len(levels) else 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what a tensor of this shape stores at each position: of the vector or block,
        or of the dense modes under the stored ones; () for a single value."""
        return self.block_shape or tuple(
            shape[mode] for mode in self.modes[self.ndim - self.dense_modes :]
        )

    @property
    def vector_length(self) -> int | None:
        """V for CVS(V) and for its transpose, which stores row vectors of length V; else None."""
        block = self.block_shape
        vectors = len(block) == 1 and self.levels[:-1] == (Dense(), Compressed())
        return block[0] if vectors else None

    @property
    def is_coordinate(self) -> bool:
        """True for COO of any order of tensor and any mode order."""
        return self.levels == _coordinate_levels(len(self.levels))

    @property
    def is_fiber_tree(self) -> bool:
        """True for CSF, DCSR, CSR and CSC: a dense or compressed first level, all others
        compressed."""
        first, *rest = self.levels
        compressed = rest == [Compressed()] * len(rest)
        return compressed and (first == Compressed() or (first == Dense() and bool(rest)))

    def __str__(self) -> str:
        if self in _NAMES:
            return _NAMES[self]
        if self.is_coordinate:
            return "COO" if self.order is None else f"COO(order={self.order})"
        if _is_blocked(self):
            name = "CVS" if len(self.block_shape) == 1 else "BCSR"
            suffix = "" if self.order is None else ".transposed"
            return f"{name}({', '.join(map(str, self.block_shape))}){suffix}"
        if self.levels == CSF(len(self.levels)).levels:
            suffix = "" if self.order is None else f", order={self.order}"
            return f"CSF({len(self.levels)}{suffix})"
        order = "" if self.order is None else f", order={self.order}"
        return f"Format(({', '.join(map(str, self.levels))}){order})"

    __repr__ = __str__


def _positive(what: str, name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what}: {name}: expected a positive integer, got {value!r}")
    return number


def _coordinate_levels(ndim: int) -> tuple[Level, ...]:
    return (Compressed(unique=False),) + (Singleton(),) * (ndim - 1)


def CSF(ndim: int, *, order: tuple[int, ...] | None = None) -> Format:
    """Compressed sparse fibers: every mode compressed, in the given order (Smith and Karypis, IA3
    2015). CSF(2) is DCSR, for a matrix most of whose rows are empty."""
    return Format((Compressed(),) * _positive("CSF", "ndim", ndim), order)


def BCSR(rows: int, columns: int) -> Format:
    """Block CSR: dense blocks of `rows` x `columns`, aligned to multiples of both (vectorSparse,
    figure 7). `BCSR(r, c).transposed` stores them by block columns, over the same arrays."""
    sides = (_positive("BCSR", *x) for x in (("rows", rows), ("columns", columns)))
    return Format((Dense(), Compressed(), *map(Dense, sides)))


def CVS(vector_length: int) -> Format:
    """Column-vector sparse encoding (vectorSparse, SC21): CSR of columns of V rows each."""
    return Format((Dense(), Compressed(), Dense(_positive("CVS", "vector_length", vector_length))))


CSR = Format((Dense(), Compressed()))
CSC = Format((Dense(), Compressed()), order=(1, 0))
COO = Format(_coordinate_levels(2))

_LONGEST_SIDE = 1024  # of a block: with more, a position in a block row may overflow int32

_NAMES = {CSR: "CSR", CSC: "CSC", COO: "COO"}


_PARTS: dict[str, Any] = {
    **{kind.__name__: kind for kind in (Dense, Compressed, Singleton, Format, CSF, BCSR, CVS)},
    **{name: format for format, name in _NAMES.items()},
}


def _evaluated(node: ast.expr) -> Any:
    """The value of a node in the syntax tree of a format's text."""
    match node:
        case ast.Name(name):
            return _PARTS[name]
        case ast.Attribute(value, "transposed"):
            return _evaluated(value).transposed
        case ast.Call(ast.Name("COO"), [], [ast.keyword("order", order)]):
            modes = _literal(order)
            return Format(_coordinate_levels(len(modes)), modes)
        case ast.Call(function, arguments, keywords):
            named = {str(x.arg): _literal(x.value) for x in keywords}
            return _evaluated(function)(*map(_evaluated, arguments), **named)
        case ast.Tuple(parts):
            return tuple(map(_evaluated, parts))
    return _literal(node)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise SyntaxError from error


def _is_blocked(format: Format) -> bool:
    """CVS(V), BCSR(r, c) or a transpose of one."""
    block = format.block_shape
    return len(block) in (1, 2) and format.levels[: -len(block)] == (Dense(), Compressed())


def as_format(format: Any, what: str) -> Format:
    """The format, read if it is text: what a format prints as, such as "CVS(8)", or in lower case,
    as SciPy's "csr". ValueError otherwise."""
    for text in (format, format.upper()) if isinstance(format, str) else ():
        try:
            return Format.parse(text)
        except ValueError:
            pass
    if not isinstance(format, Format):
        raise ValueError(
            f'{what}: format: expected a Format or its text: "CSR", "CSC", "COO", "CSF(3)" (of '
            '3 dimensions; "CSF(2)" is DCSR), "CVS(8)" (vectors) or "BCSR(2, 2)" (blocks, '
            f"SciPy's BSR), got {format!r}"
        )
    return format


def require_stored(format: Format | str, ndim: int, what: str) -> Format:
    """`format` for a tensor with `ndim` modes: COO extends to any number, others are unchanged;
    text is read.

    Raises ValueError if the format has another number of modes, NotImplementedError if it can be
    described but not stored yet.
    """
    format = as_format(format, what)
    if format == COO and ndim >= 1:
        return Format(_coordinate_levels(ndim))
    if not (format.is_fiber_tree or format.is_coordinate or _is_blocked(format)):
        raise NotImplementedError(
            f"{what}: format: {format} can be described but not stored yet; "
            f"the nearest is {'CSR' if ndim == 2 else 'COO'}"
        )
    if max(format.block_shape, default=1) > _LONGEST_SIDE:
        raise ValueError(
            f"{what}: format: vectors and blocks have up to {_LONGEST_SIDE} rows and columns, "
            f"got {format}"
        )
    if format.ndim != ndim:
        raise ValueError(
            f"{what}: format: {format} is for {format.ndim} dimensions, got {ndim}; "
            "COO takes any number"
        )
    return format
