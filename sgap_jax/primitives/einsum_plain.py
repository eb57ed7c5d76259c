"""einsum with one sparse operand in plain JAX: gathers at the entries, products, reductions.

The derivative of a maximum or minimum is a call of the same primitive with reduction "+", in which
only products that attain the extremum are summed; the condition itself has derivative zero. The
products that are compared with the extremum are computed a second time, in the accumulator's dtype
and with the factors in the same order, so that each extremum is attained exactly.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from sgap_jax.formats.array import SparseArray
from sgap_jax.formats.fibers import ancestors
from sgap_jax.formats.structure import as_fields
from sgap_jax.primitives import einsum_unchecked
from sgap_jax.primitives._define import accumulator, derived
from sgap_jax.primitives.einsum_expression import ENTRY, Expression, arrays_per_level, nothing


def plain(*operands: Any, expression: Expression, schedule: Any) -> Any:
    """The reference of the primitive, for all platforms.

    Memory holds a product for each entry and each dense index of the output (no entries if the
    output has no sparse index); for a maximum or minimum it holds every product.
    """
    count = len(expression.words)
    coordinates = _coordinates(expression, operands[count:])
    at = _Entries(expression, coordinates, operands[:count])
    out = at.sums() if expression.reduction == "+" else at.extrema()
    return out.astype(operands[0].dtype)


def _coordinates(expression: Expression, index_arrays: Any) -> dict[str, jax.Array]:
    """The coordinates [nnz] along each index of the sparse operand; in the padding, the index's
    size, which is out of range."""
    if not expression.checked:
        return einsum_unchecked.coordinates(expression, index_arrays)
    format, left = expression.format, iter(index_arrays)
    taken = tuple(tuple(next(left) for _ in range(arrays)) for arrays in arrays_per_level(format))
    count = expression.shape(ENTRY)[0]
    shape = expression.shape(expression.sparse)
    tail = format.stored_shape(shape)
    values = jnp.zeros((count // math.prod(tail), *tail), jnp.bool_)  # only the shape is used
    fields = as_fields(taken, None, checked=True)
    A = SparseArray(values, **fields, shape=shape, format=format)
    found = dict(zip(expression.sparse, A.coordinates(), strict=True))
    index, depth = expression.fiber
    if index:
        real = found[expression.sparse[0]] < A.shape[0]
        found[index] = jnp.where(real, ancestors(A, depth), dict(expression.sizes)[index])
    return found


class _Entries:
    """The operands gathered at the stored entries, [nnz, ...]; `position` is the index letter of
    the axis of entries."""

    def __init__(self, expression: Expression, coordinates: dict[str, jax.Array], data: Any):
        self.expression, self.coordinates = expression, coordinates
        self.sizes, self.position = dict(expression.sizes), expression.fresh()
        first = expression.sparse[0]
        self.stored = coordinates[first] < self.sizes[first]
        self.count = self.stored.shape[0]
        self.wide = accumulator(data[0].dtype)
        self.terms = [self._term(word, x) for word, x in zip(expression.words, data, strict=True)]
        if expression.attained:
            self.terms = [self._attaining(len(expression.factors))]

    def _term(self, word: str, x: Any) -> tuple[str, Any]:
        """A factor gathered at the entries: the index `position` replaces the sparse indices.

        It is zero in the padding: NaNs in the values there, or in rows of dense operands that its
        coordinates name, would otherwise reach the sums.
        """
        if ENTRY in word:
            shape = tuple(self.count if index == ENTRY else 1 for index in word)
            return word.replace(ENTRY, self.position), jnp.where(self.stored.reshape(shape), x, 0)
        named = [index for index in word if index in self.coordinates]
        if not named:
            return word, x
        rest = "".join(index for index in word if index not in self.coordinates)
        x = jnp.transpose(x, [word.index(index) for index in (*named, *rest)])
        if 0 in x.shape[: len(named)]:  # where JAX gathers nothing, not even what it fills in
            return self.position + rest, jnp.zeros((self.count, *x.shape[len(named) :]), x.dtype)
        gathered = x.at[tuple(self.coordinates[index] for index in named)]
        return self.position + rest, gathered.get(mode="fill", fill_value=0)

    def _attaining(self, count: int) -> tuple[str, Any]:
        """The product of the first `count` terms (1 if there are none) where the product of the
        middle terms attains the extremum, which is the last term; zero elsewhere."""
        dense = (i for i in self.sizes if i not in (ENTRY, *self.coordinates))
        points = "".join([self.position, *dense])
        factors, others, best = self.terms[:count], self.terms[count:-1], self.terms[-1:]
        every, best = self._each(points, others), self._each(points, best)
        short = every < best if self.expression.extremum == "max" else every > best
        mask = self.stored.reshape(-1, *[1] * (len(points) - 1))
        ones = jnp.ones((), self.wide)
        term = self.products(points, factors) if factors else ones
        return points, jnp.where(short | ~mask, 0, term)

    def _each(self, points: str, terms: Any) -> Any:
        """The product of the terms, one axis for each index of `points`.

        It is rounded after each factor, as in compiled loops: the extremum that it is compared with
        may come from there.
        """
        product = jnp.ones((), self.wide)
        for word, x in terms:
            there = "".join(index for index in points if index in word)
            x = jnp.transpose(x, [word.index(index) for index in there]).astype(self.wide)
            x = jnp.expand_dims(x, [n for n, index in enumerate(points) if index not in word])
            product = x if product.ndim == 0 else _multiply(product, x)
        extents = {**self.sizes, self.position: self.count}
        return jnp.broadcast_to(product, [extents[index] for index in points])

    def products(self, output: str, terms: Any = None) -> Any:
        """The einsum of `terms` (by default all), broadcast along indices that no term has."""
        terms = self.terms if terms is None else terms
        there = {index for word, _ in terms for index in word}
        found = "".join(index for index in output if index in there)
        product = jnp.einsum(
            ",".join(word for word, _ in terms) + "->" + found,
            *(x for _, x in terms),
            precision="highest",  # by default a GPU rounds float32 to TF32
            preferred_element_type=self.wide,
        )
        missing = [i for i, index in enumerate(output) if index not in there]
        extents = {**self.sizes, self.position: self.count}
        return jnp.broadcast_to(
            jnp.expand_dims(product, missing), [extents[index] for index in output]
        )

    def sums(self) -> Any:
        if ENTRY in self.expression.output:
            return self._sparse(self.products(self._output()))
        kept, rest = self._kept()
        if not kept:
            return self.products(self.expression.output)
        product = self.products("".join([self.position, *rest]))
        zeros = jnp.zeros(self._shape(kept, rest), product.dtype)
        return self._ordered(self._at(zeros, kept).add(product, mode="drop"))

    def extrema(self) -> Any:
        reduction = self.expression.reduction
        reduce = jnp.max if reduction == "max" else jnp.min
        empty = nothing(reduction, self.wide)
        output = self._output()
        dense = [index for index in self.sizes if index not in (ENTRY, *self.coordinates)]
        over = [index for index in dense if index not in output]
        if ENTRY in self.expression.output:
            product = self._each("".join([*over, *output]), self.terms)
            return self._sparse(reduce(product, tuple(range(len(over))), initial=empty))
        kept, rest = self._kept()
        product = self._each("".join([*over, self.position, *rest]), self.terms)
        product = reduce(product, tuple(range(len(over))), initial=empty)
        if not kept:
            stored = self.stored.reshape(-1, *[1] * len(rest))
            return reduce(jnp.where(stored, product, empty), 0, initial=empty)
        start = self._at(jnp.full(self._shape(kept, rest), empty), kept)
        update = start.max if reduction == "max" else start.min
        return self._ordered(update(product, mode="drop"))

    def _output(self) -> str:
        return self.expression.output.replace(ENTRY, self.position)

    def _sparse(self, out: Any) -> Any:
        mask = [self.count if index == ENTRY else 1 for index in self.expression.output]
        return jnp.where(self.stored.reshape(mask), out, 0)

    def _kept(self) -> tuple[list[str], list[str]]:
        """The output's indices: those of the sparse operand, and the other ones."""
        kept = [index for index in self.expression.output if index in self.coordinates]
        return kept, [index for index in self.expression.output if index not in self.coordinates]

    def _shape(self, kept: list[str], rest: list[str]) -> list[int]:
        return [self.sizes[index] for index in (*kept, *rest)]

    def _at(self, x: Any, kept: list[str]) -> Any:
        return x.at[tuple(self.coordinates[index] for index in kept)]

    def _ordered(self, out: Any) -> Any:
        """Transposes from the order (sparse indices, other indices) to that of the output."""
        kept, rest = self._kept()
        return jnp.transpose(out, [(*kept, *rest).index(i) for i in self.expression.output])


def _multiply(x: Any, y: Any) -> Any:
    """x * y; 8-bit integers are multiplied in 32 bits, so that products wrap.

    Where a maximum or minimum follows, XLA's CPU compiler makes 8-bit products that saturate
    (jaxlib 0.10.2).
    """
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits == 8:
        return (x.astype(jnp.int32) * y.astype(jnp.int32)).astype(x.dtype)
    return x * y


def tangents_of_extremum(
    bind: Any, primals: Any, tangents: Any, *, expression: Expression, schedule: Any
) -> list:
    """For each factor its contribution to the result's tangent; None where its tangent is None.

    Products that tie share the derivative equally, as in `jnp.max` and `row_max`; where the result
    is NaN, the tangent is NaN.
    """
    count = len(expression.factors)
    factors, indices = primals[:count], primals[count:]
    dtype = factors[0].dtype
    factors = [x.astype(accumulator(dtype)) for x in factors]
    fixed = list(map(jax.lax.stop_gradient, factors))
    params: dict = dict(schedule=derived(schedule))
    best = bind(*fixed, *indices, expression=expression, **params)
    attaining = replace(
        expression,
        reduction="+",
        attained=(*expression.factors, expression.output),
        extremum=expression.reduction,
    )
    ties = bind(*fixed, best, *indices, expression=replace(attaining, factors=()), **params)
    shares = jnp.where(jnp.isnan(best), jnp.nan, jnp.maximum(ties, 1))

    def part(place: int, tangent: Any) -> Any:
        if tangent is None:
            return None
        moved = (*factors[:place], tangent.astype(shares.dtype), *factors[place + 1 :])
        out = bind(*moved, *fixed, best, *indices, expression=attaining, **params)
        return (out / shares).astype(dtype)

    return [part(place, tangent) for place, tangent in enumerate(tangents)]
