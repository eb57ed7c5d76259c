"""`define` makes a JAX primitive of its rules; helpers that the rules of all primitives share.

A primitive's operands are data first, then index arrays. A data operand has one leading batch axis,
of size 1 or B; index arrays have none. Hence one batching rule (_batch.py) serves all primitives.
JAX's legacy modules (ad, batching, mlir, xla) are imported here and in _batch.py only.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from sgap_jax.formats import vectors
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_unbatched
from sgap_jax.formats.structure import (
    compacted,
    positions,
    segment_of_entry,
    unfolded,
    well_formed,
    well_formed_transpose,
)
from sgap_jax.launch import launch
from sgap_jax.primitives._batch import (
    as_cotangent,
    define_each,
    launched_on_host,
    plain_lowering,
    register_lowerings,
)
from sgap_jax.primitives._batch import batch_rule as batch_rule
from sgap_jax.primitives._batch import bind as bind
from sgap_jax.primitives._batch import ffi_lowering as ffi_lowering
from sgap_jax.primitives._batch import joint_batch as joint_batch
from sgap_jax.primitives._batch import launch_lowering as launch_lowering
from sgap_jax.primitives._batch import out_aval as out_aval
from sgap_jax.primitives._kept_lists import keeping, taken_off, takes_lists, without_lists
from sgap_jax.primitives._partition import Axes, typed
from sgap_jax.runtime import native as native  # registers the FFI targets
from sgap_jax.schedules import Problem, Reference, Schedule, ScheduleError
from sgap_jax.schedules.explain import dense_is_faster
from sgap_jax.schedules.families import failing, warn_once
from sgap_jax.schedules.schedule import KERNEL_DTYPES
from sgap_jax.schedules.select import default_schedule, keep_chosen

_S = TypeVar("_S", bound=Schedule)

_STRUCTURE = 5  # index arrays of a primitive that takes work lists: its last operands but these


def define(
    primitive: str | Primitive,
    *,
    data: int | Callable[[dict], int],
    axes: str | Callable[[Sequence, Sequence, dict], Axes],
    abstract_eval: Callable,
    reference: Callable,
    cpu: Callable | None,
    jvp: Callable,
    transpose: Callable | None,
    batch: Callable | None = None,
    cuda: Callable | None = None,
    entries: Callable | None = None,
    compact: Callable | None = None,
    checked: Callable[[dict], bool] = itemgetter("checked"),
    multiple_results: bool = False,
    lists: bool = False,
    whole_batch: bool = False,
) -> Primitive:
    """Makes a primitive of its rules, or registers the rules for an existing one.

    `data` is the number of data operands, which come before the index arrays. Where it depends on
    the parameters it is a function of them, and `batch` must be given.

    `axes` are those of the data operands and results, by which calls are split over devices:
    _partition.py has the notation. Where they depend on more than ranks it is a function of the
    avals of operands and results and the parameters.

    `reference` is plain JAX. `cpu` and `cuda` lower to kernels, and return None where there is none
    for the call. Without `cuda`, and on other platforms, the reference runs; without `cpu` it runs
    on every platform, and the operations that it calls get the schedule.
    `entries` rewrites a call on vectors (`vector_length`) as the same call on entries, for the
    reference and for calls without a kernel for vectors.
    `compact` rewrites a call on unchecked index arrays (`checked(parameters)` is false) as one on
    valid ones. The CPU's kernels check index arrays as they read them; all other lowerings need
    `compact`.
    With multiple results, only the first has a derivative unless `jvp` gives lists of tangents.
    `lists`: the primitive, or its derivatives, take work lists that a structure keeps
    (_kept_lists.py), of which the rules see nothing.
    `whole_batch`: the CPU's kernel for several structures takes data of which each element of their
    joint batch has its own, or all share one; not one for each structure.
    """
    primitive = Primitive(primitive) if isinstance(primitive, str) else primitive
    name = primitive.name
    primitive.multiple_results = multiple_results
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    if lists:
        takes_lists(primitive)
        abstract_eval, reference = without_lists(abstract_eval), without_lists(reference)
        entries, compact = (f if f is None else without_lists(f) for f in (entries, compact))

    def axes_of(operands: Sequence, results: Sequence, params: dict) -> Axes:
        if isinstance(axes, str):
            return Axes.of(axes, operands, results)
        operands, further, params = taken_off(operands, params)
        found: Axes = axes(operands, results, params)
        nothing = (((),) * len(x.shape) for x in further)
        return replace(found, operands=(*found.operands, *nothing))

    def sharded_eval(*avals: Any, **params: Any) -> Any:
        own = partial(axes_of, params=params)
        return typed(own, avals, abstract_eval(*avals, **params))

    primitive.def_abstract_eval(sharded_eval)

    def plain_rule(function: Callable, ctx: Any, *operands: Any, **params: Any) -> Any:
        count = data if isinstance(data, int) else data(params)

        def expanded(*operands: Any) -> Any:
            return function(*operands[:count], *unfolded(operands[count:]), **params)

        return plain_lowering(expanded, multiple_results, ctx, operands)

    reference_rule = partial(plain_rule, reference)

    def unchecked(params: dict) -> bool:
        return compact is not None and not checked(params)

    def rewrite(params: dict) -> Callable | None:
        """What computes a call for which there is no kernel, if it is not the reference."""
        if unchecked(params):
            return compact
        return None if entries is None or params["vector_length"] is None else entries

    def launches(ctx: Any, operands: Sequence, params: dict) -> Any:
        if cuda is None or unchecked(params) or isinstance(params["schedule"], Reference):
            return None
        own, lists, rest = taken_off(operands, params)
        ctx = ctx.replace(avals_in=ctx.avals_in[: len(own)])
        try:
            with keeping(own[-_STRUCTURE:], lists, params):
                return cuda(ctx, *own, **rest)
        except _KernelsFail:
            return None

    def own_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
        assert cpu is not None
        own, _, params = taken_off(operands, params)
        return cpu(ctx.replace(avals_in=ctx.avals_in[: len(own)]), *own, **params)

    def cpu_rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        schedule = params["schedule"]
        if schedule is not None and schedule._host_launches() is not None:
            lowered = launched_on_host(schedule, launches, ctx, operands, params)
            if lowered is not None:
                return lowered
            # The operations that it is made of instead have this schedule in their turn.
            rule = reference_rule if rewrite(params) is None else other_rule
            return rule(ctx, *operands, **params)
        if isinstance(schedule, Reference):
            return other_rule(ctx, *operands, **params)
        lowered = own_cpu(ctx, *operands, **params)
        return other_rule(ctx, *operands, **params) if lowered is None else lowered

    def cuda_rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        lowered = launches(ctx, operands, params)
        return other_rule(ctx, *operands, **params) if lowered is None else lowered

    def other_rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        if (function := rewrite(params)) is not None:
            return plain_rule(function, ctx, *operands, **params)
        schedule = params["schedule"]
        if not (schedule is None or isinstance(schedule, Reference)):
            raise NotImplementedError(
                f"{name}: no kernel for {schedule} on this platform; "
                "schedule=None or Reference() runs here"
            )
        return reference_rule(ctx, *operands, **params)

    register_lowerings(
        primitive,
        axes_of,
        reference_rule if cpu is None else other_rule,
        {} if cpu is None else {"cpu": cpu_rule, "cuda": cuda_rule},
    )

    def jvp_rule(primals: Sequence, tangents: Sequence, **params: Any) -> tuple:
        # Index arrays are integers: a tangent on one would be dropped silently below.
        assert len(primals) == len(tangents)
        count = data if isinstance(data, int) else data(params)
        assert all(type(t) is ad.Zero or t.dtype == jax.dtypes.float0 for t in tangents[count:])
        own = [None if type(t) is ad.Zero else t for t in tangents[:count]]
        primals, lists, rest = taken_off(primals, params)
        with keeping(primals[-_STRUCTURE:], lists, params):
            parts = jvp(primals, own, **rest)
        out, terms = parts[0], [t for t in parts[1:] if t is not None]
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in jax.tree.leaves(out)]
        if terms and isinstance(terms[0], list):  # a tangent of every result
            return out, [sum(parts[1:], start=parts[0]) for parts in zip(*terms, strict=True)]
        tangent = sum(terms[1:], start=terms[0]) if terms else zeros[0]
        return out, [tangent, *zeros[1:]] if multiple_results else tangent

    ad.primitive_jvps[primitive] = jvp_rule
    if transpose is not None:

        def transpose_rule(cotangent: Any, *operands: Any, **params: Any) -> list:
            grads: list = [None] * len(operands)
            if all(type(c) is ad.Zero for c in (cotangent if multiple_results else [cotangent])):
                return grads
            if multiple_results:
                cotangent = [ad.instantiate_zeros(c) for c in cotangent]
            given, lists, rest = taken_off(operands, params)
            with keeping(given[-_STRUCTURE:], lists, params):
                found = transpose(cotangent, *given, **rest)
            # (index, cotangent) of one linear operand, or a dict of them for several.
            for index, result in (found if isinstance(found, dict) else dict([found])).items():
                grads[index] = as_cotangent(result, operands[index].aval)
            return grads

        ad.primitive_transposes[primitive] = transpose_rule
    if batch is None:
        assert isinstance(data, int)
        batch = partial(batch_rule, primitive, data)
    batching.primitive_batchers[primitive] = batch
    if isinstance(data, int):
        kernels = None if cpu is None else own_cpu
        rules = kernels, launches, rewrite, reference, whole_batch
        define_each(primitive, data, axes_of, *rules)
    return primitive


is_linear_operand = ad.is_undefined_primal


def jax_lowering(ctx: Any, function: Callable, values: Sequence, avals: Sequence) -> Any:
    """Lowers `function`, in plain JAX, on values that are lowered already and have these avals."""
    ctx = ctx.replace(avals_in=list(avals))
    return mlir.lower_fun(function, multiple_results=False)(ctx, *values)


def is_launched(ctx: Any, family: str, instead: str) -> bool:
    """Whether a call of an operation without schedules is launched on CUDA: not with symbolic sizes
    or empty arrays, nor where its family of kernels is known to fail. Then a warning says what is
    done `instead`."""
    sizes = [n for aval in (*ctx.avals_in, *ctx.avals_out) for n in aval.shape]
    if any(map(jax.export.is_symbolic_dim, sizes)) or 0 in sizes:
        return False
    if (why := failing().get(family)) is not None:
        warn_once(family, why, instead)
        return False
    return True


def cast_lowering(ctx: Any, value: Any, aval: Any, dtype: Any) -> Any:
    """Casts a lowered value, whose aval is `aval`, to another dtype."""
    return jax_lowering(ctx, lambda x: x.astype(dtype), [value], [aval])


def compact_structure(
    shape: tuple[int, int], vector_length: int | None, arrays: Sequence
) -> tuple[tuple, Any, Any]:
    """The compact structure: (arrays, entry, place).

    `arrays` are the five index arrays of A and A^T with only the entries that take part. `entry` is
    the old position of the entry at each new position, `place` the new position of each old entry,
    -1 where it takes no part.
    """
    row_offsets, column_indices, *transposed = arrays
    *rows, entry, place = compacted(row_offsets, column_indices, shape[1])
    blocks = -(-shape[0] // (vector_length or 1))
    offsets, indices, permutation = well_formed_transpose(tuple(transposed), blocks)
    indices = jnp.where(place[permutation] < 0, -1, indices)
    *columns, moved, _ = compacted(offsets, indices, blocks)
    return (*rows, *columns, place[permutation[moved]]), entry, place


def at_places(values: Any, place: Any) -> Any:
    """Scatters results [B, nnz, ...] of compacted entries back to the places of all entries;
    entries that take no part get zero."""
    part = (place >= 0).reshape(1, -1, *[1] * (values.ndim - 2))
    return jnp.where(part, values[:, place], jnp.zeros((), values.dtype))


def empty_index() -> tuple[Any, Any]:
    """An empty index array and its aval, for an absent operand of an FFI call."""
    value = mlir.ir_constant(np.zeros(0, np.int32))  # NumPy: a lowering must not trace
    return value, jax.core.ShapedArray((0,), jnp.dtype(jnp.int32))


class _KernelsFail(Exception):
    """Raised by `resolve` where plain JAX is chosen, because all kernels fail on this GPU."""


def resolve(schedule: Schedule | None, problem: Problem, *kinds: type[_S]) -> _S:
    """The schedule of a kernel: the caller's, after its check, or else the default; it must be of
    one of `kinds`."""
    Schedule.check_sizes(problem)
    if problem.platform == "cuda":
        problem = replace(problem, arch=launch.arch_of_schedules())
    is_default = schedule is None
    if schedule is None:
        schedule = default_schedule(problem)
        if problem.platform == "cuda" and isinstance(schedule, Reference):
            raise _KernelsFail
        if problem.platform == "cuda" and math.prod(problem.shape) >= _LARGE:
            _warn_of_dense(problem)
        if not problem.has_tensor_cores and schedule != default_schedule(
            replace(problem, arch=None)
        ):
            _warn_of_slower(problem.arch)
    schedule.check(problem)
    if not isinstance(schedule, kinds):
        names = ", ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise NotImplementedError(
            f"{problem.op}: no kernel on {problem.platform} obeys {schedule}; "
            f"{names} and Reference() run here"
        )
    keep_chosen(problem, schedule, is_default)
    return schedule


_LARGE = 512 * 512  # elements of a matrix: products with smaller ones take microseconds anyway
_dense_said: set[str] = set()


def _warn_of_dense(problem: Problem) -> None:
    """Once for each operation, where no schedule is named; `explain` says it each time."""
    text = dense_is_faster(problem)
    if text and problem.op not in _dense_said:
        _dense_said.add(problem.op)
        warnings.warn(
            f"sgap_jax: {problem.op} of {list(problem.shape)}, {problem.dtype}, {problem.format}: "
            f"{text}",
            RuntimeWarning,
            stacklevel=2,
        )


@cache
def _warn_of_slower(arch: str) -> None:
    """Once for each architecture."""
    warnings.warn(
        f"sgap_jax: {arch} lacks the tensor-core instructions of sm_80; 16-bit column vectors run "
        "on CUDA cores there",
        RuntimeWarning,
        stacklevel=2,
    )


def by_default(schedule: Schedule | None, dtype: Any) -> Schedule | None:
    """The caller's schedule; without one plain JAX for integers, bool, complex numbers and other
    dtypes that no kernel has."""
    known = schedule is not None or jnp.dtype(dtype).name in KERNEL_DTYPES
    return schedule if known else Reference()


def derived(schedule: Schedule | None) -> Schedule | None:
    """The schedule of a different operation that a derivative rule calls."""
    return None if schedule is None else schedule.derived()


def transposed(schedule: Schedule | None) -> Schedule | None:
    """The schedule of a product with the transpose that a derivative rule calls."""
    return None if schedule is None else schedule.transposed()


def accumulator(dtype: Any) -> Any:
    """The dtype in which sums are carried: float32 for narrower floats, else `dtype`."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def row_of_entry(offsets: Any, nnz: int) -> Any:
    """Row of each entry; entries of the padding get row m, which segment sums drop."""
    m = offsets.shape[0] - 1
    return jnp.where(positions(nnz) < offsets[-1], segment_of_entry(offsets, nnz), m)


def entries_that_count(A: SparseArray) -> Any:
    """bool [nnz], [vectors] or [blocks] of CSR, CVS(V) or BCSR(r, c): True for those that take
    part, False for others and for padding."""
    offsets, indices = A.index_arrays[1]
    if A._every_entry_counts:
        return positions(indices.shape[0]) < unfolded(offsets[-1])
    return well_formed(offsets, indices, vectors.grid(A.shape, A.format)[1])[1] >= 0


OPS_IN_PARTS = (
    *("gsddmm", "gspmm", "row_max", "row_sum", "sddmm"),
    *("sparse_attention", "sparse_softmax", "spmm"),
)
"""The operations of `sgap_jax.parallel`, which this layer does not import."""


def check_sparse(op: str, name: str, A: Any) -> None:
    if not isinstance(A, SparseArray):
        found = type(A).__name__
        in_parts = ""
        if found == "PartitionedArray":
            in_parts = f"; sgap_jax.parallel.{op} takes it"
            if op not in OPS_IN_PARTS:
                in_parts = f"; sgap_jax.parallel has {', '.join(OPS_IN_PARTS)}"
        elif isinstance(A, np.ndarray | jax.Array):
            in_parts = "; SparseArray.from_dense makes one, with nse= inside jit"
        elif hasattr(A, "todense"):  # SciPy's arrays, and JAX's BCOO and BCSR
            in_parts = f"; SparseArray.{_maker(found)} makes one"
        raise TypeError(f"{op}: {name} must be a SparseArray, got {found}{in_parts}")
    if A.ndim != 2:
        raise ValueError(f"{op}: {name} must have 2 dimensions, got shape {A.shape}")
    require_unbatched(A, f"{op}: {name}")


def _maker(kind: str) -> str:
    """The constructor that takes another library's sparse array of this type."""
    return {"BCOO": "from_bcoo", "BCSR": "from_bcsr"}.get(kind, "from_scipy")


def check_dense(op: str, name: str, x: Any, shape: tuple) -> Any:
    """`x` as an array of `shape`, in which a string stands for any size, and a last "..." for any
    number of axes."""
    if hasattr(x, "todense"):  # a SparseArray, a SciPy array, JAX's BCOO or BCSR
        kind = type(x).__name__
        nearest = f"{name}.todense() is"
        if op in ("spmm", "spmv"):
            own = isinstance(x, SparseArray)
            made = name if own else f"SparseArray.{_maker(kind)}({name})"
            nearest += f"; A @ {made} is the product of two sparse matrices"
        raise TypeError(f"{op}: {name} must be dense, got a {kind}; {nearest}")
    x = as_numbers(op, name, x)
    open_ended = shape[-1:] == ("...",)
    named = shape[:-1] if open_ended else shape
    fits = (x.ndim == len(named) or (open_ended and x.ndim > len(named))) and all(
        isinstance(want, str) or got == want for got, want in zip(x.shape, named, strict=False)
    )
    if not fits:
        want = ", ".join(map(str, shape))
        raise ValueError(f"{op}: {name} must have shape [{want}], got {list(x.shape)}")
    return x


def as_numbers(op: str, name: str, x: Any) -> jax.Array:
    if x is None or isinstance(x, str):
        raise TypeError(f"{op}: {name} must be an array or a number, got {x!r}")
    if type(x) is np.ndarray and x.dtype.kind in "OSUMm":
        raise TypeError(f"{op}: {name} must be an array of numbers, got {x.dtype}")
    if type(x) is np.ndarray and x.dtype == jax.dtypes.canonicalize_dtype(x.dtype):
        # JAX 0.10.2 compiles a program for each shape of an array whose dtype it is not told.
        return jnp.asarray(x, x.dtype)
    return jnp.asarray(x)


def check_scale(op: str, scale: Any) -> jax.Array:
    scale = as_numbers(op, "scale", scale)
    if scale.ndim != 0 or jnp.issubdtype(scale.dtype, jnp.complexfloating):
        raise ValueError(
            f"{op}: scale must be a real scalar, got shape {list(scale.shape)} of {scale.dtype}"
        )
    return scale


def check_schedule(op: str, schedule: Any) -> Schedule | None:
    """The schedule, read if it is text; TypeError or ScheduleError otherwise."""
    if isinstance(schedule, str):
        try:
            return Schedule.parse(schedule)
        except ScheduleError as error:
            raise ScheduleError(f"{op}: schedule: {error}") from None
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(
            f"{op}: schedule must be a Schedule, its text or None, got {type(schedule).__name__}"
        )
    return schedule


def static_of(A: SparseArray) -> dict[str, Any]:
    """The parameter `statistics` of spmm_p and sddmm_p: of the rows and of the columns of A, if it
    has them."""
    found = A.statistics.rows, A.statistics.columns
    return {"statistics": found} if any(found) else {}


def structure(A: SparseArray) -> tuple[Any, Any, Any, Any, Any]:
    """The index arrays of a CSR or CVS array, by rows and by columns."""
    A = vectors.with_transpose(A)
    assert A.transposed is not None
    offsets, indices, permutation = A.transposed
    return A.row_offsets, A.column_indices, offsets, indices, permutation
