"""How primitives are batched, and `each(P)`: a primitive P for each of several structures.

Data operands of a primitive have one leading batch axis, of size 1 or B; index arrays have none.
Where vmap maps data, its axis joins the batch axis. Where it maps index arrays, the call becomes
one of `each(P)`, whose index arrays have a leading axis with an element for each of S structures.
There the batch axis of a data operand is 1, which all share, or a multiple of S: as many elements
for each structure, in their order. On the CPU one call computes it, whose tasks are those of all
structures, and on CUDA one launch; on other platforms a loop takes the structures in turn. Of a P
without kernels the plain JAX is mapped over them, and so are P's derivatives.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from sgap_jax.formats.structure import unfolded, varying_axes, whole_but_first
from sgap_jax.launch import launch, nvrtc
from sgap_jax.launch.kernel_call import KernelCall
from sgap_jax.primitives._kept_lists import put_on
from sgap_jax.primitives._partition import Axes, of_each, partitioned, typed
from sgap_jax.schedules import Reference
from sgap_jax.schedules.schedule import GRID_Z

_EACH: dict[Primitive, Primitive] = {}

# How many structures the call that is being lowered is for.
_structures: ContextVar[int] = ContextVar("structures", default=1)


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Binds after giving all operands the same varying axes.

    Under shard_map a replicated operand next to a sharded one must be cast explicitly: the
    transpose of that cast is the psum without which its gradient is one shard's.
    """
    operands, params = put_on(primitive, operands, params)
    axes = frozenset().union(*(varying_axes(x) for x in operands))
    joined = [
        x
        if varying_axes(x) == axes
        else jax.lax.pcast(x, tuple(axes - varying_axes(x)), to="varying")
        for x in operands
    ]
    return primitive.bind(*joined, **params)


def out_aval(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The aval of a result: varying axes of `like`, no sharded dimension, no weak type."""
    sharding = like.sharding
    if sharding.mesh.empty:
        return like.update(shape=shape, dtype=dtype, weak_type=False)
    sharding = sharding.update(spec=jax.P(*([None] * len(shape))))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def joint_batch(*sizes: int) -> int:
    """The batch size of a result: each operand's is 1 or B, which may be zero."""
    return next((size for size in sizes if size != 1), 1)


def as_cotangent(x: Any, operand: Any) -> Any:
    """The cotangent x in the form of `operand`: summed over the batch if the operand was broadcast
    over it, and with the operand's sharding."""
    if operand.shape and operand.shape[0] == 1 and x.shape[0] != 1:
        x = x.sum(0, keepdims=True)
    mesh = operand.sharding.mesh
    explicit = not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(x, operand.sharding) if explicit else x


def batch_rule(
    primitive: Primitive, data: int, args: Sequence, dims: Sequence, **params: Any
) -> tuple[Any, Any]:
    """vmap: a mapped axis of data joins the batch axis; with mapped index arrays it is the axis of
    the structures, of which the call is one for each."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    structures = any(d is not None for d in dims[data:])
    if structures and primitive not in _EACH:
        out = _one_after_another(primitive, args, dims, params)
        return out, jax.tree.map(lambda _: 0, out)
    own = [
        a.shape[0] if d is None else jnp.moveaxis(a, d, 0).shape[1]
        for a, d in zip(args[:data], dims[:data], strict=True)
    ]
    batch = joint_batch(*own)

    def merge(a: Any, d: int | None, batch: int) -> Any:
        if d is None and a.shape[0] == 1:
            return a  # the kernel broadcasts it
        a = a[None] if d is None else jnp.moveaxis(a, d, 0)
        a = jnp.broadcast_to(a, (size, batch) + a.shape[2:])
        return joined(a)

    # Among the elements of one structure, the kernel broadcasts.
    sizes = own if structures else [batch] * data
    merged = [merge(a, d, n) for a, d, n in zip(args[:data], dims[:data], sizes, strict=True)]
    arrays = args[data:]
    if structures:
        arrays = [mapped_first(a, d, size) for a, d in zip(arrays, dims[data:], strict=True)]
        primitive = _EACH[primitive]
    return _parted(bind(primitive, *merged, *arrays, **params), size, batch)


def _parted(results: Any, size: int, batch: int) -> tuple[Any, Any]:
    """Results with the mapped axis apart from the batch axis that it had joined, and where it is.
    Either size may be 0. An absent result has no batch: it is [1, 0], which is not mapped, or of
    several structures [S, 0]."""

    def parted(x: Any) -> Any:
        own = batch if x.shape[0] == size * batch else x.shape[0] // size
        return x.reshape(size, own, *x.shape[1:])

    leaves, tree = jax.tree.flatten(results)
    axes = [None if x.shape[0] == 1 and size * batch != 1 else 0 for x in leaves]
    found = [x if axis is None else parted(x) for x, axis in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(tree, found), jax.tree.unflatten(tree, axes)


def mapped_first(a: Any, d: int | None, size: int) -> Any:
    """The array with its mapped axis first, or repeated along a new one."""
    return jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)


def _of_one(x: Any, structures: int) -> tuple[int, ...]:
    """The shape of what one structure has of an array with a batch axis."""
    count = x.shape[0]
    return (1 if count == 1 or structures == 0 else count // structures, *x.shape[1:])


def _avals_of_one(avals: Sequence, data: int) -> list:
    count = avals[data].shape[0]
    shapes = [_of_one(a, count) if i < data else a.shape[1:] for i, a in enumerate(avals)]
    return [out_aval(a, shape, a.dtype) for a, shape in zip(avals, shapes, strict=True)]


def _mapped(function: Callable, data: Sequence, arrays: Sequence) -> Any:
    """`function(data, arrays)` for each structure, mapped: results [S, ...]."""
    count = arrays[0].shape[0]
    # vmap wants the mapped axes of all operands sharded alike.
    parts = _explicit_parts([*data, *arrays], count)
    first = [_first_split(x, None if x.shape[0] == 1 else parts) for x in data]
    split, axes = _split(first, count)
    return jax.vmap(function, (axes, 0))(split, [whole_but_first(x, parts) for x in arrays])


def _explicit_parts(arrays: Sequence, count: int) -> Any:
    """The explicit mesh axes that split the structures: those of the array with most elements that
    is split into parts of whole structures. None if there is none."""
    best, found = -1, None
    for x in (x for x in arrays if x.shape[0] != 1):
        sharding = jax.typeof(x).sharding
        parts = sharding.spec[0] if sharding.spec else None
        names = parts if isinstance(parts, tuple) else (parts,)
        if parts is None or count % math.prod(sharding.mesh.shape[name] for name in names):
            continue
        if x.size > best:
            best, found = x.size, parts
    return found


def _first_split(x: Any, parts: Any) -> Any:
    """The array with its first axis split by these axes of the explicit mesh, and the others as
    they are, but for what splits the first one."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not (parts or any(sharding.spec)):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=jax.P(parts, *_others(sharding, parts))))


def _others(sharding: Any, parts: Any) -> list:
    """What splits the axes but the first one, without what has these axes of the mesh."""
    taken = set(parts if isinstance(parts, tuple) else (parts,))
    each = (names if isinstance(names, tuple) else (names,) for names in sharding.spec[1:])
    return [None if taken.intersection(names) else names for names in each]


def _split(data: Sequence, count: int) -> tuple[list, list]:
    """Data operands with an axis for the structures before that of their elements, and where that
    axis is: None for an operand that all share."""
    axes = [None if x.shape[0] == 1 else 0 for x in data]
    split = [
        x if axis is None else x.reshape(count, *_of_one(x, count))
        for x, axis in zip(data, axes, strict=True)
    ]
    return split, axes


def _repeated(operands: Sequence, sizes: Sequence) -> list:
    """Those operands that have one of these batch sizes, in order: each element is repeated, one
    after another, until the batch is of that size."""
    pairs = zip(operands, sizes, strict=False)
    return [x if x.shape[0] == n else jnp.repeat(x, n // x.shape[0], 0) for x, n in pairs]


def joined(x: Any) -> Any:
    """[S, B, ...] -> [S B, ...]. An explicit split of B alone is no split of the result: it is
    undone."""
    sharding = jax.typeof(x).sharding
    if not sharding.mesh.empty and sharding.spec[1] and not sharding.spec[0] and x.shape[0] != 1:
        spec = jax.P(None, None, *sharding.spec[2:])
        x = jax.sharding.reshard(x, sharding.update(spec=spec))
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _one_after_another(
    primitive: Primitive, args: Sequence, dims: Sequence, params: dict
) -> jax.Array | list:
    """The results of the calls on the elements along mapped axes, in a loop: [size, ...]."""
    mapped = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True) if d is not None]

    def one(slices: Sequence) -> Any:
        left = iter(slices)
        full = [a if d is None else next(left) for a, d in zip(args, dims, strict=True)]
        return bind(primitive, *full, **params)

    return jax.lax.map(one, mapped)


def structures_of_lowering() -> int:
    """For how many structures the call is that is being lowered."""
    return _structures.get()


@contextmanager
def _lowering_for(structures: int) -> Iterator[None]:
    token = _structures.set(structures)
    try:
        yield
    finally:
        _structures.reset(token)


def plain_lowering(function: Callable, multiple: bool, ctx: Any, operands: Sequence) -> Any:
    """Lowers `function`, in plain JAX. With explicit sharding that wants an out_sharding for each
    operation: operands are treated as unsharded instead, as a kernel does."""
    unsharded = [out_aval(aval, aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(function, multiple)(ctx.replace(avals_in=unsharded), *operands)


def register_lowerings(
    primitive: Primitive, axes: Callable, default: Callable, of_platforms: dict[str, Callable]
) -> None:
    """Registers the lowerings of a primitive, split over devices by its axes (_partition.py)."""
    lower = lambda function, *given: plain_lowering(function, True, *given)  # noqa: E731
    rules: list[tuple[str | None, Callable]] = [(None, default), *of_platforms.items()]
    for platform, rule in rules:
        split = partitioned(primitive, axes, rule, lower, mlir.ShardingContext)
        mlir.register_lowering(primitive, split, platform=platform)


def ffi_lowering(target: str, ctx: Any, operands: Sequence, **attrs: Any) -> Any:
    """A typed-FFI custom call on `operands`, which may be a selection of the primitive's own."""
    layouts = [tuple(reversed(range(x.type.rank))) for x in operands]
    results = [of_all_structures(aval) for aval in ctx.avals_out]
    ctx = ctx.replace(avals_in=[None] * len(operands), avals_out=results)
    return jax.ffi.ffi_lowering(target, operand_layouts=layouts)(ctx, *operands, **attrs)


def launch_lowering(
    ctx: Any,
    call: KernelCall,
    operands: Sequence,
    avals: Sequence | None = None,
    results: Sequence | None = None,
) -> Any:
    """`launch.lower` of a call from `KernelCall.of`, for all structures of the call that is being
    lowered."""
    count = _structures.get()
    if count > 1:  # the index arrays of all follow each other
        given = ctx.avals_in if avals is None else avals
        pairs = zip(given, operands, strict=True)
        avals = [aval.update(shape=tuple(x.type.shape)) for aval, x in pairs]
    call = call.of_structures(count)
    return launch.lower(ctx, call, operands, avals, results, compiler=nvrtc)


def launched_on_host(
    schedule: Any, launches: Callable, ctx: Any, operands: Sequence, params: dict
) -> Any:
    """What `launches` lowers to if the CPU runs launches as `schedule` does, which `_host_launches`
    says it can."""

    def lower(run: Callable, ctx: Any, call: KernelCall, operands: Sequence) -> Any:
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out]

        def host(*inputs: Any) -> tuple:
            return tuple(run(call, inputs, [(r.shape, r.dtype) for r in results]))

        rule = mlir.lower_fun(lambda *x: jax.pure_callback(host, results, *x), True)
        return rule(ctx, *operands)

    with schedule._host_launches() as run, launch.handed_to(partial(lower, run)):
        return launches(ctx, operands, params | {"schedule": schedule._inner})


def of_all_structures(aval: Any) -> Any:
    """The aval of a result of the call that is being lowered, from that of one structure."""
    return _batched(aval, _structures.get())


def _batched(aval: Any, structures: int) -> Any:
    """The aval of the results of all structures, from that of one."""
    return aval.update(shape=(aval.shape[0] * structures, *aval.shape[1:]))


def define_each(
    primitive: Primitive,
    data: int,
    axes: Callable,
    cpu: Callable | None,
    launches: Callable,
    rewrite: Callable[[dict], Callable | None],
    reference: Callable,
    whole_batch: bool = False,
) -> None:
    """Makes `each(primitive)`; the first `data` operands are data, and `axes` are those of one
    structure.

    `cpu` lowers a call on one structure to FFI targets that take index arrays of several, and
    `launches(ctx, operands, params)` lowers it to CUDA kernels through `launch_lowering`; both
    return None where there is no kernel for it. `rewrite(params)` is the function, if any, that
    such a call is computed by then. Without `cpu` it is the `reference` on every platform.
    `whole_batch`: as of `define`.
    """
    whole = _EACH[primitive] = Primitive(f"{primitive.name}_each")
    multiple = whole.multiple_results = primitive.multiple_results
    whole.def_impl(partial(xla.apply_primitive, whole))

    def results_of_one(avals: Sequence, params: dict) -> Any:
        return primitive.abstract_eval(*_avals_of_one(avals, data), **params)[0]

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        count = avals[data].shape[0]
        assert all(aval.shape[0] == count for aval in avals[data:])
        results = jax.tree.map(lambda aval: _batched(aval, count), results_of_one(avals, params))
        return typed(partial(axes_of_all, params=params), avals, results)

    def axes_of_all(operands: Sequence, results: Sequence, params: dict) -> Axes:
        one = _avals_of_one(operands, data), jax.tree.leaves(results_of_one(operands, params))
        return of_each(axes(*one, params), operands, results, data)

    def loop(ctx: Any, *operands: Any, **params: Any) -> Any:
        def plain(*operands: Any) -> Any:
            arrays = operands[data:]
            split, axes = _split(operands[:data], arrays[0].shape[0])
            dims = [*axes, *(0 for _ in arrays)]
            out = _one_after_another(primitive, [*split, *arrays], dims, params)
            return jax.tree.map(joined, out)

        return plain_lowering(plain, multiple, ctx, operands)

    def one_launch(ctx: Any, operands: Sequence, params: dict) -> Any:
        # The batch is that of all structures. The index arrays follow each other; their avals stay
        # those of one structure.
        count, batch = ctx.avals_in[data].shape[0], batch_of_all(ctx.avals_in)
        sizes = [1 if aval.shape[0] == 1 else batch for aval in ctx.avals_in[:data]]
        if batch not in sizes:  # all structures share all operands: the smallest one says how many
            least = min(range(data), key=lambda i: math.prod(ctx.avals_in[i].shape))
            sizes[least] = batch

        def inputs(*operands: Any) -> list:
            return [*_repeated(operands, sizes), *(x.reshape(-1) for x in operands[data:])]

        given = plain_lowering(inputs, True, ctx, operands)
        arrays = _avals_of_one(ctx.avals_in, data)[data:]
        dense = [
            out_aval(aval, (n, *aval.shape[1:]), aval.dtype)
            for aval, n in zip(ctx.avals_in, sizes, strict=False)
        ]
        with _lowering_for(count):
            return launches(ctx.replace(avals_in=[*dense, *arrays]), given, params)

    def in_whole_batch(ctx: Any, operands: Sequence) -> tuple[Any, Sequence]:
        """The context and the operands with data in which each structure has one element for all
        of its batch repeated for each element of that batch."""
        avals, batch = ctx.avals_in, batch_of_all(ctx.avals_in)
        sizes = [x.shape[0] if x.shape[0] == 1 else batch for x in avals[:data]]
        if all(x.shape[0] == n for x, n in zip(avals, sizes, strict=False)):
            return ctx, operands

        def repeated(*operands: Any) -> list:
            return [*_repeated(operands, sizes), *operands[data:]]

        dense = [
            out_aval(x, (n, *x.shape[1:]), x.dtype) for x, n in zip(avals, sizes, strict=False)
        ]
        given = plain_lowering(repeated, True, ctx, operands)
        return ctx.replace(avals_in=[*dense, *avals[data:]]), given

    def batch_of_all(avals: Sequence) -> Any:
        count = avals[data].shape[0]
        return count * joint_batch(*(_of_one(aval, count)[0] for aval in avals[:data]))

    def fits(avals: Sequence) -> bool:
        """Whether the batch of all structures has elements, and a launch has a block for each; and
        whether kernels can count the elements of all index arrays in 32 bits."""
        batch = batch_of_all(avals)
        if not isinstance(batch, int) or not 0 < batch <= GRID_Z:
            return False
        return all(math.prod(aval.shape) < 2**32 for aval in avals[data:])

    def in_one_launch(host: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
        if isinstance(params["schedule"], Reference) or not fits(ctx.avals_in):
            return loop(ctx, *operands, **params)
        if host is None:
            lowered = one_launch(ctx, operands, params)
        else:
            lowered = launched_on_host(host, one_launch, ctx, operands, params)
        if lowered is not None:
            return lowered
        function = rewrite(params)
        if function is None:
            return loop(ctx, *operands, **params)
        return in_plain_jax(function, ctx, *operands, **params)

    def in_plain_jax(function: Callable, ctx: Any, *operands: Any, **params: Any) -> Any:
        """`function` of one structure, mapped over all."""

        def mapped(*operands: Any) -> Any:
            of_one = lambda values, arrays: function(*values, *unfolded(arrays), **params)  # noqa: E731
            return jax.tree.map(joined, _mapped(of_one, operands[:data], operands[data:]))

        return plain_lowering(mapped, multiple, ctx, operands)

    def one_call(ctx: Any, *operands: Any, **params: Any) -> Any:
        assert cpu is not None
        schedule, lowered = params["schedule"], None
        if schedule is not None and schedule._host_launches() is not None:
            return in_one_launch(schedule, ctx, *operands, **params)
        if not isinstance(schedule, Reference):
            own, given = in_whole_batch(ctx, operands) if whole_batch else (ctx, operands)
            one = _avals_of_one(own.avals_in, data)
            results = results_of_one(own.avals_in, params)
            of_one = own.replace(avals_in=one, avals_out=results if multiple else [results])
            with _lowering_for(own.avals_in[data].shape[0]):
                lowered = cpu(of_one, *given, **params)
        return loop(ctx, *operands, **params) if lowered is None else lowered

    def jvp(primals: Sequence, tangents: Sequence, **params: Any) -> tuple:
        moving = [i for i, t in enumerate(tangents[:data]) if type(t) is not ad.Zero]
        moving = [i for i in moving if tangents[i].dtype != jax.dtypes.float0]

        def of_one(values: Sequence, arrays: Sequence) -> tuple:
            own, along = list(values[:data]), values[data:]

            def at(*moved: Any) -> Any:
                for i, x in zip(moving, moved, strict=True):
                    own[i] = x
                return bind(primitive, *own, *arrays, **params)

            out, dout = jax.jvp(at, [own[i] for i in moving], list(along))
            return out, [t for t in jax.tree.leaves(dout) if t.dtype != jax.dtypes.float0]

        if not moving:
            out = bind(whole, *primals, **params)
            found: Iterator = iter(())
        else:
            values = [*primals[:data], *(tangents[i] for i in moving)]
            out, dout = jax.tree.map(joined, _mapped(of_one, values, primals[data:]))
            found = iter(dout)
        dout = [
            next(found)
            if moving and jnp.issubdtype(x.dtype, jnp.inexact)
            else ad.Zero(jax.typeof(x).to_tangent_aval())
            for x in jax.tree.leaves(out)
        ]
        return out, dout if multiple else dout[0]

    def transpose(cotangent: Any, *operands: Any, **params: Any) -> list:
        grads: list = [None] * len(operands)
        cotangents = cotangent if multiple else [cotangent]
        if all(type(c) is ad.Zero for c in cotangents):
            return grads
        cotangents = [ad.instantiate_zeros(c) for c in cotangents]
        linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
        known = [i for i in range(data) if i not in linear]
        avals = [x.aval if i in linear else jax.typeof(x) for i, x in enumerate(operands)]
        one = _avals_of_one(avals, data)
        rule = ad.primitive_transposes[primitive]

        def of_one(values: Sequence, arrays: Sequence) -> list:
            given, left = values[: len(cotangents)], iter(values[len(cotangents) :])
            full = [ad.UndefinedPrimal(one[i]) if i in linear else next(left) for i in range(data)]
            found = rule(list(given) if multiple else given[0], *full, *arrays, **params)
            return [found[i] for i in linear]

        values = [*cotangents, *(operands[i] for i in known)]
        parts = _explicit_parts([*values, *operands[data:]], avals[data].shape[0])
        for i in linear:  # gradients are split as their operands are
            sharding = avals[i].sharding
            if not sharding.mesh.empty:
                spec = jax.P(None, *_others(sharding, parts))
                one[i] = one[i].update(sharding=sharding.update(spec=spec))
        for i, grad in zip(linear, _mapped(of_one, values, operands[data:]), strict=True):
            grads[i] = as_cotangent(joined(grad), avals[i])
        return grads

    def batch(args: Sequence, dims: Sequence, **params: Any) -> tuple[Any, Any]:
        size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        every = [mapped_first(a, d, size) for a, d in zip(args, dims, strict=True)]
        count = every[data].shape[1]

        def merge(i: int) -> Any:
            if dims[i] is None and args[i].shape[0] == 1:
                return args[i]
            a = every[i]
            if a.shape[1] == 1:  # shared by the structures, but not by the mapped elements
                a = jnp.broadcast_to(a, (size, count, *a.shape[2:]))
            return joined(a)

        out = bind(whole, *map(merge, range(data)), *map(joined, every[data:]), **params)
        own = [1 if a.shape[1] == 1 or not count else a.shape[1] // count for a in every[:data]]
        return _parted(out, size, count * joint_batch(*own))

    whole.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[whole] = jvp
    if primitive in ad.primitive_transposes:
        ad.primitive_transposes[whole] = transpose
    batching.primitive_batchers[whole] = batch
    register_lowerings(
        whole,
        axes_of_all,
        partial(in_plain_jax, reference) if cpu is None else loop,
        {} if cpu is None else {"cpu": one_call, "cuda": partial(in_one_launch, None)},
    )
