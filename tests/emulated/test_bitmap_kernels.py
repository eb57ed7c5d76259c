"""The kernels of bitmaps, run by the emulator, and their lowering for CUDA: the words and entries
that NumPy finds."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax import SparseArray, select
from sgap_jax.launch.bitmap import entries_plan, of_mask_plan
from sgap_jax.primitives import bitmap as primitives
from sgap_jax.schedules.emulated import Emulated

EMULATED = Emulated(emulate)
# Words of several warps, and of several blocks where there are more than 256.
SHAPES = [(1, 1), (3, 31), (3, 32), (5, 33), (4, 65), (2, 300), (300, 7), (3, 3000)]


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def masks_of(density, *shape):
    return np.random.default_rng(1).random(shape) < density


def whole_words(masks):
    """Masks with the columns that their last words have."""
    return np.pad(masks, [(0, 0)] * (masks.ndim - 1) + [(0, -masks.shape[-1] % 32)])


def words_of(masks):
    """What must be made, by NumPy."""
    return np.packbits(whole_words(masks), axis=-1, bitorder="little").view("<u4")


def entries_of(mask, nse):
    """(offsets, rows, columns) of one mask, by NumPy."""
    rows, columns = (np.resize(np.append(x, np.zeros(nse)), nse) for x in np.nonzero(mask))
    return np.append(0, np.cumsum(mask.sum(1))), rows, columns


def launched(words, begins, nse, most=65535):
    """The rows and columns, with at most so many blocks in z."""
    call = entries_plan(words.shape, nse)
    call = replace(call, grid=(*call.grid[:2], min(call.grid[2], most)))
    return emulate(call, (words, begins), [((len(words), nse), np.int32)] * 2)


def check(masks, capacities, most=65535):
    batch, m, n = masks.shape
    expected = words_of(masks)
    (words,) = emulate(of_mask_plan(batch * m, n), (masks,), [(expected.shape, np.uint32)])
    np.testing.assert_array_equal(words, expected)
    counts = whole_words(masks).reshape(batch, -1, 32).sum(2)
    begins = np.pad(np.cumsum(counts, axis=1, dtype=np.int32), ((0, 0), (1, 0)))
    for nse in capacities:
        found = launched(words, begins, nse, most)
        for i, mask in enumerate(masks):
            for got, right in zip(found, entries_of(mask, nse)[1:], strict=True):
                np.testing.assert_array_equal(got[i], right)


@pytest.mark.parametrize("density", [0, 0.02, 0.4, 1])
def test_sizes_and_capacities(density):
    for shape in SHAPES:
        masks = masks_of(density, 1, *shape)
        stored = int(masks.sum())
        check(masks, sorted({1, max(stored // 2, 1), max(stored, 1), stored + 70}))


@pytest.mark.tier("test")
def test_batches():
    """Of dense, empty and other masks; a block has two members of the batch."""
    masks = np.concatenate([masks_of(density, 1, 20, 70) for density in (0.4, 0, 1, 0.02)])
    check(masks, (300, 1500))
    check(masks[:3], (300, 1500), most=2)


def test_a_byte_that_is_not_one():
    """Any byte but 0 is a bit."""
    bytes_of = np.arange(256, dtype=np.uint8).reshape(2, 128)
    (words,) = emulate(of_mask_plan(2, 128), (bytes_of,), [((2, 4), np.uint32)])
    np.testing.assert_array_equal(words, words_of(bytes_of != 0))


def test_no_place_is_out_of_bounds():
    """Whatever the words and the sums hold: of one warp, since several would write one place."""
    rng = np.random.default_rng(0)
    for high in (40, 2**31):
        words = rng.integers(0, 2**32, (3, 4, 8), dtype=np.uint32)
        begins = rng.integers(-high, high, (3, 33)).astype(np.int32)
        begins[:, -1] = 2**31 - 1  # no zeros behind the last one
        launched(words, begins, 50)


def same(found, expected):
    for one, right in zip(found, expected, strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, right)


@pytest.mark.tier("test")
def test_in_jax():
    """Alone and mapped; what is empty runs in plain JAX."""
    masks = masks_of(0.3, 3, 7, 70)
    for nse in (60, 7 * 70):

        def one(mask, nse=nse):
            return primitives.entries(primitives.bitmap(mask, EMULATED), nse, EMULATED)

        found = jax.jit(jax.vmap(one))(masks)
        for i, mask in enumerate(masks):
            same([x[i] for x in found], entries_of(mask, nse))
        same(one(masks[0]), entries_of(masks[0], nse))
    for m, n, nse in ((0, 5, 4), (5, 0, 4), (5, 40, 0)):
        mask = masks_of(1, m, n)
        words = primitives.bitmap(jnp.asarray(mask), EMULATED)
        np.testing.assert_array_equal(words, words_of(mask))
        same(primitives.entries(words, nse, EMULATED), entries_of(mask, nse))


def test_counts_beyond_int32_stay_too_large(monkeypatch):
    """Sums of counts stop at the greatest int32; here at 100, which fewer bits reach."""
    monkeypatch.setattr(primitives.checks, "INT32_MAX", 100)
    mask = masks_of(1, 30, 40)
    schedule = Emulated(lambda *given: emulate(*given))  # of this test: JAX keeps what it compiled
    offsets, *found = primitives.entries(jnp.asarray(words_of(mask)), 90, schedule)
    np.testing.assert_array_equal(offsets, np.minimum(np.arange(31) * 40, 100))
    same(found, entries_of(mask, 90)[1:])


@pytest.mark.tier("test")
def test_selections_are_lowered_to_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))

    def kernels(function, *arrays):
        traced = jax.jit(function).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.scatter" not in text
        return re.findall(r'kernel = "\w+Bitmap(\w+)Kernel', text)

    x = jnp.ones((9, 70))
    reached = kernels(lambda x: select.threshold(x, 0.5, nse=99).column_indices, x)
    stored = kernels(lambda x: SparseArray.from_dense(x, nse=99).column_indices, x)
    keep = np.ones((1, 70), bool)
    kept = kernels(lambda x: select.threshold(x, 0.5, nse=99, keep=keep).column_indices, x)
    assert reached == kept == stored == ["OfMask", "Entries"]


PLANTED = [
    ("set[i] = column < columns && at < size", "set[i] = at < size"),
    ("at -= padded - columns;", ""),
    ("if (lane == i) word = bits;", "if (lane == (i ^ 1)) word = bits;"),
    ("if (own < rows * row_words) words[own] = word;", "words[own] = word;"),
    ("if (rank >= low) {", "if (rank > low) {"),
    ("begins + batch * (count + 1)", "begins + batch * count"),
    ("own < count ? begin_of[own] : total;", "own < count ? begin_of[own] : 0;"),
    ("last < nse ? last : nse;", "last;"),
    ("if (its_begin <= place) from", "if (its_begin < place) from"),
    ("if (place < end) {", "if (place < nse) {"),
    ("for (Size place = total + own;", "for (Size place = total + own + 1;"),
]


@pytest.mark.parametrize(("right", "wrong"), PLANTED)
def test_planted_bugs_are_caught(right, wrong, planted):
    planted("bitmap.cuh", right, wrong, lambda: check(masks_of(0.3, 2, 30, 70), (200, 900)))
