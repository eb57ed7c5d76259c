"""Planted bugs: 20 in Python, 32 in the C++ kernels, 12 in the CUDA kernels.

Each is one replacement of text that makes a documented result wrong: a lost tail, a lost scale, a
wrong stride, a wrong tie-break, a sign in one branch. `tests/mutants/run.py` plants them one at a
time in a copy of the checkout and says which tier of the suite notices each. A bug whose text has
moved or changed is an error of the list: give it its new place, or take another bug of that room.
"""

from bugs_in_cpp import CPP
from bugs_in_cuda import CUDA
from bugs_in_python import PYTHON

# The rooms of the package, of cpu/ and of cuda/; each has at least one bug.
ROOMS = (
    "formats",
    "schedules",
    "tuning",
    "launch",
    "primitives/common",
    "primitives/spmm",
    "primitives/sddmm",
    "primitives/sparse_softmax",
    "primitives/row_reduce",
    "primitives/gspmm",
    "primitives/gsddmm",
    "primitives/attention",
    "primitives/einsum",
    "compiler/notation",
    "compiler/transform",
    "compiler/lowering",
    "compiler/llvm",
    "compiler/cuda",
    "nn",
    "masks",
    "cpu/spmm",
    "cpu/spmm_cvs",
    "cpu/sddmm",
    "cpu/sparse_softmax",
    "cpu/row_reduce",
    "cpu/gspmm",
    "cpu/attention",
    "cpu/structure",
    "cpu/partition",
    "cpu/parallel",
    "cpu/half",
    "cpu/each_structure",
    "cpu/top_k",
    "cpu/nucleus",
    "cpu/bitmap",
    "cpu/transpose_structure",
    "cpu/regrow",
    "cuda/spmm",
    "cuda/spmm_octet",
    "cuda/sddmm",
    "cuda/sparse_softmax",
    "cuda/row_reduce",
    "cuda/gspmm",
    "cuda/attention",
    "cuda/attention_backward",
    "cuda/bitmap",
    "cuda/nucleus",
    "cuda/common",
)

BUGS = (*PYTHON, *CPP, *CUDA)
