"""What an einsum with one sparse operand computes: its subscripts, read and held against the
operands, and the static parameter that the primitive carries.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import export

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_unbatched
from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton


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


if TYPE_CHECKING:
    from sgap_jax.formats.array import SparseArray

ENTRY = "*"


@dataclasses.dataclass(frozen=True)
class Expression:
    """out[output] = the product of all factors, reduced over the entries and what `output` lacks.

    The data of `words` are the factors, then what may say which products count.

    Attributes:
      sparse: the index of each mode of the sparse operand.
      factors: the indices of each factor; "*" counts the stored entries, and stands for `sparse`.
      output: likewise.
      sizes: (index, size) of every index, "*" among them.
      format: of the sparse operand.
      reduction: "+", "max" or "min".
      fiber: (index, depth) of an index that counts the positions of the outer `depth` levels; ""
        is none. It stands for their indices, in the order of the levels.
      attained: () or words of data that no derivative is taken in, of which the last is an extremum
        of the products of the others: only where these attain it, factors are multiplied.
      extremum: "max" or "min", with `attained`.
      batch: indices that vmap has put before words, outermost first, and of which loops know
        nothing: these are of one element of the batch (einsum_batch.py).
      checked: whether the index arrays have been looked at; if not, they may hold anything
        (einsum_unchecked.py).
      repeats: coordinates of the last level, and those of fibers, may come more than once.
    """

    sparse: str
    factors: tuple[str, ...]
    output: str
    sizes: tuple[tuple[str, int], ...]
    format: Format
    reduction: str = "+"
    fiber: tuple[str, int] = ("", 0)
    attained: tuple[str, ...] = ()
    extremum: str = ""
    batch: str = ""
    checked: bool = True
    repeats: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.factors, *self.attained)

    def shape(self, indices: str) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[index] for index in indices)

    def spelled(self, word: str) -> str:
        """The indices of a factor, those of the sparse operand written out."""
        index, depth = self.fiber
        outer = "".join(self.sparse[mode] for mode in self.format.modes[:depth])
        return word.replace(ENTRY, self.sparse).replace(index or ENTRY, outer)

    def fiber_format(self, word: str) -> Format:
        """Of what has fibers: the levels that they are of, and dense ones."""
        return Format((*self.format.levels[: self.fiber[1]], *[Dense()] * (len(word) - 1)))

    def fresh(self) -> str:
        """An index that the expression does not have."""
        taken = {index for index, _ in self.sizes}
        return next(letter for letter in string.ascii_letters if letter not in taken)


def by_fibers(expression: Expression, A: SparseArray, output: str) -> Expression:
    """With an output by positions of the sparse operand's outer levels, whose indices come first.

    Raises:
      NotImplementedError: an operand or an output without such fibers.
      ValueError: their indices are not in the order of the levels.
    """
    stored = [expression.sparse[mode] for mode in A.format.modes]
    depth = sum(index in stored for index in output)
    tree = A.format.is_fiber_tree and A.format.levels[0] == Compressed()
    if not (tree and 0 < depth < len(stored) and depth < len(output) and len(output) > 2):
        raise NotImplementedError(
            "einsum: fibers: expected outer levels of a CSF operand, but not all, then indices "
            f"that it lacks, and three or more in all; got {output!r} for {expression.sparse!r} in "
            f"{A.format}; without fibers the result is dense"
        )
    if list(output[:depth]) != stored[:depth]:
        raise ValueError(
            f"einsum: fibers: expected an output that begins with {''.join(stored[:depth])!r}, the "
            f"outer levels of {A.format} in their order, got {output!r}"
        )
    index = expression.fresh()
    sizes = {**dict(expression.sizes), index: A.index_arrays[depth - 1][1].shape[0]}
    return dataclasses.replace(
        expression,
        output=index + output[depth:],
        sizes=tuple(sorted(sizes.items())),
        fiber=(index, depth),
    )


def arrays_per_level(format: Format) -> list[int]:
    """How many index arrays each level has, trailing blocks left out."""
    counts = {Dense: 0, Compressed: 2, Singleton: 1}
    return [counts[type(level)] for level in format.levels[: format.ndim]]


def nothing(reduction: str, dtype: Any) -> Any:
    """The maximum or minimum over nothing."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reduction == "max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if reduction == "max" else limits.max, dtype)


# Numbers of one element for an entry from which the loops of one element are the quicker ones. With
# one index more an entry's coordinates are read once for all elements, and rows of all are gathered
# at each. Measured on one thread (Zen 5, MTTKRP and TTM, 40,000 entries in short fibers): with 32
# numbers the loops of one take 0.75x of the time in batches of 8 and 0.3x of 64, with 8 they take
# 0.8x to 1.0x, with 4 up to 1.4x, with one up to 2.7x.
_WIDE = 8


def joined(expression: Expression) -> Expression:
    """The expression under vmap with those batch indices as ordinary indices that loops of one
    element would not serve.

    Loops run one element of the batch where the stored values have it: the compiler's operands
    share the structure of the sparse one, and none has an index beside it. Batch indices that only
    dense operands have stay so too where the output has them, and several values of each element
    for an entry (`_WIDE`); the others become indices of the expression. A schedule that the caller
    gave is of one element, whatever has a batch: it does not come here.
    """
    stored = {ENTRY, expression.fiber[0]} - {""}
    words = [word for word in (*expression.words, expression.output) if stored & set(word)]
    sizes = dict(expression.sizes)
    kept = set(expression.output) - {*expression.sparse, *expression.batch, *stored}
    numbers = [sizes[index] for index in kept]
    if not any(map(export.is_symbolic_dim, numbers)) and math.prod(numbers) >= _WIDE:
        words.append(expression.output)
    own = [n for n, index in enumerate(expression.batch) if any(index in word for word in words)]
    return replace(expression, batch=expression.batch[: max(own, default=-1) + 1])


def of_one(expression: Expression) -> Expression:
    """The expression of one element of the batch."""

    def without(word: str) -> str:
        return "".join(index for index in word if index not in expression.batch)

    return replace(
        expression,
        factors=tuple(map(without, expression.factors)),
        attained=tuple(map(without, expression.attained)),
        output=without(expression.output),
        sizes=tuple(pair for pair in expression.sizes if pair[0] not in expression.batch),
        batch="",
    )
