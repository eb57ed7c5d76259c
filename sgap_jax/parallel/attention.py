"""Attention over a pattern in parts: queries, keys and values split along the sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_flag
from sgap_jax.formats.structure import whole
from sgap_jax.formats.vectors import split_blocks, tile
from sgap_jax.parallel.operations import check_parts
from sgap_jax.parallel.partitioned import Part, PartitionedArray
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
    heads share once. Nothing of the length of the whole sequence is on any device. The gradients
    of keys and values travel the same way back. Differentiable to any order in q, k, v, bias, sinks
    and in `scale` if it is an array.

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
      schedule that a part has. Gradients of keys and values are sums over devices, in an order of
      their own.

    Raises:
      TypeError: pattern is not a PartitionedArray.
      ValueError: shapes that do not fit.
      NotImplementedError: `is_causal` or `key_value_seq_lengths` with reordered rows.

    Source: vectorSparse, section 7.4, eq. 1; the exchange is that of `parallel.spmm`.
    """
    op = "parallel.sparse_attention"
    check_parts("sparse_attention", pattern, "pattern")
    schedule = check_schedule(op, schedule)
    is_causal = check_flag(is_causal, "is_causal", op)
    return_lse = check_flag(return_lse, "return_lse", op)
    if not pattern.given and (is_causal or key_value_seq_lengths is not None):
        raise NotImplementedError(
            f"{op}: no is_causal and no key_value_seq_lengths for reordered rows; partition a "
            "pattern without the entries that they leave out"
        )
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
    bounds = jnp.asarray(pattern.row_bounds, jnp.int32)
    block = pattern.format.block_shape

    def local(part: Part, *operands: Any) -> Any:
        *stored, q, k, v, shared = operands
        entries, structure = None, part.pattern()
        if stored:
            entries = part.in_matrix(jnp.concatenate(stored, axis=-1 - len(block))[0])
        if is_causal:
            begin = bounds[jax.lax.axis_index(part.axis)]
            entries = _causal(part, begin, entries, accumulator(q.dtype))
        if entries is not None and len(block) == 2:  # the kernels have a bias of vectors
            structure, entries = _as_vectors(structure, entries)
        seen = shared.get("lengths")
        if seen is not None:  # how many of the keys here come before the end of the sequence
            seen = jnp.sum(part.table_names[None, :] < seen, axis=1, dtype=jnp.int32)
        return local_attention(
            q,
            part.table(k, 1),
            part.table(v, 1),
            structure,
            scale=shared.get("scale", scale),
            bias=entries,
            sinks=shared.get("sinks"),
            key_value_seq_lengths=seen,
            return_lse=True,
            schedule=schedule,
        )

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


def _causal(part: Part, begin: jax.Array, bias: Any, dtype: Any) -> jax.Array:
    """A bias of -infinity at entries whose key comes after the query."""
    offsets, columns = part.merged.index_arrays[1]
    high, wide = tile(part.merged.format)
    rows = row_of_entry(offsets, columns.shape[0])[:, None, None] * high
    rows = begin + rows + jnp.arange(high, dtype=jnp.int32)[:, None]
    columns = columns[:, None, None] * wide + jnp.arange(wide, dtype=jnp.int32)
    later = (part.table_names[columns] > rows).reshape(-1, *part.merged.format.block_shape)
    return jnp.where(later, -jnp.inf, jnp.zeros((), dtype) if bias is None else bias)
