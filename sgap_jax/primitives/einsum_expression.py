"""Parsing of einsum subscripts, their checks against the operands, and `Expression`, the static
parameter of the einsum primitive.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import export

from sgap_jax.compiler.notation.derivatives import sharing
from sgap_jax.compiler.notation.expr import Access, Assign, Attained, Factor, index_vars
from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.convert import require_unbatched
from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton


def parse(subscripts: str, operands: Sequence) -> tuple[int, tuple[str, ...], str]:
    """The sparse operand's position, the indices of each operand, and those of the output.

    Raises TypeError, ValueError or NotImplementedError, as einsum does.
    """
    if not isinstance(subscripts, str):
        raise ValueError(f"einsum: expected subscripts such as 'ij,jk->ik', got {subscripts!r}")
    text = subscripts.replace(" ", "")
    text = _with_letters(text, operands) if "." in text else text
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
        raise NotImplementedError(
            f"einsum: an index twice in the operand {twice!r}; the nearest is A.diagonal() or "
            "A.trace() of a matrix"
        )
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
            f"einsum: expected one SparseArray among the operands, got {len(sparse)}; products of "
            "several are evaluate('C(i,k) = A(i,j) * B(j,k)', A=A, B=B), or A @ B of two matrices; "
            "sums of several (reduction='sum') are of the same indices in the same order; "
            "jnp.einsum is for none"
        )
    require_unbatched(operands[sparse[0]], f"einsum: {factors[sparse[0]]!r}")
    return sparse[0], factors, output


def multiplied(subscripts: str, operands: Sequence) -> tuple[str, Sequence]:
    """The subscripts and operands with one SparseArray, A * B, in place of those that have the same
    indices in the same order.

    Without "->" the output is said here: an index that occurs in both is summed.
    """
    if not isinstance(subscripts, str):
        return subscripts, operands
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    words = inputs.split(",")
    sparse = [i for i, x in enumerate(operands) if isinstance(x, SparseArray)]
    if len(words) != len(operands) or len(sparse) < 2:
        return subscripts, operands
    first = sparse[0]
    word, A = words[first], operands[first]
    alike = len(set(word)) == len(word) == A.ndim and all(words[i] == word for i in sparse)
    if not alike or (not arrow and "." in inputs):
        return subscripts, operands
    for i in sparse[1:]:
        if operands[i].shape != A.shape:
            raise ValueError(
                f"einsum: {word!r} of {subscripts!r} has shapes {A.shape} and {operands[i].shape}"
            )
        require_unbatched(operands[i], f"einsum: {word!r}")
        A = A * operands[i]
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    kept = [i for i in range(len(operands)) if i == first or i not in sparse]
    rest = [A if i == first else operands[i] for i in kept]
    return f"{','.join(words[i] for i in kept)}->{output}", rest


def _with_letters(text: str, operands: Sequence) -> str:
    """The subscripts with a letter for each dimension that an ellipsis stands for: in all operands
    the last dimensions of the ellipses are the same, as in NumPy."""
    inputs, arrow, output = text.partition("->")
    words, dots = inputs.split(","), "..."
    for word in (*words, output):
        if "." in word.replace(dots, "", 1):
            raise ValueError(f"einsum: expected one ellipsis at most in {word!r} of {text!r}")
    if len(words) != len(operands):
        raise ValueError(f"einsum: {text!r} is for {len(words)} operands, got {len(operands)}")
    shapes = [x.shape if isinstance(x, SparseArray) else jnp.shape(x) for x in operands]
    counts = [
        len(shape) - len(word) + len(dots)
        for word, shape in zip(words, shapes, strict=True)
        if dots in word
    ]
    if min(counts, default=0) < 0:
        raise ValueError(f"einsum: {text!r} has more indices than an operand has dimensions")
    most = max(counts, default=0)
    if arrow and most and dots not in output:
        raise ValueError(f"einsum: expected an ellipsis in the output of {text!r}")
    free = [letter for letter in string.ascii_letters if letter not in text]
    if most > len(free):
        raise ValueError(f"einsum: {text!r} needs {most} more letters than there are")
    letters = "".join(free[:most])
    sizes: dict[str, int] = {}
    found = []
    for word, shape in zip(words, shapes, strict=True):
        if dots in word:
            count = len(shape) - len(word) + len(dots)
            begin, own = word.index(dots), letters[most - count :]
            word = word.replace(dots, own)
            for index, size in zip(own, shape[begin:], strict=False):
                if sizes.setdefault(index, size) != size:
                    raise NotImplementedError(
                        f"einsum: the ellipses of {text!r} stand for sizes {sizes[index]} and "
                        f"{size}; the nearest is jnp.broadcast_to of the operand with size 1"
                    )
        found.append(word)
    if not arrow:
        once = {c for c in inputs if c.isalpha() and inputs.count(c) == 1}
        output = dots + "".join(sorted(once))
    return ",".join(found) + "->" + output.replace(dots, letters)


ENTRY = "*"


@dataclasses.dataclass(frozen=True)
class Expression:
    """out[output] = the product of all factors, reduced over the entries and all indices that
    `output` lacks.

    A *word* is the string of an array's indices, as `jnp.einsum` spells them: plain JAX and the
    rules of differentiation and batching work with words. The compiler works with index notation,
    to which `assign` translates, here alone and once for each expression. The primitive's data
    operands are those of `words`: `factors`, then `attained`.

    Attributes:
      sparse: the index of each mode of the sparse operand.
      factors: the word of each factor; the index "*" is the position of a stored entry, and stands
        for all indices of `sparse`.
      output: the word of the result, likewise.
      sizes: (index, size) of every index, "*" included.
      format: the sparse operand's format.
      reduction: "+", "max" or "min".
      fiber: (index, depth): the index is the position of a node of level `depth`, and stands for
        the indices of the outer `depth` levels in their order; index "" if there is none.
      attained: () or words of operands that are not differentiated. The last one is an extremum of
        the products of the others; the factors are multiplied only where that product attains it.
      extremum: "max" or "min", with `attained`.
      batch: indices that vmap has put before words, outermost first. Compiled loops are made for
        one element of the batch and do not have these indices (einsum_loops.py).
      checked: whether somebody has validated the index arrays; if not, they may hold anything
        (einsum_unchecked.py).
      repeats: coordinates of the last level, and those of the fibers' level, may repeat: the
        program has looked at the index arrays, or made them.
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
        """The indices of a word, with "*" and the fiber index replaced by the indices that they
        stand for."""
        index, depth = self.fiber
        outer = "".join(self.sparse[mode] for mode in self.format.modes[:depth])
        return word.replace(ENTRY, self.sparse).replace(index or ENTRY, outer)

    def fiber_format(self, word: str) -> Format:
        """The format of an array indexed by fibers: the sparse operand's outer levels, then dense
        levels."""
        return Format((*self.format.levels[: self.fiber[1]], *[Dense()] * (len(word) - 1)))

    def fresh(self) -> str:
        """A letter that is no index of the expression."""
        taken = {index for index, _ in self.sizes}
        return next(letter for letter in string.ascii_letters if letter not in taken)

    def of_one(self) -> Expression:
        """The expression for one element of the batch: without the batch indices."""

        def without(word: str) -> str:
            return "".join(index for index in word if index not in self.batch)

        return replace(
            self,
            factors=tuple(map(without, self.factors)),
            attained=tuple(map(without, self.attained)),
            output=without(self.output),
            sizes=tuple(pair for pair in self.sizes if pair[0] not in self.batch),
            batch="",
        )

    @cached_property
    def assign(self) -> Assign | None:
        """The expression for one element of the batch in index notation, with the operands named
        A, B, ... in the order of `words`.

        None where it cannot be compiled: an array has "*" and other indices, a fiber index is not
        the first, or no factor has an index of the output. Where no factor is stored at the
        entries, a pattern operand holds the structure.
        """
        if self.batch:
            return self.of_one().assign
        fiber = self.fiber[0]
        for word in (*self.words, self.output):
            if (ENTRY in word and word != ENTRY) or (fiber and fiber in word[1:]):
                return None
        names = operand_names()
        read = [self._access(next(names), word) for word in self.words]
        count, output = len(self.factors), self._access(next(names), self.output)
        pattern = replace(self._access(next(names), ENTRY), pattern=True)
        factors: list[Factor] = [*sharing(read[:count], pattern)]
        if self.attained:
            others = [replace(x, along=x.format is not None) for x in read[count:]]
            factors.append(Attained(tuple(others[:-1]), others[-1], self.extremum))
        there = {index for factor in factors for index in factor.indices}
        if not there.issuperset(output.indices):
            return None
        return Assign(output, tuple(factors), self.reduction)

    def _access(self, name: str, word: str) -> Access:
        format = self.format if word == ENTRY else None
        if self.fiber[0] and word.startswith(self.fiber[0]):
            format = self.fiber_format(word)
        return Access(name, index_vars(" ".join(self.spelled(word))), format)


def operand_names() -> Iterator[str]:
    """The names of operands in `Expression.assign`."""
    return itertools.chain(string.ascii_uppercase, (f"A{n}" for n in itertools.count()))


def by_fibers(expression: Expression, A: SparseArray, output: str) -> Expression:
    """The expression with an output stored by fibers: its first axis is the position in the sparse
    operand's outer levels, whose indices come first in `output`.

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
    return replace(
        expression,
        output=index + output[depth:],
        sizes=tuple(sorted(sizes.items())),
        fiber=(index, depth),
    )


def arrays_per_level(format: Format) -> list[int]:
    """The number of index arrays of each level, without the levels inside a block."""
    counts = {Dense: 0, Compressed: 2, Singleton: 1}
    return [counts[type(level)] for level in format.levels[: format.ndim]]


def nothing(reduction: str, dtype: Any) -> Any:
    """The maximum or minimum of an empty set: -inf or inf, or the integer dtype's limit."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(-jnp.inf if reduction == "max" else jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if reduction == "max" else limits.max, dtype)


# Output values per entry and batch element from which loops over one element, run for each element,
# are faster than loops with the batch index as an ordinary index. The latter read an entry's
# coordinates once for all elements, but gather rows of all elements at each entry. Measured on one
# thread (Zen 5, MTTKRP and TTM, 40,000 entries in short fibers): with 32 values the loops over one
# element take 0.75x of the time for batches of 8 and 0.3x for batches of 64, with 8 values 0.8x to
# 1.0x, with 4 up to 1.4x, with one up to 2.7x.
_WIDE = 8


def joined(expression: Expression) -> Expression:
    """The expression under vmap, in which some batch indices have become ordinary indices.

    An index stays in `batch`, so that loops are compiled for one element of the batch, where the
    stored values (or the values of fibers) have it: the compiler's sparse operands have no dense
    index beside their structure. It also stays where the output has it and there are at least
    `_WIDE` output values for each entry and element. Batch indices inside the last one that stays
    become indices of the expression. Not called where the caller gives a schedule, which is always
    for one element.
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
