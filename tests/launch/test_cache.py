"""The cache of compiled kernels: by content; no harm from other processes, damage, bad folders."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from cuda_sources import require_nvrtc

from sgap_jax.launch import cache
from sgap_jax.launch.cache import Cubin, CubinCache, content_key, default_folder

KEY = content_key("source", "sm_90")
CUBIN = Cubin("kernel<float, 4>", b"\x7fELF\n\0" + bytes(range(256)))


def never():
    raise AssertionError("compiled")


def once():
    """A compiler, and how often it ran."""
    runs = []

    def compile():
        runs.append(1)
        return CUBIN

    return compile, runs


def test_a_key_is_of_the_parts_and_their_boundaries():
    parts = ["source", "sm_90", "13.0"]
    keys = [parts, parts[:2], parts[::-1], ["sources", "m_90", "13.0"], ["source", "sm_90", "13.1"]]
    assert len({content_key(*each) for each in keys}) == len(keys)
    assert content_key("a") == content_key(b"a")
    # Known to other processes and machines: entries live as long as the format.
    assert KEY == content_key("source", "sm_90") and len(KEY) == 64


def test_an_entry_outlives_its_process_and_is_compiled_once(tmp_path):
    compile, runs = once()
    first = CubinCache(tmp_path / "deep" / "folder")
    assert first.get(KEY, compile) == first.get(KEY, compile) == CUBIN
    assert CubinCache(first.folder).get(KEY, never) == CUBIN
    assert len(runs) == 1
    assert [path.name for path in first.folder.iterdir()] == [f"{KEY}.cubin"]


def test_memory_serves_where_the_disk_does_not(tmp_path):
    compile, runs = once()
    cubins = CubinCache(tmp_path)
    cubins.get(KEY, compile)
    cubins.path(KEY).unlink()
    assert cubins.get(KEY, never) == CUBIN


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compile, runs = once()
    cubins = CubinCache(None)
    assert cubins.get(KEY, compile) == cubins.get(KEY, compile) == CUBIN
    assert len(runs) == 1 and not list(tmp_path.iterdir())


def test_another_key_is_another_entry(tmp_path):
    CubinCache(tmp_path).get(KEY, lambda: CUBIN)
    other = Cubin("other", b"code")
    assert CubinCache(tmp_path).get(content_key("other"), lambda: other) == other
    assert CubinCache(tmp_path).get(KEY, never) == CUBIN


def test_any_damage_is_noticed_and_mended(tmp_path):
    path = CubinCache(tmp_path).path(KEY)
    CubinCache(tmp_path).get(KEY, lambda: CUBIN)
    whole = path.read_bytes()
    flipped = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in range(len(whole))]
    damaged = flipped + [whole[:size] for size in range(len(whole))] + [whole + b"\0"]
    for data in damaged:
        path.write_bytes(data)
        compile, runs = once()
        assert CubinCache(tmp_path).get(KEY, compile) == CUBIN
        assert runs and path.read_bytes() == whole


def test_a_folder_where_the_entry_should_be(tmp_path):
    CubinCache(tmp_path).path(KEY).mkdir()
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert CubinCache(tmp_path).get(KEY, lambda: CUBIN) == CUBIN
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.cubin"]  # no temporary file left


def test_a_pipe_where_the_entry_should_be_is_not_read(tmp_path):
    os.mkfifo(CubinCache(tmp_path).path(KEY))
    assert CubinCache(tmp_path).get(KEY, lambda: CUBIN) == CUBIN
    assert CubinCache(tmp_path).get(KEY, never) == CUBIN  # written in its place


def one_warning(cubins):
    """Two kernels through a cache that cannot write: both are served, one warning is given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (KEY, content_key("other")):
            assert cubins.get(key, lambda: CUBIN) == CUBIN
            assert cubins.get(key, never) == CUBIN  # from memory
    (warning,) = caught
    assert issubclass(warning.category, RuntimeWarning)
    assert f"cannot be kept in {cubins.folder}" in str(warning.message)
    assert "SGAP_CACHE_DIR" in str(warning.message)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    one_warning(CubinCache(tmp_path / "file" / "cubins"))
    one_warning(CubinCache(tmp_path / "file"))


def test_a_read_only_folder_is_still_read(tmp_path, monkeypatch):
    CubinCache(tmp_path).get(content_key("kept"), lambda: CUBIN)
    if os.geteuid() == 0:  # to whom no folder is read-only

        def refuse(*args, **keywords):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    else:
        tmp_path.chmod(0o500)
    cubins = CubinCache(tmp_path)
    one_warning(cubins)
    assert cubins.get(content_key("kept"), never) == CUBIN
    tmp_path.chmod(0o700)


def test_a_full_disk(tmp_path, monkeypatch):
    fdopen = os.fdopen

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "fdopen", lambda *args: Full(fdopen(*args)))
    one_warning(CubinCache(tmp_path))
    assert not list(tmp_path.iterdir())  # not the half that was written either


DISK = """
import os, subprocess, sys, warnings
sys.path[:0] = {path!r}
import jax, numpy as np
from sgap_jax import SparseArray, spmm
from sgap_jax.doctor.doctor import examine

folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[2], "none", folder], check=True)
os.environ |= {{"SGAP_CACHE_DIR": folder, "SGAP_CUDA_ARCH": "sm_90"}}
(layer,) = (one for one in examine(20, ("none",)).layers if one.name == "cache folder")
print(layer.state, layer.found, layer.do, sep="; ")
A = SparseArray.from_dense(np.tri(9, 8, dtype=np.float32))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for n in (1, 64):
        traced = jax.jit(spmm).trace(A, np.ones((8, n), np.float32))
        assert "sgap_launch_v1" in traced.lower(lowering_platforms=("cuda",)).as_text()
print(*(one.message for one in caught), sep="; ")
"""


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("disk", "says"), [("size=4k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_a_disk_that_is_full_or_read_only(disk, says, tmp_path):
    """One of its own, in a namespace of mounts: the doctor's sentence, and one warning of programs,
    which have their kernels all the same."""
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"]).returncode:
        pytest.skip("this system gives no namespace of mounts")
    require_nvrtc()
    program = DISK.format(path=[str(Path(cache.__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [*apart, sys.executable, "-c", program, str(tmp_path), disk],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    doctor, warning = done.stdout.splitlines()
    assert doctor.startswith(f"FAILED; kernels cannot be kept in {tmp_path} ({says}); name another")
    assert warning.count("cannot be kept") == 1 and says in warning and "SGAP_CACHE_DIR" in warning
    assert not list(tmp_path.iterdir())


def test_an_interrupted_compilation_leaves_nothing(tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    cubins = CubinCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cubins.get(KEY, interrupted)
    assert not list(tmp_path.iterdir())
    assert cubins.get(KEY, lambda: CUBIN) == CUBIN


FILL = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from sgap_jax.launch.cache import Cubin, CubinCache, content_key

def never():
    raise AssertionError("an entry that was there is gone or torn")

folder, me = Path(sys.argv[1]), int(sys.argv[2])
(folder / f"ready{{me}}").touch()
while not (folder / f"ready{{1 - me}}").exists():
    pass
for turn in range(200):
    for number, compile in ((turn, None), (turn % 7, never)):
        cubin = Cubin(f"kernel{{number}}", bytes([number]) * 300_000)
        cubins, key = CubinCache(folder / "cubins"), content_key(str(number))
        assert cubins.get(key, compile or (lambda: cubin)) == cubin
    cubins._write(key, cubin)  # as a process that had found nothing
"""


def test_two_processes_at_once(tmp_path):
    """Both make the same entries at the same time; one that is there is whole at any moment."""
    folder = tmp_path / "cubins"
    for number in range(7):
        cubin = Cubin(f"kernel{number}", bytes([number]) * 300_000)
        CubinCache(folder).get(content_key(str(number)), lambda cubin=cubin: cubin)
    program = FILL.format(path=[str(Path(cache.__file__).parents[2]), *sys.path])
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path)]
    both = [
        subprocess.Popen([*command, str(me)], stderr=subprocess.PIPE, text=True) for me in (0, 1)
    ]
    for process in both:
        _, error = process.communicate(timeout=110)
        assert process.returncode == 0, error
    assert len(list(folder.iterdir())) == 200  # and no temporary file
    for number in range(200):
        entry = CubinCache(folder).get(content_key(str(number)), never)
        assert entry == Cubin(f"kernel{number}", bytes([number]) * 300_000)


def test_threads_share_a_cache(tmp_path):
    cubins, wrong = CubinCache(tmp_path), []

    def fill(start):
        for turn in range(60):
            key = str((start + turn) % 20)
            got = cubins.get(content_key(key), lambda key=key: Cubin(key, key.encode()))
            if got != Cubin(key, key.encode()):
                wrong.append((key, got))

    threads = [threading.Thread(target=fill, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(list(tmp_path.iterdir())) == 20


def test_a_forked_child_waits_for_no_thread_of_its_parent(tmp_path):
    """A thread compiles while the process forks; the child has the cache and the compiler all the
    same, where a lock would never be released."""
    cubins, begun, go = CubinCache(tmp_path), threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait()
        return CUBIN

    thread = threading.Thread(target=cubins.get, args=(KEY, slow))
    thread.start()
    begun.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks, as its own threads have locks
        child = os.fork()
    if child == 0:
        got = [cubins.get(key, lambda: CUBIN) for key in (KEY, content_key("other"))]
        os._exit(0 if got == [CUBIN, CUBIN] else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    go.set()
    thread.join()
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert CubinCache(tmp_path).get(KEY, never) == CUBIN


def big(name):
    """An entry of about 1000 bytes, and its key."""
    return content_key(name), Cubin(name, name.encode() * (900 // len(name)))


def names(folder):
    return {path.name.partition(".")[0] for path in folder.iterdir()}


def test_a_folder_stays_near_its_size_and_what_was_used_last_stays(tmp_path):
    for number in range(100):
        key, cubin = big(f"kernel{number:03}")
        CubinCache(tmp_path, most_bytes=20_000).get(key, lambda cubin=cubin: cubin)
        os.utime(tmp_path / f"{key}.cubin", ns=(number, number))  # clocks may be coarse
        often, _ = big("kernel000")
        assert CubinCache(tmp_path).get(often, never).kernel == "kernel000"
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 22_000
    assert big("kernel099")[0] in names(tmp_path) and big("kernel050")[0] not in names(tmp_path)
    assert 10 < len(names(tmp_path)) < 22


def test_one_process_that_writes_much_stays_within_the_size(tmp_path):
    cubins = CubinCache(tmp_path, most_bytes=20_000)
    for number in range(100):
        key, cubin = big(f"kernel{number:03}")
        cubins.get(key, lambda cubin=cubin: cubin)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 25_000
    assert cubins.get(big("kernel000")[0], never).kernel == "kernel000"  # from memory


def test_what_killed_processes_left_goes_too(tmp_path):
    (left := tmp_path / ".left.new").write_bytes(bytes(30_000))
    os.utime(left, ns=(1, 1))
    mine = tmp_path / "notes"
    mine.touch()
    key, cubin = big("kernel")
    CubinCache(tmp_path, most_bytes=20_000).get(key, lambda: cubin)
    assert not left.exists() and mine.exists() and key in names(tmp_path)


CROWD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from sgap_jax.launch.cache import Cubin, CubinCache, content_key

folder, me = Path(sys.argv[1]), int(sys.argv[2])
for turn in range(400):
    name = f"kernel{{(turn * (3 + me)) % 97:03}}"
    expected = Cubin(name, name.encode() * 100)
    assert CubinCache(folder, 20_000).get(content_key(name), lambda: expected) == expected
"""


def test_processes_that_remove_each_others_entries(tmp_path):
    program = CROWD.format(path=[str(Path(cache.__file__).parents[2]), *sys.path])
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path)]
    both = [
        subprocess.Popen([*command, str(me)], stderr=subprocess.PIPE, text=True) for me in (0, 1)
    ]
    for process in both:
        _, error = process.communicate(timeout=110)
        assert process.returncode == 0, error
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 25_000


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SGAP_CACHE_DIR", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.setenv("SGAP_CACHE_DIR", "")
    assert default_folder() is None
    monkeypatch.delenv("SGAP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "sgap_jax" / "cubins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "sgap_jax" / "cubins"
