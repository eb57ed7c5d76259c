"""Instructions and cycles of small kernels against chains that are counted by hand."""

import numpy as np
import pytest
from cuda_sources import ptx
from emulator import Latencies, Memory, Program, Timeline

# Powers of ten: the digits of a time say what it consists of.
TENS = Latencies(
    arithmetic=0, special=0, shared=10_000, shuffle=100_000, matrix=1_000_000, memory=10_000_000
)
INDEX = "int t = blockIdx.x * blockDim.x + threadIdx.x;"


def timed(launch, parameters, body, *arguments, grid=1, block=32, latencies=TENS, **keywords):
    source = f'extern "C" __global__ void k({parameters}) {{ {body} }}'
    timeline = Timeline(latencies)
    launch(source, grid, block, *arguments, timeline=timeline, **keywords)
    return timeline


def chain(timeline):
    """(loads of global memory, matrix, shuffles, shared) on the longest chain of each block."""
    return [
        (n // TENS.memory, n // 1_000_000 % 10, n // 100_000 % 10, n // 10_000 % 10)
        for n in timeline.cycles.astype(int).tolist()
    ]


def numbers(size):
    return np.arange(size, dtype=np.float32)


def test_loads_that_do_not_need_each_other_take_the_time_of_one(launch):
    apart = f"{INDEX} y[t] = x[t] + x[t + 32] + x[t + 64];"
    found = timed(launch, "const float* x, float* y", apart, numbers(96), numbers(32))
    assert chain(found) == [(1, 0, 0, 0)]


def test_a_chain_of_loads_adds_up(launch):
    body = f"{INDEX} int i = x[t]; for (int k = 0; k < n; ++k) i = x[i]; y[t] = i;"
    x = np.roll(np.arange(32, dtype=np.int32), 1)
    found = timed(launch, "const int* x, int* y, int n", body, x, x.copy(), 6)
    assert chain(found) == [(7, 0, 0, 0)]


def test_a_loop_with_its_index_known_waits_for_no_load(launch):
    """Sums wait for the loads; the next turn's load does not."""
    body = f"{INDEX} float s = 0; for (int k = 0; k < n; ++k) s += x[32 * k + t]; y[t] = s;"
    found = timed(launch, "const float* x, float* y, int n", body, numbers(640), numbers(32), 20)
    assert chain(found) == [(1, 0, 0, 0)]


def test_the_block_with_the_longest_row_is_the_slowest(launch):
    body = f"{INDEX} int i = 0; for (int k = 0; k < n[blockIdx.x]; ++k) i = x[i]; y[t] = i;"
    rows, x = np.array([2, 9, 0], np.int32), np.zeros(32, np.int32)
    found = timed(
        launch, "const int* x, const int* n, int* y", body, x, rows, np.zeros(96, np.int32), grid=3
    )
    assert [loads for loads, *_ in chain(found)] == [1 + 2, 1 + 9, 1]


def test_barriers_wait_for_the_slowest_warp(launch):
    """The first warp loads twice before the barrier, the second once after it."""
    body = f"""__shared__ float tile[64]; {INDEX}
      float v = 1; if (threadIdx.x < 32) v = x[(int)x[t]];
      tile[threadIdx.x] = v; __syncthreads();
      if (threadIdx.x >= 32) v = x[(int)tile[63 - threadIdx.x]];
      y[t] = v;"""
    arrays = numbers(128), numbers(128)
    found = timed(launch, "const float* x, float* y", body, *arrays, block=64, grid=2)
    assert chain(found) == [(3, 0, 0, 1)] * 2


def test_shuffles_and_copies(launch):
    shuffled = f"{INDEX} float v = x[t]; v += __shfl_xor_sync(~0u, v, 1);"
    shuffled += " v += __shfl_xor_sync(~0u, v, 2); y[t] = v;"
    found = timed(launch, "const float* x, float* y", shuffled, numbers(32), numbers(32))
    assert chain(found) == [(1, 0, 2, 0)]
    copied = f"""__shared__ float4 tile[64]; {INDEX}
      for (int i = 0; i < 2; ++i) {{
        unsigned to = (unsigned)__cvta_generic_to_shared(&tile[t + 32 * i]);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + t) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
      }}
      asm volatile("cp.async.wait_group %0;" :: "n"(KEPT) : "memory");
      __syncwarp(); y[t] = tile[31 - t].x;"""
    for kept in (0, 1):
        body = copied.replace("KEPT", str(kept))
        found = timed(launch, "const float4* x, float* y", body, numbers(128), numbers(32))
        assert chain(found) == [(1, 0, 0, 1)]


def test_instructions_are_counted_by_warps(launch):
    """A loop of n turns adds n times the instructions of a turn, for each warp that is in it."""
    body = f"{INDEX} float s = t; for (int k = 0; k < n; ++k) s = s * 3.0f + x[k]; y[t] = s;"

    def issued(n, block=32, grid=1):
        arguments = numbers(64), numbers(block * grid), n
        options = {"options": ("-D_=1",)}
        source = body.replace("for", '_Pragma("unroll 1") for')
        found = timed(
            launch, "const float* x, float* y, int n", source, *arguments, grid=grid, block=block,
            **options,
        )  # fmt: skip
        return found.issued.tolist()

    (one,), (two,), (five,) = issued(1), issued(2), issued(5)
    turn = two - one
    assert turn >= 4 and five == one + 4 * turn
    assert issued(5, block=96) == [3 * five] and issued(5, grid=3) == [five] * 3


def test_copies_of_an_inlined_line_are_counted_together(launch):
    """As the disassembler names them: the model compares the two, line by line."""
    source = """__device__ __forceinline__ float root(float a) {
        return sqrtf(a);
    }
    extern "C" __global__ void k(float* y) {
        float a = root(y[threadIdx.x]);
        y[threadIdx.x] = root(a + 1);
    }"""
    timeline = Timeline()
    launch(source, 1, 32, numbers(32), timeline=timeline)
    lines = timeline.lines()
    assert lines["kernel.cu:2"] == (2, 2) and not any("inlined" in line for line in lines)


def test_half_of_the_warps_in_a_branch(launch):
    body = f"{INDEX} float v = t; if (t % 64 < 32) {{ v = x[t]; v = v * v; }} y[t] = v;"
    found = timed(launch, "const float* x, float* y", body, numbers(128), numbers(128), block=128)
    (load,) = [pc for pc in found.executions if found._entry.instructions[pc].opcode == "ld"
               and "global" in found._entry.instructions[pc].modifiers]  # fmt: skip
    assert found.executions[load] == 2


def test_blocks_that_did_not_run_have_no_time(launch):
    body = f"{INDEX} y[t] = t;"
    found = timed(launch, "float* y", body, numbers(128), grid=4, blocks=[2])
    assert np.isnan(found.cycles).tolist() == [True, True, False, True]
    assert found.issued[[0, 1, 3]].tolist() == [0, 0, 0] and found.issued[2] > 0


MMA = """extern "C" __global__ void k(float* y) {
  float c[4] = {}; unsigned a[4] = {}, b[2] = {};
  for (int i = 0; i < 3; ++i)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.KIND.KIND.f32 {%0,%1,%2,%3},"
      "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  y[blockIdx.x * blockDim.x + threadIdx.x] = c[0];
}"""


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_operations_of_tensor_cores(launch, kind):
    timeline = Timeline(TENS)
    launch(MMA.replace("KIND", kind), 2, 64, np.zeros(128, np.float32), timeline=timeline)
    assert timeline.tensor_operations() == {kind: 3 * 4 * 16 * 8 * 16}
    assert chain(timeline) == [(0, 3, 0, 0)] * 2


OCTETS = """extern "C" __global__ void k(float* y) {
  float c[8] = {}; unsigned a[2] = {}, b[2] = {};
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"
    "{%8,%9},{%10,%11},{%0,%1,%2,%3,%4,%5,%6,%7};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]),
    "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
    : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
  y[threadIdx.x] = c[0];
}"""


def test_a_warp_computes_four_octets_at_once(launch):
    timeline = Timeline(TENS)
    launch(OCTETS, 1, 32, np.zeros(32, np.float32), timeline=timeline)
    assert timeline.tensor_operations() == {"f16": 4 * 8 * 8 * 4}


def test_a_timeline_is_off_by_default():
    program, memory = Program(ptx('extern "C" __global__ void k() {}')), Memory()
    program.run("k", 1, 32, [], memory)
