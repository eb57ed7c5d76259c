"""Evaluates expressions of the loop IR on all lanes of the enclosing parallel loops (interp.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from loop_interpreter.ownership import Owners, RaceError
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import Expr, Function, Stmt
from sgap_jax.compiler.loop_ir.print_c import INTEGER, NUMBER, TRUTH, TRUTHS, headline
from sgap_jax.compiler.loop_ir.widths import integer

COMBINE: dict[str | None, np.ufunc] = {"+": np.add, "max": np.maximum, "min": np.minimum}
COMPARE = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
COMPARE |= {"==": np.equal, "!=": np.not_equal}
Lanes = np.ndarray  # lane numbers, increasing


class LoopFault(Exception):
    """An error in a function under test; the message names the statement."""


@dataclasses.dataclass
class Frame:
    """The lanes of one parallel loop."""

    unit: str | None
    ids: np.ndarray  # each lane's iteration among all those of the enclosing parallel loops
    parents: np.ndarray | None  # each lane's lane in the enclosing frame
    threads: int = 1  # threads of the loop
    together: bool = False  # the lanes are iterations of a serial loop


@dataclasses.dataclass
class Scalar:
    values: np.ndarray
    mutable: bool
    depth: int
    kind: str


@dataclasses.dataclass
class Place:
    """An array, or the workspaces of all lanes of a frame, concatenated."""

    data: np.ndarray
    size: int
    kind: str = NUMBER
    depth: int = 0
    owners: Owners | None = None  # None: only read
    stored: np.ndarray | None = None


class Evaluator:
    """The state of a run: its lanes, and the scalars and arrays in scope."""

    def __init__(self, function: Function):
        self.function = function
        self.accumulator = np.dtype(function.accumulator)
        self.limits = np.iinfo(function.index)
        self.frames = [Frame(None, np.zeros(1, np.int64), None)]
        self.scalars: dict[str, Scalar] = {}
        self.places: dict[str, Place] = {}
        self.statement: Stmt | None = None

    def fault(self, what: str) -> LoopFault:
        where = ""
        if self.statement is not None:
            kinds = {name: scalar.kind for name, scalar in self.scalars.items()}
            where = f" at `{headline(self.function, self.statement, kinds)}`"
        return LoopFault(f"{self.function.name}: {what}{where}")

    # Lanes

    @property
    def depth(self) -> int:
        return len(self.frames) - 1

    def lanes_at(self, depth: int, lanes: Lanes) -> Lanes:
        """The lanes of an outer frame that lanes of the innermost belong to."""
        for frame in self.frames[:depth:-1]:
            assert frame.parents is not None
            lanes = frame.parents[lanes]
        return lanes

    # Expressions: one value for each of `lanes`; integers are int64, checked, whatever the width.

    def kind(self, expr: Expr) -> str:
        match expr:
            case loopir.Float():
                return NUMBER
            case loopir.Var(name):
                return self.scalar(name).kind
            case loopir.Load(array):
                return self.places[array].kind if array in self.places else NUMBER
            case loopir.Binary(op, left):
                return TRUTH if op in TRUTHS else self.kind(left)
            case loopir.Select(_, true):
                return self.kind(true)
        return INTEGER

    def value(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        match expr:
            case loopir.Int(value):
                return self.checked(np.full(len(lanes), value, np.int64))
            case loopir.Float(value):
                return np.full(len(lanes), self.number_of(value), self.accumulator)
            case loopir.Var(name):
                scalar = self.scalar(name)
                return scalar.values[self.lanes_at(scalar.depth, lanes)]
            case loopir.Load(array, index):
                return self.load(array, self.integer(index, lanes), lanes)
            case loopir.Binary():
                return self.binary(expr, lanes)
            case loopir.Select(condition, true, false):
                chosen = self.truth(condition, lanes)
                if chosen.all() or not chosen.any():
                    return self.value(true if chosen.any() else false, lanes)
                left, right = self.value(true, lanes[chosen]), self.value(false, lanes[~chosen])
                if self.kind(true) != self.kind(false):
                    raise self.fault("the sides of a Select are of two kinds")
                out = np.empty(len(lanes), left.dtype)
                out[chosen], out[~chosen] = left, right
                return out
            case loopir.Search():
                return self.search(expr, lanes)
        raise TypeError(f"not an expression of the loop IR: {expr!r}")

    def scalar(self, name: str) -> Scalar:
        if name not in self.scalars:
            raise self.fault(f"there is no {name} here")
        return self.scalars[name]

    def number_of(self, value: float) -> float:
        floats = self.accumulator.kind == "f"
        return value if floats else integer(value, self.function.accumulator)

    def integer(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        return self.of_kind(INTEGER, "an integer", expr, lanes)

    def truth(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        return self.of_kind(TRUTH, "a truth value", expr, lanes)

    def number(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        return self.of_kind(NUMBER, "a number", expr, lanes)

    def of_kind(self, kind: str, name: str, expr: Expr, lanes: Lanes) -> np.ndarray:
        values = self.value(expr, lanes)
        if self.kind(expr) != kind:
            raise self.fault(f"not {name}")
        return values

    def checked(self, integers: np.ndarray) -> np.ndarray:
        if integers.size and (integers.min() < self.limits.min or integers.max() > self.limits.max):
            raise self.fault(f"an integer beyond {self.function.index}")
        return integers

    def binary(self, expr: loopir.Binary, lanes: Lanes) -> np.ndarray:
        if expr.op in ("and", "or"):
            out = self.truth(expr.left, lanes)
            undecided = out if expr.op == "and" else ~out
            if undecided.any():
                out[undecided] = self.truth(expr.right, lanes[undecided])
            return out
        left, right = self.value(expr.left, lanes), self.value(expr.right, lanes)
        kind = self.kind(expr.left)
        if kind != self.kind(expr.right) or kind == TRUTH:
            raise self.fault(f"the sides of {expr.op} are of two kinds, or truth values")
        if expr.op in COMPARE:
            return COMPARE[expr.op](left, right)
        if expr.op in ("max", "min"):
            return COMBINE[expr.op](left, right)
        if expr.op in ("//", "%"):
            if kind != INTEGER:
                raise self.fault(f"{expr.op} of numbers")
            if (left < 0).any() or (right <= 0).any():
                raise self.fault(f"{expr.op} with a negative integer, or by zero")
            return left // right if expr.op == "//" else left % right
        out = {"+": np.add, "-": np.subtract, "*": np.multiply}[expr.op](left, right)
        return self.checked(out) if kind == INTEGER else out

    def load(self, array: str, index: np.ndarray, lanes: Lanes) -> np.ndarray:
        place, at = self.locate(array, index, lanes)
        if place.stored is not None:
            self.check_readable(array, place)
            if not place.stored[at].all():
                raise self.fault(f"a load of an element of {array} that nobody stored")
        if place.owners is not None:
            self.owned(array, place.owners.load, at, lanes)
        loaded = place.data[at]
        return loaded.astype(np.int64 if place.kind == INTEGER else self.accumulator)

    def search(self, expr: loopir.Search, lanes: Lanes) -> np.ndarray:
        parts = (expr.low, expr.high, expr.target)
        low, high, target = (self.integer(part, lanes) for part in parts)
        some = np.flatnonzero(low < high)
        if some.size:
            ends = np.concatenate([low[some], high[some] - 1])
            place, _ = self.locate(expr.array, ends, np.concatenate([lanes[some]] * 2))
            if place.owners is not None or place.kind != INTEGER:
                raise self.fault(f"a search in {expr.array}, which is no index array")
            # Each lane searches its own range, which must ascend; the array may decrease between
            # ranges.
            drops = np.flatnonzero(np.diff(place.data) < 0)
            first, last = np.searchsorted(drops, low[some]), np.searchsorted(drops, high[some] - 1)
            if (first < last).any() or (place.data[low[some]] > target[some]).any():
                raise self.fault(f"a search in {expr.array}, which decreases or starts too high")
        while some.size:
            middle = low[some] + (high[some] - low[some]) // 2
            before = place.data[middle] <= target[some]
            low[some[before]], high[some[~before]] = middle[before], middle[~before]
            some = some[high[some] - low[some] > 1]
        return low

    # Arrays

    def locate(self, array: str, index: np.ndarray, lanes: Lanes) -> tuple[Place, np.ndarray]:
        if array not in self.places:
            raise self.fault(f"there is no {array} here")
        place = self.places[array]
        wrong = (index < 0) | (index >= place.size)
        if wrong.any():
            at = int(index[np.flatnonzero(wrong)[0]])
            raise self.fault(f"{array}[{at}] is out of bounds, of {place.size}")
        if place.depth:  # a workspace for each lane of its frame
            index = index + self.lanes_at(place.depth, lanes) * place.size
        return place, index

    def check_readable(self, array: str, place: Place) -> None:
        if place.data.dtype.itemsize < self.accumulator.itemsize:
            raise self.fault(f"{array} is rounded to {place.data.dtype.name} and then read")

    def owned(self, array: str, touch: Callable, at: np.ndarray, lanes: Lanes) -> None:
        try:
            touch(at, self.frames[-1].ids[lanes])
        except RaceError as error:
            raise self.fault(f"a race for {array}[{error.index}]: {error}") from None
