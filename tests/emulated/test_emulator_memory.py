"""Launches, state spaces and atomics of the emulator against NumPy."""

import ml_dtypes
import numpy as np
import pytest
from cuda_sources import toolkit_headers
from emulator import Fault, Memory, Program

INDEX = "int t = blockIdx.x * blockDim.x + threadIdx.x;"


def kernel(parameters, body, before=""):
    return f'{before}\nextern "C" __global__ void k({parameters}) {{ {body} }}'


VECTORS = [
    "char",
    "short",
    "int",
    "float",
    "long long",
    "double",
    "int2",
    "int4",
    "short4",
    "uchar4",
]
VECTORS += ["float2", "float4", "double2", "longlong2"]


@pytest.mark.parametrize("name", VECTORS)
def test_loads_and_stores(launch, name):
    size = {"char": 1, "short": 2, "int": 4, "float": 4, "long long": 8, "double": 8, "int2": 8}
    size |= {"short4": 8, "uchar4": 4, "float2": 8}
    width = size.get(name, 16)
    source = kernel(
        f"const {name}* __restrict__ x, {name}* y, int n",
        f"""__shared__ {name} tile[64]; {INDEX}
        tile[threadIdx.x] = t < n ? x[t] : x[0];
        __syncthreads();
        int from = 63 - threadIdx.x, to = blockIdx.x * 64 + threadIdx.x;
        if (to < n) y[to] = tile[from];""",
    )
    x = np.frombuffer(np.random.default_rng(0).bytes(128 * width), np.uint8).reshape(128, width)
    y = launch(source, 2, 64, x.copy(), np.zeros_like(x), 128)[1]
    np.testing.assert_array_equal(y, x.reshape(2, 64, width)[:, ::-1].reshape(128, width))


def test_sign_and_zero_extension(launch):
    source = kernel(
        "const signed char* a, const unsigned char* b, const short* c, long long* y",
        f"{INDEX} y[t] = (long long)a[t] * 1000000 + (long long)b[t] * 1000 + c[t];",
    )
    a, b, c = (np.arange(-40, 24).astype(d) for d in (np.int8, np.uint8, np.int16))
    y = launch(source, 1, 64, a, b, c, np.zeros(64, np.int64))[3]
    np.testing.assert_array_equal(y, a.astype(int) * 1000000 + b.astype(int) * 1000 + c)


@pytest.mark.parametrize("block", [(5, 3, 2), (33,), (8, 8), (1,), (7, 1, 9)])
def test_extents_and_partial_warps(launch, block):
    grid = (3, 2, 2)
    source = kernel(
        "int* y",
        """int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int threads = blockDim.x * blockDim.y * blockDim.z;
        __shared__ int last; if (t == threads - 1) last = b; __syncthreads();
        int lane; asm("mov.u32 %0, %%laneid;" : "=r"(lane));
        int low = __shfl_sync(0xffffffff, t, 0);
        y[b * threads + t] = t + 1000 * last + 1000000 * (lane == t % 32 && low == t / 32 * 32);""",
    )
    threads = int(np.prod(block))
    y = launch(source, grid, block, np.zeros((12, threads), np.int32))[0]
    expected = np.arange(threads) + 1000 * np.arange(12)[:, None] + 1000000
    np.testing.assert_array_equal(y, expected)


def test_more_blocks_than_run_together(launch):
    source = kernel("int* y", f"{INDEX} y[t] = t;")
    y = launch(source, 700, 96, np.zeros(700 * 96, np.int32))[0]
    np.testing.assert_array_equal(y, np.arange(len(y)))


def test_dynamic_shared_memory(launch):
    source = kernel(
        "const int* x, int* y",
        """extern __shared__ int tile[]; __shared__ int other[32];
        tile[threadIdx.x] = x[threadIdx.x]; other[threadIdx.x % 32] = 0; __syncthreads();
        y[threadIdx.x] = tile[31 - threadIdx.x];""",
    )
    x = np.arange(32, dtype=np.int32)
    y = launch(source, 1, 32, x, x.copy(), shared_bytes=128)[1]
    np.testing.assert_array_equal(y, x[::-1])
    with pytest.raises(Fault, match=r"thread \(31, 0, 0\) .* out of bounds: 4 bytes at shared"):
        launch(source, 1, 32, x, x.copy(), shared_bytes=124)


def test_variables_of_the_module(launch):
    before = """__constant__ float table[4] = {1.5f, -2.0f, 0.0f, 8.0f};
    __device__ int total = 5; __device__ const short few[3] = {7, -8, 9};"""
    source = kernel(
        "float* y", f"{INDEX} y[t] = table[t % 4] + few[t % 3]; atomicAdd(&total, 1);", before
    )
    y = launch(source, 1, 32, np.zeros(32, np.float32))[0]
    t = np.arange(32)
    np.testing.assert_array_equal(y, np.array([1.5, -2, 0, 8])[t % 4] + np.array([7, -8, 9])[t % 3])


def test_local_arrays_and_generic_addresses(launch):
    source = kernel(
        "const int* x, int* y, int which",
        f"""{INDEX} int own[8]; __shared__ int tile[64];
        for (int i = 0; i < 8; ++i) own[(i * 3 + t) % 8] = x[t] + i;
        tile[threadIdx.x] = x[t]; __syncthreads();
        const int* from = which == 0 ? x + t : which == 1 ? tile + threadIdx.x : own + t % 8;
        if (which == 3) from = t % 2 ? own + t % 8 : x + t;
        y[t] = *from;""",
    )
    x = np.arange(100, 164, dtype=np.int32)
    for which in range(4):
        y = launch(source, 1, 64, x, np.zeros_like(x), which)[1]
        np.testing.assert_array_equal(y, x)


def test_structures_by_value(launch):
    source = kernel(
        "Shape s, float* y, int i",
        f"{INDEX} y[t] = s.scale * s.extents[i] + s.extents[t % 3] + s.tag;",
        "struct Shape { double scale; int extents[3]; char tag; };",
    )
    layout = np.dtype(
        [("scale", "f8"), ("extents", "i4", 3), ("tag", "i1"), ("padding", "V3")], align=True
    )
    shape = np.zeros((), layout)
    shape["scale"], shape["extents"], shape["tag"] = 0.5, [10, 20, 30], -1
    y = launch(source, 1, 32, shape.tobytes(), np.zeros(32, np.float32), 1)[0]
    np.testing.assert_array_equal(y, 10 + np.array([10, 20, 30])[np.arange(32) % 3] - 1)


ATOMICS = [
    ("atomicAdd", "int", np.int32, lambda x: x.sum()),
    ("atomicAdd", "unsigned long long", np.uint64, lambda x: x.sum()),
    ("atomicAdd", "float", np.float32, lambda x: x.sum()),
    ("atomicAdd", "double", np.float64, lambda x: x.sum()),
    ("atomicMax", "int", np.int32, lambda x: x.max(initial=0)),
    ("atomicMin", "unsigned", np.uint32, lambda x: x.min(initial=0)),
    ("atomicMin", "long long", np.int64, lambda x: x.min(initial=0)),
    ("atomicOr", "unsigned", np.uint32, lambda x: np.bitwise_or.reduce(x)),
    ("atomicXor", "unsigned", np.uint32, lambda x: np.bitwise_xor.reduce(x)),
    ("atomicAnd", "int", np.int32, lambda x: 0),
]


@pytest.mark.parametrize("place", ["global", "shared"])
@pytest.mark.parametrize("wanted", [False, True], ids=["red", "atom"])
@pytest.mark.parametrize(
    "name, kind, dtype, reference", ATOMICS, ids=[f"{a[0]}-{a[1]}" for a in ATOMICS]
)
def test_atomics(launch, name, kind, dtype, reference, wanted, place):
    target = "&y[t % 3]" if place == "global" else "&tile[t % 3]"
    use = f"{kind} old = {name}({target}, x[t]);" if wanted else f"{name}({target}, x[t]);"
    result = "old" if wanted else "0"
    source = kernel(
        f"const {kind}* x, {kind}* y, {kind}* z",
        f"""{INDEX} __shared__ {kind} tile[3];
        if (threadIdx.x < 3) tile[threadIdx.x] = 0;
        __syncthreads(); {use} __syncthreads(); z[t] = {result};
        if (threadIdx.x < 3 && {int(place == "shared")}) y[t] = tile[t];""",
    )
    random = np.random.default_rng(0)
    x = random.integers(0 if np.dtype(dtype).kind == "u" else -50, 50, 64).astype(dtype)
    y, z = launch(source, 1, 64, x, np.zeros(3, dtype), np.zeros(64, dtype))[1:]
    np.testing.assert_array_equal(y, [reference(x[i::3]) for i in range(3)])
    if wanted and name == "atomicAdd":  # the old values depend on the order of the lanes
        for i in range(3):
            np.testing.assert_array_equal(z[i::3], np.cumsum(x[i::3]) - x[i::3])


def test_compare_and_swap_loop(launch):
    source = kernel(
        "const float* x, float* y",
        f"""{INDEX} int* target = (int*)y; int seen = *target, old;
        do {{ old = seen; float best = fmaxf(__int_as_float(old), x[t]);
          seen = atomicCAS(target, old, __float_as_int(best)); }} while (seen != old);
        atomicExch((int*)y + 1, 7); atomicInc((unsigned*)y + 2, 9);""",
    )
    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    y = launch(source, 2, 64, x, np.zeros(3, np.float32))[1]
    assert y[0] == x.max() and y.view(np.int32)[1] == 7 and y.view(np.int32)[2] == 128 % 10


@pytest.mark.parametrize("length", [2, 4])
def test_vector_reductions(launch, length):
    if launch.architecture == "compute_80":
        pytest.skip("red.v2 and red.v4 come with sm_90")
    parts = ", ".join(f"%{i + 1}" for i in range(length))
    bound = ", ".join(f'"f"(x[t * {length} + {i}])' for i in range(length))
    source = kernel(
        "const float* x, float* y",
        f"""{INDEX} asm volatile("red.global.add.v{length}.f32 [%0], {{{parts}}};"
        :: "l"(y + t % 3 * {length}), {bound} : "memory");""",
    )
    x = np.random.default_rng(0).integers(-9, 9, (64, length)).astype(np.float32)
    y = launch(source, 1, 64, x, np.zeros((3, length), np.float32))[1]
    np.testing.assert_array_equal(y, [x[i::3].sum(axis=0) for i in range(3)])


@pytest.mark.parametrize(
    "header, kind", [("cuda_fp16.h", "__half2"), ("cuda_bf16.h", "__nv_bfloat162")]
)
def test_halves_of_the_headers(launch, header, kind):
    if not toolkit_headers():
        pytest.skip(f"no {header} here")
    one = {"__half2": "__half", "__nv_bfloat162": "__nv_bfloat16"}[kind]
    source = kernel(
        f"const float* x, float* y, {kind}* z",
        f"""{INDEX} {kind} v; v.x = {one}(x[2 * t]); v.y = {one}(x[2 * t + 1]);
        v = __hfma2(v, v, __hadd2(v, v)); v = __hmax2(v, __hneg2(v)); atomicAdd(z, v);
        y[2 * t] = float(v.x) + (float)__hgt(v.x, v.y); y[2 * t + 1] = float(v.y);""",
        f"#include <{header}>",
    )
    x = np.random.default_rng(0).integers(-1, 2, 64).astype(np.float32)  # small: sums are exact
    v = np.abs(x * x + 2 * x).reshape(-1, 2)
    y, z = launch(source, 1, 32, x, np.zeros_like(x), np.zeros(1, np.uint32))[1:]
    v_plus = np.stack([v[:, 0] + (v[:, 0] > v[:, 1]), v[:, 1]], axis=1)
    np.testing.assert_array_equal(y.reshape(-1, 2), v_plus)
    if kind == "__half2":
        total = z.view(np.float16)
    else:
        total = (z.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    np.testing.assert_array_equal(total, v.sum(axis=0))


def test_buffers():
    memory = Memory(capacity=1024)
    kinds = (0, np.float32), (3, np.int16), (10**6, np.float64), (5, ml_dtypes.bfloat16)
    arrays = [np.arange(n, dtype=d) for n, d in kinds]
    addresses = [memory.put(array) for array in arrays]
    for address, array in zip(addresses, arrays, strict=True):
        assert address % 256 == 0
        np.testing.assert_array_equal(memory.get(address, array), array)
    with pytest.raises(Fault, match="no buffer of 8 bytes"):
        memory.get(addresses[1], np.zeros(4, np.int16))
    assert addresses[2] - addresses[1] >= 256 + 6


def test_a_module_without_kernels_has_no_entries():
    assert Program(".version 8.0\n.target sm_90\n.address_size 64\n").entries == ()
