"""Layers for Flax nnx on sparse weights, graphs, attention patterns and experts; `nn.linen` has
them for linen. Flax comes with the extra `sgap_jax[nn]`; `import sgap_jax` does without it."""

import typing as _typing

try:
    import flax as flax
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError("sgap_jax.nn needs flax: pip install 'sgap_jax[nn]'") from error

from sgap_jax.formats.checks import no_attribute as _no_attribute
from sgap_jax.nn.adjacency import add_self_loops as add_self_loops
from sgap_jax.nn.adjacency import normalize_adjacency as normalize_adjacency
from sgap_jax.nn.attend import alibi_slopes as alibi_slopes
from sgap_jax.nn.attend import rotary_embedding as rotary_embedding
from sgap_jax.nn.attention import SparseMultiHeadAttention as SparseMultiHeadAttention
from sgap_jax.nn.attention import SparseSelfAttention as SparseSelfAttention
from sgap_jax.nn.dynamic_attention import BlockSparseAttention as BlockSparseAttention
from sgap_jax.nn.dynamic_attention import TopKSparseAttention as TopKSparseAttention
from sgap_jax.nn.experts import RouterChoices as RouterChoices
from sgap_jax.nn.experts import RouterLosses as RouterLosses
from sgap_jax.nn.experts import load_balancing_loss as load_balancing_loss
from sgap_jax.nn.experts import router_z_loss as router_z_loss
from sgap_jax.nn.gatv2 import GATv2Conv as GATv2Conv
from sgap_jax.nn.general import SparseConv as SparseConv
from sgap_jax.nn.general import SparseEinsum as SparseEinsum
from sgap_jax.nn.general import SparseLinearGeneral as SparseLinearGeneral
from sgap_jax.nn.gin import GINConv as GINConv
from sgap_jax.nn.graph_attention import GraphAttention as GraphAttention
from sgap_jax.nn.graph_conv import GraphConv as GraphConv
from sgap_jax.nn.linear import SparseLinear as SparseLinear
from sgap_jax.nn.moe import MoE as MoE
from sgap_jax.nn.paged import PagedCache as PagedCache
from sgap_jax.nn.pruning import MaskedLinear as MaskedLinear
from sgap_jax.nn.pruning import magnitude_mask as magnitude_mask
from sgap_jax.nn.pruning import prune_step as prune_step
from sgap_jax.nn.pruning import sparsity_schedule as sparsity_schedule
from sgap_jax.nn.rgcn import RGCNConv as RGCNConv
from sgap_jax.nn.rigl import dense_gradients as dense_gradients
from sgap_jax.nn.rigl import rigl_step as rigl_step
from sgap_jax.nn.sage import SAGEConv as SAGEConv
from sgap_jax.nn.sparsify import sparsify as sparsify
from sgap_jax.nn.structure import Structure as Structure

_INSTEAD = {
    "EmbeddingBag": "gspmm with a SparseArray of bags x words (docs/recipes)",
    "GATConv": "GraphAttention",
    "GCNConv": "GraphConv, with normalize_adjacency(A)",
    "GINEConv": 'gsddmm(A, None, X, values=e, op="add", reduce=None), relu, and aggregate',
    "GraphSAGE": "SAGEConv",
    "MessagePassing": "gspmm, gsddmm and aggregate",
    "SparseDense": "SparseLinear",
    "TransformerConv": "sparse_attention(q, k, v, A)",
    "global_mean_pool": 'graphs.batch(list).readout(X, "mean")',
}

if not _typing.TYPE_CHECKING:  # of names that are not here, type checkers say so
    __getattr__ = _no_attribute(__name__, _INSTEAD)
