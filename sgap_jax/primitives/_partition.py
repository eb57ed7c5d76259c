"""How a call is split over devices: the partition rule of a primitive, from the axes of its arrays.

A primitive states the axes of its data operands and results as einops does:

    "b _ d, b _ d, b, b -> b"        sddmm: x, y, weights, scale -> values

"_" and dimensions that are not listed are never split: there kernels read along the structure. An
axis that a result lacks is summed over: the result is, too, with one all-reduce over the devices
that split it, or a reduce-scatter where the result is asked for split over them; but for axes that
are `held`, along which the result is the same. "(g r)" is a dimension that two axes share, g the
outer one. Dimensions of size 1, or of another size than their axes have, are shared by all. Index
arrays are never split, except those of several structures (`each` in _batch.py).

From the axes follow the sharding of results under explicit mesh axes (`typed`) and, where XLA
partitions a program for several devices, a call of JAX's custom_partitioning (`partitioned`): its
Shardy rule spreads shardings from array to array, and then every device runs the primitive on its
part. Other shardings of operands are undone by XLA, which gathers those dimensions alone.
"""

import dataclasses
import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh

# The axes of each dimension, outermost first; () where it is not split.
Dimensions = tuple[tuple[str, ...], ...]

# Whether a call is lowered for one device, to see whether it can be.
_whole: ContextVar[bool] = ContextVar("whole", default=False)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of one call.

    Attributes:
      operands, results: the axes of each dimension of each operand and result.
      sizes: the size of each axis.
      local: the parameters of the call on one part, from the sizes of its axes; None where they do
        not depend on them.
      held: axes of which a result that lacks them is the same on all devices.
      once: {operand: axes}: such an operand lacks these axes and is a term of sums over them. Each
        device that they are split over gets its share of it, so that the sum has it once.
    """

    operands: tuple[Dimensions, ...]
    results: tuple[Dimensions, ...]
    sizes: Mapping[str, int]
    local: Callable[[Mapping[str, int]], dict] | None = None
    held: frozenset[str] = frozenset()
    once: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        text: str,
        operands: Sequence,
        results: Sequence,
        sizes: Mapping[str, int] | None = None,
        local: Callable | None = None,
    ) -> "Axes":
        """From the notation above and the avals; `sizes` are those of axes that no dimension has
        alone."""
        given, made = ([_words(x) for x in side.split(",")] for side in text.split("->"))
        pairs = [
            (word[: len(aval.shape)], aval.shape)
            for words, avals in ((given, operands), (made, results))
            for word, aval in zip(words, avals, strict=False)
        ]
        known = dict(sizes or {})
        for word, shape in pairs:
            for names, size in zip(word, shape, strict=False):
                if len(names) == 1 and isinstance(size, int) and size > 1:
                    known.setdefault(names[0], size)
        count = min(len(given), len(operands))
        rest: list[Dimensions] = [((),) * len(aval.shape) for aval in operands[count:]]
        placed = [_placed(word, shape, known) for word, shape in pairs]
        return cls((*placed[:count], *rest), tuple(placed[count:]), known, local)


def _words(text: str) -> Dimensions:
    found = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(tuple((one or several).split()) if one != "_" else () for several, one in found)


def _placed(word: Dimensions, shape: Sequence, sizes: Mapping[str, int]) -> Dimensions:
    """The axes of each dimension, without those of size 1."""

    def of(names: tuple[str, ...], size: Any) -> tuple[str, ...]:
        fits = isinstance(size, int) and math.prod(sizes.get(a, 1) for a in names) == size > 1
        return tuple(a for a in names if sizes.get(a, 1) > 1) if fits else ()

    word = (*word, *[()] * (len(shape) - len(word)))
    return tuple(of(names, size) for names, size in zip(word, shape, strict=True))


def of_each(axes: Axes, operands: Sequence, results: Sequence, data: int) -> Axes:
    """The axes of a call for several structures, from those of one: batches are "(s b)", and index
    arrays have s first."""
    sizes = {**axes.sizes, "s": operands[data].shape[0]}

    def outer(dimensions: Dimensions, aval: Any) -> Dimensions:
        first = ("s",) if aval.shape[0] == sizes["s"] else ("s", "b")
        return _placed((first, *dimensions[1:]), aval.shape, sizes)

    own = [outer(x, aval) for x, aval in zip(axes.operands[:data], operands, strict=False)]
    arrays = [_placed((("s",),), aval.shape, sizes) for aval in operands[data:]]
    made = tuple(outer(x, aval) for x, aval in zip(axes.results, results, strict=True))
    return dataclasses.replace(axes, operands=(*own, *arrays), results=made, sizes=sizes)


def _divided(
    names: tuple[str, ...], split: Sequence[tuple[Any, int]], sizes: Mapping[str, int]
) -> Iterator[tuple[str, tuple]]:
    """The parts of the devices' mesh, (name, size) from the outermost, by which each axis of a
    dimension is split; those that do not divide it are left out."""
    left = list(split)
    for name in names:
        taken: list = []
        parts = 1
        while left and sizes[name] % (parts * left[0][1]) == 0:
            parts *= left[0][1]
            taken.append(left.pop(0)[0])
        if taken:
            yield name, tuple(taken)
        if parts != sizes[name]:  # an inner axis is contiguous only where this one has one element
            return


def _chosen(axes: Axes, votes: Mapping[tuple[str, tuple], float], parts: Mapping) -> dict:
    """{axis: the parts of the mesh that split it}. Of those that exclude each other, as no part can
    split two axes, the one with most bytes in arrays that are split so."""
    found: dict[str, tuple] = {}
    for name, split in sorted(votes, key=lambda vote: -votes[vote]):
        used = {part for others in found.values() for part in others}
        if name not in found and used.isdisjoint(split):
            found[name] = split
    for dimensions in (*axes.operands, *axes.results):
        for names in dimensions:
            whole = True
            for name in names:
                if not whole:
                    found.pop(name, None)
                split = math.prod(parts[part] for part in found.get(name, ()))
                whole = whole and split == axes.sizes[name]
    return found


def _specs(dimensions: Sequence[Dimensions], found: Mapping[str, tuple]) -> list:
    return [
        jax.P(*(sum((found.get(name, ()) for name in names), ()) or None for names in array))
        for array in dimensions
    ]


def _bytes(aval: Any) -> float:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize


def typed(axes: Callable, operands: Sequence, results: Any) -> Any:
    """The avals of results, with the sharding that follows from that of the operands if mesh axes
    are explicit. `axes(operands, results)` are those of the call."""
    split = [aval.sharding for aval in operands if any(aval.sharding.spec)]
    if not split or AxisType.Explicit not in split[0].mesh.axis_types:
        return results
    flat, tree = jax.tree.flatten(results)
    known = axes(operands, flat)
    mesh = split[0].mesh

    def split_names(names: tuple[str, ...], parts: Any) -> tuple[str, ...]:
        """The outermost axis alone where that divides."""
        by = [(part, mesh.shape[part]) for part in _as_tuple(parts)]
        divided = list(_divided(names, by, known.sizes))
        alone = len(divided) == 1 and len(divided[0][1]) == len(by)
        return names[:1] if alone else names

    votes: dict[tuple[tuple[str, ...], Any], float] = {}
    for aval, dimensions in zip(operands, known.operands, strict=True):
        for names, parts in zip(dimensions, aval.sharding.spec, strict=True):
            if names and parts:
                vote = split_names(names, parts), parts
                votes[vote] = votes.get(vote, 0) + _bytes(aval)
    found: dict[tuple[str, ...], Any] = {}
    for names, parts in sorted(votes, key=lambda vote: -votes[vote]):
        used = {x for others in found.values() for x in _as_tuple(others)}
        if names not in found and used.isdisjoint(_as_tuple(parts)):
            found[names] = parts
    shardings = [
        split[0].update(
            spec=jax.P(*(found.get(names) or found.get(names[:1]) for names in dimensions))
        )
        for dimensions in known.results
    ]
    pairs = zip(flat, shardings, strict=True)
    return jax.tree.unflatten(tree, [aval.update(sharding=x) for aval, x in pairs])


def _as_tuple(part: Any) -> tuple:
    return () if part is None else part if isinstance(part, tuple) else (part,)


class _Group(NamedTuple):
    """The devices that divide a call among them: all of the program; or, inside shard_map over some
    axes of a mesh (`axis_names`), those along the other axes, a group for each place along the
    first ones.

    Attributes:
      devices: as many as a group has.
      every: those of the program, in its order, where there are several groups.
      before: the places along the axes of the mesh that come before those of the group.
    """

    devices: tuple
    every: tuple = ()
    before: int = 1

    def mesh(self, parts: Sequence[int], names: Sequence[str]) -> Mesh:
        """The mesh of the program, whose axes of these names divide a group."""
        if not self.every:
            return Mesh(np.array(self.devices).reshape(parts), names)
        sizes = (self.before, *parts, -1)
        return Mesh(np.array(self.every).reshape(sizes), ("before", *names, "behind"))


def _group(ctx: Any, schedule: Any) -> _Group | None:
    """The devices among which XLA divides the call; None where it stays whole: one device, inside
    shard_map over all axes, in a program to be exported, which cannot hold the rule, or where the
    host runs the kernels."""
    module = ctx.module_context
    context = module.axis_context
    within = _rest_of_mesh(context) if getattr(context, "manual_axes", ()) else None
    count = len(within.devices) if within else getattr(context, "num_devices", 1)
    if count == 1 or _whole.get() or module.lowering_parameters.for_export:
        return None
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return None
    if schedule is not None and schedule._host_launches() is not None:
        return None
    if within:
        return within
    # A program is lowered without knowing its devices; the rule needs their number and order alone.
    devices = context.device_assignment or _stand_ins(count)
    if len(devices) == count:
        return _Group(devices)
    warnings.warn(
        f"sgap_jax: a program for {count} devices is compiled by a process that has fewer: its "
        "operands are gathered. XLA_FLAGS=--xla_force_host_platform_device_count="
        f"{count} gives it as many",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _rest_of_mesh(context: Any) -> _Group | None:
    """The group of the axes that shard_map leaves to XLA; None where there are none, or others are
    between them, so that the devices of a group are not those of a mesh."""
    mesh = context.mesh
    axes = [(mesh.shape[name], name not in context.manual_axes) for name in mesh.axis_names]
    left = [i for i, (size, ours) in enumerate(axes) if ours and size > 1]
    if not left or not isinstance(mesh, Mesh):
        return None
    span = axes[left[0] : left[-1] + 1]
    if any(size > 1 and not ours for size, ours in span):
        return None
    every = tuple(mesh.devices.flat)
    before = math.prod(size for size, _ in axes[: left[0]])
    return _Group(every[: math.prod(size for size, _ in span)], every, before)


def _stand_ins(count: int) -> tuple:
    devices = jax.devices()
    if len(devices) < count and devices[0].platform != "cpu":
        with suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
            devices = jax.devices("cpu")
    return tuple(devices[:count])


def partitioned(
    primitive: Primitive,
    axes: Callable,
    whole: Callable,
    lower: Callable,
    sharding_context: Callable,
) -> Callable:
    """A lowering that splits the call over the devices of the program.

    `axes(operands, results, params)` are the call's, from avals; `whole` is the lowering for one
    device and `lower(function, ctx, operands)` that of plain JAX with several results.
    `sharding_context(count, devices)` is JAX's description of the devices of a program.
    """

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        group = _group(ctx, params["schedule"])
        if group is None:
            return whole(ctx, *operands, **params)
        known = axes(ctx.avals_in, ctx.avals_out, params)
        call = _Call(primitive, known, params, group, tuple(ctx.module_context.platforms))
        alone = call.lowered_alone(ctx.avals_in, params)
        function = custom_partitioning(call.of)
        function.def_partition(
            call.partition, decode_shardings=False, sharding_rule=_sharding_rule(known)
        )
        context, devices = ctx.module_context.axis_context, group.devices
        if group.every:  # the groups are programs of their own to the rule
            context = sharding_context(len(devices), devices)
        else:
            context = dataclasses.replace(context, device_assignment=devices)
        module = ctx.module_context.replace(axis_context=context)
        out = list(lower(function, ctx.replace(module_context=module), operands))
        # The program's text, by which JAX keeps executables, says nothing else of what is called.
        what = f"{primitive.name} {sorted(params.items())} {alone}"
        text = ir.StringAttr.get(hashlib.sha256(what.encode()).hexdigest())
        for value in jax.tree.leaves(out)[:1]:
            value.owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"sgap": text})
        return out

    return rule


def _sharding_rule(axes: Axes) -> SdyShardingRule:
    names: dict[str, str] = {}
    shared: list[str] = []

    def factor(name: str) -> str:
        return names.setdefault(name, f"a{len(names)}")

    def of(dimensions: Dimensions) -> ArrayMapping:
        mapped: list = []
        for axes in dimensions:
            if not axes:
                shared.append(f"w{len(shared)}")
                mapped.append(shared[-1])
            elif len(axes) == 1:
                mapped.append(factor(axes[0]))
            else:
                mapped.append(CompoundFactor(*map(factor, axes)))
        return ArrayMapping(*mapped)

    operands, results = (tuple(map(of, arrays)) for arrays in (axes.operands, axes.results))
    every = [dims for array in (*axes.operands, *axes.results) for dims in array]
    alone = {name for dims in every if len(dims) == 1 for name in dims}
    made = {name for array in axes.results for dims in array for name in dims}
    sizes: Any = {names[name]: axes.sizes[name] for name in names if name not in alone}
    return SdyShardingRule(
        operands,
        results,
        reduction_factors=tuple(names[name] for name in names if name not in made),
        need_replication_factors=tuple(shared),
        **sizes,
    )


class _Call:
    """A call of a primitive, as JAX's custom_partitioning wants it."""

    def __init__(
        self, primitive: Primitive, axes: Axes, params: dict, group: _Group, platforms: tuple
    ) -> None:
        self.primitive, self.axes, self.params = primitive, axes, params
        self.group, self.devices, self.platforms = group, group.devices, platforms

    def lowered_alone(self, avals: Sequence, params: dict) -> str:
        """The text of the call for one device; raises the errors that its lowering does."""
        token = _whole.set(True)
        try:
            given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]  # type: ignore[no-untyped-call]
            with use_abstract_mesh(AbstractMesh((), ())):
                traced = jax.jit(partial(self.primitive.bind, **params)).trace(*given)
                text: str = traced.lower(lowering_platforms=self.platforms).as_text()
            return text
        finally:
            _whole.reset(token)

    def of(self, *operands: Any) -> list:
        return self._results(operands, self.params)

    def _results(self, operands: Sequence, params: dict) -> list:
        out = self.primitive.bind(*operands, **params)
        return list(out) if self.primitive.multiple_results else [out]

    def partition(self, _: Any, operands: Sequence, results: Sequence) -> tuple:
        parts, found = self._split((*operands, *results))
        if not self._runs(operands, found, parts):
            found = {}
        names = tuple(f"part{i}" for i in range(len(parts)))
        mesh = Mesh(np.array(self.devices).reshape(parts), names)
        by_name = {axis: tuple(names[i] for i in split) for axis, split in found.items()}
        given, made = (
            [NamedSharding(mesh, spec) for spec in _specs(arrays, by_name)]
            for arrays in (self.axes.operands, self.axes.results)
        )
        params = self._local(found, parts)
        summed = [
            sum((by_name[a] for a in self._summed_axes(found, array)), ())
            for array in self.axes.results
        ]
        pieces = {
            i: math.prod(parts[place] for name in axes for place in found.get(name, ()))
            for i, axes in self.axes.once.items()
        }
        scattered = [
            self._scattered(x, over, own.spec, parts, names)
            for x, over, own in zip(results, summed, made, strict=True)
        ]
        made = [
            NamedSharding(mesh, jax.P(*(each.get(i, own) for i, own in enumerate(x.spec))))
            for x, each in zip(made, scattered, strict=True)
        ]

        def of_part(*operands: Any) -> list:
            with use_abstract_mesh(AbstractMesh((), ())):
                if any(summed):  # partial sums are rounded once, after the sum over devices
                    operands = tuple(map(_widened, operands))
                    operands = tuple(
                        x / pieces[i] if pieces.get(i, 1) > 1 else x for i, x in enumerate(operands)
                    )
                out = self._results(operands, params)
            every = zip(out, summed, scattered, results, strict=True)
            return [_summed(x, over, each).astype(like.dtype) for x, over, each, like in every]

        return self.group.mesh(parts, names), of_part, made, tuple(given)

    def _scattered(
        self,
        result: Any,
        summed: tuple[str, ...],
        spec: jax.P,
        parts: Sequence[int],
        names: tuple[str, ...],
    ) -> dict[int, tuple[str, ...]]:
        """{dimension: axes} of a result that is summed over axes of the devices and is asked for
        split over some of them: it is scattered there, and the sum is whole on no device. `spec`
        has the axes that split it as they do the operands."""
        ids = np.unravel_index(np.arange(len(self.devices)), parts)
        left, found = set(summed), {}
        for dimension, place in enumerate(_places(result, self.devices) if summed else ()):
            if place is None or spec[dimension] is not None:
                continue
            at, pieces = place
            over = tuple(names[i] for i in _digits(at, pieces, ids, parts) or ())
            if over and left.issuperset(over):
                found[dimension] = over
                left -= set(over)
        return found

    def _summed_axes(self, found: Mapping[str, tuple], result: Dimensions) -> list[str]:
        """The axes that are split and that a result is summed over."""
        lacking = (name for name in found if all(name not in names for names in result))
        return [name for name in lacking if name not in self.axes.held]

    def _local(self, found: Mapping[str, tuple], parts: Sequence[int]) -> dict:
        if self.axes.local is None:
            return self.params
        sizes = {
            name: size // math.prod(parts[i] for i in found.get(name, ()))
            for name, size in self.axes.sizes.items()
        }
        return self.axes.local(sizes)

    def _runs(self, operands: Sequence, found: Mapping[str, tuple], parts: Sequence[int]) -> bool:
        """Whether the call on one part obeys the schedule that the caller gave."""
        if self.params["schedule"] is None or not found:
            return True
        sizes = [
            jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
                tuple(
                    n // math.prod(parts[i] for name in names for i in found.get(name, ()))
                    for n, names in zip(x.shape, dimensions, strict=True)
                ),
                x.dtype,
            )
            for x, dimensions in zip(operands, self.axes.operands, strict=True)
        ]
        if any(self._summed_axes(found, array) for array in self.axes.results):
            sizes = list(map(_widened, sizes))
        try:
            self.lowered_alone(sizes, self._local(found, parts))
        except (ValueError, NotImplementedError):
            return False
        return True

    def _split(self, arrays: Sequence) -> tuple[tuple[int, ...], dict]:
        """(parts, {axis: positions in parts}): the mesh of devices, of prime sizes, and how it
        splits each axis. The shardings of the arrays come without names, and as far as they are
        those of a mesh, whose axes `parts` divides further, are found again."""
        dimensions = (*self.axes.operands, *self.axes.results)
        count = len(self.devices)
        places = [
            (names, _bytes(x), *place)
            for x, array in zip(arrays, dimensions, strict=True)
            for names, place in zip(array, _places(x, self.devices), strict=True)
            if names and place is not None
        ]
        best: tuple = (-1.0, (count,), {})
        for parts in _factorizations(count):
            ids = np.unravel_index(np.arange(count), parts)
            votes: dict[tuple[str, tuple], float] = {}
            understood, total = 0.0, 0.0
            for names, size, place, pieces in places:
                split = _digits(place, pieces, ids, parts)
                total += size
                if split is None:
                    continue
                understood += size
                for vote in _divided(names, [(i, parts[i]) for i in split], self.axes.sizes):
                    votes[vote] = votes.get(vote, 0) + size
            if understood > best[0]:
                found = _chosen(self.axes, votes, dict(enumerate(parts)))
                best = (understood, parts, found)
            if understood == total:
                break
        return best[1:]


def _summed(x: jax.Array, over: tuple[str, ...], scattered: Mapping[int, tuple]) -> jax.Array:
    """The sum over axes of the devices, of which each keeps the piece that is scattered to it."""
    if not x.size:
        return x
    for dimension, axes in scattered.items():
        x = jax.lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
        over = tuple(name for name in over if name not in axes)
    return jax.lax.psum(x, over) if over else x


def _widened(x: Any) -> Any:
    """Floats in float32 at least."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits >= 32:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=jnp.float32)
    return x.astype(jnp.float32)


def _factorizations(count: int) -> Iterator[tuple[int, ...]]:
    """All orders of the prime factors."""
    if count == 1:
        yield ()
    primes = [p for p in range(2, count + 1) if count % p == 0 and all(p % q for q in range(2, p))]
    for p in primes:
        for rest in _factorizations(count // p):
            yield (p, *rest)


def _places(array: Any, devices: tuple) -> list:
    """For each dimension which piece each device has, and the number of pieces; None where it is
    not split, or unevenly."""
    nothing: list = [None] * len(array.shape)
    if array.sharding is None or array.sharding.is_fully_replicated or 0 in array.shape:
        return nothing
    try:
        pieces = array.sharding.devices_indices_map(array.shape)
    except ValueError:  # uneven
        return nothing
    found = []
    for axis, size in enumerate(array.shape):
        bounds = [pieces[device][axis].indices(size)[:2] for device in devices]
        width = max(bounds[0][1] - bounds[0][0], 1)
        place = np.array([start // width for start, _ in bounds])
        found.append((place, size // width) if size // width > 1 else None)
    return found


def _digits(place: Any, pieces: int, ids: Sequence, parts: Sequence[int]) -> list[int] | None:
    """The parts of the mesh, outermost first, whose coordinates in turn are the digits of
    `place`; None if there are none."""
    found: list[int] = []
    while pieces > 1:
        for i, size in enumerate(parts):
            if i not in found and pieces % size == 0 and np.array_equal(place % size, ids[i]):
                found.insert(0, i)
                place, pieces = place // size, pieces // size
                break
        else:
            return None
    return found
