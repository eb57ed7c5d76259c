"""The text that the compiler writes, character by character: LLVM IR for the CPU and CUDA C++.

Machine code is kept on disk by a hash of this text, so another text is another compilation for
every user. LLVM IR is written here for vectors of a given width, never for those of the CPU that
runs the test. The texts of the presets in float32 are golden files; of the other dtypes and widths,
and of the conformance list, there are checksums. Where only a checksum differs, print the text at
both commits:

    PYTHONPATH=tests python tests/freeze/test_preset_text.py llvm "row 4" float64 32
"""

import hashlib
import sys

from compiler_chains import MTTKRP, SPMM, cpu_presets, gpu_presets, octets_on_gpu
from lowered_chains import LISTED_SIZES, ROWS

from sgap_jax import CSR
from sgap_jax.compiler import assign, gradient
from sgap_jax.compiler.cuda.print_cuda import print_cuda
from sgap_jax.compiler.llvm.print_llvm import print_llvm
from sgap_jax.compiler.presets import cpu
from sgap_jax.compiler.transform.text import function

DTYPES = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int8", "int32")  # of the CPU's loops alone
WIDTHS = (16, 32, 64)  # bytes of a vector: SSE2, AVX2, AVX-512
SIZES = {"i": 37, "j": 29, "k": 11, "l": 7, "r": 23}
OCTET_SIZES = {"i": 24, "j": 100, "k": 90}
ENTRIES = 320


def lowered(name, schedule, dtype):
    """The loops of a schedule, for small sizes; where it is one for N columns, for those."""
    sizes = OCTET_SIZES if name.startswith("octets") else LISTED_SIZES.get(name[4:], SIZES)
    sizes = {x.name: sizes[x.name] for x in schedule.expression.indices}
    if " N = " in name:
        sizes["k"] = int(name.rpartition(" ")[2])
    return function(schedule, sizes, ENTRIES, dtype)


def llvm(name, schedule, dtype="float32", width=64):
    return print_llvm(lowered(name, schedule, dtype), int(width)).text


def cuda(name, schedule, dtype="float32"):
    return print_cuda(lowered(name, schedule, dtype))


def more_on_cpu():
    """name -> schedule: what the default on a CPU makes of gradients and extrema."""
    expressions = [gradient(SPMM, "A"), gradient(SPMM, "B"), gradient(MTTKRP, "C")]
    for reduction in ("max", "min"):
        expressions.append(assign("ij,jk->ik", {"A": CSR}, reduction=reduction))
        expressions.append(assign("ij,j->i", {"A": CSR}, reduction=reduction))
    return {f"{e}, {e.sparse.format}": cpu(e) for e in expressions}


def chains(on_gpu):
    """Rows of the conformance list, and octet tiles on a GPU."""
    found = {f"row {name}": schedule for name, schedule in ROWS.items()}
    found |= {f"octets, {name}": schedule for name, schedule in octets_on_gpu().items()}
    return {name: s for name, s in found.items() if ("GPU" in str(s)) == on_gpu}


def on_cpu():
    return cpu_presets() | more_on_cpu() | chains(on_gpu=False)


def on_gpu():
    return gpu_presets() | chains(on_gpu=True)


def texts(write, schedules):
    return "".join(f"# {name}\n{write(name, s)}\n" for name, s in schedules.items())


def checksum(write, name, schedule, *options):
    try:
        text = write(name, schedule, *options)
    except NotImplementedError as error:
        return f"refused: {error}"
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}, {text.count(chr(10))} lines"


def test_llvm_text_of_presets(golden):
    golden.text("presets.ll.txt", texts(llvm, cpu_presets()))


def test_cuda_text_of_presets(golden):
    golden.text("presets.cu.txt", texts(cuda, gpu_presets()))


def test_checksums_of_llvm_text(golden):
    found = {
        f"{name}; {dtype}, {width} bytes": checksum(llvm, name, schedule, dtype, width)
        for name, schedule in on_cpu().items()
        for dtype in (*DTYPES, *INTEGERS)
        for width in (WIDTHS if dtype in DTYPES[:2] else WIDTHS[1:2])
    }
    golden.entry("text_checksums.json", "llvm", found)


def test_checksums_of_cuda_text(golden):
    found = {
        f"{name}; {dtype}": checksum(cuda, name, schedule, dtype)
        for name, schedule in on_gpu().items()
        for dtype in DTYPES
    }
    golden.entry("text_checksums.json", "cuda", found)


if __name__ == "__main__":
    target, chosen, *options = sys.argv[1:]
    write, known = (llvm, on_cpu()) if target == "llvm" else (cuda, on_gpu())
    print(write(chosen, known[chosen], *options))
