"""Index notation: what is computed, without how (Kjolstad et al., OOPSLA 2017, section 2)."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping, Sequence
from typing import Any

from sgap_jax.formats.levels import COO, Compressed, Dense, Format, Singleton, as_format

REDUCTIONS = ("+", "max", "min")


@dataclasses.dataclass(frozen=True)
class IndexVar:
    name: str

    def __str__(self) -> str:
        return self.name


def index_vars(names: str) -> tuple[IndexVar, ...]:
    """`i, j, k = index_vars("i j k")`."""
    return tuple(IndexVar(name) for name in names.replace(",", " ").split())


class Arithmetic:
    """+, - and * of accesses, products and sums; a product with a sum is distributed."""

    def __mul__(self, other: object) -> Product | Sum:
        left, right = _sum_of(self), _sum_of(other)
        if left is None or right is None:
            return NotImplemented
        if isinstance(self, Sum) or isinstance(other, Sum):
            return Sum(
                tuple(
                    Term((*a.factors, *b.factors), a.negative != b.negative)
                    for a in left.terms
                    for b in right.terms
                )
            )
        return Product((*left.terms[0].factors, *right.terms[0].factors))

    def __rmul__(self, other: object) -> Product | Sum:
        left = _sum_of(other)
        return NotImplemented if left is None else Product(left.terms[0].factors) * self

    def __add__(self, other: object) -> Sum:
        left, right = _sum_of(self), _sum_of(other)
        if left is None or right is None:
            return NotImplemented
        return Sum((*left.terms, *right.terms))

    def __sub__(self, other: object) -> Sum:
        right = _sum_of(other)
        return NotImplemented if right is None else self + -right

    def __neg__(self) -> Sum:
        own = _sum_of(self)
        assert own is not None
        return Sum(tuple(Term(term.factors, not term.negative) for term in own.terms))


@dataclasses.dataclass(frozen=True)
class Access(Arithmetic):
    """A[i, j]: a tensor at indices. `format` is None for a dense tensor in row-major order.
    `pattern`: only the structure is read; the value of each entry is 1.
    `along`: it has the structure of another factor, and only values of its own.
    """

    tensor: str
    indices: tuple[IndexVar, ...]
    format: Format | None = None
    pattern: bool = False
    along: bool = False

    def __str__(self) -> str:
        return f"{self.tensor}({','.join(map(str, self.indices))})" if self.indices else self.tensor


class Product(Arithmetic, tuple["Factor", ...]):  # type: ignore[misc]  # not a tuple's + and *
    """The factors of `A[i, j] * B[j, k]`."""


@dataclasses.dataclass(frozen=True)
class Term:
    """A product, which is added or, if `negative`, subtracted."""

    factors: tuple[Factor, ...]
    negative: bool = False

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors))


@dataclasses.dataclass(frozen=True)
class Sum(Arithmetic):
    """`b[i] - A[i, j] * x[j]`: terms, in order."""

    terms: tuple[Term, ...]


def _sum_of(value: object) -> Sum | None:
    """An operand of +, - or * as a sum; None if it is none."""
    match value:
        case Sum():
            return value
        case Access():
            return Sum((Term((value,)),))
        case tuple() if value and all(isinstance(factor, Access) for factor in value):
            return Sum((Term(tuple(value)),))
    return None


def repr_without_terms(node: Any) -> str:
    """The repr of a dataclass, without its `terms` if there are none."""
    names = [field.name for field in dataclasses.fields(node)]
    each = [f"{n}={getattr(node, n)!r}" for n in names if n != "terms" or node.terms]
    return f"{type(node).__name__}({', '.join(each)})"


def written(terms: Sequence[Term]) -> str:
    """A sum as text."""
    first, *others = terms
    signs = (f" {'-' if term.negative else '+'} {term}" for term in others)
    return f"{'-' if first.negative else ''}{first}{''.join(signs)}"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A name that can be indexed: `A, B, C = Tensor("A", CSR), Tensor("B"), Tensor("C")` and then
    `Assign(C[i, k], A[i, j] * B[j, k])`, or a sum such as `b[i] - A[i, j] * x[j]`. `C[()]` is a
    scalar."""

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
    """output = the product of `factors`, or a sum of products (`terms`), each reduced over those of
    its indices that the output lacks.

    The right side is one access, a product of them, or an expression of sums, differences and
    products, which is multiplied out to `terms`; `factors` are then the operands of all terms, each
    once. `terms` is () for one product of different operands that is added. A term without an index
    of the output is the same at all of its coordinates.

    Where one operand is sparse and nothing is added, loops go over what it stores, in any format.
    The output is dense, or has the format and the indices of the sparse factor: then it shares that
    factor's structure. Or it shares the structure of the outer levels, with dense levels under
    them: TTM in CSF(3) has an output in (Compressed, Compressed, Dense), with the indices in the
    order of the levels, and an element for each fiber and dense index. Entries that are not stored
    take no part in a reduction; the reduction of no entries is 0 for "+", -infinity for "max" and
    infinity for "min".

    Where several operands are sparse, or several terms are added, their stored coordinates are
    merged (Kjolstad et al., OOPSLA 2017, section 5): the iteration space of a product is the
    intersection of what its factors store, that of a sum the union over its terms
    (`spaces.space_of`). Levels are Dense or Compressed then, with coordinates in order and each
    once. The output is dense, or shares the structure of a factor of every term (`holder`), as in
    C(i,k) = P(i,k) * A(i,j) * B(j,k): elements that nothing is added to are 0. One product with a
    dense output may be reduced by "max" or "min", over what all of its factors store.

    Raises:
      ValueError: not an expression, or an index or a format that does not fit its access.
      NotImplementedError: an index twice in one access, a sparse output of another structure,
        levels that follow each other in no known way, or that are not merged.
    """

    output: Access
    factors: tuple[Factor, ...]
    reduction: str = "+"
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        self._take_apart()
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

    def _take_apart(self) -> None:
        """The right side as factors and terms."""
        terms = self.terms
        if isinstance(self.factors, Sum):
            terms = self.factors.terms
            object.__setattr__(self, "factors", ())
        elif isinstance(self.factors, Access):
            terms = (Term((self.factors,)),)
        elif isinstance(self.factors, Product):
            terms = (Term(tuple(self.factors)),)
        if not terms:
            return
        once = len(set(terms[0].factors)) == len(terms[0].factors)
        one = len(terms) == 1 and not terms[0].negative and once
        each = [factor for term in terms for factor in term.factors]
        factors = terms[0].factors if one else tuple(dict.fromkeys(each))
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "terms", () if one else terms)

    def _check_merged(self, sparse: Sequence[Factor]) -> None:
        """Raises NotImplementedError unless stored coordinates can be merged as the expression asks
        for."""
        why = None
        if any(isinstance(x, Attained) or x.along for x in self.factors):
            why = "coordinates are merged in products and sums of operands of their own"
        elif self.output.format is not None and self.holder is None:
            why = (
                f"the result of merged coordinates is dense, or has the indices and the format of "
                f"an operand that is a factor of every term, not {self.output} in "
                f"{self.output.format}"
            )
        elif self.output.format is not None and self.reduction != "+":
            why = f"a sparse result of merged coordinates is a sum, not reduced by {self.reduction}"
        elif self.terms and self.reduction != "+":
            why = f"terms are added up, not reduced by {self.reduction}"
        else:
            for access in sparse:
                assert access.format is not None
                if access.format.block_shape:
                    why = f"{access} in {access.format} stores blocks, which are not merged"
                elif any(level not in (Dense(), Compressed()) for level in access.format.levels):
                    why = (
                        f"{access} in {access.format} may store a coordinate several times; "
                        "coordinates are merged where each is stored once, as in CSR and CSF"
                    )
        if why is not None:
            names = [access.tensor for access in sparse[:2]]
            both = f"{' and '.join(names)} are both sparse; " if len(names) == 2 else ""
            raise NotImplementedError(f"{self}: {both}{why}")

    def _check_sparse(self) -> None:
        sparse = [x for x in self.factors if x.format is not None and not x.along]
        if len(sparse) > 1 or self.terms:
            self._check_merged(sparse)
            return
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
    def products(self) -> tuple[Term, ...]:
        """The terms, of which there is one where nothing is added."""
        return self.terms or (Term(self.factors),)

    @property
    def merges(self) -> bool:
        """Whether stored coordinates of several operands, or of several terms, are merged."""
        sparse = [x for x in self.factors if x.format is not None and not x.along]
        return bool(self.terms) or len(sparse) > 1

    @property
    def merged(self) -> tuple[Access, ...]:
        """The sparse operands whose coordinates are merged; () where only one has a format and
        nothing is added."""
        if not self.merges:
            return ()
        return tuple(x for x in self.factors if isinstance(x, Access) and x.format is not None)

    @property
    def holder(self) -> Access | None:
        """The operand whose structure the output shares where coordinates are merged: a factor of
        every term, so that no other entry is visited. None if the output is dense."""
        own = (self.output.format, self.output.indices)
        return next(
            (
                access
                for access in self.merged
                if (access.format, access.indices) == own
                and all(access in term.factors for term in self.products)
            ),
            None,
        )

    @property
    def sparse(self) -> Access | None:
        """The one operand whose stored entries loops go over; None if there is none, or several."""
        if self.merges:
            return None
        found = (x for x in self.factors if isinstance(x, Access) and not x.along)
        return next((x for x in found if x.format is not None), None)

    @property
    def is_multilinear(self) -> bool:
        """Whether the expression is a sum of products, so that a factor may be multiplied with a
        sum over the others."""
        products = all(isinstance(x, Access) for x in self.factors)
        return self.reduction == "+" and products and not self.merges

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

    def __repr__(self) -> str:
        return repr_without_terms(self)

    def reduced_in(self, term: Term) -> tuple[IndexVar, ...]:
        """The indices over which a term is reduced."""
        own = {index for factor in term.factors for index in factor.indices}
        return tuple(index for index in self.reduced if index in own)

    def __str__(self) -> str:
        together = all(self.reduced_in(term) == self.reduced for term in self.products)
        plain = not self.reduced or not together
        sign = "=" if plain else "+=" if self.reduction == "+" else f"{self.reduction}="
        return f"{self.output} {sign} {written(self.products)}"


def assign(
    subscripts: str,
    formats: Mapping[str, Format] | None = None,
    names: str | Sequence[str] | None = None,
    reduction: str = "+",
) -> Assign:
    """`assign("ij,jk->ik", {"A": CSR})` is C(i,k) += A(i,j) * B(j,k) with A in CSR.

    Args:
      subscripts: as for `jnp.einsum`, with the output written out: letters, no ellipsis.
      formats: by name, of sparse operands, and of the output if it shares the structure of the
        only one; all other tensors are dense. COO stands for COO of any number of indices.
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
        if format is not None:
            formats[name] = as_format(format, f"assign: formats[{name!r}]")
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
