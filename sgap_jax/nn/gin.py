"""The graph isomorphism network (GIN): a sum over neighbours, then a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype

from sgap_jax.formats.array import SparseArray
from sgap_jax.nn.sage import ends_of, received
from sgap_jax.primitives._define import check_schedule
from sgap_jax.schedules import Schedule


class GINConv(nnx.Module):
    """A layer of the graph isomorphism network.

        y[i] = network((1 + eps) x[i] + sum_j x[j]),   j over the stored (i, j) of the graph

    Args:
      network: what the sums go through, in the paper a perceptron of two layers: a module of nnx,
        or any function of an array [..., m, features].
      eps: how much a node's own features count beyond one.
      train_eps: eps is a parameter (GIN-eps); else it is fixed (GIN-0).
      param_dtype: of eps.
      schedule: of the messages; None lets `choose_schedule` pick.

    Called with (graph, x), as `SAGEConv`; a sparse x is made dense, integers floating. Returns what
    the network returns.

    Raises:
      TypeError: graph is not a SparseArray. ValueError: x does not fit the graph.

    Values of the graph are ignored, as by `SAGEConv`: `duplicates="keep"` counts repeated edges.

    Source: Xu et al., ICLR 2019, equation 4.1.
    """

    def __init__(
        self,
        network: Callable[[jax.Array], jax.Array],
        *,
        eps: float = 0.0,
        train_eps: bool = False,
        param_dtype: Dtype = jnp.float32,
        schedule: Schedule | str | None = None,
    ) -> None:
        self.network = network
        self.train_eps = train_eps
        self.eps = nnx.Param(jnp.asarray(eps, param_dtype)) if train_eps else eps
        self.schedule = check_schedule("GINConv", schedule)

    def __call__(self, graph: SparseArray, x: Any) -> jax.Array:
        eps = self.eps[...] if isinstance(self.eps, nnx.Param) else self.eps
        return self.network(gin_sums(graph, x, eps, self.schedule))


def gin_sums(
    graph: SparseArray, x: Any, eps: float | jax.Array, schedule: Schedule | str | None
) -> jax.Array:
    number = eps.dtype if isinstance(eps, jax.Array) else jnp.float32

    def floats(x: Any) -> jax.Array:
        x = x.todense() if isinstance(x, SparseArray) else jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(number)

    x, own = ends_of("GINConv", graph, x)
    same, x = own is x, floats(x)
    own = x if same else floats(own)
    y: jax.Array = jnp.asarray(1 + eps, own.dtype) * own + received(graph, x, "sum", schedule)
    return y
