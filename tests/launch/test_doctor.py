"""The doctor where a driver stands in for a GPU: a setup in which all works, and broken ones, each
of which gives one clear sentence, the first layer that fails, and no crash.

The stand-in writes what the emulator has computed of the same kernels, so that answers are right
unless a test spoils them.
"""

import contextlib
import errno
import io
import json
import os
import platform
import shutil
import struct
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from cuda_sources import require_nvrtc
from emulated_launch import emulate

from sgap_jax.__main__ import main
from sgap_jax.doctor import doctor, process, worker
from sgap_jax.doctor.cases import cases
from sgap_jax.doctor.doctor import examine
from sgap_jax.doctor.report import FAILED, NOT_TESTED, OK, Layer, Report
from sgap_jax.launch import failures, launch, nvrtc, precompiled
from sgap_jax.launch.cache import Cubin, CubinCache, decode_entry
from sgap_jax.launch.driver import Driver
from sgap_jax.schedules import families
from sgap_jax.schedules.emulated import Emulated

HERE = Path(__file__).parent
FEW = ("row_max",)  # two families, of one kernel each
LAYERS = ["driver", "architecture", "cache folder", "compiler", "kernels", "XLA"]
LAYERS += ["command buffer", "other devices"]


def write_answers(folder, only):
    """Emulates the launches of cases, for the stand-in: writes FOLDER/index and the results."""
    cubins, index = CubinCache(folder / "cubins"), {}

    def run(call, inputs, outputs):
        results = emulate(call, inputs, outputs)
        kernel = launch.compile_call(call, nvrtc, "sm_90", cubins).kernel
        file = folder / f"{len(index)}.results"
        assert kernel not in index, "two launches of one kernel would need two answers"
        index[kernel] = file
        with file.open("wb") as out:
            for position, result in enumerate(results, start=len(inputs)):
                out.write(struct.pack("<qq", position, result.nbytes) + result.tobytes())
        return results

    for case in cases():
        if case.family.startswith(only):
            assert case.wrong(case.run(Emulated(run, case.schedule))) == ""
    (folder / "index").write_text("".join(f"{name}\t{file}\n" for name, file in index.items()))


@pytest.fixture(scope="session")
def few_answers(tmp_path_factory):
    require_nvrtc()
    folder = tmp_path_factory.mktemp("answers")
    write_answers(folder, FEW)
    return folder


@pytest.fixture
def setup(libraries, few_answers, tmp_path, monkeypatch):
    """An environment in which all works: one GPU, and a cache folder of the test's own."""
    cache = tmp_path / "cache"
    shutil.copytree(few_answers / "cubins", cache)
    tests = [str(HERE), str(HERE.parent), str(HERE.parent / "helpers")]
    for name, value in {
        "PYTHONPATH": os.pathsep.join([*tests, *filter(None, sys.path)]),
        "LD_LIBRARY_PATH": str(libraries),
        "SGAP_CACHE_DIR": str(cache),
        "SGAP_STANDIN_ANSWERS": str(few_answers / "index"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("SGAP_CUDA_ARCH", "SGAP_STANDIN_LOG", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, str(HERE / "doctor_on_cpu.py"), str(libraries / "cpu_stream.so")]
    monkeypatch.setattr(process, "COMMAND", command)
    return types.SimpleNamespace(cache=cache, setenv=monkeypatch.setenv, answers=few_answers)


# What a layer answers where all works, for tests of other layers: each process takes a second.
def canned(layer, request):
    device = dict(index=0, name="Stand-in GPU", capability="9.0", memory=8 << 30)
    if layer == "kernels":
        for i in request["cases"]:
            yield {"begin": i}
            yield {"end": i, "why": "", "kind": "", "kernels": [], "made": "some"}
        return
    yield from {
        "driver": [{"version": [13, 0]}, {"device": device}, {"free": 4 << 30, "index": 0}],
        "compiler": [{"nvrtc": "13.0"}, {"bytes": 1}],
        "xla": [{"devices": ["cpu:0 cpu", "cpu:1 cpu"]}, {"launches": 2}],
    }[layer]


@pytest.fixture
def real(setup, monkeypatch):
    """The setup, in which only the layers that a test names run, in this process where nothing
    that they do ends it."""

    def only(*layers, inside=("driver", "compiler", "kernels")):
        monkeypatch.setattr(families, "_read", families._read)  # the worker sets it

        def some(layer, request, *others):
            if layer not in layers:
                yield from canned(layer, request)
            elif layer not in inside:
                yield from process.answers(layer, request, *others)
            else:
                said = []
                library = f"{os.environ['LD_LIBRARY_PATH']}/libcuda.so.1"
                monkeypatch.setattr(Driver.__init__, "__defaults__", (library,))
                monkeypatch.setattr(worker, "answer", lambda **fields: said.append(fields))
                worker.run(layer, request)
                yield from said

        monkeypatch.setattr(doctor, "answers", some)
        return setup

    return only


def examined(only=FEW, seconds=100.0):
    """The report, and {layer: state}."""
    report = examine(seconds, only, platform="cpu")
    assert [layer.name for layer in report.layers] == LAYERS
    return report, {layer.name: layer.state for layer in report.layers}


def first_failed(report, name, *words):
    """Checks the first layer that fails, what is said of it in a sentence, and that all of the
    report can be written."""
    failed = report.first_failed
    assert failed is not None and failed.name == name, report.text()
    assert "\n" not in failed.found and failed.do
    for word in words:
        assert word.lower() in report.conclusion().lower()
    assert f"The first layer that fails is '{name}'" in report.text()
    assert json.loads(json.dumps(report.as_dict()))["first_failed"] == name


def test_all_layers_of_a_setup_that_works(setup):
    """Two devices of JAX, one of the driver; kernels that were on the list come off it."""
    where = failures.place("Stand-in GPU", (13, 0))
    failures.record(setup.cache, where, {"row_max row": "as before", "spmm octet": "not tested"})
    report, states = examined()
    assert set(states.values()) == {OK} and report.ok, report.text()
    assert report.facts["python"] == platform.python_version() and "jax" in report.facts
    assert report.facts["GPU 0"] == ("Stand-in GPU, compute capability 9.0, 4096 of 8192 MiB free")
    assert [row["family"] for row in report.kernels] == ["row_max row_group", "row_max row"]
    for row in report.kernels:
        assert (row["registers"], row["local_bytes"], row["binary_version"]) == (40, 0, 90)
        assert row["kernel"].endswith("Kernel") and row["why"] == ""
    assert [entry["family"] for entry in failures.entries(setup.cache)] == ["spmm octet"]
    assert "All layers work." in report.text()


def test_no_driver(real, tmp_path):
    setup = real("driver")
    setup.setenv("LD_LIBRARY_PATH", str(tmp_path))
    report, states = examined()
    first_failed(report, "driver", "no NVIDIA driver", "libcuda.so.1 does not load", "525")
    assert states["kernels"] == states["XLA"] == NOT_TESTED and states["cache folder"] == OK


def test_a_library_that_is_no_driver(real, libraries, tmp_path):
    setup = real("driver")
    shutil.copy(libraries / "cpu_stream.so", tmp_path / "libcuda.so.1")
    setup.setenv("LD_LIBRARY_PATH", str(tmp_path))
    first_failed(examined()[0], "driver", "has no cuDriverGetVersion", "12.0")


def test_an_old_driver(real):
    setup = real("driver")
    setup.setenv("SGAP_STANDIN_VERSION", "11040")
    first_failed(examined()[0], "driver", "the driver is of CUDA 11.4", "12.0 (525)")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SGAP_STANDIN_FAIL": "cuInit=100"}, ["does not start", "CUDA_VISIBLE_DEVICES"]),
        ({"SGAP_STANDIN_FAIL": "cuInit=803"}, ["does not start", "restart the machine"]),
        ({"SGAP_STANDIN_FAIL": "cuDriverGetVersion=34"}, ["stub of a driver", "LD_LIBRARY_PATH"]),
        ({"SGAP_STANDIN_GPUS": ""}, ["shows no GPU", "CUDA_VISIBLE_DEVICES"]),
        ({"SGAP_STANDIN_FREE": "1000"}, ["GPU 0 has 0 MiB free", "nvidia-smi"]),
        (
            {
                "SGAP_STANDIN_GPUS": "9.0,9.0",
                "SGAP_STANDIN_FAIL": "cuDevicePrimaryCtxRetain=719@1",
            },
            ["GPU 1 of 2 does not start", "LAUNCH_FAILED", "CUDA_VISIBLE_DEVICES=0"],
        ),
        (
            {"SGAP_STANDIN_FAIL": "cuDevicePrimaryCtxRetain=719"},
            ["GPU 0 of 1 does not start", "nvidia-smi"],
        ),
    ],
)
def test_a_driver_without_a_gpu_that_can_be_used(real, environment, words):
    setup = real("driver")
    for name, value in environment.items():
        setup.setenv(name, value)
    first_failed(examined()[0], "driver", *words)


@pytest.mark.parametrize("name", ["sm_80", "sm_9\u00b2", "\u00fcber"])
def test_an_architecture_that_the_gpu_does_not_run(real, name):
    setup = real()
    setup.setenv("SGAP_CUDA_ARCH", name)
    report, states = examined()
    first_failed(report, "architecture", f"SGAP_CUDA_ARCH is {name}", "9.0", "unset")
    assert states["kernels"] == NOT_TESTED


def test_gpus_of_two_kinds(real):
    """PTX of the older, which the compiler makes; the driver compiles it for each."""
    setup = real("driver", "compiler")
    setup.setenv("SGAP_STANDIN_GPUS", "9.0,8.0")
    report, states = examined()
    assert report.facts["architecture"] == "compute_80"
    assert states["architecture"] == states["compiler"] == OK


def test_no_compiler(real, monkeypatch):
    """The kernels cannot be tested, and none is put on the list for that."""
    setup = real("compiler", "kernels")
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    nvrtc._library.cache_clear()
    try:
        report, states = examined()
    finally:
        nvrtc._library.cache_clear()
    first_failed(report, "compiler", "NVRTC", "pip install 'sgap_jax[cuda13]'")
    assert states["kernels"] == NOT_TESTED and failures.entries(setup.cache) == []


def test_a_compiler_that_does_not_know_the_gpu(real):
    """What the compiler cannot make says nothing about the kernels: none is put on the list."""
    setup = real("driver", "compiler", "kernels")
    setup.setenv("SGAP_STANDIN_GPUS", "6.1")
    first_failed(examined()[0], "compiler", "does not compile for sm_61", "sgap_jax[cuda12]")
    assert failures.entries(setup.cache) == []


def test_a_compiler_that_is_newer_than_the_driver(real):
    """Its code does not load, which says nothing about the kernels."""
    setup = real("driver", "compiler", "kernels")
    setup.setenv("SGAP_STANDIN_VERSION", "12080")
    setup.setenv("SGAP_STANDIN_FAIL", "cuLibraryLoadData=200")
    words = ("NVRTC 13.", "driver of CUDA 12.8 does not load", "sgap_jax[cuda12]")
    report, states = examined()
    first_failed(report, "compiler", *words)
    assert failures.entries(setup.cache) == [] and states["kernels"] == NOT_TESTED


def test_what_to_leave_out_is_named_as_the_user_named_it(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES=0,2," in doctor._without([1], 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,GPU-7")
    assert "CUDA_VISIBLE_DEVICES=2,GPU-7," in doctor._without([1], 3)


@pytest.mark.parametrize("words", [["--only", "bogus"], ["--seconds", "0"], ["--seconds", "nan"]])
def test_a_command_that_would_test_nothing(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["sgap_jax", "doctor", *words])
    with pytest.raises(SystemExit):
        main()
    assert words[0] in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_written(real, tmp_path):
    """All else is tested; of a kernel that fails it says that the list could not be kept."""
    setup = real("kernels")
    (tmp_path / "file").write_text("")
    setup.setenv("SGAP_CACHE_DIR", str(tmp_path / "file" / "folder"))
    setup.setenv("SGAP_STANDIN_FAIL", "cuLaunchKernel=719@RowReduce")
    report, states = examined()
    first_failed(report, "cache folder", "cannot be kept", "Not a directory", "SGAP_CACHE_DIR")
    kernels = next(layer for layer in report.layers if layer.name == "kernels")
    assert states["compiler"] == OK and "cannot be put on the list" in kernels.do


def test_a_full_disk(real, monkeypatch):
    """Found by what is free, and by a write that fails."""
    real()
    usage = types.SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    first_failed(examined(("none",))[0], "cache folder", "is full: 1 MiB are free")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", full)
    first_failed(examined(("none",))[0], "cache folder", "No space left on device")


def listed(cache):
    return {entry["family"]: entry["why"] for entry in failures.entries(cache)}


def test_a_kernel_that_does_not_load(real):
    setup = real("kernels")
    setup.setenv("SGAP_STANDIN_FAIL", "cuLibraryLoadData=209")
    report, states = examined()
    first_failed(report, "kernels", "row_max row_group", "cuLibraryLoadData", "NO_BINARY_FOR_GPU")
    assert set(listed(setup.cache)) == {"row_max row_group", "row_max row"}
    assert states["XLA"] == NOT_TESTED


def first_kernel(answers):
    """The name in machine code of the kernel of 'row_max row_group'."""
    return (answers / "index").read_text().partition("\t")[0]


def spoiled(answers, folder):
    """A copy of the answers in which the first number of the first kernel is another."""
    first, *others = (answers / "index").read_text().splitlines(keepends=True)
    kernel, file = first.rstrip("\n").split("\t")
    data = bytearray(Path(file).read_bytes())
    data[16:20] = np.float32(77).tobytes()
    (folder / "spoiled").write_bytes(data)
    (folder / "index").write_text("".join([f"{kernel}\t{folder / 'spoiled'}\n", *others]))
    return folder / "index"


def test_a_kernel_that_gives_a_wrong_answer(real, tmp_path):
    """It is put on the list, and what works is still tested in XLA."""
    setup = real("kernels")
    setup.setenv("SGAP_STANDIN_ANSWERS", str(spoiled(setup.answers, tmp_path)))
    report, states = examined()
    first_failed(report, "kernels", "'row_max row_group' fail", "gives 77 where", "at [0]")
    (entry,) = failures.entries(setup.cache)
    assert (entry["family"], entry["device"], entry["driver"]) == (
        "row_max row_group",
        "Stand-in GPU",
        "13.0",
    )
    assert states["XLA"] == OK


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("cuMemAlloc=2", ["GPU 0 has no memory left", "cuMemAlloc_v2", "nvidia-smi"]),
        ("cuLibraryLoadData=2", ["GPU 0 has no memory left", "cuLibraryLoadData", "nvidia-smi"]),
        ("cuDevicePrimaryCtxRetain=999", ["'row_max row_group' cannot be tested", "run it again"]),
        ("cuLibraryLoadData=46", ["'row_max row_group' cannot be tested", "run it again"]),
    ],
)
def test_a_gpu_that_others_use_is_no_fault_of_a_kernel(real, fails, words):
    """None is put on the list, and what is on it stays."""
    setup = real("kernels")
    where = failures.place("Stand-in GPU", (13, 0))
    failures.record(setup.cache, where, {"row_max row": "as before"})
    setup.setenv("SGAP_STANDIN_FAIL", fails)
    report, states = examined()
    first_failed(report, "kernels", *words)
    assert listed(setup.cache) == {"row_max row": "as before"} and states["XLA"] == NOT_TESTED


def test_jax_that_does_not_start_is_no_fault_of_a_kernel(real):
    """XLA ends a process that has a flag which it does not know."""
    setup = real("kernels", inside=())
    setup.setenv("XLA_FLAGS", "--no_flag_of_xla")
    words = ("Unknown flag", "unset XLA_FLAGS (--no_flag_of_xla)")
    first_failed(examined()[0], "kernels", *words)
    assert listed(setup.cache) == {}


def test_what_is_damaged_in_the_cache_folder_is_made_anew(real):
    setup = real("kernels")
    entries = sorted(setup.cache.glob("*.cubin"))
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-7])
    (setup.cache / failures.FILE).write_bytes(b"\xff\xfe[")
    report, _ = examined()
    assert report.ok, report.text()
    assert all(decode_entry(entry.read_bytes()) for entry in entries)


# Programs in place of the doctor's process: (its text, what is said of it).
PROCESSES = {
    "absent": (None, "cannot be started (No such file or directory)"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "where memory is short"),
    "an abort": (
        "import os, sys; sys.stderr.write('F1125 18:11:25.777966   27149 flags.cc:234] No such "
        "flag\\n    @ 0x12 frame\\n'); sys.stderr.flush(); os.abort()",
        "was ended by SIGABRT: No such flag",
    ),
    "does not end": ("print('@sgap_jax doctor {}'); import os, time; os.close(1); time.sleep(60)",
        "did not end in 0 s after its answers"),
    "does not read": ("import time; time.sleep(60)", "it did not answer before the time was over"),
    "prints": ("print('of a library@sgap_jax doctor {\"a\": 1} and [more]\\n@sgap_jax doctor {')",
        None),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_of_the_doctor_in_trouble(monkeypatch, name):
    """Each has an end, in time, that says what happened; a large request does not wait for it."""
    text, words = PROCESSES[name]
    command = [sys.executable, "-S", "-c", text] if text else ["/absent/python"]
    monkeypatch.setattr(process, "COMMAND", command)
    monkeypatch.setattr(process, "_LAST", 0.3)
    start, said = time.monotonic(), []
    seconds = 0.4 if name == "does not read" else 20.0
    with contextlib.nullcontext() if words is None else pytest.raises(process.Ended) as ended:
        request = {"large": bytes(1 << 20)}
        for one in process.answers("layer", request, {}, start + seconds, 20.0):
            said.append(one)
    if words is None:
        assert said == [{"a": 1}]
    else:
        assert words in str(ended.value)
        assert ended.value.by_system == (name in ("absent", "killed"))
    assert time.monotonic() - start < 10


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("variable", "words"),
    [("SGAP_STANDIN_ENDS", "ended by SIGABRT"), ("SGAP_STANDIN_HANGS", "did not answer before")],
)
def test_a_kernel_that_ends_or_stops_its_process(real, monkeypatch, variable, words):
    """Other kernels are tested in a new process."""
    setup = real("kernels", inside=())
    monkeypatch.setattr(doctor, "_SILENCE", 5.0)
    setup.setenv(variable, first_kernel(setup.answers))
    report, states = examined()
    first_failed(report, "kernels", "row_max row_group", words)
    assert set(listed(setup.cache)) == {"row_max row_group"} and states["XLA"] == OK


def test_one_of_two_devices_fails(real):
    """Its kernels work on the first device, so none is put on the list."""
    setup = real("kernels", "xla")
    setup.setenv("SGAP_STANDIN_FAIL", "cuLaunchKernel=719@context 0xc1")
    report, states = examined()
    first_failed(report, "other devices", "device 1 of 2 fails", "cuLaunchKernel (", "719")
    assert "CUDA_VISIBLE_DEVICES=0" in report.conclusion()
    assert states["command buffer"] == OK and listed(setup.cache) == {}


def test_devices_that_work_alone_and_not_together(real, monkeypatch):
    real()

    def fails_together(layer, request, *_):
        if request.get("together"):
            yield from ({"devices": ["cpu:0", "cpu:1"]}, {"error": "no peer", "kind": "X"})
        else:
            yield from canned(layer, request)

    monkeypatch.setattr(doctor, "answers", fails_together)
    words = ("the program fails on all devices: no peer", "where each works alone")
    first_failed(examined()[0], "other devices", *words)


def test_the_kernels_of_the_package_are_loaded(real, tmp_path, monkeypatch):
    setup = real("kernels")
    archive = {name: Cubin(name, b"code") for name in ("record_0", "record_1")}
    precompiled.write(tmp_path, "sm_90", "13.0", archive)
    monkeypatch.setattr(precompiled, "package_folder", lambda: tmp_path)
    report, states = examined()
    kernels = next(layer for layer in report.layers if layer.name == "kernels")
    assert kernels.found == "2 calls are right; 2 kernels of the package load"
    setup.setenv("SGAP_STANDIN_FAIL", "cuLibraryGetKernel=209@record_1")
    words = ("came with the package", "cuLibraryGetKernel", "install the package again")
    first_failed(examined()[0], "kernels", *words)
    setup.setenv("SGAP_STANDIN_FAIL", "cuLibraryGetKernel=2@record_1")
    first_failed(examined()[0], "kernels", "GPU 0 has no memory left", "nvidia-smi")
    monkeypatch.delenv("SGAP_STANDIN_FAIL")
    whole = (tmp_path / "sm_90.zip").read_bytes()
    at = whole.index(b"record_0") + 20  # within the compressed entry
    (tmp_path / "sm_90.zip").write_bytes(whole[:at] + b"\xff\xff" + whole[at + 2 :])
    first_failed(examined()[0], "kernels", "an entry of sm_90.zip is damaged")
    assert listed(setup.cache) == {}


def test_no_time(setup):
    report, states = examined(seconds=0.2)
    assert states["driver"] == states["XLA"] == NOT_TESTED
    driver = report.layers[0]
    assert not report.ok
    assert "--seconds gives more" in driver.found and "not tested: driver" in report.conclusion()


def test_jax_without_a_gpu(real):
    """The kernels work, and JAX's CUDA plugin is missing."""
    real("kernels", "xla")
    report = examine(100.0, FEW, platform="cuda")
    first_failed(report, "XLA", "JAX has no CUDA device", "pip install 'jax[cuda13]'")


def test_the_command(monkeypatch, tmp_path, capsys):
    """What it prints, its exit status, and a report that cannot be written."""
    report = Report([Layer("driver", OK, "fine"), Layer("XLA", FAILED, "it fails", "mend it")])
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: report)
    file = tmp_path / "report.json"
    for target, status in ((file, 1), (tmp_path / "absent" / "file", 1)):
        monkeypatch.setattr(sys, "argv", ["sgap_jax", "doctor", "--json", str(target)])
        assert main() == status
    assert json.loads(file.read_text())["first_failed"] == "XLA"
    printed = capsys.readouterr()
    assert "The first layer that fails is 'XLA': it fails. To do: mend it." in printed.out
    assert "cannot be written" in printed.err
    report.layers[1].state = OK
    report.layers.append(Layer("other devices", NOT_TESTED, "there is one device"))
    assert main() == 0 and "All layers work; there is one device." in capsys.readouterr().out
    report.layers[1].state = NOT_TESTED
    assert main() == 1
    # A terminal without the letters of a folder's name, and full devices.
    report.facts["cache folder"] = "/srv/j\u00fcrgen"
    monkeypatch.setattr(sys, "stdout", ascii := io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main() == 1 and b"j\\xfcrgen" in ascii.buffer.getvalue()
    full = io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True)
    monkeypatch.setattr(sys, "stderr", full)
    monkeypatch.setattr(doctor, "examine", lambda *_, say: (say("testing"), report)[1])
    assert main() == 1
    monkeypatch.setattr(sys, "stdout", full)
    assert main() == 1


def test_the_cases_have_right_answers_and_notice_wrong_ones():
    """Each known answer against the CPU's kernels, and against a result that is off by one."""
    families = {case.family for case in cases()}
    for case in cases():
        results = case.run(None)
        assert case.wrong(results) == "", (case.family, case.about)
        first = np.asarray(results[0], np.float64)
        off = np.where(np.isfinite(first), first + 1, 0)
        assert "is right" in case.wrong((off, *results[1:])), case.family
    assert len(families) > 15 and {"spmm octet", "attention rows", "top_k", "spgemm"} <= families


@pytest.mark.tier("all")
def test_every_case_through_all_layers(setup, tmp_path):
    """All families, emulated, launched by the driver and by XLA."""
    write_answers(tmp_path, "")
    setup.setenv("SGAP_STANDIN_ANSWERS", str(tmp_path / "index"))
    setup.setenv("SGAP_CACHE_DIR", str(tmp_path / "cubins"))
    report, states = examined((), seconds=300.0)
    assert set(states.values()) == {OK}, report.text()
    assert {row["family"] for row in report.kernels} == {case.family for case in cases()}
