"""Linear algebra with a sparse matrix, as `scipy.sparse.linalg` has it: Krylov solvers and their
preconditioners, triangular systems, norms, eigenvalues, powers, exponentials."""

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
