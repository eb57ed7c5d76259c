"""CUDA C++ -> PTX, with NVRTC (from its wheel, or the toolkit) or nvcc: neither needs a GPU."""

import ctypes
import functools
import glob
import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile


@functools.cache
def nvrtc_library():
    """The library of a wheel (nvidia-cuda-nvrtc), or None."""
    folders = []
    for package in ("nvidia.cu13", "nvidia.cuda_nvrtc"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        folders += list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(folder, "lib", "libnvrtc.so.*"))):
            if "alt" not in os.path.basename(path):
                return ctypes.CDLL(path), folder
    return None


@functools.cache
def find_nvcc():
    return shutil.which("nvcc") or next(iter(glob.glob("/usr/local/cuda*/bin/nvcc")), None)


def available():
    """Whether CUDA sources can be compiled here."""
    return nvrtc_library() is not None or find_nvcc() is not None


def cuda_headers():
    """Folders with cuda_fp16.h and the like."""
    roots = [nvrtc_library()[1]] if nvrtc_library() else []
    roots += sorted(glob.glob("/usr/local/cuda*"), reverse=True)
    folders = [os.path.join(root, "include") for root in roots]
    return [folder for folder in folders if os.path.isfile(os.path.join(folder, "cuda_fp16.h"))]


@functools.cache
def compile_ptx(source, architecture="compute_90", options=()):
    """PTX with line information; the kernels are `extern "C"`."""
    options = ("-std=c++17", "-lineinfo", *options)
    if nvrtc_library():
        return compile_with_nvrtc(source, (f"-arch={architecture}", *options))
    return compile_with_nvcc(source, (f"-arch={architecture}", *options))


def compile_with_nvcc(source, options):
    with tempfile.TemporaryDirectory() as folder:
        text, ptx = pathlib.Path(folder, "kernel.cu"), pathlib.Path(folder, "kernel.ptx")
        text.write_text(source)
        command = [find_nvcc(), "-ptx", "-o", str(ptx), *options, str(text)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr)
        return ptx.read_text()


def compile_with_nvrtc(source, options):
    library, _ = nvrtc_library()
    program = ctypes.c_void_p()
    options = [*options, *(f"-I{folder}" for folder in cuda_headers())]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        ),
    )
    try:
        status = library.nvrtcCompileProgram(program, len(options), encoded)
        if status:
            raise ValueError(fetch(library, program, "ProgramLog") or f"NVRTC error {status}")
        return fetch(library, program, "PTX")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def fetch(library, program, what):
    size = ctypes.c_size_t()
    check(library, library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(library, library[f"nvrtcGet{what}"](program, text))
    return text.value.decode()


def check(library, status):
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(library.nvrtcGetErrorString(status).decode())
