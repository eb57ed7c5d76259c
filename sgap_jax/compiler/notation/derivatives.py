"""The expressions of gradients, and the comparison of expressions up to names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Sequence

from sgap_jax.compiler.notation.expr import Access, Assign, Attained, Factor, Sum, Term
from sgap_jax.schedules.schedule import ScheduleError


def gradient(expression: Assign, tensor: str) -> Assign:
    """The expression of an operand's cotangent: the operand and the output change places.

    `gradient(assign("ij,jk->ik", {"A": CSR}), "B")` is B(j,k) += A(i,j) * C(i,k), in which C is the
    cotangent of the result. The gradient in the sparse operand has an output with that operand's
    structure; where no factor is stored at the entries then, a pattern (a factor of ones) is added.
    Of a sum it is the sum over the terms that have the operand. Where the operand is left in one of
    these, which it was in twice, its cotangent has another name, dA of A.

    Raises:
      TypeError: not an expression.
      ValueError: no operand of that name, or one with an index that nothing else has.
      NotImplementedError: the expression is a maximum or minimum, whose gradient is several sums.
    """
    if not isinstance(expression, Assign):
        raise TypeError(f"gradient: expected an Assign, as assign() makes, got {expression!r}")
    _check_multilinear(expression)
    read = [x for x in operands(expression) if not x.pattern]  # einsum has the same order
    chosen = next((x for x in read if x.tensor == tensor), None)
    if chosen is None:
        there = ", ".join(x.tensor for x in read)
        raise ValueError(f"{expression}: no operand {tensor!r}; there are {there}")
    if expression.merges:
        return _of_terms(expression, chosen)
    factors = [expression.output if x == chosen else x for x in read]
    if (sparse := expression.sparse) is not None:
        names, name = {x.tensor for x in (expression.output, *expression.accesses)}, sparse.tensor
        while name in names:
            name += "_"
        factors = sharing(factors, dataclasses.replace(sparse, tensor=name, pattern=True))
    return Assign(dataclasses.replace(chosen, along=False), tuple(factors))


def _of_terms(expression: Assign, chosen: Access) -> Assign:
    """The gradient in an operand of a sum of products, as terms: see `gradient_terms`."""
    names = {x.tensor for x in (expression.output, *expression.accesses)}
    pattern = pattern_of(chosen, names)
    terms = gradient_terms(expression.products, chosen, expression.output, pattern)
    if any(chosen in term.factors for term in terms):
        chosen = dataclasses.replace(chosen, tensor=f"d{chosen.tensor}")
    return Assign(chosen, Sum(tuple(terms)))  # type: ignore[arg-type]  # it is taken apart


def pattern_of(access: Access, names: Collection[str]) -> Access | None:
    """The pattern of a sparse operand, under a name that is none of `names`; None of a dense
    one."""
    if access.format is None:
        return None
    name = f"{access.tensor}_"
    while name in names:
        name += "_"
    return dataclasses.replace(access, tensor=name, pattern=True)


def gradient_terms(
    terms: Sequence[Term], chosen: Access, other: Access, pattern: Access | None = None
) -> list[Term]:
    """The derivative of a sum of products in one operand: for each place that it has in a term,
    that term with `other` in its place. `other` is the cotangent of the result, and the terms are
    those of the operand's cotangent, at the entries of `pattern` if the operand is sparse; or it is
    the operand's tangent, and they are those of the result's tangent."""
    found = []
    for term in terms:
        for n, factor in enumerate(term.factors):
            if factor == chosen:
                others = (*term.factors[:n], *term.factors[n + 1 :])
                held = () if pattern is None else (pattern,)
                found.append(Term((*held, other, *others), term.negative))
    return found


def check_gradient(expression: Assign, of: Assign) -> None:
    """Raises ScheduleError unless `expression` is a gradient of `of`."""
    _check_multilinear(of)
    gradients = []
    for operand in of.accesses:
        with contextlib.suppress(ValueError):  # no gradient if only this operand has an index
            gradients += [] if operand.pattern else [gradient(of, operand.tensor)]
    if not any(same(expression, each) for each in gradients):
        known = ", ".join(map(str, gradients)) or "none"
        raise ScheduleError(f"{expression} is no gradient of {of}; these are: {known}")


def _check_multilinear(expression: Assign) -> None:
    if expression.merges and expression.reduction == "+":
        return
    if not expression.is_multilinear:
        raise NotImplementedError(
            f"{expression}: its gradient is several sums over the products that attain an "
            "extremum; they run as without a schedule"
        )


def sharing(factors: Sequence[Access], pattern: Access) -> list[Access]:
    """The factors with one of them as the holder of the structure, `along` for the other sparse
    ones, which share it.

    The holder is the first factor in the format of `pattern`, or `pattern` itself, which is then
    put first. Factors that share the structure come before dense ones, so that products of scalars
    are formed before those of vector lanes.
    """
    each = [dataclasses.replace(x, along=False) for x in factors]
    whole = next((x for x in each if x.format == pattern.format), pattern)
    each = [x if x == whole else dataclasses.replace(x, along=x.format is not None) for x in each]
    each.sort(key=lambda x: not x.along)
    return each if whole in each else [whole, *each]


def operands(expression: Assign) -> list[Access]:
    """The accesses that are read, the sparse factor first."""
    return sorted(expression.accesses, key=lambda access: access != expression.sparse)


def same(one: Assign, other: Assign) -> bool:
    """Whether two expressions are equal up to names and the position of the sparse factor."""
    return _form(one) == _form(other)


def _form(expression: Assign) -> tuple:
    every = (*operands(expression), expression.output)
    indices = dict.fromkeys(i for x in every for i in x.indices)
    number = {index: i for i, index in enumerate(indices)}
    words = ((tuple(number[i] for i in x.indices), x.format, x.pattern, x.along) for x in every)
    attained = [
        (x.reduction, len(x.factors)) for x in expression.factors if isinstance(x, Attained)
    ]
    place: dict[Factor, int] = {x: n for n, x in enumerate(every)}
    terms = ((tuple(place[x] for x in t.factors), t.negative) for t in expression.terms)
    return tuple(words), tuple(attained), tuple(terms), expression.reduction
