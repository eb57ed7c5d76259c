"""einsum with a sparse operand, or several of the same indices: SpMM, SDDMM, TTV, TTM, MTTKRP and
other index expressions."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from sgap_jax.compiler.transform.schedule import LoopSchedule
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.fibers import used_nodes
from sgap_jax.formats.structure import positions
from sgap_jax.launch.nvrtc import CompilationError, NvrtcMissing
from sgap_jax.primitives import einsum_loops, einsum_unchecked
from sgap_jax.primitives._define import (
    batch_rule,
    bind,
    check_schedule,
    define,
    is_linear_operand,
    jax_lowering,
    out_aval,
)
from sgap_jax.primitives._partition import Axes
from sgap_jax.primitives.einsum_expression import (
    ENTRY,
    Expression,
    by_fibers,
    joined,
    multiplied,
    parse,
)
from sgap_jax.primitives.einsum_plain import plain, tangents_of_extremum
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.primitives.spmm import spmm, spmv
from sgap_jax.schedules import Reference, Schedule
from sgap_jax.schedules.schedule import KERNEL_DTYPES

REDUCTIONS = {"sum": "+", "max": "max", "min": "min"}


def einsum(
    subscripts: str,
    *operands: Any,
    reduction: Literal["sum", "max", "min"] = "sum",
    schedule: Schedule | str | None = None,
    fibers: bool = False,
) -> Any:
    """Einstein summation over tensors of which one is sparse, or several with the same indices are;
    or the maximum, or the minimum.

        einsum("ij,jk->ik", A, B)         C[i, k] = sum_j A[i, j] B[j, k]              (SpMM)
        einsum("ij,ik,jk->ij", A, X, Y)   C[i, j] = A[i, j] sum_k X[i, k] Y[j, k]      (SDDMM)
        einsum("ijk,jr,kr->ir", A, X, Y)  M[i, r] = sum_jk A[i, j, k] X[j, r] Y[k, r]  (MTTKRP)
        einsum("ijk,kr->ijr", A, X)       C[i, j, r] = sum_k A[i, j, k] X[k, r]        (TTM)
        einsum("ij,j->i", A, x, reduction="max")  y[i] = max over stored (i, j) of A[i, j] x[j]

    A reduction is over the stored entries, and over all of an index that the sparse operand lacks.

    Differentiable to any order in the values and in every dense operand, forward and reverse; under
    vmap a dense operand or the values get one more index (where the values have it, a schedule is
    given, or each entry has eight or more values of the result, loops are compiled for one element
    of the batch and run for each). Products that tie for a maximum or minimum share its gradient
    equally, as in `jnp.max` and `row_max` (`gspmm` gives it to the first); where the result is NaN,
    so is the gradient.

    Matrix products that `spmm`, `spmv` and `sddmm` compute run on their kernels. Other expressions,
    and all with a chain of transformations (`compiler.Schedule`) as their schedule, run as loops
    compiled for them: on the CPU where llvmlite is installed, on CUDA where NVRTC is
    (`presets_cuda.cuda` says which loops; not measured on a GPU yet).
    Otherwise plain JAX gathers the dense operands at the entries, multiplies and reduces: memory
    then holds a product for each entry and each index of the output that the sparse operand lacks,
    or, for a maximum or minimum and its derivative, every single product. Compiled loops hold none
    of these; their dtypes are floats, int8, uint8, int32 and int64.

    Args:
      subscripts: as for `jnp.einsum`, with no index twice in one operand. Without "->" the output
        has the indices that occur once, in alphabetical order. An ellipsis stands for any
        dimensions, of the same sizes in all operands that have one: "ij,...jk->...ik".
      operands: numeric arrays, one of them a SparseArray of any format. In vectors and
        blocks every element is a stored entry, zeros too. In sums several may be SparseArrays, of
        the same indices in the same order: they are multiplied first, as by `A * B`, in their own
        dtype, and the product counts as the one (inside jit where structures are traced: matrices).
      reduction: "sum", "max" or "min", over the indices that the output lacks.
      fibers: store the result only at the fibers of the outer levels of a CSF operand: the output
        lists their indices in the order of the levels, then indices that the operand lacks.
        Elements that no entry reaches are not stored.
      schedule: how spmm or sddmm runs, or a `compiler.Schedule` of this expression (names may
        differ), which may hold those of its gradients (`with_derivatives`). None chooses;
        `Reference()` is plain JAX.

    Returns:
      Where the output lists the sparse operand's indices in its own order, a SparseArray of the
      same structure; with `fibers` one of a Format such as (Compressed, Compressed, Dense), with
      values [fibers, R, ...]; else a dense array. The dtype is the promoted one of all operands.
      Floats are summed, and products compared, in float32 at least; integer sums and products wrap
      in their own dtype. On a GPU, sums other than those of spmm have no fixed order. Where no
      entry is stored, a dense output has 0 as the sum, -infinity as the maximum and infinity as the
      minimum, as `row_max` and `jax.ops.segment_max` do (`gspmm` has 0), or the least and greatest
      integer. NaN propagates.

    Raises:
      TypeError: schedule is not a Schedule.
      ScheduleError: a schedule of another expression or format, or whose loops would race.
      ImportError: a schedule for the CPU without llvmlite.
      ValueError: subscripts that do not fit the operands, no SparseArray, several of different
        indices or shapes or not summed, another reduction, a maximum or minimum of complex
        numbers, or operands of which all are bool.
      NotImplementedError: an index twice in one operand, ellipses of sizes that broadcast, a
        schedule without a kernel for the expression or the dtype, or fibers of a format or of an
        output that has none.

    Source: Kjolstad et al., OOPSLA 2017, section 2 (tensor index notation); Senanayake et al.,
    OOPSLA 2020, section 2.
    """
    schedule = check_schedule("einsum", schedule)
    asked = _Asked.of(subscripts, operands, reduction, fibers)
    A, dtype, expression = asked.A, asked.dtype, asked.expression
    inner = None if schedule is None else schedule._inner
    if asked.is_known and not isinstance(inner, LoopSchedule):
        found = _kernel(A, asked.sparse, asked.others, asked.output, schedule)
        if found is not None:
            return found[1]()
    if not (inner is None or isinstance(inner, Reference | LoopSchedule)):
        inner.check_expression(expression.assign)
        raise NotImplementedError(
            f"einsum: {subscripts!r} has no kernel that obeys {schedule}; schedule=None, "
            "Reference() and a chain of transformations (compiler.Schedule) run"
        )
    if isinstance(inner, LoopSchedule):
        einsum_loops.check_dtype(dtype)
        einsum_loops.check_loops(expression, inner)
    out = bind_einsum(
        A.values.reshape(-1).astype(dtype),
        *(x for _, x in asked.others),
        *jax.tree.leaves(A.index_arrays),
        expression=expression,
        schedule=schedule,
    )
    fibers, output = bool(expression.fiber[0]), asked.output
    if reduction != "sum" and (fibers or output == asked.sparse):
        out = _without_padding(out, A, expression)
    if fibers:
        format = expression.fiber_format(expression.output)
        arrays = A.index_arrays[: expression.fiber[1]]
        return SparseArray(out, arrays, None, expression.shape(output), format)
    return A.with_values(out.reshape(A.values.shape)) if output == asked.sparse else out


def told_of_einsum(
    platform: str,
    subscripts: str,
    *operands: Any,
    reduction: str = "sum",
    schedule: Any = None,
    fibers: bool = False,
) -> str:
    """What an `einsum` runs in which no schedule is chosen, as text: plain JAX, and why."""
    asked = _Asked.of(subscripts, operands, reduction, fibers)
    if _empty(asked.expression):
        return "einsum: plain JAX: an index has size 0"
    shapes = [x.shape for x in jax.tree.leaves(asked.A.index_arrays)]
    told = einsum_loops.explain_default(asked.expression, asked.dtype, shapes, platform)
    return f"einsum: {told}"


class _Asked(NamedTuple):
    """A call of einsum after its checks.

    Attributes:
      A, sparse: the sparse operand and its word.
      others: the words of the other operands, and the operands in `dtype`.
      is_known: `spmv`, `spmm` and `sddmm` have kernels for such values and such a reduction.
    """

    A: SparseArray
    sparse: str
    others: list[tuple[str, jax.Array]]
    output: str
    dtype: Any
    expression: Expression
    is_known: bool

    @classmethod
    def of(cls, subscripts: str, operands: Sequence, reduction: str, fibers: bool) -> "_Asked":
        fibers = check_flag(fibers, "fibers", "einsum")
        if not isinstance(reduction, str) or reduction not in REDUCTIONS:
            raise ValueError(
                f"einsum: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}"
            )
        if reduction == "sum":
            subscripts, operands = multiplied(subscripts, operands)
        place, factors, output = parse(subscripts, operands)
        A, sparse = operands[place], factors[place]
        arrays = [A.values if i == place else jnp.asarray(x) for i, x in enumerate(operands)]
        sizes: dict[str, int] = {}
        for i, (indices, array) in enumerate(zip(factors, arrays, strict=True)):
            for index, size in zip(indices, A.shape if i == place else array.shape, strict=True):
                if sizes.setdefault(index, size) != size:
                    raise ValueError(
                        f"einsum: index {index!r} of {subscripts!r} has sizes {sizes[index]} and "
                        f"{size}"
                    )
        dtype = jnp.result_type(*arrays)
        if dtype == jnp.bool_:
            raise ValueError("einsum: expected numbers, got bool")
        if reduction != "sum" and jnp.issubdtype(dtype, jnp.complexfloating):
            raise ValueError(f"einsum: {reduction} of {dtype}: complex numbers have no order")
        every = zip(factors, arrays, strict=True)
        others = [(f, x.astype(dtype)) for i, (f, x) in enumerate(every) if i != place]
        known = reduction == "sum" and not fibers and dtype.name in KERNEL_DTYPES
        expression = Expression(
            sparse,
            (ENTRY, *(f for f, _ in others)),
            ENTRY if output == sparse else output,
            tuple(sorted({**sizes, ENTRY: A.nnz}.items())),
            A.format,
            REDUCTIONS[reduction],
            checked=A.is_checked,
        )
        if fibers:
            expression = by_fibers(expression, A, output)
        return cls(A, sparse, others, output, dtype, expression, known)


def _without_padding(out: jax.Array, A: SparseArray, expression: Expression) -> jax.Array:
    """Sets a sparse result to zero in the padding, where a maximum or minimum is infinite; sums are
    zero there already."""
    depth = expression.fiber[1]
    if not expression.checked:
        stored = einsum_unchecked.stored(expression, jax.tree.leaves(A.index_arrays))
    elif depth:
        stored = positions(out.shape[0]) < used_nodes(A)[depth - 1]
    else:
        stored = A.coordinates()[0].reshape(-1) < A.shape[0]
    return jnp.where(stored.reshape(-1, *[1] * (out.ndim - 1)), out, 0)


def _kernel(
    A: SparseArray, sparse: str, dense: Sequence, output: str, schedule: Schedule | None
) -> tuple[str, Callable[[], Any]] | None:
    """Which of `spmv`, `spmm` and `sddmm` has the result, and what computes it so; None where the
    expression is none of these."""
    if len(sparse) != 2:
        return None
    if len(dense) == 1 and len(dense[0][0]) == 1:
        ((word, x),) = dense
        ends = {sparse[1] + sparse[0]: False, sparse: True}
        found = ends.get(word + output)
        if found is None:
            return None
        return "spmv", partial(spmv, A, x, transpose=found, schedule=schedule)
    if len(dense) == 1 and len(dense[0][0]) == len(output) == 2:
        ((word, x),) = dense
        column = set(word) - set(sparse)
        for transpose in (False, True):
            out, inner = (sparse[1], sparse[0]) if transpose else (sparse[0], sparse[1])
            if len(column) == 1 and set(word) == {inner, *column} and set(output) == {out, *column}:

                def product(transpose: bool = transpose, rows: str = inner, out: str = out) -> Any:
                    B = x if word[0] == rows else x.T
                    C = spmm(A, B, transpose=transpose, schedule=schedule)
                    return C if output[0] == out else C.T

                return "spmm", product
    if len(dense) == 2 and output == sparse and all(len(word) == 2 for word, _ in dense):
        (left, x), (right, y) = dense if sparse[0] in dense[0][0] else dense[::-1]
        feature = set(left) - {sparse[0]}
        if feature == set(right) - {sparse[1]} and feature.isdisjoint(sparse) and len(feature) == 1:

            def sampled() -> Any:
                X = x if left[0] == sparse[0] else x.T
                Y = y if right[0] == sparse[1] else y.T
                return sddmm(A, X, Y, weighted=True, schedule=schedule)

            return "sddmm", sampled
    return None


# Operands of the primitive: one data array for each of the expression's words, then the index
# arrays of the sparse operand, level by level. The axis "*" is flat, also for vectors and blocks,
# and data may be anything in the padding.


def bind_einsum(*operands: Any, expression: Expression, schedule: Any) -> Any:
    if not einsum_loops.has_chain(schedule):
        expression = joined(expression)
    primitive = einsum_p if expression.checked else einsum_unchecked_p
    return bind(primitive, *operands, expression=expression, schedule=schedule)


def _abstract_eval(*operands: Any, expression: Expression, schedule: Any) -> Any:
    words, (first, *_) = expression.words, operands
    for word, x in zip(words, operands[: len(words)], strict=True):
        assert x.shape == expression.shape(word) and x.dtype == first.dtype
    return out_aval(first, expression.shape(expression.output), first.dtype)


def _axes(operands: Any, results: Any, params: dict) -> Axes:
    """Every index that the sparse operand lacks is an axis; one that is reduced only in a sum."""
    expression = params["expression"]
    never = {*expression.sparse, ENTRY, expression.fiber[0]}
    if expression.reduction != "+":
        never |= {index for word in expression.words for index in word} - {*expression.output}

    def local(sizes: Any) -> dict:
        parts = tuple((index, sizes.get(index, size)) for index, size in expression.sizes)
        return params | {"expression": dataclasses.replace(expression, sizes=parts)}

    given, made = (
        ", ".join(" ".join("_" if index in never else index for index in word) for word in words)
        for words in (expression.words, (expression.output,))
    )
    return Axes.of(f"{given} -> {made}", operands, results, local=local)


def _symbolic(arrays: Sequence) -> bool:
    """Whether some size is a symbol of `jax.export`."""
    return any(export.is_symbolic_dim(n) for x in arrays for n in x.shape)


def _empty(expression: Expression) -> bool:
    """Whether an index has size zero."""
    return 0 in dict(expression.sizes).values()


def _cpu(ctx: Any, *operands: Any, expression: Expression, schedule: Any) -> Any:
    symbolic = _symbolic(ctx.avals_in)
    if schedule is None and symbolic:
        return None
    if schedule is None:
        shapes = [aval.shape for aval in ctx.avals_in[len(expression.words) :]]
        try:
            schedule = einsum_loops.default_schedule(expression, ctx.avals_out[0].dtype, shapes)
        except NotImplementedError:
            return None
    if symbolic:
        raise NotImplementedError(
            "einsum: loops are compiled for the program's sizes; export with concrete sizes, or "
            "pass schedule=None or Reference()"
        )
    if _empty(expression):
        function = partial(plain, expression=expression, schedule=schedule)
    else:
        function = partial(einsum_loops.cpu_loops, expression=expression, schedule=schedule)
    return jax_lowering(ctx, function, operands, ctx.avals_in)


def _cuda(ctx: Any, *operands: Any, expression: Expression, schedule: Any) -> Any:
    if schedule is None:
        return _cuda_default(ctx, *operands, expression=expression)
    if _empty(expression):
        function = partial(plain, expression=expression, schedule=schedule)
        return jax_lowering(ctx, function, operands, ctx.avals_in)
    return einsum_loops.cuda_lowering(ctx, operands, expression=expression, schedule=schedule)


def _cuda_default(ctx: Any, *operands: Any, expression: Expression) -> Any:
    """The loops that are chosen for a call without a schedule; None for plain JAX."""
    if _symbolic(ctx.avals_in) or _empty(expression):
        return None
    shapes = [aval.shape for aval in ctx.avals_in[len(expression.words) :]]
    try:
        found = einsum_loops.default_on_cuda(expression, ctx.avals_out[0].dtype, shapes)
    except NotImplementedError:
        return None
    try:
        return einsum_loops.cuda_lowering(ctx, operands, expression=expression, schedule=found)
    except (NvrtcMissing, CompilationError, NotImplementedError) as error:
        einsum_loops.warn_of_plain("einsum", str(error).splitlines()[0])
        return None


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    if params["expression"].reduction != "+":
        out = bind_einsum(*primals, **params)
        if all(t is None for t in tangents):
            return (out,)
        return out, *tangents_of_extremum(bind_einsum, primals, tangents, **params)
    # The product rule: a sum over the factors, each replaced by its tangent. The operands of
    # `attained` have no tangents: whether a product attains an extremum is a step function of them.
    factors = tangents[: len(params["expression"].factors)]
    terms = [
        None if t is None else bind_einsum(*primals[:i], t, *primals[i + 1 :], **params)
        for i, t in enumerate(factors)
    ]
    return bind_einsum(*primals, **params), *terms


def _transpose(
    cotangent: Any, *operands: Any, expression: Expression, schedule: Any
) -> tuple[int, Any]:
    # The linear factor and the output change places.
    assert expression.reduction == "+"
    linear = next(i for i, x in enumerate(operands) if is_linear_operand(x))
    factors = list(expression.factors)
    output, factors[linear] = factors[linear], expression.output
    swapped = dataclasses.replace(expression, factors=tuple(factors), output=output)
    given = (*operands[:linear], cotangent, *operands[linear + 1 :])
    chain = einsum_loops.inherited(schedule, swapped)
    return linear, bind_einsum(*given, expression=swapped, schedule=chain)


def _batch(args: Any, dims: Any, *, expression: Expression, schedule: Any) -> tuple[Any, Any]:
    """vmap: a new index for the mapped operands and the output."""
    count, words = len(expression.words), expression.words
    if any(d is not None for d in dims[count:]):
        primitive = einsum_p if expression.checked else einsum_unchecked_p
        return batch_rule(primitive, count, args, dims, expression=expression, schedule=schedule)
    index = expression.fresh()
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    wide = [word if d is None else index + word for word, d in zip(words, dims, strict=False)]
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    wider = dataclasses.replace(
        expression,
        factors=tuple(wide[: len(expression.factors)]),
        attained=tuple(wide[len(expression.factors) :]),
        output=index + expression.output,
        sizes=tuple(sorted([*expression.sizes, (index, size)])),
        batch=index + expression.batch,
    )
    return bind_einsum(*moved, expression=wider, schedule=schedule), 0


einsum_p = define(
    "einsum",
    data=lambda params: len(params["expression"].words),
    axes=_axes,
    abstract_eval=_abstract_eval,
    reference=plain,
    cpu=_cpu,
    cuda=_cuda,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)


def _unchecked(*operands: Any, expression: Expression, schedule: Any) -> Any:
    """einsum_p over unchecked index arrays: compiled loops get them valid (`bounded`), plain JAX
    takes them unchanged."""
    chain, dtype = einsum_loops.has_chain(schedule), operands[0].dtype
    in_plain = partial(plain, expression=expression, schedule=schedule)
    trusted = einsum_unchecked.trusted(expression)
    shapes = [x.shape for x in operands[len(expression.words) :]]
    sized = not _symbolic(operands) and not _empty(expression)
    run = partial(bind_einsum, expression=trusted, schedule=schedule)
    if chain and not sized:
        return run(*operands)
    order_of = partial(einsum_loops.needs_order, trusted, index_shapes=shapes, dtype=dtype)
    bounded = partial(einsum_unchecked.bounded, expression=expression, run=run)
    if chain:
        return bounded(*operands, in_order=order_of(schedule._inner))
    on_cpu = on_cuda = in_plain
    on_host = schedule is not None and schedule._host_launches() is not None
    if sized and schedule is None:
        with contextlib.suppress(NotImplementedError):
            einsum_loops.default_schedule(trusted, dtype, shapes)
            on_cpu = bounded
    if sized and (schedule is None or on_host):
        with contextlib.suppress(NotImplementedError):
            found = einsum_loops.default_on_cuda(trusted, dtype, shapes)
            on_cuda = partial(bounded, in_order=order_of(found))
    if on_host:
        return on_cuda(*operands)
    return jax.lax.platform_dependent(*operands, cpu=on_cpu, cuda=on_cuda, default=in_plain)


einsum_unchecked_p = define(
    "einsum_unchecked",
    data=lambda params: len(params["expression"].words),
    axes=_axes,
    abstract_eval=_abstract_eval,
    reference=_unchecked,
    cpu=None,
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
