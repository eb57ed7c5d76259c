"""The sparse transformer's evaluation and benchmark, at sizes of a test."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

for package in ("flax", "optax", "orbax.checkpoint", "tqdm", "matplotlib"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "sparse_transformer"))
benchmark, evaluate, layers, measure, model, runs, train = (
    importlib.import_module(name)
    for name in ("benchmark", "evaluate", "layers", "measure", "model", "runs", "train")
)
nnx = importlib.import_module("flax.nnx")

LENGTH, WIDTH, HEADS = 32, 16, 2
SMALL = runs.Config(
    task="text",
    length=LENGTH,
    train_examples=500,
    width=WIDTH,
    heads=HEADS,
    layers=1,
    mlp=WIDTH,
    density=0.4,
    attention="dense",
)
NAMES = ["dense float32", "dense float16", "sparse float32", "sparse float16"]
PRODUCTS = ("dot_general", "attention")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Benchmarks of the model that the evaluation reads, and each forward pass compiled once."""
    monkeypatch.setattr(layers, "WIDTH", WIDTH)
    monkeypatch.setattr(layers, "HEADS", HEADS)
    monkeypatch.setattr(layers, "HEAD_WIDTH", WIDTH // HEADS)
    monkeypatch.setattr(layers, "SCALE", (WIDTH // HEADS) ** -0.5)
    monkeypatch.setattr(layers, "MLP", WIDTH)
    monkeypatch.setattr(layers, "LAYERS", 1)
    mask = lambda length: model.default_mask(length, density=SMALL.density)
    monkeypatch.setattr(benchmark, "paper_mask", mask)
    for module in (benchmark, evaluate):
        monkeypatch.setattr(module, "forward", forward)


COMPILED = {}


def forward(network, tokens):
    """`measure.forward`; the program does not depend on the weights and the mask, its arguments."""
    _, state = nnx.split(network)
    tokens = jnp.asarray(tokens, jnp.int16)  # of text; the benchmark's are int32
    key = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves((state, tokens)))
    if key not in COMPILED:
        COMPILED[key] = measure.forward(network, tokens)[0]
    return COMPILED[key], (state, tokens)


# ---- evaluate.py --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of text, of dense-masked attention: (folder, data, network), not trained."""
    folder = tmp_path_factory.mktemp("run")
    files = []
    for name in ("ab", "bc"):
        text = np.random.default_rng(0).choice(list(name.encode()), 2000).astype(np.uint8)
        (folder / name).write_bytes(text.tobytes())
        files.append(str(folder / name))
    config = dataclasses.replace(SMALL, data=tuple(files))
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        data = train.load(config)
        network, optimizer = train.build(config, data)
        kernel = 9 * network.head.kernel.get_value()  # not as in build
        network.head.kernel.set_value(kernel)
        kept = runs.Run(folder)
        kept.write_config(config)
        kept.save(3, network, optimizer)
        kept.close()
    return folder, data, network


def test_variants_are_the_same_weights(run):
    folder, data, dense = run
    network, step = evaluate.trained(runs.Run.read_config(folder), data, folder)
    assert step == 3 and network.attention is model.attend_sparse
    np.testing.assert_array_equal(network.head.kernel.get_value(), dense.head.kernel.get_value())
    ways = model.variants(network, "bfloat16")
    assert list(ways) == [name.replace("float16", "bfloat16") for name in NAMES]
    for name, one in ways.items():
        dtype = name.split()[1]
        rounded = np.asarray(one.head.kernel.get_value(), np.float32)
        exact = np.asarray(network.head.kernel.get_value()).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(rounded, exact.astype(np.float32))
    definition, state = nnx.split(one)
    logits = lambda state: nnx.merge(definition, state)(data.tokens[:2])
    # Those of inner functions too: from jax 0.12 on attention is in one until it is lowered.
    products = [e for e in equations(logits, state) if e.primitive.name in PRODUCTS]
    assert len(products) >= 7  # four of the layer, its attention, pool and head
    assert {x.aval.dtype for e in products for x in e.invars[:2]} == {jnp.dtype("bfloat16")}
    # Not only stored: computed in half precision.
    assert jax.eval_shape(logits, state).dtype == jnp.bfloat16
    assert network.head.kernel.get_value().dtype == jnp.float32  # the variants are copies


def test_evaluation_of_a_run(run, capsys):
    folder, data, network = run
    expected = np.asarray(train.predict(network, data.held_out_tokens)).argmax(-1)
    accuracy = float((expected == data.held_out_labels).mean())
    evaluate.main(["--run", str(folder), "--batch", "16", "--seconds", "0"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES) and f"{accuracy:.2%}" in printed
    lines = (folder / "evaluation" / "results.jsonl").read_text().splitlines()
    rows = {row["variant"]: row for row in map(json.loads, lines)}
    assert list(rows) == NAMES
    for name in ("dense float32", "sparse float32"):
        assert rows[name]["accuracy"] == accuracy and rows[name]["points"] == 0
        assert rows[name]["same"] == 1 and rows[name]["examples"] == 50
    for row in rows.values():
        assert row["step"] == 3 and row["same"] > 0.8
        assert row["sequences_per_second"] == pytest.approx(16e3 / row["ms"]) and row["MB"] > 0

    kept = folder / "evaluation" / "step_3_sparse_float16_50.npy"
    np.save(kept, 1 - data.held_out_labels)  # wrong, all of them
    for again, wrong in ((False, True), (True, False)):
        row = evaluate.evaluate(folder, batch=16, seconds=0, again=again)[3]
        assert (row["accuracy"] == 0) == wrong and (row["points"] < 0) >= wrong
    assert evaluate.evaluate(folder, batch=16, seconds=0, limit=20)[0]["examples"] == 20
    runs.Run.clear(folder)
    assert not kept.exists()


def test_answers_are_kept(tmp_path):
    """By batches, the last of them filled up; a second call reads the file of the first."""
    called = []

    def step(weights, tokens):
        assert tokens.shape == (4, 3)
        called.append(tokens)
        return np.eye(7)[(tokens.sum(-1) + weights) % 7]

    tokens = np.arange(30).reshape(10, 3)
    expected = (tokens.sum(-1) + 1) % 7
    for _ in range(2):
        found = evaluate.answers((step, (1, tokens[:4])), tokens, tmp_path / "a.npy", "a")
        np.testing.assert_array_equal(found, expected)
        assert len(called) == 3
    evaluate.answers((step, (1, tokens[:4])), tokens[:5], tmp_path / "b.npy", "b")
    assert len(called) == 5 and not list(tmp_path.glob("*partial*"))


def test_evaluation_says_what_is_missing(tmp_path):
    (tmp_path / "letters").write_bytes(bytes(200))
    config = dataclasses.replace(SMALL, data=(str(tmp_path / "letters"),))
    for words in ("there is no config.json", "there is no checkpoint"):
        with pytest.raises(SystemExit, match=words):
            evaluate.main(["--run", str(tmp_path)])
        (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))


# ---- benchmark.py -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length, sparsity, band", [(4096, 0.9, 256), (4000, 0.9, 256), (2048, 0.98, 24), (64, 0.98, 8)]
)
def test_mask_of_the_paper(length, sparsity, band):
    mask = layers.paper_mask(length, sparsity)
    group = length // 16
    start, end = np.asarray(mask.row_offsets)[group : group + 2]
    row = set(np.asarray(mask.column_indices)[start:end].tolist())
    first = 8 * group - (band - 8) // 2
    assert set(range(first, first + band)) <= row
    stored = max((1 - sparsity) * length, 8)
    assert abs(len(row) - stored) <= 1 and abs(mask.density * length - stored) <= 1


@pytest.mark.parametrize("sparsity, dtype", [(None, "float32"), (0.8, "float16")])
def test_parts_of_a_layer_are_its_attention(sparsity, dtype, monkeypatch):
    steps = layers.layer_steps(LENGTH, sparsity, dtype)
    monkeypatch.setattr(layers, "layer_steps", lambda *x: steps)
    row = layers.measure_layer(LENGTH, sparsity, dtype, seconds=0)
    assert set(row["ms"]) == {*layers.PARTS, "attention", "layer"} and min(row["ms"].values()) > 0
    assert row["MB"]["layer"] > row["MB"]["attention"] > 0
    compiled, (mask, shares, v) = steps["product"]
    steps["product"] = compiled, (mask, shares, v * jnp.asarray(1.1, v.dtype))
    with pytest.raises(ArithmeticError, match="steps differ from attention"):
        layers.measure_layer(LENGTH, sparsity, dtype, seconds=0)


def test_layers_command_measures_what_is_missing(tmp_path, monkeypatch, capsys):
    seen = []

    def measured(length, sparsity, dtype, seconds):
        seen.append((length, sparsity))
        ms = dict.fromkeys((*layers.PARTS, "attention", "layer"), 1.0 if sparsity else 3.0)
        return {"ms": ms, "MB": {"layer": 7.0}}

    monkeypatch.setattr(benchmark, "measure_layer", measured)
    options = ["layers", "--out", str(tmp_path / "rows.jsonl"), "--sparsities", "0.9"]
    benchmark.main([*options, "--lengths", "64"])
    benchmark.main([*options, "--lengths", "64", "128", "--plot", str(tmp_path / "plot.png")])
    assert seen == [(64, None), (64, 0.9), (128, None), (128, 0.9)]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:2] == ["128", "90%"] and "3.0x" in last
    assert (tmp_path / "plot.png").stat().st_size > 1000
    benchmark.main([*options, "--lengths", "64", "--again"])
    assert len(seen) == 6
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 6


def test_model_command(tmp_path, monkeypatch, capsys):
    children = []
    monkeypatch.setattr(benchmark, "in_fresh_process", lambda *x: children.append(x) or 5.0)
    out = tmp_path / "rows.jsonl"
    options = ["model", "--lengths", "32", "--batch", "16", "--seconds", "0", "--out", str(out)]
    benchmark.main([*options, "--rss"])
    printed = capsys.readouterr().out
    assert "length 32, batch 16" in printed and "resident memory, MB" in printed
    (row,) = map(json.loads, out.read_text().splitlines())
    assert list(row["MB"]) == NAMES and row["resident_MB"] == dict.fromkeys(NAMES, 5.0)
    for name, rate in row["sequences_per_second"].items():
        assert rate == pytest.approx(16e3 / row["ms"][name])

    _, *child = children[2]
    benchmark.main([str(word) for word in child])  # as the fresh process would
    assert child[-1] == "sparse float32"
    assert json.loads(capsys.readouterr().out) is None or sys.platform == "linux"

    one = lambda network, tokens: forward(network, tokens + ("sparse" in str(network.attention)))
    monkeypatch.setattr(benchmark, "forward", one)
    with pytest.raises(ArithmeticError, match="sparse differs from dense"):
        benchmark.main([*options, "--again"])


def test_results_of_another_device_are_not_found(tmp_path, monkeypatch):
    results = measure.Results(tmp_path / "rows.jsonl")
    results.add({"length": 8, "ms": 1.0})
    results.add({"length": 8, "ms": 2.0})
    read = measure.Results(tmp_path / "rows.jsonl")
    assert read.find({"length": 8})["ms"] == 2.0 and read.find({"length": 9}) is None
    monkeypatch.setattr(measure, "device", lambda: "another")
    assert read.find({"length": 8}) is None
