"""Sparse tensor algebra for JAX, where formats and schedules are values."""

import typing as _typing
from importlib.metadata import version as _version

from sgap_jax import graphs as graphs
from sgap_jax import linalg as linalg
from sgap_jax import masks as masks
from sgap_jax import parallel as parallel
from sgap_jax import select as select
from sgap_jax.calibration import calibrate as calibrate
from sgap_jax.calibration import calibrated_machine as _calibrated_machine
from sgap_jax.explanation import explain as explain
from sgap_jax.explanation import explain_einsum as explain_einsum
from sgap_jax.formats.array import SparseArray as SparseArray
from sgap_jax.formats.checks import no_attribute as _no_attribute
from sgap_jax.formats.compose import block as block
from sgap_jax.formats.compose import block_diag as block_diag
from sgap_jax.formats.compose import diags as diags
from sgap_jax.formats.compose import eye as eye
from sgap_jax.formats.compose import hstack as hstack
from sgap_jax.formats.compose import kron as kron
from sgap_jax.formats.compose import tril as tril
from sgap_jax.formats.compose import triu as triu
from sgap_jax.formats.compose import vstack as vstack
from sgap_jax.formats.io import read as read
from sgap_jax.formats.io import write as write
from sgap_jax.formats.levels import BCSR as BCSR
from sgap_jax.formats.levels import COO as COO
from sgap_jax.formats.levels import CSC as CSC
from sgap_jax.formats.levels import CSF as CSF
from sgap_jax.formats.levels import CSR as CSR
from sgap_jax.formats.levels import CVS as CVS
from sgap_jax.formats.levels import Compressed as Compressed
from sgap_jax.formats.levels import Dense as Dense
from sgap_jax.formats.levels import Format as Format
from sgap_jax.formats.levels import Singleton as Singleton
from sgap_jax.formats.prune import prune as prune
from sgap_jax.formats.prune import random as random
from sgap_jax.formats.reorder import cluster_rows as cluster_rows
from sgap_jax.formats.reorder import fill_in as fill_in
from sgap_jax.formats.row_statistics import RowStatistics as RowStatistics
from sgap_jax.formats.structure import computed_with as _computed_with
from sgap_jax.launch.failures import failing_here as _failing_here
from sgap_jax.preparation import prepare as prepare
from sgap_jax.primitives.aggregate import aggregate as aggregate
from sgap_jax.primitives.attention import sparse_attention as sparse_attention
from sgap_jax.primitives.bitmap import nonzero as _nonzero
from sgap_jax.primitives.einsum import einsum as einsum
from sgap_jax.primitives.evaluate import evaluate as evaluate
from sgap_jax.primitives.gsddmm import gsddmm as gsddmm
from sgap_jax.primitives.gspmm import gspmm as gspmm
from sgap_jax.primitives.row_reduce import row_max as row_max
from sgap_jax.primitives.row_reduce import row_sum as row_sum
from sgap_jax.primitives.sddmm import sddmm as sddmm
from sgap_jax.primitives.sparse_softmax import sparse_softmax as sparse_softmax
from sgap_jax.primitives.spgemm import spgemm as spgemm
from sgap_jax.primitives.spgemm import spgemm_plan as spgemm_plan
from sgap_jax.primitives.spmm import spmm as spmm
from sgap_jax.primitives.spmm import spmv as spmv
from sgap_jax.primitives.structures import transposed as _transposed
from sgap_jax.primitives.structures import valid as _valid
from sgap_jax.runtime.native import info as info
from sgap_jax.runtime.native import keep_memory as keep_memory
from sgap_jax.schedules import AtomicParallelism as AtomicParallelism
from sgap_jax.schedules import AttentionTile as AttentionTile
from sgap_jax.schedules import CpuTile as CpuTile
from sgap_jax.schedules import HashRows as HashRows
from sgap_jax.schedules import OctetTile as OctetTile
from sgap_jax.schedules import PaperOctetTile as PaperOctetTile
from sgap_jax.schedules import Problem as Problem
from sgap_jax.schedules import Reference as Reference
from sgap_jax.schedules import Schedule as Schedule
from sgap_jax.schedules import ScheduleError as ScheduleError
from sgap_jax.schedules import SubwarpTile as SubwarpTile
from sgap_jax.schedules import Unfused as Unfused
from sgap_jax.schedules import WarpTile as WarpTile
from sgap_jax.schedules import choose_schedule as choose_schedule
from sgap_jax.schedules import explain_choice as explain_choice
from sgap_jax.schedules import legal_points as legal_points
from sgap_jax.schedules.families import set_failing as _set_failing
from sgap_jax.schedules.machine import set_machine as _set_machine
from sgap_jax.tuning import Tuned as Tuned
from sgap_jax.tuning import candidate_schedules as candidate_schedules
from sgap_jax.tuning import tune as tune

__version__ = _version("sgap_jax")

_set_machine(_calibrated_machine())
_set_failing(_failing_here)
_computed_with(_valid, _transposed, _nonzero)

_INSTEAD = {
    "BCOO": "SparseArray.from_bcoo(a), or from_coordinates",
    "block_array": "block(blocks)",
    "bmat": "block(blocks)",
    "diags_array": "diags(diagonals, offsets, shape=shape)",
    "eye_array": "eye(n)",
    "find": "SparseArray.coordinates(), and .values",
    "identity": "eye(n)",
    "issparse": "isinstance(A, SparseArray)",
    "load_npz": "read(path)",
    "nn": "import sgap_jax.nn, which needs Flax",
    "rand": "random(shape, density=density)",
    "random_array": "random(shape, density=density)",
    "save_npz": "write(path, A)",
    "spdiags": "diags(diagonals, offsets, shape=shape)",
}
_MADE = "SparseArray.from_scipy(a), from_dense(x) or from_arrays(values, offsets, columns)"
for _kind in ("array", "matrix"):
    _INSTEAD[f"bsr_{_kind}"] = "SparseArray.from_scipy(a, format=BCSR(r, c))"
    _INSTEAD[f"coo_{_kind}"] = "SparseArray.from_coordinates(coordinates, values, shape)"
    _INSTEAD[f"csc_{_kind}"] = "SparseArray.from_scipy(a, format=CSC)"
    _INSTEAD[f"csr_{_kind}"] = _MADE

if not _typing.TYPE_CHECKING:  # of names that are not here, type checkers say so
    __getattr__ = _no_attribute(__name__, _INSTEAD)
