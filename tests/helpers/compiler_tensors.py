"""Operands of compiled functions: dense arrays laid out level by level, and the decoded results."""

from collections import Counter

import jax.numpy as jnp
import numpy as np

from sgap_jax.formats.levels import Dense, Singleton

OUT_OF_RANGE = 1 << 30  # a coordinate, or an offset, that nothing may use


def by_levels(access, dense, beyond):
    """A dense tensor with its modes in stored order and blocks last: [d0, d1, ..., b0, ...]. Where
    the last blocks reach past the tensor they hold `beyond`."""
    format = access.format
    blocks = [*format.block_shape, *[1] * (format.ndim - len(format.block_shape))]
    tensor = np.transpose(dense, format.modes)
    tail = [-size % block for size, block in zip(tensor.shape, blocks, strict=True)]
    if any(tail):
        dtype = np.result_type(tensor, np.min_scalar_type(beyond))
        tensor = np.pad(tensor.astype(dtype), [(0, n) for n in tail], constant_values=beyond)
    shape = [
        n for size, block in zip(tensor.shape, blocks, strict=True) for n in (size // block, block)
    ]
    axes = [*range(0, 2 * format.ndim, 2), *range(1, 2 * format.ndim, 2)]
    return tensor.reshape(shape).transpose(axes)


def stored(access, pattern, values=None, spare=0):
    """The arrays of a tensor with entries where `pattern` is true, and each level's capacity:
    `spare` positions more than are used, filled with junk that must not be read."""
    format, name = access.format, access.tensor
    there = by_levels(access, pattern, False)
    entries = np.argwhere(there.any(axis=tuple(range(format.ndim, 2 * format.ndim))))
    nodes, arrays, positions = [()], {}, []
    for level, kind in enumerate(format.levels[: format.ndim]):
        prefixes = [tuple(map(int, entry[: level + 1])) for entry in entries]
        if isinstance(kind, Dense):
            below = [(*node, n) for node in nodes for n in range(there.shape[level])]
            spare *= there.shape[level]
        else:
            repeats = isinstance(kind, Singleton) or not kind.unique
            below = prefixes if repeats else sorted(set(prefixes))
            if not isinstance(kind, Singleton):
                children = Counter(node[:-1] for node in below)
                counts = np.array([children[node] for node in nodes], int)
                offsets = np.concatenate([[0], np.cumsum(counts)])
                unused = [OUT_OF_RANGE] * (0 if not positions else positions[-1] - len(nodes))
                arrays[f"{name}{level + 1}_pos"] = np.array([*offsets, *unused], np.int32)
            crd = [node[-1] for node in below] + [OUT_OF_RANGE] * spare
            arrays[f"{name}{level + 1}_crd"] = np.array(crd, np.int32)
        nodes = below
        # Spare capacity starts at the first level that stores its coordinates.
        stores = any(not isinstance(k, Dense) for k in format.levels[: level + 1])
        positions.append(len(nodes) + (spare if stores else 0))
    block = int(np.prod(format.block_shape))
    found = by_levels(access, pattern if values is None else values, np.nan)
    flat = [np.asarray(found[node]).reshape(block) for node in nodes]
    padding = np.full((positions[-1] - len(nodes)) * block, np.nan)
    arrays[f"{name}_vals"] = np.concatenate([*flat, padding])
    for size in format.block_shape:
        positions.append(positions[-1] * size)
    return arrays, tuple(positions)


class Problem:
    """Operands of an expression: small integers, so that every sum is exact. Some row of the sparse
    factor has no entries, unless `density` is 1; or entries are where `pattern` is true."""

    def __init__(
        self, expression, sizes, density=0.3, spare=0, dtype="float32", seed=0, pattern=None
    ):
        random, self.expression, self.sizes = np.random.default_rng(seed), expression, sizes
        self.inputs, self.positions, dense = {}, (), []
        for factor in expression.factors:
            shape = [sizes[index.name] for index in factor.indices]
            tensor = random.integers(1, 4, shape) * random.choice([-1, 1], shape)
            if factor.format is None:
                arrays = {factor.tensor: tensor.reshape(-1)}
            else:
                drawn = _pattern(factor, shape, density, random) if pattern is None else pattern
                self.pattern = drawn
                tensor = np.where(self.pattern, tensor, 0)
                arrays, self.positions = stored(factor, self.pattern, tensor, spare)
            dense.append(tensor)
            with np.errstate(invalid="ignore"):  # NaN casts to an arbitrary integer
                for name, array in arrays.items():
                    index = name.endswith(("_pos", "_crd"))
                    self.inputs[name] = array if index else array.astype(jnp.dtype(dtype))
        self.want = self._expected(dense, spare)

    def _expected(self, dense, spare):
        e = self.expression
        if e.reduction == "+":
            words = ["".join(i.name for i in a.indices) for a in (*e.factors, e.output)]
            result = np.einsum(f"{','.join(words[:-1])}->{words[-1]}", *dense)
        else:
            every = np.ones([self.sizes[i.name] for i in e.indices])
            there = np.ones(every.shape, bool)
            for factor, tensor in zip(e.factors, dense, strict=True):
                every = every * _spread(factor, tensor, e.indices)
                if factor.format is not None:
                    there &= _spread(factor, self.pattern, e.indices)
            combine, nothing = (np.max, -np.inf) if e.reduction == "max" else (np.min, np.inf)
            axes = tuple(n for n, i in enumerate(e.indices) if i not in e.output.indices)
            result = combine(np.where(there, every, nothing), axis=axes, initial=nothing)
        if e.output.format is None:
            return result.reshape(-1).astype(np.float64)
        if e.output.format.dense_modes:
            return self._by_fibers(result)
        arrays, _ = stored(e.output, self.pattern, result, spare)
        return np.nan_to_num(arrays[f"{e.output.tensor}_vals"])  # spare capacity stays zero

    def _by_fibers(self, result):
        """Checks a result stored by fibers of the outer levels, the last of them Compressed; spare
        capacity must be zero."""
        e = self.expression
        there = np.transpose(self.pattern, e.sparse.format.modes)
        fibers = np.argwhere(there.any(axis=tuple(range(e.shared, there.ndim))))
        found = np.zeros((self.positions[e.shared - 1], *result.shape[e.shared :]))
        found[: len(fibers)] = result[tuple(fibers.T)]
        return found.reshape(-1)


def _spread(access, tensor, indices):
    """Broadcasts a tensor that has some of the indices to all of them."""
    there = [access.indices.index(i) for i in indices if i in access.indices]
    shape = [tensor.shape[access.indices.index(i)] if i in access.indices else 1 for i in indices]
    return np.transpose(tensor, there).reshape(shape)


def _pattern(factor, shape, density, random):
    blocks = [1] * len(shape)
    for level, size in enumerate(factor.format.block_shape):
        blocks[factor.format.modes[level]] = size
    pattern = random.random([-(-s // b) for s, b in zip(shape, blocks, strict=True)]) < density
    if density < 1 and pattern.size:
        pattern[: max(1, len(pattern) // 8)] = False
        pattern[len(pattern) // 2] = False
        # The last row is empty, unless blocks reach past the end: then it has entries.
        pattern[-1:] = any(s % b for s, b in zip(shape, blocks, strict=True))
    for axis, size in enumerate(blocks):
        pattern = np.repeat(pattern, size, axis)
    return pattern[tuple(map(slice, shape))]
