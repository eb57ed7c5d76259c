"""spmm and sddmm on column vectors: every length, width, dtype and schedule meets some matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths
from spmm_oracle import dense_operand, oracle
from tolerance import DTYPES, assert_within
from vector_cases import encoded, sddmm_is_right, spmm_is_right, vectors

from sgap_jax import CVS, CpuTile, Reference, choose_schedule, sddmm, spmm
from sgap_jax.runtime.native import native
from sgap_jax.schedules import Problem
from sgap_jax.schedules.cpu import scatter

LENGTHS = [1, 2, 3, 4, 8, 16]
COLUMNS = [0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 64, 100, 130]
SCHEDULES = [None, CpuTile(columns=16, nonzeros=64, packed=True)]
lengths = pytest.mark.parametrize("length", LENGTHS)


@pytest.mark.seconds(check=4, test=8)
@lengths
@pytest.mark.parametrize("name", BATTERY)
def test_battery(name, length):
    arrays, case, place = encoded(BATTERY[name], length)
    draw = np.random.default_rng(list(BATTERY).index(name) * 32 + length)
    for schedule in SCHEDULES:
        dtypes = [str(dtype) for dtype in draw.choice(DTYPES, 3)]
        sizes = [int(size) for size in draw.choice(COLUMNS, 3)]
        spmm_is_right(arrays, case, dtypes[0], sizes[0], False, schedule)
        spmm_is_right(arrays, case, dtypes[1], sizes[1], True, schedule)
        sddmm_is_right(arrays, case, place, dtypes[2], sizes[2], schedule, draw.random() < 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [2, 5, 8, 16, 32])
def test_every_width(length, dtype):
    arrays, case, place = encoded(BATTERY["every_length"], length)
    for i, n in enumerate(COLUMNS[dtype != "float32" :: 1 if dtype == "float32" else 3]):
        spmm_is_right(arrays, case, dtype, n, False)
        spmm_is_right(arrays, case, dtype, n, True)
        sddmm_is_right(arrays, case, place, dtype, n, weighted=i % 2 == 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [2, 4, 8, 12, 16])
def test_few_columns(length, dtype):
    """Block rows of every remainder, the last one short, also in pieces and in narrower tiles."""
    lengths = np.repeat([50, 0, 1, 2, 3, 4, 5, 80, 7], length)[:-1]
    arrays, case, _ = encoded(from_row_lengths("few", 90, lengths), length)
    for n in (1, 4):
        cut = CpuTile(nonzeros=7 * length)
        for schedule in (None, cut, CpuTile(columns=3), CpuTile(columns=n, packed=True)):
            spmm_is_right(arrays, case, dtype, n, False, schedule)
            spmm_is_right(arrays, case, dtype, n, True, schedule)
    for n in (2, 8):
        for schedule in (None, cut, CpuTile(columns=3), CpuTile(columns=n, packed=True)):
            spmm_is_right(arrays, case, dtype, n, True, schedule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2])
def test_sampled_products_by_windows_of_columns(length, dtype):
    """A pattern dense enough for this path, with rows of Y of 1 kB: some 50 columns in a window."""
    arrays, case, place = encoded(from_row_lengths("dense", 210, [130, 0, 7, 201, 90] * 5), length)
    assert 3 * case.nnz > case.shape[0] * case.shape[1]
    d = 1024 // np.dtype(jnp.dtype(dtype)).itemsize
    for schedule, weighted in ((CpuTile(), False), (CpuTile(nonzeros=300), True)):
        sddmm_is_right(arrays, case, place, dtype, d + 3, schedule, weighted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [2, 4, 8, 21, 32])
def test_sampled_products_of_block_rows_of_few_and_many_vectors(length, dtype):
    """For many vectors X is transposed, up to 512 columns; short rows are unrolled."""
    lengths = [50] * 40 + [1] * 16 + [0] * 8 + [30] * 13
    arrays, case, place = encoded(from_row_lengths("uneven", 90, lengths), length)
    for d in (32, 64, 101) if length < 32 else (37, 515):
        sddmm_is_right(arrays, case, place, dtype, d)
        if d in (64, 37):
            sddmm_is_right(arrays, case, place, dtype, d, weighted=True)
    A, rng = vectors(arrays, case, dtype), np.random.default_rng(0)
    X, Y = (cast(rng.standard_normal((n, 64)), dtype) for n in case.shape)
    chunks = (CpuTile(), CpuTile(nonzeros=7 * length))
    np.testing.assert_array_equal(*(sddmm(A, X, Y, schedule=chunk).values for chunk in chunks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [2, 5, 8, 16])
def test_the_transpose_by_rows_in_pieces(length, dtype):
    arrays, case, _ = encoded(from_row_lengths("tall", 24, [12] * 601), length)
    for n, schedule in ((40, None), (33, CpuTile(columns=16)), (130, CpuTile(columns=24))):
        of = Problem("spmm", case.shape[::-1], case.nnz, n, dtype=dtype, permuted=True)
        assert scatter(of, schedule or CpuTile())[1] > 1
        spmm_is_right(arrays, case, dtype, n, True, schedule)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("length", [2, 4, 7, 8, 16])
def test_block_rows_of_more_vectors_than_are_widened_at_once(length, dtype):
    """Those that begin where it ends, that go beyond, and that take more than two; of several
    passes over the columns, which share four times as many, and of one."""
    lengths = [260, 0, 64, 65, 1, 128, 63, 63, 63, 1030, 512, 200]
    arrays, case, _ = encoded(from_row_lengths("long", 1040, np.repeat(lengths, length)), length)
    assert np.diff(arrays[0]).max() > 2 * 4 * 128
    for n, schedule in ((12, None), (72, CpuTile(columns=72))):
        spmm_is_right(arrays, case, dtype, n, False, schedule)
        spmm_is_right(arrays, case, dtype, n, True, schedule)
    spmm_is_right(arrays, case, dtype, 33, False)
    spmm_is_right(arrays, case, dtype, 7, True, CpuTile(columns=7, packed=True))


@pytest.mark.parametrize("length", [2, 16])
def test_results_larger_than_the_caches(length):
    """Some block rows take all their columns before the next ones do, to the same bits."""
    lengths = np.repeat(np.resize([3, 0, 1, 2, 7], 4096 // length), length)[:-1]
    arrays, case, _ = encoded(from_row_lengths("large", 40, lengths), length)
    B = dense_operand(case, 200)
    C = np.asarray(spmm(vectors(arrays, case, "float32"), cast(B, "float32")))
    assert C.nbytes > 3 << 20
    assert_within(C, *oracle(case, "float32", B))
    few = spmm(vectors(arrays, case, "float32"), cast(B[:, :64], "float32"))
    np.testing.assert_array_equal(C[:, :64], few)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", [2, 4, 8, 16])
def test_the_bits_of_few_columns_are_those_of_more(length, dtype):
    if native.isa() == "baseline" and dtype == "float64":
        pytest.skip("eight columns take four registers of two, whose sums have another order")
    lengths = np.repeat([50, 0, 1, 2, 3, 4, 5, 80, 7], length)[:-1]
    arrays, case, _ = encoded(from_row_lengths("few", 90, lengths), length)
    A, schedule = vectors(arrays, case, dtype), CpuTile(columns=8)
    B = cast(dense_operand(case, 8, transpose=True), dtype)
    C = {n: spmm(A, B[:, :n], transpose=True, schedule=schedule) for n in (2, 4, 7, 8)}
    for n in (2, 4, 7):
        np.testing.assert_array_equal(C[n], C[8][:, :n])


def test_the_transpose_by_rows_of_a_batch():
    arrays, case, place = encoded(from_row_lengths("tall", 24, [12] * 601), 8)
    A, B = vectors(arrays, case, "float32"), dense_operand(case, 40, True)
    f = jax.vmap(lambda v: spmm(A.with_values(v), cast(B, "float32"), transpose=True))
    C = f(jnp.stack([A.values, 2 * A.values]))
    for i, scale in enumerate((1, 2)):
        values = scale * arrays[2].reshape(-1)[place]
        assert_within(C[i], *oracle(case, "float32", B, True, values=values))


@pytest.mark.parametrize("length", [3, 8])
def test_as_entries(length):
    arrays, case, place = encoded(BATTERY["padded"], length)
    spmm_is_right(arrays, case, "float32", 5, False, Reference())
    spmm_is_right(arrays, case, "bfloat16", 5, True, Reference())
    sddmm_is_right(arrays, case, place, "float32", 5, Reference())
    sddmm_is_right(arrays, case, place, "float16", 5, Reference(), weighted=True)


@pytest.mark.parametrize("schedule", [*SCHEDULES, Reference()], ids=str)
def test_batches(schedule):
    arrays, case, _ = encoded(BATTERY["one_heavy_row"], 4)
    A, rng = vectors(arrays, case, "float32"), np.random.default_rng(0)
    values = np.where(np.isnan(arrays[2]), np.nan, rng.standard_normal((3, *arrays[2].shape)))
    for transpose in (False, True):
        B = np.stack([dense_operand(case, 20, transpose, seed) for seed in range(3)])
        f = lambda v, B, t=transpose: spmm(A.with_values(v), B, transpose=t, schedule=schedule)
        C = jax.vmap(f)(cast(values, "float32"), cast(B, "float32"))
        for i in range(3):
            own = values[i].reshape(-1)[encoded(BATTERY["one_heavy_row"], 4)[2]]
            assert_within(C[i], *oracle(case, "float32", B[i], transpose, values=own))


@pytest.mark.parametrize("length", [2, 8])
@pytest.mark.parametrize("n", [1, 4, 17, 64])
def test_nan_meets_only_the_vectors_of_its_row(n, length):
    arrays, case, _ = encoded(BATTERY["skewed"], length)
    A = vectors(arrays, case, "float32")
    values = np.asarray(A.values).copy()
    values[::2, 0] = 0  # a zero inside a vector is an entry, and zero times NaN is NaN
    B = dense_operand(case, n).astype(np.float32)
    B[3] = np.nan
    C = np.asarray(spmm(A.with_values(values), B))
    touched = (case.column_indices == 3).nonzero()[0]
    rows = np.isin(np.arange(case.shape[0]), case.rows[touched])
    assert rows.any() and not rows.all()
    np.testing.assert_array_equal(np.isnan(C), np.broadcast_to(rows[:, None], C.shape))


@pytest.mark.parametrize("length", [1, 8])
def test_the_bits_are_those_of_packed_tiles_and_of_each_call(length):
    arrays, case, _ = encoded(BATTERY["skewed"], length)
    A = vectors(arrays, case, "float32")
    B = cast(dense_operand(case, 64), "float32")
    tiles = (CpuTile(columns=32), CpuTile(columns=32, packed=True))
    np.testing.assert_array_equal(*(spmm(A, B, schedule=tile) for tile in tiles))
    B = cast(dense_operand(case, 64, True), "float32")
    product = jax.jit(lambda B: spmm(A, B, transpose=True))
    first = product(B)
    for _ in range(5):
        np.testing.assert_array_equal(first, product(B))


def test_the_transpose_of_an_array():
    arrays, case, _ = encoded(BATTERY["skewed"], 4)
    A = vectors(arrays, case, "float32")
    B = cast(dense_operand(case, 9, True), "float32")
    np.testing.assert_array_equal(spmm(A.T, B), spmm(A, B, transpose=True))
    X, Y = (cast(np.random.default_rng(0).standard_normal((n, 6)), "float32") for n in case.shape)
    np.testing.assert_array_equal(sddmm(A.T, Y, X).values, sddmm(A, X, Y).values)
    assert sddmm(A.T, Y, X).format == CVS(4).transposed


def test_no_entries_are_formed():
    arrays, case, _ = encoded(BATTERY["skewed"], 4)
    A, B = vectors(arrays, case, "float32"), jnp.ones((case.shape[1], 8), jnp.float32)
    f = jax.value_and_grad(lambda v, B: jnp.sum(spmm(A.with_values(v), B)), (0, 1))
    text = jax.jit(f).lower(A.values, B).as_text()
    assert text.count("custom_call @sgap_spmm_cvs_v1") == 2
    assert text.count("custom_call @sgap_sddmm_cvs_v1") == 1
    assert "gather" not in text and "csr" not in text


def test_schedules():
    problem = Problem("spmm", (500, 2048), nnz=40 * 2048, n=256, format="CVS(8)")
    assert choose_schedule(problem) == CpuTile()  # entries would be packed
    text = CpuTile(columns=32).explain(problem)
    assert "chunk of 1024 vectors" in text and "acc[0:8, 0:32]" in text
    few = Problem("spmm", (9, 9), 16, n=4, format="CVS(8)", permuted=True)
    many = dataclasses.replace(few, nnz=81 * 9, n=64)
    assert "permutation[q]" in CpuTile().explain(few)
    assert "piece of 1, for j0 in range(0, 64, 32)" in CpuTile().explain(many)
    assert "values[p, v]" in CpuTile().explain(Problem("sddmm", (9, 9), 16, n=4, format="CVS(8)"))
    small = Problem("sddmm", (512, 512), nnz=1 << 14, n=64, format="CVS(4)")
    chunks = [dataclasses.replace(small, nnz=small.nnz << i) for i in range(4)]
    assert [choose_schedule(p).nonzeros for p in chunks] == [2048, 4096, 4096, 8192]
    assert choose_schedule(dataclasses.replace(chunks[1], format="CSR")) == CpuTile(nonzeros=2048)
    arrays, case, _ = encoded(BATTERY["skewed"], 8)
    B = np.ones((case.shape[1], 8), np.float32)
    A, B = vectors(arrays, case, "float32").astype(jnp.int32), B.astype(np.int32)
    np.testing.assert_array_equal(spmm(A, B), np.asarray(A.todense()) @ B)  # plain JAX
    with pytest.raises(NotImplementedError, match=r"Reference\(\)"):
        spmm(A, B, schedule=CpuTile())


@pytest.mark.parametrize(
    ("target", "change", "words"),
    [
        ("spmm", dict(offsets=3), "offsets"),
        ("spmm", dict(indices=4), "indices"),
        ("spmm", dict(permutation=5), "permutation"),
        ("spmm", dict(transpose=True), "permutation"),
        ("spmm", dict(chunk_nonzeros=0), "chunk_nonzeros"),
        ("sddmm", dict(offsets=3), "offsets"),
        ("sddmm", dict(chunk_nonzeros=-1), "chunk_nonzeros"),
        ("sddmm", dict(weights=(1, 4, 2)), "weights"),
        ("sddmm", dict(weights=(2, 5, 2)), "weights"),
        ("sddmm", dict(scale=(3, 1)), "scale"),
    ],
)
def test_a_handler_refuses_what_does_not_fit(target, change, words):
    sizes = dict(offsets=4, indices=5, permutation=0) | change
    index = lambda name: jnp.zeros(sizes[name], jnp.int32)
    attrs = dict(chunk_nonzeros=np.int64(sizes.get("chunk_nonzeros", 64)))
    x, y = jnp.ones((1, 6, 3), jnp.float32), jnp.ones((1, 9, 3), jnp.float32)  # m = 6, V = 2
    if target == "spmm":
        attrs |= dict(pack=False)
        attrs |= dict(transpose=sizes.get("transpose", False), tile_columns=np.int64(0))
        operands = (jnp.ones((1, 5, 2), jnp.float32), *map(index, ("offsets", "indices")))
        operands, out = (*operands, index("permutation"), y), x
    else:
        factors = [jnp.ones(sizes.get(n, (1, 0)), jnp.float32) for n in ("weights", "scale")]
        operands = (index("offsets"), index("indices"), x, y, *factors)
        out = jnp.ones((1, 5, 2), jnp.float32)
    call = jax.ffi.ffi_call(f"sgap_{target}_cvs_v1", jax.ShapeDtypeStruct(out.shape, out.dtype))
    with pytest.raises(Exception, match=f"{target}: {words}"):
        call(*operands, **attrs)
