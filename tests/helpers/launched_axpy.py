"""y = a x through one launch: the smallest operation, for tests of the launch path."""

import dataclasses
from types import SimpleNamespace

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla  # noqa: TID251 a primitive of our own

from sgap_jax.launch import launch
from sgap_jax.launch.cache import CubinCache
from sgap_jax.launch.kernel_call import KernelCall

# Contains every byte value: machine code is not text.
CUBIN = b"bytes_300\0" + bytes(range(256)) + bytes(34)


class FakeCompiler:
    """A fake compiler that returns CUBIN and records its arguments."""

    def __init__(self, version="13.0", cubin=CUBIN, name="axpy"):
        self.asked = []
        self._version, self._cubin, self._name = version, cubin, name

    def version(self):
        return self._version

    def compile(self, source, *, arch, options=()):
        self.asked.append((source, arch, options))
        return SimpleNamespace(cubin=self._cubin, name=self._name)


def axpy_call(x, a, **changes):
    """The call for an aval or array x; the kernel adds, so y starts from zeros."""
    call = KernelCall("axpy source", "axpy", (1,), (32,), 0, scalars=(x.size, a), zero=(0,))
    return dataclasses.replace(call, **changes)


def make_axpy(platform, compiler, *, arch="sm_90", folder=None, **changes):
    """A function (x, a) -> a x that launches on `platform`."""
    primitive = Primitive("launched_axpy")
    primitive.def_impl(lambda *args, **params: xla.apply_primitive(primitive, *args, **params))
    primitive.def_abstract_eval(lambda x, a: jax.core.ShapedArray(x.shape, x.dtype))
    cubins = CubinCache(folder)

    def rule(ctx, x, a):
        call = axpy_call(ctx.avals_in[0], a, **changes)
        return launch.lower(ctx, call, [x], compiler=compiler, arch=arch, cubins=cubins)

    mlir.register_lowering(primitive, rule, platform=platform)
    return lambda x, a: primitive.bind(x, a=a)
