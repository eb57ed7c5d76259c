"""The fixed attention mask: a dense band and random 8 x 1 column vectors off it, 90% sparse.

vectorSparse (Chen et al., SC '21), section 7.4: "fixed attention masks with a dense band of size
256 along the diagonal and off-diagonal random attention. The overall sparsity is 90%", after Gale
et al. 2020, under the constraint that entries come in column vectors: the 8 query rows of a group
attend to the same keys.
"""

from __future__ import annotations

import numpy as np

from sgap_jax import SparseArray

VECTOR_LENGTH = 8


def default_band(length: int) -> int:
    """The paper's proportion, 256 of 4096, in whole vectors."""
    return max(VECTOR_LENGTH, length // 16 // VECTOR_LENGTH * VECTOR_LENGTH)


def band_and_random(
    length: int,
    *,
    density: float = 0.1,
    band: int | None = None,
    vector_length: int = VECTOR_LENGTH,
    seed: int = 0,
) -> SparseArray:
    """A [length, length] mask with ones as values, `density` of it stored.

    Each group of `vector_length` rows stores the `band` keys around its own positions and as many
    random others as bring the total to `density`. The last group is shorter where vector_length
    does not divide length. Raises ValueError where the band does not fit in the density.
    """
    band = default_band(length) if band is None else band
    if not 0 < density <= 1:
        raise ValueError(f"mask: density must be in (0, 1], got {density}")
    if not vector_length <= band:
        raise ValueError(
            f"mask: a band of {band} leaves out the diagonal of {vector_length} x 1 vectors"
        )
    if band > max(density * length, vector_length):
        raise ValueError(
            f"mask: a band of {band} columns is more than {density:.0%} of {length}; "
            f"give a band of at most {int(density * length)} or a greater density"
        )
    rng = np.random.default_rng(seed)
    keys = [
        _group_keys(rng, start, length, density, band, vector_length)
        for start in range(0, length, vector_length)
    ]
    heights = np.minimum(vector_length, length - np.arange(0, length, vector_length))
    row_lengths = np.repeat([k.size for k in keys], heights)
    column_indices = np.concatenate([np.tile(k, h) for k, h in zip(keys, heights, strict=True)])
    row_offsets = np.concatenate([[0], np.cumsum(row_lengths)])
    return SparseArray.from_arrays(
        np.ones(column_indices.size, np.float32),
        row_offsets.astype(np.int32),
        column_indices.astype(np.int32),
        shape=(length, length),
    )


def _group_keys(rng, start, length, density, band, vector_length):
    """The sorted keys of the rows start .. start + vector_length."""
    first = start - (band - vector_length) // 2
    low, high = max(first, 0), min(first + band, length)
    # Rounding the running total, not each group, makes the whole mask as dense as asked.
    group = start // vector_length
    wanted = round((group + 1) * density * length) - round(group * density * length)
    outside = np.concatenate([np.arange(low), np.arange(high, length)])
    drawn = rng.choice(outside, max(wanted - (high - low), 0), replace=False)
    return np.sort(np.concatenate([np.arange(low, high), drawn]))
