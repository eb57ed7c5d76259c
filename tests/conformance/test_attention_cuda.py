"""The attention kernels compile for every architecture without spills; launches are as planned."""

import dataclasses

import pytest
from cuda_sources import require_nvrtc, resources, resources_of

from sgap_jax import CVS, Problem, ScheduleError, choose_schedule
from sgap_jax.launch.attention import (
    forward_plan,
    keys_backward_plan,
    keys_merge_plans,
    merge_plan,
    rows_backward_plan,
    rows_merge_plan,
)
from sgap_jax.launch.attention_shapes import AttentionShapes
from sgap_jax.launch.defaults import OF_ATTENTION, default_calls
from sgap_jax.launch.precompiled import ARCHITECTURES
from sgap_jax.schedules.attention import AttentionTile, default_tile

PROBLEM = Problem("attention", (1000, 900), 20_000, n=64, batch=4, platform="cuda")
SHAPES = AttentionShapes(heads=4, key_heads=2, value_depth=64)
TILES = (AttentionTile(8), AttentionTile(16), AttentionTile(32), AttentionTile(16, 8))


def plans(problem, tile, shapes=SHAPES):
    yield forward_plan(problem, tile, shapes, 0.1)
    yield rows_backward_plan(problem, tile, shapes, 0.1, wrt_bias=True)
    yield keys_backward_plan(problem, tile, shapes, 0.1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.seconds(all=40)
def test_kernels_compile_without_spills_or_local_memory(dtype, arch):
    require_nvrtc()
    i = ["float32", "float64", "bfloat16", "float16"].index(dtype)
    for at, (length, depth) in enumerate([(1, 64), (8, 64), (8, 128), (2, 17), (32, 64)]):
        if (
            arch == "sm_80" and (at + i) % 2
        ):  # as many registers as for sm_90, see test_default_points
            continue
        format = "CSR" if length == 1 else str(CVS(length))
        tile = TILES[(at + i) % 4]
        problem = dataclasses.replace(PROBLEM, dtype=dtype, format=format, n=depth)
        shapes = dataclasses.replace(SHAPES, value_depth=depth)
        for call in plans(problem, tile, shapes):
            registers, stack, spills = resources(call.source, arch)
            assert (stack, spills) == (0, 0), f"{call.kernel} of {tile} for {problem}"
            assert registers <= 255


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.seconds(all=40)
def test_pieces_of_rows_compile_without_spills_or_local_memory(arch):
    require_nvrtc()
    sources = {}
    cases = [
        ("float32", 1, 64),
        ("bfloat16", 8, 128),
        ("float64", 2, 17),
        ("float16", 32, 64),
        ("float32", 8, 256),
    ]
    for at, (dtype, length, depth) in enumerate(cases):
        tile = dataclasses.replace(TILES[(at + 1) % 4], chunk=64)
        format = "CSR" if length == 1 else str(CVS(length))
        problem = dataclasses.replace(PROBLEM, dtype=dtype, format=format, n=depth)
        shapes = dataclasses.replace(SHAPES, value_depth=depth)
        calls = [*plans(problem, tile, shapes), merge_plan(problem, tile, shapes, 0.1)]
        calls += [rows_merge_plan(problem, tile, shapes), *keys_merge_plans(problem, tile, shapes)]
        sources |= {call.source: call.kernel for call in calls}
    if arch != "sm_75":
        for length, depth, share, dtype in ((8, 64, 1, "float16"), (16, 128, 4, "bfloat16")):
            tile = AttentionTile(16, share, octet=True, chunk=64)
            about = dict(dtype=dtype, format=str(CVS(length)), n=depth)
            problem = dataclasses.replace(PROBLEM, **about)
            shapes = dataclasses.replace(SHAPES, value_depth=depth)
            calls = *plans(problem, tile, shapes), merge_plan(problem, tile, shapes, 0.1)
            assert (
                sum("OctetPieces" in c.kernel or "BackwardPieces" in c.kernel for c in calls) == 3
            )
            sources |= {call.source: call.kernel for call in calls}
        for size, warps in ((2048, 2), (4096, 4), (8192, 8)):  # of a block
            about = dict(shape=(size, size), nnz=80 * size, dtype="bfloat16", format="CVS(8)")
            problem = dataclasses.replace(PROBLEM, batch=8, **about)
            shapes = AttentionShapes(heads=8, key_heads=8, value_depth=64)
            tile = AttentionTile(16, 1, octet=True, chunk=64)
            calls = list(plans(problem, tile, shapes))[:2]
            assert [call.block[0] for call in calls] == [32 * warps] * 2
            sources |= {call.source: call.kernel for call in calls}
    turn = ["sm_75", "sm_86", "sm_89", "sm_100"]  # a quarter of the kernels each
    if arch in turn:
        sources = list(sources)[turn.index(arch) :: 4]
    for kernel, (registers, stack, spills) in resources_of(list(sources), arch).items():
        assert (stack, spills) == (0, 0), kernel
        assert registers <= 255


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.seconds(all=40)
def test_octets_compile_without_spills_or_local_memory(arch):
    require_nvrtc()
    cases = [
        (8, 64, 4),
        (8, 128, 1),
        (16, 64, 1),
        (32, 64, 2),
        (32, 128, 4),
        (8, 95, 1),
        (8, 256, 2),
        (8, 40, 1),
        (32, 63, 4),
    ]
    for at, (length, depth, group) in enumerate(cases):
        dtype = ("float16", "bfloat16")[at % 2]
        format = str(CVS(length))
        problem = dataclasses.replace(PROBLEM, dtype=dtype, format=format, n=depth)
        shapes = dataclasses.replace(SHAPES, key_heads=4 // group, value_depth=depth)
        tile = AttentionTile(32, (1, 4)[at % 2], octet=True)
        forward, *gradients = plans(problem, tile, shapes)
        assert all("Octet" in call.kernel or depth == 256 for call in (forward, *gradients))
        # Gradients on one architecture each; those in a wheel are tested below.
        own = ARCHITECTURES[at % 3] == arch and depth < 256
        for call in (forward, *gradients) if own else (forward,):
            _, stack, spills = resources(call.source, arch)
            assert (stack, spills) == (0, 0), f"{call.kernel} of {tile} for {problem}"


@pytest.mark.parametrize("name", OF_ATTENTION)
def test_the_defaults_of_long_sequences_are_in_the_wheel(name):
    assert len(default_calls(name)) == 18  # test_default_points.py compiles them
    long = dict(shape=(8192, 8192), nnz=8192 * 800, dtype="bfloat16", format="CVS(8)", batch=8)
    problem = dataclasses.replace(PROBLEM, **long)
    shapes = AttentionShapes(heads=8, key_heads=8, value_depth=64)
    call = forward_plan(problem, choose_schedule(problem), shapes, 0.125)
    assert call.source in default_calls("attention")


def test_launches():
    problem = dataclasses.replace(PROBLEM, format="CVS(8)")
    shapes = dataclasses.replace(SHAPES, batch=3, many=frozenset({"q", "lse"}), bias="heads")
    forward, rows, keys = plans(problem, AttentionTile(16, 2), shapes)
    # 125 block rows, 8 rows at once; 32 lanes for each
    assert (forward.grid, forward.block) == ((32, 4, 3), (128, 1, 1))
    # by rows 4 at once, since a gradient holds more; by keys 900 groups of 32
    assert (rows.grid, rows.zero) == ((63, 4, 3), (1,))
    assert (keys.grid, keys.zero) == ((225, 2, 3), ())
    assert forward.scalars[:8] == (1000, 900, 4, 2, 64, 64, 2500, 3)
    assert forward.scalars[9] == 2 + 4 + 32 + 8192
    half = dataclasses.replace(problem, dtype="bfloat16")
    octets = list(plans(half, AttentionTile(16, 2, octet=True), shapes))
    # two heads that share keys in a block of two warps
    assert [(call.grid, call.block) for call in octets[:2]] == [((125, 2, 3), (64, 1, 1))] * 2
    assert (octets[1].zero, octets[1].scalars[10]) == ((1,), 1)
    # 57 times 16 keys; a block of two pairs of warps takes two of these
    assert (octets[2].grid, octets[2].block) == ((29, 2, 3), (128, 1, 1))
    assert [call.scalars[:10] for call in octets] == [forward.scalars[:10]] * 3
    assert [call.scalars[10:] for call in octets] == [(0,), (1, 0), (0,)]


def test_gradients_of_wide_heads_are_those_without_tensor_cores():
    problem = dataclasses.replace(PROBLEM, format="CVS(8)", dtype="bfloat16")
    for depth, octet in ((128, True), (129, False), (90, True), (97, False), (136, False)):
        found = dataclasses.replace(problem, n=depth)
        _, *gradients = plans(found, AttentionTile(32, octet=True))
        assert ["Octet" in call.kernel for call in gradients] == [octet] * 2
        says = AttentionTile(32, octet=True).explain(found)
        assert ("dK and dV by 8 or 16 keys" in says) == octet and "movmatrix" in says
        assert ("where both widths are up to 128" in says) == octet and "one warp has them" in says


def test_the_default():
    assert default_tile(PROBLEM) == AttentionTile(16)
    assert default_tile(dataclasses.replace(PROBLEM, n=128)) == AttentionTile(32)
    assert default_tile(dataclasses.replace(PROBLEM, n=4)) == AttentionTile(8)
    few = dataclasses.replace(PROBLEM, shape=(8, 9000), nnz=72_000, format="CVS(8)", batch=1)
    assert default_tile(few) == AttentionTile(16, 8)
    half = dataclasses.replace(PROBLEM, format="CVS(8)", dtype="bfloat16")
    assert default_tile(half) == AttentionTile(16, 1, octet=True)
    assert default_tile(dataclasses.replace(PROBLEM, n=1000)) is None
    assert default_tile(dataclasses.replace(PROBLEM, format="CVS(3)")) is None


def test_errors():
    for given, says in [
        (dict(lanes=12), "lanes must be one of"),
        (dict(share=3), "share must be one of"),
        (dict(lanes=32, share=16), "more than the 128 threads"),
        (dict(lanes=16.0), "lanes must be one of"),
        (dict(octet=1), "octet must be a bool"),
    ]:
        with pytest.raises(ScheduleError, match=says):
            AttentionTile(**given)
    with pytest.raises(ScheduleError, match="not for spmm"):
        AttentionTile().check(dataclasses.replace(PROBLEM, op="spmm"))
    with pytest.raises(NotImplementedError, match="vectors of 3 rows"):
        AttentionTile().check(dataclasses.replace(PROBLEM, format="CVS(3)"))
    for format, dtype in (("CVS(8)", "float32"), ("CVS(4)", "float16"), ("CSR", "float16")):
        with pytest.raises(NotImplementedError, match="8, 16 or 32 rows, got"):
            problem = dataclasses.replace(PROBLEM, format=format, dtype=dtype)
            AttentionTile(octet=True).check(problem)
    with pytest.raises(NotImplementedError, match="up to 128 features, got 129"):
        AttentionTile(8).check(dataclasses.replace(PROBLEM, n=129))
    with pytest.raises(NotImplementedError, match="up to 128 features, got 200"):
        forward_plan(PROBLEM, AttentionTile(8), dataclasses.replace(SHAPES, value_depth=200), 1.0)
    with pytest.raises(NotImplementedError, match="not on cpu"):
        AttentionTile().check(dataclasses.replace(PROBLEM, platform="cpu"))
    assert "16 lanes, 8 rows of a block row of 8" in AttentionTile().explain(
        dataclasses.replace(PROBLEM, format="CVS(8)")
    )
