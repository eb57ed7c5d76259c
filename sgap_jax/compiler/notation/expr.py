"""Index notation: what is computed, without how (Kjolstad et al., OOPSLA 2017, section 2)."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping, Sequence

from sgap_jax.formats.levels import COO, Compressed, Dense, Format, Singleton

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
    """A[i, j]: a tensor at indices. `format` is None for a dense tensor in row-major order.
    `pattern`: only the structure is read; the value of each entry is 1.
    `along`: it has the structure of another factor, and only values of its own.
    """

    tensor: str
    indices: tuple[IndexVar, ...]
    format: Format | None = None
    pattern: bool = False
    along: bool = False

    def __mul__(self, other: Access) -> tuple[Access, ...]:
        return (self, other) if isinstance(other, Access) else NotImplemented

    def __rmul__(self, others: tuple[Access, ...]) -> tuple[Access, ...]:
        return (*others, self) if isinstance(others, tuple) else NotImplemented

    def __str__(self) -> str:
        return f"{self.tensor}({','.join(map(str, self.indices))})" if self.indices else self.tensor


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A name that can be indexed: `A, B, C = Tensor("A", CSR), Tensor("B"), Tensor("C")` and then
    `Assign(C[i, k], A[i, j] * B[j, k])`. `C[()]` is a scalar."""

    name: str
    format: Format | None = None

    def __getitem__(self, indices: IndexVar | tuple[IndexVar, ...]) -> Access:
        every = (indices,) if isinstance(indices, IndexVar) else tuple(indices)
        return Access(self.name, every, self.format)


@dataclasses.dataclass(frozen=True)
class Attained:
    """A factor that is 1 where the product of `factors` attains `best`, the maximum or minimum
    (`reduction`) of such products, and 0 elsewhere; 0 times NaN or infinity is 0 here. If `best` is
    NaN, all products attain it.

    Raises:
      ValueError: no factors, or another reduction.
    """

    factors: tuple[Access, ...]
    best: Access
    reduction: str
    format = None
    pattern = along = False

    def __post_init__(self) -> None:
        if not self.factors:
            raise ValueError(f"Attained: expected at least one factor beside {self.best}")
        if self.reduction not in ("max", "min"):
            raise ValueError(
                f"{self.best}: Attained: reduction: expected max or min, got {self.reduction!r}"
            )

    @property
    def tensor(self) -> str:
        return str(self)

    @property
    def indices(self) -> tuple[IndexVar, ...]:
        return tuple(
            dict.fromkeys(i for access in (*self.factors, self.best) for i in access.indices)
        )

    def __str__(self) -> str:
        sign = ">=" if self.reduction == "max" else "<="
        return f"[{' * '.join(map(str, self.factors))} {sign} {self.best}]"


Factor = Access | Attained


def accesses(factors: Sequence[Factor]) -> tuple[Access, ...]:
    """The accesses of factors, in order; those of an `Attained` are its factors, then `best`."""
    each = ((*f.factors, f.best) if isinstance(f, Attained) else (f,) for f in factors)
    return tuple(access for some in each for access in some)


@dataclasses.dataclass(frozen=True)
class Assign:
    """output = the product of `factors`, reduced over the indices that the output lacks.

    At most one factor is sparse. The output is dense, or has the format and the indices of the
    sparse factor: then it shares that factor's structure. Or it shares the structure of the outer
    levels, with dense levels under them: TTM in CSF(3) has an output in (Compressed, Compressed,
    Dense), with the indices in the order of the levels, and an element for each fiber and dense
    index. Entries that are not stored take no part in a reduction; the reduction of no entries is 0
    for "+", -infinity for "max" and infinity for "min".

    Raises:
      ValueError: not an expression, or an index or a format that does not fit its access.
      NotImplementedError: two sparse factors, an index twice in one access, a sparse output of
        another structure, or levels that follow each other in no known way.
    """

    output: Access
    factors: tuple[Factor, ...]
    reduction: str = "+"

    def __post_init__(self) -> None:
        if not self.factors:
            raise ValueError(f"{self.output} = nothing: expected at least one factor")
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"{self}: reduction: expected one of {', '.join(REDUCTIONS)}, "
                f"got {self.reduction!r}"
            )
        for access in (self.output, *self.accesses):
            _check_access(access, self)
        names = [access.tensor for access in (self.output, *self.accesses)]
        if len(set(names)) < len(names):
            raise ValueError(f"{self}: give each operand and the output a name of its own")
        there = {i for factor in self.factors for i in factor.indices}
        if missing := [i for i in self.output.indices if i not in there]:
            raise ValueError(
                f"{self}: no factor has the index {missing[0]} of the output; broadcast afterwards"
            )
        self._check_sparse()

    def _check_sparse(self) -> None:
        sparse = [x for x in self.factors if x.format is not None and not x.along]
        if len(sparse) > 1:
            raise NotImplementedError(
                f"{self}: {sparse[0].tensor} and {sparse[1].tensor} are both sparse; coordinates "
                "of two sparse operands are not merged: at most one factor may have a format"
            )
        for access in (self.output, *(x for x in self.accesses if x.along)):
            if access.format is not None and not self.shares(access):
                own = f"{sparse[0]} in {sparse[0].format}" if sparse else "no sparse factor"
                what = "output" if access == self.output else "factor"
                raise NotImplementedError(
                    f"{self}: the sparse {what} {access} in {access.format} would need a "
                    f"structure of its own; it can share that of a factor (here: {own}) or be dense"
                )

    @property
    def shared(self) -> int:
        """The number of the sparse factor's levels that the output shares; 0 if it is dense, or if
        its format cannot share them."""
        return self.shares(self.output)

    def shares(self, access: Access) -> int:
        """The number of the sparse factor's levels that an access shares; 0 if it is dense, or if
        its format cannot share them."""
        sparse = self.sparse
        if access.format is None or sparse is None or sparse.format is None:
            return 0
        levels = sparse.format.levels
        if (access.format, access.indices) == (sparse.format, sparse.indices):
            return len(levels)
        count = len(access.indices) - access.format.dense_modes
        outer = tuple(sparse.indices[mode] for mode in sparse.format.modes[:count])
        fibers = Format((*levels[:count], *[Dense()] * access.format.dense_modes))
        same = (access.format, access.indices[:count]) == (fibers, outer)
        same = same and set(access.indices[count:]).isdisjoint(sparse.indices)
        each_once = all(level in (Dense(), Compressed()) for level in levels[:count])
        return count if same and each_once and not sparse.format.block_shape else 0

    def dense_indices(self, access: Access) -> tuple[IndexVar, ...]:
        """The indices of the dense levels of an access that shares outer levels; () for others."""
        own = access.format is not None and access.format != getattr(self.sparse, "format", None)
        count = access.format.dense_modes if own and access.format is not None else 0
        return access.indices[len(access.indices) - count :]

    @property
    def sparse(self) -> Access | None:
        found = (x for x in self.factors if isinstance(x, Access) and not x.along)
        return next((x for x in found if x.format is not None), None)

    @property
    def is_multilinear(self) -> bool:
        """Whether the expression is a sum of products, so that a factor may be multiplied with a
        sum over the others."""
        return self.reduction == "+" and all(isinstance(x, Access) for x in self.factors)

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The accesses of all operands, in order."""
        return accesses(self.factors)

    @property
    def indices(self) -> tuple[IndexVar, ...]:
        """All indices: the output's, then those reduced over, in order of occurrence."""
        every = (*self.output.indices, *(i for f in self.factors for i in f.indices))
        return tuple(dict.fromkeys(every))

    @property
    def reduced(self) -> tuple[IndexVar, ...]:
        return tuple(i for i in self.indices if i not in self.output.indices)

    def __str__(self) -> str:
        sign = "=" if not self.reduced else "+=" if self.reduction == "+" else f"{self.reduction}="
        return f"{self.output} {sign} {' * '.join(map(str, self.factors))}"


def assign(
    subscripts: str,
    formats: Mapping[str, Format] | None = None,
    names: str | Sequence[str] | None = None,
    reduction: str = "+",
) -> Assign:
    """`assign("ij,jk->ik", {"A": CSR})` is C(i,k) += A(i,j) * B(j,k) with A in CSR.

    Args:
      subscripts: as for `jnp.einsum`, with the output written out: letters, no ellipsis.
      formats: by name, of the sparse operand, and of the output if it shares its structure; all
        other tensors are dense. COO stands for COO of any number of indices.
      names: of the operands, then of the output, such as "A x y"; default A, B, C, ... in order.
      reduction: "+", "max" or "min", over the indices that the output lacks.

    Raises:
      ValueError, NotImplementedError: as `Assign` does; or malformed subscripts or names.
    """
    words = subscripts.replace(" ", "").replace("->", ",").split(",")
    letters = all(c in string.ascii_letters for word in words for c in word)
    if subscripts.count("->") != 1 or "," in subscripts.split("->")[1] or not letters:
        raise ValueError(
            f"assign: expected subscripts such as 'ij,jk->ik' (letters, the output written out), "
            f"got {subscripts!r}"
        )
    given = names.replace(",", " ").split() if isinstance(names, str) else names
    tensors = tuple(string.ascii_uppercase[: len(words)] if given is None else given)
    if len(tensors) != len(words) or not all(name.isidentifier() for name in tensors):
        raise ValueError(
            f"assign: names: expected {len(words)} names for {subscripts!r} (the output's last), "
            f"got {names!r}"
        )
    formats = dict(formats or {})
    if unknown := sorted(set(formats) - set(tensors)):
        raise ValueError(
            f"assign: formats: no operand {unknown[0]!r}; there are {', '.join(tensors)}"
        )
    for name, format in formats.items():
        if format is not None and not isinstance(format, Format):
            raise ValueError(
                f"assign: formats: expected a Format such as CSR for {name}, got {format!r}"
            )
    accesses = [
        Access(name, index_vars(" ".join(word)), _of_rank(formats.get(name), len(word)))
        for name, word in zip(tensors, words, strict=True)
    ]
    return Assign(accesses[-1], tuple(accesses[:-1]), reduction)


def _of_rank(format: Format | None, ndim: int) -> Format | None:
    """The format; COO becomes COO of `ndim` modes."""
    if format != COO or ndim < 1:
        return format
    return Format((Compressed(unique=False),) + (Singleton(),) * (ndim - 1))


def _check_access(access: Access, whole: Assign) -> None:
    indices, format = access.indices, access.format
    twice = [i for i in indices if indices.count(i) > 1]
    if twice:
        raise NotImplementedError(
            f"{whole}: the index {twice[0]} twice in {access}: diagonals are not taken; "
            "take them from the operand first"
        )
    if format is None:
        return
    if format.ndim != len(indices):
        raise ValueError(
            f"{whole}: {format} is for {format.ndim} indices, got {len(indices)} in {access}"
        )
    levels = format.levels
    if all(isinstance(level, Dense) for level in levels):
        raise NotImplementedError(
            f"{whole}: {access} in {format} stores everything; leave its format out (a dense "
            "operand is stored row by row)"
        )
    for parent, level in zip((None, *levels), levels, strict=False):
        coordinates = isinstance(parent, Singleton) or parent == Compressed(unique=False)
        if isinstance(level, Singleton) and not coordinates:
            raise NotImplementedError(
                f"{whole}: {access} in {format}: a Singleton level has one coordinate for each "
                "position of Compressed(unique=False) or Singleton above it"
            )
