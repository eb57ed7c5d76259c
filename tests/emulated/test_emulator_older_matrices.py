"""mma.m8n8k4 and wmma of the emulator against NumPy, on integers: equal to the bit."""

import itertools

import numpy as np
import pytest
from battery import cast
from emulator import Fault

DTYPES = {"f16": "float16", "bf16": "bfloat16"}
LAYOUTS = list(itertools.product(("row", "col"), repeat=2))


def stored(matrix, dtype):
    return cast(matrix, dtype).view(np.uint16)


def octet_kernel(a_layout, b_layout, swap=False):
    """A warp loads four pairs of matrices as PTX ISA 9.7.14.5.1 says, multiplies and stores."""
    along, across = "A[own * 4 + i]", "A[(i + half) * 4 + lane % 4]"
    load_a = along if a_layout == "row" else across
    along, across = "B[i * 8 + own]", "B[lane % 4 * 8 + i + half]"
    load_b = along if b_layout == "col" else across
    high = "lane < 16" if swap else "lane >= 16"
    outs = ", ".join(f"%{i}" for i in range(8))
    sums = ", ".join(f'"+f"(c[{i}])' for i in range(8))
    place = "((lane & 1) + (i & 2) + half) * 8 + (i & 4) + (lane & 2) + (i & 1)"
    name = f"mma.sync.aligned.m8n8k4.{a_layout}.{b_layout}.f32.f16.f16.f32"
    half = "unsigned short"
    return f"""extern "C" __global__ void k(const {half}* A, const {half}* B, float* C) {{
  int lane = threadIdx.x % 32, octet = threadIdx.x / 32 * 4 + lane % 16 / 4;
  int half = ({high}) ? 4 : 0, own = lane % 4 + half;
  A += octet * 32; B += octet * 32; C += octet * 64;
  unsigned a[2] = {{}}, b[2] = {{}}; float c[8];
  for (int i = 0; i < 4; ++i) a[i / 2] |= (unsigned){load_a} << 16 * (i % 2);
  for (int i = 0; i < 4; ++i) b[i / 2] |= (unsigned){load_b} << 16 * (i % 2);
  half = lane >= 16 ? 4 : 0;
  for (int i = 0; i < 8; ++i) c[i] = C[{place}];
  asm volatile("{name} {{{outs}}}, {{%8, %9}}, {{%10, %11}}, {{{outs}}};"
    : {sums} : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
  for (int i = 0; i < 8; ++i) C[{place}] = c[i];
}}"""


@pytest.mark.parametrize(("a_layout", "b_layout"), LAYOUTS)
def test_octets(launch, a_layout, b_layout):
    random = np.random.default_rng(0)
    a, b, c = (random.integers(-8, 9, (8, *s)) for s in ((8, 4), (4, 8), (8, 8)))
    arguments = stored(a, "float16"), stored(b, "float16"), c.astype(np.float32)
    right = launch(octet_kernel(a_layout, b_layout), 1, 64, *arguments)[2]
    np.testing.assert_array_equal(right, a @ b + c)
    # high and low groups exchanged: legal, so only the comparison catches it
    wrong = launch(octet_kernel(a_layout, b_layout, swap=True), 1, 64, *arguments)[2]
    assert (wrong != a @ b + c).any()


def wmma_kernel(kind, a_layout, b_layout, leading=0, offset=0, address="0"):
    """A warp copies to shared memory, multiplies with wmma and stores from there."""
    a_count = 8 if kind == "f16" else 2
    types = "f32.f32" if kind == "f16" else "f32.bf16.bf16.f32"
    names = lambda first, count: ", ".join(f"%{first + i}" for i in range(count))
    bound = lambda name, count, kind: ", ".join(f'"{kind}"({name}[{i}])' for i in range(count))
    shape = "m8n32k16"
    a_leading = (16 if a_layout == "row" else 8) + leading
    b_leading = 32 if b_layout == "row" else 16

    def load(matrix, count, layout, leading, source):
        return f"""asm volatile("wmma.load.{matrix}.sync.aligned.{layout}.{shape}.shared.{kind} "
    "{{{names(0, count)}}}, [%{count}], %{count + 1};" : {bound(matrix, count, "=r")}
    : "r"((unsigned)__cvta_generic_to_shared({source})), "r"({leading}) : "memory");"""

    half = "unsigned short"
    return f"""extern "C" __global__ void k(const {half}* A, const {half}* B, float* C) {{
  __shared__ __align__(32) unsigned short left[16 * 32], right[16 * 32];
  unsigned a[{a_count}], b[8]; float d[8];
  for (int i = 0; i < 8; ++i) d[i] = 1;
  for (int i = threadIdx.x; i < 512; i += 32) left[i] = i < 128 ? A[i] : 0, right[i] = B[i];
#ifndef BUG
  __syncwarp();
#endif
  {load("a", a_count, a_layout, a_leading, f"left + {offset} + ({address})")}
  {load("b", 8, b_layout, b_leading, "right")}
  asm volatile("wmma.mma.sync.aligned.{a_layout}.{b_layout}.{shape}.{types} "
    "{{{names(0, 8)}}}, {{{names(8, a_count)}}}, {{{names(8 + a_count, 8)}}}, {{{names(0, 8)}}};"
    : {bound("d", 8, "+f")} : {bound("a", a_count, "r")}, {bound("b", 8, "r")});
  asm volatile("wmma.store.d.sync.aligned.row.{shape}.global.f32 [%0], {{{names(1, 8)}}}, %9;"
    :: "l"(C), {bound("d", 8, "f")}, "r"(32) : "memory");
}}"""


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("a_layout", "b_layout"), LAYOUTS)
def test_wmma(launch, a_layout, b_layout, kind):
    random = np.random.default_rng(1)
    a, b = random.integers(-8, 9, (8, 16)), random.integers(-8, 9, (16, 32))
    by_layout = lambda x, layout: np.ascontiguousarray(x if layout == "row" else x.T)
    arguments = [stored(by_layout(x, y), DTYPES[kind]) for x, y in ((a, a_layout), (b, b_layout))]
    source = wmma_kernel(kind, a_layout, b_layout)
    found = launch(source, 1, 32, *arguments, np.zeros((8, 32), np.float32))[2]
    np.testing.assert_array_equal(found, a @ b + 1)


@pytest.mark.parametrize(
    ("says", "changes"),
    [
        ("misaligned address: .* no multiple of 32 bytes", {"offset": 8}),
        ("misaligned leading dimension: .* no multiple of 16 bytes", {"leading": 4}),
        ("address is not the one of lane 0", {"address": "threadIdx.x % 2 * 16"}),
        ("out of bounds", {"offset": 448}),
    ],
)
def test_wrong_matrices_are_caught(launch, says, changes):
    arguments = np.zeros(128, np.uint16), np.zeros(512, np.uint16), np.zeros((8, 32), np.float32)
    with pytest.raises(Fault, match=says):
        launch(wmma_kernel("f16", "row", "row", **changes), 1, 32, *arguments)


def test_a_missing_barrier_before_wmma_is_caught(caught):
    arguments = np.zeros(128, np.uint16), np.zeros(512, np.uint16), np.zeros((8, 32), np.float32)
    caught(wmma_kernel("f16", "row", "row"), "race on shared memory", *arguments, grid=1, block=32)
