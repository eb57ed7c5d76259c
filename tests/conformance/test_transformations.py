"""JAX transformations of our functions other than differentiation."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array
from jax import export

from sgap_jax import (
    CSC,
    Reference,
    SparseArray,
    reference,
    row_sum,
    sddmm,
    sparse_softmax,
    spmm,
)

CASE = BATTERY["skewed"]
A = array(CASE, jnp.float32)
M, K = CASE.shape
TARGETS = [
    "sgap_spmm_csr_v1",
    "sgap_spmm_csr_scatter_v1",
    "sgap_sddmm_csr_v1",
    "sgap_sparse_softmax_csr_v1",
    "sgap_sparse_softmax_jacobian_csr_v1",
    "sgap_row_sum_csr_v1",
    "sgap_row_broadcast_csr_v1",
]


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def attention(A, Q, Y, V):
    P = sparse_softmax(sddmm(A, Q, Y), scale=0.5)
    return spmm(P, V) + row_sum(P)[:, None] - 1.0


def loss(A, *args):
    return jnp.sum(attention(A, *args) ** 2)


ARGS = (normal(M, 8), normal(K, 8), normal(K, 5))
GRADIENT = jax.jit(jax.grad(loss, (1, 2, 3)))


def test_jit_eager_and_disabled_jit_agree():
    Q, Y, V = map(np.asarray, ARGS)
    offsets, indices = CASE.row_offsets, CASE.column_indices
    P = reference.sparse_softmax(reference.sddmm(offsets, indices, Q, Y), offsets, 0.5)
    sums = np.diff(offsets) > 0  # of the probabilities of a row: 1, or 0 where nothing is stored
    expected = reference.spmm(P, offsets, indices, CASE.shape, V) + sums[:, None] - 1.0
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(attention(A, *ARGS), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(attention)(A, *ARGS), expected, rtol=1e-5, atol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(attention(A, *ARGS), expected, rtol=1e-5, atol=1e-6)


def test_structure_is_an_argument_not_a_constant():
    # One compilation serves every array of the same capacities.
    f = jax.jit(lambda A, B: spmm(A, B))  # jit(spmm) would share the cache of other tests
    f(A, ARGS[2])
    permuted = np.random.default_rng(0).permutation(M)
    other = SparseArray.from_scipy(A.to_scipy()[permuted])
    C = f(other, ARGS[2])
    assert f._cache_size() == 1
    expected = CASE.dense()[permuted] @ np.asarray(ARGS[2])
    np.testing.assert_allclose(C, expected, rtol=1e-4, atol=1e-5)


def test_a_structure_made_under_jit(backend):
    @jax.jit
    def f(values, offsets, indices, B, C):
        A = SparseArray.from_arrays(values, offsets, indices, shape=CASE.shape)
        grad = jax.grad(lambda B: jnp.vdot(spmm(A, B, schedule=backend), C))(B)
        return spmm(A, B, schedule=backend), grad, A.todense()

    B, C = ARGS[2], normal(M, 5)
    y, grad, dense = f(A.values, A.row_offsets, A.column_indices, B, C)
    expected = CASE.dense()
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    np.testing.assert_allclose(y, expected @ np.asarray(B), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grad, expected.T @ np.asarray(C), rtol=1e-4, atol=1e-5)


def test_a_padded_structure_made_under_jit_ignores_its_padding(backend):
    case = BATTERY["padded"]

    @jax.jit
    def f(values, offsets, indices, B, C):
        A = SparseArray.from_arrays(values, offsets, indices, shape=case.shape)
        return spmm(A, B, schedule=backend), spmm(A, C, transpose=True, schedule=backend)

    junk = np.array(case.column_indices)
    junk[case.stored :] = [-7, 2**31 - 1, 99] + [0] * (case.nnz - case.stored - 3)
    B, C = normal(case.shape[1], 4), normal(case.shape[0], 4)
    y, z = f(jnp.asarray(case.values, jnp.float32), case.row_offsets, junk, B, C)
    np.testing.assert_allclose(y, case.dense() @ np.asarray(B), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(z, case.dense().T @ np.asarray(C), rtol=1e-4, atol=1e-5)


def test_the_checked_mode_refuses_bad_structures_at_run_time():
    @jax.jit
    def f(values, offsets, indices, B):
        return spmm(
            SparseArray.from_arrays(values, offsets, indices, shape=CASE.shape).checked(), B
        )

    good = (A.values, A.row_offsets, A.column_indices)
    np.testing.assert_array_equal(f(*good, ARGS[2]), spmm(A, ARGS[2]))
    repeated = int(A.row_offsets[np.argmax(A.row_lengths > 1)])
    bad_index = A.column_indices.at[5].set(K + 3)
    bad_offset = A.row_offsets.at[7].set(A.nnz + 1)
    for offsets, indices, words in (
        (A.row_offsets, bad_index, str(K + 3)),
        (A.row_offsets, A.column_indices.at[0].set(-1), "-1"),
        (bad_offset, A.column_indices, "offsets"),
        (A.row_offsets, A.column_indices.astype(jnp.int64).at[5].add(2**32), str(2**31 - 1)),
        (A.row_offsets, A.column_indices.at[repeated + 1].set(A.column_indices[repeated]), "more"),
    ):
        with pytest.raises(Exception, match=words):
            jax.block_until_ready(f(A.values, offsets, indices, ARGS[2]))


def test_donation():
    f = jax.jit(lambda A, B: spmm(A, B) * 2.0, donate_argnums=1)
    square = array(BATTERY["skewed"], jnp.float32)
    B = normal(K, 5)
    expected = spmm(square, B) * 2.0
    np.testing.assert_array_equal(f(square, jnp.array(B)), expected)
    values = jnp.array(square.values)
    g = jax.jit(lambda v, A, B: spmm(A.with_values(v), B), donate_argnums=0)
    np.testing.assert_array_equal(g(values, square, B) * 2.0, expected)


def test_many_threads_call_at_once():
    expected = [np.asarray(x) for x in GRADIENT(A, *ARGS)]
    long = jax.jit(lambda A, B: sum(spmm(A, B * (1.0 + i)) for i in range(30)))
    total = np.asarray(long(A, ARGS[2]))

    def call(i):
        device = jax.devices()[i % 2]
        a, args = jax.device_put((A, ARGS), device)
        return [np.asarray(x) for x in GRADIENT(a, *args)], np.asarray(long(a, args[2]))

    with ThreadPoolExecutor(6) as pool:
        for grads, y in pool.map(call, range(60)):
            for got, want in zip(grads, expected, strict=True):
                np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(y, total)


def test_packed_calls_follow_each_other_and_run_at_once():
    # Big enough that the default schedule packs the slab, and that helper threads join both phases.
    rng = np.random.default_rng(0)
    dense = (rng.random((4000, 2100)) < 0.02).astype(np.float32)
    A = SparseArray.from_dense(dense)
    product = jax.jit(lambda A, B: spmm(A, B))
    operands = [jnp.asarray(rng.integers(-9, 9, (2100, 256)), jnp.float32) for _ in range(4)]
    assert "pack = true" in product.lower(A, operands[0]).as_text()
    expected = [dense @ np.asarray(B) for B in operands]  # integers: the same bits in every order
    for i in range(100):
        np.testing.assert_array_equal(product(A, operands[i % 4]), expected[i % 4])

    def call(i):
        return np.array_equal(product(A, operands[i % 4]), expected[i % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(200)))


def test_host_buffers_of_any_layout():
    B = np.asfortranarray(np.asarray(ARGS[2]))
    np.testing.assert_array_equal(spmm(A, B), spmm(A, ARGS[2]))
    wide = np.random.default_rng(0).standard_normal((K, 20)).astype(np.float32)
    np.testing.assert_array_equal(
        spmm(A, wide[:, 3::2]), spmm(A, np.ascontiguousarray(wide[:, 3::2]))
    )


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_lower_to_plain_jax(platform):
    text = (
        jax.jit(jax.grad(loss, (1, 2, 3)))
        .trace(A, *ARGS)
        .lower(lowering_platforms=(platform,))
        .as_text()
    )
    assert "sgap_" not in text


def test_reference_is_a_schedule_on_the_cpu():
    lower = lambda s: jax.jit(lambda B: spmm(A, B, schedule=s)).lower(ARGS[2]).as_text()
    assert "sgap_spmm_csr_v1" in lower(None) and "sgap_" not in lower(Reference())


RUN_EXPORTED = """
import pickle, sys
import numpy as np
import sgap_jax
from jax import export
A, args, blob, expected = pickle.load(open(sys.argv[1], "rb"))
for got, want in zip(export.deserialize(blob).call(A, *args), expected, strict=True):
    np.testing.assert_array_equal(got, want)
print("agreed")
"""


def test_export_runs_in_a_fresh_process(tmp_path):
    checks = [export.DisabledSafetyCheck.custom_call(t) for t in TARGETS]
    leaves, tree = jax.tree.flatten(A)
    f = jax.jit(lambda leaves, *args: GRADIENT(jax.tree.unflatten(tree, leaves), *args))
    blob = export.export(f, disabled_checks=checks)(leaves, *ARGS).serialize()
    expected = [np.asarray(x) for x in GRADIENT(A, *ARGS)]
    file = tmp_path / "exported.pkl"
    arrays = ([np.asarray(x) for x in leaves], [np.asarray(x) for x in ARGS])
    file.write_bytes(pickle.dumps((*arrays, bytes(blob), expected)))
    run = subprocess.run(
        [sys.executable, "-c", RUN_EXPORTED, str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
        cwd=tmp_path,
    )
    assert "agreed" in run.stdout, run.stderr


def test_export_for_two_platforms():
    checks = [export.DisabledSafetyCheck.custom_call(t) for t in TARGETS]
    f = jax.jit(lambda B: spmm(A, B))
    both = export.export(f, platforms=("cpu", "tpu"), disabled_checks=checks)(ARGS[2])
    np.testing.assert_array_equal(both.call(ARGS[2]), f(ARGS[2]))


COMPILE_TWICE = """
import sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import jax.numpy as jnp
import numpy as np
from sgap_jax import SparseArray, spmm
hits = []
jax.monitoring.register_event_listener(lambda name, **kw: hits.append(name))
A = SparseArray.from_dense(np.eye(9, dtype=np.float32) * np.arange(9))
f = jax.jit(lambda A, B: jax.grad(lambda B: jnp.sum(spmm(A, B) ** 2))(B))
print(float(f(A, jnp.ones((9, 4))).sum()), "/jax/compilation_cache/cache_hits" in hits)
"""


def test_the_persistent_compilation_cache(tmp_path):
    runs = [
        subprocess.run(
            [sys.executable, "-c", COMPILE_TWICE, str(tmp_path / "cache")],
            capture_output=True,
            text=True,
            env={**os.environ, "XLA_FLAGS": ""},
            cwd=tmp_path,
        )
        for _ in range(2)
    ]
    first, second = (r.stdout.split() for r in runs)
    assert first[0] == second[0], runs[1].stderr
    assert second[1] == "True", runs[1].stderr


def peak_temporaries(f, *args):
    return f.lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_the_gradient_makes_no_nnz_by_n_intermediate():
    nnz, n, size = 200_000, 64, 4000
    rng = np.random.default_rng(0)
    coords = rng.integers(0, size, (nnz, 2))
    A = SparseArray.from_coordinates(coords, np.ones(nnz, np.float32), (size, size))
    B = jnp.ones((size, n), jnp.float32)

    def grad(schedule):
        loss = lambda v, B: jnp.sum(spmm(A.with_values(v), B, schedule=schedule) ** 2)
        return jax.jit(jax.grad(loss, (0, 1)))

    dense_bytes = B.nbytes
    assert peak_temporaries(grad(None), A.values, B) < 4 * dense_bytes
    # The check can fail: the gather-and-segment-sum lowering holds nnz x n products.
    assert peak_temporaries(grad(Reference()), A.values, B) > A.nnz * n * 4


def test_the_backward_has_no_scatter():
    f = jax.jit(jax.grad(lambda v, B: jnp.sum(spmm(A.with_values(v), B) ** 2), (0, 1)))
    text = f.lower(A.values, ARGS[2]).as_text()
    assert (
        "stablehlo.scatter" not in text
        and text.count("sgap_spmm_csr") >= 2
        and "sgap_sddmm_csr_v1" in text
    )


THREADS = """
import sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, sys.argv[1])
from battery import from_row_lengths, array
from sgap_jax import *
import hashlib
rng = np.random.default_rng(0)
lengths = np.minimum((rng.pareto(0.8, 3000) * 3).astype(int), 20000)
lengths[1234] = 20000  # one row holds more than several tasks
case = from_row_lengths("heavy", 20000, lengths)
digest = hashlib.sha256()
for dtype in ("float32", "bfloat16"):
    A = array(case, dtype)
    for n in (1, 3, 32, 100):
        B = jnp.asarray(rng.standard_normal((20000, n)), dtype)
        C = jnp.asarray(rng.standard_normal((3000, n)), dtype)
        packed = spmm(A, B, schedule=CpuTile(16, 500, packed=True))
        for out in (spmm(A, B), packed, spmm(A, C, transpose=True), sddmm(A, C, B).values):
            digest.update(np.asarray(out).tobytes())
    V, rows = random((2000, 300), density=0.2, format=CVS(8), dtype=dtype), (2000, 300)
    for n in (1, 100):
        X, Y = (jnp.asarray(rng.standard_normal((m, n)), dtype) for m in rows)
        tile = CpuTile(nonzeros=64)
        for out in (spmm(V, Y, schedule=tile), spmm(V, X, transpose=True), sddmm(V, X, Y).values):
            digest.update(np.asarray(out).tobytes())
    for out in (sparse_softmax(A).values, row_sum(A), row_max(A)):
        digest.update(np.asarray(out).tobytes())
    for length in (3, 8):  # the block row of the heavy row is cut
        V = A.asformat(CVS(length))
        for out in (sparse_softmax(V).values, row_sum(V), row_max(V)):
            digest.update(np.asarray(out).tobytes())
    v = jax.grad(lambda v: jnp.sum(sparse_softmax(A.with_values(v)).values ** 2))(A.values)
    digest.update(np.asarray(v).tobytes())
print(digest.hexdigest())
"""


def test_the_same_bits_for_any_number_of_threads(tmp_path):
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    helpers = os.path.join(tests, "helpers")

    def run(threads):
        result = subprocess.run(
            [sys.executable, "-c", THREADS, helpers],
            capture_output=True,
            text=True,
            env={**os.environ, "XLA_FLAGS": "", "NPROC": str(threads)},
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    digests = {run(threads) for threads in (1, 2, 3, 8)}
    assert len(digests) == 1


def test_pickle_and_formats_survive_jit():
    B = ARGS[2]
    again = pickle.loads(pickle.dumps(A))
    np.testing.assert_array_equal(spmm(again, B), spmm(A, B))
    out = jax.jit(lambda A: A.asformat(CSC))(A)
    assert out.format == CSC
    np.testing.assert_array_equal(out.todense(), A.todense())
