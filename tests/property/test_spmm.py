"""Random legal points with their tunables on generated structures, in the emulator."""

import dataclasses
import os
import random

import jax.numpy as jnp
import numpy as np
from battery import Case, array, cast
from cuda_sources import require_nvrtc
from emulated_launch import emulate, points, tuned
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, assert_within

from sgap_jax import Problem, spmm
from sgap_jax.schedules.emulated import Emulated


def law(test):
    """Each example is a compilation. The same ones at each run, others with SGAP_SAMPLE_SEED."""
    bounded = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    return seed(os.environ.get("SGAP_SAMPLE_SEED", "0"))(bounded(test))


@st.composite
def structures(draw, tagged):
    """Rows of up to 40 entries, many of them empty, then padding. `tagged`: entry p in column p."""
    length = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 40))
    lengths = draw(st.lists(length, max_size=12).filter(lambda x: not tagged or sum(x) <= 90))
    k = sum(lengths) if tagged else draw(st.integers(max(lengths, default=0), 60))
    padding = draw(st.integers(0, 5)) if k else 0
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    columns = [np.sort(rng.choice(k, n, replace=False)) for n in lengths]
    indices = np.arange(k) if tagged else np.concatenate([np.zeros(0, int), *columns])
    return Case(
        "generated",
        (len(lengths), k),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.concatenate([indices, rng.integers(0, max(k, 1), padding)]).astype(np.int32),
        np.concatenate([rng.standard_normal(sum(lengths)), np.full(padding, np.nan)]),
    )


def drawn_schedule(case, n, transpose, number):
    shape = case.shape[::-1] if transpose else case.shape
    problem = Problem("spmm", shape, case.nnz, n=n, platform="cuda")
    rng = random.Random(number)
    point = tuned(rng.choice(points(problem)), problem, rng)
    note(f"{point} for {problem}")
    return Emulated(emulate, point)


numbers = st.integers(0, 2**32 - 1)


@law
@given(
    structures(tagged=False), st.integers(0, 20), st.sampled_from(DTYPES), st.booleans(), numbers
)
def test_points_agree_with_the_oracle(case, n, dtype, transpose, number):
    require_nvrtc()
    schedule = drawn_schedule(case, n, transpose, number)
    B = dense_operand(case, n, transpose)
    C = spmm(array(case, dtype), cast(B, dtype), transpose=transpose, schedule=schedule)
    assert_within(C, *oracle(case, dtype, B, transpose))


@law
@given(structures(tagged=True), st.sampled_from(DTYPES), numbers)
def test_every_nonzero_is_visited_once_by_its_row(case, dtype, number):
    # Entry p alone is in column p, so C[i, p] counts the visits of p on behalf of row i.
    require_nvrtc()
    m, k = case.shape
    schedule = drawn_schedule(case, k, False, number)
    values = np.where(np.isnan(case.values), np.nan, np.arange(case.nnz) + 1)
    A = array(dataclasses.replace(case, values=values), dtype)
    C = spmm(A, jnp.eye(k, dtype=dtype), schedule=schedule)
    expected = np.zeros((m, k))
    expected[case.rows, np.arange(k)] = np.arange(k) + 1
    np.testing.assert_array_equal(np.asarray(C).astype(np.float64), expected)
