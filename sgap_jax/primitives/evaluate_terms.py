"""The primitive of `evaluate`: terms over sparse and dense operands, by merge loops or plain JAX.

Its parameter is an `Assign`. Derivatives are expressions again: a tangent is the sum of the terms
with the operand's tangent in its place, a cotangent that of the terms with the result's cotangent
there, at the entries of a sparse operand (notation/derivatives.py). So the set is closed, to any
order, and nothing dense is formed for a sparse operand's derivative.

Merge loops trust index arrays, and where these were made under jit nobody has checked them: the
program does when it runs, and plain JAX, which takes any, runs where they are not valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.compiler import presets
from sgap_jax.compiler.llvm import machine_code as llvm
from sgap_jax.compiler.loop_ir.loopir import Function
from sgap_jax.compiler.loop_ir.print_c import print_c
from sgap_jax.compiler.lowering.lower import lower
from sgap_jax.compiler.lowering.storage import capacities
from sgap_jax.compiler.notation.derivatives import gradient_terms, pattern_of, same
from sgap_jax.compiler.notation.derivatives import operands as read_by
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar, Term
from sgap_jax.compiler.notation.parse import expression_of
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR, Dense, Format
from sgap_jax.primitives._define import (
    accumulator,
    bind,
    define,
    derived,
    is_linear_operand,
    jax_lowering,
    out_aval,
)
from sgap_jax.primitives._partition import Axes
from sgap_jax.primitives.einsum import einsum
from sgap_jax.primitives.einsum_expression import arrays_per_level
from sgap_jax.primitives.einsum_loops import LOOP_DTYPES
from sgap_jax.primitives.einsum_unchecked import levels_hold, stored_levels
from sgap_jax.schedules.schedule import ScheduleError
from sgap_jax.schedules.select import keep_chosen

# About the least number of tasks that the coordinates of the outermost index are divided into, and
# the most coordinates of a task.
_TASKS, _ROWS = 16, 16

# Elements of a workspace that are cleared in the time of one step of a merge: 100 to 190 (A A with
# 8 entries a row of 20,000, and 4 of 100,000; float32, Zen 5, two threads).
_CLEARED = 64


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
        return (_room(output.format, self.shape(output), arrays)[-1],)


def stored(assign: Assign) -> tuple[Access, ...]:
    """The accesses that have a format."""
    return tuple(x for x in assign.accesses if x.format is not None)


def holder_of(assign: Assign) -> Access:
    """The operand whose structure a sparse output has."""
    found = assign.holder if assign.merges else assign.sparse
    assert found is not None
    return found


def _room(format: Format, shape: Sequence[int], arrays: Sequence[tuple]) -> tuple[int, ...]:
    """The number of positions that each level has memory for."""
    lengths = [level[-1].shape[0] for level in arrays if level]
    return capacities(format, [shape[mode] for mode in format.modes], lengths)


def terms_of(
    output: Access, terms: Sequence[Term], given: Operands, schedule: Any, dtype: Any
) -> Any:
    """The value of some terms, differentiable: dense, or the flat values of a sparse output. An
    index of the output that no term has is one along which all elements are the same."""
    there = {index for term in terms for factor in term.factors for index in factor.indices}
    kept = tuple(index for index in output.indices if index in there)
    assign = _expression(dataclasses.replace(output, indices=kept), terms, given)
    sparse = stored(assign)
    if not sparse:
        out = _plain(assign, given, dtype)
    else:
        numbers = dict.fromkeys(given.numbers[x.tensor] for x in sparse)
        places = {number: place for place, number in enumerate(numbers)}
        evaluation = Evaluation(
            assign,
            tuple((index.name, given.sizes[index]) for index in assign.indices),
            tuple((x.tensor, places[given.numbers[x.tensor]]) for x in sparse),
            given.checked,
        )
        data = [given.data[name] for name in evaluation.names]
        arrays = jax.tree.leaves([given.structures[number] for number in numbers])
        params = dict(evaluation=evaluation, schedule=schedule, dtype=jnp.dtype(dtype))
        out = bind(evaluate_p, *data, *arrays, **params)
    if kept == output.indices:
        return out
    axes = [n for n, index in enumerate(output.indices) if index not in there]
    return jnp.broadcast_to(jnp.expand_dims(out, axes), [given.sizes[i] for i in output.indices])


def _expression(output: Access, terms: Sequence[Term], given: Operands) -> Assign:
    """The terms as an expression, without patterns of a structure that another factor has at the
    same indices. A sparse output has its structure of a factor of every term, which comes first."""
    few = [_without_repeats(term, given.numbers) for term in terms]
    if output.format is None:
        return expression_of(output, few)
    own = _place(output, given.numbers)
    for every in (few, list(terms)):
        first, *others = (term.factors for term in every)
        shared = [x for x in first if all(x in factors for factors in others)]
        holders = [x for x in shared if _place(x, given.numbers) == own]
        if holders:
            return expression_of(output, [_begun(term, holders[0]) for term in every])
    raise AssertionError(f"no factor of every term has the structure of {output}")


def _begun(term: Term, first: Any) -> Term:
    n = term.factors.index(first)
    return Term((first, *term.factors[:n], *term.factors[n + 1 :]), term.negative)


def _place(access: Any, numbers: Mapping[str, int]) -> tuple:
    """What two accesses have in common that store the same coordinates."""
    return access.format, access.indices, numbers.get(access.tensor)


def _without_repeats(term: Term, numbers: Mapping[str, int]) -> Term:
    found: list[Any] = []
    for n, x in enumerate(term.factors):
        others = (*found, *(y for y in term.factors[n + 1 :] if y != x))
        if not x.pattern or _place(x, numbers) not in [_place(y, numbers) for y in others]:
            found.append(x)
    return Term(tuple(found), term.negative)


# Plain JAX: of each term one operand stays sparse, the others are dense.


def plain(
    output: Access,
    terms: Sequence[Term],
    values: Mapping[str, Any],
    sizes: Mapping[IndexVar, int],
    dtype: Any,
    holder: Access | None = None,
) -> Any:
    """The value of some terms: dense, or the flat values at the entries of `holder`. `values` are
    SparseArrays in any format and dense arrays, by the name of the access."""
    wide, letters = accumulator(dtype), dict(zip(sizes, string.ascii_letters, strict=False))
    total: Any = None
    for term in terms:
        factors = [x for x in term.factors if isinstance(x, Access)]
        sparse = [x for x in factors if isinstance(values[x.tensor], SparseArray)]
        main = holder or max(sparse, key=lambda x: len(x.indices), default=None)
        place = None if main is None else factors.index(main)
        each = [values[x.tensor].astype(wide) for x in factors]
        each = [
            x.todense() if isinstance(x, SparseArray) and n != place else x
            for n, x in enumerate(each)
        ]
        own = {index for x in factors for index in x.indices}
        words = ["".join(letters[i] for i in x.indices) for x in factors]
        left = "".join(letters[i] for i in output.indices if i in own)
        subscripts = f"{','.join(words)}->{left}"
        if place is None:
            part: Any = jnp.einsum(
                subscripts, *each, precision="highest", preferred_element_type=wide
            )
        else:
            part = einsum(subscripts, *each)
        if holder is not None:
            part = part.values.reshape(-1)
        else:
            part = part.todense() if isinstance(part, SparseArray) else part
            axes = [n for n, index in enumerate(output.indices) if index not in own]
            part = jnp.expand_dims(part, axes)
        part = -part if term.negative else part
        total = part if total is None else total + part
    if holder is None:
        total = jnp.broadcast_to(total, [sizes[index] for index in output.indices])
    return total.astype(dtype)


def _plain(assign: Assign, given: Operands, dtype: Any) -> Any:
    values = {
        x.tensor: given.data[x.tensor] if x.format is None else _as_sparse(x, given, dtype)
        for x in assign.accesses
    }
    holder = None if assign.output.format is None else holder_of(assign)
    return plain(assign.output, assign.products, values, given.sizes, dtype, holder)


def _as_sparse(access: Access, given: Operands, dtype: Any) -> SparseArray:
    format, shape = access.format, tuple(given.sizes[index] for index in access.indices)
    assert format is not None
    arrays = given.structures[given.numbers[access.tensor]]
    if access.pattern:
        values: Any = jnp.ones(_room(format, shape, arrays)[-1], dtype)
    else:
        values = given.data[access.tensor]
    transposed = None
    if format.levels == CSR.levels:  # XLA drops it where no kernel reads it
        offsets, indices = arrays[1]
        transposed = structure.transpose_structure(offsets, indices, shape[format.modes[1]])
    fields = structure.as_fields(arrays, transposed, checked=given.checked)
    values = values.reshape(-1, *format.stored_shape(shape))
    return SparseArray(values, **fields, shape=shape, format=format)


# Merge loops.


def default_schedule(evaluation: Evaluation, given: Operands, dtype: Any) -> LoopSchedule:
    """The schedule that the CPU compiles where the caller gives none.

    Raises NotImplementedError or ScheduleError where there is none: the message says why.
    """
    assign = evaluation.assign
    if jnp.dtype(dtype).name not in LOOP_DTYPES:
        raise NotImplementedError(
            f"loops are compiled for {', '.join(LOOP_DTYPES)}, got {jnp.dtype(dtype)}"
        )
    if not llvm.available():
        raise NotImplementedError("llvmlite is not installed: pip install 'sgap_jax[compiler]'")
    sizes = dict(evaluation.sizes)
    outermost = LoopSchedule(assign).statement.body
    extent = sizes.get(getattr(outermost, "var", IndexVar("")).name, 1)
    rows = min(_ROWS, max(1, extent // _TASKS))
    if assign.output.format is not None and assign.merges and not assign.terms:
        with contextlib.suppress(ScheduleError):
            found = presets.cpu_workspace(assign, rows)
            if _fills_less(evaluation, given):
                return found
    return presets.cpu(assign, rows)


def _fills_less(evaluation: Evaluation, given: Operands) -> bool:
    """Whether a workspace for each row of the result costs less than merging the row with each row
    that is added to it: elements to clear, and entries to step over."""
    assign = evaluation.assign
    holder, sizes = holder_of(assign), dict(evaluation.sizes)

    def each(access: Access) -> float:
        """Entries of an operand for each coordinate of its outermost level."""
        assert access.format is not None
        arrays = given.structures[given.numbers[access.tensor]]
        outer = access.indices[access.format.modes[0]]
        shape = evaluation.shape(access)
        return float(_room(access.format, shape, arrays)[-1]) / max(sizes[outer.name], 1)

    first, *others = sorted(
        (x for x in evaluation.stored if x != holder),
        key=lambda x: assign.output.indices[0] not in x.indices,
    )
    steps = each(first) * (each(holder) + max((each(x) for x in others), default=0.0))
    assert holder.format is not None
    inner = assign.output.indices[holder.format.modes[-1]]
    return sizes[inner.name] < _CLEARED * steps


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
            room[own.tensor] = _room(access.format, evaluation.shape(access), arrays)
    positions: Any = room if assign.merges else next(iter(room.values()), ())
    return lower(schedule, sizes, positions, jnp.dtype(dtype).name, "evaluate")


def _pairs(assign: Assign, asked: Assign) -> Iterator[tuple[Access, Access]]:
    """The accesses of an expression beside those of an equal one with other names."""
    pairs = zip(read_by(assign), read_by(asked), strict=True)
    yield from ((assign.output, asked.output), *pairs)


def _loops(*operands: Any, evaluation: Evaluation, schedule: LoopSchedule, dtype: Any) -> jax.Array:
    """The expression on the CPU: a custom call that runs machine code compiled while lowering."""
    given = evaluation.given(operands)
    function = function_of(evaluation, schedule, given, dtype)
    (output,) = function.outputs
    arrays: dict[str, Any] = {}
    for own, access in list(_pairs(schedule.expression, evaluation.assign))[1:]:
        if access.format is not None:
            levels = given.structures[given.numbers[access.tensor]]
            for n, level in enumerate(levels, 1):
                if level:
                    arrays[f"{own.tensor}{n}_pos"], arrays[f"{own.tensor}{n}_crd"] = level
        if not access.pattern:
            values = "" if access.format is None else "_vals"
            arrays[own.tensor + values] = given.data[access.tensor]
    keep_chosen(str(evaluation.assign), schedule, False, lambda: print_c(function))
    shape = evaluation.out_shape(operands)
    call = jax.ffi.ffi_call(llvm.TARGET, jax.ShapeDtypeStruct(shape, output.dtype))
    out = call(*(arrays[x.name] for x in function.inputs), **llvm.call_attributes(function))
    return structure.varying_like(out.astype(dtype), *operands)


def _cpu(ctx: Any, *operands: Any, evaluation: Evaluation, schedule: Any, dtype: Any) -> Any:
    symbolic = any(export.is_symbolic_dim(n) for x in ctx.avals_in for n in x.shape)
    if schedule is None:
        if symbolic or _empty(evaluation):
            return None
        try:
            given = evaluation.given(ctx.avals_in)
            schedule = default_schedule(evaluation, given, dtype)
            function_of(evaluation, schedule, given, dtype)
        except (NotImplementedError, ScheduleError):
            return None
    if symbolic:
        raise NotImplementedError(
            "evaluate: loops are compiled for the program's sizes; export with concrete sizes, or "
            "pass schedule=None or Reference()"
        )
    params: dict = dict(evaluation=evaluation, schedule=schedule, dtype=dtype)
    if _empty(evaluation):
        function: Callable = functools.partial(_reference, **params)
    else:
        function = functools.partial(_loops if evaluation.checked else _guarded, **params)
    return jax_lowering(ctx, function, operands, ctx.avals_in)


def _empty(evaluation: Evaluation) -> bool:
    return 0 in dict(evaluation.sizes).values()


def _guarded(*operands: Any, evaluation: Evaluation, **params: Any) -> jax.Array:
    """Loops if the index arrays are valid, else plain JAX."""
    hold = jnp.asarray(True)
    structures = evaluation.given(operands).structures
    for (format, shape), arrays in zip(evaluation.layouts, structures, strict=True):
        levels = format.levels[: stored_levels(format)]
        orders = "".join("." if level == Dense() else "<" for level in levels)
        sizes = [shape[mode] for mode in format.modes[: len(levels)]]
        hold &= levels_hold(jax.tree.leaves(arrays), format, sizes, orders)
    run = functools.partial(_loops, evaluation=evaluation, **params)
    otherwise = functools.partial(_reference, evaluation=evaluation, **params)
    return jax.lax.cond(hold, run, otherwise, *operands)


def _reference(*operands: Any, evaluation: Evaluation, schedule: Any, dtype: Any) -> jax.Array:
    return _plain(evaluation.assign, evaluation.given(operands), dtype)


# Rules.


def _abstract_eval(*operands: Any, evaluation: Evaluation, schedule: Any, dtype: Any) -> Any:
    return out_aval(operands[0], evaluation.out_shape(operands), dtype)


def _axes(operands: Sequence, results: Sequence, params: dict) -> Axes:
    """No axis is split over devices: the operands of a call are gathered."""
    count = len(params["evaluation"].names)
    given, made = (
        ", ".join(" ".join(["_"] * len(aval.shape)) for aval in avals)
        for avals in (operands[:count], results)
    )
    return Axes.of(f"{given} -> {made}", operands, results)


def _inherited(schedule: Any, assign: Assign) -> Any:
    """The schedule of a derivative, among the caller's and those in its `with_derivatives`."""
    if schedule is None or not isinstance(schedule._inner, LoopSchedule):
        return derived(schedule)
    return schedule._around(schedule._inner.of(assign))


def _derivative(
    output: Access, terms: Sequence[Term], given: Operands, schedule: Any, dtype: Any
) -> Any:
    if schedule is not None:
        there = {index for term in terms for x in term.factors for index in x.indices}
        kept = tuple(index for index in output.indices if index in there)
        one = _expression(dataclasses.replace(output, indices=kept), terms, given)
        schedule = _inherited(schedule, one)
    return terms_of(output, terms, given, schedule, dtype)


def _names(assign: Assign) -> set[str]:
    return {x.tensor for x in (assign.output, *assign.accesses)}


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _jvp(
    primals: Sequence, tangents: Sequence, *, evaluation: Evaluation, schedule: Any, dtype: Any
) -> tuple:
    params = dict(evaluation=evaluation, schedule=schedule, dtype=dtype)
    assign, given = evaluation.assign, evaluation.given(primals)
    out, parts = bind(evaluate_p, *primals, **params), []
    every = {x.tensor: x for x in assign.accesses}
    for name, tangent in zip(evaluation.names, tangents, strict=False):
        if tangent is None:
            continue
        chosen = every[name]
        moved = dataclasses.replace(chosen, tensor=_fresh(f"d{name}", _names(assign)))
        terms = gradient_terms(assign.products, chosen, moved)
        if not any(chosen in term.factors for term in terms):  # the names, and a schedule, stay
            terms, moved = _in_place(assign, chosen), chosen
        own = given._replace(
            data={**given.data, moved.tensor: tangent},
            numbers={**given.numbers, moved.tensor: given.numbers.get(name, -1)},
        )
        parts.append(_derivative(assign.output, terms, own, schedule, dtype))
    return (out, *parts)


def _in_place(assign: Assign, chosen: Access) -> list[Term]:
    return [term for term in assign.products if chosen in term.factors]


def _transpose(
    cotangent: Any, *operands: Any, evaluation: Evaluation, schedule: Any, dtype: Any
) -> dict[int, Any]:
    assign, names = evaluation.assign, _names(evaluation.assign)
    output, given = assign.output, evaluation.given(operands)
    every, found = {x.tensor: x for x in assign.accesses}, {}
    for n, name in enumerate(evaluation.names):
        if not is_linear_operand(operands[n]):
            continue
        chosen = every[name]
        pattern = pattern_of(chosen, names)
        terms = gradient_terms(assign.products, chosen, output, pattern)
        data = {key: x for key, x in given.data.items() if not is_linear_operand(x)}
        numbers = dict(given.numbers)
        if pattern is not None:
            numbers[pattern.tensor] = numbers[name]
        own = given._replace(data={**data, output.tensor: cotangent}, numbers=numbers)
        found[n] = _derivative(chosen, terms, own, schedule, dtype)
    return found


def _batch(
    args: Sequence, dims: Sequence, *, evaluation: Evaluation, schedule: Any, dtype: Any
) -> tuple[Any, int]:
    """vmap: where dense operands alone are mapped they and the dense output have a new index;
    otherwise, and by a schedule, which is for one element, one element after the other."""
    assign, names = evaluation.assign, evaluation.names
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    params = dict(evaluation=evaluation, schedule=schedule, dtype=dtype)
    mapped = {n for n, d in zip(names, dims, strict=False) if d is not None}
    dense = {x.tensor for x in assign.accesses if x.format is None}
    others = any(d is not None for d in dims[len(names) :])
    if others or not mapped <= dense or schedule is not None or assign.output.format is not None:
        moved = {n: jnp.moveaxis(x, d, 0) for n, (x, d) in _numbered(args, dims)}

        def one(taken: dict) -> Any:
            return bind(evaluate_p, *(taken.get(n, x) for n, x in enumerate(args)), **params)

        return jax.lax.map(one, moved), 0
    index = IndexVar(_fresh("batch", {i.name for i in assign.indices} | _names(assign)))

    def wider(x: Any) -> Any:
        return dataclasses.replace(x, indices=(index, *x.indices)) if x.tensor in mapped else x

    terms = [Term(tuple(map(wider, t.factors)), t.negative) for t in assign.products]
    own = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    given = evaluation.given(own)
    given = given._replace(sizes={**given.sizes, index: size})
    output = dataclasses.replace(assign.output, indices=(index, *assign.output.indices))
    return terms_of(output, terms, given, schedule, dtype), 0


def _numbered(args: Sequence, dims: Sequence) -> Iterator[tuple[int, tuple[Any, int]]]:
    for n, (x, d) in enumerate(zip(args, dims, strict=True)):
        if d is not None:
            yield n, (x, d)


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


evaluate_p = define(
    "evaluate",
    data=lambda params: len(params["evaluation"].names),
    axes=_axes,
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
