"""How a dense layer's kernel is a matrix: contractions of any axes, and convolutions as products
over patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Contraction:
    """y = einsum(f"{inputs},{kernel}->{outputs}", x, K) as a product with a sparse matrix.

    The kernel's axes are blocks (also axes of x and y), inner ones (of x alone) and outer ones (of
    y alone). The matrix is block-diagonal, [blocks outer, blocks inner]; `stacked` has its blocks
    one below the other, [blocks outer, inner].

    Args:
      inputs, outputs: letters of the axes, with an ellipsis perhaps.
      kernel: letters of the kernel's axes.
      kernel_shape: their sizes.
    """

    inputs: str
    kernel: str
    outputs: str
    kernel_shape: tuple[int, ...]

    @classmethod
    def of_text(cls, op: str, text: str, kernel_shape: Sequence[int]) -> Contraction:
        """Of the text of an einsum of x and the kernel."""
        operands, outputs = text.replace(" ", "").split("->")
        inputs, kernel = operands.split(",")
        made = cls(inputs, kernel, outputs, tuple(kernel_shape))
        letters = [part.replace("...", "") for part in (inputs, kernel, outputs)]
        repeated = any(len(set(part)) < len(part) for part in letters)
        alone = set(kernel) - set(inputs) - set(outputs)
        if len(kernel) != len(kernel_shape) or "." in kernel or repeated or alone:
            raise NotImplementedError(
                f"{op}: {text!r} is no product of a matrix for a kernel of {len(kernel_shape)} "
                "axes: expected each of its letters once, and in the inputs or the outputs"
            )
        if set(letters[2]) - set(inputs) - set(kernel):
            raise ValueError(f"{op}: {text!r}: a letter of the outputs is in no operand")
        return made

    @classmethod
    def of_axes(
        cls, ndim: int, axis: Iterable[int], batch_axis: Iterable[int], kernel_shape: Sequence[int]
    ) -> Contraction:
        """Of x [ndim axes] over `axis`, with blocks along `batch_axis`: as `nnx.LinearGeneral`."""
        axis, batch = (sorted(a % ndim for a in axes) for axes in (axis, batch_axis))
        x = _LETTERS[:ndim]
        blocks, inner = ("".join(x[a] for a in axes) for axes in (batch, axis))
        outer = _LETTERS[ndim : ndim + len(kernel_shape) - len(blocks + inner)]
        rest = "".join(letter for letter in x if letter not in blocks + inner)
        return cls(x, blocks + inner + outer, blocks + rest + outer, tuple(kernel_shape))

    @property
    def size(self) -> dict[str, int]:
        return dict(zip(self.kernel, self.kernel_shape, strict=True))

    def _axes(self) -> tuple[str, str, str]:
        """The letters of the kernel's axes: blocks, outer, inner."""
        of = {letter: (letter in self.inputs, letter in self.outputs) for letter in self.kernel}
        kinds = ((True, True), (False, True), (True, False))
        blocks, outer, inner = ("".join(k for k in of if of[k] == kind) for kind in kinds)
        return blocks, outer, inner

    def _count(self, letters: str) -> int:
        return math.prod(self.size[letter] for letter in letters)

    @property
    def blocks(self) -> int:
        return self._count(self._axes()[0])

    @property
    def stacked_shape(self) -> tuple[int, int]:
        blocks, outer, inner = self._axes()
        return self._count(blocks + outer), self._count(inner)

    def stacked(self, kernel: Any) -> Any:
        """[blocks outer, inner] of a kernel, or of a mask of one."""
        order = [self.kernel.index(letter) for letter in "".join(self._axes())]
        return kernel.reshape(self.kernel_shape).transpose(order).reshape(self.stacked_shape)

    def kernel_of(self, stacked: Any) -> Any:
        """The kernel whose matrix this is: the inverse of `stacked`."""
        letters = "".join(self._axes())
        found = stacked.reshape([self.size[letter] for letter in letters])
        return found.transpose([letters.index(letter) for letter in self.kernel])

    def apply(self, op: str, x: jax.Array, product: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """y, where product(z [..., blocks inner]) is [..., blocks outer]."""
        inputs, outputs = self._without_ellipsis(op, x.ndim)
        size = dict(zip(inputs, x.shape, strict=True))
        expected = [str(self.size.get(letter, "?")) for letter in inputs]
        if any(self.size.get(letter, size[letter]) != size[letter] for letter in inputs):
            shape = ", ".join(expected)
            raise ValueError(f"{op}: inputs must have shape [{shape}], got {list(x.shape)}")
        blocks, outer, inner = self._axes()
        kept = "".join(k for k in outputs if k not in self.kernel)
        lone = tuple(i for i, k in enumerate(inputs) if k not in kept + self.kernel)
        if lone:
            x, inputs = x.sum(lone), "".join(k for i, k in enumerate(inputs) if i not in lone)
        x = x.transpose([inputs.index(k) for k in kept + blocks + inner])
        leading = [size[k] for k in kept]
        y = product(x.reshape(*leading, self._count(blocks + inner)))
        y = y.reshape(leading + [self.size[k] for k in blocks + outer])
        return y.transpose([(kept + blocks + outer).index(k) for k in outputs])

    def broadcast_bias(self, op: str, bias: jax.Array, ndim: int) -> jax.Array:
        """A bias of the kernel's axes in the outputs, in their order, with axes of 1 for others."""
        _, outputs = self._without_ellipsis(op, ndim)
        return bias.reshape([self.size.get(letter, 1) for letter in outputs])

    def _without_ellipsis(self, op: str, ndim: int) -> tuple[str, str]:
        named = self.inputs.replace("...", "")
        if ndim < len(named) or (ndim > len(named) and "..." not in self.inputs):
            raise ValueError(f"{op}: inputs: expected axes {self.inputs!r}, got {ndim} dimensions")
        used = self.inputs + self.kernel + self.outputs
        free = [letter for letter in _LETTERS if letter not in used]
        dots = "".join(free[: ndim - len(named)])
        return self.inputs.replace("...", dots), self.outputs.replace("...", dots)


def patches(
    op: str,
    x: jax.Array,
    kernel_size: Sequence[int],
    *,
    strides: Any = 1,
    padding: Any = "SAME",
    input_dilation: Any = 1,
    kernel_dilation: Any = 1,
) -> jax.Array:
    """[..., *spatial, *kernel_size, features]: what each output of a convolution sees of
    x [..., *spatial, features]. Arguments as of `nnx.Conv`; each patch is a strided slice."""
    rank = len(kernel_size)
    if x.ndim < rank + 1:
        raise ValueError(f"{op}: inputs: expected {rank + 1} dimensions or more, got {x.ndim}")

    def each(name: str, value: Any) -> tuple[int, ...]:
        values = (
            (1 if value is None else value,) * rank if not isinstance(value, Sequence) else value
        )
        if len(values) != rank:
            raise ValueError(f"{op}: {name}: expected {rank} numbers, got {value}")
        return tuple(values)

    stride, spread = each("strides", strides), each("kernel_dilation", kernel_dilation)
    between = each("input_dilation", input_dilation)
    spatial = x.shape[-rank - 1 : -1]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel_size, spread, strict=True)]
    leading = [(0, 0, 0)] * (x.ndim - rank - 1)
    modes = {"CIRCULAR": "wrap", "REFLECT": "reflect", "CAUSAL": "constant"}
    if isinstance(padding, str) and padding in modes:
        if padding == "CAUSAL" and rank != 1:
            raise ValueError(f"{op}: padding: 'CAUSAL' is of one spatial dimension, got {rank}")
        own = [(r - 1, 0) if padding == "CAUSAL" else ((r - 1) // 2, r // 2) for r in reach]
        x = jnp.pad(x, [(0, 0)] * len(leading) + own + [(0, 0)], mode=modes[padding])
        spatial, padding = x.shape[-rank - 1 : -1], "VALID"
    dilated = [max((n - 1) * d + 1, 0) if n else 0 for n, d in zip(spatial, between, strict=True)]
    if isinstance(padding, str):
        sides = list(jax.lax.padtype_to_pads(dilated, reach, stride, padding))
    else:
        pairs = [padding] * rank if isinstance(padding, int) else padding
        sides = [(p, p) if isinstance(p, int) else tuple(p) for p in pairs]
    low_high = [(low, high, d - 1) for (low, high), d in zip(sides, between, strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [*leading, *low_high, (0, 0, 0)])
    sizes = x.shape[-rank - 1 : -1]
    counts = [max((n - r) // s + 1, 0) for n, r, s in zip(sizes, reach, stride, strict=True)]

    def along(x: jax.Array, axis: int, number: int) -> jax.Array:
        """The windows along one spatial axis, as an axis before the features."""
        count, step = counts[number], stride[number]
        starts = [k * spread[number] if count else 0 for k in range(kernel_size[number])]
        length = (count - 1) * step + 1 if count else 0
        taken = [jax.lax.slice_in_dim(x, k, k + length, step, axis) for k in starts]
        return jnp.stack(taken, axis=-2)

    for number in range(rank):
        x = along(x, len(leading) + number, number)
    return x
