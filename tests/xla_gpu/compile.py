"""Compiles the programs of programs.py with XLA's GPU compiler, on a machine without a GPU.

    PYTHONPATH=FOLDER:tests/xla_gpu python tests/xla_gpu/compile.py sm_90 [NAME ...] [--table]

FOLDER has JAX's CUDA plugin (`make test-gpu-compile`). It is in no other process, since a plugin
changes what `jax.devices()` is. Prints what was found of each program as JSON, or with --table as a
table of the docs.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import tempfile
from functools import partial

ARCHITECTURES = {  # name, multiprocessors, shared memory of one, second-level cache
    "sm_80": ("NVIDIA A100-SXM4-80GB", 108, 167936, 41943040),
    "sm_90": ("NVIDIA H100 80GB HBM3", 132, 233472, 52428800),
    "sm_100": ("NVIDIA B200", 148, 233472, 132644864),
}
# What XLA is told of a GPU. Where driver or runtime read as older than 12.3, it records no custom
# call in a command buffer.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: {l2} clock_rate_ghz: 1.98
  device_memory_size: 84942979072 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
DEVICES = 4  # of the mesh
FLAGS = (
    # The rules that split a call stand for the devices of the mesh by as many that the process has.
    # Also: a matrix in parts is made on the host.
    f"--xla_force_host_platform_device_count={DEVICES}",
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_graph_min_graph_size=1",
    "--xla_dump_hlo_as_text",
    "--xla_dump_hlo_module_re=jit_program",
)
LAUNCH = "sgap_launch_v1"
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", choices=ARCHITECTURES)
    parser.add_argument("names", nargs="*", help="programs; all if none is named")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = " ".join((*FLAGS, f"--xla_dump_to={dump}"))
        os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin would look for a driver
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["SGAP_CUDA_ARCH"] = args.arch
        import programs

        compiler = Compiler(args.arch, pathlib.Path(dump))
        found = {"programs": compiler.programs(args.names)}
        if not args.names:
            found |= {"refused": compiler.refused(), "donated": compiler.donated()}
        if args.arch == "sm_90" and not args.names:
            found |= {"collectives": compiler.collectives()}
            found |= {"parts": compiler.parts(), "scattered": compiler.scattered()}
            found |= {"primitives": sorted(compiler.primitives), "in_two_ways": programs.SLOW}
    print(table(found["programs"]) if args.table else json.dumps(found))


def topology(arch, count):
    """Devices of a GPU that is not there: programs can be compiled for them."""
    import jax
    from jax.experimental import topologies

    name, cores, shared, l2 = ARCHITECTURES[arch]
    major, minor = divmod(int(arch.removeprefix("sm_")), 10)
    sizes = dict(name=name, cores=cores, shared=shared, optin=shared - 1024, l2=l2)
    jax.devices()  # registers the plugin
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=TARGET.format(**sizes, major=major, minor=minor),
        topology=f"1x1x{count}",
    ).devices


class Compiler:
    def __init__(self, arch, dump):
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        self.arch, self.dump = arch, dump
        self.primitives = set()  # of all programs
        self.one = jax.sharding.SingleDeviceSharding(topology(arch, 1)[0])
        self.mesh = Mesh(np.array(topology(arch, DEVICES)), ("x",))
        self.everywhere = NamedSharding(self.mesh, P())
        self.split = partial(NamedSharding, self.mesh)
        self.batch = self.split(P("x"))

    def programs(self, names):
        """{name: {way: what was found}}; all ways for sm_90, except of what takes XLA long."""
        import programs

        found = {}
        for name, case in programs.cases().items():
            if names and name not in names:
                continue
            data, many = case.data, programs.batched(case.data)
            found[name] = of = {
                "forward": self.compiled(programs.forward(case), case.structure, data),
                "gradient": self.compiled(programs.gradient(case), case.structure, data),
            }
            if self.arch == "sm_90" and name not in programs.SLOW:
                of["vmap"] = self.compiled(programs.mapped(case), case.structure, many)
                of["scan"] = self.compiled(programs.scanned(case), case.structure, many)
                given = case.structure, many, (self.everywhere, self.batch)
                of["shard_map"] = self.compiled(programs.split(case, self.mesh), *given)
                of["mesh"] = self.compiled(programs.mapped(case), *given)
        return found

    def collectives(self):
        """{name, split: {way: collectives}} of operands that are split."""
        import jax
        import programs

        found = {}
        for (name, of), specs in programs.SPLITS.items():
            case, ways = programs.cases()[name], (programs.forward, programs.gradient)
            data = case.data
            if of == "batch":  # mapped over
                data = programs.batched(data)
                ways = tuple(lambda case, f=f: jax.vmap(f(case), (None, 0)) for f in ways)
            given = case.structure, data, (self.everywhere, tuple(map(self.split, specs)))
            both = [self.compiled(way(case), *given)["collectives"] for way in ways]
            found[f"{name}, {of}"] = dict(zip(("forward", "gradient"), both, strict=True))
        return found

    def donated(self):
        """A training step whose parameters are donated."""
        import programs

        found = {}
        for name in ("spmm", "spmm vectors", "attention"):
            case = programs.cases()[name]
            step = programs.trained(case)
            found[name] = self.compiled(step, case.structure, case.data, donate_argnums=1)
        return found

    def parts(self):
        """A product of a matrix in four parts, by all_to_all and by rounds of ppermute: collectives
        and launches in the order in which they are started."""
        import dataclasses

        import jax
        import numpy as np
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        from sgap_jax import SparseArray, parallel

        host = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        dense = np.where(np.random.default_rng(0).random((64, 64)) < 0.3, 1, 0)
        whole = SparseArray.from_dense(dense.astype(np.float32))

        def there(x, spec):
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        orders = []
        for rows in ("even", [4, 12, 24, 24]):
            A = parallel.partition(whole, host, "x", rows=rows)
            assert bool(A.exchange.width) == (rows == "even")
            B = there(A.to_parts(np.ones((64, 8), np.float32)), P("x"))
            A = jax.tree.map(lambda x: there(x, x.sharding.spec), A)
            A = dataclasses.replace(A, mesh=self.mesh)
            text = jax.jit(lambda A, B: A @ B).lower(A, B).compile().as_text()
            assert "is_scheduled=true" in text
            words = rf" ((?:{COLLECTIVES})[\w-]*|custom-call)\("
            orders.append(re.findall(words, text[text.index("ENTRY") :]))
        return orders

    def scattered(self):
        """Collectives of a sum over devices whose result is asked for split over them."""
        import jax
        import numpy as np

        import sgap_jax as sj

        A = sj.SparseArray.from_dense(np.tri(16, 12, dtype=np.float32))
        X = jax.ShapeDtypeStruct((8, 12, 16), "float32", sharding=self.batch)
        function = jax.jit(lambda X: sj.einsum("ij,rjs->is", A, X), out_shardings=self.batch)
        return re.findall(rf" ({COLLECTIVES})(?:-start)?\(", function.lower(X).compile().as_text())

    def refused(self):
        """What XLA reports of a launch that INSTANTIATE refuses."""
        import jax

        from sgap_jax.launch.cache import Cubin
        from sgap_jax.launch.kernel_call import KernelCall
        from sgap_jax.launch.launch import TARGET, call_attributes

        x = jax.ShapeDtypeStruct((8,), "float32", sharding=self.one)
        wrong = KernelCall("source", "kernel", (1,), (2048,))
        attributes = call_attributes(wrong, Cubin("kernel", b"code"))
        launch = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((8,), "float32"))
        try:
            jax.jit(lambda x: launch(x, **attributes)).lower(x).compile()
        except Exception as error:
            return str(error)
        return ""

    def compiled(self, function, structure, data, shardings=None, **options):
        """`shardings` of the structure and of the data, or of each of them; on one device if none
        are given."""
        import jax

        def placed(sharding, tree):
            shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            return jax.tree.map(shape, tree)

        pairs = zip(shardings or (self.one, self.one), (structure, data), strict=True)
        args = [jax.tree.map(placed, sharding, tree) for sharding, tree in pairs]

        def program(structure, data):  # its name is that of the modules that are dumped
            return function(structure, data)

        start = processor_seconds()
        traced = jax.jit(program, **options).trace(*args)
        lowered = traced.lower()
        between = processor_seconds()
        text = lowered.compile().as_text()
        end = processor_seconds()
        self.primitives |= primitives_of(traced.jaxpr.jaxpr)
        (passed,) = self.dump.glob("*thunk_sequence_after_thunk_passes.txt")
        thunks = passed.read_text()
        for path in self.dump.glob("*jit_program*.*"):  # other programs have empty folders
            path.unlink() if path.is_file() else path.rmdir()
        return {
            "launches": text.count(f'custom_call_target="{LAUNCH}"'),
            "apart": apart(thunks, "kCustomCall", "kCommandBuffer"),
            # A scan copies what a step takes of the scanned arrays, in one thunk with the slice.
            "copies": apart(thunks, "kCopy", "kDynamicSliceFusion"),
            "collectives": collections.Counter(re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text)),
            "sorts": len(re.findall(r" sort\(", text)),
            "aliased": text.count("may-alias") + text.count("must-alias"),
            "operands": len(jax.tree.leaves(data)),
            "seconds": (between - start, end - between),
        }


def processor_seconds():
    """Of all threads and finished child processes: XLA runs ptxas, and other work may be beside."""
    return sum(os.times()[:4])


def primitives_of(jaxpr):
    """Names of the primitives of a program, those within others too."""
    import jax
    from jax.extend import core

    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        inner = jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
        )
        for one in inner:
            one = one.jaxpr if isinstance(one, core.ClosedJaxpr) else one
            found |= primitives_of(one) if isinstance(one, core.Jaxpr) else set()
    return found


def apart(thunks, kind, other):
    """How many thunks of one kind are in no thunk of another, in the text of a thunk sequence."""
    found, above = 0, []  # (indentation, kind) of the thunks around a line
    for line in thunks.splitlines():
        if (thunk := re.match(r"( *)\d+: (k\w+)", line)) is None:
            continue
        indent = len(thunk[1])
        above = [one for one in above if one[0] < indent]
        found += thunk[2] == kind and all(one[1] != other for one in above)
        above.append((indent, thunk[2]))
    return found


def table(found):
    """Times of the programs in milliseconds of processor time, as a table of the docs."""
    lines = ["| program | launches | lowering | compiling |", "|---|---|---|---|"]
    for name, of in found.items():
        parts = [of["forward"], of["gradient"]]
        launches = ", ".join(str(part["launches"]) for part in parts)
        times = (", ".join(f"{1000 * part['seconds'][i]:.0f}" for part in parts) for i in (0, 1))
        lines.append(f"| {name} | {launches} | {' | '.join(times)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
