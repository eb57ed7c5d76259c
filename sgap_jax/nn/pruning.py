"""Gradual magnitude pruning: a dense layer with a mask, which becomes a `SparseLinear`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sgap_jax.formats.checks import check_concrete, check_share
from sgap_jax.formats.levels import CSR, Format
from sgap_jax.formats.vectors import grid, tile
from sgap_jax.nn.linear import with_bias
from sgap_jax.nn.structure import Structure, check_format
from sgap_jax.primitives._define import accumulator

# Attributes of a dense layer that are arguments of a new one.
_OPTIONS = (
    *("in_features", "out_features", "use_bias", "dtype", "param_dtype", "precision"),
    *("dot_general", "promote_dtype", "preferred_element_type"),
)


def sparsity_schedule(
    final: float, *, steps: int, begin: int = 0, every: int = 1, initial: float = 0.0
) -> Callable[[Any], Any]:
    """The sparsity at each step of gradual pruning, as a function like optax's schedules.

        s(t) = final + (initial - final) (1 - (t' - begin) / steps)^3

    where t' is t, at least `begin` and at most `begin + steps`, rounded down to begin + a multiple
    of `every`.

    Args:
      final: sparsity from step `begin + steps` on, from 0 to 1.
      steps: how many steps it rises for (the paper's n times Delta t).
      begin: step at which it starts to rise (t_0).
      every: steps between two values (Delta t): prune again where `(t - begin) % every == 0`.
      initial: sparsity up to `begin`.

    Returns:
      A function of t: a Python number gives a float, an array (traced or not) a float32 array.

    Raises:
      ValueError: a sparsity out of range, or steps or every is not positive.

    Source: Zhu and Gupta, "To prune, or not to prune" (2017), equation 1.
    """
    numbers = dict(final=final, initial=initial, steps=steps, every=every)
    for name, number in numbers.items():
        check_concrete(number, name, "sparsity_schedule", "the step may be traced, later")
    for name, share in (("final", final), ("initial", initial)):
        if not 0 <= share <= 1:
            raise ValueError(
                f"sparsity_schedule: {name}: expected a number from 0 to 1, got {share}"
            )
    if steps < 1 or every < 1:
        raise ValueError(
            f"sparsity_schedule: steps and every must be positive, got {steps} and {every}"
        )

    def sparsity(step: Any) -> Any:
        if isinstance(step, (int, float)):
            since = min(max(step - begin, 0) // every * every, steps)
            return final + (initial - final) * (1 - since / steps) ** 3
        past = jnp.maximum(jnp.asarray(step) - begin, 0) // every * every
        left = 1 - jnp.minimum(past, steps).astype(jnp.float32) / steps
        return final + (initial - final) * left**3

    return sparsity


def magnitude_mask(W: Any, sparsity: Any, format: Format | str = CSR) -> jax.Array:
    """Where `sgap_jax.prune` would keep W's entries; works under jit, with a traced sparsity too.

        keep the round((1 - sparsity) N) groups g of largest norm(W[g]), of N in all

    Args:
      W: dense [m, k] of a real floating dtype; among equal norms the first in row order stay.
      sparsity: share of groups to drop, from 0 to 1: a number or a scalar array.
      format: CSR, whose groups are entries, CVS(V): column vectors of V rows, or BCSR(r, c):
        blocks.

    Returns:
      bool [m, k]. Norms are compared in float32 at least (`prune` takes float64).

    Raises:
      ValueError: W is not a real matrix, or sparsity is out of range (a traced one keeps all or
        none then). NotImplementedError: another format.

    Source: Zhu and Gupta (2017), section 3; vectorSparse, sections 7.1 (grain V x 1), 8 (blocks).
    """
    W = jnp.asarray(W)
    if W.ndim != 2 or not jnp.issubdtype(W.dtype, jnp.floating):
        raise ValueError(
            f"magnitude_mask: W: expected a real matrix, got shape {W.shape} of {W.dtype}"
        )
    format = check_format("magnitude_mask", format)
    sparsity = check_share(sparsity, "sparsity", "magnitude_mask")
    height, width = tile(format)
    (m, k), (down, across) = W.shape, grid(W.shape, format)
    padded = jnp.pad(W, ((0, down * height - m), (0, across * width - k)))
    norms = norms_of_tiles(padded.reshape(down, height, across, width)).reshape(-1)
    kept = (1 - sparsity) * norms.size
    kept = round(kept) if isinstance(kept, (int, float)) else jnp.round(kept).astype(jnp.int32)
    # NaN sorts last, so these groups are dropped first.
    order = jnp.argsort(-norms, stable=True)
    rank = jnp.zeros(norms.size, jnp.int32).at[order].set(jnp.arange(norms.size, dtype=jnp.int32))
    mask = jnp.repeat((rank < kept).reshape(down, across), height, axis=0)
    return jnp.repeat(mask, width, axis=1)[:m, :k]


def norms_of_tiles(x: jax.Array) -> jax.Array:
    """[down, across]: the Euclidean norms over the second and the last axis of x [down, height,
    across, width], in float32 at least."""
    wide = accumulator(x.dtype)
    if x.shape[1] * x.shape[3] == 1:
        return jnp.abs(x[:, 0, :, 0].astype(wide))
    limits, squares = jnp.finfo(wide), jnp.square(x.astype(wide)).sum((1, 3))
    # Groups of zeros lose nothing: gradients of units behind a ReLU that no example reaches.
    low = (squares < limits.tiny / limits.eps) & (x != 0).any((1, 3))
    lost = low | (squares == jnp.inf)

    def scaled(x: jax.Array, _: jax.Array) -> jax.Array:
        """Of squares of what is near 1: others are infinite, or vanish."""
        # No power of two whose inverse is subnormal, which would count as 0.
        greatest = jnp.minimum(jnp.abs(x.astype(wide)).max((1, 3)), limits.max / 4)
        scale = jax.lax.reduce_precision(greatest, exponent_bits=limits.nexp, mantissa_bits=0)
        scale = jnp.where((scale > 0) & (scale < jnp.inf), scale, jnp.ones_like(scale))
        near = x.astype(wide) / scale[:, None, :, None]
        return jnp.sqrt(jnp.square(near).sum((1, 3))) * scale

    return jax.lax.cond(jnp.any(lost), scaled, lambda _, squares: jnp.sqrt(squares), x, squares)


def kernel_mask(kernel: jax.Array, sparsity: Any, format: Format | str) -> jax.Array:
    """`magnitude_mask` of K^T for a kernel K [..., in_features, out_features]; stacked layers are
    masked separately."""
    sparsity = check_share(sparsity, "sparsity", "prune_step")
    mask = partial(magnitude_mask, sparsity=sparsity, format=format)
    for _ in kernel.shape[:-2]:
        mask = jax.vmap(mask)
    return jnp.swapaxes(mask(jnp.swapaxes(kernel, -1, -2)), -1, -2)


class MaskedLinear(nnx.Linear):
    """A dense linear layer whose weights a mask switches off, for pruning while it trains.

        y = x (mask o K) + b

    All of the kernel K [in_features, out_features] stays a parameter: a weight that is masked gets
    no gradient, keeps its value, and comes back if the others fall below it. `prune_step` sets the
    mask (variable `mask` of type `Structure`: saved, not trained) from the magnitudes of K;
    `SparseLinear.from_dense(layer)` then keeps what the mask keeps.

    Args:
      in_features, out_features, rngs and the options of `nnx.Linear`, which this is one of.
      format: which weights are masked together: CSR one at a time, CVS(V) V consecutive outputs of
        one input, BCSR(r, c) r consecutive outputs of c consecutive inputs.

    Source: Zhu and Gupta, "To prune, or not to prune" (2017), section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        format: Format | str = CSR,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **options)
        self.format = check_format("MaskedLinear", format)
        self.mask = Structure(jnp.ones((in_features, out_features), bool))

    @classmethod
    def from_dense(cls, layer: nnx.Linear, *, format: Format | str | None = None) -> MaskedLinear:
        """A layer with the options of a trained dense one and copies of its parameters, and no
        weight masked. From a `MaskedLinear` it also takes the mask, and the format unless one is
        given; from another layer, None is CSR."""
        op = f"{cls.__name__}.from_dense"
        if not isinstance(layer, nnx.Linear):
            raise TypeError(f"{op}: layer must be an nnx.Linear, got {type(layer).__name__}")
        options = {name: getattr(layer, name) for name in _OPTIONS}
        own = layer.format if isinstance(layer, MaskedLinear) else CSR
        made = cls(format=own if format is None else format, rngs=nnx.Rngs(0), **options)
        # The mask is the only variable that is no parameter.
        nnx.update(made, jax.tree.map(jnp.copy, nnx.state(layer, (nnx.Param, Structure))))
        return made

    @property
    def sparsity(self) -> jax.Array:
        """The share of the kernel's weights that are masked."""
        return 1 - jnp.mean(self.mask[...], dtype=jnp.float32)

    def prune_step(self, sparsity: Any) -> None:
        """Masks all but the kernel's largest groups, see `magnitude_mask`; works under `nnx.jit`.
        Layers stacked by `nnx.vmap` are pruned separately."""
        self.mask[...] = kernel_mask(self.kernel[...], sparsity, self.format)

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        kernel = self.kernel[...]
        kernel = jnp.where(self.mask[...], kernel, jnp.zeros((), kernel.dtype))
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        over = (((inputs.ndim - 1,), (0,)), ((), ()))
        options = {"out_sharding": out_sharding}
        if self.preferred_element_type is not None:
            options["preferred_element_type"] = self.preferred_element_type
        y = self.dot_general(inputs, kernel, over, precision=self.precision, **options)
        return with_bias(y, bias)


def prune_step(model: nnx.Module, sparsity: Any) -> None:
    """Prunes every `MaskedLinear` of a model to a sparsity, each by its own magnitudes::

        sparsity = nn.sparsity_schedule(0.9, begin=1000, steps=8000, every=100)
        if step % 100 == 0:
            nn.prune_step(model, sparsity(step))

    In place, also inside `nnx.jit`, where `sparsity` may be traced. Layers stacked by `nnx.vmap`
    are pruned separately; if they are stacked along another axis than the first, call this inside
    an `nnx.vmap` over that axis.

    Raises:
      ValueError: the model has no MaskedLinear, or sparsity is out of range.

    Source: Zhu and Gupta, "To prune, or not to prune" (2017), section 3.
    """
    layers = [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, MaskedLinear)]
    if not layers:
        raise ValueError(f"prune_step: {type(model).__name__} has no MaskedLinear")
    for layer in layers:
        layer.prune_step(sparsity)
