"""A layer that is a mixture of experts, for linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Dtype, Initializer

from sgap_jax.nn.experts import IN_INIT, OUT_INIT, Activation, check_options, mixture, results
from sgap_jax.primitives._define import check_schedule
from sgap_jax.schedules import Schedule


class MoE(linen.Module):
    """A mixture of experts in place of a feed-forward layer: see `sgap_jax.nn.MoE`.

    Parameters `router` [features, num_experts], `w_in` and `w_out` (and `w_gate`) [num_experts,
    hidden_features, features], where features is the size of the last axis of the inputs.
    """

    hidden_features: int
    num_experts: int
    num_selected: int = 2
    activation: Activation = jax.nn.gelu
    gated: bool = False
    normalize_weights: bool | None = None
    capacity_factor: float | None = None
    block: int | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    router_init: Initializer = linen.initializers.lecun_normal()
    kernel_init: Initializer | None = None
    schedule: Schedule | str | None = None

    @linen.compact
    def __call__(
        self,
        x: Any,
        *,
        mask: Any = None,
        return_losses: bool = False,
        return_routing: bool = False,
    ) -> Any:
        op, x = "MoE", jnp.asarray(x)
        features = x.shape[-1]
        check_options(
            op,
            features,
            self.hidden_features,
            self.num_experts,
            self.num_selected,
            self.block,
            self.capacity_factor,
        )
        shape = (self.num_experts, self.hidden_features, features)

        def weights(name: str, own: Initializer) -> Any:
            return self.param(name, self.kernel_init or own, shape, self.param_dtype)

        router = self.param(
            "router", self.router_init, (features, self.num_experts), self.param_dtype
        )
        w_in, w_out = weights("w_in", IN_INIT), weights("w_out", OUT_INIT)
        gate = weights("w_gate", IN_INIT) if self.gated else None
        x, w_in, gate, w_out = promote_dtype((x, w_in, gate, w_out), dtype=self.dtype)
        mixed = mixture(
            op,
            x,
            router,
            w_in,
            gate,
            w_out,
            choices=self.num_selected,
            normalize=self.normalize_weights,
            activation=self.activation,
            capacity_factor=self.capacity_factor,
            block=self.block,
            schedule=check_schedule(op, self.schedule),
            mask=mask,
        )
        return results(mixed, return_losses, return_routing)
