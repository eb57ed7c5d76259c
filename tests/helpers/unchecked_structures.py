"""Arbitrary index arrays, and their meaning: an oracle in NumPy, entry by entry."""

import numpy as np

from sgap_jax import SparseArray
from sgap_jax.formats.levels import Compressed, Dense

KINDS = ("valid", "unsorted", "repeated", "outside", "loose", "wild")
_ENDS = [-(2**31), -(2**31) + 1, -7, -1, 2**30, 2**31 - 2, 2**31 - 1]


def anything(rng, rows, nnz, size):
    """Offsets that fall, are negative or too large; indices out of range."""
    offsets = rng.integers(-nnz, 2 * nnz + 2, rows + 1).astype(np.int32)
    offsets[rng.random(rows + 1) < 0.3] = rng.choice([-(2**31), 2**31 - 1, 0, nnz])
    indices = rng.integers(-2, size + 2, nnz).astype(np.int32)
    indices[rng.random(nnz) < 0.2] = rng.choice([-(2**31), 2**31 - 1])
    return offsets, indices


def segments(offsets, capacity):
    """[begin, end) of each segment: offsets are clamped and made non-decreasing."""
    o = np.maximum.accumulate(np.clip(np.asarray(offsets, np.int64), 0, capacity))
    return list(zip(o[:-1].tolist(), o[1:].tolist(), strict=True))


def entries(format, arrays, shape):
    """(stored place, coordinates by mode, node on each level) of each entry that takes part. The
    elements of vectors and blocks have places of their own."""
    sides = (*format.block_shape, *[1] * format.ndim)
    left = iter([np.asarray(a) for a in arrays])
    found = [((), ())]  # coordinates in stored order, and nodes
    for n, mode in enumerate(format.modes):
        size, level = -(-shape[mode] // sides[n]), format.levels[n]
        if isinstance(level, Dense):
            found = [((c,), (c,)) for c in range(size)]
            continue
        if isinstance(level, Compressed):
            offsets, indices = next(left), next(left)
            cuts = segments(offsets, indices.shape[0])
            below = lambda nodes, cuts=cuts: range(*cuts[nodes[-1] if nodes else 0])
        else:
            indices = next(left)
            below = lambda nodes: nodes[-1:]
        found = [
            ((*path, int(indices[p])), (*nodes, p))
            for path, nodes in found
            for p in below(nodes)
            if 0 <= indices[p] < size
        ]
    block, out = format.block_shape, []
    for path, nodes in found:
        for within in np.ndindex(*block):
            place = [c * s for c, s in zip(path, sides, strict=False)]
            place = [c + w for c, w in zip(place, (*within, *[0] * len(place)), strict=False)]
            by_mode = [place[format.modes.index(mode)] for mode in range(format.ndim)]
            if all(c < n for c, n in zip(by_mode, shape, strict=True)):
                number = nodes[-1]
                for w, s in zip(within, block, strict=True):
                    number = number * s + w
                out.append((number, tuple(by_mode), nodes))
    return out


def spoiled(format, shape, kind, seed, density=0.4):
    """Malformed index arrays of `kind`, and the shape of the values."""
    rng = np.random.default_rng(seed)
    x = (rng.random(shape) < density).astype(np.float32)
    A = SparseArray.from_dense(x, format=format)
    arrays = [np.array(a) for level in A.index_arrays for a in level]
    is_offsets, sizes = [], []
    sides = (*format.block_shape, *[1] * format.ndim)
    for n, mode in enumerate(format.modes):
        size = -(-shape[mode] // sides[n])
        if isinstance(format.levels[n], Compressed):
            is_offsets += [True, False]
            sizes += [None, size]
        elif not isinstance(format.levels[n], Dense):
            is_offsets.append(False)
            sizes.append(size)
    for n, (offsets, size) in enumerate(zip(is_offsets, sizes, strict=True)):
        a = arrays[n]
        if kind == "valid" or not a.size:
            continue
        if offsets:
            capacity = arrays[n + 1].shape[0]
            if kind == "loose":  # anywhere in the level, in any order
                a[:] = rng.integers(0, capacity + 1, a.size)
            elif kind == "wild":
                a[:] = rng.choice([*_ENDS, *range(-2, capacity + 3)], a.size)
            continue
        if kind in ("unsorted", "loose"):
            a[:] = rng.integers(0, size, a.size)
        elif kind == "repeated":
            a[:] = a[rng.integers(0, a.size)]
        elif kind == "outside":
            a[rng.random(a.size) < 0.4] = rng.choice([-1, size, size + 1, *_ENDS])
        elif kind == "wild":
            a[:] = rng.choice([*_ENDS, *range(-2, size + 2)], a.size)
    return arrays, A.values.shape


def grouped(format, arrays):
    """Groups arrays by level, as plain tuples: they are not checked."""
    left = iter(arrays)
    count = {Dense: 0, Compressed: 2}
    return tuple(
        tuple(next(left) for _ in range(count.get(type(level), 1)))
        for level in format.levels[: format.ndim]
    )


def made_under_jit(format, arrays, values, shape):
    """A SparseArray as a user makes it from traced arrays."""
    return SparseArray(values, grouped(format, arrays), None, shape, format)
