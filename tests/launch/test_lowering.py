"""The CUDA lowering, exported from a machine that need not have a GPU."""

import dataclasses
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir  # noqa: TID251 a primitive of our own
from launched_axpy import CUBIN, FakeCompiler, axpy_call, make_axpy

from sgap_jax.launch import launch
from sgap_jax.launch.cache import Cubin, CubinCache
from sgap_jax.launch.kernel_call import KernelCall, header_paths, header_texts, include_options

X = jnp.arange(4, dtype=jnp.float32)


def export(compiler=None, **keywords):
    axpy = make_axpy("cuda", compiler or FakeCompiler(), **keywords)
    check = jax.export.DisabledSafetyCheck.custom_call(launch.TARGET)
    program = jax.jit(lambda x: axpy(x, 3) + jnp.ones_like(x))
    return jax.export.export(program, platforms=("cuda",), disabled_checks=[check])(X)


CALL = re.compile(
    r"stablehlo\.custom_call @(\w+)\(.*?\) \{(?:mhlo\.)?backend_config = \{(.*)\}, "
    r"operand_layouts = (.*), result_layouts = (.*)\} : (\(.*?\) -> (?:\(.*?\)|\S+))"
)


def custom_call(exported):
    """(attributes, layouts of operands and results, types) of the one custom call, as text."""
    ((target, attributes, *layouts, types),) = CALL.findall(exported.mlir_module())
    assert target == launch.TARGET
    attribute = r"(\w+) = (\".*?\"|dense<.*?> : tensor<\w+>|\d+ : i64)"
    return dict(re.findall(attribute, attributes)), layouts, types


def unescaped(text):
    byte = re.compile(rb"\\([0-9A-F]{2})|\\(.)", re.DOTALL)
    return byte.sub(lambda m: bytes.fromhex(m[1].decode()) if m[1] else m[2], text.encode())


def test_the_custom_call_carries_everything():
    attributes, _, types = custom_call(export(grid=(5, 2), block=(64, 4), shared_bytes=49152))
    assert unescaped(attributes.pop("cubin")[1:-1]) == CUBIN
    assert attributes == {
        "kernel": '"axpy"',
        "grid": "dense<[5, 2, 1]> : tensor<3xi64>",
        "block": "dense<[64, 4, 1]> : tensor<3xi64>",
        "shared_bytes": "49152 : i64",
        "scalars": "dense<[4, 3]> : tensor<2xi64>",
        "zero": "dense<0> : tensor<1xi64>",
    }
    assert types == "(tensor<4xf32>) -> tensor<4xf32>"


def test_a_result_may_take_the_place_of_an_operand():
    module = export(zero=(), in_place=((0, 0),)).mlir_module()
    alias = "output_tuple_indices = [], operand_index = 0, operand_tuple_indices = []"
    assert f"#stablehlo.output_operand_alias<{alias}>" in module


def test_an_exported_program_survives_serialisation():
    exported = export()
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == exported.platforms == ("cuda",)
    assert custom_call(again) == custom_call(exported)
    assert again.calling_convention_version == exported.calling_convention_version
    assert again.mlir_module_serialized == exported.mlir_module_serialized


def test_the_compiler_gets_source_arch_and_headers():
    compiler = FakeCompiler()
    export(compiler, arch="sm_100")
    ((source, arch, options),) = compiler.asked
    assert (source, arch) == ("axpy source", "sm_100")
    assert options == include_options(launch.header_folder())


def test_a_kernel_is_compiled_once_for_what_it_depends_on(tmp_path, monkeypatch):
    call, cubins, compiler = axpy_call(X, 3), CubinCache(tmp_path / "cubins"), FakeCompiler()

    def compiled(call=call, arch="sm_90", compiler=compiler):
        before = len(compiler.asked)
        assert launch.compile_call(call, compiler, arch, cubins) == Cubin("axpy", CUBIN)
        return len(compiler.asked) > before

    assert compiled() and not compiled()
    # What is said at run time is not compiled.
    assert not compiled(dataclasses.replace(call, grid=(7,), block=(64,), scalars=(1,), zero=()))
    assert compiled(dataclasses.replace(call, source="another"))
    assert compiled(dataclasses.replace(call, kernel="another"))
    assert compiled(arch="sm_80")
    assert compiled(compiler=FakeCompiler(version="13.1"))
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "spmm.cuh").write_text('#include "group.cuh"\n')
    (headers / "group.cuh").write_text("first")
    monkeypatch.setattr(launch, "header_folder", lambda: headers)
    spmm = dataclasses.replace(call, source='#include "spmm.cuh"\n')
    assert not compiled() and compiled(spmm) and not compiled(spmm)
    # A header counts for what includes it, itself or through another, and for nothing else.
    (headers / "group.cuh").write_text("second")
    (headers / "sddmm.cuh").write_text("new")
    header_texts.cache_clear()
    header_paths.cache_clear()
    assert not compiled() and compiled(spmm) and not compiled(spmm)


def test_a_kernel_may_read_and_write_other_arrays_than_the_primitive():
    primitive = Primitive("second_only")
    primitive.def_abstract_eval(lambda x, y: jax.core.ShapedArray(y.shape, y.dtype))

    def rule(ctx, x, y):
        call, accumulator = KernelCall("source", "kernel", (1,), (1,), zero=(0,)), np.float32
        avals = [ctx.avals_in[1]]
        results = [ctx.avals_in[1].update(dtype=accumulator), jax.core.ShapedArray((7,), np.int32)]
        keywords = dict(compiler=FakeCompiler(), arch="sm_90", cubins=CubinCache(None))
        wide, _ = launch.lower(ctx, call, [y], avals, results, **keywords)
        ctx = ctx.replace(avals_in=results[:1])
        cast = mlir.lower_fun(lambda y: y.astype(jnp.float16), multiple_results=False)
        return cast(ctx, wide)

    mlir.register_lowering(primitive, rule, platform="cuda")
    check = jax.export.DisabledSafetyCheck.custom_call(launch.TARGET)
    exported = jax.export.export(
        jax.jit(primitive.bind), platforms=("cuda",), disabled_checks=[check]
    )(X, np.zeros((2, 3), np.float16))
    attributes, layouts, types = custom_call(exported)
    assert types == "(tensor<2x3xf16>) -> (tensor<2x3xf32>, tensor<7xi32>)"
    two = "dense<[1, 0]> : tensor<2xindex>"  # row-major
    assert layouts == [f"[{two}]", f"[{two}, dense<0> : tensor<1xindex>]"]
    assert attributes["scalars"] == "dense<> : tensor<0xi64>"
    assert [aval.str_short() for aval in exported.out_avals] == ["float16[2,3]"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(grid=()), "grid must have one to three sizes"),
        (dict(block=(1, 1, 1, 1)), "block must have one to three sizes"),
        (dict(grid=(2**31,)), "grid must have sizes"),
        (dict(grid=(-1,)), "grid must have sizes"),
        (dict(grid=(1, 65536)), "grid must have sizes"),
        (dict(grid=(1, 1, 65536)), "grid must have sizes"),
        (dict(block=(0,)), "block must have 1 to 1024 threads"),
        (dict(block=(64, 32)), "block must have 1 to 1024 threads"),
        (dict(block=(1, 1, 65)), "block must have up to 64 in z"),
        (dict(shared_bytes=-1), "shared_bytes must be"),
        (dict(scalars=(2**63,)), "scalars must be 64-bit"),
        (dict(zero=(1,)), "zero must name some of 1 results"),
        (dict(zero=(-1,)), "zero must name some of 1 results"),
        (dict(in_place=((1, 0),)), r"in_place must name operands .* got \(1, 0\)"),
        (dict(in_place=((0, 1),)), r"in_place must name operands .* got \(0, 1\)"),
    ],
)
def test_calls_that_no_launch_has(changes, message):
    with pytest.raises(ValueError, match=message):
        export(**changes)


def test_the_architecture_can_be_named(monkeypatch):
    compiler = FakeCompiler()
    monkeypatch.setenv("SGAP_CUDA_ARCH", "sm_90a")
    export(compiler, arch=None)
    assert compiler.asked[0][1] == "sm_90a"


@pytest.mark.parametrize("name", ["90", "sm_", "compute_90", "sm_90 -O0"])
def test_a_name_that_is_no_architecture(monkeypatch, name):
    monkeypatch.setenv("SGAP_CUDA_ARCH", name)
    with pytest.raises(ValueError, match="SGAP_CUDA_ARCH: expected a name like sm_90"):
        launch.device_arch()


def test_without_a_gpu_the_architecture_must_be_named(monkeypatch):
    monkeypatch.delenv("SGAP_CUDA_ARCH", raising=False)
    if any(device.platform == "gpu" for device in jax.devices()):
        assert re.fullmatch(r"sm_\d+", launch.device_arch())
    else:
        with pytest.raises(NotImplementedError, match="set SGAP_CUDA_ARCH"):
            launch.device_arch()


def test_one_architecture_for_several_gpus():
    assert launch.common_arch(["9.0"]) == "sm_90"
    assert launch.common_arch(["10.0", "10.0"]) == "sm_100"
    assert launch.common_arch(["8.9", "8.0", "8.6"]) == "sm_80"
    # Of several major versions PTX, which the driver compiles for each.
    assert launch.common_arch(["9.0", "8.9", "12.0"]) == "compute_89"


def test_ptx_for_several_kinds_of_gpus(monkeypatch):
    """Instructions of one architecture alone are refused, and those of a later one."""
    monkeypatch.setattr(launch, "device_arch", lambda: "compute_89")
    compiler = FakeCompiler()
    export(compiler, arch=None)
    assert compiler.asked[0][1] == "compute_89"
    assert launch.arch_of_schedules() == "sm_89"
    call = KernelCall("source", "kernel", (1,), (1,), requires="sm_80")
    assert call.target("compute_89") == "compute_89"
    for requires in ("sm_89a", "sm_90"):
        with pytest.raises(NotImplementedError, match=f"has instructions of {requires}"):
            dataclasses.replace(call, requires=requires).target("compute_89")


def test_the_target_is_registered_for_cuda_at_import():
    program = """if True:
        import jax
        seen = []
        register = jax.ffi.register_ffi_target
        def record(name, handler, platform="cpu", **keywords):
            seen.append((name, platform, sorted(handler) if isinstance(handler, dict) else None))
            return register(name, handler, platform=platform, **keywords)
        jax.ffi.register_ffi_target = record
        import sgap_jax
        assert ("sgap_launch_v1", "CUDA", ["execute", "initialize", "instantiate"]) in seen, seen
        assert jax.numpy.ones(2).sum() == 2  # and the CPU backend starts
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
