"""Planted bugs of control flow and collectives, and PTX that the emulator refuses to run."""

import re

import numpy as np
import pytest
from emulator import Fault, Memory, Program

THREADS = 64

# The sum of each warp, in all lanes.
COLLECTIVES = {
    "a lane that is missing from its mask": (
        """
#ifdef BUG
  unsigned mask = 0xfffffffe;
#else
  unsigned mask = 0xffffffff;
#endif
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(mask, v, d);""",
        "lane 0 is not in its own mask 0xfffffffe",
    ),
    "a shuffle in a branch that some named lanes do not take": (
        """
#ifdef BUG
  if (t % 32 != 5)
#endif
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);""",
        "deadlock: it waits for thread \\(5, 0, 0\\) ",
    ),
    "a lane that has exited": (
        """
#ifdef BUG
  if (t == 40) { y[blockIdx.x * 64 + t] = 0; return; }
#endif
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);""",
        "deadlock: it waits for thread \\(40, 0, 0\\) .*, which has exited",
    ),
    "masks that differ": (
        """
#ifdef BUG
  unsigned mask = t % 32 < 16 ? 0xffffffff : 0xffff0001;
#else
  unsigned mask = 0xffffffff;
#endif
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(mask, v, d);""",
        "mask .* says another",
    ),
    "a lane that names itself alone": (
        """
#ifdef BUG
  unsigned mask = t % 32 < 31 ? 0xffffffff : 0x80000000;
#else
  unsigned mask = 0xffffffff;
#endif
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(mask, v, d);""",
        "mask 0xffffffff, but lane 31 says another",
    ),
    "a vote among lanes of which one names itself alone": (
        """
#ifdef BUG
  unsigned mask = t % 4 < 3 ? 15u << t % 32 / 4 * 4 : 8u << t % 32 / 4 * 4;
#else
  unsigned mask = 15u << t % 32 / 4 * 4;
#endif
  __ballot_sync(mask, v);
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);""",
        "mask 0x0000000f, but lane 3 says another",
    ),
}


@pytest.mark.parametrize("bug", COLLECTIVES)
def test_collectives(launch, caught, bug):
    body, says = COLLECTIVES[bug]
    source = f"""extern "C" __global__ void k(const int* x, int* y) {{
  int t = threadIdx.x, v = x[blockIdx.x * 64 + t];
  {body}
  y[blockIdx.x * 64 + t] = v;
}}"""
    x = np.arange(128, dtype=np.int32)
    expected = np.repeat(x.reshape(-1, 32).sum(axis=1), 32)
    np.testing.assert_array_equal(launch(source, 2, THREADS, x, np.zeros_like(x))[1], expected)
    caught(source, says, x, np.zeros_like(x))


@pytest.mark.parametrize("wrong", ["v, d ^ 1", "v, d, 16"], ids=["lane", "width"])
def test_wrong_lane_or_width_gives_a_wrong_sum(launch, wrong):
    """Both bugs are legal PTX: only the comparison with NumPy catches them."""
    source = f"""extern "C" __global__ void k(const int* x, int* y) {{
  int v = x[threadIdx.x];
  for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffff, {wrong});
  if (threadIdx.x == 0) y[0] = v;
}}"""
    x, y = np.arange(1, 33, dtype=np.int32) ** 2, np.zeros(1, np.int32)
    right = source.replace(wrong, "v, d")
    assert launch(right, 1, 32, x, y)[1] == x.sum()
    assert launch(source, 1, 32, x, y)[1] != x.sum()


def test_a_shuffle_from_a_lane_outside_of_the_group_is_poison(launch):
    source = """extern "C" __global__ void k(const int* x, int* y) {
  int v = x[threadIdx.x] + 1, r = v;
  if (threadIdx.x < 8)
    asm volatile("shfl.sync.down.b32 %0, %1, 4, 31, 0xff;" : "=r"(r) : "r"(v));
  y[threadIdx.x] = r;
}"""
    y = launch(source, 1, 32, np.ones(32, np.int32), np.zeros(32, np.int32))[1]
    np.testing.assert_array_equal(y == 2, np.repeat([True, False, True], [4, 4, 24]))
    for dtype in (np.float16, np.float32):
        assert np.isnan(y[4:8].view(dtype)).all()


def test_livelock(launch):
    source = """extern "C" __global__ void k(volatile int* x) { while (*x == 0) {} }"""
    with pytest.raises(Fault, match="more than 1000 steps, at"):
        launch(source, 1, 32, np.zeros(1, np.int32), step_limit=1000)


def test_trap(launch):
    source = """extern "C" __global__ void k(int* x) { if (threadIdx.x == 7) __trap(); }"""
    with pytest.raises(Fault, match=r"thread \(7, 0, 0\) of block \(0, 0, 0\) .*trap"):
        launch(source, 1, 32, np.zeros(1, np.int32))


def test_assertions(launch):
    source = """extern "C" __global__ void k(int* x) { assert(x[threadIdx.x] < 20); }"""
    launch(source, 1, 32, np.zeros(32, np.int32))
    with pytest.raises(Fault, match=r"thread \(20, 0, 0\) .* an assertion does not hold"):
        launch(source, 1, 32, np.arange(32, dtype=np.int32))


PTX = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_param_0) {{
  .reg .b32 %r<3>;
  .reg .f32 %f<3>;
  {0}
  ret;
}}"""


@pytest.mark.parametrize(
    "instruction, named",
    [
        ("dp4a.u32.u32 %r0, %r1, %r2, %r1;", "instruction `dp4a.u32.u32"),
        ("add.rz.f32 %f0, %f1, %f2;", "modifier .rz of `add.rz.f32"),
        ("add.sat.s32 %r0, %r1, %r2;", "saturation of `add.sat.s32"),
        ("bar.arrive 0, 64;", "modifier .arrive of `bar.arrive"),
        ("mov.u32 %r0, %smid;", "register %smid"),
        ("mov.u32 %r0, elsewhere;", "symbol elsewhere"),
        ("call.uni f, (%r0);", "instruction `call.uni f"),
    ],
)
def test_what_the_emulator_does_not_know_is_an_error_that_names_it(instruction, named):
    program = Program(PTX.format(instruction))
    with pytest.raises(NotImplementedError, match=re.escape(named)):
        program.run("k", 1, 32, [0], Memory())


def test_a_wrong_launch_is_refused():
    program = Program(PTX.format(""))
    with pytest.raises(ValueError, match="no entry 'other'; this module has k"):
        program.run("other", 1, 32, [0], Memory())
    with pytest.raises(ValueError, match="takes .* got 2 arguments"):
        program.run("k", 1, 32, [0, 1], Memory())
    with pytest.raises(ValueError, match="argument 0: a .u64"):
        program.run("k", 1, 32, [0.5], Memory())
    with pytest.raises(ValueError, match="2048 threads a block"):
        program.run("k", 1, (64, 32), [0], Memory())
    with pytest.raises(ValueError, match="a grid of .*, at most .* 65535"):
        program.run("k", (1, 65536), 32, [0], Memory())
    with pytest.raises(ValueError, match="a block of .*, at most .* 64"):
        program.run("k", 1, (1, 1, 65), [0], Memory())
