"""The kernels of top_k, run by the emulator, and its lowering for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import cast
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from selection_oracle import KINDS, expected, normal, same, scores_of
from tolerance import DTYPES

from sgap_jax import Reference, select
from sgap_jax.launch.top_k import select_plan, write_plan
from sgap_jax.schedules.emulated import Emulated

INF = np.inf
EMULATED = Emulated(emulate)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def launched(scores, k, limits):
    """The primitive's results: two launches, with the prefix sum between them."""
    batch, m, _ = scores.shape
    call = select_plan(str(scores.dtype), scores.shape, k, shared_limits=len(limits) == 1)
    made = [((batch, m), np.int32), ((batch, m, k), np.int32)]
    counts, columns = emulate(call, (scores, limits), made)
    offsets = np.pad(np.cumsum(counts, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    call = write_plan(str(scores.dtype), scores.shape, k)
    made = [((batch, m * k), scores.dtype), ((batch, m * k), np.int32)]
    values, indices = emulate(call, (scores, columns, offsets), made)
    return values, offsets, indices


def check(kind, dtype, sizes=((3, 300, 7), (2, 600, 599), (3, 40, 40), (2, 1, 1))):
    for m, n, k in sizes:
        scores = cast(scores_of(kind, m, n), dtype)
        for limits in (np.full(m, n, np.int32), np.int32([n - 1, -3, n + 9])[:m]):
            found = launched(scores[None], k, limits[None])
            same([x[0] for x in found], expected(scores, k, np.clip(limits, 0, n)), f"{m} x {n}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scores(kind):
    check(kind, DTYPES[KINDS.index(kind) % 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    check("infinite", dtype)
    check("ties", dtype, [(2, 700, 100)])


def test_batches_and_their_limits():
    scores = np.float32(normal(3, 4, 90))
    scores[1, ::2] = -INF
    for limits in (np.int32([[90, 5, 0, 60]]), np.int32(normal(3, 4) * 50 + 50)):
        found = launched(scores, 6, limits)
        for b in range(3):
            own = np.clip(limits[b % len(limits)], 0, 90)
            same([x[b] for x in found], expected(scores[b], 6, own))


def test_in_jax_with_its_derivative():
    scores, lengths = jnp.asarray(normal(6, 50)), jnp.int32([50, 7, 0, 99, 20, 1])

    def of(schedule):
        loss = lambda x: jnp.sum(jnp.sin(select.top_k(x, 5, keep=keep, schedule=schedule).values))
        keep = np.arange(50)[None] < 2
        A = lambda x, n: select.top_k(x, 5, lengths=n, schedule=schedule)
        one, many = (
            A(scores, lengths),
            jax.vmap(A, (None, 0))(scores, jnp.stack([lengths, lengths])),
        )
        return one, many, jax.grad(loss)(scores), select.top_k(scores, 0, schedule=schedule)

    jax.tree.map(np.testing.assert_array_equal, of(EMULATED), of(None))
    q, k = jnp.asarray(normal(9, 3)), jnp.asarray(normal(11, 3))
    product = lambda s: jax.jit(lambda q, k: select.top_k((q, k), 4, causal=True, schedule=s))(q, k)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    jax.tree.map(close, product(EMULATED), product(None))


def test_it_lowers_to_two_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))

    def text(schedule):
        f = jax.jit(lambda x: select.top_k(x, 3, schedule=schedule).index_arrays)
        return f.trace(jnp.ones((4, 60))).lower(lowering_platforms=("cuda",)).as_text()

    assert text(None).count("custom_call @sgap_launch_v1") == 2 and "top_k" not in text(None)
    assert "custom_call @sgap_launch_v1" not in text(Reference())


PLANTED = [
    (
        "top_k",
        "(equal && rank[1] < selection.ties)",
        "(equal && rank[1] <= selection.ties)",
        "ties",
    ),
    ("score_key", "if (bits == sign) return sign;", "", "zeros"),
    ("score_key", "> infinity) return 1;", "> infinity) return 0;", "only nan"),
    ("row_lanes", "if (w < warp)", "if (w <= warp)", "normal"),
    (
        "top_k",
        "FindDigit(shared, wanted);\n    __syncthreads();",
        "FindDigit(shared, wanted);",
        "normal",
    ),
    ("top_k", "index[p] = 0;", "", "masked"),
]


@pytest.mark.parametrize(("header", "right", "wrong", "kind"), PLANTED)
def test_planted_bugs_are_caught(header, right, wrong, kind, planted):
    sizes = [(3, 300, 7), (2, 80, 9)]
    planted(f"{header}.cuh", right, wrong, lambda: check(kind, "float32", sizes))
