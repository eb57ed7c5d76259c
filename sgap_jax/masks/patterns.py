"""The masks of the literature, each defined by the keys that a query sees."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.checks import check_concrete
from sgap_jax.formats.levels import CSR, CVS, Format
from sgap_jax.masks.build import (
    TRACED_MASK,
    check_size,
    of_block_rows,
    of_slices,
    rows_of_vectors,
)


def band(L: int, width: int, S: int | None = None, *, format: Format | str = CSR) -> SparseArray:
    """The `width` keys around the query's own position:

        (i, j) stored  <=>  -(width // 2) <= j - i < width - width // 2

    Args:
      L: number of queries; S: number of keys, L if None.
      width: at least 1; an odd width covers as many keys before the query as after it.
      format: CSR or CVS(V).

    Source: Sparse Transformers (Child et al. 2019), section 4; Longformer's sliding window.
    """
    L, S = check_size("band", "L", L), check_size("band", "S", L if S is None else S)
    width = check_size("band", "width", width, 1)
    first = np.arange(L) - width // 2
    return of_slices("band", [(np.maximum(first, 0), np.minimum(first + width, S))], (L, S), format)


def band_and_random(
    L: int,
    band: int,
    sparsity: float,
    vector_length: int = 8,
    seed: int = 0,
    *,
    format: Format | str | None = None,
) -> SparseArray:
    """A dense band and keys at random, in vectors: group g of V = `vector_length` rows stores

        V g - (band - V) // 2 <= j < V g - (band - V) // 2 + band      within the matrix

    and other keys, drawn without replacement, as many as bring the density of groups 0 .. g to
    1 - sparsity.

    Args:
      L: number of queries and of keys.
      band: columns of the band of a group, at least V (the diagonal) and at most (1 - sparsity) L
        (or V).
      sparsity: share of the entries that are not stored, in [0, 1).
      vector_length: V.
      seed: of the random keys; the same arguments give the same mask.
      format: CVS(V) if None; CSR stores the same entries.

    Raises:
      ValueError: a band that leaves out the diagonal or does not fit in the density.

    Source: vectorSparse, section 7.4: "a fixed band of size 256 along the diagonal and off-diagonal
    random attention", overall 90% sparse; the random part after Gale et al. 2020.
    """
    op, V = "band_and_random", check_size("band_and_random", "vector_length", vector_length, 1)
    L, band = check_size(op, "L", L), check_size(op, "band", band)
    for name, number in (("sparsity", sparsity), ("seed", seed)):
        check_concrete(number, name, f"masks.{op}", TRACED_MASK)
    density = 1 - float(sparsity)
    if not 0 < density <= 1:
        raise ValueError(f"masks.{op}: sparsity must be in [0, 1), got {sparsity}")
    if band < V:
        raise ValueError(f"masks.{op}: a band of {band} leaves out the diagonal of {V} x 1 vectors")
    if band > max(density * L + 1e-9 * L, V):
        raise ValueError(
            f"masks.{op}: a band of {band} columns is more than {density:.0%} of {L}; give a band "
            f"of at most {int(density * L)} or a lower sparsity"
        )
    rng, groups = np.random.default_rng(seed), []
    for g, start in enumerate(range(0, L, V)):
        first = start - (band - V) // 2
        low, high = max(first, 0), min(first + band, L)
        # Round the running total, not each group, so that the whole mask has the density.
        wanted = round((g + 1) * density * L) - round(g * density * L)
        drawn = rng.choice(L - (high - low), max(wanted - (high - low), 0), replace=False)
        stored = np.zeros(L, bool)
        stored[np.where(drawn < low, drawn, drawn + (high - low))] = True
        stored[low:high] = True
        groups.append(np.flatnonzero(stored))
    counts, columns = [len(group) for group in groups], np.concatenate([*groups, np.arange(0)])
    format, length = rows_of_vectors(op, CVS(V) if format is None else format)
    if length == V > 1:
        return of_block_rows(op, [(counts, columns)], (L, L), format)
    ends = np.cumsum(counts, dtype=np.int64).repeat(V)[:L]
    starts = ends - np.repeat(counts, V)[:L]
    return of_slices(op, [(starts, ends)], (L, L), format, columns)


def strided(L: int, stride: int, *, format: Format | str = CSR) -> SparseArray:
    """The last `stride` positions, and every stride-th before:

        (i, j) stored  <=>  j <= i  and  (i - j <= stride  or  (i - j) mod stride = 0)

    The union of the two heads of the paper (its "merged head"). Causal; in CVS(V) the entries that
    fill up a vector may be above the diagonal, and `is_causal=True` leaves those out.

    Source: Sparse Transformers (Child et al. 2019), section 4.2.
    """
    L, stride = check_size("strided", "L", L), check_size("strided", "stride", stride, 1)
    i = np.arange(L)
    # Every stride-th position, up to where the last `stride` begin.
    table, start = _by_remainder(L, stride)
    before = start[i % stride] + np.maximum(i // stride - 1, 0)
    last = (L + np.maximum(i - stride, 0), L + i + 1)
    table = np.concatenate([table, i])
    return of_slices("strided", [(start[i % stride], before), last], (L, L), format, table)


def _by_remainder(L: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """(0 .. L - 1 in the order of their remainders by `stride`, where each remainder starts)."""
    remainder = np.arange(L) % stride
    counts = np.bincount(remainder)
    return np.argsort(remainder, kind="stable"), np.cumsum(counts) - counts


def fixed(L: int, stride: int, c: int = 1, *, format: Format | str = CSR) -> SparseArray:
    """The query's own block of `stride` positions, and the last c of every block before:

        (i, j) stored  <=>  j <= i  and  (j // stride = i // stride  or  j mod stride >= stride - c)

    The union of the two heads of the paper. Causal in the same sense as `strided`.

    Source: Sparse Transformers (Child et al. 2019), section 4.2.
    """
    L, stride = check_size("fixed", "L", L), check_size("fixed", "stride", stride, 1)
    if check_size("fixed", "c", c) > stride:
        raise ValueError(f"masks.fixed: c must be at most the stride of {stride}, got {c}")
    i = np.arange(L)
    table = np.concatenate([i, i[i % stride >= stride - c]])
    before, own = (L, L + i // stride * c), (i // stride * stride, i + 1)
    return of_slices("fixed", [before, own], (L, L), format, table)


def longformer(
    L: int,
    window: int,
    global_tokens: int | Sequence[int] = (),
    dilation: int = 1,
    *,
    format: Format | str = CSR,
) -> SparseArray:
    """A sliding window, dilated by `dilation`, and tokens that see and are seen by all:

        (i, j) stored  <=>  i or j is a global token, or
                            abs(i - j) <= dilation (window // 2)  and  (i - j) mod dilation = 0

    Args:
      L: number of queries and of keys.
      window: positions around a query, its own among them.
      global_tokens: positions, a sequence of integers or of L booleans; or a number n for the first
        n positions.
      dilation: of the window.
      format: CSR or CVS(V).

    Source: Longformer (Beltagy et al. 2020), section 3.1.
    """
    op = "longformer"
    L, window = check_size(op, "L", L), check_size(op, "window", window, 1)
    dilation = check_size(op, "dilation", dilation, 1)
    check_concrete(global_tokens, "global_tokens", f"masks.{op}", TRACED_MASK)
    tokens: Any = global_tokens
    if np.ndim(tokens) == 0:
        tokens = range(check_size(op, "global_tokens", tokens))
    elif np.asarray(tokens).dtype == np.bool_:
        if np.shape(tokens) != (L,):
            got = list(np.shape(tokens))
            raise ValueError(f"masks.{op}: global_tokens must be {L} booleans, got {got}")
        tokens = np.flatnonzero(tokens)
    everywhere = np.array([check_size(op, "global_tokens", t) for t in tokens], np.int64)
    if (everywhere >= L).any():
        raise ValueError(f"masks.{op}: global_tokens must be below {L}, got {everywhere.max()}")
    everywhere, i = np.unique(everywhere), np.arange(L)
    table, start = _by_remainder(L, dilation)
    of_remainder = np.bincount(i % dilation)[i % dilation]
    low = np.maximum(i // dilation - window // 2, 0)
    high = np.minimum(i // dilation + window // 2 + 1, of_remainder)
    near = start[i % dilation] + np.stack([low, high])
    # The window lies between two slices of the global tokens, which follow in the table; those
    # within a dilated window, which it may miss, come last and out of order.
    before = np.searchsorted(everywhere, table[near[0]] if L else i)
    after = np.searchsorted(everywhere, table[near[1] - 1] + 1 if L else i)
    before[everywhere], after[everywhere] = 0, len(everywhere)
    near[:, everywhere] = [[0], [L]]
    slices = [(L, L + before), (near[0], near[1]), (L + after, L + len(everywhere))]
    if dilation > 1:
        slices.append((L + before, L + after))
    return of_slices(op, slices, (L, L), format, np.concatenate([table, everywhere]))


def bigbird(
    L: int,
    block: int,
    window: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int = 0,
    *,
    format: Format | str = CSR,
) -> SparseArray:
    """Blocks of `block` positions: a sliding window, global blocks and random blocks. With
    a = i // block and b = j // block,

        (i, j) stored  <=>  min(a, b) < global_blocks, or abs(a - b) <= window // 2, or b in R(a)

    where R(a) are `random_blocks` other blocks (or all, if there are fewer), drawn for each a.

    Source: Big Bird (Zaheer et al. 2020), section 2 and appendix D (whose window wraps around at
    the ends; this one does not).
    """
    op = "bigbird"
    L, block = check_size(op, "L", L), check_size(op, "block", block, 1)
    window, first = (
        check_size(op, "window", window, 1),
        check_size(op, "global_blocks", global_blocks),
    )
    drawn, count = check_size(op, "random_blocks", random_blocks), -(-L // block)
    check_concrete(seed, "seed", f"masks.{op}", TRACED_MASK)
    rng, every, seen = np.random.default_rng(seed), np.arange(count), []
    for a in every:
        stored = (every < first) | (abs(every - a) <= window // 2) | (a < first)
        others = every[~stored]
        stored[rng.choice(others, min(drawn, len(others)), replace=False)] = True
        seen.append(np.flatnonzero(np.repeat(stored, block)[:L]))
    ends = np.cumsum([len(keys) for keys in seen], dtype=np.int64).repeat(block)[:L]
    starts = ends - np.repeat([len(keys) for keys in seen], block)[:L]
    table = np.concatenate([*seen, np.arange(0)])
    return of_slices(op, [(starts, ends)], (L, L), format, table)


def block_diagonal(
    segment_ids: Any, kv_segment_ids: Any = None, *, format: Format | str = CSR
) -> SparseArray:
    """Packed sequences: a query sees the keys of its own segment.

        (i, j) stored  <=>  segment_ids[i] = kv_segment_ids[j] >= 0

    Args:
      segment_ids: concrete integers [L]; a negative one is padding, which sees nothing.
      kv_segment_ids: the segments of the keys, concrete integers [S]; segment_ids if None.
      format: CSR or CVS(V). A vector that spans two segments joins them: pad segments to V.

    Source: the `segment_ids` of sequence packing (T5, Raffel et al. 2020, appendix C).
    """
    op = "block_diagonal"
    for name, ids in (("segment_ids", segment_ids), ("kv_segment_ids", kv_segment_ids)):
        check_concrete(ids, name, f"masks.{op}", TRACED_MASK)
    rows = np.asarray(segment_ids)
    keys = rows if kv_segment_ids is None else np.asarray(kv_segment_ids)
    rows, keys = (x if len(x.shape) != 1 or x.size else x.astype(np.int32) for x in (rows, keys))
    for name, ids in (("segment_ids", rows), ("kv_segment_ids", keys)):
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            size = "; for blocks of one size np.arange(L) // size" if ids.ndim == 0 else ""
            raise ValueError(
                f"masks.{op}: {name} must be integers of one dimension, got {ids.dtype} "
                f"{list(ids.shape)}{size}"
            )
    format, _ = rows_of_vectors(op, format)
    order = np.argsort(keys, kind="stable")
    own = np.searchsorted(keys[order], rows, "left"), np.searchsorted(keys[order], rows, "right")
    ends = np.where(rows >= 0, own[1], own[0])
    return of_slices(op, [(own[0], ends)], (len(rows), len(keys)), format, order)
