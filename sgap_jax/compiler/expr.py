"""Index notation: what is computed, without how (Kjolstad et al., OOPSLA 2017, section 2)."""

from __future__ import annotations

import dataclasses

from sgap_jax.formats.levels import Format

REDUCTIONS = ("+", "max", "min")


@dataclasses.dataclass(frozen=True)
class IndexVar:
    name: str

    def __str__(self) -> str:
        return self.name


def index_vars(names: str) -> tuple[IndexVar, ...]:
    """`i, j, k = index_vars("i j k")`."""
    return tuple(IndexVar(name) for name in names.replace(",", " ").split())


@dataclasses.dataclass(frozen=True)
class Access:
    """A[i, j]: a tensor at indices. `format` is None for a dense tensor, stored row by row."""

    tensor: str
    indices: tuple[IndexVar, ...]
    format: Format | None = None

    def __str__(self) -> str:
        return f"{self.tensor}({','.join(map(str, self.indices))})"


@dataclasses.dataclass(frozen=True)
class Assign:
    """output = the product of `factors`, reduced over the indices that the output lacks.

    At most one factor is sparse. The output is dense, or has the format and the indices of the
    sparse factor: then it shares that factor's structure.
    """

    output: Access
    factors: tuple[Access, ...]
    reduction: str = "+"

    @property
    def sparse(self) -> Access | None:
        return next((factor for factor in self.factors if factor.format is not None), None)

    @property
    def indices(self) -> tuple[IndexVar, ...]:
        """All indices: the output's, then those reduced over, in order of occurrence."""
        every = (*self.output.indices, *(i for f in self.factors for i in f.indices))
        return tuple(dict.fromkeys(every))

    @property
    def reduced(self) -> tuple[IndexVar, ...]:
        return tuple(i for i in self.indices if i not in self.output.indices)
