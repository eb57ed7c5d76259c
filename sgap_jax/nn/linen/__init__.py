"""The layers of `sgap_jax.nn` for Flax linen: the same arguments, names of parameters and results.

A structure is a variable of the collection "structure", beside "params": give both to `apply`, and
only "params" to the optimizer.
"""

from sgap_jax.nn.linen.attention import SparseMultiHeadAttention as SparseMultiHeadAttention
from sgap_jax.nn.linen.attention import SparseSelfAttention as SparseSelfAttention
from sgap_jax.nn.linen.dynamic_attention import BlockSparseAttention as BlockSparseAttention
from sgap_jax.nn.linen.dynamic_attention import TopKSparseAttention as TopKSparseAttention
from sgap_jax.nn.linen.graph import GATv2Conv as GATv2Conv
from sgap_jax.nn.linen.graph import GINConv as GINConv
from sgap_jax.nn.linen.graph import GraphAttention as GraphAttention
from sgap_jax.nn.linen.graph import GraphConv as GraphConv
from sgap_jax.nn.linen.graph import RGCNConv as RGCNConv
from sgap_jax.nn.linen.graph import SAGEConv as SAGEConv
from sgap_jax.nn.linen.linear import MaskedLinear as MaskedLinear
from sgap_jax.nn.linen.linear import SparseLinear as SparseLinear
from sgap_jax.nn.linen.linear import prune_step as prune_step
from sgap_jax.nn.linen.linear import rigl_step as rigl_step
from sgap_jax.nn.linen.moe import MoE as MoE
from sgap_jax.nn.linen.sparsify import Sparsified as Sparsified
from sgap_jax.nn.linen.sparsify import sparsify as sparsify
