"""Compiles printed C of loop functions with the system's C compiler."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from sgap_jax.compiler.loop_ir.loopir import INTEGERS
from sgap_jax.compiler.loop_ir.print_c import PRELUDE, print_c
from sgap_jax.compiler.loop_ir.widths import integer


def compiled(folder, functions, change=lambda text: text, flags=("-O1", "-Wall", "-Werror")):
    """Compiles serial functions; returns their callables by name."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    source, library = folder / "loops.c", folder / "loops.so"
    source.write_text(change(PRELUDE + "\n".join(map(print_c, functions))))
    flags = ("-std=c99", "-shared", "-fPIC", *flags)
    subprocess.run([compiler, *flags, source, "-o", library, "-lm"], check=True)
    loaded = ctypes.CDLL(str(library))

    def call(function, arrays):
        out = {a.name: np.full(a.size, _fill(a), a.dtype) for a in function.outputs}
        given = [*(arrays[array.name] for array in function.inputs), *out.values()]
        getattr(loaded, function.name)(*(ctypes.c_void_p(a.ctypes.data) for a in given))
        return out

    return call


def _fill(array):
    fill = array.fill or 0
    return integer(fill, array.dtype) if array.dtype in INTEGERS else fill
