"""`examine`: tests each layer on the way from the driver to a program of JAX on a GPU, the lowest
first, and keeps the list of kernels that fail."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sgap_jax.doctor.process import Ended, answers
from sgap_jax.doctor.report import FAILED, NOT_TESTED, OK, OTHER_DEVICES, Layer, Report
from sgap_jax.doctor.worker import OUT_OF_MEMORY
from sgap_jax.launch import failures, launch
from sgap_jax.launch.cache import default_folder
from sgap_jax.launch.driver import OLDEST

_SILENCE = 12.0  # seconds after which a call has hung
_OF_KERNELS = 0.6  # the share of the time that is left which their layer may take
_OLDEST_OF_13 = 7.5  # the compute capability that CUDA 13 begins with
_LEAST_FREE = 256 << 20  # bytes of a GPU that JAX and the tests need
_LEAST_DISK = 32 << 20  # bytes: some hundred kernels
_LOADING = "cuLibraryLoadData"
_REPORT = "attach the report to an issue"
_MAKE_ROOM = (
    "end what uses its memory (nvidia-smi lists it), or choose another GPU with "
    "CUDA_VISIBLE_DEVICES"
)
# Meanings of what cuInit and cuDeviceGetCount return (cuda.h), and what to do.
_INIT = {
    100: "no GPU is visible: look at nvidia-smi and at CUDA_VISIBLE_DEVICES",
    802: "the GPUs are still starting, or the fabric manager does not run",
    803: "the driver's library and its kernel module differ: restart the machine after an update",
    34: "the library is the toolkit's stub of a driver: take its folder out of LD_LIBRARY_PATH",
    804: "the library is a compatibility package, which this GPU or its driver does not take: take "
    "its folder out of LD_LIBRARY_PATH",
}
_ON_CPU = {"JAX_PLATFORMS": "cpu"}  # layers below XLA: its CUDA plugin may be what fails
_PACKAGES = (
    *("sgap_jax", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    *("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
)
_IN_XLA = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
_BUFFERS = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL"
_BUFFERS += " --xla_gpu_graph_min_graph_size=1"


def examine(
    seconds: float = 30.0,
    only: Sequence[str] = (),
    platform: str = "cuda",
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Tests all layers and returns what was found.

    Args:
      seconds: the time for all of it; what has no time left is reported as not tested.
      only: beginnings of names of families of kernels; the others are not tested.
      platform: the platform of JAX whose devices are tested.
      say: called with a line when a layer begins.
    """
    return _Examination(time.monotonic() + seconds, only, platform, say).run()


class _Examination:
    def __init__(
        self, deadline: float, only: Sequence[str], platform: str, say: Callable[[str], None]
    ) -> None:
        self._deadline, self._only, self._platform = deadline, tuple(only), platform
        self._say, self._report = say, Report(facts=_versions())
        self._devices: list[dict[str, Any]] = []
        self._driver: tuple[int, int] | None = None
        self._in_jax = 0  # devices that JAX sees
        self._made: list[str] = []  # pickled launches that were right through the driver
        self._compiles = True

    def run(self) -> Report:
        driver = self._layer("driver", self._test_driver)
        arch = self._layer("architecture", self._test_arch) if driver else None
        self._skip("architecture", driver, "no driver works")
        self._layer("cache folder", self._test_cache)
        if arch:
            self._compiles = self._layer("compiler", self._test_compiler)
        self._skip("compiler", arch, "there is no GPU to compile for")
        if arch:
            self._layer("kernels", self._test_kernels)
        self._skip("kernels", arch, "there is no GPU to run them on")
        xla = self._layer("XLA", lambda: self._test_xla(0)) if self._made else None
        nothing = "no kernel has worked"
        self._skip("XLA", self._made, nothing)
        if xla:
            self._layer("command buffer", lambda: self._test_xla(0, _BUFFERS))
            self._layer(OTHER_DEVICES, self._test_others)
        for name in ("command buffer", OTHER_DEVICES):
            self._skip(name, xla, "no program of JAX works" if self._made else nothing)
        return self._report

    def _layer(self, name: str, test: Callable[[], Layer]) -> bool:
        """Runs a test and keeps its layer; whether it is ok, or not tested for want of need."""
        self._say(f"testing: {name}")
        start = time.monotonic()
        try:
            layer = test()
        except Ended as ended:
            layer = Layer(name, FAILED, f"{ended}", _after(ended))
            now = time.monotonic()
            if now >= self._deadline and now - start < _SILENCE:  # it came too late to have hung
                layer = Layer(name, NOT_TESTED, "there was no time (--seconds gives more)")
        layer.name = name
        self._report.layers.append(layer)
        return layer.state == OK

    def _skip(self, name: str, done: object, why: str) -> None:
        """Notes that a layer was not tested, if it was not."""
        if not done and all(layer.name != name for layer in self._report.layers):
            self._report.layers.append(Layer(name, NOT_TESTED, why))

    def _answers(
        self,
        layer: str,
        request: dict,
        environment: dict[str, str] = _ON_CPU,
        deadline: float | None = None,
    ) -> Iterator[dict]:
        return answers(layer, request, environment, deadline or self._deadline, _SILENCE)

    def _test_driver(self) -> Layer:
        facts = self._report.facts
        free: dict[int, int] = {}
        bad: dict[int, str] = {}
        for said in self._answers("driver", {}):
            if "version" in said:
                major, minor = said["version"]
                self._driver = (major, minor)
                facts["driver"] = f"CUDA {major}.{minor}"
                if self._driver < OLDEST:
                    return Layer(
                        "",
                        FAILED,
                        f"the driver is of CUDA {major}.{minor}, and "
                        f"{'.'.join(map(str, OLDEST))} (525) or later is needed",
                        "install a newer driver",
                    )
            elif "device" in said:
                self._devices.append(said["device"])
            elif "free" in said:
                free[said["index"]] = said["free"]
            elif "bad" in said:
                bad[said["bad"]] = said["why"]
            elif "error" in said:
                return _driver_error(said, self._devices)
        for device in self._devices:
            i = device["index"]
            facts[f"GPU {i}"] = (
                f"{device['name']}, compute capability {device['capability']}, "
                f"{free.get(i, 0) >> 20} of {device['memory'] >> 20} MiB free"
            )
        if not self._devices:
            return Layer("", FAILED, "the driver shows no GPU to this process", _INIT[100])
        if bad:
            first = next(iter(bad))
            found = f"GPU {first} of {len(self._devices)} does not start: {bad[first]}"
            return Layer("", FAILED, found, _without(bad, len(self._devices)))
        if free.get(0, 0) < _LEAST_FREE:
            return Layer(
                "",
                FAILED,
                f"GPU 0 has {free.get(0, 0) >> 20} MiB free, and {_LEAST_FREE >> 20} are needed",
                _MAKE_ROOM,
            )
        return Layer("", OK, f"CUDA {self._driver_text()}, {len(self._devices)} GPU(s)")

    def _driver_text(self) -> str:
        return "unknown" if self._driver is None else ".".join(map(str, self._driver))

    @property
    def _arch(self) -> str:
        named = os.environ.get("SGAP_CUDA_ARCH")
        return named or launch.common_arch([device["capability"] for device in self._devices])

    def _test_arch(self) -> Layer:
        named, capability = os.environ.get("SGAP_CUDA_ARCH"), self._devices[0]["capability"]
        if named and not _runs(named, capability):
            return Layer(
                "",
                FAILED,
                f"SGAP_CUDA_ARCH is {named}, whose code does not run on GPU 0 of compute "
                f"capability {capability}",
                "unset SGAP_CUDA_ARCH",
            )
        self._report.facts["architecture"] = self._arch
        of_each = self._arch.startswith("compute_")
        return Layer("", OK, self._arch + (", PTX for GPUs of several kinds" if of_each else ""))

    def _test_cache(self) -> Layer:
        folder = default_folder()
        self._report.facts["cache folder"] = str(folder)
        if folder is None:
            return Layer("", OK, "none: SGAP_CACHE_DIR is empty, or there is no home folder")
        do = "name another folder with SGAP_CACHE_DIR; until then every process compiles anew"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor") as file:
                file.write(bytes(1 << 16))
                file.flush()
            free = shutil.disk_usage(folder).free
        except OSError as error:
            why = error.strerror or str(error)
            return Layer("", FAILED, f"kernels cannot be kept in {folder} ({why})", do)
        if free < _LEAST_DISK:
            found = f"the disk of {folder} is full: {free >> 20} MiB are free"
            return Layer("", FAILED, found, f"free some space, or {do}")
        return Layer("", OK, f"{folder}, {free >> 20} MiB free")

    def _test_compiler(self) -> Layer:
        version = ""
        for said in self._answers("compiler", {"arch": self._arch}):
            version = said.get("nvrtc", version)
            if "error" in said:
                return self._compiler_error(said, version)
        self._report.facts["NVRTC"] = version
        if self._driver is not None and int(version.partition(".")[0]) > self._driver[0]:
            found = f"NVRTC {version} makes code that a driver of CUDA {self._driver_text()}"
            do = f"pip install 'sgap_jax[cuda{self._driver[0]}]' brings one of the driver's version"
            return Layer("", FAILED, f"{found} does not load", f"{do}, or install a newer driver")
        return Layer("", OK, f"NVRTC {version} compiles for {self._arch}")

    def _compiler_error(self, said: dict, version: str) -> Layer:
        extra = "cuda12" if self._driver is not None and self._driver < (13, 0) else "cuda13"
        install = f"pip install 'sgap_jax[{extra}]'"
        if said["kind"] == "NvrtcMissing":
            found = "NVRTC, which compiles the kernels, is not installed or does not load"
            return Layer("", FAILED, found, f"{install} brings it")
        found = f"NVRTC {version} does not compile for {self._arch}"
        if version.startswith("13.") and float(self._devices[0]["capability"]) < _OLDEST_OF_13:
            return Layer("", FAILED, found, "pip install 'sgap_jax[cuda12]' brings one that does")
        return Layer(
            "", FAILED, f"{found} ({said['error']})", f"{install} --upgrade brings a newer one"
        )

    def _test_kernels(self) -> Layer:
        from sgap_jax.doctor.cases import cases

        every = list(cases())
        left = [i for i, case in enumerate(every) if case.family.startswith(self._only or ("",))]
        asked, compiler = len(left), self._compiles
        why: dict[int, str] = {}
        archive: dict[str, Any] = {}
        beside: Layer | None = None  # the first failure that says nothing about a kernel
        now = time.monotonic()
        deadline = now + _OF_KERNELS * (self._deadline - now)
        while left:
            begun: int | None = None
            request = {"cases": left, "index": 0, "arch": self._arch, "archive": not archive}
            try:
                for said in self._answers("kernels", request, deadline=deadline):
                    if "begin" in said:
                        begun = said["begin"]
                    elif "end" in said:
                        left.remove(said["end"])
                        begun, kind = None, said.get("kind", "")
                        # What a compiler that is not the right one makes, or does not.
                        made = kind == "CompilationError" or said["why"].startswith(_LOADING)
                        if kind == "NvrtcMissing" or (made and not self._compiles):
                            compiler = False
                            continue  # says nothing about the kernel
                        if not said.get("of_kernel", True):
                            beside = beside or _beside(every[said["end"]], said)
                            continue
                        why[said["end"]] = said["why"]
                        self._note(every[said["end"]], said)
                    elif "loaded" in said:
                        archive = said
                    elif "error" in said:
                        beside = beside or _failed(said["error"], said)
                        left = []  # the same would be said of all of them
                if begun is not None:  # a library has ended the process as if all were well
                    raise Ended("its process ended before it had answered")
            except Ended as ended:
                if time.monotonic() >= deadline:
                    break
                if not left:  # in the kernels of the package
                    archive = {"failed": str(ended), "loaded": 0, "spills": 0}
                    break
                if begun is None or ended.by_system:
                    beside = beside or Layer("", FAILED, f"{ended}", _after(ended))
                    break
                why[begun] = str(ended)
                self._note(every[begun], {"why": str(ended), "kernels": [], "made": ""})
                left.remove(begun)
        outcomes = [(every[i].family, found) for i, found in why.items()]
        layer = self._kernels_layer(outcomes, asked, archive, compiler)
        return beside if beside is not None and layer.state != FAILED else layer

    def _note(self, case: Any, said: dict) -> None:
        rows = said["kernels"] or [{"kernel": "-"}]
        about = {"family": case.family, "about": case.about, "why": said["why"]}
        self._report.kernels += [about | row for row in rows]
        if not said["why"]:
            self._made.append(said["made"])

    def _kernels_layer(
        self, outcomes: list[tuple[str, str]], asked: int, archive: dict[str, Any], compiler: bool
    ) -> Layer:
        failed: dict[str, str] = {}
        for family, why in outcomes:
            failed[family] = failed.get(family) or why
        bad = {family: why for family, why in failed.items() if why}
        listed = self._record(failed)
        told = f"{len(outcomes)} calls are right"
        if archive.get("loaded"):
            told += f"; {archive['loaded']} kernels of the package load"
            told += f", {archive['spills']} of them spill registers" if archive["spills"] else ""
        if bad:
            first = next(iter(bad))
            also = f"; also {', '.join(list(bad)[1:])}" if len(bad) > 1 else ""
            found = f"the kernels '{first}' fail: {bad[first]}{also}"
            return Layer("", FAILED, found, f"{listed}; {_REPORT}")
        if archive.get("failed"):
            found = f"a kernel that came with the package fails: {archive['failed']}"
            return Layer("", FAILED, found, f"install the package again; if it stays so, {_REPORT}")
        if (rest := asked - len(outcomes)) > 0:
            why = "had no time (--seconds gives more)" if compiler else "need a compiler"
            return Layer("", NOT_TESTED, f"{len(outcomes)} calls are right, {rest} {why}")
        return Layer("", OK, told)

    def _record(self, tested: dict[str, str]) -> str:
        """Keeps the list of families that fail; says what that means."""
        folder = default_folder()
        works = "other kernels are chosen in their place, with a warning, until they work again"
        if folder is None or self._driver is None:
            return "they cannot be put on the list, for there is no cache folder: pass schedule="
        where = failures.place(self._devices[0]["name"], self._driver)
        try:
            failures.record(folder, where, tested)
        except OSError as error:
            why = error.strerror or str(error)
            return f"they cannot be put on the list in {folder} ({why}): pass schedule="
        return works

    def _test_xla(self, index: int, flags: str = "", together: bool = False) -> Layer:
        platforms = {"cuda": "cuda,cpu"}.get(self._platform, self._platform)
        environment = _IN_XLA | {"JAX_PLATFORMS": platforms}
        if flags:
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        request = {"made": self._made, "platform": self._platform, "index": index}
        request["together"] = together
        launches = 0
        for said in self._answers("xla", request, environment):
            if "devices" in said:
                self._in_jax = len(said["devices"])
                self._report.facts["devices of JAX"] = ", ".join(said["devices"])
            elif "wrong" in said:
                return Layer("", FAILED, said["wrong"], _REPORT)
            elif "launches" in said:
                launches = said["launches"]
            elif "error" in said:
                return self._xla_error(said, "all devices" if together else f"device {index}")
        if flags:
            return Layer("", OK, f"{launches} launches of a program, captured and replayed")
        return Layer("", OK, f"{launches} launches of a program give the same bits")

    def _xla_error(self, said: dict, on: str) -> Layer:
        found = said["error"]
        if "RESOURCE_EXHAUSTED" in found or "OUT_OF_MEMORY" in found:
            found = f"a program has no room on {on}: {found}"
            return Layer("", FAILED, found, _MAKE_ROOM)
        if self._in_jax == 0:
            major = 13 if self._driver is None else min(self._driver[0], 13)
            install = f"pip install 'jax[cuda{major}]' in this environment ({sys.prefix})"
            return Layer("", FAILED, f"JAX has no CUDA device: {found}", install)
        return Layer("", FAILED, f"the program fails on {on}: {found}", _REPORT)

    def _test_others(self) -> Layer:
        count = self._in_jax
        if count < 2:
            return Layer("", NOT_TESTED, "there is one device")
        bad = {}
        for index in range(1, count):
            with contextlib.suppress(Ended):
                layer = self._test_xla(index)
                if layer.state == FAILED:
                    bad[index] = layer.found
                continue
            bad[index] = "its process did not answer"
        if bad:
            first = next(iter(bad))
            found = f"device {first} of {count} fails ({bad[first]}), where device 0 works"
            return Layer("", FAILED, found, _without(bad, count))
        together = self._test_xla(0, together=True)
        if together.state == FAILED:
            together.found += ", where each works alone"
            return together
        return Layer("", OK, f"all {count} devices, each alone and in one program")


def _after(ended: Ended) -> str:
    """What to do after a process that ended."""
    flags = os.environ.get("XLA_FLAGS")
    unset = f"unset XLA_FLAGS ({flags}), " if flags else ""
    room = "end other programs, " if ended.by_system else ""
    return f"{unset}{room}run it again; if it stays so, {_REPORT}"


def _beside(case: Any, said: dict) -> Layer:
    """The layer of the kernels where a call could not be made, for no fault of a kernel."""
    if said.get("status") == OUT_OF_MEMORY:
        return _failed(said["why"], said)
    return _failed(f"a call of '{case.family}' cannot be tested: {said['why']}", said)


def _failed(found: str, said: dict) -> Layer:
    """The layer of the kernels where something else failed than a kernel."""
    if said.get("status") == OUT_OF_MEMORY:
        return Layer("", FAILED, f"GPU 0 has no memory left: {found}", _MAKE_ROOM)
    return Layer("", FAILED, found, f"run it again; if it stays so, {_REPORT}")


def _without(bad: Collection[int], count: int) -> str:
    """What to do about some of `count` devices that fail."""
    # Devices are counted among those that are visible.
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    names = visible if len(visible) >= count else [str(i) for i in range(count)]
    keep = ",".join(names[i] for i in range(count) if i not in bad)
    if not keep:
        return "look at what nvidia-smi says of the GPUs"
    return f"leave it out with CUDA_VISIBLE_DEVICES={keep}, and have it checked"


def _versions() -> dict[str, str]:
    """The versions of Python and of the packages that have a part in a launch, as far as they are
    installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _driver_error(said: dict, devices: list) -> Layer:
    status, error = said.get("status"), said["error"]
    if said["kind"] == "NoDriver":
        old = " has no " in error
        found = f"{error}: it is older than CUDA 12.0" if old else f"no NVIDIA driver: {error}"
        do = "install a driver of CUDA 12.0 (525) or later"
        return Layer("", FAILED, found, do if old else f"{do}; in a container, give it the GPUs")
    do = _INIT.get(status or 0, "look at what nvidia-smi says")
    return Layer("", FAILED, f"the driver does not start: {error}", do)


def _runs(arch: str, capability: str) -> bool:
    """Whether code for an architecture ("sm_80") runs on a compute capability ("8.6")."""
    of = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch, re.ASCII)
    major, _, minor = capability.partition(".")
    if of is None or of[1] != major:
        return False
    return int(of[2]) == int(minor) if of[3] == "a" else int(of[2]) <= int(minor)
