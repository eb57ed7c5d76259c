"""The benchmark of attention on a GPU runs on the emulator, and looks at what it times."""

import json

import ml_dtypes
import numpy as np
import pytest
from cuda_sources import require_nvrtc
from gpu_results import read

from benchmarks.gpu import attention, timing


@pytest.mark.parametrize("wrong", [0, 1])
def test_passes_run_beside_the_cuda_cores_and_wrong_results_end_them(wrong, tmp_path, monkeypatch):
    require_nvrtc()
    monkeypatch.setattr(timing.DryRun, "get", lambda self, array: np.asarray(array) + wrong)
    command = ["--dry-run", "--results", str(tmp_path)]
    if wrong:
        every = attention.Case._launches
        last = lambda self, tile: dict([*every(self, tile).items()][-1:])  # noqa: E731
        monkeypatch.setattr(attention.Case, "_launches", last)
        with pytest.raises(SystemExit, match="2 results of ours are wrong, the first: .*small_m"):
            attention.main(command)
        return
    attention.main(command)
    (folder,) = tmp_path.iterdir()
    rows = read(folder / "attention.csv")
    passes = ("forward", "dk and dv", "dq")
    kernels = [(name, each) for name in ("ours", "cuda_cores") for each in passes]
    assert [(row["contender"], row["pass"]) for row in rows[:6]] == kernels
    assert ["octet" in row["schedule"] for row in rows[:6]] == [True] * 3 + [False] * 3
    assert all(row["us"] for row in rows[:6])
    dense = {row["contender"]: row for row in rows[8:]}
    assert [row["contender"] for row in rows[6:8]] == ["ours_jax", "cuda_cores_jax"]
    assert list(dense) == ["jax_nn_xla", "jax_nn_cudnn"] and dense["jax_nn_xla"]["us"]
    cudnn = dense["jax_nn_cudnn"]
    assert cudnn["us"] or "cuDNN" in cudnn["notes"]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    for row in rows:
        assert bool(row["us"]) != bool(row["notes"]) and row["device"], row
    text = (folder / "attention.md").read_text()
    assert "no figure here says anything about a GPU" in text and "not measured" in text
    assert json.loads((folder / "attention.json").read_text())["not_started"] == []


def test_each_result_of_a_pass_is_checked():
    expected = [np.ones((2, 3)), np.full(4, 100.0)]
    wrong = attention.checker(expected, 4e-3)
    assert wrong([np.ones((2, 3)), np.full(4, 100.3)]) <= 1
    assert wrong([np.ones((2, 3)), np.full(4, 100.5)]) > 1
    assert not wrong([np.full((2, 3), np.nan), np.full(4, 100.0)]) <= 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32])
def test_arrays_of_every_dtype_go_to_torch_and_back(dtype):
    torch = pytest.importorskip("torch")
    array = (np.arange(12) / 4 - 1).astype(dtype).reshape(3, 4)[:, ::2]
    tensor = timing.to_torch(torch, array)
    assert str(tensor.dtype) == f"torch.{np.dtype(dtype).name}"
    np.testing.assert_array_equal(timing.from_torch(torch, tensor), array.astype(np.float32))
