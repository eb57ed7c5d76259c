"""Subscripts of an einsum with one sparse operand: read, and held against the operands."""

import string
from collections.abc import Sequence

import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_unbatched


def parse(subscripts: str, operands: Sequence) -> tuple[int, tuple[str, ...], str]:
    """The sparse operand's place, and the indices of the operands and of the output.

    Raises TypeError, ValueError or NotImplementedError, as einsum does.
    """
    if not isinstance(subscripts, str):
        raise ValueError(f"einsum: expected subscripts such as 'ij,jk->ik', got {subscripts!r}")
    text = subscripts.replace(" ", "")
    if "." in text:
        raise NotImplementedError(
            f"einsum: an ellipsis in {subscripts!r}; give every index a letter"
        )
    inputs, arrow, output = text.partition("->")
    factors = tuple(inputs.split(","))
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    words = (*factors, output)
    if not all(c in string.ascii_letters for word in words for c in word):
        raise ValueError(f"einsum: expected letters as indices, got {subscripts!r}")
    if len(factors) != len(operands):
        raise ValueError(
            f"einsum: {subscripts!r} is for {len(factors)} operands, got {len(operands)}"
        )
    if len(set(output)) < len(output) or not set(output) <= set(inputs):
        raise ValueError(
            f"einsum: the output's indices must differ and occur in an operand, got {subscripts!r}"
        )
    twice = next((word for word in factors if len(set(word)) < len(word)), None)
    if twice is not None:
        raise NotImplementedError(f"einsum: an index twice in the operand {twice!r}")
    for word, x in zip(factors, operands, strict=True):
        if hasattr(x, "todense") and not isinstance(x, SparseArray):
            raise TypeError(
                f"einsum: {word!r} must be a SparseArray or dense, got a {type(x).__name__}"
            )
        ndim = x.ndim if isinstance(x, SparseArray) else jnp.ndim(x)
        if ndim != len(word):
            raise ValueError(f"einsum: {word!r} is for {len(word)} dimensions, got {ndim}")
    sparse = [i for i, x in enumerate(operands) if isinstance(x, SparseArray)]
    if len(sparse) != 1:
        raise ValueError(
            f"einsum: expected one SparseArray among the operands, got {len(sparse)}; "
            "jnp.einsum is for none, A.todense() for all but one"
        )
    require_unbatched(operands[sparse[0]], f"einsum: {factors[sparse[0]]!r}")
    return sparse[0], factors, output
