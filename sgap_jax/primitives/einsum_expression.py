"""What an einsum with one sparse operand computes, as a static parameter."""

import dataclasses
import string

from sgap_jax.formats.levels import Compressed, Dense, Format, Singleton

ENTRY = "*"


@dataclasses.dataclass(frozen=True)
class Expression:
    """out[output] = the product of all factors, reduced over the entries and what `output` lacks.

    Attributes:
      sparse: the index of each mode of the sparse operand.
      factors: the indices of each factor; "*" counts the stored entries, and stands for `sparse`.
      output: likewise. Exactly one of the factors and the output has "*".
      sizes: (index, size) of every index, "*" among them.
      format: of the sparse operand.
      reduction: "+", "max" or "min".
    """

    sparse: str
    factors: tuple[str, ...]
    output: str
    sizes: tuple[tuple[str, int], ...]
    format: Format
    reduction: str = "+"

    def shape(self, indices: str) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(sizes[index] for index in indices)

    def spelled(self, word: str) -> str:
        """The indices of a factor, those of the sparse operand written out."""
        return word.replace(ENTRY, self.sparse)

    def fresh(self) -> str:
        """An index that the expression does not have."""
        taken = {index for index, _ in self.sizes}
        return next(letter for letter in string.ascii_letters if letter not in taken)


def arrays_per_level(format: Format) -> list[int]:
    """How many index arrays each level has, trailing blocks left out."""
    counts = {Dense: 0, Compressed: 2, Singleton: 1}
    return [counts[type(level)] for level in format.levels[: format.ndim]]
