"""The kernels that sort entries for the transposed structure, run by the emulator, and their
lowering for CUDA: the bits of the sort of plain JAX."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate
from unchecked_structures import anything

from sgap_jax import SparseArray, spmm
from sgap_jax.formats.structure import transpose_by_comparing
from sgap_jax.launch.transpose_structure import (
    DIGITS,
    TILE,
    count_plan,
    move_plan,
    shifts,
    start_plan,
    tiles,
)
from sgap_jax.primitives.structures import transposed
from sgap_jax.schedules.emulated import Emulated

EMULATED = Emulated(emulate)


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def order(keys, size, most=65535):
    """Of keys [batch, nnz]: all launches, as the lowering has them; at most so many blocks in z."""
    batch, nnz = keys.shape

    def run(call, *given):
        x, y, z = call.grid
        return emulate(replace(call, grid=(x, y, min(z, most))), *given)

    counted, totals = ((batch, DIGITS, tiles(nnz)), np.int32), ((batch, DIGITS), np.int32)
    moved = found = keys
    for shift in shifts(size):
        (counts,) = run(count_plan(batch, nnz, shift), (moved,), [counted])
        starts = run(start_plan(batch, nnz), (counts,), [counted, totals])
        results = [(keys.shape, np.int32)] * 2
        moved, found = run(move_plan(batch, nnz, shift), (moved, found, *starts), results)
    return found


def check(keys, size, most=65535):
    keys = np.atleast_2d(np.asarray(keys, np.int32))
    found = order(keys, size, most)
    np.testing.assert_array_equal(found, np.argsort(keys, axis=1, kind="stable"))


def random(size, *shape):
    return np.random.default_rng(size).integers(0, size + 1, shape)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257])
def test_sizes(size):
    for nnz in (1, 31, 300, TILE):
        check(random(size, nnz), size)
    check(random(size, TILE + 33), size)


@pytest.mark.tier("test")
def test_tiles_and_batches():
    """Ascending and descending keys, equal ones, and few among others."""
    nnz = 2 * TILE + 100
    each = [np.arange(nnz) % 300, (np.arange(nnz) // 3 * 299) % 300, np.full(nnz, 299)]
    rare = np.where(np.arange(nnz) % 997 == 5, 7, 299)
    check([*each, rare], 299)
    check([*each[:2], rare], 299, most=2)  # a block has two members of the batch


@pytest.mark.tier("all")
@pytest.mark.parametrize("size", [1, 300, 70_000, 2**31 - 1])
def test_many_tiles(size):
    check(random(size, 5 * TILE + 1), size)


@pytest.mark.tier("all")
def test_more_tiles_than_a_block_has_threads():
    """The counts before a tile are added in turns."""
    nnz, tile = 300 * TILE - 7, np.arange(300 * TILE - 7) // TILE
    check(np.where(np.arange(nnz) % 5 == 0, tile % 7, 9), 9)


def test_keys_that_are_none():
    """Places follow from the counts, whatever the keys are: no address is out of bounds."""
    keys = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 700)).astype(np.int32)
    np.testing.assert_array_equal(order(keys, 200), np.argsort(keys & 255, axis=1, kind="stable"))


def same(found, expected):
    for one, right in zip(found, expected, strict=True):
        assert one.dtype == np.int32
        np.testing.assert_array_equal(one, right)


@pytest.mark.tier("test")
def test_in_jax():
    """Any contents, alone and mapped, and no entries."""
    rng = np.random.default_rng(1)
    for rows, nnz, size in ((1, 40, 0), (30, 90, 300), (3, 0, 4)):
        each = [anything(rng, rows, nnz, size) for _ in range(3)]
        arrays = [np.stack(x) for x in zip(*each, strict=True)]
        one = partial(transposed, size=size, schedule=EMULATED)
        expected = jax.jit(jax.vmap(partial(transpose_by_comparing, size=size)))(*arrays)
        same(jax.jit(jax.vmap(one))(*arrays), expected)
        same(one(*each[0]), [x[0] for x in expected])


@pytest.mark.tier("test")
def test_a_gradient_is_lowered_to_launches_without_a_sort(monkeypatch, tmp_path):
    """Of a structure made inside jit with 300 columns: two digits."""
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90")
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))

    def loss(values, offsets, columns, B):
        return jnp.sum(spmm(SparseArray.from_arrays(values, offsets, columns, shape=(9, 300)), B))

    arrays = jnp.ones(40), jnp.arange(10) * 4, jnp.arange(40), jnp.ones((300, 4))
    traced = jax.jit(jax.grad(loss, 3)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'kernel = "\w+Transpose(\w+)Kernel', text) == ["Count", "Start", "Move"] * 2
    assert "stablehlo.sort" not in text


PLANTED = [
    (
        "__popc(same & below);\n      __syncwarp();",
        "__popc(same & ~below) - 1;\n      __syncwarp();",
    ),
    ("own_place[digit] += __popc(same);\n      __syncwarp();", "own_place[digit] += __popc(same);"),
    ("before + UpToInBlock<kBlock>(own, of_warps, total)", "own + before"),
    ("const Size p = (tile * kSteps + step)", "const Size p = (tile * kSteps + step / 2)"),
    ("for (unsigned i = threadIdx.x; i < size;", "for (unsigned i = threadIdx.x; i + 1 < size;"),
    ("unsigned(before >> 32) + start - place", "unsigned(before >> 32) - place"),
    ("shift == 0 ? Index(first + at) : read_entries[at]", "Index(first + at)"),
    (
        "const Index* read_keys = keys + batch * count + first;",
        "const Index* read_keys = keys + first;",
    ),
]


@pytest.mark.parametrize(("right", "wrong"), PLANTED)
def test_planted_bugs_are_caught(right, wrong, planted):
    def in_tiles():
        check(random(299, 2, TILE + 300), 299)

    planted("transpose_structure.cuh", right, wrong, in_tiles)
