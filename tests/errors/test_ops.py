"""Wrong input to an operation: the type of the error, and a message that is enough to mend it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array

from sgap_jax import (
    CSC,
    CVS,
    CpuTile,
    Problem,
    Reference,
    Schedule,
    ScheduleError,
    SparseArray,
    Unfused,
    choose_schedule,
    einsum,
    gsddmm,
    gspmm,
    masks,
    row_max,
    row_sum,
    sddmm,
    sparse_attention,
    sparse_softmax,
    spmm,
    spmv,
)

A = array(BATTERY["every_length"], jnp.float32)  # 34 x 33
M, K = A.shape
B = jnp.ones((K, 4), jnp.float32)
HEADS = jax.vmap(lambda s: A * s)(jnp.arange(3, dtype=jnp.float32))
Q, KEYS = jnp.ones((2, M, 4, 8)), jnp.ones((2, K, 2, 8))


def attend(q=Q, k=KEYS, v=KEYS, pattern=A, **options):
    return sparse_attention(q, k, v, pattern, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: spmm(A.todense(), B), TypeError, ["spmm", "A", "SparseArray"]),
        (lambda: spmm(B.T, A), TypeError, ["spmm", "B @ A"]),
        (lambda: A.with_values(HEADS.values), ValueError, ["values", "got [3,", "jax.vmap"]),
        (lambda: spmm(A, B[1:]), ValueError, ["spmm", "B", "[33, n]", "[32, 4]"]),
        (lambda: spmm(A, B, transpose=True), ValueError, ["spmm", "B", "[34, n]", "[33, 4]"]),
        (lambda: spmm(A, B[:, 0]), ValueError, ["spmm", "B", "[33]"]),
        (lambda: spmm(A, B[None]), ValueError, ["spmm", "B", "[1, 33, 4]"]),
        (lambda: spmm(A, None), TypeError, ["spmm", "B", "None"]),
        (lambda: spmm(A, "B"), TypeError, ["spmm", "B", "'B'"]),
        (lambda: sparse_softmax(A, scale=None), TypeError, ["sparse_softmax", "scale", "None"]),
        (lambda: spmm(A, B, schedule=3), TypeError, ["spmm", "schedule", "int"]),
        (lambda: spmv(A, B), ValueError, ["spmv", "x", "[33]", "[33, 4]"]),
        (lambda: spmv(A.T, B[:, 0]), ValueError, ["spmv", "x", "[34]"]),
        (lambda: sddmm(A, B, B), ValueError, ["sddmm", "X", "[34, d]", "[33, 4]"]),
        (lambda: sddmm(A, jnp.ones((M, 3)), B), ValueError, ["sddmm", "Y", "[33, 3]", "[33, 4]"]),
        (lambda: sddmm(A, jnp.ones((M, 4)), B, scale=jnp.ones(2)), ValueError, ["scale", "[2]"]),
        (lambda: sparse_softmax(A, scale=np.ones(3)), ValueError, ["scale", "[3]"]),
        (lambda: sparse_softmax(B), TypeError, ["sparse_softmax", "SparseArray"]),
        (lambda: sddmm(A, jnp.ones((M, 4)), B, scale=1j), ValueError, ["scale", "complex"]),
        (lambda: sddmm(A, jnp.ones((M, 4)), B, scale="x"), TypeError, ["x"]),
        (lambda: spmm(A, A.T), TypeError, ["spmm", "B", "dense", "SparseArray"]),
        (lambda: A @ A.T.to_scipy(), TypeError, ["B", "dense", "csc_array", "B.todense()"]),
        (lambda: spmm(A, A.T.to_bcoo()), TypeError, ["spmm", "B", "dense", "BCOO"]),
        (lambda: einsum("ij,jk->ik", A, A.T.to_scipy()), TypeError, ["'jk'", "csc_array"]),
        (lambda: A * B, ValueError, ["scalar", "broadcasts to (34, 33)", "(33, 4)"]),
        (lambda: np.asarray(A), TypeError, ["A.todense()"]),
        (
            lambda: sddmm(A, jnp.ones((M, 4)), B, weighted=A.values),
            TypeError,
            ["weighted", "with_values(w)"],
        ),
        (lambda: spmm(HEADS, B), ValueError, ["spmm", "A", "batched, (3,)", "jax.vmap"]),
        (lambda: einsum("ij,jk->ik", HEADS, B), ValueError, ["'ij'", "batched, (3,)"]),
        (lambda: spmm(A, B, schedule=Schedule()), NotImplementedError, ["Schedule"]),
        (lambda: gspmm(B, B), TypeError, ["gspmm", "A", "SparseArray"]),
        (lambda: gspmm(A, B[1:]), ValueError, ["gspmm", "X", "[33, n]", "[32, 4]"]),
        (lambda: gspmm(A, B, transpose=True), ValueError, ["gspmm", "X", "[34, n]"]),
        (lambda: gspmm(A, B, op="pow"), ValueError, ["op", "mul, add, sub, div, copy", "'pow'"]),
        (lambda: gspmm(A, B, reduce=max), ValueError, ["reduce", "sum, mean, max, min", "max"]),
        (lambda: gspmm(A, B, reduce="max", schedule=3), TypeError, ["schedule", "int"]),
        (lambda: gspmm(A, B, reduce="max", schedule=CpuTile(8)), ScheduleError, ["columns"]),
        (lambda: gsddmm(A, B, B), ValueError, ["gsddmm", "X", "[34, d]", "[33, 4]"]),
        (lambda: gsddmm(A, B[0, :1], B), ValueError, ["gsddmm", "X", "[34]", "[1]"]),
        (lambda: gsddmm(A, jnp.ones(M), B), ValueError, ["gsddmm", "Y", "[33]", "[33, 4]"]),
        (lambda: gsddmm(A, jnp.ones(M), B[:, 0], op="max"), ValueError, ["op", "copy", "'max'"]),
        (lambda: gsddmm(B, B, B), TypeError, ["gsddmm", "SparseArray"]),
        (lambda: row_sum(B), TypeError, ["row_sum", "SparseArray"]),
        (lambda: row_max(A, schedule=3), TypeError, ["row_max", "schedule", "int"]),
        (lambda: attend(pattern=B), TypeError, ["sparse_attention", "pattern", "SparseArray"]),
        (
            lambda: sparse_attention(
                *[np.ones((1, 2, 5, 4))] * 3, SparseArray.from_dense(np.eye(5))
            ),
            ValueError,
            [
                "pattern must have shape [2, 2], got [5, 5]",
                "[B, L, H, D]",
                "jnp.swapaxes(q, -2, -3)",
            ],
        ),
        (lambda: attend(pattern=A.T), NotImplementedError, ["pattern", "CSC", "asformat(CSR)"]),
        (lambda: attend(pattern=A.asformat(CSC).T), ValueError, ["[34, 33]", "[33, 34]"]),
        (lambda: attend(pattern=[A, A]), ValueError, ["one for each of 4 heads", "2"]),
        (lambda: attend(q=Q[0, 0]), ValueError, ["q", "[B, L, H, D]", "[4, 8]"]),
        (lambda: attend(k=KEYS[..., :4]), ValueError, ["k", "[2, 33, 2, 8]", "[2, 33, 2, 4]"]),
        (lambda: attend(v=KEYS[:1]), ValueError, ["v", "[2, 33, 2, Dv]", "[1, 33, 2, 8]"]),
        (lambda: attend(q=Q[:, :, :3]), ValueError, ["heads", "2 for 3"]),
        (lambda: attend(bias=jnp.ones(A.nnz + 1)), ValueError, ["bias", f"[{A.nnz}]"]),
        (lambda: attend(bias=jnp.ones((3, A.nnz))), ValueError, ["bias", f"[4, {A.nnz}]"]),
        (lambda: attend(sinks=jnp.ones(3)), ValueError, ["sinks", "[4]", "[3]"]),
        (lambda: attend(scale=jnp.ones(2)), ValueError, ["scale", "[2]"]),
        (lambda: attend(key_value_seq_lengths=jnp.ones(2)), ValueError, ["lengths", "integers"]),
        (lambda: attend(key_value_seq_lengths=jnp.arange(3)), ValueError, ["lengths", "[3]"]),
        (lambda: attend(schedule=3), TypeError, ["schedule", "int"]),
        (lambda: attend(schedule=CpuTile(8)), ScheduleError, ["columns"]),
        (
            lambda: attend(*(x.astype(int) for x in (Q, KEYS, KEYS))),
            ValueError,
            ["floating", "int"],
        ),
        (lambda: spmm(A, B, schedule=Unfused()), ScheduleError, ["Unfused", "spmm"]),
        (lambda: A @ B[1:], ValueError, ["[33, n]"]),
    ],
)
def test_message(call, error, words):
    with jax.numpy_dtype_promotion("standard"), pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


PATTERNS = dataclasses.replace(
    A,
    index_arrays=jax.tree.map(lambda x: jnp.stack([x, x]), A.index_arrays),
    transposed=jax.tree.map(lambda x: jnp.stack([x, x]), A.transposed),
)
X = jnp.ones((M, 4), jnp.float32)


@pytest.mark.parametrize(
    "call",
    [
        lambda A: A @ B,
        lambda A: spmm(A, X, transpose=True),
        lambda A: spmv(A, B[:, 0]),
        lambda A: sddmm(A, X, B),
        lambda A: gspmm(A, B, reduce="max"),
        lambda A: gsddmm(A, X, B),
        lambda A: sparse_softmax(A),
        lambda A: row_sum(A),
        lambda A: row_max(A),
        lambda A: einsum("ij,jk->ik", A, B),
        lambda A: attend(pattern=A),
        lambda A: A + array(BATTERY["every_length"], jnp.float32),
        lambda A: A[1:],
        lambda A: A.sum(),
        lambda A: A.diagonal(),
        lambda A: A.todense(),
        lambda A: A.row_lengths,
        lambda A: A.asformat(CSC),
        lambda A: A.to_scipy(),
        lambda A: masks.causal(A),
    ],
)
def test_a_batch_of_patterns_without_one_of_values(call):
    with pytest.raises(ValueError, match=r"2 dimensions, \(2, 35\), and values .*jax\.vmap"):
        call(PATTERNS)


def test_a_batch_of_transposes_alone():
    with pytest.raises(ValueError, match=r"2 dimensions, \(2, 34\), and values"):
        spmm(dataclasses.replace(A, transposed=PATTERNS.transposed), B)


def test_masks_of_column_vectors_are_of_one_known_structure():
    P = masks.band(16, 4, format=CVS(4))
    with pytest.raises(ValueError, match=r"masks\.causal: the structure is traced"):
        jax.jit(lambda P: masks.causal(P).values)(P)
    index_arrays = jax.tree.map(lambda x: jnp.stack([x, x]), P.index_arrays)
    with pytest.raises(ValueError, match=r"masks\.causal: A has index arrays of 2 dimensions"):
        masks.causal(dataclasses.replace(P, index_arrays=index_arrays))


def test_what_that_message_advises_runs():
    axes = dataclasses.replace(A, values=None, index_arrays=0, transposed=0)
    out = jax.vmap(lambda A: A @ B, in_axes=(axes,))(PATTERNS)
    np.testing.assert_array_equal(out, jnp.stack([A @ B] * 2))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_a_dtype_without_a_kernel_names_what_would_run(dtype):
    a, b = A.astype(dtype), B.astype(dtype)
    with pytest.raises(NotImplementedError, match=r"schedule=Reference\(\), or use einsum"):
        spmm(a, b, schedule=CpuTile())
    for schedule in (None, Reference()):
        np.testing.assert_allclose(
            spmm(a, b, schedule=schedule), a.todense() @ b, rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(einsum("ij,jk->ik", a, b), a.todense() @ b, rtol=1e-5, atol=1e-5)


def test_bool_is_sent_nowhere_that_refuses_it():
    mask = A.astype(bool)
    for call in (lambda: spmm(mask, B.astype(bool), schedule=CpuTile()), lambda: row_sum(mask)):
        with pytest.raises(NotImplementedError, match=r"bfloat16, float16\s"):
            call()


def test_more_than_two_dimensions():
    coords = np.array([[0, 1, 2], [1, 0, 0]])
    from sgap_jax import COO

    T = SparseArray.from_coordinates(coords, np.ones(2, np.float32), (2, 2, 3), format=COO)
    with pytest.raises(ValueError, match="2 dimensions"):
        spmm(T, jnp.ones((3, 1)))


@pytest.mark.parametrize(
    "fields",
    [
        dict(columns=-1),
        dict(nonzeros=0),
        dict(columns=1.5),
        dict(columns=True),
        dict(nonzeros=2**31),
        dict(nonzeros=2**70),
        dict(packed=1),
        dict(packed=True),
    ],
)
def test_illegal_tiles(fields):
    with pytest.raises(ScheduleError, match=next(iter(fields))):
        CpuTile(**fields)


def test_a_tile_that_the_op_cannot_obey_is_refused():
    with pytest.raises(ScheduleError, match="columns"):
        row_sum(A, schedule=CpuTile(columns=8))
    f = jax.jit(lambda B: spmm(A, B, schedule=CpuTile()))
    with pytest.raises(NotImplementedError, match="platform"):
        f.trace(B).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("text", [None, CpuTile(), b"CpuTile()"])
def test_only_text_is_parsed(text):
    with pytest.raises(ScheduleError, match="expected the text of a schedule"):
        Schedule.parse(text)


def test_schedules_are_values():
    import pickle

    tile = CpuTile(columns=64, nonzeros=4096)
    assert tile == CpuTile(columns=64, nonzeros=4096) and hash(tile) == hash(CpuTile(64, 4096))
    assert eval(str(tile), {"CpuTile": CpuTile}) == tile == pickle.loads(pickle.dumps(tile))
    problem = Problem("spmm", (10, 20), nnz=30, n=100)
    assert "range(0, 100, 64)" in tile.explain(problem)
    assert isinstance(choose_schedule(problem), CpuTile)
    assert isinstance(choose_schedule(Problem("spmm", (1, 1), 1, platform="tpu")), Reference)
    wide = Problem("spmm", (500, 2048), nnz=40 * 2048, n=256)
    assert choose_schedule(wide) == CpuTile(columns=32, packed=True)
    assert "a slab for each thread = B[:, j0:j0+32]" in choose_schedule(wide).explain(wide)
    for less in (
        {"n": 100},
        {"n": 250, "shape": (500, 80)},  # a slab that is no farther than one tile of all columns
        {"n": 128, "shape": (500, 1024)},
        {"nnz": 39 * 2048},
        {"shape": (4000, 2048)},
        {"dtype": "float16"},
    ):
        assert choose_schedule(dataclasses.replace(wide, **less)) == CpuTile()
    transposed = dataclasses.replace(wide, permuted=True)
    assert choose_schedule(transposed) == CpuTile(columns=128, packed=True)
    for less in (
        {"n": 191},
        {"shape": (500, 1200)},  # within the second-level cache
        {"shape": (500, 5121), "nnz": 1 << 20},
        {"nnz": 16 * 2048 - 1},
        {"shape": (7000, 2048)},
        {"dtype": "bfloat16"},
    ):
        assert choose_schedule(dataclasses.replace(transposed, **less)) == CpuTile()
    dense = Problem("spmm", (2048, 1024), nnz=2**19, n=64)
    assert choose_schedule(dense) == choose_schedule(dataclasses.replace(wide, batch=9))
    assert choose_schedule(dataclasses.replace(dense, nnz=2**18)) == CpuTile()
    few = Problem("spmm", (2048, 512), nnz=20_000, n=128)
    assert choose_schedule(few).nonzeros < choose_schedule(dataclasses.replace(few, n=64)).nonzeros
    small, large = (choose_schedule(Problem("sddmm", (9, 9), nnz)) for nnz in (9, 10**6))
    assert small.nonzeros < large.nonzeros
    blocks = CpuTile(columns=16, nonzeros=64)
    assert "for j0 in range(0, 80, 16):" in blocks.explain(Problem("sddmm", (50, 80), 900, 8))
    with pytest.raises(ScheduleError, match="sddmm without column vectors, have columns to tile"):
        blocks.check(Problem("sddmm", (50, 80), 900, 8, format="CVS(2)"))
    with pytest.raises(ScheduleError, match="only spmm packs tiles; use packed=False for sddmm"):
        CpuTile(columns=16, packed=True).check(Problem("sddmm", (50, 80), 900, 8))


def test_a_schedule_of_a_user_may_have_fields_of_any_name():
    @dataclasses.dataclass(frozen=True)
    class OfAUser(Schedule):
        inner: Schedule | None = None
        around: int = 0

        def check(self, problem):
            raise NotImplementedError("it does not run")

    A = SparseArray.from_dense(np.eye(3, dtype=np.float32))
    with pytest.raises(NotImplementedError, match="it does not run"):
        spmm(A, np.ones((3, 2), np.float32), schedule=OfAUser())
    with pytest.raises(NotImplementedError, match=r"no kernel that obeys .*OfAUser\(inner=None"):
        einsum("ij,jk,jk->ik", A, *[np.ones((3, 2), np.float32)] * 2, schedule=OfAUser())
