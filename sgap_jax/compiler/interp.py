"""Runs the loop IR on NumPy arrays: the oracle of every printer.

All iterations of a parallel loop run together, one lane each, statement by statement; where they
part, the lanes of one side wait. What a real run might get away with is a LoopFault here:

- a load or store out of bounds, also of a Search; an element of an output that is never stored;
- a race: a store that is not atomic by two iterations of a parallel loop to one element, or a load
  of an element that another iteration has stored (elements belong to whoever touched them until the
  loop ends);
- a collective that not all threads of a group reach together, or whose indices break its contract;
- an integer beyond `Function.index`, or a division with a negative one (languages differ there);
- a scalar of outside of a parallel loop that is set within;
- a rounded array that is read back.

CPUVector loops run from the last iteration to the first: only reductions may join their iterations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from sgap_jax.compiler import loopir
from sgap_jax.compiler.loopir import Expr, Function, Stmt
from sgap_jax.compiler.ownership import Owners, RaceError
from sgap_jax.compiler.print_c import headline

ENCLOSING = {  # the units that a loop of a unit may stand in
    loopir.CPU_THREAD: (None,),
    loopir.GPU_BLOCK: (None,),
    loopir.GPU_WARP: (loopir.GPU_BLOCK,),
    loopir.GPU_THREAD: (loopir.GPU_BLOCK, loopir.GPU_WARP),
}
RADIX = 1 << 11  # more than the iterations of a loop within a parallel loop
MOST_TURNS = 10_000_000  # of a while loop
COMBINE: dict[str | None, np.ufunc] = {"+": np.add, "max": np.maximum, "min": np.minimum}
COMPARE = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
COMPARE |= {"==": np.equal, "!=": np.not_equal}

Lanes = np.ndarray  # numbers of lanes, increasing


class LoopFault(Exception):
    """A function did what it must not do; the message names the statement."""


def run(function: Function, inputs: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The outputs of a function.

    Args:
      function: what to run.
      inputs: each input by its name, flat, with the size and dtype that the function says.
      seed: of the order in which atomic updates of one statement meet.

    Raises:
      LoopFault: see the module.
      ValueError: an input that is not as the function says.
    """
    return _Run(function, inputs, seed).outputs()


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass
class _Frame:
    """The lanes of one parallel loop."""

    unit: str | None
    ids: np.ndarray  # which iteration a lane is, among all of the parallel loops around it
    parents: np.ndarray | None  # each lane's lane in the frame around
    threads: int = 1  # of the loop


@dataclasses.dataclass
class _Scalar:
    values: np.ndarray
    mutable: bool
    depth: int


@dataclasses.dataclass
class _Place:
    """An array, or the workspaces of all lanes of a frame one after the other."""

    data: np.ndarray
    size: int
    depth: int = 0
    owners: Owners | None = None  # None: only read
    stored: np.ndarray | None = None


class _Run:
    def __init__(self, function: Function, inputs: Mapping[str, Any], seed: int):
        self.function = function
        self.accumulator = np.dtype(function.accumulator)
        self.limits = np.iinfo(function.index)
        self.random = np.random.default_rng(seed)
        self.frames = [_Frame(None, np.zeros(1, np.int64), None)]
        self.scalars: dict[str, _Scalar] = {}
        self.places: dict[str, _Place] = {}
        self.statement: Stmt | None = None
        for array in function.inputs:
            self.places[array.name] = _Place(_input(function, array, inputs), array.size)
        for array in function.outputs:
            if array.name in self.places:
                raise ValueError(f"{function.name}: {array.name} is there twice")
            fill = np.nan if array.fill is None else array.fill
            self.places[array.name] = _Place(
                np.full(array.size, fill, numpy_dtype(array.dtype)),
                array.size,
                owners=Owners(array.size),
                stored=np.full(array.size, array.fill is not None),
            )

    def outputs(self) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            self.block(self.function.body, np.zeros(1, np.intp))
        for array in self.function.outputs:
            stored = self.places[array.name].stored
            if stored is not None and not stored.all():
                at = int(np.flatnonzero(~stored)[0])
                raise LoopFault(f"{self.function.name}: {array.name}[{at}] is never stored")
        return {array.name: self.places[array.name].data for array in self.function.outputs}

    def fault(self, what: str) -> LoopFault:
        where = "" if self.statement is None else f" at `{headline(self.function, self.statement)}`"
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

    def value(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        match expr:
            case loopir.Int(value):
                return self.checked(np.full(len(lanes), value, np.int64))
            case loopir.Float(value):
                return np.full(len(lanes), value, self.accumulator)
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
                if left.dtype != right.dtype:
                    raise self.fault("the sides of a Select are of two kinds")
                out = np.empty(len(lanes), left.dtype)
                out[chosen], out[~chosen] = left, right
                return out
            case loopir.Search():
                return self.search(expr, lanes)
        raise TypeError(f"not an expression of the loop IR: {expr!r}")

    def scalar(self, name: str) -> _Scalar:
        if name not in self.scalars:
            raise self.fault(f"there is no {name} here")
        return self.scalars[name]

    def integer(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        return self.of_kind("i", "an integer", expr, lanes)

    def truth(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        return self.of_kind("b", "a truth value", expr, lanes)

    def number(self, expr: Expr, lanes: Lanes) -> np.ndarray:
        return self.of_kind("f", "a number", expr, lanes)

    def of_kind(self, kind: str, name: str, expr: Expr, lanes: Lanes) -> np.ndarray:
        values = self.value(expr, lanes)
        if values.dtype.kind != kind:
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
        if left.dtype != right.dtype or left.dtype.kind == "b":
            raise self.fault(f"the sides of {expr.op} are of two kinds, or truth values")
        if expr.op in COMPARE:
            return COMPARE[expr.op](left, right)
        if expr.op in ("max", "min"):
            return COMBINE[expr.op](left, right)
        if expr.op in ("//", "%"):
            if left.dtype.kind != "i":
                raise self.fault(f"{expr.op} of numbers")
            if (left < 0).any() or (right <= 0).any():
                raise self.fault(f"{expr.op} with a negative integer, or by zero")
            return left // right if expr.op == "//" else left % right
        out = {"+": np.add, "-": np.subtract, "*": np.multiply}[expr.op](left, right)
        return self.checked(out) if out.dtype.kind == "i" else out

    def load(self, array: str, index: np.ndarray, lanes: Lanes) -> np.ndarray:
        place, at = self.locate(array, index, lanes)
        if place.stored is not None:
            self.check_readable(array, place)
            if not place.stored[at].all():
                raise self.fault(f"a load of an element of {array} that nobody stored")
        if place.owners is not None:
            self.owned(array, place.owners.load, at, lanes)
        loaded = place.data[at]
        return loaded.astype(np.int64 if loaded.dtype.kind == "i" else self.accumulator)

    def search(self, expr: loopir.Search, lanes: Lanes) -> np.ndarray:
        parts = (expr.low, expr.high, expr.target)
        low, high, target = (self.integer(part, lanes) for part in parts)
        some = np.flatnonzero(low < high)
        if some.size:
            ends = np.concatenate([low[some], high[some] - 1])
            place, _ = self.locate(expr.array, ends, np.concatenate([lanes[some]] * 2))
            array = place.data[low[some].min() : high[some].max()]
            if place.owners is not None or array.dtype.kind != "i":
                raise self.fault(f"a search in {expr.array}, which is no index array")
            if (np.diff(array) < 0).any() or (place.data[low[some]] > target[some]).any():
                raise self.fault(f"a search in {expr.array}, which decreases or starts too high")
        while some.size:
            middle = low[some] + (high[some] - low[some]) // 2
            before = place.data[middle] <= target[some]
            low[some[before]], high[some[~before]] = middle[before], middle[~before]
            some = some[high[some] - low[some] > 1]
        return low

    # Arrays

    def locate(self, array: str, index: np.ndarray, lanes: Lanes) -> tuple[_Place, np.ndarray]:
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

    def check_readable(self, array: str, place: _Place) -> None:
        if place.data.dtype.itemsize < self.accumulator.itemsize:
            raise self.fault(f"{array} is rounded to {place.data.dtype.name} and then read")

    def owned(self, array: str, touch: Any, at: np.ndarray, lanes: Lanes) -> None:
        try:
            touch(at, self.frames[-1].ids[lanes])
        except RaceError as error:
            raise self.fault(f"a race for {array}[{error.index}]: {error}") from None

    # Statements

    def block(self, statements: Sequence[Stmt], lanes: Lanes) -> None:
        """Names are known to the end of their block."""
        scalars, places = dict(self.scalars), dict(self.places)
        for statement in statements:
            self.statement = statement
            self.execute(statement, lanes)
        self.scalars, self.places = scalars, places

    def execute(self, statement: Stmt, lanes: Lanes) -> None:
        match statement:
            case loopir.Let(name, value, mutable):
                self.define(name, self.value(value, lanes), lanes, mutable)
            case loopir.Set(name, value):
                scalar = self.scalar(name)
                if not scalar.mutable or scalar.depth != self.depth:
                    why = "constant" if not scalar.mutable else "of outside of a parallel loop"
                    raise self.fault(f"{name} is {why}")
                new = self.value(value, lanes)
                if new.dtype != scalar.values.dtype:
                    raise self.fault(f"{name} is of another kind")
                scalar.values[lanes] = new
            case loopir.Workspace(name, size, fill):
                self.workspace(name, size, fill, lanes)
            case loopir.For(unit=None | "unroll" | loopir.CPU_VECTOR):
                self.serial(statement, lanes)
            case loopir.For():
                self.parallel(statement, lanes)
            case loopir.While(condition, body):
                for _ in range(MOST_TURNS):
                    self.statement = statement
                    lanes = lanes[self.truth(condition, lanes)]
                    if not lanes.size:
                        return
                    self.block(body, lanes)
                raise self.fault(f"more than {MOST_TURNS} turns")
            case loopir.If(condition, then, otherwise):
                chosen = self.truth(condition, lanes)
                for body, side in ((then, lanes[chosen]), (otherwise, lanes[~chosen])):
                    if side.size:
                        self.block(body, side)
            case loopir.Store():
                self.store(statement, lanes)
            case loopir.GroupReduce() | loopir.SegReduce():
                self.collective(statement, lanes)
            case loopir.Comment():
                pass
            case _:
                raise TypeError(f"not a statement of the loop IR: {statement!r}")

    def define(self, name: str, values: np.ndarray, lanes: Lanes, mutable: bool = False) -> None:
        every = np.zeros(len(self.frames[-1].ids), values.dtype)
        every[lanes] = values
        self.scalars[name] = _Scalar(every, mutable, self.depth)

    def workspace(self, name: str, size: int, fill: float, lanes: Lanes) -> None:
        total = len(self.frames[-1].ids) * size
        data = np.full(total, fill, self.accumulator)
        self.places[name] = _Place(data, size, self.depth, Owners(total))

    def serial(self, loop: loopir.For, lanes: Lanes) -> None:
        begin, end = self.integer(loop.begin, lanes), self.integer(loop.end, lanes)
        if loop.step < 1:
            raise self.fault("a step that is not positive")
        turns = np.maximum(-((begin - end) // loop.step), 0)
        for turn in range(int(turns.max())):
            going = turn < turns
            at = turns[going] - 1 - turn if loop.unit == loopir.CPU_VECTOR else turn
            self.statement = loop
            values = self.checked(begin[going] + at * loop.step)
            before = self.scalars.get(loop.var)
            self.define(loop.var, values, lanes[going])
            self.block(loop.body, lanes[going])
            if before is None:
                del self.scalars[loop.var]
            else:
                self.scalars[loop.var] = before

    def parallel(self, loop: loopir.For, lanes: Lanes) -> None:
        outer = self.frames[-1]
        allowed = ENCLOSING.get(loop.unit or "")
        if allowed is None or outer.unit not in allowed:
            raise self.fault(f"a loop of {loop.unit} in one of {outer.unit}")
        try:
            extent = loopir.extent(loop)
        except ValueError as error:
            raise self.fault(str(error)) from None
        if self.depth and extent >= RADIX:
            raise self.fault(f"{extent} threads in a block")
        if outer.unit == loopir.GPU_WARP and extent > 32:
            raise self.fault(f"{extent} threads in a warp")
        if extent == 0:
            return
        iterations = np.tile(np.arange(extent), len(lanes))
        parents = np.repeat(lanes, extent)
        ids = outer.ids[parents] * RADIX + iterations
        self.frames.append(_Frame(loop.unit, ids, parents, extent))
        before = self.scalars.get(loop.var)
        self.define(loop.var, iterations, np.arange(len(ids)))
        self.block(loop.body, np.arange(len(ids)))
        self.frames.pop()
        del self.scalars[loop.var]
        if before is not None:
            self.scalars[loop.var] = before
        for place in self.places.values():
            if place.owners is not None and place.depth == self.depth:
                place.owners.forget()

    def store(self, store: loopir.Store, lanes: Lanes) -> None:
        index, value = self.integer(store.index, lanes), self.number(store.value, lanes)
        if store.atomic and store.op is None:
            raise self.fault("an atomic store without op")
        self.update(store.array, index, value, store.op, store.atomic, lanes)

    def update(
        self,
        array: str,
        index: np.ndarray,
        value: np.ndarray,
        op: str | None,
        atomic: bool,
        lanes: Lanes,
    ) -> None:
        place, at = self.locate(array, index, lanes)
        if place.owners is None:
            raise self.fault(f"a store to {array}, an input")
        self.owned(array, place.owners.update if atomic else place.owners.store, at, lanes)
        if op is None:
            place.data[at] = value.astype(place.data.dtype)
        else:
            if place.stored is not None:
                self.check_readable(array, place)
                if not place.stored[at].all():
                    raise self.fault(f"an update of an element of {array} that nobody stored")
            order = self.random.permutation(len(at))
            rounded = value[order].astype(place.data.dtype)
            COMBINE[op].at(place.data, at[order], rounded)
        if place.stored is not None:
            place.stored[at] = True

    def collective(self, reduce: loopir.GroupReduce | loopir.SegReduce, lanes: Lanes) -> None:
        size, frame = reduce.size, self.frames[-1]
        if size not in (1, 2, 4, 8, 16, 32):
            raise self.fault(f"a group of {size} threads")
        if frame.unit != loopir.GPU_THREAD or frame.threads % size:
            raise self.fault(f"groups of {size} in a loop of {frame.threads} for {frame.unit}")
        groups = lanes[::size] // size
        if not np.array_equal(lanes, (groups[:, None] * size + np.arange(size)).reshape(-1)):
            raise self.fault("not all threads of a group are there")
        index = self.integer(reduce.index, lanes).reshape(-1, size)
        value = self.number(reduce.value, lanes).reshape(-1, size)
        if isinstance(reduce, loopir.GroupReduce):
            if (index != index[:, :1]).any():
                raise self.fault("a group with more than one index")
            while value.shape[1] > 1:  # as by shuffles
                half = value.shape[1] // 2
                value = COMBINE[reduce.op](value[:, :half], value[:, half:])
            first, atomic = lanes[::size], reduce.atomic
            self.update(reduce.array, index[:, 0], value[:, 0], reduce.op, atomic, first)
        else:
            heads, index, value = self.segments(reduce.op, index, value)
            self.update(reduce.array, index, value, reduce.op, True, lanes[heads])

    def segments(
        self, op: str, index: np.ndarray, value: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(lanes that are the first of their run, the index of each, the sum of each)."""
        heads = np.ones(index.shape, bool)
        heads[:, 1:] = index[:, 1:] != index[:, :-1]
        starts = np.flatnonzero(heads)
        sums = COMBINE[op].reduceat(value.reshape(-1), starts)
        part = index.reshape(-1)[starts] >= 0
        starts, sums = starts[part], sums[part]
        runs, groups = index.reshape(-1)[starts], starts // index.shape[1]
        if ((groups[1:] == groups[:-1]) & (runs[1:] <= runs[:-1])).any():
            raise self.fault("indices that decrease, or meet again after another")
        return starts, runs, sums


def _input(function: Function, array: loopir.Array, inputs: Mapping[str, Any]) -> np.ndarray:
    if array.name not in inputs:
        raise ValueError(f"{function.name}: expected an input {array.name}, got {sorted(inputs)}")
    given = np.asarray(inputs[array.name])
    if given.dtype != numpy_dtype(array.dtype) or given.size != array.size:
        raise ValueError(
            f"{function.name}: expected {array.size} of {array.dtype} for {array.name}, "
            f"got {given.size} of {given.dtype.name}"
        )
    return given.reshape(-1)
