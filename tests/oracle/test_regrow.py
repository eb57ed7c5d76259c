"""The structure after a step in which groups move, against sorts in NumPy: the CPU's kernel without
XLA, on every instruction set, and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from native_call import kernel_isas, run

from sgap_jax.primitives.regrow import regrow, regrow_by_ranks
from sgap_jax.runtime.native import native

DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16]


def magnitudes(x):
    """In the order of norms: NaN is less than every number."""
    wide = np.abs(np.asarray(x).astype(np.float64)).ravel()
    return np.where(np.isnan(wide), -1.0, wide)


def by_sorting(offsets, indices, norms, scores, fraction):
    (m, n), groups = scores.shape, len(indices)
    ends = np.maximum.accumulate(np.clip(offsets, 0, groups))
    position = {}
    for row in range(m):
        for p in range(ends[row], ends[row + 1]):
            if 0 <= indices[p] < n:
                position.setdefault(row * n + int(indices[p]), p)
    cells = np.array(sorted(position), np.int64)
    size = magnitudes(norms)[[position[cell] for cell in cells]]
    share = np.float32(0 if np.isnan(fraction) else fraction)
    keep = len(cells) - int(np.round(share * np.float32(len(cells))))
    kept = np.sort(cells[np.argsort(-size, stable=True)[:keep]])
    others = np.setdiff1d(np.arange(m * n), kept)
    wide = np.float64 if scores.dtype == np.float64 else np.float32
    score = np.minimum(magnitudes(scores), np.finfo(wide).max)[others]
    grown = others[np.argsort(-score, stable=True)[: min(groups, m * n) - keep]]
    found = np.sort(np.concatenate([kept, grown]))
    was = set(kept.tolist())
    source = [position[cell] if cell in was else -1 for cell in found.tolist()]
    left = groups - len(found)
    return (
        np.searchsorted(found, np.arange(m + 1) * n) if n else np.zeros(m + 1, int),
        np.pad(found % max(n, 1), (0, left)),
        np.pad(np.array(source, int), (0, left), constant_values=-1),
    )


def numbers(rng, kind, *shape):
    x = rng.standard_normal(shape)
    return {
        "normal": x,
        "ties": rng.integers(-2, 3, shape).astype(float),
        "nan": np.where(rng.random(shape) < 0.4, np.nan, x),
        "wide": np.where(rng.random(shape) < 0.2, -np.inf, 10.0 ** rng.integers(-44, 38, shape)),
        "zeros": np.zeros(shape),
    }[kind]


def structure(rng, m, n, groups, hostile):
    if hostile:
        offsets = rng.integers(-5, groups + 9, m + 1)
        return np.sort(offsets) if rng.random() < 0.5 else offsets, rng.integers(-2, n + 2, groups)
    stored = max(min(groups, m * n) - 3, 0)
    cells = np.sort(rng.choice(m * n, stored, replace=False))
    indices = np.pad(cells % max(n, 1), (0, groups - stored))
    return np.searchsorted(cells, np.arange(m + 1) * max(n, 1)), indices


@functools.cache
def cases():
    """The last ones have a sample of their scores, which is wrong where every ninth is greater."""
    rng, made = np.random.default_rng(0), []
    sizes = [(1, 1, 1), (5, 7, 0), (0, 4, 3), (4, 0, 3), (10, 9, 27), (3, 40, 200), (70, 33, 900)]
    kinds = ["normal", "ties", "nan", "wide", "zeros"]
    for number, (m, n, groups) in enumerate([*sizes * 2, (40, 2000, 9000), (40, 2000, 9000)]):
        arrays = structure(rng, m, n, groups, hostile=number % 2)
        norms = numbers(rng, kinds[number % 5], groups).astype(DTYPES[number % 4])
        scores = numbers(rng, kinds[number // 2 % 5], m, n).astype(DTYPES[number // 3 % 4])
        made += [(*arrays, norms, scores, f) for f in (0.3, float("nan"), 1.0)]
    misleading = rng.random(80_000) + np.where(np.arange(80_000) % 9, 0, 9)
    for dtype in DTYPES[:2]:
        arrays = structure(rng, 40, 2000, 20_000, False)
        norms = numbers(rng, "normal", 20_000).astype(dtype)
        made.append((*arrays, norms, misleading.reshape(40, 2000).astype(dtype), 1.0))
    # Infinity counts as the greatest number, of which there are some too.
    arrays, scores = structure(rng, 200, 200, 100, False), np.full((200, 200), np.inf, np.float32)
    scores[0] = np.finfo(np.float32).max
    made.append((*arrays, numbers(rng, "normal", 100).astype(np.float32), scores, 1.0))
    return [
        ((offsets.astype(np.int32), indices.astype(np.int32), *rest), by_sorting(*given))
        for given in made
        for offsets, indices, *rest in [given]
    ]


@pytest.mark.parametrize("isa", kernel_isas())
def test_the_kernel(isa):
    with np.errstate(over="ignore"):
        for threads in (1, 3):
            for (offsets, indices, norms, scores, fraction), want in cases():
                results = [(x.shape, np.int32) for x in want]
                operands = offsets, indices, norms, scores, np.float32(fraction)
                found = run("sgap_regrow_csr_v1", operands, results, {}, isa, threads)
                jax.tree.map(np.testing.assert_array_equal, tuple(found), want)


def test_plain_jax():
    step = jax.jit(regrow_by_ranks)
    for given, want in cases()[12:18]:
        found = step(*map(jnp.asarray, given[:4]), jnp.float32(given[4]))
        jax.tree.map(np.testing.assert_array_equal, found, want)


def test_several_at_once():
    rng = np.random.default_rng(1)
    given = [
        (*structure(rng, 10, 9, 27, hostile), rng.standard_normal(27), rng.standard_normal((10, 9)))
        for hostile in (False, True, True)
    ]
    stacked = [jnp.asarray(np.stack(x)) for x in zip(*given, strict=True)]
    stacked[:2] = [x.astype(jnp.int32) for x in stacked[:2]]
    step = jax.jit(jax.vmap(regrow))
    text = step.lower(*stacked, jnp.full(3, 0.5, jnp.float32)).as_text()
    assert text.count("custom_call @sgap_regrow_csr_v1") == 1 and "stablehlo.while" not in text
    found = step(*stacked, jnp.full(3, 0.5, jnp.float32))
    for i, one in enumerate(given):
        jax.tree.map(
            np.testing.assert_array_equal, tuple(x[i] for x in found), by_sorting(*one, 0.5)
        )


def test_wrong_operands_are_refused():
    def call(**other):
        shapes = dict(offsets=(3,), indices=(4,), norms=(4,), scores=(2, 5), fraction=())
        dtypes = dict(offsets=np.int32, indices=np.int32)
        given = {
            name: np.zeros(shape, dtypes.get(name, np.float32)) for name, shape in shapes.items()
        }
        operands = list((given | other).values())
        results = [((3,), np.int32), ((4,), np.int32), ((4,), np.int32)]
        return run("sgap_regrow_csr_v1", operands, results, {}, native.isa())

    call()
    for name, array, message in [
        ("offsets", np.zeros(4, np.int32), "offsets: unlike scores"),
        ("indices", np.zeros(5, np.int32), "norms: unlike scores"),
        ("indices", np.zeros(4, np.float32), "indices: unlike scores"),
        ("norms", np.zeros(4, np.int32), "expected float32, float64, bfloat16 or float16"),
        ("scores", np.zeros(5, np.float32), "scores .*rows, columns"),
        ("fraction", np.zeros(2, np.float32), "fraction: unlike scores"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**{name: array})
