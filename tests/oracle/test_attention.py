"""sparse_attention against plain loops: every length of vectors, dtype and schedule."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_twin import dense_mask, twin
from battery import BATTERY, cast, from_row_lengths, rounded
from conftest import row_schedule
from tolerance import DTYPES, accumulator_roundoff, assert_within, unit_roundoff
from vector_cases import encoded, vectors

from sgap_jax import (
    BCSR,
    CSR,
    CVS,
    CpuTile,
    OctetTile,
    Reference,
    SparseArray,
    Unfused,
    reference,
    sparse_attention,
)
from sgap_jax.schedules.machine import this_machine

# Chunks of 32 nonzeros split the rows of small problems.
SCHEDULES = [None, CpuTile(nonzeros=32), Reference(), Unfused()]


def operands(shape, heads, key_heads, widths, dtype, seed=0):
    rng, (L, S), (D, Dv) = np.random.default_rng(seed), shape, widths
    sizes = ((2, L, heads, D), (2, S, key_heads, D), (2, S, key_heads, Dv))
    return [rounded(rng.standard_normal(size), dtype) for size in sizes]


def on_tiles(A, dtype, schedule):
    """Whether probabilities may be rounded to bfloat16 before they are multiplied."""
    chosen = isinstance(schedule, OctetTile) or (schedule is None and this_machine().matrix_tiles)
    return chosen and dtype == "bfloat16" and A.format.vector_length in (4, 8, 16, 32)


def bounds(out, lse, v, scores, D, terms, dtype, unfused, tiles=False):
    """Error bounds: rounding of scores (relative to the greatest), of the exponential and of the
    sums; on tiles of probabilities too."""
    u = unit_roundoff(dtype) if unfused else accumulator_roundoff(dtype)
    u = min(u, accumulator_roundoff(dtype)) if not unfused else max(u, 2**-24 if u > 1e-12 else u)
    slack = (8 * (D + 4) * scores + 4 * terms + 40) * (accumulator_roundoff(dtype) + 2**-53)
    peak = np.abs(v).max(initial=0)
    share = slack + (unit_roundoff(dtype) if tiles else 0)
    return share * peak + 1.01 * unit_roundoff(dtype) * np.abs(out) + 1e-45, slack


def is_right(A, case, dtype, *, heads=2, key_heads=1, widths=(8, 5), schedule=None, **options):
    q, k, v = operands(case.shape, heads, key_heads, widths, dtype)
    scale = options.get("scale") or widths[0] ** -0.5
    causal, lengths = options.get("is_causal", False), options.get("key_value_seq_lengths")
    call = {**options, "schedule": schedule, "return_lse": True}
    found = sparse_attention(*(cast(x, dtype) for x in (q, k, v)), A, **call)
    out, lse = map(np.asarray, found)  # JAX would compile each index of each shape
    assert out.dtype == dtype and out.shape == (*q.shape[:3], widths[1])
    assert lse.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
    terms = np.diff(case.row_offsets).max(initial=0)
    sinks = options.get("sinks")
    for b in range(2):
        end = np.inf if lengths is None else np.asarray(lengths)[b]
        for h in range(heads):
            mine = (q[b, :, h], *(x[b, :, h * key_heads // heads] for x in (k, v)))
            expected = reference.attention(
                case.row_offsets,
                case.column_indices,
                *mine,
                scale,
                sink=-np.inf if sinks is None else float(sinks[h]),
                seen=lambda i, j, end=end: j < end and (j <= i or not causal),
            )
            size = abs(scale) * (np.abs(mine[0]).max(initial=0) * np.abs(mine[1]).max(initial=0))
            given = (mine[2], size, widths[0], terms, dtype, False, on_tiles(A, dtype, schedule))
            out_bound, slack = bounds(*expected, *given)
            assert_within(out[b, :, h], expected[0], out_bound)
            empty = np.isneginf(expected[1])
            np.testing.assert_array_equal(np.isneginf(lse[b, :, h]), empty)
            finite = np.where(empty, 0, expected[1]), np.where(empty, 0, lse[b, :, h])
            np.testing.assert_allclose(*finite, atol=slack, rtol=1e-6)


LENGTHS = (1, 2, 3, 4, 16, 20, 32)
# Every matrix in CSR and in vectors of 8; the other lengths of vectors take turns.
MATRICES = [
    (name, length)
    for i, name in enumerate(BATTERY)
    for length in (None, 8, LENGTHS[2 * i % 7], LENGTHS[(2 * i + 1) % 7])
]


@pytest.mark.seconds(check=4, test=8)
@pytest.mark.parametrize(("name", "length"), MATRICES)
def test_battery(name, length):
    if length is None:
        case = BATTERY[name]
        arrays = (case.row_offsets, case.column_indices)
        A = SparseArray.from_arrays(np.ones(case.nnz, np.float32), *arrays, shape=case.shape)
    else:
        arrays, case, _ = encoded(BATTERY[name], length)
        A = vectors(arrays, case, "float32")
    draw = np.random.default_rng(list(BATTERY).index(name) * 64 + (length or 0))
    schedules = (None, CpuTile(nonzeros=32)) if length not in (1, 4) else SCHEDULES
    for schedule in schedules:
        widths = tuple(int(w) for w in draw.choice([1, 3, 8, 16, 17, 32, 64, 80], 2))
        heads = [(1, 1), (2, 2), (4, 2), (3, 1)][draw.integers(4)]
        options = dict(heads=heads[0], key_heads=heads[1], widths=widths)
        is_right(A, case, str(draw.choice(DTYPES)), schedule=schedule, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_options(schedule, dtype):
    arrays, case, _ = encoded(BATTERY["every_length"], 4)
    A = vectors(arrays, case, "float32")
    sinks = jnp.asarray([0.5, -jnp.inf, 3.0, -2.0], "float32")
    common = dict(heads=4, key_heads=2, schedule=schedule)
    is_right(A, case, dtype, **common, sinks=sinks)
    is_right(A, case, dtype, **common, is_causal=True)
    lengths = jnp.asarray([5, 0], jnp.int32)
    is_right(A, case, dtype, **common, key_value_seq_lengths=lengths, is_causal=True, sinks=sinks)
    is_right(A, case, dtype, **common, scale=-1.5)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("length", [None, 4])
def test_bias_of_entries(length, schedule):
    mask = np.random.default_rng(0).random((22, 19)) < 0.3
    A = SparseArray.from_dense(
        mask.astype(np.float32), format=CSR if length is None else CVS(length)
    )
    q, k, v = (cast(x, "float32") for x in operands(A.shape, 2, 1, (8, 5), "float32"))
    rng = np.random.default_rng(1)
    for lead in ((), (2,), (1, 2), (2, 1), (2, 2)):
        values = rng.standard_normal((*lead, *A.values.shape)).astype(np.float32)
        values[rng.random(values.shape) < 0.2] = -np.inf
        out, lse = sparse_attention(
            q, k, v, A, bias=jnp.asarray(values), return_lse=True, schedule=schedule
        )
        rows, columns = (np.asarray(x) for x in A.coordinates())
        inside = rows < A.shape[0]
        dense = np.full((*lead, *A.shape), -np.inf, np.float32)
        dense[..., rows[inside], columns[inside]] = values.reshape(*lead, -1)[..., inside]
        dense = dense.reshape(*(1,) * (4 - dense.ndim), *dense.shape)
        dense = np.broadcast_to(dense, (2, 2, *A.shape))
        finite = np.where(np.isneginf(dense), 0, dense)
        with jax.numpy_rank_promotion("allow"):
            expected = jax.jit(twin)(q, k, v, ~np.isneginf(dense), bias=finite)
        np.testing.assert_allclose(out, expected[0], atol=2e-6)
        np.testing.assert_allclose(lse, expected[1], atol=2e-6)


def test_a_pattern_for_each_head():
    rng = np.random.default_rng(0)
    masks = [rng.random((24, 20)) < density for density in (0.1, 0.5, 0.0, 0.3)]
    formats = [CSR, CVS(4), CVS(8), CSR]
    patterns = [
        SparseArray.from_dense(m.astype(np.float32), format=f)
        for m, f in zip(masks, formats, strict=True)
    ]
    q, k, v = (cast(x, "float32") for x in operands((24, 20), 4, 2, (8, 5), "float32"))
    bias = [jnp.asarray(rng.standard_normal(A.values.shape), "float32") for A in patterns]
    sinks = jnp.arange(4, dtype=jnp.float32)
    out, lse = sparse_attention(q, k, v, patterns, bias=bias, sinks=sinks, return_lse=True)
    for h, (A, b) in enumerate(zip(patterns, bias, strict=True)):
        one = slice(h, h + 1), slice(h // 2, h // 2 + 1)
        mine = (q[:, :, one[0]], k[:, :, one[1]], v[:, :, one[1]])
        alone = sparse_attention(*mine, A, bias=b, sinks=sinks[one[0]], return_lse=True)
        np.testing.assert_array_equal(out[:, :, one[0]], alone[0])
        np.testing.assert_array_equal(lse[:, :, one[0]], alone[1])
    same = sparse_attention(q, k, v, (patterns[1],) * 4, bias=(bias[1],) * 4)
    np.testing.assert_array_equal(same, sparse_attention(q, k, v, patterns[1], bias=bias[1]))


def test_as_jax_nn_without_a_batch_axis():
    mask = np.tril(np.random.default_rng(0).random((24, 24)) < 0.5) | np.eye(24, dtype=bool)
    A = SparseArray.from_dense(mask.astype(np.float32))
    q, k, v = (cast(x[0], "float32") for x in operands(A.shape, 4, 2, (8, 8), "float32"))
    out, lse = sparse_attention(q, k, v, A, return_lse=True)
    expected = jax.nn.dot_product_attention(
        q, k, v, mask=jnp.asarray(mask)[None, None], return_residual=True
    )
    np.testing.assert_allclose(out, expected[0], atol=2e-6)
    np.testing.assert_allclose(lse, expected[1].reshape(lse.shape), atol=2e-6)


def test_is_causal_cuts_vectors():
    A = SparseArray.from_dense(np.ones((40, 40), np.float32), format=CVS(8))
    q, k, v = (cast(x, "float32") for x in operands(A.shape, 2, 2, (16, 16), "float32"))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    out = sparse_attention(q, k, v, A, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    assert dense_mask(A, is_causal=True).sum() == 40 * 41 / 2


@pytest.mark.parametrize("schedule", [None, Unfused()], ids=str)
def test_large_scores_and_nan(schedule):
    A = SparseArray.from_dense(np.array([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1]], np.float32))
    k = jnp.asarray([1e4, -1e4, jnp.nan, 3e4], "float32")[:, None, None]
    q, v = jnp.ones((3, 1, 1), "float32"), jnp.arange(4.0, dtype="float32")[:, None, None]
    out, lse = sparse_attention(q, k, v, A, schedule=schedule, return_lse=True)
    np.testing.assert_allclose(out[:, 0, 0], [3, np.nan, 3])
    np.testing.assert_allclose(lse[:, 0], [3e4, np.nan, 3e4])


@pytest.mark.parametrize("length", [None, 8])
def test_the_bits_are_those_of_each_call(length):
    case = from_row_lengths("skewed", 300, [300, 3, 0, 40] * 8)
    mask = np.zeros(case.shape, np.float32)
    mask[case.rows, case.column_indices] = 1
    A = SparseArray.from_dense(mask, format=CSR if length is None else CVS(length))
    q, k, v = (cast(x, "float32") for x in operands(A.shape, 4, 2, (32, 16), "float32"))

    @jax.jit
    def step(q, k, v):
        f = lambda q, k, v: sparse_attention(q, k, v, A, schedule=CpuTile(nonzeros=128))
        out, pullback = jax.vjp(f, q, k, v)
        return out, *pullback(out)

    first = step(q, k, v)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, first, step(q, k, v))


def test_backends(backend):
    arrays, case, _ = encoded(BATTERY["empty_rows_at_both_ends"], 4)
    A = vectors(arrays, case, "float32")
    is_right(A, case, "float32", schedule=row_schedule(backend), sinks=jnp.ones(2, "float32"))


def test_nothing_of_the_size_of_the_pattern_is_formed():
    A = SparseArray.from_dense(np.ones((64, 64), np.float32), format=CVS(8))
    q, k, v = (cast(x, "float32") for x in operands(A.shape, 2, 1, (16, 16), "float32"))
    f = jax.grad(lambda q, k, v: sparse_attention(q, k, v, A).sum(), (0, 1, 2))
    text = jax.jit(f).lower(q, k, v).as_text()
    assert text.count("custom_call @sgap_attention_cvs_v1") == 1
    assert text.count("custom_call @sgap_attention_backward_cvs_v1") == 1
    assert "sddmm" not in text and "x4096" not in text and "x512x8" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(offsets=3), "offsets"),
        (dict(k=(1, 9, 1, 3)), "k"),
        (dict(k=(2, 9, 1, 4), v=(1, 9, 1, 4)), "k: expected a batch"),
        (dict(v=(1, 8, 1, 4)), "v"),
        (dict(k=(1, 9, 3, 4)), "v"),
        (dict(q=(1, 6, 2, 5000), k=(1, 9, 1, 5000)), "at most 4096"),
        (dict(bias=(1, 2, 9)), "bias"),
        (dict(lengths=(2, 1)), "lengths"),
        (dict(sinks=(1, 3)), "sinks"),
        (dict(lse=(1, 6, 1)), "lse"),
        (dict(pack=False, q=(1, 6, 2, 5), k=(1, 9, 1, 5)), "pack"),
        (dict(vector_length=0), "vectors"),
        (dict(chunk_nonzeros=0), "chunk_nonzeros"),
        (dict(key_pieces=0), "key_pieces"),
        (dict(pieces=0), "pieces"),
        (dict(dk=(1, 9, 2, 4)), "dk"),
        (dict(dout=(1, 6, 2, 5)), "dout"),
        (dict(dbias=(1, 2, 9)), "dbias"),
    ],
)
def test_a_handler_refuses_what_does_not_fit(change, words):
    sizes = dict(q=(1, 6, 2, 4), k=(1, 9, 1, 4), v=(1, 9, 1, 4), bias=(1, 0), sinks=(1, 0))
    sizes |= dict(lengths=(1, 0), offsets=4, indices=5, lse=(1, 6, 2), out=(1, 6, 2, 4))  # V = 2
    sizes |= dict(dq=(1, 6, 2, 4), dk=(1, 9, 1, 4), dv=(1, 9, 1, 4), dbias=(1, 2, 5, 2))
    sizes |= dict(dout=(1, 6, 2, 4), dlse=(1, 6, 2)) | change
    attrs = dict(vector_length=2, chunk_nonzeros=64, pieces=1, scale=1.0, is_causal=False)
    attrs = {**attrs, "key_pieces": 1, "wrt_bias": True, "pack": True, **change}
    integers = ("lengths", "offsets", "indices")
    array = lambda name: jnp.zeros(sizes[name], jnp.int32 if name in integers else jnp.float32)
    forward = ("q", "k", "v", "bias", "sinks", "lengths", "offsets", "indices")
    backward = ("dout", "dlse", "q", "k", "v", "bias", "lengths", "out", "lse", "offsets")
    backward = (*backward, "indices")
    is_backward = bool({"pieces", "dk", "dout", "dbias"} & set(change))
    names, results = (
        (backward, ("dq", "dk", "dv", "dbias")) if is_backward else (forward, ("out", "lse"))
    )
    unused = {"chunk_nonzeros", "key_pieces"} if is_backward else {"pieces", "wrt_bias"}
    kinds = {int: np.int64, float: np.float64, bool: bool}
    named = {"vector_length", "chunk_nonzeros", "key_pieces", "pieces", "scale", "is_causal"}
    named |= {"wrt_bias", "pack"}
    given = {n: kinds[type(x)](x) for n, x in attrs.items() if n in named - unused}
    target = f"sgap_attention{'_backward' if is_backward else ''}_cvs_v1"
    shapes = [jax.ShapeDtypeStruct(sizes[name], jnp.float32) for name in results]
    with pytest.raises(Exception, match=f"attention.*{words}"):
        jax.ffi.ffi_call(target, shapes)(*map(array, names), **given)


@pytest.mark.parametrize("shape", [(16, 12), (19, 13)])
def test_patterns_of_blocks(shape):
    mask = np.random.default_rng(2).random(shape) < 0.1
    A = SparseArray.from_dense(mask.astype(np.float32), format=BCSR(4, 3))
    q, k, v = (cast(x, "float32") for x in operands(shape, 2, 1, (8, 5), "float32"))
    rows, columns = (np.asarray(x) for x in A.coordinates())
    seen = np.zeros(shape, bool)
    seen[rows[rows < shape[0]], columns[rows < shape[0]]] = True
    expected = sparse_attention(q, k, v, SparseArray.from_dense(seen.astype(np.float32)))
    np.testing.assert_allclose(sparse_attention(q, k, v, A), expected, atol=1e-5)
    by_head = sparse_attention(q, k, v, [A, A.asformat(CVS(4))])
    np.testing.assert_allclose(by_head, expected, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"with a bias; pattern.asformat\(CVS\(4\)\)"):
        sparse_attention(q, k, v, A, bias=A.values)


@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_lengths_below_zero_are_none(schedule):
    A = SparseArray.from_dense(np.ones((3, 4), np.float32))
    q, k, v = (cast(x, "float32") for x in operands(A.shape, 1, 1, (8, 5), "float32"))
    lengths = jnp.asarray([-3, 0], jnp.int32)
    out = sparse_attention(q, k, v, A, key_value_seq_lengths=lengths, schedule=schedule)
    np.testing.assert_array_equal(out, 0)


WIDE = {  # more keys than int32 counts; for int8 and uint8 their maximum
    "int8": 2**7 - 1,
    "uint8": 2**8 - 1,
    "int32": 2**31 - 1,
    "uint32": 2**31 + 5,
    "int64": 2**32 + 1,
    "uint64": 2**63 + 7,
}


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("schedule", [None, Reference()], ids=str)
def test_lengths_beyond_the_keys_are_all(schedule, dtype, x64):
    with jax.enable_x64(x64):
        A = SparseArray.from_dense(np.ones((3, 4), np.float32))
        q, k, v = (cast(x, "float32") for x in operands(A.shape, 1, 1, (8, 8), "float32"))
        attend = jax.jit(partial(sparse_attention, q, k, v, A, schedule=schedule))
        expected = attend(key_value_seq_lengths=np.asarray([4, 2], np.int32))
        with jax.numpy_dtype_promotion("standard"):
            dense = jax.nn.dot_product_attention(
                q, k, v, key_value_seq_lengths=jnp.asarray([4, 2], jnp.int32)
            )
        np.testing.assert_allclose(expected, dense, atol=1e-6)
        lengths = np.asarray([WIDE[dtype], 2], dtype)
        captured = jax.jit(lambda: sparse_attention(q, k, v, A, key_value_seq_lengths=lengths))
        np.testing.assert_allclose(captured(), expected, atol=1e-6)
        for n in (lengths, [int(WIDE[dtype]), 2] if dtype != "uint64" else lengths):
            out = sparse_attention(q, k, v, A, key_value_seq_lengths=n, schedule=schedule)
            np.testing.assert_allclose(out, expected, atol=1e-6)
        if x64 or lengths.itemsize < 8:  # without x64 there are no 64-bit tracers
            np.testing.assert_array_equal(attend(key_value_seq_lengths=lengths), expected)


@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_lengths_far_below_zero_are_none(dtype):
    A = SparseArray.from_dense(np.ones((3, 4), np.float32))
    q, k, v = (cast(x, "float32") for x in operands(A.shape, 1, 1, (8, 5), "float32"))
    lengths = jnp.full(2, np.iinfo(dtype).min, dtype)
    attend = lambda n: sparse_attention(q, k, v, A, key_value_seq_lengths=n)  # noqa: E731
    np.testing.assert_array_equal(attend(lengths), 0)
    np.testing.assert_array_equal(jax.jit(attend)(lengths), 0)
    listed = jax.jit(lambda n: attend([n, n]))(jnp.asarray(1, dtype))
    np.testing.assert_array_equal(listed, attend(jnp.ones(2, jnp.int32)))


def test_heads_too_wide_for_the_kernels_say_so():
    A = SparseArray.from_dense(np.ones((2, 2), np.float32))
    x = jnp.ones((1, 2, 1, 5000), jnp.float32)
    with pytest.raises(NotImplementedError, match="up to 4096 features, got 5000; .*Unfused"):
        sparse_attention(x, x, x, A)
    np.testing.assert_allclose(sparse_attention(x, x, x, A, schedule=Unfused()), 1, rtol=1e-6)
