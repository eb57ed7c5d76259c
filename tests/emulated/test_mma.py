"""cuda/common/mma.cuh: tensor-core products, packing and loads of fragments, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

DEPTH = {"float16": 16, "bfloat16": 16, "float32": 8}
TYPES = {"float16": "sgap::float16", "bfloat16": "sgap::bfloat16", "float32": "float"}


def words(x):
    """The bits of x as an integer array, for the emulator's memory."""
    return x.view(f"u{x.itemsize}")


@pytest.mark.parametrize("dtype", DEPTH)
def test_products_of_fragments_as_the_header_draws_them(launch, dtype):
    k, element = DEPTH[dtype], TYPES[dtype]
    source = f"""#include "mma.cuh"
    extern "C" __global__ void k(const {element}* A, const {element}* B, float* D) {{
      const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
      const int warp = threadIdx.x / 32;
      A += warp * 16 * {k}; B += warp * {k} * 8; D += warp * 128;
      unsigned a[4], b[2];
      for (int i = 0; i < 4; ++i) {{
        const int row = g + 8 * (i % 2);
        if (sizeof({element}) == 2) {{
          const int at = 2 * t + 8 * (i / 2);
          a[i] = sgap::PackLow(sgap::Bits(A[row * {k} + at]), sgap::Bits(A[row * {k} + at + 1]));
        }} else {{
          a[i] = sgap::Bits(A[row * {k} + t + 4 * (i / 2)]);
        }}
      }}
      for (int i = 0; i < 2; ++i) {{
        if (sizeof({element}) == 2) {{
          const int at = 2 * t + 8 * i;
          b[i] = sgap::PackLow(sgap::Bits(B[at * 8 + g]), sgap::Bits(B[(at + 1) * 8 + g]));
        }} else {{
          b[i] = sgap::Bits(B[(t + 4 * i) * 8 + g]);
        }}
      }}
      float d[4];
      for (int i = 0; i < 4; ++i) d[i] = D[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
      sgap::MultiplyAdd<{element}>(a, b, d);
      for (int i = 0; i < 4; ++i) D[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = d[i];
    }}"""
    random = np.random.default_rng(0)
    a, b, d = (random.integers(-8, 9, (3, *s)) for s in ((16, k), (k, 8), (16, 8)))
    given = [words(x.astype(jnp.dtype(dtype))) for x in (a, b)]
    (*_, product) = launch(source, 1, 96, *given, d.astype(np.float32))
    np.testing.assert_array_equal(product, a @ b + d)


def test_halves_are_paired_and_matrices_turned(launch):
    source = """#include "mma.cuh"
    extern "C" __global__ void k(const unsigned* x, unsigned* y) {
      const unsigned t = threadIdx.x;
      y[t] = sgap::PackLow(x[t], x[t + 32]);
      y[t + 32] = sgap::PackHigh(x[t], x[t + 32]);
      y[t + 64] = sgap::TransposeMatrix(x[t]);
    }"""
    x = np.arange(128, dtype=np.uint16)
    y = launch(source, 1, 32, words(x.view(np.uint32)), np.zeros(96, np.uint32))[1].view(np.uint16)
    halves = x.reshape(2, 32, 2)
    np.testing.assert_array_equal(y[:64].reshape(32, 2), halves[:, :, 0].T)
    np.testing.assert_array_equal(y[64:128].reshape(32, 2), halves[:, :, 1].T)
    np.testing.assert_array_equal(y[128:].reshape(8, 8), x[:64].reshape(8, 8).T)


def test_tf32_is_rounded_to_nearest_and_keeps_nan(launch):
    source = """#include "mma.cuh"
    extern "C" __global__ void k(const float* x, unsigned* y) {
      y[threadIdx.x] = sgap::RoundToTf32(x[threadIdx.x]);
    }"""
    unit = np.float32(2**-10)
    x = 1 + unit * np.linspace(0, 4, 32, dtype=np.float32)
    bits = launch(source, 1, 32, x, np.zeros(32, np.uint32))[1]
    rounded = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    assert (np.abs(rounded - x) <= unit / 2).all()
    bits = launch(source, 1, 32, np.full(32, np.nan, np.float32), np.zeros(32, np.uint32))[1]
    assert np.isnan((bits & np.uint32(0xFFFFE000)).view(np.float32)).all()


@pytest.mark.parametrize("dtype", DEPTH)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_numbers_are_loaded_as_words(launch, count, aligned, dtype):
    in_word = 4 // jnp.dtype(dtype).itemsize
    many = count * in_word
    source = f"""#include "mma.cuh"
    extern "C" __global__ void k(const {TYPES[dtype]}* x, unsigned* y, int left) {{
      const auto words =
        sgap::LoadWords<{str(aligned).lower()}, {count}>(x + threadIdx.x * {many}, left);
      for (int i = 0; i < {count}; ++i) y[threadIdx.x * {count} + i] = words.at[i];
    }}"""
    x = np.arange(1, 32 * many + 1).astype(jnp.dtype(dtype)).reshape(32, many)
    for left in (0, many) if aligned else range(many + 1):
        y = launch(source, 1, 32, words(x), np.zeros(32 * count, np.uint32), left)[1]
        expected = np.where(np.arange(many) < left, x, x.dtype.type(0))
        np.testing.assert_array_equal(words(y).view(x.dtype).reshape(x.shape), expected)


@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_not_there_is_not_loaded(launch, caught, aligned):
    source = f"""#include "mma.cuh"
    extern "C" __global__ void k(const sgap::float16* x, unsigned* y) {{
    #ifdef BUG
      const unsigned left = 8;
    #else
      const unsigned left = threadIdx.x < 4 ? 8 : 0;
    #endif
      const auto words = sgap::LoadWords<{str(aligned).lower()}, 4>(x + threadIdx.x * 8, left);
      y[threadIdx.x] = words.at[0];
    }}"""
    x, y = np.arange(32, dtype=np.uint16), np.ones(32, np.uint32)
    np.testing.assert_array_equal(launch(source, 1, 32, x, y)[1][4:], 0)
    caught(source, "out of bounds", x, y, grid=1, block=32)


@pytest.mark.parametrize("dtype", DEPTH)
@pytest.mark.parametrize("aligned", [True, False])
def test_sums_are_rounded_once_and_stored(launch, aligned, dtype):
    many = 16 // jnp.dtype(dtype).itemsize
    source = f"""#include "mma.cuh"
    extern "C" __global__ void k(const float* x, {TYPES[dtype]}* y, int left) {{
      float sums[{many}];
      for (int j = 0; j < {many}; ++j) sums[j] = x[threadIdx.x * {many} + j];
      sgap::StoreWords<{str(aligned).lower()}>(y + threadIdx.x * {many}, left, sums);
    }}"""
    x = np.random.default_rng(0).standard_normal((32, many)).astype(np.float32)
    for left in (many,) if aligned else range(many + 1):
        y = launch(source, 1, 32, x, words(np.zeros(x.shape, jnp.dtype(dtype))), left)[1]
        expected = np.where(np.arange(many) < left, x, np.float32(0)).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(y, words(expected))
