"""Serial loops in which each iteration stores a sum over lanes, in LLVM IR: unrolled and jammed.

Sampled products (SDDMM) have such loops over the entries of each row. Four iterations run at a
time, and the loops over lanes in them as one. What the sums share is loaded once, their vectors are
added up together (separate_sums.py), and one instruction stores the results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from sgap_jax.compiler.llvm.builder import Builder
from sgap_jax.compiler.llvm.instructions import INDEX, ROLLED, Cell, Value, constant
from sgap_jax.compiler.llvm.prefetch import is_far
from sgap_jax.compiler.llvm.separate_sums import (
    SeparateSum,
    initial_cell,
    separate_sum,
    store_sums,
    write_constants,
)
from sgap_jax.compiler.loop_ir.arithmetic import names_in
from sgap_jax.compiler.loop_ir.loopir import Binary, Expr, For, Int, Let, Search, Set, Var
from sgap_jax.compiler.loop_ir.patterns import gathers, parts

# Iterations at a time, as in cpu/sddmm/sddmm_dots.h: rows of a few entries have not many more.
_TOGETHER = 4

# The most vectors of a sum; fewer where rows of a table beyond a cache are gathered. Of a long sum
# the last additions are a small part, and of such a table four rows at a time are slower than one
# after the other (of 8 vectors up to 1.2x; of 4 vectors 0.9x to 1.0x; Zen 5).
_MOST_VECTORS, _MOST_VECTORS_FAR = 16, 4


def unroll_and_jam(builder: Builder, loop: For) -> bool:
    """Takes a serial loop that stores sums over lanes in neighbouring places, all of one constant
    number of terms. Groups of iterations run together; those that are left are one group more."""
    plain = builder.width == 1 and loop.unit is None and loop.step == 1
    separate = separate_sum(loop) if plain else None
    if separate is None or not _pays(builder, separate, loop):
        return False
    begin, end = builder.bounds(loop)
    count, position = _together(builder), builder.cell(INDEX, begin)
    full = builder.binary("-", end, constant(count - 1))
    head, body, rest, some, none = (builder.fresh("group") for _ in range(5))
    builder.branch(head)
    builder.start_block(head)
    now = builder.read(position)
    builder.branch_if(builder.binary("<", now, full).text, body, rest)
    builder.start_block(body)
    _group(builder, separate, loop.var, now, None)
    builder.write(position, builder.binary("+", now, constant(count)))
    builder.branch(head, ROLLED)
    builder.start_block(rest)
    builder.branch_if(builder.binary("<", now, end).text, some, none)
    builder.start_block(some)
    _group(builder, separate, loop.var, now, end)
    builder.branch(none)
    builder.start_block(none)
    return True


def _together(builder: Builder) -> int:
    return min(_TOGETHER, builder.native_lanes)


def _pays(builder: Builder, separate: SeparateSum, loop: For) -> bool:
    """Whether the stores and the number of terms are such that a group is faster."""
    match separate.inner.begin, separate.inner.end:
        case Int(begin), Int(end) if _together(builder) <= end - begin:
            terms = dataclasses.replace(loop, body=(*separate.lets, *separate.inner.body))
            far = any(is_far(builder.arrays[load.array]) for load in gathers(terms))
            most = (_MOST_VECTORS_FAR if far else _MOST_VECTORS) * builder.native_lanes
            searched = any(isinstance(part, Search) for part in parts(separate.lets))
            neighbours = _are_neighbours(separate.store.index, loop.var)
            return end - begin <= most and neighbours and not searched
    return False


def _are_neighbours(index: Expr, var: str) -> bool:
    """Whether iterations in a row store in places in a row."""
    match index:
        case Binary("+", base, Var(name)) if var not in names_in(base):
            return name == var
    return index == Var(var)


def _group(
    builder: Builder, separate: SeparateSum, var: str, now: Value, end: Value | None
) -> None:
    """The iterations from `now` on. `end`: fewer are left than a group has. The last of them stands
    in for those that are missing, which costs less than branches that are mispredicted at every
    short row, and the store leaves these out."""
    count, outer = _together(builder), builder.scalars
    scalars: list[Mapping[str, Value | Cell]] = []
    inner, factor = factored(separate.inner, separate.initial.name)
    with builder.scope():
        for lane in range(count):
            place = builder.binary("+", now, constant(lane))
            if end is not None and lane > 0:
                place = builder.binary("min", place, builder.binary("-", end, constant(1)))
            write_constants(builder, separate, {**outer, var: place})
            scalars.append(builder.scalars)
        total = _jammed(builder, separate, inner, scalars)
        with builder.in_lanes(count):
            left = None if end is None else builder.binary("-", end, now)
            mask = None if left is None else builder.first_lanes(left)
            with builder.in_lanes(count, mask):
                write_constants(builder, separate, {**outer, var: Value(INDEX, now.text, stride=1)})
                if factor is not None:
                    total = builder.binary("*", builder.value(factor), total)
                store_sums(builder, separate, total)


def _jammed(
    builder: Builder,
    separate: SeparateSum,
    inner: For,
    scalars: Sequence[Mapping[str, Value | Cell]],
) -> Value:
    """A vector of the sums of several iterations, whose scalars are `scalars`. A vector of terms is
    written for each of them, then the next ones. Vectors are narrower than those of the CPU where
    they still have a lane for each term, and for each sum."""
    assert isinstance(inner.begin, Int) and isinstance(inner.end, Int)
    begin, end, width = inner.begin.value, inner.end.value, builder.native_lanes
    while width // 2 >= max(end - begin, len(scalars)):
        width //= 2
    with builder.in_lanes(width):
        cells = [initial_cell(builder, separate) for _ in scalars]
        for at in range(begin, end, width):
            mask = builder.first_lanes(constant(end - at)) if end - at < width else None
            with builder.in_lanes(width, mask):
                for scope, cell in zip(scalars, cells, strict=True):
                    place = Value(INDEX, str(at), stride=1)
                    builder.scalars = {**scope, inner.var: place, separate.initial.name: cell}
                    builder.statements(inner.body)
        return builder.fold_each(separate.op, [builder.read(cell) for cell in cells])


def factored(loop: For, name: str) -> tuple[For, Expr | None]:
    """A loop that adds up products in a scalar, without the factors that all terms share, and the
    product of these. A maximum is left as it is, as a negative factor turns the order round."""
    own = {loop.var} | {s.name for s in loop.body if isinstance(s, Let)}
    sums = [s for s in loop.body if isinstance(s, Set)]
    match sums:
        case [Set(same, Binary("+", Var(total), product)) as sum] if same == total == name:
            factors = _factors(product)
            shared = [f for f in factors if own.isdisjoint(names_in(f))]
            if shared and len(shared) < len(factors):
                term = functools.reduce(_product, (f for f in factors if f not in shared))
                new = dataclasses.replace(sum, value=Binary("+", Var(name), term))
                body = tuple(new if s is sum else s for s in loop.body)
                return dataclasses.replace(loop, body=body), functools.reduce(_product, shared)
    return loop, None


def _factors(product: Expr) -> list[Expr]:
    match product:
        case Binary("*", left, right):
            return [*_factors(left), *_factors(right)]
    return [product]


def _product(left: Expr, right: Expr) -> Expr:
    return Binary("*", left, right)
