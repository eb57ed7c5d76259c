"""Index notation as text: `parse("y(i) = b(i) - A(i,j) * x(j)", {"A": CSR})`, as TACO spells it and
as an `Assign` prints."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping

from sgap_jax.compiler.notation.expr import Access, Assign, IndexVar, Sum, Term
from sgap_jax.formats.levels import Format

# Of an expression that is multiplied out. Loops of more terms are refused anyway, for their number
# of cases (merge_loops.MOST_CASES).
MOST_TERMS = 64


@dataclasses.dataclass(frozen=True)
class Written:
    """An expression as it is written, before the formats of its operands are known.

    `tensors`: the operand that each access reads, by the name of the access. An operand that is
    read at several places has several accesses: A(i,j) * A(j,k) reads A and A_2.
    `diagonals`: the indices of an access as they are written where one comes twice, by the name of
    the access, which has each once: A(i,i) is an access A(i) of the dense diagonal of A.
    """

    output: Access
    terms: tuple[Term, ...]
    tensors: Mapping[str, str]
    diagonals: Mapping[str, tuple[IndexVar, ...]]

    @property
    def operands(self) -> tuple[str, ...]:
        """The names that values are given for, each once."""
        return tuple(dict.fromkeys(self.tensors.values()))

    @property
    def accesses(self) -> tuple[Access, ...]:
        every = (factor for term in self.terms for factor in term.factors)
        return tuple(dict.fromkeys(x for x in every if isinstance(x, Access)))

    @property
    def shared(self) -> list[Access]:
        """The factors of every term that have the indices of the output."""
        first, *others = (term.factors for term in self.terms)
        found = [x for x in first if all(x in factors for factors in others)]
        return [x for x in found if isinstance(x, Access) and x.indices == self.output.indices]

    def at_pattern(self) -> tuple[Written, str]:
        """The expression with a pattern of the output's indices as the first factor of each term,
        and the pattern's name."""
        name = f"{self.output.tensor}_"
        while name in self.tensors:
            name += "_"
        held = dataclasses.replace(self.output, tensor=name, pattern=True)
        terms = tuple(Term((held, *term.factors), term.negative) for term in self.terms)
        return dataclasses.replace(self, terms=terms), name

    def assign(self, formats: Mapping[str, Format | None], output: Format | None) -> Assign:
        """The expression with formats, by the name of the access, and that of the output."""
        return expression_of(
            dataclasses.replace(self.output, format=output),
            [with_formats(term, formats) for term in self.terms],
        )


def parse(text: str, formats: Mapping[str, Format] | None = None) -> Assign:
    """`parse("y(i) = b(i) - A(i,j) * x(j)", {"A": CSR})` is the expression y(i) = b(i) - A(i,j) *
    x(j) with A in CSR: what `evaluate` computes, for a `Schedule`.

    Args:
      text: an assignment. Operands are names, with their indices in parentheses where they have
        any, and are combined by +, -, * and parentheses. Each term is summed over its indices that
        the output lacks; += says the same as =. An operand with several tuples of indices is
        called A, A_2, ... in the result. A(i,i) is the diagonal of A, a dense operand A(i).
      formats: by name, of sparse operands, and of a sparse output C. Its structure is that of a
        factor of every term with the same indices and format, or else given by a pattern `C_`,
        which is added to each term as a factor of ones.

    Raises:
      TypeError: text is no str.
      ValueError: text that is not such an assignment; formats of other names; what `Assign` raises.
      NotImplementedError: more than 64 terms after multiplying out; what `Assign` raises.

    Source: Kjolstad et al., OOPSLA 2017, section 2 (tensor index notation).
    """
    written, formats = read(text), dict(formats or {})
    output = formats.pop(written.output.tensor, None)
    unknown = sorted(set(formats) - set(written.operands))
    if unknown:
        raise ValueError(
            f"parse: formats: no operand {unknown[0]!r} in {text!r}; there are "
            f"{', '.join(written.operands)}"
        )
    own = {
        name: None if name in written.diagonals else formats.get(tensor)
        for name, tensor in written.tensors.items()
    }
    if output is not None and all(own[x.tensor] != output for x in written.shared):
        written, pattern = written.at_pattern()
        own[pattern] = output
    return written.assign(own, output)


def read(text: str) -> Written:
    """The expression that is written; errors are those of `parse`."""
    if not isinstance(text, str):
        raise TypeError(f"expected index notation such as 'y(i) = A(i,j) * x(j)', got {text!r}")
    if re.match(r"[^=]*\b(max|min)\s*=", text):
        raise NotImplementedError(
            f"{text[:200]!r}: terms are added up; gspmm(A, x, reduce='max') takes the greatest "
            "product of each row, Assign(..., 'max') has loops for it"
        )
    found = re.fullmatch(r"([^=+]*)\+?=([^=]*)", text, re.DOTALL)
    if found is None or len(text) > 10_000:
        raise ValueError(
            f"expected one assignment such as 'y(i) = b(i) - A(i,j) * x(j)', got {text[:200]!r}"
        )
    return _Reader(text).of(*found.groups())


def with_formats(term: Term, formats: Mapping[str, Format | None]) -> Term:
    factors = (
        dataclasses.replace(x, format=formats.get(x.tensor)) if isinstance(x, Access) else x
        for x in term.factors
    )
    return Term(tuple(factors), term.negative)


def expression_of(output: Access, terms: list[Term] | tuple[Term, ...]) -> Assign:
    """An Assign of terms."""
    return Assign(output, Sum(tuple(terms)))  # type: ignore[arg-type]  # it is taken apart


class _Reader:
    """Python's own parser reads both sides, since they are expressions of Python."""

    def __init__(self, text: str):
        self.text = text
        self.names: dict[tuple[str, tuple[str, ...]], Access] = {}
        self.tensors: dict[str, str] = {}
        self.diagonals: dict[str, tuple[IndexVar, ...]] = {}

    def of(self, left: str, right: str) -> Written:
        target, value = self.parsed(left), self.parsed(right)
        name, indices = self.words(target)
        if len(set(indices)) < len(indices):
            raise self.error(f"the indices of {name}({','.join(indices)}) must differ")
        self.taken = {name} | {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        terms = self.sum_of(value)
        if name in self.tensors.values():
            raise self.error(f"{name} is on both sides; give the result a name of its own")
        output = Access(name, tuple(map(IndexVar, indices)))
        return Written(output, tuple(terms), self.tensors, self.diagonals)

    def error(self, why: str) -> ValueError:
        return ValueError(f"{self.text!r}: {why}")

    def parsed(self, side: str) -> ast.expr:
        try:
            return ast.parse(side.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = getattr(error, "msg", None) or "it is nested too deeply"
            raise self.error(f"no index notation: {why}") from None

    def words(self, node: ast.expr) -> tuple[str, tuple[str, ...]]:
        """The name and the indices of an access."""
        if isinstance(node, ast.Name):
            return node.id, ()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            indices = [x.id for x in node.args if isinstance(x, ast.Name)]
            if len(indices) == len(node.args):
                return node.func.id, tuple(indices)
        said = ast.unparse(node)
        if isinstance(node, ast.Call) and said.startswith(("max(", "min(")):
            raise self.error(
                f"operands are combined by +, - and *, got {said}; of two sparse arrays "
                f"A.{said[:3]}imum(B)"
            )
        if isinstance(node, ast.Subscript):
            raise self.error(f"indices are in parentheses, as in A(i,j), got {said}")
        if isinstance(node, ast.Constant):
            raise self.error(f"operands have names; write s * A(i,j) with s={said}")
        raise self.error(f"expected an operand such as A(i,j), of indices that are names: {said}")

    def sum_of(self, node: ast.expr) -> list[Term]:
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _negative(self.sum_of(operand))
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
                first, second = self.sum_of(left), self.sum_of(right)
                if isinstance(op, ast.Mult):
                    terms = self.product(first, second)
                else:
                    terms = first + (_negative(second) if isinstance(op, ast.Sub) else second)
            case ast.BinOp():
                raise self.error(f"operands are combined by +, - and *, got {ast.unparse(node)}")
            case _:
                return [Term((self.access(*self.words(node)),))]
        if len(terms) > MOST_TERMS:
            raise self.too_many(len(terms))
        return terms

    def product(self, first: list[Term], second: list[Term]) -> list[Term]:
        if len(first) * len(second) > MOST_TERMS:
            raise self.too_many(len(first) * len(second))
        return [
            Term((*a.factors, *b.factors), a.negative != b.negative) for a in first for b in second
        ]

    def too_many(self, count: int) -> NotImplementedError:
        return NotImplementedError(
            f"{self.text[:200]!r}: {count} terms after multiplying out, and {MOST_TERMS} are "
            "merged at most; compute a part of it first"
        )

    def access(self, tensor: str, indices: tuple[str, ...]) -> Access:
        if (tensor, indices) in self.names:
            return self.names[tensor, indices]
        number, name = 2, tensor
        while name in self.tensors or (name in self.taken and name != tensor):
            name, number = f"{tensor}_{number}", number + 1
        each = tuple(IndexVar(index) for index in dict.fromkeys(indices))
        self.tensors[name] = tensor
        if len(each) < len(indices):
            self.diagonals[name] = tuple(map(IndexVar, indices))
        access = self.names[tensor, indices] = Access(name, each)
        return access


def _negative(terms: list[Term]) -> list[Term]:
    return [Term(term.factors, not term.negative) for term in terms]
