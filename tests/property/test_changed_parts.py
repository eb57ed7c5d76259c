"""Index arrays of a matrix in parts that were changed after its plan was made: parts_fuzz.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parts_fuzz as fuzz
import pytest


@pytest.mark.parametrize(
    "name, of",
    [
        pytest.param("entries", fuzz.products, marks=pytest.mark.tier("all")),
        pytest.param("vectors", fuzz.messages, marks=pytest.mark.tier("all")),
        pytest.param("blocks", fuzz.scores, marks=pytest.mark.tier("all")),
        pytest.param("entries", fuzz.attention, marks=pytest.mark.tier("test")),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_nothing_is_read_beyond_an_operand(name, of):
    """Forward and backward, on two devices."""
    fuzz.run(name, of, 12, 3, 2)


@pytest.mark.tier("test")
def test_entries_of_no_column_take_no_part():
    """As in a matrix that is whole: of own columns, and of places among the rows of others."""
    A, rng = fuzz.in_parts("entries", 2), np.random.default_rng(1)
    X = jnp.asarray(rng.standard_normal((fuzz.SIZE, 2)), jnp.float32)
    beyond, zeroed = {}, {}
    for name in ("own", "foreign"):
        piece = getattr(A, name)
        first, level = piece.index_arrays
        out = rng.random(level.indices.shape) < 0.3
        wrong = rng.choice(np.int32([-1, 2**30, -(2**31), 2**31 - 1]), out.shape)
        level = level._replace(indices=np.where(out, wrong, level.indices))
        beyond[name] = dataclasses.replace(piece, index_arrays=(first, level))
        zeroed[name] = dataclasses.replace(piece, values=np.where(out, 0, piece.values))
    product = jax.jit(lambda A: A @ X)
    assert not A._covered(2, X.dtype)
    got, expected = (product(dataclasses.replace(A, **x)) for x in (beyond, zeroed))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - product(A)).max() > 1
