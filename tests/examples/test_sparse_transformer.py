"""The demo in parts: ListOps against its evaluator, the dense twin, text, resume."""

import dataclasses
import gzip
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("flax", "optax", "orbax.checkpoint", "tqdm", "matplotlib"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "sparse_transformer"))
listops, text, model, runs, train, compare = (
    importlib.import_module(name)
    for name in ("listops", "text", "model", "runs", "train", "compare")
)
nnx = importlib.import_module("flax.nnx")

SMALL = runs.Config(
    max_length=41,
    train_examples=64,
    held_out_examples=16,
    width=16,
    heads=2,
    layers=1,
    mlp=16,
    density=0.4,
    batch=8,
    steps=6,
)


@pytest.fixture(scope="module")
def expressions():
    return listops.generate(300, min_length=4, max_length=200, seed=3)


def built(config=SMALL, classes=10):
    data = train.load(config)
    return data, *train.build(config, data)


# ---- ListOps ------------------------------------------------------------------------------------


def test_evaluator_gives_every_label_of_the_original_samples(data_dir):
    samples, labels = listops.read(data_dir / "text" / "listops_test_d20s.tsv.gz")
    assert len(labels) == 1202
    assert [listops.evaluate(tokens) for tokens in samples] == labels.tolist()


@pytest.mark.parametrize(
    "expression, value",
    [
        ("7", 7),
        ("[MIN 4 2 ]", 2),
        ("( ( ( [MAX 3 ) 8 ) ] )", 8),
        ("[MED 1 9 4 ]", 4),
        ("[MED 1 4 ]", 2),  # 2.5, truncated
        ("[MED 9 8 7 0 ]", 7),
        ("[SM 9 9 [MAX 1 5 ] ]", 3),
    ],
)
def test_evaluate(expression, value):
    assert listops.evaluate(listops.parse(expression)) == value


@pytest.mark.parametrize("expression", ["[MIN 1 2", "1 2", "]", "[MIN ]", "[SM 1 2 ] ]"])
def test_evaluate_refuses_what_is_no_expression(expression):
    with pytest.raises(ValueError, match="listops.evaluate"):
        listops.evaluate(listops.parse(expression))


def test_parse_names_the_unknown_token():
    with pytest.raises(ValueError, match=r"\[AVG"):
        listops.parse("[AVG 1 2 ]")


def test_generated_labels_are_the_values(expressions):
    tokens, labels = expressions
    assert [listops.evaluate(row) for row in tokens] == labels.tolist()


def test_generated_expressions_keep_the_rules(expressions):
    tokens, _ = expressions
    lengths = (tokens != 0).sum(-1)
    assert lengths.min() > 4 and lengths.max() < 200
    assert len({row.tobytes() for row in tokens}) == len(tokens)
    seen = set()
    for row, length in zip(tokens, lengths, strict=True):
        assert not row[length:].any()
        open_lists, depth = [0], 1
        for token in row[:length]:
            if token == listops.CLOSE:
                arguments = open_lists.pop()
                seen.add(arguments)
                assert 2 <= arguments <= 10
                continue
            open_lists[-1] += 1
            depth = max(depth, len(open_lists))
            if token >= listops.OPERATOR:
                open_lists.append(0)
        assert depth <= 10
    assert seen == set(range(2, 11))


def test_generation_is_deterministic_and_appends():
    first, labels = listops.generate(20, min_length=4, max_length=60, seed=1)
    again, _ = listops.generate(20, min_length=4, max_length=60, seed=1)
    more, more_labels = listops.generate(50, min_length=4, max_length=60, seed=1)
    other, _ = listops.generate(20, min_length=4, max_length=60, seed=2)
    assert (first == again).all() and (first == more[:20]).all()
    assert (labels == more_labels[:20]).all() and not (first == other).all()


def test_generation_gives_the_lengths_of_lra():
    tokens, labels = listops.generate(5, seed=0)
    lengths = (tokens != 0).sum(-1)
    assert tokens.shape == (5, 1999) and lengths.min() > 500
    assert [listops.evaluate(row) for row in tokens] == labels.tolist()


def test_generation_says_when_there_are_too_few():
    with pytest.raises(ValueError, match="only 10 of 11"):
        listops.generate(11, min_length=0, max_length=2)
    with pytest.raises(ValueError, match="no length lies between"):
        listops.generate(1, min_length=9, max_length=10)


def test_nested_form_is_read_back(expressions, tmp_path):
    tokens, labels = expressions
    assert listops.nested(listops.parse("[MAX 3 8 ]")) == "( ( ( [MAX 3 ) 8 ) ] )"
    lines = [f"{listops.nested(t)}\t{v}" for t, v in zip(tokens, labels, strict=True)]
    (tmp_path / "x.tsv").write_text("Source\tTarget\n" + "\n".join(lines) + "\n")
    read, values = listops.read(tmp_path / "x.tsv")
    assert read == [row[row != 0].tolist() for row in tokens] and (values == labels).all()


# ---- the model and its dense twin ---------------------------------------------------------------


def test_sparse_attention_is_dense_masked_attention():
    length, width = 40, 8
    array = model.default_mask(length, density=0.3)
    q, k, v, cotangent = jax.random.normal(jax.random.key(0), (4, 3, length, 2, width))
    lengths = jnp.array([length, 13, 0])
    outs = []
    for attention, structure in (
        (model.attend_sparse, array),
        (model.attend_dense, array.todense() != 0),
    ):
        out, pullback = jax.vjp(lambda *x, a=attention, s=structure: a(s, *x, lengths), q, k, v)
        outs.append((out, *pullback(cotangent)))
    for sparse, dense in zip(*outs, strict=True):
        assert np.isfinite(sparse).all()
        np.testing.assert_allclose(sparse, dense, rtol=0, atol=2e-6 * max(1, jnp.abs(dense).max()))


def test_model_and_twin_agree_in_logits_and_gradients():
    data, sparse, _ = built()
    dense = model.dense_twin(sparse)
    tokens, labels = data.tokens[:4], data.labels[:4]

    @nnx.jit
    def loss_and_gradient(model):
        return nnx.value_and_grad(lambda m: (m(tokens)[np.arange(4), labels] ** 2).mean())(model)

    (a, da), (b, db) = loss_and_gradient(sparse), loss_and_gradient(dense)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(da), jax.tree.leaves(db), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * jnp.abs(y).max() + 1e-9)


def test_padding_does_not_touch_the_answer():
    data, network, _ = built()
    tokens = data.tokens[:4]
    assert (tokens == 0).any()
    before = network(tokens)
    table = network.token.embedding.get_value()
    network.token.embedding.set_value(table.at[model.PADDING].set(1e3))
    np.testing.assert_array_equal(network(tokens), before)


def test_structure_is_an_argument_of_the_compiled_step():
    data, network, optimizer = built()
    definition, state = nnx.split((network, optimizer))

    def step(state, tokens, labels):
        network, optimizer = nnx.merge(definition, state)
        train.update(network, optimizer, tokens, labels)
        return nnx.state((network, optimizer))

    closed = jax.make_jaxpr(step)(state, data.tokens[:2], data.labels[:2])
    assert max((np.size(c) for c in closed.consts), default=0) < network.mask.get_value().nnz


# ---- training -----------------------------------------------------------------------------------


def test_resumed_run_is_the_uninterrupted_one(tmp_path):
    data = train.load(SMALL)
    options = {"log_every": 1, "evaluate_every": 2, "quiet": True}
    whole, lines = train.train(SMALL, data, tmp_path / "whole", **options)
    train.train(SMALL, data, tmp_path / "parts", stop_at=3, **options)
    config = runs.Run.read_config(tmp_path / "parts")
    assert config == SMALL
    parts, more = train.train(config, data, tmp_path / "parts", resume=True, **options)
    for a, b in zip(
        jax.tree.leaves(nnx.state(whole)), jax.tree.leaves(nnx.state(parts)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert [x["step"] for x in more] == [1, 2, 3, 4, 5, 6]
    assert [x["loss"] for x in more] == [x["loss"] for x in lines]
    assert {"held_out_accuracy", "majority"} <= set(more[-1])


def test_training_refuses_to_overwrite_and_says_what_is_missing(tmp_path):
    data = train.load(SMALL)
    config = dataclasses.replace(SMALL, steps=1)
    train.train(config, data, tmp_path, quiet=True)
    with pytest.raises(ValueError, match="holds an earlier run"):
        train.train(config, data, tmp_path, quiet=True)
    with pytest.raises(ValueError, match="nothing to resume"):
        runs.Run.read_config(tmp_path / "nowhere")
    runs.Run.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_command_line_errors_are_sentences(tmp_path, capsys):
    run = ["--run", str(tmp_path / "run")]
    for arguments, words in (
        (["--task", "text", "--data", "absent.tsv"], "no such file: absent.tsv"),
        (["--task", "text"], "no file given"),
        (["--heads", "3"], "3 heads do not divide a width of 64"),
        (["--resume"], "nothing to resume"),
    ):
        with pytest.raises(SystemExit, match=words):
            train.main([*run, "--train-examples", "64", "--max-length", "40", *arguments])
    with pytest.raises(SystemExit) as done:
        train.main(["--help"])
    assert done.value.code == 0 and "--min-length" in capsys.readouterr().out


# ---- several devices ----------------------------------------------------------------------------


@pytest.mark.tier("all")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["batch", "heads"])
def test_training_over_devices_gives_the_losses_of_one(shape):
    """The batch over one axis of a mesh, heads over the other, under plain jit."""
    data, twin, optimizer = built()
    tokens, labels = (x[: SMALL.batch] for x in (data.tokens, data.labels))
    expected = [train.train_step(twin, optimizer, tokens, labels)[0] for _ in range(3)]
    config = model.ModelConfig(
        data.vocabulary, len(data.classes), data.length, 16, 2, 1, 16, heads_axis="heads"
    )
    kinds = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh(shape, ("batch", "heads"), axis_types=kinds)):
        split = model.Classifier(config, twin.mask.get_value(), rngs=nnx.Rngs(SMALL.seed))
        optimizer = train.make_optimizer(split, SMALL.steps, SMALL.learning_rate)
        given = [jax.device_put(x, jax.P("batch")) for x in (tokens, labels)]
        text = train.train_step.lower(split, optimizer, *given).compile().as_text()
        losses = [train.train_step(split, optimizer, *given)[0] for _ in range(3)]
        kernel = split.blocks[0].qkv.kernel[...]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert kernel.sharding.shard_shape(kernel.shape)[2] == 2 // shape[1]
    # What is summed over devices, gradients above all, and nothing that is gathered.
    assert "all-reduce" in text and "all-gather" not in text


@pytest.mark.tier("all")
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["sequence", "batch"])
def test_training_of_split_sequences_gives_the_losses_of_one_device(shape):
    """Each device has a part of every sequence; the batch may be split too."""
    # Vectors of 8 rows on two devices: of 48 tokens, and no part needs all keys of the other.
    config = dataclasses.replace(SMALL, max_length=49, density=0.2, band=8)
    data, twin, optimizer = built(config)
    tokens, labels = (x[: SMALL.batch] for x in (data.tokens, data.labels))
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(shape, ("batch", "sequence"), axis_types=kinds)
    split = model.in_parts(twin, mesh, "sequence", "batch")
    expected = [train.train_step(twin, optimizer, tokens, labels)[0] for _ in range(3)]
    optimizer = train.make_optimizer(split, SMALL.steps, SMALL.learning_rate)
    over = [jax.NamedSharding(mesh, jax.P(*x)) for x in (("batch", "sequence"), ("batch",))]
    given = [jax.device_put(x, s) for x, s in zip((tokens, labels), over, strict=True)]
    losses = [train.train_step(split, optimizer, *given)[0] for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    if shape[1] > 1:  # no array of all keys: of heads and their features, and of all tokens' width
        text = train.train_step.lower(split, optimizer, *given).compile().as_text()
        length, batch = data.length, SMALL.batch
        assert f"[{batch},{length // 2},16]" in text and f"[{batch},{length},16]" not in text
        assert f"[{batch},{length},2,8]" not in text


# ---- text ---------------------------------------------------------------------------------------


def test_table_of_text_with_quotes_and_a_header(tmp_path):
    rows = ['good\t"it said ""yes""\nand meant it"', "bad\tna\xefve and long enough"] * 10
    with gzip.open(tmp_path / "x.tsv.gz", "wb") as file:
        file.write("\n".join(["Label\tText", *rows]).encode("latin-1"))
    data = text.dataset([tmp_path / "x.tsv.gz"], length=16)
    assert data.classes == ("bad", "good")
    assert len(data.labels) == 18 and len(data.held_out_labels) == 2
    good = data.tokens[data.labels == 1][0]
    assert bytes((good - 1).astype(np.uint8)) == b'it said "yes"\nan'
    bad = data.tokens[data.labels == 0][0]
    assert bytes((bad - 1).astype(np.uint8)) == b"na\xefve and long e"


def test_one_plain_file_asks_for_the_next_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(bytes(range(250)))
    data = text.dataset([tmp_path / "x.txt"], length=8, windows=50)
    for tokens, labels in (
        (data.tokens, data.labels),
        (data.held_out_tokens, data.held_out_labels),
    ):
        assert (tokens == labels[:, None] - np.arange(8, 0, -1) + 1).all()
    assert data.labels.max() < data.held_out_tokens.min() - 1  # no overlap


def test_several_plain_files_ask_which_one(tmp_path):
    (tmp_path / "a").write_bytes(b"a" * 200)
    (tmp_path / "b").write_bytes(b"b" * 300)
    data = text.dataset([tmp_path / "a", tmp_path / "b"], length=10, windows=20)
    assert (data.tokens[:, 0] == ord("a") + 1 + data.labels).all()
    assert set(data.held_out_labels) == {0, 1}


def test_text_errors_name_the_file(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"short")
    (tmp_path / "broken.txt.gz").write_bytes(b"no gzip")
    (tmp_path / "ragged.tsv").write_bytes(b"a\tb\nc\n")
    (tmp_path / "one.tsv").write_bytes(b"a\ttext\n" * 5)
    (tmp_path / "empty.tsv").write_bytes(b"")
    for name, words in (
        ("short.txt", "5 bytes are too few for windows of 1000"),
        ("broken.txt.gz", "cannot read"),
        ("ragged.tsv", "record 2 has 1 columns"),
        ("one.tsv", "has 1 classes"),
        ("empty.tsv", "0 records"),
        ("", "cannot read"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            text.dataset([tmp_path / name])
        assert name in str(caught.value)


def test_reviews_are_read(data_dir):
    data = text.dataset([data_dir / "text" / "imdb_dev.tsv.gz"], length=1000)
    assert data.classes == ("Negative", "Positive")
    assert len(data.labels) + len(data.held_out_labels) == 245
    assert data.tokens.shape[1] == 1000 and data.tokens.max() < data.vocabulary


# ---- the comparison -----------------------------------------------------------------------------


def test_comparison_rows_and_table():
    rows = compare.compare([64], seconds=0)
    assert [row["step"] for row in rows] == ["attention", "training step"]
    assert all(row["difference"] < compare.TOLERANCE for row in rows)
    assert set(rows[0]["ms"]) == {"sparse", "dense", "jax.nn"} and min(rows[0]["MB"].values()) > 0
    printed = compare.table(rows)
    assert "training step" in printed and len(printed.splitlines()) == 4
