"""Named matrices that find the bugs of sparse kernels: a rule for the row lengths gives CSR
arrays."""

import dataclasses

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """CSR arrays in NumPy; `values` are float64, to be rounded to the dtype under test."""

    name: str
    shape: tuple[int, int]
    row_offsets: np.ndarray
    column_indices: np.ndarray
    values: np.ndarray

    @property
    def nnz(self):
        return len(self.column_indices)

    @property
    def stored(self):
        """The number of stored entries; the rest of the capacity is padding."""
        return int(self.row_offsets[-1])

    @property
    def rows(self):
        """Row of each stored entry."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.row_offsets))

    def dense(self):
        out = np.zeros(self.shape)
        out[self.rows, self.column_indices[: self.stored]] = self.values[: self.stored]
        return out


def from_row_lengths(name, k, lengths, seed=0, padding=0):
    """Row i stores lengths[i] random columns; `padding` entries past the end hold junk."""
    rng = np.random.default_rng(seed)
    columns = [np.sort(rng.choice(k, n, replace=False)) for n in lengths]
    columns.append(rng.integers(0, k, padding) if padding else np.zeros(0, np.int64))
    indices = np.concatenate(columns).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = rng.standard_normal(len(indices))
    if padding:
        values[-padding:] = np.nan  # must not be read
    return Case(name, (len(lengths), k), offsets, indices, values)


def _skewed(m, k, seed):
    rng = np.random.default_rng(seed)
    return np.minimum((rng.pareto(1.0, m) * 2).astype(int), k)


BATTERY = {
    case.name: case
    for case in [
        from_row_lengths("no_rows", 5, []),
        from_row_lengths("no_columns", 0, [0, 0, 0]),
        from_row_lengths("no_entries", 6, [0, 0, 0, 0]),
        from_row_lengths("one_by_one", 1, [1]),
        from_row_lengths("one_row", 40, [17]),
        from_row_lengths("one_column", 1, [1, 0, 1, 1, 0]),
        from_row_lengths("empty_rows_at_both_ends", 9, [0, 0, 3, 0, 9, 1, 0, 0]),
        from_row_lengths("every_length", 33, list(range(34))),
        from_row_lengths("one_heavy_row", 700, [1, 0, 700, 2, 0, 1]),
        from_row_lengths("heavy_first_and_last", 300, [300, *[1] * 50, 300]),
        from_row_lengths("full", 19, [19] * 23),
        from_row_lengths("tall", 7, [2] * 301),
        from_row_lengths("wide", 501, [90, 0, 131]),
        from_row_lengths("skewed", 257, _skewed(257, 257, 1)),
        from_row_lengths("padded", 31, [3, 0, 7, 31, 1], padding=13),
        from_row_lengths("only_padding", 4, [0, 0], padding=5),
    ]
}


def sizes_for(name, sizes, backend):
    """A third of the sizes for each matrix, so that every size occurs with some matrix of each
    kind.

    Every size is compiled anew. The plain-JAX lowering has no code that depends on the size, and
    the emulated kernels are slow: these two take two sizes for each matrix.
    """
    from sgap_jax import Reference
    from sgap_jax.schedules.emulated import Emulated

    i = list(BATTERY).index(name)
    if isinstance(backend, Emulated):
        return sizes[i % 6 :: 6]
    return [0, 1, 5] if isinstance(backend, Reference) else sizes[i % 3 :: 3]


def array(case, dtype, format=None):
    """The case as a SparseArray of a dtype."""
    from sgap_jax import CSR, SparseArray

    A = SparseArray.from_arrays(
        cast(case.values, dtype), case.row_offsets, case.column_indices, shape=case.shape
    )
    return A if format is None or format == CSR else A.asformat(format)


def cast(x, dtype):
    """x in a dtype, bfloat16 included. By NumPy: in jax.numpy each shape would be compiled."""
    return np.asarray(x).astype(np.dtype(getattr(ml_dtypes, str(dtype), dtype)))


def rounded(x, dtype):
    """x as the kernel sees it: rounded to the dtype, widened to float64."""
    return cast(x, dtype).astype(np.float64)
