"""Linear algebra with a sparse matrix, as `scipy.sparse.linalg` has it: Krylov solvers and their
preconditioners, triangular systems, norms, eigenvalues, powers, exponentials."""

import typing as _typing

from sgap_jax.formats.checks import no_attribute as _no_attribute
from sgap_jax.linalg.krylov import bicgstab as bicgstab
from sgap_jax.linalg.krylov import cg as cg
from sgap_jax.linalg.krylov import gmres as gmres
from sgap_jax.linalg.operands import lineax_operator as lineax_operator
from sgap_jax.linalg.preconditioners import chebyshev as chebyshev
from sgap_jax.linalg.preconditioners import jacobi as jacobi
from sgap_jax.linalg.spectral import expm_multiply as expm_multiply
from sgap_jax.linalg.spectral import lobpcg as lobpcg
from sgap_jax.linalg.spectral import matrix_power as matrix_power
from sgap_jax.linalg.spectral import norm as norm
from sgap_jax.linalg.spectral import power_iteration as power_iteration
from sgap_jax.linalg.triangular import ichol as ichol
from sgap_jax.linalg.triangular import ilu as ilu
from sgap_jax.linalg.triangular import triangular_solve as triangular_solve

_SOLVERS = "cg, gmres or bicgstab with a preconditioner, such as ilu(A)"
_INSTEAD = {
    "LinearOperator": "a function of a vector, which cg, gmres and bicgstab take in the place of A",
    "aslinearoperator": "A itself, which cg and the others take; lineax_operator(A)",
    "eigs": "power_iteration(A)",
    "eigsh": "lobpcg(A, X), or power_iteration(A, symmetric=True)",
    "expm": "expm_multiply(A, B)",
    "factorized": _SOLVERS,
    "inv": _SOLVERS,
    "lsqr": "cg(lambda x: T @ (A @ x), T @ b) with T = A.T.tocsr(), the normal equations",
    "minres": _SOLVERS,
    "onenormest": "norm(A, 1), which is exact",
    "spilu": "ilu(A)",
    "splu": "ilu(A), which is incomplete",
    "spsolve": _SOLVERS + "; triangular_solve for a triangle",
    "spsolve_triangular": "triangular_solve(A, b)",
    "svds": "power_iteration(A.T @ A, symmetric=True), the greatest squared",
}

if not _typing.TYPE_CHECKING:  # of names that are not here, type checkers say so
    __getattr__ = _no_attribute(__name__, _INSTEAD)
