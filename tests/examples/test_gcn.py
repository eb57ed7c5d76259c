"""The graph networks: data, both recipes in a few epochs, and early stopping."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgap_jax import SparseArray, graphs

for package in ("flax", "optax", "tqdm"):
    pytest.importorskip(package)

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gcn"
sys.path.insert(0, str(FOLDER))
citations = importlib.import_module("citations")
# Under a name of its own: the other example has a train.py, too.
_spec = importlib.util.spec_from_file_location("gcn_train", FOLDER / "train.py")
train = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = train  # dataclasses look there
_spec.loader.exec_module(train)


@pytest.fixture(scope="module")
def made_up():
    with jax.enable_x64(False):
        return citations.synthetic()


def test_synthetic_graph(made_up):
    dense = np.asarray(made_up.graph.todense())
    assert (dense == dense.T).all() and not dense.diagonal().any() and set(dense.flat) == {0, 1}
    np.testing.assert_allclose(made_up.features.todense().sum(1), 1, rtol=1e-5)
    split = np.concatenate([made_up.train, made_up.validation, made_up.test])
    assert len(set(split.tolist())) == len(split) == 600
    assert made_up.classes == 3 and "600 nodes" in made_up.summary()


@pytest.mark.parametrize("network", ["gcn", "gat", "sage", "gin", "gatv2", "rgcn"])
def test_both_networks_learn_the_synthetic_graph(made_up, network):
    model, lines, total = train.train(made_up, network, seed=0, epochs=60, quiet=True)
    assert [line["epoch"] for line in lines] == list(range(1, 61))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert total["test_accuracy"] > 0.9
    logits = model(train.RECIPES[network].network.prepare(made_up.graph), made_up.features)
    found = (logits.argmax(-1) == made_up.labels)[made_up.test].mean()
    assert float(found) == pytest.approx(total["test_accuracy"])


@pytest.mark.tier("all")
def test_the_kinds_of_edges_tell_what_their_union_does_not():
    with jax.enable_x64(False):
        data = citations.relational()
    assert "edges of 4 kinds" in data.summary()
    seen = train.train(data, "rgcn", seed=0, epochs=100, quiet=True)[2]["test_accuracy"]
    matrix = data.graph.matrix
    rows, columns = (np.asarray(x) for x in matrix.coordinates())
    union = graphs.from_edges(np.stack([columns % 600, rows]), matrix.values, num_nodes=600)
    blind = dataclasses.replace(data, graph=graphs.join_relations({"edges": union}))
    unseen = train.train(blind, "rgcn", seed=0, epochs=100, quiet=True)[2]["test_accuracy"]
    assert seen > 0.9 > unseen + 0.15


@pytest.mark.tier("all")
def test_sums_tell_graphs_apart_that_means_and_degrees_do_not():
    data = citations.wired()
    assert "7200 edges in 300 graphs" in data.summary() and "100 graphs train" in data.summary()
    assert (np.bincount(np.asarray(data.graph.graph.row_lengths)) == [0, 0, 3600, 2400]).all()
    assert train.train(data, "whole-gin", 0, epochs=100, quiet=True)[2]["test_accuracy"] > 0.95
    model, _, found = train.train(data, "whole-sage", 0, epochs=20, quiet=True)
    logits = np.asarray(model(data.graph, data.features))
    np.testing.assert_allclose(logits, logits[:1].repeat(300, 0), rtol=1e-5)
    assert found["test_accuracy"] < 0.6
    assert {*train.MADE_UP} < {*train.RECIPES}


def test_without_the_citations_the_words_do_not_do(made_up):
    nothing = SparseArray.from_dense(np.zeros(made_up.graph.shape, np.float32))
    alone = dataclasses.replace(made_up, graph=nothing)
    assert train.train(alone, "gcn", seed=0, epochs=60, quiet=True)[2]["test_accuracy"] < 0.75


def test_seeds_repeat(made_up):
    runs = [train.train(made_up, "gcn", seed, epochs=20, quiet=True)[1] for seed in (3, 3, 4)]
    assert [x["loss"] for x in runs[0]] == [x["loss"] for x in runs[1]]
    assert [x["loss"] for x in runs[0]] != [x["loss"] for x in runs[2]]


def test_early_stopping_keeps_the_best_and_ends_after_patience():
    loss = [3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.8, 1.0]
    accuracy = [0.1, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2, 0.9]
    best = {"params": -1, "loss": np.inf, "accuracy": 0.0, "stale": 0, "done": False}
    best = jax.tree.map(jnp.asarray, best)
    seen = []
    for i, (a, b) in enumerate(zip(loss, accuracy, strict=True)):
        best = train.better(best, jnp.asarray(i), jnp.asarray(a), jnp.asarray(b), patience=3)
        seen.append((int(best["params"]), int(best["stale"]), bool(best["done"])))
    assert seen == [
        (0, 0, False),
        (1, 0, False),
        (1, 0, False),  # the accuracy is as good, the loss is not
        (1, 0, False),  # the loss is better, the accuracy is not
        (1, 1, False),
        (1, 2, False),
        (1, 3, True),
        (1, 0, True),  # done is done
    ]


def test_weight_decay_is_of_the_layers_that_the_papers_name(made_up):
    nnx = importlib.import_module("flax.nnx")
    for name, decayed in (("gcn", {"first.kernel"}), ("gat", None)):
        recipe = train.RECIPES[name]
        model = recipe.network(5, 3, rngs=nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        zero = jax.tree.map(jnp.zeros_like, params)
        optimizer = train.optimizer_of(recipe)
        changed, _ = optimizer.update(zero, optimizer.init(params), params)
        moved = {
            ".".join(path)
            for path, leaf in nnx.to_flat_state(changed)
            if np.abs(leaf.get_value()).max() > 0
        }
        every = {".".join(path) for path, _ in nnx.to_flat_state(params)}
        assert moved == (decayed or {name for name in every if "bias" not in name})


def test_command_line_writes_metrics(tmp_path, capsys):
    run = tmp_path / "run"
    train.main(["--synthetic", "--seeds", "2", "--epochs", "20", "--run", str(run)])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    totals = [line for line in lines if "test_accuracy" in line]
    assert len(lines) == 2 * 21 and [line["seed"] for line in totals] == [0, 1]
    mean = 100 * np.mean([line["test_accuracy"] for line in totals])
    assert f"gcn on synthetic: {mean:.1f} +-" in capsys.readouterr().out


def test_command_line_errors_are_sentences(tmp_path, monkeypatch):
    monkeypatch.setenv("SGAP_DATA_DIR", str(tmp_path))
    np.savez(tmp_path / "half.npz", labels=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    for arguments, words in (
        ([], "cora_planetoid.npz: name a file with --data"),
        (["--data", "absent.npz"], "absent.npz: expected an .npz with adj_indptr"),
        (["--data", str(tmp_path / "half.npz")], "half.npz: expected an .npz with"),
        (["--data", str(tmp_path / "text.npz")], "text.npz: expected an .npz with"),
    ):
        with pytest.raises(SystemExit, match=words):
            train.main(arguments)


@pytest.mark.parametrize("name, nodes, classes", [("cora", 2708, 7), ("citeseer", 3327, 6)])
def test_planetoid_files(data_dir, name, nodes, classes):
    data = citations.read(data_dir / "graphs" / f"{name}_planetoid.npz")
    assert data.graph.shape == (nodes, nodes) and data.classes == classes
    assert [len(x) for x in (data.train, data.validation, data.test)] == [20 * classes, 500, 1000]
    assert (np.bincount(np.asarray(data.labels)[data.train]) == 20).all()
    sums = np.asarray(data.features.todense().sum(1))
    assert np.logical_or(np.isclose(sums, 1, atol=1e-5), sums == 0).all()


@pytest.mark.tier("all")
def test_sage_reaches_the_accuracy_of_the_table(data_dir):
    data = citations.read(data_dir / "graphs" / "cora_planetoid.npz")
    found = train.train(data, "sage", 0, epochs=100, quiet=True)[2]["test_accuracy"]
    assert 100 * found > 80.4 - 2.5


@pytest.mark.parametrize("name, accuracy", [("cora", 81.5), ("citeseer", 70.3)])
def test_gcn_reaches_the_papers_accuracy(data_dir, name, accuracy):
    data = citations.read(data_dir / "graphs" / f"{name}_planetoid.npz")
    found = [train.train(data, "gcn", seed, quiet=True)[2]["test_accuracy"] for seed in range(3)]
    assert abs(100 * np.mean(found) - accuracy) < 1.5
