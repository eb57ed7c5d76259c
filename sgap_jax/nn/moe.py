"""A layer that is a mixture of experts, for nnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from sgap_jax.nn.experts import IN_INIT, OUT_INIT, Activation, check_options, mixture, results
from sgap_jax.nn.linear import NO_METADATA
from sgap_jax.primitives._define import check_schedule
from sgap_jax.schedules import Schedule

ROUTER_INIT: Initializer = nnx.initializers.lecun_normal()


class MoE(nnx.Module):
    """A mixture of experts in place of a feed-forward layer; block-sparse and dropless.

        y[t] = sum over the chosen e of w[t, e] W_out[e]^T act(W_in[e] x[t])
        p[t] = softmax(x[t] R), chosen: its `num_selected` greatest
        w[t, e] = p[t, e] / sum over the chosen i of p[t, i], or p[t, e]: `normalize_weights`

    Tokens are sorted by their experts and padded to blocks; the experts are an `sddmm` and an
    `spmm` over the blocks of (tokens x experts): see `select.route`. No token is dropped, unless
    there is a capacity.

    Args:
      features: size of the last axis of x and y.
      hidden_features: of each expert.
      num_experts, num_selected: how many experts there are, and how many a token is given.
      activation: `jax.nn.gelu`, or another function of each element.
      gated: act(W_gate[e] x[t]) * (W_in[e] x[t]) in place of act(W_in[e] x[t]); with
        `jax.nn.silu` the experts of Mixtral.
      normalize_weights: whether the chosen p[t, e] are divided by their sum. None: they are where
        `num_selected` is more than 1, as in Mixtral; one alone is not, as in Switch Transformer:
        divided by itself it is 1, and the router learns nothing from the task.
      capacity_factor: None, or each expert takes at most capacity_factor * tokens * num_selected /
        num_experts tokens, the first ones; the others skip it. `tokens` are all of the call, also
        those that a mask leaves out. Infinity is None.
      block: rows of a block; None: up to 16, by how many tokens an expert has on average.
      dtype, param_dtype, promote_dtype: as in `nnx.Linear`. The router runs in float32 at least.
      router_init, kernel_init: initializers of `router` [features, num_experts] and of the others;
        None is LeCun's normal distribution for the inputs of an expert.
      schedule: of the products; None lets `choose_schedule` pick.
      rngs: stream `params`.
      router_metadata, kernel_metadata: of the parameters, a sharding for example.

    Parameters: router, w_in and w_out (and w_gate) [num_experts, hidden_features, features].

    Called with x [..., features], returns y [..., features] in `dtype`, or if that is None in the
    promoted dtype of x and the parameters; with `return_losses` (y, `RouterLosses`), with
    `return_routing` (y, `RouterChoices`), with both all three. `mask`, bool [...], are the tokens
    that count: the others get zeros, take no place at an expert and no part in the losses, and
    whatever they hold reaches no gradient. Sums are carried in float32 at least. Experts are given
    by `select.top_k`: of equal probabilities the lower one.

    Raises:
      ValueError: sizes below 1, more experts selected than there are, another last axis of x, or a
        mask of another shape. TypeError: a mask that is not bool.
      NotImplementedError: a capacity_factor below num_experts for a symbolic number of tokens.

    Source: MegaBlocks (Gale et al., MLSys 2023), section 4; Switch Transformer (Fedus et al.,
    2022), section 2.
    """

    w_gate: nnx.Param | None

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        num_experts: int,
        num_selected: int = 2,
        activation: Activation = jax.nn.gelu,
        gated: bool = False,
        normalize_weights: bool | None = None,
        capacity_factor: float | None = None,
        block: int | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        promote_dtype: PromoteDtypeFn = flax_promote_dtype,
        router_init: Initializer = ROUTER_INIT,
        kernel_init: Initializer | None = None,
        schedule: Schedule | str | None = None,
        rngs: nnx.Rngs,
        router_metadata: Mapping[str, Any] = NO_METADATA,
        kernel_metadata: Mapping[str, Any] = NO_METADATA,
    ) -> None:
        check_options(
            "MoE", features, hidden_features, num_experts, num_selected, block, capacity_factor
        )
        schedule = check_schedule("MoE", schedule)
        shape = (num_experts, hidden_features, features)
        router = router_init(rngs.params(), (features, num_experts), param_dtype)
        self.router = nnx.Param(router, **router_metadata)

        def weights(own: Initializer) -> nnx.Param:
            made = (kernel_init or own)(rngs.params(), shape, param_dtype)
            return nnx.Param(made, **kernel_metadata)

        self.w_in, self.w_out = weights(IN_INIT), weights(OUT_INIT)
        self.w_gate = weights(IN_INIT) if gated else nnx.data(None)
        self.features, self.hidden_features = features, hidden_features
        self.num_experts, self.num_selected = num_experts, num_selected
        self.activation = activation
        self.normalize_weights = (
            num_selected > 1 if normalize_weights is None else normalize_weights
        )
        self.capacity_factor = capacity_factor
        self.block = block
        self.dtype = dtype
        self.promote_dtype = promote_dtype
        self.schedule = schedule

    def __call__(
        self,
        x: Any,
        *,
        mask: Any = None,
        return_losses: bool = False,
        return_routing: bool = False,
    ) -> Any:
        gate = None if self.w_gate is None else self.w_gate[...]
        x, w_in, gate, w_out = self.promote_dtype(
            (x, self.w_in[...], gate, self.w_out[...]), dtype=self.dtype
        )
        mixed = mixture(
            "MoE",
            x,
            self.router[...],
            w_in,
            gate,
            w_out,
            choices=self.num_selected,
            normalize=self.normalize_weights,
            activation=self.activation,
            capacity_factor=self.capacity_factor,
            block=self.block,
            schedule=self.schedule,
            mask=mask,
        )
        return results(mixed, return_losses, return_routing)
