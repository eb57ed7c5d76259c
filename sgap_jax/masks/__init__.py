"""Patterns of attention: which keys (columns) each query (row) sees.

Each function returns a SparseArray of ones with concrete structure, for
`sgap_jax.sparse_attention`, in CSR or, with `format=CVS(V)`, in vectors of V rows. A vector is
stored if any of its rows has an entry, so all V of its rows see that key. The docstrings define
each mask by its entries in CSR.
"""

import typing as _typing

from sgap_jax.formats.checks import no_attribute as _no_attribute
from sgap_jax.masks.build import from_function as from_function
from sgap_jax.masks.patterns import band as band
from sgap_jax.masks.patterns import band_and_random as band_and_random
from sgap_jax.masks.patterns import bigbird as bigbird
from sgap_jax.masks.patterns import block_diagonal as block_diagonal
from sgap_jax.masks.patterns import fixed as fixed
from sgap_jax.masks.patterns import longformer as longformer
from sgap_jax.masks.patterns import strided as strided
from sgap_jax.masks.plot import plot as plot
from sgap_jax.masks.sets import causal as causal
from sgap_jax.masks.sets import intersection as intersection
from sgap_jax.masks.sets import union as union

_FUNCTION = "from_function(lambda i, j: mask_mod(0, 0, i, j), L, S)"
_INSTEAD = {
    "and_masks": "intersection(a, b)",
    "create_block_mask": _FUNCTION + ", with format=CVS(V) for vectors of V queries",
    "create_mask": _FUNCTION,
    "full": "band(L, 2 * L), which stores every pair; dense attention is faster",
    "local": "band(L, width)",
    "noop_mask": "band(L, 2 * L)",
    "or_masks": "union(a, b)",
    "sliding_window": "band(L, width), or causal(band(L, 2 * width - 1)) for the last keys",
}

if not _typing.TYPE_CHECKING:  # of names that are not here, type checkers say so
    __getattr__ = _no_attribute(__name__, _INSTEAD)
