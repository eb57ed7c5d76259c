"""How long the longest warp works on skewed patterns: instructions counted by the emulator, put
together for an H100 or H200. A count, not a time: each instruction of a warp counts as one."""

import heapq
import re

import emulator.program
import jax.numpy as jnp
import numpy as np
import pytest
from battery import from_row_lengths
from cuda_sources import machine_code, require_nvdisasm, require_nvrtc, resources
from emulated_launch import emulate

from benchmarks import problems
from benchmarks.gpu import model, ours, predict
from sgap_jax import AttentionTile, Problem, RowStatistics, Schedule, choose_schedule
from sgap_jax.launch.attention import forward_plan, merge_plan, rows_work
from sgap_jax.launch.attention_shapes import AttentionShapes
from sgap_jax.launch.spmm import launch_plan, work_of
from sgap_jax.launch.spmm import merge_plan as sum_plan
from sgap_jax.primitives._row_pieces import work_list
from sgap_jax.schedules.point import LANES_UNDER_WAY

SLOTS = LANES_UNDER_WAY // 32  # warps that run at once


@pytest.fixture(autouse=True)
def _nvrtc():
    require_nvrtc()


def instructions(call, given, results):
    """How many instructions each block executes, whose warps go together, and the results."""
    counts, run = [], emulator.program.execute

    def counted(blocks):
        before = blocks.launch.now
        run(blocks)
        counts.append(blocks.launch.now - before)

    emulator.program.execute = counted
    try:
        found = emulate(call, given, results, order=list(range(int(np.prod(call.grid)))))
    finally:
        emulator.program.execute = run
    return np.array(counts), found


def extended(counts, period=4):
    """A function of any length, from counts for the lengths 0, 1, ...: after these, `period` more
    entries take the same number of instructions more."""
    (step,) = {int(counts[-i] - counts[-i - period]) for i in range(1, period + 1)}

    def count(length):
        over = np.maximum((np.asarray(length) - len(counts) + period) // period, 0)
        return counts[np.asarray(length) - period * over] + step * over

    return count


def each_length(most):
    """A matrix with a row of each length."""
    return from_row_lengths("each", most, range(most + 1))


def product(text, most, merging=False):
    """Instructions of a launch of a product with a row of each length up to `most`, one block for
    each row or piece, or of the launch that adds their sums; the work list. n = 128: a warp has all
    columns of a row."""
    point, n, case = Schedule.parse(f"{text} block_size=32"), 128, each_length(most)
    problem = Problem("spmm", case.shape, case.nnz, n, platform="cuda")
    work, (m, k) = work_of(problem, point), case.shape
    given = [case.values[None].astype(np.float32), case.row_offsets, case.column_indices]
    given += [np.zeros(0, np.int32), np.ones((1, k, n), np.float32)]
    results = [((1, m, n), np.float32)]
    if work is None:
        return instructions(launch_plan(problem, point), given, results)[0], None
    made = np.asarray(work_list(work, jnp.asarray(case.row_offsets)))
    sums = ((1, work.places, n), np.float32)
    if merging:
        given = (np.ones(*sums), made, np.zeros(*results[0]))
        counts, _ = instructions(sum_plan(problem, point), given, results)
        return counts, made[-len(counts) :]
    given[1] = made
    counts, _ = instructions(launch_plan(problem, point), given, [*results, sums])
    return counts, made[: len(counts)]


def by_length(counts, elements, rows, period=4):
    """Instructions by the number of entries (or places) of the elements of a work list."""
    found = {int(e[2] - e[1]): c for e, c in zip(elements, counts, strict=True) if e[0] < rows}
    least = found[min(found)]
    return extended(np.array([found.get(i, least) for i in range(max(found) + 1)]), period)


def rmat(scale, edges, corners=(0.57, 0.19, 0.19, 0.05)):
    """Row lengths of a graph of 2^scale vertices (Chakrabarti et al., R-MAT, 2004; Graph500's
    corners)."""
    rng, row, column = np.random.default_rng(0), 0, 0
    for _ in range(scale):
        corner = rng.choice(4, edges, p=corners)
        row, column = 2 * row + corner // 2, 2 * column + corner % 2
    stored = np.unique(row.astype(np.int64) << scale | column)
    return np.bincount(stored >> scale, minlength=1 << scale)


def time_of(warps):
    """When the last warp ends, if each starts, in order, where one has ended."""
    ends = [0] * SLOTS
    for work in warps:
        heapq.heapreplace(ends, ends[0] + work)
    return max(ends)


def pieces_of(lengths, chunk):
    """Lengths of the pieces, as the list has them, and the number of pieces of each row."""
    full, tail = lengths // chunk, lengths % chunk
    order = np.argsort(sum(part * tail < chunk for part in (2, 8, 32)), kind="stable")
    return np.concatenate([np.full(full.sum(), chunk), tail[order]]), full + (tail > 0)


def test_an_rmat_graph_against_rows_of_one_length():
    """2^17, 2^16 and 2^15 vertices, n = 128, with the default point: the whole takes at most 1.3 of
    the time that a graph with rows of one length takes; of the largest 1.2, of which 1.08 is work.
    The chain of its longest row, through both launches, is a part of that time; rows walked whole
    take 20 times as long."""
    whole = extended(product("{<1 row, 4 col>, 1}", 40)[0])
    piece = by_length(*product("{<1 row, 4 col>, 1} chunk=41", 40), 41)
    merge = by_length(*product("{<1 row, 4 col>, 1} chunk=1", 52, merging=True), 53, period=16)
    assert piece(np.int64([40]))[0] > 40 and merge(np.int64([2]))[0] > 100  # both are counted
    for scale, edges, chunk in (
        (17, 2_200_000, 128),
        (16, 1_100_000, 128),
        (15, 550_000, 96),
    ):
        lengths = rmat(scale, edges)
        nnz, size = int(lengths.sum()), len(lengths)
        rows = RowStatistics(16.0, 64.0, 4096)
        asked = Problem("spmm", (size, size), nnz, n=128, platform="cuda", rows=rows)
        point = choose_schedule(asked)
        assert str(point) == f"{{<1 row, 4 col>, 1}} chunk={chunk}"
        even = time_of(whole(np.full(size, -(-nnz // size))).tolist())
        cut, parts = pieces_of(lengths, point.chunk)
        cut, merged = piece(cut), np.repeat(merge(parts[parts > 1]), 4)  # each by 4 warps
        taken = time_of(cut.tolist()) + time_of(merged.tolist())
        assert taken <= 1.3 * even, (scale, taken, even)
        if scale == 17:
            assert cut.max() + merged.max() <= 0.5 * even
            assert cut.sum() <= 1.08 * even * SLOTS
            assert taken <= 1.2 * even
            assert time_of(whole(lengths).tolist()) > 20 * even


def attention(tile, lengths, keys):
    """Instructions of the launches of attention with one head of 64 features, by blocks; the work
    list."""
    case, depth = from_row_lengths("rows", keys, lengths), 64
    problem = Problem("attention", case.shape, case.nnz, n=depth, platform="cuda")
    shapes, work = AttentionShapes(1, 1, depth), rows_work(problem, tile)
    one = np.ones((1, keys, 1, depth), np.float32)
    none = [np.zeros((1, 0), np.float32)] * 2 + [np.zeros((1, 0), np.int32)]
    offsets, m = case.row_offsets, case.shape[0]
    results = [((1, m, 1, depth), np.float32), ((1, m, 1), np.float32)]
    call = forward_plan(problem, tile, shapes, 0.125)
    if work is None:
        given = [one[:, np.arange(m) % keys], one, one, *none, offsets, case.column_indices]
        return instructions(call, given, results)[0], None, None
    made = np.asarray(work_list(work, jnp.asarray(offsets)))
    results += [((1, work.places, 1, 1, size), np.float32) for size in (depth, 2)]
    given = [one[:, np.arange(m) % keys], one, one, *none, made, case.column_indices]
    counts, (out, lse, *partial) = instructions(call, given, results)
    given = [*partial, none[0], made, out, lse]
    merging, _ = instructions(merge_plan(problem, tile, shapes, 0.125), given, results[:2])
    return counts, merging, made


def test_a_mask_with_global_rows_against_one_without():
    """16384 tokens with windows of 64 keys and 4 of them that see all, 8 heads of 64 features: the
    chain of a global row, through both launches, against the time that the windows alone take."""
    size, window, seeing, heads = 16_384, 64, 4, 8
    rows = RowStatistics(64.0, 256.0, size)
    nnz = size * window + seeing * (size - window)
    asked = Problem("attention", (size, size), nnz, n=64, batch=heads, platform="cuda", rows=rows)
    tile = choose_schedule(asked)
    assert tile.lanes == 16 and tile.chunk is not None
    # A warp has two rows, and a block eight, here of one length. Four keys are a step.
    lengths = range(0, 97, 4)
    each = np.repeat(lengths, 8)
    whole = extended(attention(AttentionTile(16), each, 96)[0], period=1)
    counts, _, made = attention(AttentionTile(16, chunk=100), [*each, *[104] * 8], 104)
    of_block = made[: 8 * len(counts) : 8]
    by_steps = dict(zip((of_block[:, 2] - of_block[:, 1]) // 4, counts, strict=True))
    piece = extended(np.array([by_steps[length // 4] for length in lengths]), period=1)
    even = time_of(whole(np.full(size * heads // 2, window // 4)).tolist())
    parts = -(-size // tile.chunk)
    merging = attention(AttentionTile(16, chunk=1), [parts], parts)[1]
    chain = piece(tile.chunk // 4) + merging.max()
    assert chain <= 0.2 * even, (piece(tile.chunk // 4), merging, even)
    assert whole(size // 4) > 20 * even


def clocks(gpu, launch, list_of=None, whole_head=False):
    """When the last block of a launch ends, if each starts, in order, where one has ended, and
    blocks of one kind are alike: by their chains, or by the instructions of which a multiprocessor
    issues four a clock. `list_of` has a row of numbers for each block, by which the kinds are told;
    without it all blocks are of one kind. `whole_head`: all blocks of a head run, and those of
    other heads are like them."""
    call = launch.call
    blocks, threads = int(np.prod(call.grid)), int(np.prod(call.block))
    kinds = np.zeros(blocks, int)
    if list_of is not None:
        each = np.unique(list_of, axis=0, return_inverse=True)[1].reshape(-1)
        kinds = np.resize(each, blocks)  # those of the heads, in turn
    # One in the middle: the first and the last have fewer keys around them.
    of_kind = [np.flatnonzero(kinds == kind) for kind in range(kinds.max() + 1)]
    chosen = np.array([numbers[len(numbers) // 2] for numbers in of_kind])
    if whole_head:
        chosen = np.arange(call.grid[0])
        kinds = np.resize(chosen, blocks)
    ran = model.emulate_blocks(gpu, launch, np.sort(chosen))
    registers, _, spills = resources(call.source, gpu.arch)
    assert spills == 0
    resident = model.resident_blocks(gpu, registers, threads, ran.shared_bytes)
    ratio = model.instructions_for_ptx(ran.timeline, machine_code(call.source, gpu.arch))
    alone, issued = ran.timeline.cycles[chosen], ratio * ran.timeline.issued[chosen]
    by_issue = model.done_at(issued[kinds], gpu.multiprocessors) / 4
    return max(model.done_at(alone[kinds], gpu.multiprocessors * resident), by_issue)


def lengths_of(launch, elements_of_block):
    """For each block of a head the lengths of its pieces, in steps of 16 vectors, and whether they
    leave sums."""
    call = launch.call
    (made,) = (x for x in launch.inputs if x.dtype == np.int32 and x.ndim == 2 and x.shape[1] == 4)
    own = np.zeros((call.grid[0] * elements_of_block, 2), int)
    pieces = call.scalars[-4]
    own[:pieces, 0] = -(-(made[:pieces, 2] - made[:pieces, 1]) // 16)
    own[:pieces, 1] = made[:pieces, 3] >= 0
    return own.reshape(call.grid[0], -1)


@pytest.mark.tier("all")
@pytest.mark.seconds(all=45)
def test_attention_on_tensor_cores_with_global_tokens_against_rows_of_one_length():
    """Of 16384 and of 4096 tokens 8 see and are seen by all, 8 heads of 64 features, against as
    many entries in rows of one length: forward with its merge, and dQ, take at most 1.3 of the
    time, and dK with dV too. Of 4096 tokens all blocks of a head by keys are counted."""
    require_nvdisasm()
    for size, most_by_keys in ((16_384, 1.3), (4096, 1.3)):
        few, even = (tensor_core_clocks(size, *mask) for mask in ((8, 64), (0, 80)))
        ratios = {way: few[way] / even[way] for way in few}
        print(size, {way: round(ratio, 3) for way, ratio in ratios.items()})
        assert max(ratios["forward"], ratios["rows"]) <= 1.3, (size, ratios)
        assert ratios["keys"] <= most_by_keys, (size, ratios)


def tensor_core_clocks(size, seeing, window):
    """Clocks of attention and its gradients on a band with `seeing` global tokens."""
    A = problems.global_and_band(size, seeing, window)
    total = {"forward": 0.0, "rows": 0.0, "keys": 0.0}
    for launch in ours.launches_of(predict.function("attention", A, 64, "bfloat16")):
        name = re.search(r"sgap::(\w+)<", launch.call.source)[1]
        if "Backward" in name or "Attention" in name:
            way = "rows" if "Rows" in name else "keys" if "Keys" in name else "forward"
        kinds = None
        if "Pieces" in name and "Sum" not in name:
            kinds = lengths_of(launch, launch.call.block[0] // 32)
        elif "Merge" in name or "Sum" in name:
            rows = 8 if "Merge" in name else 1  # of several pieces: of one block row, or set
            kinds = np.arange(launch.call.grid[0])[:, None] >= rows
        whole_head = "Keys" in name and size == 4096  # at 16,384 tokens they take too long here
        total[way] += clocks(model.H100, launch, kinds, whole_head)
    return total
