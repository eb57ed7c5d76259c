"""The bitmap of a mask and the entries of its bits: every instruction set, and plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_call import kernel_isas, run

from sgap_jax.formats.structure import WORD_COLUMNS, bitmap, entries_of_bitmap
from sgap_jax.primitives import bitmap as primitives
from sgap_jax.runtime.native import native

# With AVX512-VBMI2 columns are packed as bytes.
ISAS = kernel_isas() + [isa for isa in native.supported_isas() if isa == "avx512_bf16"]
SHAPES = [(1, 1), (3, 31), (3, 32), (5, 33), (7, 64), (4, 65), (2, 300), (100, 1000), (3000, 7)]
SHAPES += [(0, 5), (5, 0), (2, 200_000)]  # the last one by several tasks
INT32_MAX = np.iinfo(np.int32).max


def mask_of(shape, density):
    return np.random.default_rng(1).random(shape) < density


def entries_of(mask, nse):
    """What must be stored, by NumPy."""
    offsets = np.append(0, np.cumsum(mask.sum(1)))
    rows, columns = (np.resize(np.append(x, np.zeros(nse)), nse) for x in np.nonzero(mask))
    return offsets, rows, columns


def capacities(mask):
    stored = int(mask.sum())
    return sorted({0, 1, stored // 2, stored, stored + 70})


def words_of(mask):
    return -(-mask.shape[-1] // WORD_COLUMNS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("density", [0, 0.01, 0.3, 1])
def test_every_instruction_set(density, isa):
    for shape in SHAPES:
        mask = mask_of(shape, density)
        sizes = [((shape[0], words_of(mask)), np.uint32)]
        for threads in (1, 4, -1):
            (words,) = run("sgap_bitmap_of_mask_v1", [mask], sizes, {}, isa, threads)
            bits = (words[:, :, None] >> np.arange(WORD_COLUMNS)) & 1
            bits = bits.reshape(shape[0], words.shape[1] * WORD_COLUMNS)
            np.testing.assert_array_equal(bits[:, : shape[1]], mask)
            assert not bits[:, shape[1] :].any()
            for nse in capacities(mask):
                sizes_of = [((n,), np.int32) for n in (shape[0] + 1, nse, nse)]
                found = run("sgap_bitmap_entries_v1", [words], sizes_of, {}, isa, threads)
                for got, want in zip(found, entries_of(mask, nse), strict=True):
                    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("density", [0.1, 1])
@pytest.mark.parametrize("shape", [(3, 70), (4, 32), (0, 3), (3, 0)])
def test_plain_jax_is_the_same(shape, density):
    mask = mask_of(shape, density)
    words = bitmap(jnp.asarray(mask))
    plain = primitives._words_reference(jnp.asarray(mask)[None], schedule=None)
    np.testing.assert_array_equal(plain[0], words)
    for nse in capacities(mask):
        plain = primitives._entries_reference(words[None], nse=nse, schedule=None)
        found = entries_of_bitmap(words, nse)
        for got, same, want in zip(found, plain, entries_of(mask, nse), strict=True):
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(same[0], want)


def test_in_a_batch():
    masks = np.stack([mask_of((5, 40), density) for density in (0, 0.2, 1)])
    found = jax.jit(jax.vmap(lambda x: entries_of_bitmap(bitmap(x), 30)))(masks)
    for i, mask in enumerate(masks):
        for got, want in zip(found, entries_of(mask, 30), strict=True):
            np.testing.assert_array_equal(got[i], want)


def test_exported_for_any_batch():
    names = ("sgap_bitmap_of_mask_v1", "sgap_bitmap_entries_v1")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    f = jax.jit(jax.vmap(lambda x: entries_of_bitmap(bitmap(x), 30)))
    any_batch = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 5, 40), bool)
    exported = jax.export.export(f, disabled_checks=allowed)(any_batch)
    assert all(name in exported.mlir_module() for name in names)
    masks = np.stack([mask_of((5, 40), density) for density in (0, 0.2, 1)])
    jax.tree.map(np.testing.assert_array_equal, exported.call(masks), f(masks))


@pytest.mark.tier("all")
def test_counts_beyond_int32_stay_too_large():
    """2.24 billion bits, 280 MB."""
    words = np.full((70_000, 1000), 0xFFFFFFFF, np.uint32)
    sizes = [((n,), np.int32) for n in (len(words) + 1, 5, 5)]
    offsets, *_ = run("sgap_bitmap_entries_v1", [words], sizes, {}, native.isa(), 2)
    right = np.minimum(np.arange(len(words) + 1) * 32_000, INT32_MAX)
    np.testing.assert_array_equal(offsets, right)


def test_counts_in_plain_jax_stay_too_large(monkeypatch):
    """Sums of counts stop at the greatest int32; here at 100, which fewer bits reach."""
    monkeypatch.setattr(primitives.checks, "INT32_MAX", 100)
    words = bitmap(jnp.asarray(mask_of((30, 40), 1)))
    offsets, *_ = primitives._entries_of_one(words, nse=50)
    np.testing.assert_array_equal(offsets, np.minimum(np.arange(31) * 40, 100))


def test_errors():
    mask, words = np.ones((2, 40), bool), np.ones((2, 2), np.uint32)
    ints = lambda *sizes: [((size,), np.int32) for size in sizes]
    cases = [
        ("of_mask", mask, [((2, 1), np.uint32)], "words: unlike mask"),
        ("of_mask", words, [((2, 1), np.uint32)], "mask: expected booleans"),
        ("entries", words, ints(2, 5, 5), "offsets: unlike words"),
        ("entries", words, ints(3, 4, 5), "rows: unlike words"),
        ("entries", mask, ints(3, 5, 5), "expected words uint32"),
    ]
    for target, operand, results, message in cases:
        with pytest.raises(ValueError, match=message):
            run(f"sgap_bitmap_{target}_v1", [operand], results, {}, native.isa())
