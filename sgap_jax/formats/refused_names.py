"""What SciPy's and NumPy's names are called here, and why some operators are refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

_DENSE = "A.todense(), which has it"

# Each an expression, then perhaps ", which" or ", or" and more.
INSTEAD = {
    "H": "A.T.with_values(jnp.conj(A.values))",
    "all": _DENSE,
    "any": _DENSE,
    "argmax": _DENSE,
    "argmin": _DENSE,
    "at": "A.with_values(A.values.at[p].set(x)), which changes what is stored",
    "col": "A.asformat(COO).column_indices",
    "conj": "A.with_values(jnp.conj(A.values))",
    "conjugate": "A.with_values(jnp.conj(A.values))",
    "coords": "A.coordinates()",
    "copy": "A, which nothing can write to",
    "count_nonzero": "jnp.count_nonzero(A.todense()), or A.nnz, which counts what is stored",
    "data": "A.values",
    "dot": "A @ B",
    "flatten": _DENSE,
    "getcol": "A.T[j:j + 1].T",
    "getnnz": "A.nnz, or A.row_lengths",
    "getrow": "A[i:i + 1]",
    "imag": "A.with_values(jnp.imag(A.values))",
    "indices": "A.column_indices, or A.row_indices of CSC",
    "indptr": "A.row_offsets, or A.column_offsets of CSC",
    "mT": "A.T",
    "maximum": "A.with_values(jnp.maximum(A.values, s)), which acts on what is stored",
    "minimum": "A.with_values(jnp.minimum(A.values, s)), which acts on what is stored",
    "multiply": "A * B, or einsum('ij,ij->ij', A, x) for a dense x",
    "nbytes": "sum(x.nbytes for x in jax.tree.leaves(A))",
    "nonzero": "A.coordinates()",
    "power": "A.with_values(A.values**n)",
    "prod": _DENSE,
    "ravel": _DENSE,
    "real": "A.with_values(jnp.real(A.values))",
    "reshape": _DENSE,
    "row": "A.asformat(COO).row_indices",
    "size": "A.nnz, or math.prod(A.shape)",
    "std": _DENSE,
    "toarray": "A.todense(), or A.to_scipy().toarray()",
    "tobsr": "A.asformat(BCSR(r, c))",
    "tocoo": "A.asformat(COO)",
    "tocsc": "A.asformat(CSC)",
    "tocsr": "A.asformat(CSR)",
    "trace": "A.diagonal().sum()",
    "transpose": "A.T",
    "var": _DENSE,
}


def no_extremum(name: str) -> NotImplementedError:
    rows = "row_max(A)" if name == "max" else "-row_max(-A)"
    return NotImplementedError(
        f"SparseArray.{name}: the nearest are {rows}, of the stored entries of each row alone, and "
        f"A.todense().{name}(...), in which the zeros that are not stored count too"
    )


def no_operator() -> TypeError:
    return TypeError(
        "SparseArray: of the operators that act on each entry there are +, -, *, / and abs; the "
        "nearest is A.with_values(f(A.values)) where entries are, or f(A.todense())"
    )


def no_truth() -> ValueError:
    return ValueError(
        "SparseArray: neither true nor false; A.nnz > 0 says whether it stores anything, "
        "A is not None whether there is one"
    )


def no_length() -> TypeError:
    return TypeError("SparseArray: no len(): A.shape[0] counts rows, A.nnz what is stored")


def no_assignment() -> TypeError:
    return TypeError(
        "SparseArray: nothing is assigned to; the nearest is A.with_values(A.values.at[p].set(x)), "
        "which changes what is stored"
    )


def check_comparable(other: Any) -> None:
    """TypeError for what NumPy would compare with each entry; `==` of objects goes by identity."""
    if isinstance(other, int | float | complex | np.generic | np.ndarray | jax.Array):
        raise TypeError(f"{no_operator()}; `is` asks for A itself, in a list too")
