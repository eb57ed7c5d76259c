"""The kernels of products of two sparse matrices, run by the emulator: the bits of the CPU's
kernel, and the structure."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, cast, from_row_lengths
from cuda_sources import require_nvrtc, resources_of
from emulated_launch import Counted, emulate
from native_call import run
from tolerance import DTYPES
from unchecked_structures import KINDS, spoiled

from sgap_jax import CSR, Reference, SparseArray, random, spgemm
from sgap_jax.launch.spgemm import (
    count_plan,
    global_slots,
    indices_plan,
    launch_plan,
    pattern_row_sizes,
    row_sizes,
    slots_of_block,
)
from sgap_jax.primitives.spgemm_pattern import Rows, by_size
from sgap_jax.schedules.emulated import Emulated

WORDS = 1024  # of bits and keys, so that few products are many for a warp
SLOTS = 256  # of a block's tables, so that a row of 129 entries is too long for them


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def index_arrays(case):
    return case.row_offsets, case.column_indices


def second(case, n=37):
    """A matrix to multiply a case by, with columns in any order, some of them twice in a row."""
    lengths = np.arange(case.shape[1]) * 7 % 11 * (np.arange(case.shape[1]) % 5 > 0)
    made = from_row_lengths("second", n, list(lengths), seed=3)
    columns = np.random.default_rng(1).permuted(made.column_indices)
    return types.SimpleNamespace(
        shape=made.shape, row_offsets=made.row_offsets, column_indices=columns, values=made.values
    )


# Others run in plain JAX.
NAMES = [
    name
    for name, case in BATTERY.items()
    if 0 not in (*case.shape, case.nnz, second(case).row_offsets[-1])
]


def listed(A, B, pattern, sizes, n):
    """The rows of A B by size, as the lowering lists them."""
    a = Rows(*map(jnp.asarray, index_arrays(A))).well_formed(A.shape[1])
    b = Rows(*map(jnp.asarray, index_arrays(B))).well_formed(n)
    stored = (
        jnp.minimum(jnp.diff(pattern), n)
        if pattern is not None
        else jnp.zeros(A.shape[0], jnp.int32)
    )
    return [np.asarray(x) for x in by_size(a, b, stored, sizes)]


def launched(A, B, C, a, b, n, complete, slots):
    """Values [batch, entries of C], of junk behind the entries too; C is (offsets, indices)."""
    dtype, entries = str(a.dtype), (a.shape[1], b.shape[1], len(C[1]))
    valid = [np.where(np.arange(len(i)) < o[-1], i, -1) for o, i in map(index_arrays, (A, B))]
    rows, begins = listed(A, B, C[0], row_sizes(slots), n)
    batches = len(a), len(b)
    call = launch_plan(dtype, A.shape[0], entries, batches=batches, complete=complete, slots=slots)
    count = global_slots(entries[2], n, slots)
    wide = np.float64 if dtype == "float64" else np.float32
    results = [((max(batches), entries[2]), a.dtype), ((count,), np.int32), ((count,), wide)]
    indices = np.where(np.arange(len(C[1])) < C[0][-1], C[1], -1).astype(np.int32)
    given = [a, b, A.row_offsets, valid[0], B.row_offsets, valid[1], C[0], indices, rows, begins]
    return emulate(call, given, results)[0], np.diff(begins)


def structure(A, B, n, words=WORDS, capacity=None):
    """Offsets and indices of A B by the two launches, and how many rows there are of each size."""
    (m, k), entries = A.shape, (len(A.column_indices), len(B.column_indices))
    rows, begins = listed(A, B, None, pattern_row_sizes(words), n)
    valid = [np.where(np.arange(len(i)) < o[-1], i, -1) for o, i in map(index_arrays, (A, B))]
    given = [x[None] for x in (A.row_offsets, valid[0], B.row_offsets, valid[1], rows, begins)]
    call = count_plan((m, k, n), entries, 1, words=words)
    (counts,) = emulate(call, given, [((1, m), np.int32)])
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    capacity = int(offsets[-1]) if capacity is None else capacity
    call = indices_plan((m, k, n), entries, capacity, 1, words=words)
    (indices,) = emulate(call, [*given, offsets[None]], [((1, capacity), np.int32)])
    return offsets, indices[0], np.diff(begins)


def on_cpu(A, B, C, a, b, n, complete):
    operands = [*index_arrays(A), *index_arrays(B), *C, a, b]
    result = ((max(len(a), len(b)), len(C[1])), a.dtype)
    return run("sgap_spgemm_csr_v1", operands, [result], dict(columns=n, complete=complete), "")[0]


def columns_of(A, B, n):
    arrays = [*index_arrays(A), *index_arrays(B)]
    (offsets,) = run(
        "sgap_spgemm_offsets_v1", arrays, [((A.shape[0] + 1,), np.int32)], dict(columns=n), ""
    )
    result = ((int(offsets[-1]),), np.int32)
    (indices,) = run("sgap_spgemm_indices_v1", [*arrays, offsets], [result], dict(columns=n), "")
    return offsets, indices


def check(name, dtype, slots=SLOTS, batches=(1, 1), way=None):
    A = BATTERY[name]
    B = second(A)
    n, m = B.shape[1], A.shape[0]
    a, b = (
        np.stack([cast(x.values * (i + 1), dtype) for i in range(size)])
        for x, size in zip((A, B), batches, strict=True)
    )
    whole = columns_of(A, B, n)
    mask = from_row_lengths("mask", n, list(np.arange(m) * 3 % 31), seed=5, padding=4)
    every = [(False, index_arrays(mask)), (True, index_arrays(mask)), (True, whole)]
    for complete, C in every if way is None else every[way : way + 1]:
        if len(C[1]):
            found, _ = launched(A, B, C, a, b, n, complete, slots)
            same(found, on_cpu(A, B, C, a, b, n, complete))


def same(found, want):
    np.testing.assert_array_equal(np.float64(found), np.float64(want))


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_the_cpu(name):
    """At a mask, at a plan that lacks places, or at a whole one."""
    at = NAMES.index(name)
    check(name, DTYPES[at % 4], batches=((1, 1), (2, 1), (1, 2))[at % 3], way=at // 2 % 3)


def of_every_size(n=150, seed=0):
    """A [5, 150] and B: rows of C of a few entries, of more, of more than a warp's table has, and
    two of more than a block's."""
    A = from_row_lengths("A", n, [1, 4, 30, 150, 150], seed=seed)
    return A, from_row_lengths("B", n, [3] * n, seed=seed + 1)


def check_sizes(dtype="float32", slots=SLOTS):
    A, B = of_every_size()
    a, b = (cast(x.values, dtype)[None] for x in (A, B))
    C = columns_of(A, B, 150)
    found, sizes = launched(A, B, C, a, b, 150, True, slots)
    same(found, on_cpu(A, B, C, a, b, 150, True))
    return list(sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_size(dtype):
    assert check_sizes(dtype) == [2, 1, 1, 1]
    assert check_sizes(dtype, slots_of_block(dtype))[0] == 0


def check_columns_at_the_end_of_a_table():
    """Columns that all begin their search at the last of six slots."""
    at = np.arange(5000, dtype=np.uint64) * 2654435769 % 2**32 * 6 >> 32
    columns = np.flatnonzero(at == 5)[:3].astype(np.int32)
    one = types.SimpleNamespace(shape=(1, 1), row_offsets=np.int32([0, 1]))
    one.column_indices = np.int32([0])
    B = types.SimpleNamespace(row_offsets=np.int32([0, 3]), column_indices=columns)
    C, a, b = (B.row_offsets, columns), np.float32([[2]]), np.float32([[1, 2, 3]])
    found, _ = launched(one, B, C, a, b, 5000, True, SLOTS)
    np.testing.assert_array_equal(found, [[2, 4, 6]])


def test_columns_at_the_end_of_a_table():
    check_columns_at_the_end_of_a_table()


def test_a_row_of_many_products_takes_more_lanes():
    """Where the mask has few entries: by the products, 512 and 8192."""
    A = from_row_lengths("A", 300, [1, 20, 300], seed=0)
    B = from_row_lengths("B", 300, [30] * 300, seed=1)
    mask = np.int32([0, 2, 4, 6]), np.int32([7, 250, 250, 8, 299, 0])
    a, b = np.float32(A.values)[None], np.float32(B.values)[None]
    found, sizes = launched(A, B, mask, a, b, 300, False, SLOTS)
    assert list(sizes) == [0, 1, 1, 1]
    np.testing.assert_array_equal(found, on_cpu(A, B, mask, a, b, 300, False))


def check_structure(name="skewed", ways=(0, -2)):
    """In room for all, for more, or for fewer entries."""
    A = BATTERY[name]
    B = second(A)
    want = columns_of(A, B, B.shape[1])
    for more in ways:
        capacity = max(len(want[1]) + more, 1)
        offsets, indices, _ = structure(A, B, B.shape[1], capacity=capacity)
        np.testing.assert_array_equal(offsets, want[0])
        both = min(capacity, len(want[1]))
        np.testing.assert_array_equal(indices[:both], want[1][:both])
        assert not indices[both:].any()


@pytest.mark.tier("test")
@pytest.mark.parametrize("name", NAMES[::2])
def test_structures(name):
    check_structure(name, [(0, 5, -2)[NAMES.index(name) // 2 % 3]])


def check_structure_of_every_size(n=70_000):
    """Rows that eight lanes sort, and a warp; bits of several turns."""
    A, B = from_row_lengths("A", 9, [0, 1, 5, 9]), from_row_lengths("B", n, [7] * 8 + [30])
    offsets, indices, sizes = structure(A, B, n)
    want = columns_of(A, B, n)
    for found, right in zip((offsets, indices), want, strict=True):
        np.testing.assert_array_equal(found, right)
    assert list(sizes) == [1, 1, 2]


def test_structures_of_every_size():
    check_structure_of_every_size()


def test_in_jax_with_derivatives_and_batches():
    A, B = random((12, 15), density=0.3, seed=1), random((15, 9), density=0.3, seed=2)
    C, M = A @ B, random((12, 9), density=0.4, seed=3)

    def of(schedule):
        product = lambda a, b, **how: (
            spgemm(A.with_values(a), B.with_values(b), **how, schedule=schedule).values
        )
        loss = lambda a, b: jnp.sum(jnp.sin(product(a, b, plan=C)))
        slope = lambda a, b: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(a, b))
        many = jnp.stack([A.values, -A.values])
        inside = jax.jit(lambda A, B: spgemm(A, B, nse=90, schedule=schedule))(A, B)
        return (
            product(A.values, B.values, mask=M),
            product(A.values, B.values, plan=M),
            jax.jit(jax.grad(slope, (0, 1)))(A.values, B.values),
            jax.jit(jax.vmap(lambda a: product(a, B.values, plan=C)))(many),
            inside.values,
            inside.index_arrays,
            inside.overflow,
        )

    counted = Counted(seed=1)
    found, want = of(Emulated(counted)), of(None)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert {"SpgemmKernel", "SpgemmCountKernel", "SpgemmIndicesKernel"} == set(counted.kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_unchecked_structures(kind):
    """Index arrays that nobody has checked, in values and in structures: as on the CPU."""
    shapes = [(6, 5), (5, 7), (6, 7)]
    made = [spoiled(CSR, shape, kind, 10 * i)[0] for i, shape in enumerate(shapes)]
    values = [np.random.default_rng(0).standard_normal(len(x[1])) for x in made]

    def product(values, arrays, schedule):
        A, B, C = (
            SparseArray.from_arrays(v, *x, shape=shape)
            for v, x, shape in zip(values, arrays, shapes, strict=True)
        )
        whole = spgemm(A, B, nse=42, schedule=schedule)
        return spgemm(A, B, mask=C, schedule=schedule).values, whole.values, whole.index_arrays

    found, want = (
        jax.jit(lambda *x, s=s: product(*x, s))(values, made) for s in (Emulated(emulate), None)
    )
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_it_lowers_to_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    A = random((40, 40), density=0.1, seed=1)

    def text(dtype=jnp.float32, **how):
        product = jax.jit(lambda a, A: spgemm(A.with_values(a), A, **how).values)
        traced = product.trace(A.values.astype(dtype), A.astype(dtype))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    launches = "custom_call @sgap_launch_v1"
    # Three of the product, and three that count its columns for the transpose.
    assert text(mask=A).count(launches) == 1 and text(nse=900).count(launches) == 6
    assert launches not in text(mask=A, schedule=Reference())
    assert launches not in text(jnp.int32, mask=A)
    assert text(mask=A.T).count(launches) == 1


def test_float64_does_not_spill():
    """Other kernels are defaults: tests/conformance/test_default_points.py."""
    source = launch_plan("float64", 90, (70, 70, 70)).source
    for registers, stack, spills in resources_of([source], "sm_100").values():
        assert (stack, spills) == (0, 0) and registers <= 64


def test_plans():
    """A grid by shapes alone, one kernel for all sizes, and memory for long rows where there may be
    any."""
    call = launch_plan("float32", 10, (70, 80, 90), batches=(3, 1), complete=True)
    assert call.grid == (10, 4, 3) and call.scalars == (70, 0, 90, 3, True) and call.zero == (0,)
    assert call.source == launch_plan("float32", 1 << 20, (1, 2, 3)).source
    assert launch_plan("float32", 1 << 20, (1, 2, 3)).grid[0] == 4096
    assert global_slots(10_000, 2048, 4096) == 1 and global_slots(10_000, 2049, 4096) == 20_000
    assert row_sizes(4096).entries[1:] == (2048, 256, 64)
    assert pattern_row_sizes().products[1:] == (512, 64)


PLANTED = [
    ("spgemm", "atomicMin(next, team.lane);", "*next = team.lane;", check_sizes),
    (
        "spgemm",
        "return slot + 1 < slots ? slot + 1 : 0;",
        "return slot + 1;",
        check_columns_at_the_end_of_a_table,
    ),
    ("spgemm", "table.keys = whole.keys + 2 * Size(begin);", "", check_sizes),
    ("row_products", "entry > 0 ? ends[entry - 1] : 0", "0", check_sizes),
    ("spgemm_pattern", "keys[i] != keys[i - 1]", "true", check_structure),
    ("spgemm_pattern", "at + nth < capacity", "true", check_structure),
    ("spgemm_pattern", "Size before = total +", "Size before =", check_structure_of_every_size),
    ("spgemm_pattern", "== ((i & run) == 0)", "", check_structure),
]


@pytest.mark.tier("all")
@pytest.mark.parametrize(("header", "right", "wrong", "test"), PLANTED)
def test_planted_bugs_are_caught(header, right, wrong, test, planted):
    planted(f"{header}.cuh", right, wrong, test)
