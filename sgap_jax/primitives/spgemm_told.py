"""What `explain` says of a sparse product without a schedule: how its structure and its values are
found, and why."""

import jax
import numpy as np

from sgap_jax.formats import checks, direct
from sgap_jax.formats import structure as structures
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.levels import CSC
from sgap_jax.primitives.spgemm_pattern import rows_of
from sgap_jax.schedules.select import keep_chosen

_MANY_COLUMNS = 1 << 20  # as cpu/spgemm/spgemm.h: beyond, an array over all may be a hash table
_LOOPS = (
    "parallel for rows i of C:\n"
    "  for p in range(A.row_offsets[i], A.row_offsets[i + 1]):\n"
    "    l = A.column_indices[p]\n"
    "    for q in range(B.row_offsets[l], B.row_offsets[l + 1]):\n"
    "      C.values[place of (i, B.column_indices[q])] += A.values[p] * B.values[q]"
)


def sizes(A: SparseArray, B: SparseArray) -> str:
    return f"spgemm: {list(A.shape)} with {A.nnz} entries times {list(B.shape)} with {B.nnz}"


def tell_structure(A: SparseArray, B: SparseArray, C: SparseArray, first: str) -> None:
    """Says to `explain` how the structure of C = A B is found, of a call without a schedule."""

    def of_rows() -> str:
        if checks.is_traced(*jax.tree.leaves((A.index_arrays, B.index_arrays, C.index_arrays))):
            return (
                "rule:    structures are traced: found in the program, each row of C as bits of "
                f"its columns, in a capacity of {C.nnz}"
            )
        if A.format == B.format == CSC:
            left, right, columns = B.T, A.T, A.shape[0]
        else:
            left, right, columns = A, B, B.shape[1]
        with structures.concrete():
            (offsets, indices), (others, _) = (
                map(np.asarray, rows_of(X.with_values(np.zeros(X.nnz, bool)))[1][:2])
                for X in (left, right)
            )
        lengths = np.take(np.append(np.diff(others), 0), indices, mode="clip")
        before = np.append(0, np.cumsum(lengths, dtype=np.int64))
        products = np.diff(np.take(before, offsets, mode="clip"))  # arrays may be unchecked
        longest = int(products.max(initial=0))
        hashed = columns > _MANY_COLUMNS and columns > 16 * longest
        sums = "a hash table" if hashed else f"an array over all {columns} columns"
        size = C.dtype.itemsize + 4
        least = size * (A.nnz + B.nnz + C.nnz) + 4 * (A.shape[0] + B.shape[0] + C.shape[0] + 3)
        return (
            "rule:    structures are concrete: found once, outside of the program; outside jit "
            "values too, in the same pass\n"
            f"bytes:   {least:,} if operands and results pass once\n"
            f"rows:    {products.sum():,} products, {longest:,} of a row at most, for {C.nnz:,} "
            f"entries; the sums of a row in {sums}, but short rows are sorted, and rows like one "
            "shortly before are added up in their places\n"
            "others:  HashRows(); HashRows(sorted=False): `tune(spgemm, A, B, candidates=...)` "
            "measures them; plan=spgemm_plan(A, B) where values change and structures do not"
        )

    keep_chosen(sizes(A, B), f"schedule None: {first}", True, of_rows)


def tell_values(platform: str, shape: tuple, entries: tuple, dtype: str, kernels: bool) -> None:
    """Says to `explain` what computes the values at a structure."""
    (m, k, n), (of_a, of_b, of_c) = shape, entries
    how = {
        "cpu": "the kernel of rows one after another (Gustavson), which threads share by products",
        "cuda": "a launch, rows of C by size: eight lanes, a warp or a block for each",
    }[platform]
    reason = (
        f"{dtype} on {platform}: plain JAX, as kernels are of {', '.join(direct.KERNEL_DTYPES)}"
    )
    keep_chosen(
        f"spgemm: values at {of_c} entries of [{m}, {n}], of {of_a} in [{m}, {k}] and {of_b} in "
        f"[{k}, {n}]",
        f"rule:    {how if kernels else reason}",
        True,
        lambda: _LOOPS,
    )
