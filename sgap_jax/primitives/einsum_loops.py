"""einsum as loops of the compiler: lowers a schedule of an `Expression` for the shapes of the
operands, and makes the custom call of the CPU or the launch on CUDA.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.compiler import presets, presets_cuda
from sgap_jax.compiler.cuda.print_cuda import initial_values, launch_plan, padded_sizes
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.batches import in_turns, of_batch
from sgap_jax.compiler.loop_ir.loopir import INTEGERS, Function
from sgap_jax.compiler.loop_ir.print_c import print_c
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import array_name, capacities
from sgap_jax.compiler.notation.derivatives import operands as read_by
from sgap_jax.compiler.notation.derivatives import same
from sgap_jax.compiler.notation.expr import Access, Assign
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats.levels import Format
from sgap_jax.launch import launch, nvrtc
from sgap_jax.primitives import einsum_unchecked
from sgap_jax.primitives._define import derived, jax_lowering
from sgap_jax.primitives.einsum_expression import (
    ENTRY,
    Expression,
    arrays_per_level,
    operand_names,
)
from sgap_jax.schedules import ScheduleError
from sgap_jax.schedules.schedule import KERNEL_DTYPES
from sgap_jax.schedules.select import keep_chosen

# About the least number of tasks that a tensor of few slices is divided into, because slices differ
# in size. For 104 slices, MTTKRP takes 0.87x the time that it takes with 7 tasks (ranks 16 and 64,
# 2 threads); for 100 slices of a small tensor the time is the same.
_TASKS = 16

LOOP_DTYPES = (*KERNEL_DTYPES, *INTEGERS)


def check_dtype(dtype: Any) -> None:
    if jnp.dtype(dtype).name not in LOOP_DTYPES:
        raise NotImplementedError(
            f"einsum: loops are compiled for {', '.join(LOOP_DTYPES)}, got {jnp.dtype(dtype)}; "
            "schedule=None or Reference() runs"
        )


def check_loops(expression: Expression, schedule: LoopSchedule) -> Assign:
    """Returns the schedule's expression, which must equal this one up to names."""
    asked = expression.assign
    if asked is None or not same(asked, schedule.expression):
        got = "an expression without loops of its own" if asked is None else _described(asked)
        raise ScheduleError(
            f"einsum: the schedule is for {_described(schedule.expression)}, got {got}"
        )
    return schedule.expression


def has_chain(schedule: Any) -> bool:
    """Whether a schedule is a chain of transformations."""
    return schedule is not None and isinstance(schedule._inner, LoopSchedule)


def inherited(schedule: Any, expression: Expression) -> Any:
    """The schedule of a derivative, whose expression is given.

    For a `compiler.Schedule`: the one of the same expression (for one element of a batch) among the
    schedule itself and those in its `with_derivatives`, or None.
    """
    if schedule is None or not isinstance(schedule._inner, LoopSchedule):
        return derived(schedule)
    asked = expression.assign
    return schedule._around(None if asked is None else schedule._inner.of(asked))


def _described(assign: Assign) -> str:
    every = (*assign.accesses, assign.output)
    formats = [f"{x.tensor} in {x.format}" for x in every if x.format is not None]
    return f"{assign} with {', '.join(formats)}"


def function_of(
    expression: Expression, schedule: LoopSchedule, index_shapes: Sequence[tuple], dtype: Any
) -> Function:
    """The function that a schedule lowers to for arrays of these shapes, with loops over the batch
    around it."""
    one, sizes = expression.of_one(), dict(expression.sizes)
    assign = check_loops(expression, schedule)
    named: dict[str, int] = {}
    output = assign.output.tensor
    words = {output: expression.output}  # array of the function -> its indices, batch included
    for access, place in _places(expression, assign):
        letters = one.spelled(ENTRY if place is None else one.words[place])
        extents = (sizes[letter] for letter in letters)
        named |= zip((index.name for index in access.indices), extents, strict=True)
        if place is not None:
            words[array_name(access, assign)] = expression.words[place]
    format = expression.format
    coordinates = _coordinate_lengths(format, index_shapes)
    modes = [sizes[expression.sparse[mode]] for mode in format.modes]
    room = capacities(format, modes, coordinates)
    repeated = (
        {einsum_unchecked.stored_levels(format) - 1, expression.fiber[1] - 1}
        if expression.repeats
        else ()
    )
    function = lower(schedule, named, room, jnp.dtype(dtype).name, "einsum", tuple(repeated))
    for index in reversed(expression.batch):
        own = {name: word for name, word in words.items() if index in word}
        stored = {ENTRY, expression.fiber[0]}
        dense = {name for name, word in own.items() if name != output and stored.isdisjoint(word)}
        function = of_batch(function, sizes[index], own, in_turns(function, sizes[index], dense))
    return function


def _places(expression: Expression, assign: Assign) -> list[tuple[Access, int | None]]:
    """Each access of `assign`, whose names may differ, and the position of its operand in
    `expression.words`; None for a pattern, which has no data."""
    asked = expression.assign
    assert asked is not None
    numbers = dict(zip(operand_names(), range(len(expression.words)), strict=False))
    names = {
        own.tensor: numbers.get(access.tensor)
        for own, access in zip(read_by(assign), read_by(asked), strict=True)
    }
    return [(access, names[access.tensor]) for access in assign.accesses]


def _coordinate_lengths(format: Format, index_shapes: Sequence[tuple]) -> list[int]:
    left, found = iter(index_shapes), []
    for count in arrays_per_level(format):
        arrays = [next(left) for _ in range(count)]
        found += [shape[0] for shape in arrays[-1:]]
    return found


def inputs_of(expression: Expression, assign: Assign, operands: Sequence) -> list:
    """The operands in the order of the function's inputs; index arrays come directly before the
    sparse operand's values."""
    count = len(expression.words)
    found: list = []
    for access, place in _places(expression, assign):
        if access == assign.sparse:
            found += operands[count:]
        if place is not None:
            found.append(operands[place])
    return found


def cpu_loops(*operands: Any, expression: Expression, schedule: LoopSchedule) -> jax.Array:
    """The expression on the CPU: a custom call that runs machine code compiled while lowering."""
    dtype = operands[0].dtype
    shapes = [x.shape for x in operands[len(expression.words) :]]
    function = function_of(expression, schedule, shapes, dtype)
    (output,) = function.outputs
    keep_chosen(_described(schedule.expression), schedule, False, lambda: print_c(function))
    call = jax.ffi.ffi_call(
        llvm.TARGET,
        jax.ShapeDtypeStruct(expression.shape(expression.output), output.dtype),
    )
    attributes = llvm.call_attributes(function, work=_products(expression))
    given = inputs_of(expression, schedule.expression, operands)
    if not expression.repeats:  # nobody has looked at these arrays in this program
        index_arrays = operands[len(expression.words) :]
        given.append(einsum_unchecked.held_on_cpu(index_arrays, expression, function))
    return call(*given, **attributes).astype(dtype)


def _products(expression: Expression) -> int:
    """The number of multiply-adds: entries times the sizes of all indices that the sparse operand
    lacks, but at least 16 for each entry, which costs loads of its coordinates and of the rows that
    they name however little is multiplied there (cpu/spmm/spmm_ffi.cc)."""
    sizes = dict(expression.sizes)
    own = {ENTRY, *expression.sparse}
    each = math.prod(n for index, n in sizes.items() if index not in own)
    return sizes[ENTRY] * max(each, 16)


def cuda_lowering(
    ctx: Any, operands: Sequence, *, expression: Expression, schedule: LoopSchedule
) -> Any:
    """One launch of a CUDA kernel that is printed for the expression."""
    avals, dtype = ctx.avals_in, ctx.avals_out[0].dtype
    shapes = [aval.shape for aval in avals[len(expression.words) :]]
    function = function_of(expression, schedule, shapes, dtype)
    keep_chosen(_described(schedule.expression), schedule, False, lambda: print_c(function))
    given, avals = (inputs_of(expression, schedule.expression, x) for x in (operands, avals))
    return launched(ctx, function, given, avals)


def launched(ctx: Any, function: Function, given: Sequence, avals: Sequence) -> list:
    """The launch of a function's kernel for inputs that are lowered already and have these avals.

    The result may be padded (`padded_sizes`), begin with an initial value (`initial_values`), and
    have the accumulator's dtype; it is sliced and cast afterwards.
    """
    (out,), given, avals = ctx.avals_out, list(given), list(avals)
    (output,), (padded,) = function.outputs, padded_sizes(function)
    shape = out.shape if padded == output.size else (padded,)
    result = out.update(dtype=jnp.dtype(output.dtype), shape=shape)
    for fill in initial_values(function).values():
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
    if (result.dtype, result.shape) == (out.dtype, out.shape):
        return [found]

    def stored(x: Any) -> Any:
        return x.reshape(-1)[: output.size].reshape(out.shape).astype(out.dtype)

    lowered: list = jax_lowering(ctx, stored, [found], [result])
    return lowered


@cache
def warn_of_plain(op: str, why: str) -> None:
    """Once for each reason."""
    warnings.warn(f"{why}; {op} runs in plain JAX meanwhile", RuntimeWarning, stacklevel=2)


def default_schedule(
    expression: Expression, dtype: Any, index_shapes: Sequence[tuple] = ()
) -> LoopSchedule:
    """The schedule that the CPU compiles where the caller gives none.

    Raises:
      NotImplementedError: there is none, and plain JAX runs; the message says why.
    """
    assign = _compiled(expression, dtype)
    if not llvm.available():
        raise NotImplementedError("llvmlite is not installed: pip install 'sgap_jax[compiler]'")
    if assign.output.format is not None:
        return presets.cpu(assign)  # parallel over fibers or entries: more of them than slices
    slices = dict(expression.sizes)[expression.sparse[expression.format.modes[0]]]
    schedule = presets.cpu(assign, rows=min(16, max(1, slices // _TASKS)))
    if expression.repeats:
        try:  # where coordinates repeat, two threads may write one element
            function_of(expression, schedule, index_shapes, dtype)
        except ScheduleError as error:
            raise NotImplementedError(str(error)) from error
    return schedule


def default_on_cuda(
    expression: Expression, dtype: Any, index_shapes: Sequence[tuple]
) -> LoopSchedule:
    """The schedule that CUDA compiles where the caller gives none.

    Raises:
      NotImplementedError: there is none, and plain JAX runs; the message says why.
    """
    assign = _compiled(expression, dtype)
    lowered = partial(function_of, expression, index_shapes=index_shapes, dtype=dtype)
    return presets_cuda.first(assign, dict(expression.of_one().sizes), lowered)


def _compiled(expression: Expression, dtype: Any) -> Assign:
    """The expression in index notation; NotImplementedError where no loops are compiled for it."""
    if expression.assign is None:
        raise NotImplementedError(
            "an operand has an axis of entries or fibers beside others, or no operand has an index "
            "of the result; loops are of other expressions"
        )
    if jnp.dtype(dtype).name not in LOOP_DTYPES:
        known = ", ".join(LOOP_DTYPES)
        raise NotImplementedError(f"loops are compiled for {known}, got {jnp.dtype(dtype)}")
    return expression.assign


def explain_default(
    expression: Expression, dtype: Any, index_shapes: Sequence[tuple], platform: str
) -> str:
    """The default schedule for "cpu" or "cuda", and its loops; or why it is plain JAX."""
    choose = default_schedule if platform == "cpu" else default_on_cuda
    try:
        schedule = choose(expression, dtype, index_shapes)
    except NotImplementedError as error:
        return f"plain JAX: {error}"
    return f"{schedule}\n{print_c(function_of(expression, schedule, index_shapes, dtype))}"


def needs_order(
    expression: Expression, schedule: LoopSchedule, index_shapes: Sequence[tuple], dtype: Any
) -> bool:
    """Whether the loops of a schedule need sorted coordinates."""
    return einsum_unchecked.needs_order(function_of(expression, schedule, index_shapes, dtype))
