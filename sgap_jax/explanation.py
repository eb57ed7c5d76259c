"""`explain`: which schedules the sparse operations of a function run with, and why."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax

from sgap_jax.formats.array import SparseArray
from sgap_jax.launch import launch
from sgap_jax.primitives.einsum import einsum, told_of_einsum
from sgap_jax.primitives.spgemm import spgemm
from sgap_jax.schedules.problem import Problem
from sgap_jax.schedules.select import chosen, explain_choice
from sgap_jax.schedules.subwarp import BYTES
from sgap_jax.tuning import candidate_schedules

_OTHERS = 4  # candidates that are named


def explain(
    function: Callable, *args: Any, platform: Literal["cpu", "cuda"] | None = None, **kwargs: Any
) -> str:
    """The schedules that the sparse operations of a function run with, as text: of each call the
    schedule, the rule that chose it, sizes, the bytes of operands and results, other schedules to
    try, and the equivalent loops.

    The function is traced and lowered as `jax.jit` does, not compiled and not run. Of equal calls
    one is told; those of derivatives are calls too: `explain(jax.grad(loss), ...)`.

    Args:
      function: an operation such as `spmm` or `einsum`, or any function that `jax.jit` takes.
      args, kwargs: its arguments; arrays may be `jax.ShapeDtypeStruct`s. Those without arrays, such
        as the string of `einsum`, are constants.
      platform: "cpu" or "cuda", with a GPU here or not; None is the platform of JAX's default
        device. Without a GPU kernels are those of sm_80 and later.

    Raises:
      TypeError: no function. ValueError: another platform. Also what the function raises.
    """
    if not callable(function):
        raise TypeError(
            "explain: function: expected a function and then its operands, as in "
            f"explain(spmm, A, B), got {type(function).__name__}"
        )
    if platform is None:
        platform = "cuda" if jax.default_backend() in ("gpu", "cuda") else "cpu"
    if platform not in ("cpu", "cuda"):
        raise ValueError(f'explain: platform must be "cpu" or "cuda", got {platform!r}')
    # Sparse products of concrete structures make theirs outside of the trace.
    own = inspect.unwrap(function) in (inspect.unwrap(spgemm), operator.matmul)
    places = [i for i, x in enumerate(args) if _holds_arrays(x)]
    named = {name: x for name, x in kwargs.items() if _holds_arrays(x)}
    fixed = {i: args[i] for i in places if own and isinstance(args[i], SparseArray)}

    def of_arrays(arrays: list, named: dict) -> Any:
        given = list(args)
        for i, x in zip(places, arrays, strict=True):
            given[i] = fixed[i].with_values(x) if i in fixed else x
        return function(*given, **{**kwargs, **named})

    arrays = [fixed[i].values if i in fixed else args[i] for i in places]
    with launch.collected(), chosen() as calls:  # products are told while they are traced
        jax.jit(of_arrays).trace(arrays, named).lower(lowering_platforms=(platform,))
    if not calls and inspect.unwrap(function) is inspect.unwrap(einsum):
        return told_of_einsum(platform, *args, **kwargs)
    return "\n\n".join(_told(*call, loops) for call, loops in calls.items()) or (
        f"{_name(function)}: no call with a schedule on {platform}, but plain JAX or kernels "
        "without a choice"
    )


def explain_einsum(
    subscripts: str,
    *operands: Any,
    reduction: Literal["sum", "max", "min"] = "sum",
    fibers: bool = False,
    platform: Literal["cpu", "cuda"] = "cuda",
) -> str:
    """`explain(einsum, ...)`, by default for CUDA: the operation whose kernels this einsum has, or
    the schedule of its compiled loops and the loops, or plain JAX and why. Errors as there."""
    options: Any = dict(reduction=reduction, fibers=fibers)
    return explain(einsum, subscripts, *operands, platform=platform, **options)


def _holds_arrays(x: Any) -> bool:
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


def _name(function: Callable) -> str:
    return getattr(inspect.unwrap(function), "__name__", type(function).__name__)


def _told(call: Any, schedule: Any, is_default: bool, loops: str | None) -> str:
    if not isinstance(call, Problem):
        return f"{call}\n{schedule}\n{loops}"
    first, *rest = explain_choice(call).splitlines()
    if not is_default:
        rest = [f"rule:    the call names it; the default is {first}", schedule.explain(call)]
        first = str(schedule)
    lines = [f"{call.op}: {first}", rest[0]]
    if (least := _least_bytes(call)) is not None:
        lines.append(f"bytes:   {least:,} if operands and results pass once")
    others = [str(x) for x in candidate_schedules(call) if x != schedule]
    if others:
        more = f" and {len(others) - _OTHERS} more" if len(others) > _OTHERS else ""
        lines.append(f"others:  {'; '.join(others[:_OTHERS])}{more}: `tune` measures them")
    return "\n".join([*lines, *rest[1:]])


def _least_bytes(problem: Problem) -> int | None:
    """Bytes of values, index arrays, dense operands and results, each once; None where sizes are
    symbols or the operation's dense operands are not in the problem."""
    size, (m, k) = BYTES.get(problem.dtype), problem.shape
    if size is None or problem.symbolic:
        return None
    if problem.op in ("spmm", "gspmm"):
        dense = (m + k) * problem.n
    elif problem.op == "sddmm":
        dense = (m + k) * problem.n + problem.nnz
    elif problem.op == "attention":  # q and the result, k and v
        dense = 2 * (m + k) * problem.n - problem.nnz
    else:
        dense = problem.nnz if problem.op == "sparse_softmax" else m
    height, *width = problem.format.block_shape or (1,)
    indices = 4 * (problem.nnz // math.prod([height, *width]) - (-m // height) + 1)
    return problem.batch * (problem.nnz + dense) * size + indices
