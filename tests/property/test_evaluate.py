"""Random expressions of two and three sparse operands through `evaluate`: any formats, dense and
sparse results, loops, and plain JAX, against NumPy.

SGAP_DRAWS says how many (40), SGAP_SAMPLE_SEED which.
"""

import os
import random

import numpy as np
import pytest
from compiled_operands import own_cache  # noqa: F401

from sgap_jax import (
    BCSR,
    COO,
    CSC,
    CSF,
    CSR,
    CVS,
    Compressed,
    Dense,
    Format,
    SparseArray,
    evaluate,
)

pytestmark = pytest.mark.tier("all")

# Few of them: XLA compiles conversions for each shape.
EXTENTS = [dict(i=8, j=6, k=4), dict(i=4, j=1, k=6)]
FORMATS = {
    1: [Format((Compressed,))],
    2: [CSR, CSR, CSC, CSF(2), CSF(2).transposed, COO, CVS(2), BCSR(2, 2)],
    3: [CSF(3), COO, Format((Dense, Compressed, Compressed)), Format((Compressed,) * 3, (2, 0, 1))],
}
RESULTS = {1: FORMATS[1], 2: [CSR, CSC, CSF(2), COO], 3: [CSF(3)]}


def drawn(choose):
    """Text, operands, the same dense, and what is asked of the result."""
    sizes = choose.choice(EXTENTS)
    numbers = np.random.default_rng(choose.randrange(2**32))
    names, made, dense, words = iter("ABDEFGHMNQ"), {}, {}, {}
    sparse_left, terms = choose.choice([2, 2, 3]), []

    def operand(sparse):
        name = next(names)
        word = choose.sample("ijk", choose.choice([1, 2, 2, 2, 3]))
        shape = [sizes[index] for index in word]
        x = numbers.integers(1, 4, shape) * numbers.choice([-1, 1], shape)
        format = choose.choice(FORMATS[len(word)]) if sparse else None
        if sparse:
            x = x * (numbers.random(shape) < choose.choice([0, 0.2, 0.5, 1]))
            if format.block_shape and any(
                shape[mode] % side
                for mode, side in zip(format.modes, format.block_shape, strict=False)
            ):
                format = CSR
            made[name] = SparseArray.from_dense(x.astype(float), format=format)
        else:
            made[name] = x.astype(float)
        dense[name], words[name] = x, "".join(word)
        return name

    for _ in range(choose.choice([1, 1, 2, 3])):
        factors = []
        for _ in range(choose.choice([1, 2, 2, 3])):
            if words and choose.random() < 0.1:
                factors.append(choose.choice(list(words)))
                continue
            sparse = sparse_left > 0 and choose.random() < 0.8
            sparse_left -= sparse
            factors.append(operand(sparse))
        terms.append((choose.random() < 0.3, factors))
    while sparse_left:  # every draw has two of them at least
        sparse_left -= 1
        terms[choose.randrange(len(terms))][1].append(operand(True))
    there = sorted(set("".join(words.values())))
    output = choose.sample(there, choose.randint(0, len(there)))
    written = [
        ("-" if negative else "+") + " * ".join(f"{n}({','.join(words[n])})" for n in factors)
        for negative, factors in terms
    ]
    left = f"R({','.join(output)})" if output else "s"
    text = f"{left} = {' '.join(written).removeprefix('+')}"
    format = choose.choice(RESULTS[len(output)]) if output and choose.random() < 0.4 else None
    total = np.zeros([sizes[index] for index in output])
    for negative, factors in terms:
        own = [index for index in output if any(index in words[n] for n in factors)]
        subscripts = ",".join(words[n] for n in factors) + "->" + "".join(own)
        part = np.einsum(subscripts, *(dense[n] for n in factors))
        part = part.reshape([sizes[index] if index in own else 1 for index in output])
        total = total + (-part if negative else part)
    return text, made, format, total


def test_random_expressions():
    seed, refused = os.environ.get("SGAP_SAMPLE_SEED", "0"), 0
    draws = int(os.environ.get("SGAP_DRAWS", "40"))
    for number in range(draws):
        text, operands, format, want = drawn(random.Random(f"{seed} {number}"))
        said = {n: str(getattr(x, "format", "dense")) for n, x in operands.items()}
        what = f"draw {number}: {text} of {said}, format {format}"
        try:
            found = evaluate(text, **operands, format=format)
        except NotImplementedError as error:
            assert "format" in str(error) or "evaluate" in str(error), what
            refused += 1
            continue
        found = found if format is None else found.todense()
        np.testing.assert_array_equal(found, want, what)
    assert refused < draws / 10
