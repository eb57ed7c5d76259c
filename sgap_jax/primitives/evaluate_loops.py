"""The loops of `evaluate`: its expression and operands as one value, and what the CPU compiles or
CUDA launches for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sgap_jax.compiler import presets, presets_cuda
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import Function
from sgap_jax.compiler.loop_ir.print_c import print_c
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import capacities
from sgap_jax.compiler.notation.derivatives import operands as read_by
from sgap_jax.compiler.notation.derivatives import same
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats import structure
from sgap_jax.formats.levels import Format
from sgap_jax.primitives.einsum_expression import arrays_per_level
from sgap_jax.primitives.einsum_loops import LOOP_DTYPES, launched
from sgap_jax.schedules.schedule import ScheduleError
from sgap_jax.schedules.select import keep_chosen

# About the least number of tasks that the coordinates of the outermost index are divided into, and
# the most coordinates of a task.
_TASKS, _ROWS = 16, 16

# Elements that a workspace for a row may have in any case: those that a row does not reach cost
# nothing, but what is scattered over more than the caches hold does.
_NEAR = 1 << 20
# Beyond that, elements for each step that a merge would take.
_SCATTERED = 64


class Operands(NamedTuple):
    """What the accesses of an expression read.

    Attributes:
      data: by the name of an access, a dense array, or the flat values of a sparse operand. A
        pattern has none.
      structures: index arrays, level by level. Several accesses may share a structure.
      numbers: by the name of a sparse access, or of a sparse output, the place of its structure in
        `structures`.
      sizes: of each index.
      checked: whether somebody has validated all structures.
    """

    data: Mapping[str, Any]
    structures: Sequence[tuple]
    numbers: Mapping[str, int]
    sizes: Mapping[IndexVar, int]
    checked: bool


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The static parameter of the primitive: an expression and what its operands are.

    Attributes:
      assign: the expression. A sparse output has the structure of a factor of every term.
      sizes: (name, size) of each index.
      numbers: (name, number) of the structure of each sparse access.
      checked: as of `Operands`.
    """

    assign: Assign
    sizes: tuple[tuple[str, int], ...]
    numbers: tuple[tuple[str, int], ...]
    checked: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the data operands, in order."""
        return tuple(x.tensor for x in self.assign.accesses if not x.pattern)

    @property
    def stored(self) -> tuple[Access, ...]:
        return stored(self.assign)

    @property
    def layouts(self) -> list[tuple[Format, tuple[int, ...]]]:
        """The format and the shape of each structure."""
        numbers = dict(self.numbers)
        found = {numbers[x.tensor]: (x.format, self.shape(x)) for x in self.stored}
        return [found[n] for n in range(len(found))]  # type: ignore[misc]

    def shape(self, access: Access) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[index.name] for index in access.indices)

    def given(self, operands: Sequence) -> Operands:
        """The primitive's operands by what they are."""
        left, structures = iter(operands[len(self.names) :]), []
        for format, _ in self.layouts:
            counts = arrays_per_level(format)
            structures.append(tuple(tuple(next(left) for _ in range(n)) for n in counts))
        data = dict(zip(self.names, operands, strict=False))
        sizes, numbers = {IndexVar(name): n for name, n in self.sizes}, dict(self.numbers)
        if self.assign.output.format is not None:
            numbers[self.assign.output.tensor] = numbers[holder_of(self.assign).tensor]
        return Operands(data, structures, numbers, sizes, self.checked)

    def out_shape(self, operands: Sequence) -> tuple[int, ...]:
        """That of the dense result, or of the flat values of a sparse one."""
        output = self.assign.output
        if output.format is None:
            return self.shape(output)
        given = self.given(operands)
        arrays = given.structures[given.numbers[output.tensor]]
        return (room_of(output.format, self.shape(output), arrays)[-1],)


def stored(assign: Assign) -> tuple[Access, ...]:
    """The accesses that have a format."""
    return tuple(x for x in assign.accesses if x.format is not None)


def holder_of(assign: Assign) -> Access:
    """The operand whose structure a sparse output has."""
    found = assign.holder if assign.merges else assign.sparse
    assert found is not None
    return found


def room_of(format: Format, shape: Sequence[int], arrays: Sequence[tuple]) -> tuple[int, ...]:
    """The number of positions that each level has memory for."""
    lengths = [level[-1].shape[0] for level in arrays if level]
    return capacities(format, [shape[mode] for mode in format.modes], lengths)


def default_schedule(evaluation: Evaluation, given: Operands, dtype: Any) -> LoopSchedule:
    """The schedule that the CPU compiles where the caller gives none.

    Raises NotImplementedError or ScheduleError where there is none: the message says why.
    """
    assign = evaluation.assign
    _require_dtype(dtype)
    if not llvm.available():
        raise NotImplementedError("llvmlite is not installed: pip install 'sgap_jax[compiler]'")
    sizes = dict(evaluation.sizes)
    outermost = LoopSchedule(assign).statement.body
    extent = sizes.get(getattr(outermost, "var", IndexVar("")).name, 1)
    rows = min(_ROWS, max(1, extent // _TASKS))
    if assign.output.format is not None and assign.merges and not assign.terms:
        with contextlib.suppress(ScheduleError):
            found = presets.cpu_workspace(assign, rows)
            if _scatters_less(evaluation, given):
                return found
    return presets.cpu(assign, rows)


def _scatters_less(evaluation: Evaluation, given: Operands) -> bool:
    """Whether a workspace for each row of the result costs less than merging the row with each row
    that is added to it: elements far from each other, and entries to step over."""
    assign = evaluation.assign
    holder, sizes = holder_of(assign), dict(evaluation.sizes)

    def each(access: Access) -> float:
        """Entries of an operand for each coordinate of its outermost level."""
        assert access.format is not None
        arrays = given.structures[given.numbers[access.tensor]]
        outer = access.indices[access.format.modes[0]]
        shape = evaluation.shape(access)
        return float(room_of(access.format, shape, arrays)[-1]) / max(sizes[outer.name], 1)

    first, *others = sorted(
        (x for x in evaluation.stored if x != holder),
        key=lambda x: assign.output.indices[0] not in x.indices,
    )
    steps = each(first) * (each(holder) + max((each(x) for x in others), default=0.0))
    assert holder.format is not None
    inner = assign.output.indices[holder.format.modes[-1]]
    return sizes[inner.name] <= max(_NEAR, _SCATTERED * steps)


def function_of(
    evaluation: Evaluation, schedule: LoopSchedule, given: Operands, dtype: Any
) -> Function:
    """The loops of a schedule, whose expression may have other names, for these operands."""
    assign = schedule.expression
    numbers = dict(evaluation.numbers)
    room = {}
    sizes: dict[str, int] = {}
    for own, access in _pairs(assign, evaluation.assign):
        sizes |= zip((i.name for i in own.indices), evaluation.shape(access), strict=True)
        if access.format is not None and access != evaluation.assign.output:
            arrays = given.structures[numbers[access.tensor]]
            room[own.tensor] = room_of(access.format, evaluation.shape(access), arrays)
    positions: Any = room if assign.merges else next(iter(room.values()), ())
    return lower(schedule, sizes, positions, jnp.dtype(dtype).name, "evaluate")


def _pairs(assign: Assign, asked: Assign) -> Iterator[tuple[Access, Access]]:
    """The accesses of an expression beside those of an equal one with other names."""
    pairs = zip(read_by(assign), read_by(asked), strict=True)
    yield from ((assign.output, asked.output), *pairs)


def cpu_loops(
    *operands: Any,
    evaluation: Evaluation,
    schedule: LoopSchedule,
    dtype: Any,
    hold: jax.Array | None = None,
) -> jax.Array:
    """The expression on the CPU: a custom call that runs machine code compiled while lowering.

    `hold`: whether the index arrays are valid; the call fails where they are not. None: they are.
    """
    given = evaluation.given(operands)
    function = function_of(evaluation, schedule, given, dtype)
    (output,) = function.outputs
    arrays = arrays_of(evaluation, schedule, operands)
    keep_chosen(str(evaluation.assign), schedule, False, lambda: print_c(function))
    shape = evaluation.out_shape(operands)
    call = jax.ffi.ffi_call(llvm.TARGET, jax.ShapeDtypeStruct(shape, output.dtype))
    inputs = [*(arrays[x.name] for x in function.inputs), *([] if hold is None else [hold])]
    out = call(*inputs, **llvm.call_attributes(function))
    return structure.varying_like(out.astype(dtype), *operands)


def arrays_of(evaluation: Evaluation, schedule: LoopSchedule, operands: Sequence) -> dict[str, Any]:
    """The operands, or what stands for them, by the names that they have in a schedule's loops."""
    given, arrays = evaluation.given(operands), dict[str, Any]()
    for own, access in list(_pairs(schedule.expression, evaluation.assign))[1:]:
        if access.format is not None:
            levels = given.structures[given.numbers[access.tensor]]
            for n, level in enumerate(levels, 1):
                kinds = ("pos", "crd")[-len(level) :] if level else ()  # a singleton: "crd" alone
                names = (f"{own.tensor}{n}_{kind}" for kind in kinds)
                arrays |= zip(names, level, strict=True)
        if not access.pattern:
            values = "" if access.format is None else "_vals"
            arrays[own.tensor + values] = given.data[access.tensor]
    return arrays


def default_on_cuda(evaluation: Evaluation, operands: Sequence, dtype: Any) -> LoopSchedule:
    """The schedule that CUDA compiles where the caller gives none.

    Raises NotImplementedError or ScheduleError where there is none: the message says why.
    """
    _require_dtype(dtype)
    assign, sizes = evaluation.assign, dict(evaluation.sizes)
    if assign.merges:
        return presets_cuda.merged(assign, sizes)
    lowered = functools.partial(
        function_of, evaluation, given=evaluation.given(operands), dtype=dtype
    )
    return presets_cuda.first(assign, sizes, lowered)


def _require_dtype(dtype: Any) -> None:
    if jnp.dtype(dtype).name not in LOOP_DTYPES:
        raise NotImplementedError(
            f"loops are compiled for {', '.join(LOOP_DTYPES)}, got {jnp.dtype(dtype)}"
        )


def cuda_lowering(
    ctx: Any, operands: Sequence, *, evaluation: Evaluation, schedule: LoopSchedule
) -> list:
    """One launch of a CUDA kernel that is printed for the expression."""
    given, dtype = evaluation.given(ctx.avals_in), ctx.avals_out[0].dtype
    function = function_of(evaluation, schedule, given, dtype)
    keep_chosen(str(evaluation.assign), schedule, False, lambda: print_c(function))
    values, avals = (
        [arrays_of(evaluation, schedule, x)[array.name] for array in function.inputs]
        for x in (operands, ctx.avals_in)
    )
    return launched(ctx, function, values, avals)


def check_loops(assign: Assign, schedule: Any, dtype: Any) -> None:
    """Raises unless a schedule is for this expression, and loops are compiled for this dtype."""
    inner = schedule._inner
    if not isinstance(inner, LoopSchedule):
        return
    if not same(assign, inner.expression):
        raise ScheduleError(
            f"evaluate: the schedule is for {described(inner.expression)}, got {described(assign)}"
        )
    if jnp.dtype(dtype).name not in LOOP_DTYPES:
        raise NotImplementedError(
            f"evaluate: loops are compiled for {', '.join(LOOP_DTYPES)}, got {jnp.dtype(dtype)}; "
            "schedule=None or Reference() runs"
        )


def described(assign: Assign) -> str:
    every = [x for x in (*assign.accesses, assign.output) if x.format is not None]
    formats = ", ".join(f"{x.tensor} in {x.format}" for x in every)
    return f"{assign} with {formats}" if formats else str(assign)
