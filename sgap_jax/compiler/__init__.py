"""Expression x format x schedule -> loops -> machine code (Senanayake et al., OOPSLA 2020)."""

from sgap_jax.compiler.notation.derivatives import gradient as gradient
from sgap_jax.compiler.notation.expr import Access as Access
from sgap_jax.compiler.notation.expr import Assign as Assign
from sgap_jax.compiler.notation.expr import IndexVar as IndexVar
from sgap_jax.compiler.notation.expr import Tensor as Tensor
from sgap_jax.compiler.notation.expr import assign as assign
from sgap_jax.compiler.notation.expr import index_vars as index_vars
from sgap_jax.compiler.notation.parse import parse as parse
from sgap_jax.compiler.notation.provenance import Provenance as Provenance
from sgap_jax.compiler.presets import spmm_point as spmm_point
from sgap_jax.compiler.transform.schedule import LoopSchedule as LoopSchedule
from sgap_jax.compiler.transform.schedule import Schedule as Schedule
