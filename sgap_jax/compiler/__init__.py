"""Expression x format x schedule -> loops -> machine code (Senanayake et al., OOPSLA 2020)."""

from sgap_jax.compiler.derivatives import gradient as gradient
from sgap_jax.compiler.expr import Access as Access
from sgap_jax.compiler.expr import Assign as Assign
from sgap_jax.compiler.expr import IndexVar as IndexVar
from sgap_jax.compiler.expr import Tensor as Tensor
from sgap_jax.compiler.expr import assign as assign
from sgap_jax.compiler.expr import index_vars as index_vars
from sgap_jax.compiler.presets import spmm_point as spmm_point
from sgap_jax.compiler.provenance import Provenance as Provenance
from sgap_jax.compiler.schedule import Schedule as Schedule
