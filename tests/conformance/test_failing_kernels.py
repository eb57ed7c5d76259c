"""Kernels that are known to fail on the GPU: the list in the cache folder, what is chosen in their
place, and the warning."""

import concurrent.futures
import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import BATTERY, array

from sgap_jax import (
    AttentionTile,
    OctetTile,
    Problem,
    Reference,
    SubwarpTile,
    Unfused,
    candidate_schedules,
    choose_schedule,
    reference,
    select,
    sparse_attention,
    spgemm,
    spmm,
)
from sgap_jax.doctor.cases import cases
from sgap_jax.launch import failures
from sgap_jax.launch.driver import Device, NoDriver
from sgap_jax.primitives.bitmap import bitmap, entries
from sgap_jax.primitives.structures import transposed
from sgap_jax.schedules import select_cuda
from sgap_jax.schedules.emulated import Emulated
from sgap_jax.schedules.families import family, with_failing

HERE = failures.place("GPU", (13, 0))


def problem(op, **fields):
    return Problem(op, (512, 512), 65_536, platform="cuda", **fields)


def chosen(asked, *failed):
    """What is chosen where these families fail, and the warnings."""
    with with_failing(dict.fromkeys(failed, "a reason")), warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        return choose_schedule(asked), [str(one.message) for one in w]


EVERY = [
    *(problem(op, n=n) for op in ("spmm", "gspmm") for n in (1, 4, 16, 64)),
    *(problem("sddmm", n=n) for n in (3, 64)),
    *(problem(op) for op in ("row_sum", "row_max", "row_broadcast", "sparse_softmax")),
    *(
        problem(op, n=64, dtype=dtype, format=f"CVS({length})")
        for op in ("spmm", "sddmm", "attention", "sparse_softmax")
        for dtype, length in (("float16", 8), ("float32", 4), ("bfloat16", 16))
    ),
]


@pytest.mark.parametrize("asked", EVERY, ids=lambda p: f"{p.op}-{p.n}-{p.dtype}-{p.format}")
def test_families_fail_one_after_the_other(asked):
    """Each choice is of a family that works and can run; in the end it is plain JAX."""
    failed = []
    while True:
        schedule, said = chosen(asked, *failed)
        assert len(said) == bool(failed)
        name = family(asked.op, schedule)
        if name is None:
            break
        schedule.check(asked)
        assert name not in failed
        failed.append(name)
    assert schedule == (Unfused() if asked.op == "attention" else Reference())
    assert len(failed) >= 2 or asked.op == "attention"
    assert set(failed) <= {case.family for case in cases()}, "a family that no case tests"


def test_the_next_best_of_vectors():
    asked = problem("spmm", n=64, dtype="float16", format="CVS(8)")
    first, said = chosen(asked)
    assert isinstance(first, OctetTile) and not said
    second, (warning,) = chosen(asked, "spmm octet")
    assert isinstance(second, SubwarpTile)
    assert "'spmm octet' failed on this GPU (a reason)" in warning and str(second) in warning
    assert "python -m sgap_jax doctor" in warning
    attends = problem("attention", n=64, dtype="float16", format="CVS(8)", batch=8)
    tiles = chosen(attends)[0], chosen(attends, "attention octet")[0]
    assert [(type(tile), tile.octet) for tile in tiles] == [
        (AttentionTile, True),
        (AttentionTile, False),
    ]


def test_a_tuner_leaves_them_out():
    asked = problem("spmm", n=64)
    with with_failing({"spmm row": "a reason"}), pytest.warns(RuntimeWarning):
        found = candidate_schedules(asked)
    assert found and "spmm row" not in {family("spmm", schedule) for schedule in found}


def test_a_warning_comes_once():
    asked = problem("row_max")
    with with_failing({"row_max row_group": "a reason"}):
        with pytest.warns(RuntimeWarning, match="row_max row_group"):
            choose_schedule(asked)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            choose_schedule(asked)


def refuse(call, inputs, outputs):
    raise AssertionError("launched")


def test_plain_jax_runs_where_every_kernel_fails():
    """No launch, and the right result."""
    A = array(BATTERY["skewed"], "float32")
    B = np.linspace(-1, 1, A.shape[1] * 3, dtype=np.float32).reshape(-1, 3)
    kinds = ("row", "row_group", "row_pieces", "nnz", "nnz_group")
    families = {f"spmm {kind}": "a reason" for kind in kinds}
    families |= dict.fromkeys(
        ("attention rows", "top_k", "spgemm", "transpose_structure", "bitmap", "nucleus"),
        "a reason",
    )
    with with_failing(families), pytest.warns(RuntimeWarning):
        C = spmm(A, B, schedule=Emulated(refuse))
        greatest = select.top_k(jnp.asarray(B), 2, schedule=Emulated(refuse))
        probable = select.top_p(jnp.asarray(B), 0.4, most=2, schedule=Emulated(refuse))
        product = spgemm(A, A.T, schedule=Emulated(refuse))
        sorted_ = transposed(A.row_offsets, A.column_indices, A.shape[1], Emulated(refuse))
        words = bitmap(jnp.asarray(B > 0), Emulated(refuse))
        bits = entries(words, B.size, Emulated(refuse))
        whole = jax.jit(lambda A: spgemm(A, A.T, nse=product.nnz, schedule=Emulated(refuse)))(A)
    expected = reference.spmm(A.values, A.row_offsets, A.column_indices, A.shape, B)
    np.testing.assert_allclose(C, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(greatest.column_indices, reference.top_k(B, 2)[1])
    right = reference.top_p(B, 0.4, 2)[1]
    np.testing.assert_array_equal(probable.column_indices[: len(right)], right)
    jax.tree.map(np.testing.assert_array_equal, sorted_, tuple(A.transposed))
    for found, right in zip(bits[1:], np.nonzero(B > 0), strict=True):
        np.testing.assert_array_equal(found[: len(right)], right)
    for found in (product, whole):
        np.testing.assert_allclose(found.values, (A @ A.T).values, rtol=1e-5, atol=1e-5)


def test_attention_runs_unfused_where_its_kernels_fail():
    """The operations that it consists of are launched in its place."""
    A, calls = array(BATTERY["skewed"], "float32"), []

    def run(call, inputs, outputs):
        calls.append(call.source)
        return [np.zeros(shape, dtype) for shape, dtype in outputs]

    q, k = (jnp.ones((size, 1, 8), jnp.float32) for size in A.shape)
    failed = dict.fromkeys(("attention rows", "attention row_pieces"), "a reason")
    with with_failing(failed), pytest.warns(RuntimeWarning):
        np.asarray(sparse_attention(q, k, k, A, schedule=Emulated(run)))
    assert any("Sddmm" in source for source in calls)
    assert any("Spmm" in source for source in calls)
    assert not any("attention" in source for source in calls)


def test_entries_hold_for_one_gpu_driver_and_version(tmp_path):
    failures.record(tmp_path, HERE, {"spmm octet": "wrong", "spmm row": ""})
    other = failures.place("another GPU", (13, 0))
    failures.record(tmp_path, other, {"sddmm octet": "slow"})
    found = failures.entries(tmp_path)
    assert failures.matching(found, [HERE]) == {"spmm octet": "wrong"}
    assert failures.matching(found, [failures.place("GPU", (13, 1))]) == {}
    assert failures.matching(found, [HERE | {"version": "0"}]) == {}
    assert set(failures.matching(found, [HERE, other])) == {"spmm octet", "sddmm octet"}
    failures.record(tmp_path, HERE, {"spmm octet": ""})  # it works again
    assert [entry["family"] for entry in failures.entries(tmp_path)] == ["sddmm octet"]


def test_doctors_of_several_gpus_keep_what_all_have_found(tmp_path):
    """Each reads the list and writes it again at the same time."""

    def doctor(gpu):
        for i in range(10):
            failures.record(tmp_path, failures.place(f"GPU {gpu}", (13, 0)), {f"{i}": "wrong"})

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(doctor, range(4)))
    found = {(entry["device"], entry["family"]) for entry in failures.entries(tmp_path)}
    assert found == {(f"GPU {gpu}", f"{i}") for gpu in range(4) for i in range(10)}


def test_a_list_whose_lock_cannot_be_had_is_written_all_the_same(tmp_path, monkeypatch):
    """Another process holds it for long, or the file system has none."""
    monkeypatch.setattr(failures, "_WAIT", 3)
    for error in (BlockingIOError, OSError):

        def refuse(*_, error=error):
            raise error

        monkeypatch.setattr(failures.fcntl, "flock", refuse)
        failures.record(tmp_path, HERE, {error.__name__: "wrong"})
    assert len(failures.entries(tmp_path)) == 2


DAMAGED = ["", "{", "3", '[3, {"device": 1}]', "[[]]", '{"a": "b"}', "[" * 200_000]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:20])
def test_a_damaged_list_is_an_empty_one(tmp_path, text):
    (tmp_path / failures.FILE).write_text(text)
    assert failures.entries(tmp_path) == []
    failures.record(tmp_path, HERE, {"spmm octet": "wrong"})
    assert json.loads((tmp_path / failures.FILE).read_text())[0]["family"] == "spmm octet"


def test_a_pipe_in_place_of_the_list_is_not_read(tmp_path):
    os.mkfifo(tmp_path / failures.FILE)
    assert failures.entries(tmp_path) == []


def test_the_list_of_this_machine(tmp_path, monkeypatch):
    """It is read again when it has changed, and without a list no driver is opened."""

    class Standin:
        opened = 0

        def __init__(self):
            Standin.opened += 1

        start = lambda self: None  # noqa: E731
        version = lambda self: (13, 0)  # noqa: E731
        devices = lambda self: [Device(0, "GPU", "9.0", 1)]  # noqa: E731

    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(failures, "Driver", Standin)
    failures._gpus.cache_clear()
    try:
        assert failures.failing_here() == {} and Standin.opened == 0
        failures.record(tmp_path, HERE, {"spmm row": "wrong"})
        assert failures.failing_here() == failures.failing_here() == {"spmm row": "wrong"}
        assert Standin.opened == 1
        asked = problem("spmm", n=64)
        with pytest.warns(RuntimeWarning, match="'spmm row' failed on this GPU"):
            assert choose_schedule(asked) != select_cuda._point(asked)
        failures.record(tmp_path, HERE, {"spmm row": ""})
        assert failures.failing_here() == {}
        monkeypatch.setenv("SGAP_CACHE_DIR", "")
        assert failures.failing_here() == {}
    finally:
        failures._gpus.cache_clear()


def test_a_list_without_a_driver_is_for_another_machine(tmp_path, monkeypatch):
    def missing():
        raise NoDriver("none")

    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(failures, "Driver", missing)
    failures.record(tmp_path, HERE, {"spmm row": "wrong"})
    failures._gpus.cache_clear()
    assert failures.failing_here() == {}
    failures._gpus.cache_clear()


def test_a_version_of_a_package_that_is_not_installed(monkeypatch):
    def absent(name):
        raise failures.PackageNotFoundError(name)

    monkeypatch.setattr(failures, "version", absent)
    assert failures.place("GPU", (12, 8)) == {
        "device": "GPU",
        "driver": "12.8",
        "version": "unknown",
    }
