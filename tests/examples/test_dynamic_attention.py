"""Attention that selects its keys: it learns what dense attention does, and decodes the same."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

for package in ("flax", "optax", "tqdm", "matplotlib"):
    pytest.importorskip(package)

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "dynamic_attention"
sys.path.insert(0, str(FOLDER))
language, recall = (importlib.import_module(name) for name in ("language", "recall"))
# Under a name of its own: the other examples have a train.py, too.
_spec = importlib.util.spec_from_file_location("recall_train", FOLDER / "train.py")
train = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(train)

SMALL = recall.Task(keys=128, values=8, pairs=96, asked=32)


def test_answers_are_those_of_the_pairs():
    events, where = SMALL.draw(3, np.random.default_rng(0))
    assert events.shape == (3, SMALL.length, 2) and where.shape == (3, SMALL.asked)
    for stream, pairs in zip(events, where, strict=True):
        assert len(set(stream[: SMALL.pairs, 0])) == SMALL.pairs
        np.testing.assert_array_equal(stream[SMALL.pairs :, 0], stream[pairs, 0])
        assert (stream[SMALL.pairs :, 1] == SMALL.values).all()
        assert (stream[: SMALL.pairs, 1] < SMALL.values).all()


@pytest.mark.tier("all")
def test_selections_reach_the_accuracy_of_dense_attention(tmp_path):
    base = recall.Config(
        heads=2, steps=60, warmup=40, batch=8, top_k=8, num_blocks=24, learning_rate=1e-2
    )
    names = ("dense", "tokens", "blocks")
    configs = [dataclasses.replace(base, attention=name) for name in names]
    rows = train.run(SMALL, configs, tmp_path, quiet=True)
    dense, *others = rows
    assert [row["attention"] for row in rows] == list(names) and dense["accuracy"] > 0.98
    for row in others:
        assert row["accuracy"] > dense["accuracy"] - 0.01 and row["seen"] > 0.98
        assert row["decoded_apart"] < 1e-4
        assert (tmp_path / f"{row['attention']}.png").stat().st_size > 1000
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 6 and (tmp_path / "curves.png").exists()


@pytest.mark.tier("all")
def test_tiny_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--tiny", "--run", str(tmp_path)])
    train.main()
    assert "decoded logits differ" in capsys.readouterr().out


def words(size, seed):
    """Text of words of a dozen that are drawn anew for every 40: what comes next is often known
    from where its beginning stood before, and from nowhere else."""
    rng, letters, text = (
        np.random.default_rng(seed),
        np.frombuffer(b"abcdefghijklmnop", np.uint8),
        b"",
    )
    while len(text) < size:
        dozen = [bytes(rng.choice(letters, rng.integers(4, 9))) for _ in range(12)]
        text += b" ".join(dozen[i] for i in rng.integers(0, 12, 40)) + b"\n"
    return np.frombuffer(text, np.uint8)


@pytest.mark.tier("all")
def test_language_models_with_selections_reach_the_accuracy_of_dense_attention(tmp_path):
    small = dict(length=1024, embedding=16, features=64, mlp=64, learning_rate=1e-2)
    base = language.Config(batch=1, steps=240, top_k=64, block_size=4, num_blocks=64, **small)
    configs = [dataclasses.replace(base, attention=x) for x in ("dense", "tokens", "blocks")]
    rows = language.compare(configs, words(60_000, 0), tmp_path, count=16, quiet=True)
    dense, *others = (row["accuracy"] for row in rows)
    # Blocks that have no choice, the first and the own one, come to 18%.
    assert dense > 0.55 and min(others) > dense - 0.01, rows
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3 * 12
