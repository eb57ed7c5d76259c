"""CUDA sources in tests: the headers' folders, and NVRTC or the reason why it is missing."""

import collections
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass

import pytest
from result_cache import cached

from sgap_jax.launch import nvrtc
from sgap_jax.launch.kernel_call import include_options, included_headers

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "cuda"
INCLUDE = include_options(HEADERS)


# Tests of the first compile each kernel for one of them; the others' are slower tests of one more.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
OTHER_ARCHITECTURES = ("sm_75", "sm_86", "sm_89", "sm_120")
EACH_ARCHITECTURE = (
    *ARCHITECTURES,
    *(pytest.param(arch, marks=pytest.mark.tier("all")) for arch in OTHER_ARCHITECTURES),
)


def has_turn(i, arch):
    """Whether kernel i is compiled for `arch`, one of each kind of architecture."""
    those = ARCHITECTURES if arch in ARCHITECTURES else OTHER_ARCHITECTURES
    return i % len(those) == those.index(arch)


def require_nvrtc():
    try:
        return nvrtc.version()
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error).splitlines()[0])


@functools.cache
def toolkit_headers():
    """Folders with cuda_fp16.h and the other CUDA headers: of a wheel, or of an installed
    toolkit."""
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(r) / "cu13" for r in (spec and spec.submodule_search_locations) or ()]
    roots += sorted(pathlib.Path("/usr/local").glob("cuda*"), reverse=True)
    folders = [root / "include" for root in roots]
    return [folder for folder in folders if (folder / "cuda_fp16.h").is_file()]


@functools.cache
def ptx(source, arch="compute_90", options=(), headers=HEADERS):
    toolkit = (f"--include-path={folder}" for folder in toolkit_headers())
    flags = (*include_options(headers), *toolkit, "--generate-line-info", *options)
    parts = ("ptx", *_depends_on(source, arch, headers), *flags)
    return cached(parts, lambda: nvrtc.ptx(source, arch, flags))


def _depends_on(source, arch, headers=HEADERS):
    """The parts of a compilation's cache key, except its options."""
    return (source, arch, nvrtc.version(), *included_headers(source, headers))


def resources(source, arch):
    """Registers, and bytes of local memory and of spills, that ptxas reports for a kernel."""
    (report,) = resources_of([source], arch).values()
    return report


def resources_of(sources, arch):
    """{mangled name: `resources`} of kernels whose sources are their headers and an instantiation.

    Sixteen are one program, which reads the headers once: half the time for small kernels.
    """
    sources = list(dict.fromkeys(sources))
    found = {}
    for first in range(0, len(sources), 16):
        lines = "\n".join(sources[first : first + 16]).splitlines()
        included = [line for line in lines if line.startswith("#include")]
        rest = [line for line in lines if line not in included]
        found |= _reports("\n".join((*dict.fromkeys(included), *rest)), arch)
    assert len(found) == len(sources)
    return found


def _reports(source, arch):
    options = (*INCLUDE, "--ptxas-options=-v")
    return reports(
        cached(
            ("ptxas", *_depends_on(source, arch), *options),
            lambda: nvrtc._compile(source, arch, options, "CUBIN")[1],
        )
    )


def reports(log):
    """{mangled name: `resources`} that ptxas has said."""
    kernel = (
        r"entry function '(\w+)'.*\n.*properties for \1\n"
        r".* (\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers"
    )
    return {
        name: (int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in re.findall(kernel, log)
    }


@dataclass(frozen=True)
class Loop:
    """Instructions between the target of a branch backwards and the branch, inner loops included,
    and how many of these are loads from global memory, and on tensor cores; whether no other loop
    is inside."""

    instructions: int
    loads: int
    tensor: int
    innermost: bool


@dataclass(frozen=True)
class MachineCode:
    """The instructions of a kernel in SASS, without padding.

    Attributes:
      lines: {"file:line" of the source: instructions}; "" for those without a line.
      opcodes: {name without modifiers: instructions}.
      loops: in the order of their branches; an inner loop comes before the one around it.
    """

    lines: dict
    opcodes: dict
    loops: tuple

    @property
    def instructions(self):
        return sum(self.opcodes.values())

    @property
    def tensor(self):
        return sum(self.opcodes.get(name, 0) for name in TENSOR)

    @property
    def main_loop(self):
        """The innermost loop with most loads and tensor operations; None if there is no loop."""
        innermost = (loop for loop in self.loops if loop.innermost)
        return max(innermost, key=lambda loop: loop.loads + loop.tensor, default=None)


TENSOR = ("HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "HGMMA")
SASS = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
SASS_LINE = re.compile(r'\s*//## File "([^"]*)", line (\d+)')


@functools.cache
def nvdisasm():
    """The path of NVIDIA's disassembler: of a wheel (nvidia-cuda-nvdisasm), or of a toolkit; None
    if there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = [
        pathlib.Path(r) / "cu13" / "bin" for r in (spec and spec.submodule_search_locations) or ()
    ]
    folders += [pathlib.Path("/usr/local/cuda/bin")]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which("nvdisasm", path=path)


def require_nvdisasm():
    require_nvrtc()
    if nvdisasm() is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")


def machine_code(source, arch):
    """The `MachineCode` of the one kernel of a source, with the lines that it comes from."""
    options = (*INCLUDE, "--generate-line-info")
    parts = ("nvdisasm", *_depends_on(source, arch), *options)
    return parse_sass(cached(parts, lambda: disassembled(source, arch, options)))


def disassembled(source, arch, options):
    """The machine code of a source, as nvdisasm prints it."""
    code, _ = nvrtc._compile(source, arch, options, "CUBIN")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(code)
        command = [nvdisasm(), "--print-code", "--print-line-info", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_sass(text):
    """The `MachineCode` that nvdisasm prints."""
    found, labels, where = [], {}, ""
    for line in text.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif at := SASS_LINE.match(line):
            where = f"{pathlib.Path(at[1]).name}:{at[2]}"
        elif (code := SASS.match(line)) and code[2] != "NOP":
            found.append((code[2].split(".")[0], code[3], where))
    spans = []
    for end, (opcode, operands, _) in enumerate(found):
        target = re.search(r"`\((\.L_\w+)\)", operands)
        if opcode == "BRA" and target and labels.get(target[1], end) < end:
            spans.append((labels[target[1]], end))
    loops = []
    for start, end in spans:
        body = [name for name, _, _ in found[start : end + 1]]
        tensor = sum(name in TENSOR for name in body)
        loads = body.count("LDG") + body.count("LDGSTS")
        inside = [span for span in spans if start <= span[0] and span[1] < end]
        loops.append(Loop(len(body), loads, tensor, not inside))
    lines = collections.Counter(where for _, _, where in found)
    opcodes = collections.Counter(name for name, _, _ in found)
    return MachineCode(dict(lines), dict(opcodes), tuple(loops))
