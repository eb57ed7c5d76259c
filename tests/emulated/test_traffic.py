"""Requests, sectors and lines of small kernels, and what caches pass on, counted by hand."""

import numpy as np
import pytest
from cuda_sources import toolkit_headers
from emulator import Fault, Traffic, replay
from emulator.traffic import Cache, Count

INDEX = "int t = blockIdx.x * blockDim.x + threadIdx.x;"
SECTOR = 32


def counted(launch, parameters, body, *arguments, grid=1, block=32, **keywords):
    """The traffic of a kernel, and its arrays afterwards."""
    source = f'extern "C" __global__ void k({parameters}) {{ {body} }}'
    traffic = Traffic()
    arrays = launch(source, grid, block, *arguments, traffic=traffic, **keywords)
    return traffic, arrays


def floats(size):
    return np.arange(size, dtype=np.float32)


# What 32 lanes read: (index of lane t, sectors, lines).
PATTERNS = {
    "coalesced": ("t", 4, 1),
    "one float further": ("t + 1", 5, 2),
    "stride of 2": ("2 * t", 8, 2),
    "stride of 8": ("8 * t", 32, 8),
    "stride of 32": ("32 * t", 32, 32),
    "broadcast": ("7", 1, 1),
    "two rows": ("t / 16 * 512 + t % 16", 4, 2),
    "backwards": ("31 - t", 4, 1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_load_touches_sectors_and_lines(launch, name):
    index, sectors, lines = PATTERNS[name]
    traffic, _ = counted(
        launch, "const float* x, float* y", f"{INDEX} y[t] = x[{index}];", floats(1024), floats(32)
    )
    assert traffic.load == Count(1, sectors, lines, 32, 128)
    assert traffic.store == Count(1, 4, 1, 32, 128)
    assert traffic.atomic == Count()
    assert traffic.all == traffic.load + traffic.store


@pytest.mark.parametrize("kind, width", [("short", 2), ("float2", 8), ("float4", 16)])
def test_widths(launch, kind, width):
    body = f"{INDEX} y[t] = x[t];"
    x = np.zeros(64 * width, np.uint8)
    traffic, _ = counted(launch, f"const {kind}* x, {kind}* y", body, x, x.copy(), block=64)
    expected = Count(2, 2 * width, 2 * max(width // 4, 1), 64, 64 * width)
    assert traffic.load == traffic.store == expected


def test_lanes_that_are_off_and_other_spaces_cost_nothing(launch):
    body = f"""__shared__ float tile[64]; {INDEX}
      tile[threadIdx.x] = t; __syncthreads();
      if (t < n) y[t] = x[t] + tile[63 - threadIdx.x];"""
    traffic, (_, y) = counted(
        launch, "const float* x, float* y, int n", body, floats(64), floats(64), 37, block=64
    )
    assert traffic.load == traffic.store == Count(2, 4 + 1, 2, 37, 37 * 4)
    np.testing.assert_array_equal(y[:37], 63)


def test_each_turn_of_a_loop_is_a_request(launch):
    body = f"{INDEX} float sum = 0; for (int i = 0; i < n; ++i) sum += x[32 * i + t]; y[t] = sum;"
    traffic, _ = counted(
        launch, "const float* x, float* y, int n", body, floats(160), floats(32), 5
    )
    assert traffic.load == Count(5, 20, 5, 160, 640)


def test_atomics_and_asynchronous_copies(launch):
    body = f"""__shared__ float4 tile[32]; {INDEX}
      unsigned to = (unsigned)__cvta_generic_to_shared(&tile[t]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + 2 * t));
      asm volatile("cp.async.wait_all;"); __syncthreads();
      atomicAdd(y + t / 8, tile[t].x);"""
    traffic, _ = counted(launch, "const float4* x, float* y", body, floats(256), floats(4))
    assert traffic.load == Count(1, 32, 8, 32, 512)
    assert traffic.atomic == Count(1, 1, 1, 32, 128)
    assert traffic.store == Count()


def test_instructions_are_counted_apart(launch):
    body = f"{INDEX} y[t] = x[t] + z[8 * t];"
    arrays = floats(32), floats(256), floats(32)
    traffic, _ = counted(launch, "const float* x, const float* z, float* y", body, *arrays)
    found = sorted(
        count.sectors for (kind, _), count in traffic.instructions.items() if kind == "load"
    )
    assert found == [4, 32]
    assert all("ld.global" in text for kind, text in traffic.instructions if kind == "load")
    assert traffic.load.per_request()["sectors"] == 18


def test_some_blocks_alone(launch):
    body = f"{INDEX} y[t] = blockIdx.x;"
    y = np.full(5 * 32, -1, np.float32)
    traffic, (found,) = counted(launch, "float* y", body, y, grid=5, blocks=[1, 4])
    assert traffic.store == Count(2, 8, 2, 64, 256)
    expected = np.repeat(np.float32([-1, 1, -1, -1, 4]), 32)
    np.testing.assert_array_equal(found, expected)
    block, warp, turn, _, _, _ = traffic.stream()
    assert block.tolist() == warp.tolist() == [1, 4] and turn.tolist() == [0, 0]
    for wrong in ([1, 1], [4, 1], [5], [-1]):
        with pytest.raises(ValueError, match="ascending numbers of 5 blocks"):
            counted(launch, "float* y", body, y, grid=5, blocks=wrong)
    with pytest.raises(ValueError, match="either an order of all blocks or some"):
        counted(launch, "float* y", body, y, grid=2, blocks=[0], order=[1, 0])


def test_races_between_blocks_that_are_apart_are_noticed(launch):
    body = f"{INDEX} y[threadIdx.x] = t;"
    with pytest.raises(Fault, match="race"):
        counted(launch, "float* y", body, floats(32), grid=9, blocks=[2, 7])


REPEAT = f"{INDEX} float sum = 0; for (int i = 0; i < n; ++i) sum += x[i % m * 32 + threadIdx.x];"
REPEAT += " y[t] = sum;"
SHAPE = {"multiprocessors": 2, "resident": 1, "l1_bytes": 512, "l2_bytes": 1024}


def passed(launch, n, m, grid=1, **caches):
    arguments = floats(32 * m), floats(32 * grid), n, m
    parameters = "const float* x, float* y, int n, int m"
    traffic, _ = counted(launch, parameters, REPEAT, *arguments, grid=grid)
    assert traffic.load.sectors == 4 * n * grid
    return replay(traffic, **SHAPE | caches)


def test_a_loop_that_fits_reads_once_and_one_that_does_not_reads_always(launch):
    """Four lines are kept; of five in turn, least recently used is always the next."""
    fits = passed(launch, 20, 4)
    assert (fits.l2_read, fits.l2_written) == (4 * 128, 128)
    assert (fits.memory_read, fits.memory_written) == (4 * 128, 128)
    over = passed(launch, 20, 5)
    assert (over.l2_read, over.memory_read) == (20 * 128, 5 * 128)
    assert passed(launch, 20, 5, l2_bytes=4 * 128).memory_read == 20 * 128
    assert passed(launch, 20, 5, l1_bytes=0, l2_bytes=0).memory_read == 20 * 128


def test_each_multiprocessor_has_an_l1(launch):
    """Blocks 0, 2 and 1, 3 share one; all share L2."""
    found = passed(launch, 8, 4, grid=4)
    assert found.l2_read == 2 * 4 * 128 and found.memory_read == 4 * 128
    assert passed(launch, 8, 4, grid=4, multiprocessors=4).l2_read == 4 * 4 * 128
    assert found.l2_written == found.memory_written == 4 * 128


def test_blocks_that_run_together_share_lines_while_they_are_there(launch):
    """Both blocks read five lines. One after the other, nothing is left for the second; together,
    it comes right behind the first."""
    apart = passed(launch, 5, 5, grid=2, multiprocessors=1, resident=1)
    together = passed(launch, 5, 5, grid=2, multiprocessors=1, resident=2)
    assert (apart.l2_read, together.l2_read) == (10 * 128, 5 * 128)


def test_loads_past_l1_go_to_l2_each_time(launch):
    """x is in L1 after the first loop; loads past it are served by L2 all the same."""
    body = f"""{INDEX} float sum = 0;
      for (int i = 0; i < n; ++i) sum += x[i + t];
      for (int i = 0; i < n; ++i) sum += __ldcg(x + i + t);
      y[t] = sum;"""
    arguments = floats(64), floats(32), 2
    traffic, _ = counted(launch, "const float* x, float* y, int n", body, *arguments)
    assert traffic.load.sectors == 2 * (4 + 5)
    found = replay(traffic, **SHAPE)
    assert found.l2_read == (5 + 9) * SECTOR  # of plain loads: 4 sectors, then the fifth
    assert found.memory_read == 5 * SECTOR
    assert found.memory_written == found.l2_written == 128


def test_fragments_are_refused(launch):
    source = """#include <mma.h>
    extern "C" __global__ void k(const __half* x, float* y) {
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 8, 32, 16, __half, nvcuda::wmma::row_major> a;
      nvcuda::wmma::load_matrix_sync(a, x, 16);
      y[threadIdx.x] = __half2float(a.x[0]);
    }"""
    if not toolkit_headers():
        pytest.skip("mma.h is not installed")
    x = np.zeros(128, np.float16)
    launch(source, 1, 32, x, floats(32))
    with pytest.raises(NotImplementedError, match="requests of a fragment"):
        launch(source, 1, 32, x, floats(32), traffic=Traffic())


def test_atomics_read_memory_and_write_it_once(launch):
    body = f"{INDEX} atomicAdd(y, 1.0f); atomicAdd(y, 2.0f);"
    traffic, _ = counted(launch, "float* y", body, floats(8), grid=3)
    found = replay(traffic, **SHAPE)
    assert traffic.atomic.requests == 6 and found.l2_written == 6 * SECTOR
    assert (found.memory_read, found.memory_written) == (SECTOR, SECTOR)


def test_the_line_used_longest_ago_goes_first():
    cache = Cache(3 * 128)
    assert [cache.read(line, 0b1) for line in (0, 1, 2, 0, 3)] == [1, 1, 1, 0, 1]
    assert [cache.read(line, 0b1) for line in (0, 2, 3)] == [0, 0, 0]
    assert cache.read(0, 0b11) == 0b10  # another sector of a line that is there
    assert cache.read(1, 0b1) == 1
    cache.write(2, 0b110)  # line 2 was evicted by line 1
    assert cache.written_back == 0
    cache.flush()
    assert cache.written_back == 2


def test_traffic_is_off_by_default_and_changes_nothing(launch):
    body = f"{INDEX} y[t] = 2 * x[t];"
    source = f'extern "C" __global__ void k(const float* x, float* y) {{ {body} }}'
    plain = launch(source, 2, 32, floats(64), floats(64))[1]
    _, (_, y) = counted(launch, "const float* x, float* y", body, floats(64), floats(64), grid=2)
    np.testing.assert_array_equal(y, plain)
