"""mma, ldmatrix and movmatrix of the emulator against NumPy, on integers: equal to the bit."""

import numpy as np
import pytest
from emulator import Fault

# name -> (shape and types, k, registers of A and B, C type of an element, its 16-bit type)
SHAPES = {
    "f16": ("m16n8k16.row.col.f32.f16.f16.f32", 16, "f16"),
    "bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 16, "bf16"),
    "f16 k8": ("m16n8k8.row.col.f32.f16.f16.f32", 8, "f16"),
    "tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", 8, "tf32"),
    "tf32 k4": ("m16n8k4.row.col.f32.tf32.tf32.f32", 4, "tf32"),
}


def stored(matrix, kind):
    """Integers as bits of the type, in words that the kernel declares."""
    if kind == "f16":
        return matrix.astype(np.float16).view(np.uint16)
    bits = matrix.astype(np.float32).view(np.uint32)
    return (bits >> np.uint32(16)).astype(np.uint16) if kind == "bf16" else bits


def product_kernel(name, swap=False):
    """A warp loads the fragments as PTX ISA 9.7.14 says, multiplies and stores."""
    instruction, k, kind = SHAPES[name]
    element = "unsigned" if kind == "tf32" else "unsigned short"
    per_register = 1 if kind == "tf32" else 2
    a_registers, b_registers = 16 * k // 32 // per_register, 8 * k // 32 // per_register
    if kind == "tf32":
        load_a = f"a[i] = A[(g + 8 * (i & 1)) * {k} + t + 4 * (i >> 1)];"
        load_b = "b[i] = B[(t + 4 * i) * 8 + g];"
    else:
        load_a = f"""for (int h = 0; h < 2; ++h)
          a[i] |= (unsigned)A[(g + 8 * (i & 1)) * {k} + 2 * t + h + 8 * (i >> 1)] << 16 * h;"""
        load_b = """for (int h = 0; h < 2; ++h)
          b[i] |= (unsigned)B[(2 * t + h + 8 * i) * 8 + g] << 16 * h;"""
    if swap:
        load_a += " if (i == 1) { unsigned x = a[0]; a[0] = a[1]; a[1] = x; }"
    outs = ", ".join(f"%{i}" for i in range(4))
    a_list = ", ".join(f"%{4 + i}" for i in range(a_registers))
    b_list = ", ".join(f"%{4 + a_registers + i}" for i in range(b_registers))
    bound = [f'"r"(a[{i}])' for i in range(a_registers)]
    bound += [f'"r"(b[{i}])' for i in range(b_registers)]
    return f"""extern "C" __global__ void k(const {element}* A, const {element}* B, float* C) {{
  int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  A += threadIdx.x / 32 * 16 * {k}; B += threadIdx.x / 32 * {k} * 8; C += threadIdx.x / 32 * 128;
  unsigned a[{a_registers}] = {{}}, b[{b_registers}] = {{}}; float c[4];
  for (int i = 0; i < {a_registers}; ++i) {{ {load_a} }}
  for (int i = 0; i < {b_registers}; ++i) {{ {load_b} }}
  for (int i = 0; i < 4; ++i) c[i] = C[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)];
  asm volatile("mma.sync.aligned.{instruction} {{{outs}}}, {{{a_list}}}, {{{b_list}}}, {{{outs}}};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : {", ".join(bound)});
  for (int i = 0; i < 4; ++i) C[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = c[i];
}}"""


@pytest.mark.parametrize("name", SHAPES)
def test_products(launch, name):
    _, k, kind = SHAPES[name]
    random = np.random.default_rng(0)
    a, b, c = (random.integers(-8, 9, (3, *s)) for s in ((16, k), (k, 8), (16, 8)))
    arguments = stored(a, kind), stored(b, kind), c.astype(np.float32)
    right = launch(product_kernel(name), 1, 96, *arguments)[2]
    np.testing.assert_array_equal(right, a @ b + c)
    if k > 4:  # swapped fragments: legal, so only the comparison catches them
        wrong = launch(product_kernel(name, swap=True), 1, 96, *arguments)[2]
        assert (wrong != a @ b + c).any()


def test_half_accumulators(launch):
    source = """extern "C" __global__ void k(unsigned* D) {
  unsigned one = 0x3c003c00, d0, d1;
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %2, %2, %2}, {%2, %2}, "
      "{%2, %3};" : "=r"(d0), "=r"(d1) : "r"(one), "r"(0));
  D[2 * threadIdx.x] = d0; D[2 * threadIdx.x + 1] = d1;
}"""
    (d,) = launch(source, 1, 32, np.zeros((32, 2), np.uint32))
    np.testing.assert_array_equal(d.view(np.float16).reshape(32, 4), [[17, 17, 16, 16]] * 32)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(launch, count, trans):
    registers = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    source = f"""extern "C" __global__ void k(const unsigned* x, unsigned* y) {{
  __shared__ __align__(16) unsigned tile[32 * 4];
  int t = threadIdx.x; unsigned r[4];
  for (int i = 0; i < 4; ++i) tile[32 * i + t] = x[32 * i + t];
  __syncwarp();
  unsigned row = (unsigned)__cvta_generic_to_shared(tile) + 16 * (t % {8 * count});
  asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%{count}];"
    : {outs} : "r"(row) : "memory");
  for (int i = 0; i < {count}; ++i) y[32 * i + t] = r[i];
}}"""
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    y = launch(source, 1, 32, x, np.zeros(32 * count, np.uint32))[1]
    expected = x.transpose(0, 2, 1) if trans else x
    np.testing.assert_array_equal(y.view(np.uint16).reshape(count, 8, 8), expected[:count])


@pytest.mark.parametrize("bug", [False, True])
def test_a_warp_comes_to_a_matrix_instruction_together(launch, bug):
    """All lanes arrive, but odd lanes one iteration before the even ones."""
    source = f"""extern "C" __global__ void k(const unsigned* x, unsigned* y) {{
  unsigned r = 0;
#pragma unroll 1
  for (unsigned i = 0; i < x[0]; ++i) {{
    if ((i + {"threadIdx.x" if bug else "1"}) % 2)
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(0x50005));
  }}
  y[threadIdx.x] = r;
}}"""
    x = np.full(64, 2, np.uint32)
    if bug:
        with pytest.raises(Fault, match=r"movmatrix.* in parts, without thread \(0, 0, 0\)"):
            launch(source, 1, 64, x, np.zeros(64, np.uint32))
    else:
        y = launch(source, 1, 64, x, np.zeros(64, np.uint32))[1]
        np.testing.assert_array_equal(y, np.full(64, 0x50005))


def test_movmatrix(launch):
    source = """extern "C" __global__ void k(const unsigned* x, unsigned* y) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x[threadIdx.x]));
  y[threadIdx.x] = r;
}"""
    x = np.arange(128, dtype=np.uint16).reshape(2, 8, 8)
    y = launch(source, 1, 64, x, np.zeros(64, np.uint32))[1]
    np.testing.assert_array_equal(y.view(np.uint16).reshape(2, 8, 8), x.transpose(0, 2, 1))
    with pytest.raises(Fault, match=r"thread \(32, 0, 0\) .* a warp of fewer than 32 threads"):
        launch(source, 1, 48, x, np.zeros(64, np.uint32))
