"""The SpMM kernel of octet tiles compiles for every architecture without spills; its launches."""

import dataclasses
import itertools
import re
import zlib

import pytest
from cuda_sources import INCLUDE, require_nvrtc, resources

from sgap_jax import OctetTile, Problem, ScheduleError
from sgap_jax.launch import nvrtc
from sgap_jax.launch.spmm import launch_plan
from sgap_jax.schedules.tiles import spmm_registers

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
LENGTHS = (2, 4, 8, 16, 32)
DTYPES = ("float16", "bfloat16", "float32")


def asked(length=8, **changes):
    problem = Problem(
        "spmm", (1000, 900), 2000 * length, 128, 1, "bfloat16", f"CVS({length})", "cuda"
    )
    return dataclasses.replace(problem, **changes)


def legal_tiles(problem):
    for fields in itertools.product((64, 128, 256), (16, 32, 64), (1, 2, 3, 4), (1, 2, 4, 8, 16)):
        tile = OctetTile(problem.vector_length, *fields, tf32=problem.dtype == "float32")
        try:
            tile.check(problem)
            yield tile
        except ScheduleError:
            continue


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_compile_without_spills_or_local_memory(dtype, arch):
    require_nvrtc()
    for length in LENGTHS:
        problem = asked(length, dtype=dtype)
        tiles = list(legal_tiles(problem))
        assert len(tiles) >= 4
        # The tile with most registers, and another one for each dtype and architecture.
        tiles.sort(key=lambda tile: spmm_registers(tile, problem.dtype) * tile.row_warps ** (1 / 2))
        drawn = zlib.crc32(f"{length} {dtype} {arch}".encode())
        chosen = [tiles[-1]] if drawn % 3 else [tiles[-1], tiles[drawn % len(tiles)]]
        cut = dataclasses.replace(chosen[-1], chunk=64)  # in pieces
        for tile, n in zip([*chosen, cut], (128, 127, 128), strict=False):
            source = launch_plan(dataclasses.replace(problem, n=n), tile).source
            found, stack, spills = resources(source, arch)
            assert (stack, spills) == (0, 0), f"{tile} for {problem}"
            assert found * 32 * tile.row_warps <= 65536, f"{tile} for {problem}"


def code(tile, **changes):
    require_nvrtc()
    source = launch_plan(asked(tile.vector_length, **changes), tile).source
    return nvrtc.ptx(source, "compute_90", INCLUDE)


LOAD = r"ld\.global\.nc\.v4\.u32"


@pytest.mark.parametrize("length", LENGTHS)
def test_what_a_step_takes(length):
    """For 16 vectors and 64 columns: 4 gathers of 16 bytes, an mma for 16 columns and 8 rows."""
    tiles, loops = max(length // 8, 1), 2  # loops over whole steps, and over the others
    text = code(OctetTile(length))
    assert text.count("mma.sync.aligned.m16n8k16") == 4 * tiles * loops
    assert text.count("movmatrix") == 2 * tiles * loops
    assert len(re.findall(LOAD, text)) == (4 + 2 * (length == 32)) * loops
    text = code(OctetTile(length, tf32=True), dtype="float32")
    assert text.count("mma.sync.aligned.m16n8k8") == 8 * tiles * loops


@pytest.mark.parametrize(("stages", "n", "together"), [(2, 128, 4), (2, 127, 0), (3, 128, 1)])
def test_loads_of_a_whole_step_depend_on_nothing_but_columns(stages, n, together):
    """Loads of other steps have a branch each: a vector that does not exist loads nothing."""
    pieces = re.split(r"\n\$L\w+:|bra", code(OctetTile(8, stages=stages), n=n))
    assert max(len(re.findall(LOAD, piece)) for piece in pieces) == together


def test_vectors_where_the_columns_allow_them():
    for n, vector in ((128, True), (120, True), (124, False), (7, False)):
        text = code(OctetTile(8), n=n)
        assert ("ld.global.nc.v4.u32" in text) == ("st.global.v4" in text) == vector
    for n, vector in ((124, True), (126, False)):
        text = code(OctetTile(8, tf32=True), dtype="float32", n=n)
        assert ("ld.global.nc.v4.u32" in text) == ("st.global.v4" in text) == vector


def test_launches():
    call = launch_plan(asked(), OctetTile(8))
    assert (call.grid, call.block, call.zero) == ((125, 2, 1), (32, 1, 1), ())
    assert call.scalars == (1000, 128, 0, 0, 1, 2000, 0)
    call = launch_plan(asked(32, batch=70_000), OctetTile(32, tile_n=128, row_warps=2), (70_000, 1))
    assert (call.grid, call.block) == ((32, 1, 65535), (64, 1, 1))
    assert call.scalars == (1000, 128, 64_000, 0, 70_000, 2000, 0)
    assert launch_plan(asked(batch=3), OctetTile(8), (1, 3)).scalars[2:] == (
        0,
        900 * 128,
        3,
        2000,
        0,
    )
    for shape, nnz, n in (((0, 5), 0, 3), ((5, 0), 0, 3), ((5, 5), 0, 3), ((5, 5), 8, 0)):
        call = launch_plan(asked(shape=shape, nnz=nnz, n=n), OctetTile(8))
        assert min(call.grid) == 1
