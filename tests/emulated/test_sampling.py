"""The random points of the backend emulated-sampled, and which ops request a schedule from it."""

import jax
import jax.numpy as jnp
import pytest
from battery import BATTERY, array
from cuda_sources import require_nvrtc
from emulated_launch import Sampled, emulate

from sgap_jax import Problem, choose_schedule, spmm
from sgap_jax.schedules.emulated import Emulated
from sgap_jax.schedules.point import algorithm
from sgap_jax.schedules.problem import ROW_OPS

OPS = {"spmm": 13, "gspmm": 13, "sddmm": 13, **dict.fromkeys(ROW_OPS, 1)}


def draws(op, names=range(300)):
    problem = Problem(op, (100, 90), 1000, n=OPS[op], platform="cuda")
    return [Sampled(str(name))(problem) for name in names]


@pytest.mark.parametrize("op", OPS)
def test_draws_are_legal_and_reach_every_kernel(op):
    points = draws(op)
    problem = Problem(op, (100, 90), 1000, n=OPS[op], platform="cuda")
    for point in points:
        point.check(problem)
    assert len({algorithm(point, op) for point in points}) == (4 if op in ("spmm", "gspmm") else 2)
    assert {point.walk for point in points} == {1, 2, 4}
    assert {point.block_size for point in points} == {128, 256, 512}
    tiled = len({point.tile_size for point in points}) > 3
    assert tiled == (op in ("spmm", "gspmm"))


def test_the_same_name_draws_the_same_until_the_seed_changes(monkeypatch):
    first = draws("spmm", range(20))
    assert draws("spmm", range(20)) == first
    monkeypatch.setenv("SGAP_SAMPLE_SEED", "1")
    assert draws("spmm", range(20)) != first


def test_an_emulation_chooses_for_the_derivatives_too():
    require_nvrtc()
    asked, A = [], array(BATTERY["every_length"], jnp.float32)

    def choose(problem):
        asked.append(problem)
        return choose_schedule(problem)

    schedule = Emulated(emulate, choose=choose)
    B = jnp.ones((A.shape[1], 3), jnp.float32)
    jax.grad(lambda B: spmm(A, B, schedule=schedule).sum())(B)
    assert [(p.op, p.permuted, p.platform) for p in asked] == [
        ("spmm", False, "cuda"),
        ("spmm", True, "cuda"),
    ]
    spmm(A, B)  # the CPU's default does not come from the sampler
    assert len(asked) == 2
