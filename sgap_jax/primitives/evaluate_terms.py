"""The primitive of `evaluate`: terms over sparse and dense operands, by merge loops or plain JAX.

Its parameter is an `Assign`. Derivatives are expressions again: a tangent is the sum of the terms
with the operand's tangent in its place, a cotangent that of the terms with the result's cotangent
there, at the entries of a sparse operand (notation/derivatives.py). So the set is closed, to any
order, and nothing dense is formed for a sparse operand's derivative.

Merge loops trust index arrays, so the program looks at them when it runs. Where they are not valid
plain JAX, which takes any, runs for those that were made under jit; arrays that count as checked
have been changed, and the CPU refuses the call.
"""

from __future__ import annotations

import dataclasses
import functools
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.compiler.notation.derivatives import gradient_terms, pattern_of
from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar, Term
from sgap_jax.compiler.notation.parse import expression_of
from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import level_sizes
from sgap_jax.formats.levels import CSR, Dense
from sgap_jax.launch.nvrtc import CompilationError, NvrtcMissing
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
from sgap_jax.primitives.einsum_loops import warn_of_plain
from sgap_jax.primitives.einsum_unchecked import levels_hold, stored_levels
from sgap_jax.primitives.evaluate_loops import (
    Evaluation,
    Operands,
    cpu_loops,
    cuda_lowering,
    default_on_cuda,
    default_schedule,
    function_of,
    holder_of,
    room_of,
    stored,
)
from sgap_jax.schedules import Reference
from sgap_jax.schedules.schedule import ScheduleError


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


def letters_of(indices: Collection[IndexVar]) -> dict[IndexVar, str]:
    """A letter for each index, in subscripts of einsum."""
    if len(indices) > len(string.ascii_letters):
        raise NotImplementedError(
            f"evaluate: einsum has {len(string.ascii_letters)} letters for indices, and the "
            f"expression has {len(indices)}; multiply some of its operands first"
        )
    return dict(zip(indices, string.ascii_letters, strict=False))


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
    wide, letters = accumulator(dtype), letters_of(sizes)
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
        values: Any = jnp.ones(room_of(format, shape, arrays)[-1], dtype)
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
        function = functools.partial(_looking if evaluation.checked else _guarded, **params)
    return jax_lowering(ctx, function, operands, ctx.avals_in)


def _cuda(ctx: Any, *operands: Any, evaluation: Evaluation, schedule: Any, dtype: Any) -> Any:
    if any(export.is_symbolic_dim(n) for x in ctx.avals_in for n in x.shape):
        return None
    if _empty(evaluation):
        plainly = functools.partial(_reference, evaluation=evaluation, schedule=None, dtype=dtype)
        return None if schedule is None else jax_lowering(ctx, plainly, operands, ctx.avals_in)
    if schedule is not None:
        return cuda_lowering(ctx, operands, evaluation=evaluation, schedule=schedule)
    try:
        chosen = default_on_cuda(evaluation, ctx.avals_in, dtype)
        function_of(evaluation, chosen, evaluation.given(ctx.avals_in), dtype)
    except (NotImplementedError, ScheduleError):
        return None
    try:
        return cuda_lowering(ctx, operands, evaluation=evaluation, schedule=chosen)
    except (NvrtcMissing, CompilationError, NotImplementedError) as error:
        warn_of_plain("evaluate", str(error).splitlines()[0])
        return None


def _compact(*operands: Any, evaluation: Evaluation, schedule: Any, dtype: Any) -> jax.Array:
    """The call on index arrays that nobody has checked, for other lowerings than the CPU's."""
    params = dict(evaluation=evaluation, schedule=schedule, dtype=dtype)
    otherwise = functools.partial(_reference, **params)
    if isinstance(schedule, Reference):
        return otherwise(*operands)
    trusted = dataclasses.replace(evaluation, checked=True)
    run = functools.partial(bind, evaluate_p, **params | {"evaluation": trusted})

    def either(*operands: Any) -> Any:
        return jax.lax.cond(_hold(evaluation, operands), run, otherwise, *operands)

    if schedule is None:
        return jax.lax.platform_dependent(*operands, cuda=either, default=otherwise)
    return either(*operands)


def _empty(evaluation: Evaluation) -> bool:
    return 0 in dict(evaluation.sizes).values()


def _looking(*operands: Any, evaluation: Evaluation, **params: Any) -> jax.Array:
    """Loops that refuse index arrays which are not valid."""
    hold = _hold(evaluation, operands, ordered=len(evaluation.stored) > 1)
    return cpu_loops(*operands, evaluation=evaluation, hold=hold, **params)


def _guarded(*operands: Any, evaluation: Evaluation, **params: Any) -> jax.Array:
    """Loops if the index arrays are valid, else plain JAX."""
    run = functools.partial(cpu_loops, evaluation=evaluation, **params)
    otherwise = functools.partial(_reference, evaluation=evaluation, **params)
    return jax.lax.cond(_hold(evaluation, operands), run, otherwise, *operands)


def _hold(evaluation: Evaluation, operands: Sequence, ordered: bool = True) -> jax.Array:
    """Whether the index arrays are valid. If not `ordered`, coordinates of the last level may have
    any order: loops with one sparse operand merge nothing, and go through them as they are."""
    hold = jnp.asarray(True)
    structures = evaluation.given(operands).structures
    for (format, shape), arrays in zip(evaluation.layouts, structures, strict=True):
        levels = format.levels[: stored_levels(format)]
        orders = "".join("." if level == Dense() else "<" for level in levels)
        if not ordered:
            orders = "." * len(levels) if format.is_coordinate else f"{orders[:-1]}."
        sizes = level_sizes(shape, format)[: len(levels)]
        hold &= levels_hold(jax.tree.leaves(arrays), format, sizes, orders)
    return hold


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


evaluate_p = define(
    "evaluate",
    data=lambda params: len(params["evaluation"].names),
    axes=_axes,
    abstract_eval=_abstract_eval,
    reference=_reference,
    cpu=_cpu,
    cuda=_cuda,
    compact=_compact,
    checked=lambda params: params["evaluation"].checked,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
