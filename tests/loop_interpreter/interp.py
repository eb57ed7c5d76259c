"""Runs the loop IR on NumPy arrays: the oracle of every printer.

All iterations of a parallel loop run together, one lane each, statement by statement; where they
diverge, the lanes of one branch wait. The following are a LoopFault here, even where a real run
might succeed:

- a load or store out of bounds, also within a Search; an element of an output that is never stored;
- a race: a store that is not atomic by two iterations of a parallel loop to one element, or a load
  of an element that another iteration has stored (until the loop ends an element belongs to the
  iteration that touched it);
- a collective that not all threads of a group reach together, or whose indices break its contract;
- tensor cores used by anything but a whole warp, or on dtypes that they do not multiply;
- an integer beyond `Function.index`, or a division with a negative one (languages differ there);
- a scalar defined outside of a parallel loop that is set inside;
- a rounded array that is read back.

CPUVector loops run from the last iteration to the first: their iterations may interact by
reductions only. Serial loops with independent iterations also run all at once, for speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from loop_interpreter.evaluate import Frame, Lanes, LoopFault, Place, Scalar
from loop_interpreter.independence import independent
from loop_interpreter.ownership import Owners
from loop_interpreter.stores import Stores
from sgap_jax.compiler.loop_ir import loopir
from sgap_jax.compiler.loop_ir.loopir import Function, Stmt
from sgap_jax.compiler.loop_ir.mma import declared
from sgap_jax.compiler.loop_ir.print_c import INTEGER, NUMBER

ENCLOSING = {  # the units that may enclose a loop of each unit
    loopir.CPU_THREAD: (None,),
    loopir.GPU_BLOCK: (None,),
    loopir.GPU_WARP: (loopir.GPU_BLOCK,),
    loopir.GPU_THREAD: (loopir.GPU_BLOCK, loopir.GPU_WARP),
}
RADIX = 1 << 11  # more than the iterations of a loop within a parallel loop
MOST_TURNS = 10_000_000  # iterations of a while loop
MOST_TOGETHER = 1 << 18  # iterations of serial loops that run at once


def run(function: Function, inputs: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """The outputs of a function.

    Args:
      function: what to run.
      inputs: each input by its name, flattened, with the size and dtype that the function declares.
      seed: determines the order in which atomic updates of one statement happen.

    Raises:
      LoopFault: an error listed in the module's docstring.
      ValueError: an input that does not match its declaration.
    """
    return _Run(function, inputs, seed).outputs()


class _Run(Stores):
    def __init__(self, function: Function, inputs: Mapping[str, Any], seed: int):
        super().__init__(function, seed)
        self.independent: dict[int, bool] = {}  # by the id() of a serial loop
        for array in function.inputs:
            data, kind = _input(function, array, inputs), INTEGER if array.is_index else NUMBER
            self.places[array.name] = Place(data, array.size, kind)
        for array in function.outputs:
            if array.name in self.places:
                raise ValueError(f"{function.name}: {array.name} is there twice")
            dtype = jnp.dtype(array.dtype)
            nothing = np.nan if dtype.kind != "i" and dtype.kind != "u" else 0
            fill = nothing if array.fill is None else self.number_of(array.fill)
            self.places[array.name] = Place(
                np.full(array.size, fill, dtype),
                array.size,
                INTEGER if array.is_index else NUMBER,
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

    # Statements

    def block(self, statements: Sequence[Stmt], lanes: Lanes) -> None:
        """Runs statements; names that they define go out of scope at the end."""
        scalars, places = dict(self.scalars), dict(self.places)
        for statement in statements:
            self.statement = statement
            self.execute(statement, lanes)
        self.scalars, self.places = scalars, places

    def execute(self, statement: Stmt, lanes: Lanes) -> None:
        match statement:
            case loopir.Let(name, value, mutable):
                values = self.value(value, lanes)
                self.forbid(name)
                self.define(name, values, lanes, mutable, self.kind(value))
            case loopir.Set(name, value):
                scalar = self.scalar(name)
                if not scalar.mutable or scalar.depth != self.depth:
                    why = "constant" if not scalar.mutable else "of outside of a parallel loop"
                    raise self.fault(f"{name} is {why}")
                new = self.value(value, lanes)
                if self.kind(value) != scalar.kind:
                    raise self.fault(f"{name} is of another kind")
                scalar.values[lanes] = new
            case loopir.Workspace(name, size, fill):
                self.workspace(name, size, fill, lanes)
            case loopir.For(var=name, unit=unit):
                self.forbid(name)
                serial = unit in (None, "unroll", loopir.CPU_VECTOR)
                (self.serial if serial else self.parallel)(statement, lanes)
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
            case loopir.Mma() | loopir.MmaStore():
                self.tensor_cores(statement, lanes)
            case loopir.Comment():
                pass
            case _:
                raise TypeError(f"not a statement of the loop IR: {statement!r}")

    def forbid(self, name: str) -> None:
        if name in self.scalars or name in self.places:
            raise self.fault(f"{name} is there already")

    def define(
        self,
        name: str,
        values: np.ndarray,
        lanes: Lanes,
        mutable: bool = False,
        kind: str = INTEGER,
    ) -> None:
        every = np.zeros(len(self.frames[-1].ids), values.dtype)
        every[lanes] = values
        self.scalars[name] = Scalar(every, mutable, self.depth, kind)

    def workspace(self, name: str, size: int, fill: float | None, lanes: Lanes) -> None:
        self.forbid(name)
        total = len(self.frames[-1].ids) * size
        anything = np.nan if np.dtype(self.accumulator).kind == "f" else 77  # shows if it is read
        data = np.full(total, self.number_of(anything if fill is None else fill), self.accumulator)
        self.places[name] = Place(data, size, NUMBER, self.depth, Owners(total))

    def serial(self, loop: loopir.For, lanes: Lanes) -> None:
        begin, end = self.integer(loop.begin, lanes), self.integer(loop.end, lanes)
        if loop.step < 1:
            raise self.fault("a step that is not positive")
        turns = np.maximum(-((begin - end) // loop.step), 0)
        if id(loop) not in self.independent:
            self.independent[id(loop)] = independent(loop)
        few = self.frames[-1].together or turns.sum() <= MOST_TOGETHER  # what is in order stays so
        if self.independent[id(loop)] and few and turns.any():
            return self.together(loop, lanes, begin, turns)
        for turn in range(int(turns.max())):
            going = turn < turns
            at = turns[going] - 1 - turn if loop.unit == loopir.CPU_VECTOR else turn
            self.statement = loop
            values = self.checked(begin[going] + at * loop.step)
            self.define(loop.var, values, lanes[going])
            self.block(loop.body, lanes[going])
            del self.scalars[loop.var]

    def together(
        self, loop: loopir.For, lanes: Lanes, begin: np.ndarray, turns: np.ndarray
    ) -> None:
        """Runs the iterations of a serial loop as lanes, each with the state of the lane that it
        belongs to."""
        outer, first = self.frames[-1], np.cumsum(turns) - turns
        at = np.arange(turns.sum()) - np.repeat(first, turns)
        if loop.unit == loopir.CPU_VECTOR:
            at = np.repeat(turns, turns) - 1 - at
        values = self.checked(np.repeat(begin, turns) + at * loop.step)
        parents = np.repeat(lanes, turns)
        self.frames.append(
            Frame(outer.unit, outer.ids[parents], parents, outer.threads, together=True)
        )
        self.define(loop.var, values, np.arange(len(parents)))
        self.block(loop.body, np.arange(len(parents)))
        self.frames.pop()
        del self.scalars[loop.var]

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
        self.frames.append(Frame(loop.unit, ids, parents, extent))
        self.define(loop.var, iterations, np.arange(len(ids)))
        self.block(loop.body, np.arange(len(ids)))
        self.frames.pop()
        del self.scalars[loop.var]
        for place in self.places.values():
            if place.owners is not None and place.depth == self.depth:
                place.owners.forget()

    def tensor_cores(self, statement: loopir.Mma | loopir.MmaStore, lanes: Lanes) -> None:
        """Runs a tensor-core statement; a lane here is a warp. Products of 16-bit values are exact
        in float32."""
        if self.frames[-1].unit not in (loopir.GPU_BLOCK, loopir.GPU_WARP):
            raise self.fault(f"tensor cores in a loop of {self.frames[-1].unit}")
        if isinstance(statement, loopir.Mma):
            for array in (statement.left.array, statement.right.array):
                if array in self.places and self.places[array].data.dtype.itemsize != 2:
                    raise self.fault(f"{array} is {self.places[array].data.dtype}")
        self.execute(declared(statement), lanes)


def _input(function: Function, array: loopir.Array, inputs: Mapping[str, Any]) -> np.ndarray:
    if array.name not in inputs:
        raise ValueError(f"{function.name}: expected an input {array.name}, got {sorted(inputs)}")
    given = np.asarray(inputs[array.name])
    if given.dtype != jnp.dtype(array.dtype) or given.size != array.size:
        raise ValueError(
            f"{function.name}: expected {array.size} of {array.dtype} for {array.name}, "
            f"got {given.size} of {given.dtype.name}"
        )
    return given.reshape(-1)
