"""A cache of keys and values in pages, which sequences of different lengths share: block tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax.formats import structure
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import as_array, check_concrete, check_count, is_traced, saturated
from sgap_jax.formats.levels import CSR
from sgap_jax.nn.attend import rotated
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.attention import sparse_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of B sequences in pages of a common pool, as vLLM keeps them.

    Position t of sequence b is in row t % size of page tables[b, t // size]. Which page belongs to
    whom is decided outside: `dataclasses.replace(cache, tables=...)` gives a sequence more pages,
    and pages may be shared by sequences with a common beginning that no longer grows. All fields
    may be traced; a pytree.

    A position whose page is out of range, or past the `most` pages of its sequence, is lost: its
    key is stored nowhere, its own query gets zeros, and no other position changes. Outside jit,
    where lengths are known, positions past `most` pages are an error.

    Attributes:
      keys: [pages, size, Hk, D]; values: [pages, size, Hk, Dv].
      tables: int32 [B, most], pages of each sequence; one out of range holds nothing.
      lengths: int32 [B], positions of each sequence so far, also lost ones of the last call. Where
        some are lost, set it back to those that are held before the sequence goes on.

    Source: Kwon et al. 2023 (PagedAttention), section 4.
    """

    keys: jax.Array
    values: jax.Array
    tables: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(
        cls,
        tables: Any,
        size: int,
        heads: int,
        features: int,
        *,
        pages: int | None = None,
        value_features: int | None = None,
        dtype: Any = jnp.float32,
    ) -> PagedCache:
        """A cache of zeros for sequences with these tables, concrete where `pages` is None: then
        there are as many as the tables name."""
        op = "PagedCache.empty"
        size, heads = check_count(size, "size", op, 1), check_count(heads, "heads", op, 1)
        tables = as_array(tables)
        if tables.ndim != 2:
            raise ValueError(f"{op}: tables must have shape [B, most], got {list(tables.shape)}")
        if tables.size and not jnp.issubdtype(tables.dtype, jnp.integer):
            raise ValueError(f"{op}: tables must be integers, got {tables.dtype}")
        if pages is None:
            check_concrete(tables, "tables", op, "or pass pages")
            pages = int(np.max(np.asarray(tables).astype(np.int64), initial=-1)) + 1
        tables = saturated(tables)
        widths = (features, features if value_features is None else value_features)
        keys, values = (jnp.zeros((pages, size, heads, width), dtype) for width in widths)
        return cls(keys, values, tables, jnp.zeros(tables.shape[0], jnp.int32))

    def append(self, k: Any, v: Any) -> PagedCache:
        """The cache with the next positions of each sequence, k [B, T, Hk, D] and v [B, T, Hk, Dv].

        Raises ValueError for other shapes, and for a concrete length that leaves no room in `most`
        pages; under jit such positions are lost.
        """
        self, k, v = self._placed(), as_array(k), as_array(v)
        (B, most), (pages, size, heads, width) = self.tables.shape, self.keys.shape
        wanted = ((B, "T", heads, width), (B, "T", heads, self.values.shape[3]))
        for name, x, want in zip("kv", (k, v), wanted, strict=True):
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (B, *want[2:]):
                shape = ", ".join(map(str, want))
                got = list(x.shape)
                raise ValueError(f"PagedCache.append: {name} must have shape [{shape}], got {got}")
        if k.shape[1] != v.shape[1]:
            raise ValueError("PagedCache.append: expected as many values as keys")
        if not is_traced(self.lengths):
            used = np.minimum(self.lengths, most * size)
            full = np.flatnonzero(used > most * size - k.shape[1])
            if full.size and k.shape[1]:
                raise ValueError(
                    f"PagedCache.append: sequence {full[0]} has {used[full[0]]} positions of the "
                    f"{most * size} in {most} pages of {size}: {k.shape[1]} more do not fit; "
                    "dataclasses.replace(cache, tables=...) gives it more pages"
                )
        place = self.lengths[:, None] + structure.positions(k.shape[1])[None]
        rows = self._rows(structure.positions(B)[:, None], place).reshape(-1)
        rows = jnp.where(rows < 0, pages * size, rows)

        def written(pool: jax.Array, x: Any) -> jax.Array:
            flat = pool.reshape(pages * size, *pool.shape[2:])
            x = x.astype(pool.dtype).reshape(-1, *pool.shape[2:])
            return flat.at[rows].set(x, mode="drop").reshape(pool.shape)

        # The last call's positions count also past the pages: `attend` looks for them from the end.
        lengths = jnp.minimum(self.lengths, most * size) + k.shape[1]
        return PagedCache(written(self.keys, k), written(self.values, v), self.tables, lengths)

    def attend(
        self,
        q: Any,
        *,
        window: int | None = None,
        alibi_slopes: Any = None,
        relative_bias: Any = None,
        **options: Any,
    ) -> jax.Array:
        """Attention of the last T positions of each sequence, q [B, T, H, D], over those up to
        themselves, or the last `window` of these: [B, T, H, Dv]. Zeros for a lost position.

        One call of `sparse_attention`, whose pattern has a row for each query and the pool's rows
        as columns; `options` are its scale, softcap, sinks and schedule. `alibi_slopes` [H] and
        `relative_bias` [H, R] are of positions in the sequence.
        """
        self, q, op = self._placed(), jnp.asarray(q), "PagedCache.attend"
        (B, most), (pages, size) = self.tables.shape, self.keys.shape[:2]
        if q.ndim != 4 or q.shape[0] != B:
            raise ValueError(f"{op}: q must have shape [{B}, T, H, D], got {list(q.shape)}")
        for name in options:
            if name not in ("scale", "softcap", "sinks", "schedule"):
                raise NotImplementedError(f"{op}: {name}: pages have none of it")
        T, H = q.shape[1:3]
        longest = most * size
        if window is not None:
            longest = min(longest, check_count(window, "window", op, 1))
        # No row of the pool may come from outside it, whatever the tables hold: entries without a
        # place have column -1, and take no part.
        place = (self.lengths[:, None] - T + structure.positions(T)[None]).reshape(-1)
        held = self._rows(structure.positions(B * T) // max(T, 1), place) >= 0
        counts = jnp.where(held, jnp.clip(place + 1, 0, longest), 0)
        ends = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32))
        capacity = B * T * longest
        entry, row = structure.positions(capacity), structure.segment_of_entry(ends, capacity)
        row = jnp.minimum(row, max(B * T - 1, 0))
        at = place[row] + 1 - counts[row] + entry - ends[row]
        columns = jnp.where(entry < ends[-1], self._rows(row // max(T, 1), at), -1)
        pool, none = pages * size, jnp.zeros(capacity, jnp.float32)
        levels = ((), (ends, columns))
        transposed = structure.transpose_structure(ends, columns, pool)
        fields = structure.as_fields(levels, transposed, checked=False)
        pattern = SparseArray(none, **fields, shape=(B * T, pool), format=CSR)
        bias = None
        distance = (at - place[row]).astype(accumulator(q.dtype))
        if alibi_slopes is not None:
            bias = jnp.asarray(alibi_slopes, distance.dtype)[:, None] * distance[None]
        if relative_bias is not None:
            table = jnp.asarray(relative_bias)
            half = table.shape[-1] // 2
            found = jnp.broadcast_to(table, (H, table.shape[-1]))[
                :, jnp.clip(at - place[row], -half, table.shape[-1] - 1 - half) + half
            ].astype(distance.dtype)
            bias = found if bias is None else bias + found
        k, v = (
            x.reshape(1, pages * size, *x.shape[2:]).astype(q.dtype)
            for x in (self.keys, self.values)
        )
        out = sparse_attention(
            q.reshape(1, B * T, *q.shape[2:]), k, v, pattern, bias=bias, **options
        )
        return out.reshape(B, T, *out.shape[2:])

    def _placed(self) -> PagedCache:
        """The cache with arrays of JAX: one that was read from a checkpoint may have NumPy's."""
        keys, values = jnp.asarray(self.keys), jnp.asarray(self.values)
        return PagedCache(keys, values, saturated(self.tables), saturated(self.lengths))

    def _rows(self, sequence: jax.Array, place: jax.Array) -> jax.Array:
        """The rows of the pool that hold these positions; -1 for none."""
        most, (pages, size) = self.tables.shape[1], self.keys.shape[:2]
        if most == 0:
            return jnp.full(jnp.broadcast_shapes(sequence.shape, place.shape), -1, jnp.int32)
        of = place // size
        page = self.tables[sequence, jnp.clip(of, 0, most - 1)]
        inside = (place >= 0) & (of < most) & (page >= 0) & (page < pages)
        return jnp.where(inside, page * size + place % size, -1)


def check_paged(op: str, inputs: Any, refused: dict[str, Any]) -> None:
    """Errors for what a layer's call over pages does not take."""
    if inputs.ndim != 3:
        got = list(inputs.shape)
        raise ValueError(f"{op}: paged_cache: inputs must have shape [B, T, features], got {got}")
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(f"{op}: paged_cache: a call over pages takes no {name}")


def attend_paged(
    op: str, cache: PagedCache, projected: Any, rotary: bool | float, **options: Any
) -> tuple[jax.Array, PagedCache]:
    """(out, cache): attention of a layer's next positions over a cache with them added."""
    count, lengths = projected[0].shape[1], saturated(cache.lengths)
    positions = lengths[:, None] + structure.positions(count)[None]
    of = positions if rotary is not False else None
    query, key, value = rotated(op, projected, rotary, of)
    cache = cache.append(key, value)
    return cache.attend(query, **options), cache
