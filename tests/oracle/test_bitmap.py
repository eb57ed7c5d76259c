"""Bitmaps, the entries of their bits, and those of a matrix where its numbers make the bits: every
instruction set, and plain JAX."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import cast
from native_call import kernel_isas, run
from selection_oracle import KINDS, normal, same, scores_of
from tolerance import DTYPES

from sgap_jax import select
from sgap_jax.primitives import bitmap as primitives
from sgap_jax.primitives.bitmap import WORD_COLUMNS, bitmap, entries, nonzero
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
        found = entries(words, nse)
        for got, one, want in zip(found, plain, entries_of(mask, nse), strict=True):
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(one[0], want)


def test_in_a_batch():
    masks = np.stack([mask_of((5, 40), density) for density in (0, 0.2, 1)])
    found = jax.jit(jax.vmap(lambda x: entries(bitmap(x), 30)))(masks)
    for i, mask in enumerate(masks):
        for got, want in zip(found, entries_of(mask, 30), strict=True):
            np.testing.assert_array_equal(got[i], want)


def test_exported_for_any_batch():
    names = ("sgap_bitmap_of_mask_v1", "sgap_bitmap_entries_v1")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    f = jax.jit(jax.vmap(lambda x: entries(bitmap(x), 30)))
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


LIMITS = np.array([2**31 - 1, 0, -5, 1, 33, 64, -(2**31), 90, 1 << 20, 90, 90], np.int32)
BOUND_KINDS = [*KINDS, "subnormal"]


def wide_of(dtype):
    return np.float64 if dtype == "float64" else np.float32


def bounds_of(dtype):
    """Bounds of 11 rows, two of them subnormal."""
    step = np.finfo(wide_of(dtype)).smallest_subnormal
    bounds = [0.3, -0.0, 0.0, step, -3 * step, np.nan, np.inf, -np.inf, -1.5, 0.0, 2 * step]
    return np.array(bounds, wide_of(dtype))


def reaching(scores, least, limits, kept):
    """Where scores [m, n] reach the bounds [m], or are kept, by NumPy in float64."""
    wide = np.float64(scores)
    inside = (wide >= np.float64(least)[:, None]) & (wide > -np.inf)
    if kept.shape[1]:
        inside |= kept
    return inside & (np.arange(wide.shape[1]) < limits[:, None])


def bound_operands(kind, dtype, batch=2, n=90, kept=False):
    """(scores, least, limits, kept) with each bound, in a batch whose elements differ in all."""
    m, rng = len(LIMITS), np.random.default_rng(len(dtype))
    if kind == "subnormal":
        step = np.finfo(cast(0, dtype).dtype if dtype != "bfloat16" else np.float32)
        one = np.round(normal(m, n) * 3) * np.float64(step.smallest_subnormal)
        if dtype == "bfloat16":
            one *= 2.0**16
    else:
        one = scores_of(kind, m, n)
    scores = np.stack([cast(one, dtype)] * batch)
    scores[1:] = np.roll(scores[1:], 7, axis=2)
    least = np.stack([np.roll(bounds_of(dtype), b) for b in range(batch)])
    limits = np.stack([np.roll(LIMITS, 2 * b) for b in range(batch)])
    return scores, least, limits, rng.random((batch, m, n if kept else 0)) < 0.1


def masks_reached(operands):
    return np.stack([reaching(*own) for own in zip(*operands, strict=True)])


def stored_of(x, mask, nse):
    """(values, offsets, columns) of one matrix where the mask is set, by NumPy."""
    offsets, rows, columns = entries_of(mask, nse)
    count = min(int(offsets[-1]), nse)
    values = np.zeros(nse, x.dtype)
    values[:count] = x[rows.astype(int)[:count], columns.astype(int)[:count]]
    return values, offsets, columns


def sizes_of(x, nse):
    batch, m, _ = x.shape
    return [((batch, nse), x.dtype), ((batch, m + 1), np.int32), ((batch, nse), np.int32)]


def check_entries(found, x, masks, nse):
    for got, want in zip(zip(*found, strict=True), zip(x, masks, strict=True), strict=True):
        values, offsets, columns = stored_of(*want, nse)
        assert got[0].tobytes() == values.tobytes()
        same(got[1:], (offsets, columns))


def packed(masks):
    """The words of masks of whole bytes, by NumPy."""
    whole = np.pad(masks, [(0, 0)] * (masks.ndim - 1) + [(0, -masks.shape[-1] % WORD_COLUMNS)])
    return np.packbits(whole, axis=-1, bitorder="little").view("<u4")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", BOUND_KINDS)
def test_scores_that_reach_a_bound(kind, isa):
    for dtype, kept in itertools.product(DTYPES, (False, True)):
        operands = bound_operands(kind, dtype, kept=kept)
        scores, masks = operands[0], masks_reached(operands)
        words = packed(masks)
        sizes = [(words.shape, np.uint32)]
        for threads in (1, -1):
            (found,) = run("sgap_bitmap_of_scores_v1", operands, sizes, {}, isa, threads)
            np.testing.assert_array_equal(found, words)
            for nse in {1, int(masks[0].sum()), 2 * masks[0].size}:
                found = run(
                    "sgap_reached_csr_v1", operands, sizes_of(scores, nse), {}, isa, threads
                )
                check_entries(found, scores, masks, nse)


@pytest.mark.parametrize("shared", [(), (0,), (3,), (0, 3)])
def test_shared_scores_of_several_tasks(shared):
    """Of each of three elements, in two orders and by several threads; what all share is one."""
    operands = list(bound_operands("nan", "float32", batch=3, n=200_000, kept=True))
    operands = [np.stack([x[0]] * 3) if i in shared else x for i, x in enumerate(operands)]
    scores, masks = operands[0], masks_reached(operands)
    given = [x[:1] if i in shared else x for i, x in enumerate(operands)]
    for threads in (1, 4, -1):
        sizes = [(packed(masks).shape, np.uint32)]
        (words,) = run("sgap_bitmap_of_scores_v1", given, sizes, {}, native.isa(), threads)
        np.testing.assert_array_equal(words, packed(masks))
        for nse in (int(masks[0].sum()), masks[0].size):
            sizes = sizes_of(scores, nse)
            found = run("sgap_reached_csr_v1", given, sizes, {}, native.isa(), threads)
            check_entries(found, scores, masks, nse)


NUMBERS = [*DTYPES, "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]
NUMBERS += ["uint64", "complex64", "complex128"]


def numbers_of(dtype, *shape):
    """Numbers of which two in three are 0 or -0; others are NaN, subnormal or the least ones."""
    rng = np.random.default_rng(len(dtype))
    size = cast(0, dtype).dtype.itemsize
    parts = (2, size // 2) if dtype.startswith("complex") else (1, size)
    sign = 1 << (8 * parts[1] - 1)
    specials = [0, 0, 0, 0, sign, 1, sign | 1, sign - 1, 3 << (8 * parts[1] - 4)]
    bits = rng.choice(np.array(specials, np.uint64), (*shape, parts[0]), p=[1 / 9] * 9)
    if dtype == "bool":
        return bits[..., 0] == 1
    x = bits.astype(f"uint{8 * parts[1]}").view(cast(0, dtype).dtype)
    return x.reshape(shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_that_are_not_zero(dtype, isa):
    for shape in [(2, 5, 33), (1, 3, 64), (3, 4, 200), (2, 1, 1)]:
        x = numbers_of(dtype, *shape)
        masks = x != 0
        for threads in (1, -1):
            for nse in (2, int(masks[0].sum()), masks[0].size):
                found = run("sgap_nonzero_csr_v1", [x], sizes_of(x, nse), {}, isa, threads)
                check_entries(found, x, masks, nse)


def test_nonzero_of_several_tasks():
    x = np.where(mask_of((2, 3, 200_000), 0.01), 1.5, 0).astype(np.float32)
    for threads in (1, 4, -1):
        for nse in (4000, 8000):
            found = run("sgap_nonzero_csr_v1", [x], sizes_of(x, nse), {}, native.isa(), threads)
            check_entries(found, x, x != 0, nse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_in_jax(dtype):
    """On XLA's threads, which take subnormal numbers for 0, and in plain JAX."""
    for kind, kept in itertools.product(("nan", "subnormal", "zeros"), (False, True)):
        operands = bound_operands(kind, dtype, kept=kept)
        given = [jnp.asarray(x) for x in operands]
        words = packed(masks_reached(operands))
        for shared in (False, True):
            own, right = given, words
            if shared:
                own = [x[:1] if i in (0, 3) else x for i, x in enumerate(given)]
                again = [np.stack([x[0]] * 2) if i in (0, 3) else x for i, x in enumerate(operands)]
                right = packed(masks_reached(again))
            plain = primitives._of_scores_reference(*own, schedule=None)
            np.testing.assert_array_equal(plain, right)
            np.testing.assert_array_equal(primitives.bind_of_scores(*own), right)
            found = primitives.bind_reached(*own, nse=200)
            same_bytes(primitives._reached_reference(*own, nse=200, schedule=None), found)
    plain = primitives._nonzero_reference(given[0], nse=200, schedule=None)
    same_bytes([x[0] for x in plain], nonzero(given[0][0], 200, False))
    plain = primitives._nonzero_reference(given[0][0].T[None], nse=200, schedule=None)
    same_bytes([x[0] for x in plain], nonzero(given[0][0], 200, True))


def same_bytes(found, right):
    """NaN equals NaN, and 0 is not -0."""
    for got, want in zip(found, right, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("mapped", [(0,), (1,), (2,), (3,), (0, 1), (1, 3), (0, 1, 2, 3)])
def test_some_operands_are_mapped(mapped):
    operands = [jnp.asarray(x) for x in bound_operands("nan", "float32", batch=3, kept=True)]
    given = [x if i in mapped else x[0] for i, x in enumerate(operands)]
    axes = [0 if i in mapped else None for i in range(4)]

    def of(*own):
        own = [x[None] for x in own]
        return primitives.bind_of_scores(*own), *primitives.bind_reached(*own, nse=300)

    found = jax.vmap(of, in_axes=axes)(*given)
    for b in range(3):
        one = of(*(x[b] if i in mapped else x for i, x in enumerate(given)))
        same_bytes([x[b] for x in found], one)


def test_scores_that_a_batch_shares_are_not_copied():
    scores, bounds = jnp.zeros((256, 512)), jnp.arange(16.0)
    f = jax.jit(jax.vmap(lambda x, at: select.threshold(x, at, nse=9).values, in_axes=(None, 0)))
    memory = f.lower(scores, bounds).compile().memory_analysis().temp_size_in_bytes
    assert memory < scores.nbytes


def test_dense_entries_are_exported_for_any_batch():
    names = ("sgap_reached_csr_v1", "sgap_nonzero_csr_v1")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    limits, kept = jnp.full((1, 5), 40, jnp.int32), jnp.zeros((1, 5, 0), bool)

    def one(x):
        return primitives.bind_reached(
            x[None], jnp.zeros((1, 5), x.dtype), limits, kept, nse=90
        ), nonzero(x, 150, False)

    f = jax.jit(jax.vmap(one))
    any_batch = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 5, 40), np.float32)
    exported = jax.export.export(f, disabled_checks=allowed)(any_batch)
    assert all(name in exported.mlir_module() for name in names)
    x = np.random.default_rng(0).standard_normal((3, 5, 40), dtype=np.float32)
    jax.tree.map(np.testing.assert_array_equal, exported.call(x), f(x))


def test_matrices_without_places():
    for shape in [(2, 0, 5), (2, 3, 0), (0, 3, 5)]:
        x = np.ones(shape, np.float32)
        rows, none = np.ones(shape[:2], np.float32), np.zeros((*shape[:2], 0), bool)
        operands = x, rows, rows.astype(np.int32), none
        for target, given in (("reached", operands), ("nonzero", [x])):
            found = run(f"sgap_{target}_csr_v1", given, sizes_of(x, 4), {}, native.isa())
            assert all(not array.any() for array in found)


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


def test_errors_of_dense_entries():
    x, rows = np.ones((2, 3, 40), np.float32), np.ones((2, 3), np.float32)
    limits, none = rows.astype(np.int32), np.zeros((2, 3, 0), bool)
    good = dict(scores=x, least=rows, limits=limits, kept=none)
    results = dict(zip(("values", "offsets", "columns"), sizes_of(x, 5), strict=True))
    changes = [
        ({"scores": np.ones((2, 3, 40), np.int32)}, "scores: expected float32"),
        ({"scores": np.ones(40, np.float32)}, "scores: expected type"),
        ({"scores": np.ones((3, 3, 40), np.float32)}, "batches of 1 or of 2"),
        ({"least": np.ones((2, 4), np.float32)}, "least: expected"),
        ({"least": np.ones((2, 3), np.float64)}, "least: expected"),
        ({"limits": np.ones((1, 3), np.int32)}, "limits: expected"),
        ({"kept": np.zeros((2, 3, 1), bool)}, "kept: expected none or 40 columns, got 1"),
        ({"kept": np.zeros((2, 3, 2), np.int32)}, "kept: expected type"),
        ({"kept": np.zeros((3, 3, 40), bool)}, "batches of 1 or of 2"),
        ({"values": ((2, 6), np.float32)}, "values: expected"),
        ({"values": ((2, 5), np.float64)}, "values: expected"),
        ({"offsets": ((2, 3), np.int32)}, "offsets: unlike words"),
        ({"columns": ((1, 5), np.int32)}, "columns: unlike words"),
    ]
    for change, message in changes:
        own, made = ({k: change.get(k, v) for k, v in given.items()} for given in (good, results))
        with pytest.raises(ValueError, match=message):
            run("sgap_reached_csr_v1", own.values(), made.values(), {}, native.isa())
    with pytest.raises(ValueError, match="dtype of 1 to 16 bytes"):
        run("sgap_nonzero_csr_v1", [np.ones(4, np.float32)], results.values(), {}, native.isa())
