"""The structure of a product of two sparse matrices: the symbolic phase of `spgemm`."""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import capacity, checks
from sgap_jax.formats import structure as structures
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSR
from sgap_jax.launch.spgemm import RowSizes, count_plan, indices_plan, pattern_row_sizes
from sgap_jax.primitives._batch import (
    mapped_first,
    plain_lowering,
    structures_of_lowering,
)
from sgap_jax.primitives._define import (
    batch_rule,
    bind,
    define,
    launch_lowering,
    out_aval,
    row_of_entry,
    structure,
)
from sgap_jax.primitives._vectors import by_rows
from sgap_jax.schedules import Schedule
from sgap_jax.schedules.families import failing, warn_once


class Rows(NamedTuple):
    """Index arrays of a matrix by rows, and of its transpose."""

    offsets: Any
    indices: Any
    transposed_offsets: Any = None
    transposed_indices: Any = None
    permutation: Any = None

    def transpose(self) -> "Rows":
        inverse = structures.invert_permutation(self.permutation)
        return Rows(*self[2:4], *self[:2], inverse)

    def well_formed(self, size: int) -> "Rows":
        offsets, indices = structures.well_formed(self.offsets, self.indices, size)
        return self._replace(offsets=offsets, indices=indices)


def rows_of(A: SparseArray) -> tuple[Any, Rows]:
    """Values and index arrays of A by rows."""
    base, by_columns = by_rows(A)
    rows = Rows(*structure(base))
    if not by_columns:
        return base.values, rows
    return structures.moved(base.values, rows.permutation), rows.transpose()


def each_product(a: Rows, b: Rows, step: Any, state: Any) -> Any:
    """Folds `state = step(state, entry, column)` over the entries of the rows of B that A's entries
    meet: arrays [entries of A], the t-th entry of each row at the t-th step. `column` is -1 where a
    row has no more."""
    if 0 in (*a.indices.shape, *b.indices.shape):
        return state
    begin, last = b.offsets[jnp.maximum(a.indices, 0)], b.indices.shape[0] - 1
    count = _of_entries(a, b)

    def body(t: Any, state: Any) -> Any:
        entry = jnp.minimum(begin + t, last)
        return step(state, entry, jnp.where(t < count, b.indices[entry], -1))

    return jax.lax.fori_loop(0, jnp.max(count), body, state)


def by_size(a: Rows, b: Rows, stored: Any, sizes: RowSizes) -> tuple[Any, Any]:
    """The rows of A B listed by their size, as the CUDA kernels take them, and where each size
    begins; `stored` is how many entries a row of C has. The index arrays are well formed."""
    m = a.offsets.shape[0] - 1
    # Floats count without overflow, and small numbers exactly.
    counts = _of_entries(a, b).astype(jnp.float32)
    rows = row_of_entry(a.offsets, a.indices.shape[0])
    products = jax.ops.segment_sum(counts, rows, num_segments=m, indices_are_sorted=True)
    size = jnp.zeros(m, jnp.int32)
    for entries, most in zip(sizes.entries[1:], sizes.products[1:], strict=True):
        size += ((stored <= entries) & (products <= most)).astype(jnp.int32)
    each = size[:, None] == structures.positions(len(sizes.entries))[None]
    places = jnp.cumsum(each, axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(places[-1], dtype=jnp.int32)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    place = begins[size] + jnp.take_along_axis(places, size[:, None], 1)[:, 0] - 1
    listed = jnp.zeros(m, jnp.int32).at[place].set(structures.positions(m), unique_indices=True)
    return listed, begins


def _of_entries(a: Rows, b: Rows) -> Any:
    """How many products each entry of A has."""
    row = jnp.maximum(a.indices, 0)
    return jnp.where(a.indices < 0, 0, b.offsets[row + 1] - b.offsets[row])


def row_offsets(*arrays: Any, columns: int) -> Any:
    """Row offsets of A B, which end at 2^31 - 1 if there are as many entries or more."""
    like = jax.ShapeDtypeStruct(arrays[0].shape, jnp.int32)
    call = jax.ffi.ffi_call("sgap_spgemm_offsets_v1", like, vmap_method="sequential")
    return structures.varying_like(call(*arrays, columns=np.int64(columns)), *arrays)


def column_indices(*arrays: Any, columns: int, nse: int) -> Any:
    """Column indices of A B, of as many entries as the offsets (the last operand) have room for."""
    like = jax.ShapeDtypeStruct((nse,), jnp.int32)
    call = jax.ffi.ffi_call("sgap_spgemm_indices_v1", like, vmap_method="sequential")
    return structures.varying_like(call(*arrays, columns=np.int64(columns)), *arrays)


def pattern_in_capacity(
    *arrays: Any, columns: int, nse: int, schedule: Schedule | None
) -> tuple[Any, Any]:
    """Offsets and indices of A B in a capacity; the last offset counts what does not fit too, up
    to 2^31 - 1. `arrays` are offsets and indices of A and of B by rows, with any contents."""
    operands = (x[None] for x in arrays)
    offsets, indices = bind(
        spgemm_pattern_p, *operands, columns=columns, nse=nse, schedule=schedule
    )
    return jnp.squeeze(offsets, 0), jnp.squeeze(indices, 0)


# Operands of the primitive: offsets [B, m + 1] and indices [B, entries] of A, those of B likewise.
# Results: offsets [B, m + 1] and indices [B, nse].


def _pattern_eval(*arrays: Any, columns: int, nse: int, schedule: Any) -> list:
    offsets, batch = arrays[0], arrays[0].shape[0]
    assert all(x.shape[0] == batch and x.dtype == jnp.int32 for x in arrays)
    return [out_aval(offsets, (batch, n), offsets.dtype) for n in (offsets.shape[1], nse)]


def _pattern_reference(*arrays: Any, columns: int, nse: int, schedule: Any) -> list:
    # Through a dense [m, n] array of flags.
    def of_one(*arrays: Any) -> list:
        rows, inner = arrays[0].shape[0] - 1, arrays[2].shape[0] - 1
        a, b = Rows(*arrays[:2]).well_formed(inner), Rows(*arrays[2:]).well_formed(columns)
        row = row_of_entry(a.offsets, a.indices.shape[0])

        def mark(flags: Any, entry: Any, column: Any) -> Any:
            return flags.at[jnp.where(column < 0, rows, row), column].set(True, mode="drop")

        flags = each_product(a, b, mark, jnp.zeros((rows, columns), bool))
        fields = capacity.of_dense(flags, shape=(rows, columns), format=CSR, nse=nse)
        return list(fields["index_arrays"][1])

    return list(jax.vmap(of_one)(*arrays))


def _pattern_cpu(ctx: Any, *operands: Any, columns: int, nse: int, schedule: Any) -> Any:
    if schedule is not None or structures_of_lowering() > 1:
        return None

    def of_one(arrays: tuple) -> tuple[Any, Any]:
        offsets = row_offsets(*arrays, columns=columns)
        return offsets, column_indices(*arrays, offsets, columns=columns, nse=nse)

    def kernels(*arrays: Any) -> tuple[Any, Any]:
        if arrays[0].shape[0] != 1:
            return jax.lax.map(of_one, arrays)
        offsets, indices = of_one(tuple(jnp.squeeze(x, 0) for x in arrays))
        return offsets[None], indices[None]

    return plain_lowering(kernels, True, ctx, operands)


def _pattern_cuda(ctx: Any, *operands: Any, columns: int, nse: int, schedule: Any) -> Any:
    offsets, a_indices, inner, b_indices = ctx.avals_in
    batch, shape = offsets.shape[0], (offsets.shape[1] - 1, inner.shape[1] - 1, columns)
    entries = a_indices.shape[1], b_indices.shape[1]
    every = (batch, *shape, *entries, nse)
    symbolic = any(jax.export.is_symbolic_dim(n) for n in every)
    # Several structures: one after the other.
    if schedule is not None or symbolic or 0 in every or structures_of_lowering() > 1:
        return None
    if (why := failing().get("spgemm")) is not None:
        warn_once("spgemm", why, "sparse products run in plain JAX")
        return None
    sizes = pattern_row_sizes()

    def prepared(*arrays: Any) -> tuple:
        def of_one(*arrays: Any) -> tuple:
            a = Rows(*arrays[:2]).well_formed(shape[1])
            b = Rows(*arrays[2:]).well_formed(columns)
            return *a[:2], *b[:2], *by_size(a, b, jnp.zeros(shape[0], jnp.int32), sizes)

        return tuple(jax.vmap(of_one)(*arrays))

    valid = plain_lowering(prepared, True, ctx, operands)
    counts = offsets.update(shape=(batch, shape[0]))
    begins = offsets.update(shape=(batch, len(sizes.products) + 1))
    avals = [*ctx.avals_in, counts, begins]
    call = count_plan(shape, entries, batch)
    counted = launch_lowering(ctx, call, valid, avals, [counts])
    made = plain_lowering(_saturating_offsets, False, ctx.replace(avals_in=[counts]), counted)
    call = indices_plan(shape, entries, nse, batch)
    results = [ctx.avals_out[1]]
    return [*made, *launch_lowering(ctx, call, [*valid, *made], [*avals, offsets], results)]


def _saturating_offsets(counts: Any) -> Any:
    """[B, m + 1] of counts [B, m]: their prefix sums, 2^31 - 1 where they are as much or more."""
    most = np.uint32(checks.INT32_MAX)
    add = lambda x, y: jnp.minimum(x + y, most)  # noqa: E731
    sums = jax.lax.associative_scan(add, counts.astype(jnp.uint32), axis=1)
    return jnp.pad(sums.astype(jnp.int32), ((0, 0), (1, 0)))


def _pattern_jvp(primals: Any, tangents: Any, **params: Any) -> tuple:
    return bind(spgemm_pattern_p, *primals, **params), None


def _pattern_batch(args: Any, dims: Any, **params: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    every = [mapped_first(a, d, size) for a, d in zip(args, dims, strict=True)]
    return batch_rule(spgemm_pattern_p, 4, every, (0,) * 4, **params)


spgemm_pattern_p = define(
    "spgemm_pattern",
    data=4,
    axes="b, b, b, b -> b, b",
    abstract_eval=_pattern_eval,
    reference=_pattern_reference,
    cpu=_pattern_cpu,
    cuda=_pattern_cuda,
    jvp=_pattern_jvp,
    transpose=None,
    batch=_pattern_batch,
    multiple_results=True,
)
