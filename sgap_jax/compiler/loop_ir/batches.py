"""Adds a batch to a function: makes the loops for one element loops for all of them (vmap)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from sgap_jax.compiler.loop_ir.arithmetic import ZERO, add, divide, modulo, multiply
from sgap_jax.compiler.loop_ir.loopir import (
    CPU_THREAD,
    GPU_BLOCK,
    Array,
    Binary,
    Expr,
    For,
    Function,
    GroupReduce,
    Int,
    Let,
    Load,
    Matrix,
    MmaStore,
    SegReduce,
    Select,
    Stmt,
    Store,
    Var,
    Workspace,
    extent,
)
from sgap_jax.compiler.loop_ir.patterns import parts, statements
from sgap_jax.compiler.loop_ir.widths import index_dtype

_OUTERMOST = (CPU_THREAD, GPU_BLOCK)
_NOBODY = Int(-1)  # the index of a lane that takes no part in a SegReduce

# The most elements of a batch that run each task in turn, before any runs the next task: for all
# but the first, shared data are in the L1 cache and branches are predicted. Measured on one thread
# (Zen 5, MTTKRP of rank 32, 40,000 entries in short fibers, a batch of 8): groups of two elements
# take 0.85x, of four 0.78x, of eight 0.73x of the time of whole elements one after another.
_TURNS = 8

# The most values that the dense operands of such a group may have in all, since they are read in
# any order: 384 KiB of float32, a part of an L2 cache. With 1 MiB SpMM takes 1.0x to 1.4x and SDDMM
# 1.0x to 1.05x of the time of elements one after another, with 2 MiB 0.9x to 1.5x and 1.0x to 1.7x.
_NEAR = 3 << 15


def of_batch(function: Function, length: int, arrays: Collection[str], turns: int = 1) -> Function:
    """`function` for a batch of `length` elements. The arrays named in `arrays` have a part for
    each element, one after another; all elements share the other inputs.

    If the output is among them, the loop over elements becomes a part of the outermost parallel
    loop. `turns` elements, of which `length` is a multiple, run the first task in turn, then the
    next one, and so on; after the last task the next `turns` elements do so. Otherwise the output
    is the sum over all elements, in the accumulator's dtype: the loop over elements is inside the
    outermost parallel loop, and stores add. Without a parallel loop it is around everything.
    """
    (output,) = function.outputs
    taken, element = _names(function), "element"
    while element in taken:
        element += "_"
    every = (*function.inputs, output)
    sizes = {array.name: array.size for array in every if array.name in arrays}
    summed = output.name not in sizes
    moved = _Moved(Var(element), sizes, output.name if summed else None)

    def each(*body: Stmt) -> For:
        return For(element, ZERO, Int(length), body)

    def placed(statement: Stmt) -> Stmt:
        if not isinstance(statement, For) or statement.unit not in _OUTERMOST:
            own = any(getattr(part, "array", None) in sizes for part in parts(statement))
            return each(moved(statement)) if own else moved(statement)
        body, count = moved(statement.body), extent(statement)
        if summed or not count:
            return dataclasses.replace(statement, body=(each(*body),))
        near, far = (statement.var, element), (element, statement.var)
        both = "_".join(near if turns == length else far)
        while both in taken:
            both += "_"
        rest, one = divide(Var(both), turns), modulo(Var(both), turns)
        if turns == length:
            parted = Let(statement.var, rest), Let(element, one)
        else:
            others = multiply(divide(rest, count), Int(turns))
            parted = Let(element, add(others, one)), Let(statement.var, modulo(rest, count))
        return For(both, ZERO, Int(length * count), (*parted, *body), unit=statement.unit)

    tasks = [s for s in function.body if isinstance(s, For) and s.unit in _OUTERMOST]
    body = tuple(map(placed, function.body)) if tasks else (each(*moved(function.body)),)
    inputs = tuple(_longer(x, length) if x.name in sizes else x for x in function.inputs)
    total = dataclasses.replace(output, dtype=function.accumulator, fill=0.0)
    outputs = (total if summed else _longer(output, length),)
    largest = max(array.size for array in (*inputs, *outputs))
    largest = max([largest] + [extent(s) * (1 if summed else length) for s in tasks])
    index = "int64" if function.index == "int64" else index_dtype(largest)
    return dataclasses.replace(function, inputs=inputs, outputs=outputs, body=body, index=index)


def in_turns(function: Function, length: int, dense: Collection[str]) -> int:
    """The value of `turns` for `of_batch`: a divisor of `length`. `dense` names the inputs that
    have a part for each element and are not read in order."""
    own = sum(array.size for array in function.inputs if array.name in dense)
    most = min(_TURNS, length, _NEAR // max(own, 1))
    return next((turns for turns in range(most, 1, -1) if length % turns == 0), 1)


def _longer(array: Array, length: int) -> Array:
    return dataclasses.replace(array, size=length * array.size, parts=length * array.parts)


def _names(function: Function) -> set[str]:
    found = {array.name for array in (*function.inputs, *function.outputs)}
    for statement in statements(function.body):
        match statement:
            case Let(name=name) | Workspace(name=name) | For(var=name):
                found.add(name)
    return found


@dataclasses.dataclass(frozen=True)
class _Moved:
    """Rewrites statements and expressions: accesses to the arrays in `sizes` go to the part of
    `element`, and stores to `total` add."""

    element: Var
    sizes: dict[str, int]
    total: str | None

    def __call__(self, node: Any) -> Any:
        if isinstance(node, tuple):
            return tuple(map(self, node))
        if not dataclasses.is_dataclass(node) or isinstance(node, type):
            return node
        fields = {f.name: self(getattr(node, f.name)) for f in dataclasses.fields(node)}
        node = dataclasses.replace(node, **fields)
        match node:
            case Load(array) | Store(array) | GroupReduce(array) if array in self.sizes:
                node = dataclasses.replace(node, index=self._index(array, node.index))
            case SegReduce(array) if array in self.sizes:
                node = dataclasses.replace(node, index=self._part(array, node.index))
            case Matrix(array) if array in self.sizes:
                node = dataclasses.replace(node, offset=self._index(array, node.offset))
            case MmaStore(scale=array) if array in self.sizes:
                node = dataclasses.replace(node, offset=self._index(array, node.offset))
        match node:
            case Store(array, op=None) | MmaStore(target=Matrix(array), op=None):
                if array == self.total:
                    node = dataclasses.replace(node, op="+")
        return node

    def _index(self, array: str, index: Expr) -> Expr:
        match index:
            case Binary("+", first, rest):
                return add(self._index(array, first), rest)
        return add(multiply(self.element, Int(self.sizes[array])), index)

    def _part(self, array: str, index: Expr) -> Expr:
        """Like `_index`, for a SegReduce: the index of lanes that take no part stays negative."""
        match index:
            case Select(live, place, nobody) if nobody == _NOBODY:
                return Select(live, self._index(array, place), nobody)
        return Select(Binary("<", index, ZERO), _NOBODY, self._index(array, index))
