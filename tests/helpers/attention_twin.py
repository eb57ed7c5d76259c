"""Attention in dense jax.numpy with a dense mask, differentiable: the reference for
sparse_attention."""

import jax
import jax.numpy as jnp
import numpy as np

from sgap_jax import SparseArray


def dense_mask(A: SparseArray, is_causal: bool = False) -> np.ndarray:
    """The stored entries of A as bool [L, S], without the rows of a vector past the end of the
    matrix."""
    rows, columns = (np.asarray(x) for x in A.coordinates())
    mask = np.zeros(A.shape, bool)
    inside = (rows < A.shape[0]) & (columns < A.shape[1])
    mask[rows[inside], columns[inside]] = True
    return np.tril(mask) if is_causal else mask


def scatter(A: SparseArray, bias):
    """Scatters a bias [..., *values.shape] to dense [..., L, S], zero where nothing is stored."""
    rows, columns = A.coordinates()
    lead = bias.shape[: bias.ndim - A.values.ndim]
    dense = jnp.zeros((*lead, *A.shape), bias.dtype)
    return dense.at[..., rows, columns].set(bias.reshape(*lead, -1))


def twin(q, k, v, mask, *, bias=None, sinks=None, scale=None):
    """(O, lse) of q [B, L, H, D]; mask broadcasts to [B, H, L, S], bias to it."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("blhd,bshd->bhls", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        s = s + jnp.broadcast_to(bias, s.shape)
    s = jnp.where(jnp.broadcast_to(mask, s.shape), s, -jnp.inf)
    peak = jax.lax.stop_gradient(s.max(-1, initial=-jnp.inf))
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[None, :, None], peak.shape)
        peak = jnp.maximum(peak, jax.lax.stop_gradient(sinks))
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    e = jnp.exp(s - peak[..., None])
    total = e.sum(-1) + (0 if sinks is None else jnp.exp(sinks - peak))
    safe = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + peak)
    return jnp.einsum("bhls,bshd->blhd", e / safe[..., None], v), jnp.moveaxis(lse, 1, 2)


def attention_of_flax(query, key, value, mask=None, **unused):
    """`attention_fn` of Flax's layers in float64, which its own leaves for float32, and in which
    the masks of its cache are."""
    mask = mask.astype(bool)
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], axis=-2) for x in (key, value))
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(scores, where=jnp.broadcast_to(mask, scores.shape))
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)
