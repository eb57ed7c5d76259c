"""Patterns of attention: which keys (columns) each query (row) sees.

Each function returns a SparseArray of ones with concrete structure, for
`sgap_jax.sparse_attention`, in CSR or, with `format=CVS(V)`, in vectors of V rows. A vector is
stored if any of its rows has an entry, so all V of its rows see that key. The docstrings define
each mask by its entries in CSR.
"""

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
