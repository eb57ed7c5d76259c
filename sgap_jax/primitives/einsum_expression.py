"""What an einsum with one sparse operand computes, as a static parameter."""

from __future__ import annotations

import dataclasses
import string
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton

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
