"""Warp collectives, barriers that reduce, and asynchronous copies of the emulator against NumPy."""

import numpy as np
import pytest

HEAD = 'extern "C" __global__ void k(const int* x, int* y) { int t = threadIdx.x, v = x[t], r; '


def run(launch, body, x, block=64):
    return launch(HEAD + body + " y[t] = r; }", 1, block, x, np.zeros(block, np.int32))[1]


def sources(mode, amount, width):
    """The lane that each lane of a warp reads, by the CUDA programming guide."""
    lane = np.arange(32)
    start = lane // width * width
    other = {
        "up": lane - amount,
        "down": lane + amount,
        "xor": lane ^ amount,
        "": start + amount % width,
    }[mode]
    if mode == "xor":  # may read from an earlier segment, not from a later one
        inside = other < start + width
    else:
        inside = (other >= start) & (other < start + width)
    return np.where(inside, other, lane)


@pytest.mark.parametrize("width", [2, 8, 32])
@pytest.mark.parametrize("amount", [1, 3, 7, 16, 31])
@pytest.mark.parametrize("mode", ["up", "down", "xor", ""])
def test_shuffles(launch, mode, amount, width):
    name = f"__shfl_{mode}_sync" if mode else "__shfl_sync"
    x = np.random.default_rng(0).integers(0, 999, 64, np.int32)
    y = run(launch, f"r = {name}(0xffffffff, v, {amount}, {width});", x)
    np.testing.assert_array_equal(y, x.reshape(2, 32)[:, sources(mode, amount, width)].reshape(-1))


def test_shuffle_by_a_lane_of_its_own(launch):
    x = np.random.default_rng(0).integers(0, 32, 64, np.int32)
    y = run(launch, "r = __shfl_sync(0xffffffff, t, v);", x)
    np.testing.assert_array_equal(y, x + np.arange(64) // 32 * 32)


def test_votes(launch):
    x = np.random.default_rng(0).integers(0, 2, 64, np.int32)
    bits = [sum(int(b) << i for i, b in enumerate(warp)) for warp in x.reshape(2, 32)]
    ballot = run(launch, "r = __ballot_sync(0xffffffff, v);", x).view(np.uint32)
    np.testing.assert_array_equal(ballot, np.repeat(np.array(bits, np.uint32), 32))
    x[:32] = 1
    x[40] = 0
    for name, expected in ("any", [1, 1]), ("all", [1, 0]), ("uni", [1, 0]):
        if name == "uni":
            body = 'int p; asm volatile("{ .reg .pred q, s; setp.ne.s32 q, %1, 0; '
            body += 'vote.sync.uni.pred s, q, 0xffffffff; selp.s32 %0, 1, 0, s; }" '
            body += ': "=r"(p) : "r"(v)); r = p;'
        else:
            body = f"r = __{name}_sync(0xffffffff, v);"
        np.testing.assert_array_equal(run(launch, body, x), np.repeat(expected, 32))


def test_groups_of_a_warp_vote_apart(launch):
    body = """unsigned mask = t % 32 < 12 ? 0xfff : 0xfffff000; r = __ballot_sync(mask, v);
    if (t % 32 >= 12) r = ~r & mask;"""
    x = np.ones(64, np.int32)
    x[5] = x[20] = 0
    expected = np.zeros(64, np.int64)
    expected[:12], expected[32:44], expected[12:32] = 0xFFF & ~(1 << 5), 0xFFF, 1 << 20
    np.testing.assert_array_equal(run(launch, body, x), expected)


def test_active_mask(launch):
    body = "if (t % 32 < 9) r = __activemask(); else r = ~__activemask();"
    y = run(launch, body, np.zeros(64, np.int32))
    np.testing.assert_array_equal(y, np.tile(np.repeat([0x1FF, 0x1FF], [9, 23]), 2))
    partial = run(launch, "r = __activemask();", np.zeros(40, np.int32), block=40)
    np.testing.assert_array_equal(partial, np.repeat([-1, 0xFF], [32, 8]))


def test_match(launch):
    x = np.random.default_rng(0).integers(0, 4, 64, np.int32)
    warps = x.reshape(2, 32)
    same = (warps[:, :, None] == warps[:, None, :]) @ (1 << np.arange(32, dtype=np.int64))
    y = run(launch, "r = __match_any_sync(0xffffffff, v);", x).view(np.uint32)
    np.testing.assert_array_equal(y, same.reshape(-1))
    x[32:] = 3
    y = run(launch, "int p; r = __match_all_sync(0xffffffff, v, &p); r = p ? r : 5;", x)
    np.testing.assert_array_equal(y, np.repeat([5, -1], 32))


def test_sum_over_the_lanes_of_equal_keys(launch):
    """__match_any_sync computes the masks of the collectives that follow."""
    body = "unsigned same = __match_any_sync(0xffffffff, v); r = __reduce_add_sync(same, t);"
    x = np.random.default_rng(0).integers(0, 4, 64, np.int32)
    expected = [sum(i for i in range(64) if i // 32 == t // 32 and x[i] == x[t]) for t in range(64)]
    np.testing.assert_array_equal(run(launch, body, x), expected)


REDUCTIONS = {"add": np.sum, "min": np.min, "max": np.max, "and": np.bitwise_and.reduce}
REDUCTIONS |= {"or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_warp_reductions(launch, name):
    x = np.random.default_rng(0).integers(-99, 99, 64, np.int32)
    y = run(launch, f"r = __reduce_{name}_sync(0xffffffff, v);", x)
    expected = [REDUCTIONS[name](warp) for warp in x.reshape(2, 32)]
    np.testing.assert_array_equal(y, np.repeat(expected, 32))


def test_barriers_that_reduce(launch):
    x = np.random.default_rng(0).integers(0, 2, 64, np.int32)
    body = "r = __syncthreads_count(v) + 100 * __syncthreads_or(v) + 1000 * __syncthreads_and(v);"
    for values in (x, np.ones_like(x), np.zeros_like(x)):
        expected = values.sum() + 100 * values.any() + 1000 * values.all()
        np.testing.assert_array_equal(run(launch, body, values), expected)


def test_copies_filled_with_zeros(launch):
    source = """extern "C" __global__ void k(const int4* x, int4* y) {
  __shared__ int4 tile[64];
  int t = threadIdx.x;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2; cp.async.wait_all;" ::
    "r"((unsigned)__cvta_generic_to_shared(tile + t)), "l"(x + t), "r"(t % 17) : "memory");
  y[t] = tile[t];
}"""
    x = np.random.default_rng(0).integers(1, 255, (64, 16)).astype(np.uint8)
    expected = np.where(np.arange(16) < np.arange(64)[:, None] % 17, x, 0)
    np.testing.assert_array_equal(launch(source, 1, 64, x, np.zeros_like(x))[1], expected)


def test_groups_of_copies_are_counted_by_thread(launch):
    """Odd threads commit twice as often as even ones, and wait accordingly."""
    source = """
#define COPY(i) asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: \\
    "r"((unsigned)__cvta_generic_to_shared(&tile[i][t])), "l"(x + i * 64 + t), \\
    "r"(t == 9 ? 0 : 4) : "memory")
extern "C" __global__ void k(const int* x, int* y) {
  __shared__ int tile[3][64];
  int t = threadIdx.x;
  for (int i = 0; i < 3; ++i) {
    COPY(i);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (t % 2) asm volatile("cp.async.commit_group;" ::: "memory");
  }
  if (t % 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else asm volatile("cp.async.wait_group 1;" ::: "memory");
  y[t] = tile[0][t] + tile[1][t];
  asm volatile("cp.async.wait_all;" ::: "memory");
  y[t] += tile[2][t];
}"""
    x = np.random.default_rng(0).integers(1, 99, (3, 64), np.int32)
    expected = np.where(np.arange(64) == 9, 0, x.sum(axis=0))
    np.testing.assert_array_equal(launch(source, 1, 64, x, np.zeros(64, np.int32))[1], expected)
