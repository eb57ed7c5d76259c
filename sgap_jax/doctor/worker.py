"""The layers that the doctor tests, each in a process of its own: a fault of a driver or a kernel,
or one that never ends, costs that process alone.

    python -m sgap_jax.doctor.worker LAYER < request > answers

A request is pickled by the doctor, which trusts it; an answer is a line of JSON behind a mark, for
other libraries print too.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

MARK = "@sgap_jax doctor "
# Faults after which the driver refuses all that follows in the process (cuda.h): an illegal
# address, a launch that timed out or failed, a misaligned or illegal instruction or access.
_DEADLY = range(700, 730)
# Calls that come before a kernel is loaded, and what any call gives where other programs have all
# memory, or the GPU for themselves (cuda.h): neither says anything about a kernel.
_BEFORE_KERNELS: tuple[str, ...] = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
_BEFORE_KERNELS += ("cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemcpyHtoD_v2")
OUT_OF_MEMORY, _IN_USE = 2, 46


def answer(**fields: Any) -> None:
    # A library may have left a line without an end.
    print("\n" + MARK + json.dumps(fields), flush=True)


def tell_driver(request: dict) -> None:
    """Opens the driver: its version, and the GPUs with their free memory."""
    from sgap_jax.launch.driver import OLDEST, Driver, DriverError

    driver = Driver()
    version = driver.version()
    answer(version=version)
    if version < OLDEST:
        return
    driver.start()
    devices = driver.devices()
    for device in devices:
        answer(device=vars(device))
    for device in devices:
        try:
            driver.enter(device.index)
            answer(free=driver.free_bytes(), index=device.index)
        except DriverError as error:
            answer(bad=device.index, why=first_line(error))


def tell_compiler(request: dict) -> None:
    """Compiles a kernel for the GPU's architecture with NVRTC."""
    from sgap_jax.launch import nvrtc

    answer(nvrtc=nvrtc.version())
    source = "template <int n> __global__ void f(int* x) { *x = n; }\n"
    compiled = nvrtc.compile(
        f"{source}template __global__ void f<3>(int*);\n", arch=request["arch"]
    )
    answer(bytes=len(compiled.cubin))


class Launches:
    """Runs the launches of cases on a GPU through the driver, for `Emulated`; remembers them."""

    def __init__(self, index: int, arch: str) -> None:
        from sgap_jax.launch.driver import Driver

        self.driver, self._index, self._arch = Driver(), index, arch
        self.driver.start()
        self._entered = False
        self.error: Exception | None = None
        self.made: list[dict] = []
        self.kernels: list[dict] = []

    def run(self, call: Any, inputs: Any, outputs: Any) -> list:
        try:
            return self._run(call, inputs, outputs)
        except Exception as error:  # JAX would tell it with a trace of the callback
            self.error = self.error or error
            raise

    def _run(self, call: Any, inputs: Any, outputs: Any) -> list:
        from sgap_jax.launch import launch, nvrtc

        self.driver.enter(self._index)  # of this thread: XLA calls back from several
        cubin = launch.compile_call(call, nvrtc, self._arch)
        function = self.driver.load(cubin)
        name = re.search(r"sgap::(\w+)<", call.source)
        found = self.driver.attributes(function)
        self.kernels.append({"kernel": name[1] if name else call.kernel} | found)
        given = [np.ascontiguousarray(x) for x in inputs]
        results = [np.empty(shape, dtype) for shape, dtype in outputs]
        owned = [self.driver.allocate(x.nbytes) for x in (*given, *results)]
        try:
            for array, address in zip(given, owned, strict=False):
                self.driver.write(address, array)
            places = owned[len(given) :]
            for result, address in zip(results, places, strict=True):
                # All bits set are NaN: what the kernel leaves out is seen.
                self.driver.write(address, np.full(result.nbytes, 0xFF, np.uint8))
            for operand, result in call.in_place:
                self.driver.write(places[result], given[operand])
            targets = [(a, r.nbytes) for a, r in zip(places, results, strict=True)]
            started = owned[: len(given)]
            self.driver.launcher(call, function)(0, started, targets)
            self.driver.wait()
            for result, address in zip(results, places, strict=True):
                self.driver.read(address, result)
        finally:
            with contextlib.suppress(Exception):  # after a fault nothing can be released
                for address in owned:
                    self.driver.release(address)
        specs = [(r.shape, r.dtype.name) for r in results]
        self.made.append(dict(call=call, cubin=cubin, inputs=given, outputs=specs, results=results))
        return results

    def blames_kernel(self, error: Exception) -> bool:
        """Whether what ended a call speaks of its kernels, rather than of the machine or of JAX."""
        from sgap_jax.launch.driver import DriverError
        from sgap_jax.launch.nvrtc import CompilationError

        error = self.error or error
        if not isinstance(error, DriverError):
            return isinstance(error, CompilationError)
        return error.call not in _BEFORE_KERNELS and error.status not in (OUT_OF_MEMORY, _IN_USE)

    def lost(self) -> bool:
        """Whether the driver refuses all that follows."""
        from sgap_jax.launch.driver import DriverError

        return isinstance(self.error, DriverError) and self.error.status in _DEADLY


def run_kernels(request: dict) -> None:
    """Each case by launches through the driver, without XLA on the GPU; then loads all kernels of
    the package."""
    import jax

    from sgap_jax.doctor.cases import cases
    from sgap_jax.schedules.emulated import Emulated
    from sgap_jax.schedules.families import set_failing

    set_failing(dict)  # those on the list are tested too
    # What stops JAX itself, such as an unknown flag in XLA_FLAGS, does so before a kernel begins.
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    answer(started=True)
    for i, case in enumerate(cases()):
        if i not in request["cases"]:
            continue
        answer(begin=i)
        launches = Launches(request["index"], request["arch"])
        fields: dict[str, Any] = {}
        try:
            why = case.wrong(case.run(Emulated(launches.run, case.schedule, case.choose)))
        except Exception as error:
            why, cause = first_line(launches.error or error), launches.error or error
            fields = {"kind": type(cause).__name__, "status": _status(cause)}
            fields["of_kernel"] = launches.blames_kernel(error)
        made = base64.b64encode(pickle.dumps([] if why else launches.made)).decode()
        answer(end=i, why=why, kernels=launches.kernels, made=made, **fields)
        if launches.lost():
            return  # the doctor goes on with a new process
    if request["archive"]:
        _load_archive(request)


def _load_archive(request: dict) -> None:
    """Loads the kernels of the default schedules that came with the package."""
    from sgap_jax.launch import precompiled
    from sgap_jax.launch.cache import decode_entry
    from sgap_jax.launch.driver import Driver, DriverError

    driver = Driver()
    driver.start()
    driver.enter(request["index"])
    loaded, spills, failed = 0, 0, ""
    for arch in precompiled.serving(request["arch"]):
        try:
            archive = zipfile.ZipFile(precompiled.package_folder() / f"{arch}.zip")
        except (OSError, zipfile.BadZipFile):
            continue
        with archive:
            for name in archive.namelist():
                try:
                    cubin = decode_entry(archive.read(name))
                except Exception:  # of zipfile, zlib or the disk, as the damage is
                    cubin = None
                if cubin is None:
                    failed = failed or f"an entry of {arch}.zip is damaged"
                    continue
                try:
                    spills += driver.attributes(driver.load(cubin))["local_bytes"] > 0
                    loaded += 1
                except DriverError as error:
                    if error.status in (OUT_OF_MEMORY, _IN_USE):
                        raise
                    failed = failed or first_line(error)
        break
    answer(loaded=loaded, spills=spills, failed=failed)


def run_in_xla(request: dict) -> None:
    """The launches that were right through the driver, in one program of JAX, on one of its
    devices or on all at once; three times, since a command buffer is captured at the second."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sgap_jax.launch import launch

    devices = jax.local_devices(backend=request["platform"])
    answer(devices=[f"{d.platform}:{d.id} {d.device_kind}" for d in devices])
    made = [one for text in request["made"] for one in pickle.loads(base64.b64decode(text))]
    on: Any = devices[request["index"]]
    if request["together"]:
        on = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())

    @jax.jit
    def program(*operands: Any) -> list:
        left, results = list(operands), []
        for one in made:
            given = [left.pop(0) for _ in one["inputs"]]
            specs = [jax.ShapeDtypeStruct(*spec) for spec in one["outputs"]]
            aliases = dict(one["call"].in_place) or None
            call = jax.ffi.ffi_call(launch.TARGET, specs, input_output_aliases=aliases)
            attributes = launch.call_attributes(one["call"], one["cubin"])
            results.append(call(*given, **attributes))
        return results

    operands = jax.device_put([x for one in made for x in one["inputs"]], on)
    compiled = program.lower(*operands).compile()
    answer(compiled=True)  # so that neither this nor a launch is taken to hang
    for _ in range(3):
        results = jax.block_until_ready(compiled(*operands))
        for one, got in zip(made, results, strict=True):
            for x, right in zip(got, one["results"], strict=True):
                copies = (np.asarray(shard.data).tobytes() for shard in x.addressable_shards)
                if any(copy != right.tobytes() for copy in copies):
                    kernel = re.search(r"sgap::(\w+)<", one["call"].source)
                    name = kernel[1] if kernel else one["cubin"].kernel
                    answer(wrong=f"{name} gives other bits than through the driver")
                    return
    answer(launches=len(made))


def first_line(error: BaseException) -> str:
    """What an error says, in a line: of a failed launch the part that names it."""
    text = str(error) or type(error).__name__
    if (at := text.find("sgap_launch: ")) >= 0:
        text = text[at + len("sgap_launch: ") :]
    return text.strip().splitlines()[0][:400]


LAYERS: dict[str, Callable[[dict], None]] = {
    "driver": tell_driver,
    "compiler": tell_compiler,
    "kernels": run_kernels,
    "xla": run_in_xla,
}


def run(layer: str, request: dict) -> None:
    """Tests a layer; an error is an answer too."""
    try:
        LAYERS[layer](request)
    except Exception as error:
        answer(error=first_line(error), kind=type(error).__name__, status=_status(error))


def main(layer: str) -> None:
    run(layer, pickle.loads(sys.stdin.buffer.read()))
    sys.stdout.flush()
    os._exit(0)  # without the end of libraries whose device is lost


def _status(error: Exception) -> int | None:
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


if __name__ == "__main__":
    main(sys.argv[1])
