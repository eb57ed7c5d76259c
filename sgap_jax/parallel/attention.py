"""Attention over a pattern in parts: queries, keys and values split along the sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.structure import whole
from sgap_jax.formats.vectors import split_blocks, tile
from sgap_jax.parallel.operations import check_parts
from sgap_jax.parallel.part import Part
from sgap_jax.parallel.partitioned import PartitionedArray
from sgap_jax.primitives._define import accumulator, check_scale, check_schedule, row_of_entry
from sgap_jax.primitives.attention import sparse_attention as local_attention
from sgap_jax.primitives.attention_arguments import as_lengths, as_sinks, check_heads
from sgap_jax.schedules import Schedule


def sparse_attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: PartitionedArray,
    *,
    scale: Any = None,
    bias: tuple[Any, Any] | None = None,
    sinks: Any = None,
    is_causal: bool = False,
    key_value_seq_lengths: Any = None,
    return_lse: bool = False,
    batch_axis: str | None = None,
    heads_axis: str | None = None,
    schedule: Schedule | str | None = None,
) -> Any:
    """`sgap_jax.sparse_attention` of a sequence that is split over devices.

        s[i, j] = scale Q[i, :] . K[j, :] + bias[i, j]        at stored entries (i, j)
        O[i, :] = sum_j exp(s[i, j] - lse[i]) V[j, :]

    A device has the queries, keys and values of its part of the sequence, and receives the keys and
    values that the pattern names for its queries: of a band those of its neighbours, a key that
    heads share once. Of a row that names nearly all keys the query travels instead, to all devices,
    which attend with their own keys, where that sends less (`partition` decides). A device has no
    other keys. The gradients travel the same way back. Differentiable to any order in q, k, v,
    bias, sinks and in `scale` if it is an array.

    Args:
      q: [B, L, H, D], or [L, H, D], in the order of the sequence.
      k, v: [B, S, Hk, D] and [B, S, Hk, Dv].
      pattern: [L, S] in parts. If all parts have as many rows (`rows="even"` and an L that the
        devices divide) in the given order, arrays that are split along the sequence,
        `jax.P(None, axis)`, stay where they are; else q, k and v are put in parts first, and the
        result back.
      bias: a value for each stored entry, as `pattern.values` has them: of own and of foreign
        entries, [parts, entries], or with leading axes [H, parts, entries] or
        [B, H, parts, entries], where H or B may be 1; of vectors and blocks
        [..., parts, vectors, V] and [..., parts, blocks, r, c]. `partition` of a pattern with the
        bias as its values gives them.
      scale, sinks, key_value_seq_lengths, return_lse: as of `sgap_jax.sparse_attention`.
      is_causal: leave out entries (i, j) with j > i, by a bias; `masks.causal` makes a pattern that
        stores few of them.
      batch_axis, heads_axis: other axes of the mesh, over which the sequences of the batch, or the
        heads of queries and of keys, are split too; those of axes without a name are gathered. A
        second axis of the pattern splits the heads where it divides them.
      schedule: of the attention on each device.

    Returns:
      O [B, L, H, Dv] ([L, H, Dv] as q), split along the sequence, or (O, lse), with the dtypes and
      sums of `sgap_jax.sparse_attention` and, in the given order of rows, its bits with the
      schedule that a part has. Of rows whose queries travel each device's result is rounded, and
      they are merged in the accumulation dtype. Gradients of keys and values are sums over devices,
      in an order of their own.

    Raises:
      TypeError: pattern is not a PartitionedArray.
      ValueError: shapes that do not fit.

    Source: vectorSparse, section 7.4, eq. 1; the exchange is that of `parallel.spmm`; results of
    parts of a row are merged as in FlashAttention (Dao et al., 2022), section 3.1.
    """
    op = "parallel.sparse_attention"
    check_parts("sparse_attention", pattern, "pattern")
    schedule = check_schedule(op, schedule)
    is_causal = check_flag(is_causal, "is_causal", op)
    return_lse = check_flag(return_lse, "return_lse", op)
    for name, x in (("q", q), ("k", k), ("v", v)):
        pattern._check_devices(f"{op}: {name}", x)
    q, k, v, batched = check_heads(op, q, k, v, [pattern])  # type: ignore[list-item]
    split = _axes(op, pattern, q, k, batch_axis, heads_axis)
    heads_axis = split[2]
    lengths = as_lengths(op, key_value_seq_lengths, q.shape[0])
    biases = () if bias is None else _bias(op, bias, pattern, q)
    shared, specs = {}, {}
    if key_value_seq_lengths is not None:
        shared["lengths"] = lengths
        specs["lengths"] = jax.P(batch_axis if lengths.shape[0] > 1 else None)
    if sinks is not None:
        shared["sinks"] = as_sinks(op, sinks, q.shape[2], accumulator(q.dtype))[0]
        specs["sinks"] = jax.P(heads_axis)
    if isinstance(scale, jax.Array):
        shared["scale"], specs["scale"] = check_scale(op, scale), jax.P()
    ordered = pattern.given or not (is_causal or key_value_seq_lengths is not None)
    if not ordered:  # the number of each row and column, of which a part has others of its own
        for name, places in (("rows", pattern.row_places), ("columns", pattern.column_places)):
            shared[name], specs[name] = jnp.argsort(places).astype(jnp.int32), jax.P()
    bounds = jnp.asarray(pattern.row_bounds, jnp.int32)
    block = pattern.format.block_shape
    wide = accumulator(q.dtype)

    def local(part: Part, *operands: Any) -> Any:
        *stored, q, k, v, shared = operands
        stored = [x[0] for x in stored]

        def attended(
            q: Any, k: Any, v: Any, structure: SparseArray, names: tuple, bias: Any, sinks: Any
        ) -> tuple:
            """Of rows and columns of these names, in the order of the parts."""
            seen = shared.get("lengths")
            if not ordered:
                found = zip((shared["rows"], shared["columns"]), names, strict=True)
                names = tuple(x.at[at].get(mode="fill", fill_value=_NONE) for x, at in found)
            if is_causal:
                bias = _left_out(_causal(structure, *names), bias, block, wide)
            if seen is not None and not ordered:
                bias = _left_out(_from(structure, names[1], seen), bias, block, wide)
                seen = None
            if seen is not None:  # how many of the keys here come before the end of the sequence
                seen = jnp.sum(names[1][None, :] < seen, axis=1, dtype=jnp.int32)
            if bias is not None and len(block) == 2:  # the kernels have a bias of vectors
                structure, bias = _as_vectors(structure, bias)
            return local_attention(
                q,
                k,
                v,
                structure,
                scale=shared.get("scale", scale),
                bias=bias,
                sinks=sinks,
                key_value_seq_lengths=seen,
                return_lse=True,
                schedule=schedule,
            )

        rest, rows = part.other_rows(), part.own.shape[0]
        names = bounds[jax.lax.axis_index(part.axis)] + jnp.arange(rows, dtype=jnp.int32)
        bias = None
        if stored:
            bias = rest.in_matrix(jnp.concatenate(stored, axis=-1 - len(block)))
        sinks = shared.get("sinks")
        found = attended(
            *(q, rest.table(k, 1), rest.table(v, 1), rest.pattern()),
            *((names, rest.table_names), bias, sinks),
        )
        some = part.global_rows
        if some is None:
            return found
        queries = some.queries.swap(part.axis, q[:, some.query_sends], 1)
        bias = some.bias_of(part.axis, stored[0], stored[1], len(block)) if stored else None
        own_keys = attended(
            *(queries, k, v, part.structure_of(some.entries)),
            *((some.row_names, some.column_names), bias, None),
        )
        merged = _merged(own_keys, part.axis, sinks)
        owner = some.queries.owner_of_shared
        at = jnp.where(owner == jax.lax.axis_index(part.axis), some.query_sends, rows)
        pairs = zip(found, merged, strict=True)
        return tuple(x.at[:, at].set(y.astype(x.dtype), mode="drop") for x, y in pairs)

    sequences = tuple(_spread(pattern, x, x is not q) for x in (q, k, v))
    of_entries = tuple(
        jax.P(pattern.axis, *(axis if size > 1 else None for axis, size in _lead(x, split, block)))
        for x in biases
    )
    results = pattern._on_each(
        local,
        *biases,
        *sequences,
        shared=(shared,),
        specs=((*of_entries, *(split,) * 3), (specs,)),
        out_specs=split,
    )
    out, lse = (_gathered(pattern, x) for x in results)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _axes(
    op: str, A: PartitionedArray, q: jax.Array, k: jax.Array, batch: Any, heads: Any
) -> jax.P:
    """How q, k and v [B, L, H, D] are split."""
    if heads is None and A.second is not None and batch != A.second:
        devices = A.mesh.shape[A.second]
        heads = None if q.shape[2] % devices or k.shape[2] % devices else A.second
    for name, axis, sizes in (
        ("batch_axis", batch, q.shape[:1]),
        ("heads_axis", heads, (q.shape[2], k.shape[2])),
    ):
        if axis is None:
            continue
        others = [x for x in A.mesh.axis_names if x != A.axis]
        if axis not in others or (name == "heads_axis" and axis == batch):
            raise ValueError(f"{op}: {name}: expected another axis, of {others}, got {axis!r}")
        if any(size % A.mesh.shape[axis] for size in sizes):
            raise ValueError(
                f"{op}: {name}: {A.mesh.shape[axis]} devices along {axis!r} do not divide "
                f"{' and '.join(map(str, sizes))}"
            )
    return jax.P(batch, A.axis, heads)


def _lead(bias: jax.Array, split: jax.P, block: tuple[int, ...]) -> list[tuple[Any, int]]:
    """(axis of the mesh, size) of the axes B and H, or H, of a bias [parts, B, H, entries], of
    vectors or blocks with theirs behind."""
    sizes = bias.shape[1 : bias.ndim - 1 - len(block)]
    return list(zip((split[0], split[2])[2 - len(sizes) :], sizes, strict=True))


def _in_place(A: PartitionedArray, of_columns: bool) -> bool:
    """Whether the parts follow each other without padding, in the order of the sequence."""
    size, rows = A.shape[1 if of_columns else 0], A._layout(of_columns)[1]
    ordered = A.given or (of_columns and A.shape[0] != A.shape[1])
    return ordered and A.parts * rows == size


def _spread(A: PartitionedArray, x: jax.Array, of_columns: bool) -> jax.Array:
    """[B, L, ...] -> [B, parts * rows, ...]."""
    if _in_place(A, of_columns):
        return x
    places, rows = A._layout(of_columns)
    padded = jnp.zeros((x.shape[0], A.parts * rows, *x.shape[2:]), x.dtype)
    return padded.at[:, places].set(whole(x))


def _gathered(A: PartitionedArray, x: jax.Array) -> jax.Array:
    """[B, parts * rows, ...] -> [B, L, ...]."""
    return x if _in_place(A, False) else whole(x)[:, A.row_places]


def _bias(op: str, bias: Any, A: PartitionedArray, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bias of own and of foreign entries, with the axis of the parts in front."""
    B, _, H, _ = q.shape
    if not isinstance(bias, tuple | list) or len(bias) != 2:
        raise ValueError(
            f"{op}: bias: expected values of own and of foreign entries, as pattern.values, got "
            f"{type(bias).__name__}"
        )
    own, foreign = (jnp.asarray(x) for x in bias)
    stored = A.own.values.ndim  # [parts, entries] and the axes of vectors or blocks
    for name, x, values in zip(("own", "foreign"), (own, foreign), A.values, strict=True):
        lead = x.shape[: max(x.ndim - stored, 0)]
        fits = len(lead) <= 2 and x.shape[len(lead) :] == values.shape and x.ndim >= stored
        fits = fits and all(got in (1, want) for got, want in zip(lead[::-1], (H, B), strict=False))
        if not fits or lead != own.shape[:-stored] or not jnp.issubdtype(x.dtype, jnp.floating):
            entries = ", ".join(map(str, values.shape))
            raise ValueError(
                f"{op}: bias of {name} entries must be floats of shape [{entries}], "
                f"[{H}, {entries}] or [{B}, {H}, {entries}], got {list(x.shape)} of {x.dtype}"
            )
    return jnp.moveaxis(own, -stored, 0), jnp.moveaxis(foreign, -stored, 0)


def _as_vectors(pattern: SparseArray, bias: jax.Array) -> tuple[SparseArray, jax.Array]:
    """A pattern in BCSR(r, c), and a bias [..., blocks, r, c], in CVS(r)."""

    def split(values: jax.Array) -> jax.Array:
        found: jax.Array = split_blocks(replace(pattern, values=values)).values
        return found

    each = jax.vmap(split)(bias.reshape(-1, *bias.shape[-3:]))
    return split_blocks(pattern), each.reshape(*bias.shape[:-3], *each.shape[1:])


def _merged(found: tuple, axis: str, sinks: Any) -> tuple[jax.Array, jax.Array]:
    """Attention over the keys of all parts, from (result, log-sum-exp) of those of each."""
    out, lse = found
    most = jax.lax.pmax(jax.lax.stop_gradient(lse), axis)
    if sinks is not None:
        most = jnp.maximum(most, jax.lax.stop_gradient(sinks))
    most = jnp.where(jnp.isfinite(most), most, 0)
    weight = jnp.exp(lse - most)
    total = jax.lax.psum(weight, axis)
    if sinks is not None:
        total = total + jnp.exp(sinks - most)
    some = total != 0  # else the row has no entry anywhere
    total = jnp.where(some, total, 1)
    out = jax.lax.psum(weight[..., None] * out, axis) / total[..., None]
    return out, jnp.where(some, most + jnp.log(total), -jnp.inf)


_NONE = np.iinfo(np.int32).max  # the name of padding


def _places(structure: SparseArray) -> tuple[jax.Array, jax.Array]:
    """The row [entries, high, 1] and the column [entries, 1, wide] of each entry."""
    offsets, columns = structure.index_arrays[1]
    high, wide = tile(structure.format)
    rows = row_of_entry(offsets, columns.shape[0])[:, None, None] * high
    rows = rows + jnp.arange(high, dtype=jnp.int32)[:, None]
    return rows, columns[:, None, None] * wide + jnp.arange(wide, dtype=jnp.int32)


def _causal(structure: SparseArray, row_names: jax.Array, column_names: jax.Array) -> jax.Array:
    """Which entries [entries, high, wide] have a key that comes after the query."""
    rows, columns = _places(structure)
    return column_names[columns] > row_names[rows]


def _from(structure: SparseArray, column_names: jax.Array, lengths: jax.Array) -> jax.Array:
    """Which entries [B, 1, entries, high, wide] have a key at or after the end [B, 1] of its
    sequence."""
    _, columns = _places(structure)
    names = jnp.broadcast_to(column_names[columns], (columns.shape[0], *tile(structure.format)))
    return names >= lengths[:, :, None, None, None]


def _left_out(out: jax.Array, bias: Any, block: tuple[int, ...], dtype: Any) -> jax.Array:
    """The bias with -infinity where entries [..., entries, high, wide] are left out."""
    out = out.reshape(*out.shape[:-2], *block)
    return jnp.where(out, -jnp.inf, jnp.zeros((), dtype) if bias is None else bias)
