"""einsum as loops that the compiler makes: which expression, which arrays, which machine code."""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.compiler import presets
from sgap_jax.compiler.expr import Access, Assign, index_vars
from sgap_jax.compiler.loopir import Function
from sgap_jax.compiler.lower import lower
from sgap_jax.compiler.print_cuda import launch_plan, started
from sgap_jax.compiler.schedule import Schedule
from sgap_jax.compiler.storage import capacities
from sgap_jax.formats.levels import Format
from sgap_jax.primitives._define import accumulator, cast_lowering, jax_lowering
from sgap_jax.primitives.einsum_expression import ENTRY, Expression, arrays_per_level
from sgap_jax.runtime import launch, llvm, nvrtc
from sgap_jax.schedules import ScheduleError
from sgap_jax.schedules.schedule import KERNEL_DTYPES


def index_notation(expression: Expression) -> Assign | None:
    """The expression with operands A, B, ... in their order, or None where no loops are made of it:
    a factor that has other indices beside the stored entries, an output index of no factor. Where
    no factor has the stored entries, a pattern of them comes first."""
    words = [*expression.factors, expression.output]
    if any(ENTRY in word and word != ENTRY for word in words):
        return None
    fiber, _ = expression.fiber
    if fiber and (any(fiber in word for word in words[:-1]) or fiber in words[-1][1:]):
        return None
    names = itertools.chain(string.ascii_uppercase, (f"A{n}" for n in itertools.count()))
    factors = [
        _access(expression, next(names), word)
        for i, word in enumerate(expression.factors)
        if word != ENTRY or i == words.index(ENTRY)  # those of several are multiplied beforehand
    ]
    if ENTRY not in expression.factors:
        pattern = _access(expression, next(names), ENTRY)
        factors.insert(0, dataclasses.replace(pattern, pattern=True))
    output = _access(expression, next(names), expression.output)
    there = {index for factor in factors for index in factor.indices}
    if not there.issuperset(output.indices):
        return None
    return Assign(output, tuple(factors), expression.reduction)


def _access(expression: Expression, name: str, word: str) -> Access:
    format = expression.format if word == ENTRY else None
    if expression.fiber[0] and word.startswith(expression.fiber[0]):
        format = expression.output_format
    return Access(name, index_vars(" ".join(expression.spelled(word))), format)


def check_dtype(dtype: Any) -> None:
    if jnp.dtype(dtype).name not in KERNEL_DTYPES:
        raise NotImplementedError(
            f"einsum: loops are compiled for {', '.join(KERNEL_DTYPES)}, got {jnp.dtype(dtype)}; "
            "schedule=None or Reference() runs"
        )


def check_loops(expression: Expression, schedule: Schedule) -> Assign:
    """The schedule's own expression, which must be this one but for its names."""
    asked = index_notation(expression)
    if asked is None or _shape_of(asked) != _shape_of(schedule.expression):
        got = "an expression without loops of its own" if asked is None else _described(asked)
        raise ScheduleError(
            f"einsum: the schedule is for {_described(schedule.expression)}, got {got}"
        )
    return schedule.expression


def _shape_of(assign: Assign) -> tuple:
    """What is left of an expression without its names, the sparse factor first."""
    every = (*sorted(assign.factors, key=lambda x: x.format is None), assign.output)
    indices = dict.fromkeys(i for x in every for i in x.indices)
    number = {index: i for i, index in enumerate(indices)}
    words = tuple((tuple(number[i] for i in x.indices), x.format, x.pattern) for x in every)
    return words, assign.reduction


def _described(assign: Assign) -> str:
    every = (*assign.factors, assign.output)
    formats = [f"{x.tensor} in {x.format}" for x in every if x.format is not None]
    return f"{assign} with {', '.join(formats)}"


def function_of(
    expression: Expression, schedule: Schedule, index_shapes: Sequence[tuple], dtype: Any
) -> Function:
    """The loops of a schedule for arrays of these shapes."""
    assign, sizes = check_loops(expression, schedule), dict(expression.sizes)
    named: dict[str, int] = {}
    for access, place in zip(assign.factors, _places(expression, assign), strict=True):
        letters = expression.spelled(_word(expression, place))
        extents = (sizes[letter] for letter in letters)
        named |= zip((index.name for index in access.indices), extents, strict=True)
    format = expression.format
    coordinates = _coordinate_lengths(format, index_shapes)
    modes = [sizes[expression.sparse[mode]] for mode in format.modes]
    room = capacities(format, modes, coordinates)
    return lower(schedule, named, room, jnp.dtype(dtype).name, "einsum")


def _places(expression: Expression, assign: Assign) -> list[int | None]:
    """Which factor of the expression each of the index notation's is; None for a pattern."""
    dense = (i for i, word in enumerate(expression.factors) if word != ENTRY)
    entries = expression.factors.index(ENTRY) if ENTRY in expression.factors else None
    return [next(dense) if x.format is None else entries for x in assign.factors]


def _word(expression: Expression, place: int | None) -> str:
    return ENTRY if place is None else expression.factors[place]


def _coordinate_lengths(format: Format, index_shapes: Sequence[tuple]) -> list[int]:
    left, found = iter(index_shapes), []
    for count in arrays_per_level(format):
        arrays = [next(left) for _ in range(count)]
        found += [shape[0] for shape in arrays[-1:]]
    return found


def inputs_of(expression: Expression, assign: Assign, operands: Sequence) -> list:
    """The operands in the order of the function's inputs: index arrays stand before the values."""
    count = len(expression.factors)
    found: list = []
    for place in _places(expression, assign):
        if _word(expression, place) == ENTRY:
            found += operands[count:]
        if place is not None:
            found.append(operands[place])
    return found


def cpu_loops(*operands: Any, expression: Expression, schedule: Schedule) -> jax.Array:
    """The expression on the CPU, by machine code that is made for it now."""
    count = len(expression.factors)
    dtype = operands[0].dtype
    places = [i for i, word in enumerate(expression.factors) if word == ENTRY]
    whole = list(operands)
    if len(places) > 1:  # a product of halves may overflow where the sum does not
        whole[:count] = (x.astype(accumulator(dtype)) for x in operands[:count])
    shapes = [x.shape for x in operands[count:]]
    function = function_of(expression, schedule, shapes, whole[0].dtype)
    for place in places[1:]:
        whole[places[0]] = whole[places[0]] * whole[place]
    (output,) = function.outputs
    call = jax.ffi.ffi_call(
        llvm.TARGET,
        jax.ShapeDtypeStruct(expression.shape(expression.output), output.dtype),
        vmap_method="sequential",
    )
    attributes = llvm.call_attributes(function, work=_products(expression))
    return call(*inputs_of(expression, schedule.expression, whole), **attributes).astype(dtype)


def _products(expression: Expression) -> int:
    """Multiply-adds: the entries times the indices that they lack. An entry costs loads of its
    coordinates and of what they say, however little is multiplied there (cpu/spmm_ffi.cc)."""
    sizes = dict(expression.sizes)
    own = {ENTRY, *expression.sparse}
    each = math.prod(n for index, n in sizes.items() if index not in own)
    return sizes[ENTRY] * max(each, 16)


def cuda_lowering(
    ctx: Any, operands: Sequence, *, expression: Expression, schedule: Schedule
) -> Any:
    """One launch of a kernel that is printed for the expression."""
    assert expression.factors.count(ENTRY) == 1  # no schedule is for another expression
    count, (out,) = len(expression.factors), ctx.avals_out
    avals = list(ctx.avals_in)
    shapes = [aval.shape for aval in avals[count:]]
    function = function_of(expression, schedule, shapes, out.dtype)
    (output,) = function.outputs
    result = out.update(dtype=jnp.dtype(output.dtype))
    given = inputs_of(expression, schedule.expression, operands)
    avals = inputs_of(expression, schedule.expression, avals)
    for fill in started(function).values():
        start = partial(jnp.full, result.shape, fill, result.dtype)
        given += jax_lowering(ctx, start, (), ())
        avals.append(result)
    (found,) = launch.lower(
        ctx,
        launch_plan(function),
        given,
        avals,
        [result],
        compiler=nvrtc,
    )
    return found if result.dtype == out.dtype else cast_lowering(ctx, found, result, out.dtype)


def default_schedule(expression: Expression, dtype: Any) -> Schedule | None:
    """What the CPU compiles where no schedule is given; None where plain JAX is to run."""
    assign = index_notation(expression)
    if assign is None or jnp.dtype(dtype).name not in KERNEL_DTYPES or not llvm.available():
        return None
    return presets.cpu(assign)
