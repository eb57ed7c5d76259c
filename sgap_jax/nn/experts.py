"""Mixtures of experts: the computation of nnx.MoE and linen.MoE, and the losses of a router."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.typing import Initializer
from jax import export

from sgap_jax.formats import checks
from sgap_jax.primitives._define import accumulator
from sgap_jax.primitives.sddmm import sddmm
from sgap_jax.primitives.spmm import spmm
from sgap_jax.schedules import Schedule
from sgap_jax.select.routing import route
from sgap_jax.select.rows import top_k

Activation = Callable[[jax.Array], jax.Array]

_lecun = jax.nn.initializers.variance_scaling
# Of weights [experts, hidden, features], into the hidden features and out of them.
IN_INIT: Initializer = _lecun(1.0, "fan_in", "truncated_normal", 2, 1, (0,))
OUT_INIT: Initializer = _lecun(1.0, "fan_in", "truncated_normal", 1, 2, (0,))
LONGEST_BLOCK = 16


class RouterLosses(NamedTuple):
    """Losses of a router, to be added to that of the model times a weight of one's own.

    load_balancing: `load_balancing_loss`, usually times 0.01; z: `router_z_loss`, times 0.001.
    """

    load_balancing: jax.Array
    z: jax.Array


class RouterChoices(NamedTuple):
    """What a router chose for the tokens [...] of a call.

    experts: int32 [..., num_selected], ascending for each token; -1 of a token that does not count.
    weights: [..., num_selected] in float32 at least, of those experts' outputs; 0 likewise.
    dropped: int32 [], how many choices a `capacity_factor` left out.
    """

    experts: jax.Array
    weights: jax.Array
    dropped: jax.Array


def load_balancing_loss(logits: Any, chosen: Any, *, mask: Any = None) -> jax.Array:
    """How unevenly a router spreads tokens over E experts; 1 if evenly, at most E.

        E * sum over experts e of f[e] P[e]

    with f[e] the share of the choices that are e, and P[e] the mean over the tokens of the
    softmax of the logits. The gradient reaches the logits through P.

    Args:
      logits: [tokens, E], traced or not. chosen: integers [tokens] or [tokens, choices].
      mask: bool [tokens], the tokens that count; None: all.

    Returns:
      [] in float32 at least.

    Raises:
      ValueError: another shape. TypeError: choices that are no integers, a mask that is not bool.

    Source: Switch Transformer (Fedus et al., 2022), equations 4 to 6, without the factor alpha.
    """
    logits, chosen = _checked_logits("load_balancing_loss", logits), jnp.asarray(chosen)
    tokens, experts = logits.shape
    if chosen.ndim not in (1, 2) or chosen.shape[0] != tokens:
        raise ValueError(
            f"load_balancing_loss: chosen must have shape [{tokens}] or [{tokens}, choices], got "
            f"{list(chosen.shape)}"
        )
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise TypeError(f"load_balancing_loss: chosen must be integers, got {chosen.dtype}")
    logits, taken, count = _that_count("load_balancing_loss", logits, mask)
    chosen = chosen.reshape(tokens, math.prod(chosen.shape[1:]))
    places = jnp.where((chosen < 0) | ~taken[:, None], experts, chosen)
    counts = jnp.zeros(experts, logits.dtype).at[places.reshape(-1)].add(1, mode="drop")
    share = counts / (count * max(chosen.shape[1], 1))
    probabilities = jnp.where(taken[:, None], jax.nn.softmax(logits, axis=-1), 0)
    return experts * jnp.sum(share * jnp.sum(probabilities, axis=0) / count)


def router_z_loss(logits: Any, *, mask: Any = None) -> jax.Array:
    """The mean over the tokens (that `mask`, bool [tokens], counts) of logsumexp(logits[t])^2,
    which keeps logits [tokens, experts] small; in float32 at least. Source: ST-MoE (Zoph et al.,
    2022), equation 5."""
    op = "router_z_loss"
    logits, taken, count = _that_count(op, _checked_logits(op, logits), mask)
    sums = jax.nn.logsumexp(logits, axis=-1)
    return jnp.sum(jnp.where(taken, sums, 0) ** 2) / count


def _that_count(op: str, logits: jax.Array, mask: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(logits, of tokens that do not count zeros; which count; how many, at least 1)"""
    tokens = logits.shape[0]
    taken = jnp.ones(tokens, bool) if mask is None else _as_mask(op, mask, (tokens,))
    logits = jnp.where(taken[:, None], logits, jnp.zeros((), logits.dtype))
    return logits, taken, jnp.maximum(jnp.sum(taken), 1).astype(logits.dtype)


def _as_mask(op: str, mask: Any, shape: tuple[int, ...]) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"{op}: mask must be bool, got {mask.dtype}")
    if mask.shape != shape:
        raise ValueError(f"{op}: mask must have shape {list(shape)}, got {list(mask.shape)}")
    return mask


def _checked_logits(op: str, logits: Any) -> jax.Array:
    logits = jnp.asarray(logits)
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"{op}: logits must be floats [tokens, experts], got {list(logits.shape)} of "
            f"{logits.dtype}"
        )
    return logits.astype(accumulator(logits.dtype))


def check_options(
    op: str,
    features: int,
    hidden: int,
    experts: int,
    selected: int,
    block: int | None,
    capacity_factor: float | None,
) -> None:
    """TypeError or ValueError unless sizes are positive integers, and the others in range."""
    sizes = dict(
        features=features,
        hidden_features=hidden,
        num_experts=experts,
        num_selected=selected,
        block=1 if block is None else block,
    )
    for name, size in sizes.items():
        checks.check_count(size, name, op, 1)
    if selected > experts:
        raise ValueError(f"{op}: num_selected: expected at most {experts} experts, got {selected}")
    if capacity_factor is not None and not capacity_factor >= 0:
        raise ValueError(f"{op}: capacity_factor must not be negative, got {capacity_factor}")


def choose(logits: jax.Array, choices: int, normalize: bool) -> tuple[jax.Array, jax.Array]:
    """(experts, weights) [tokens, choices]: the greatest of softmax(logits), experts ascending."""
    tokens = logits.shape[0]
    # Without -infinity every row has as many as are asked for.
    found = top_k(jax.nn.softmax(logits, axis=-1), choices)
    experts = found.column_indices.reshape(tokens, choices)
    weights = found.values.reshape(tokens, choices)
    if normalize:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    return experts, weights


def block_size(choices: int, experts: int) -> int:
    """Rows of a block: up to LONGEST_BLOCK, and where an expert has few tokens, so few that
    padding to blocks adds little."""
    if export.is_symbolic_dim(choices):
        return LONGEST_BLOCK
    each = choices / experts / 4
    return 2 ** math.floor(math.log2(min(max(each, 4), LONGEST_BLOCK)))


def mixture(
    op: str,
    x: jax.Array,
    router: jax.Array,
    w_in: jax.Array,
    w_gate: jax.Array | None,
    w_out: jax.Array,
    *,
    choices: int,
    normalize: bool | None,
    activation: Activation,
    capacity_factor: float | None,
    block: int | None,
    schedule: Schedule | None,
    mask: Any = None,
) -> tuple[jax.Array, RouterLosses, RouterChoices]:
    """See `sgap_jax.nn.MoE`: x [..., features], router [features, experts], weights of the experts
    [experts, hidden, features]."""
    experts, hidden, features = w_in.shape
    if x.ndim < 1 or x.shape[-1] != features:
        raise ValueError(f"{op}: inputs must have shape [..., {features}], got {list(x.shape)}")
    tokens = x.reshape(math.prod(x.shape[:-1]), features)
    if mask is not None:
        mask = _as_mask(op, mask, x.shape[:-1]).reshape(-1)
        # What padding holds, NaN too, reaches neither the router nor its gradient.
        tokens = jnp.where(mask[:, None], tokens, jnp.zeros((), tokens.dtype))
    count = tokens.shape[0] * choices
    capacity = None
    # From a factor of `experts` on, one expert may have all the choices: nothing is dropped.
    if capacity_factor is not None and capacity_factor < experts:
        if export.is_symbolic_dim(count):
            raise NotImplementedError(
                f"{op}: capacity_factor: none for a symbolic number of tokens; the nearest is None"
            )
        capacity = math.ceil(capacity_factor * count / experts)
    wide = accumulator(x.dtype)
    logits = tokens.astype(wide) @ router.astype(wide)
    # The weight of a single expert, divided by itself, would be 1 whatever the router says.
    normalize = choices > 1 if normalize is None else normalize
    chosen, weights = choose(logits, choices, normalize)
    if mask is not None:
        chosen = jnp.where(mask[:, None], chosen, -1)
        weights = jnp.where(mask[:, None], weights, jnp.zeros((), weights.dtype))
    block = block_size(count, experts) if block is None else block
    routing = route(chosen, experts, block=block, capacity=capacity)
    topology, rows = routing.topology(hidden), routing.gather(tokens)

    def into(w: jax.Array) -> Any:
        return sddmm(topology, rows, w.reshape(experts * hidden, features), schedule=schedule)

    h = into(w_in)
    inner = activation(h.values) if w_gate is None else activation(into(w_gate).values) * h.values
    y = spmm(h.with_values(inner), w_out.reshape(experts * hidden, features), schedule=schedule)
    out = routing.combine(y, weights.astype(y.dtype)).reshape(x.shape)
    balance = load_balancing_loss(logits, chosen, mask=mask)
    losses = RouterLosses(balance, router_z_loss(logits, mask=mask))
    each = (*x.shape[:-1], choices)
    found = RouterChoices(chosen.reshape(each), weights.reshape(each), routing.dropped)
    return out, losses, found


def results(
    mixed: tuple[jax.Array, RouterLosses, RouterChoices], losses: bool, routing: bool
) -> Any:
    """y, or a tuple of y and those that a call asks for."""
    asked = [x for x, wanted in zip(mixed, (True, losses, routing), strict=True) if wanted]
    return tuple(asked) if len(asked) > 1 else asked[0]
