"""The tiers' choice of variants: every value, pairs of values, within a time budget."""

import itertools
import pathlib
import subprocess
import sys
import types

import pytest
import tiers

OPS, DTYPES = ("spmm", "sddmm", "gspmm"), ("float32", "bfloat16")
NAMES = [f"matrix{i}" for i in range(7)]
VARIANTS = [
    dict(op=op, dtype=dtype, name=name) for op, dtype, name in itertools.product(OPS, DTYPES, NAMES)
]
LABELS = ["-".join(variant.values()) for variant in VARIANTS]


def chosen(pairs, most=None):
    return [VARIANTS[i] for i in tiers.covering(VARIANTS, LABELS, pairs)[:most]]


def test_each_value_occurs_and_pairs_but_for_the_widest_parameter():
    for pairs in (False, True):
        found = chosen(pairs)
        for key, values in (("op", OPS), ("dtype", DTYPES), ("name", NAMES)):
            assert {variant[key] for variant in found} == set(values)
        met = {(variant["op"], variant["dtype"]) for variant in found}
        assert met == set(itertools.product(OPS, DTYPES)) or not pairs
        assert 7 <= len(found) <= (9 if pairs else 7)  # as many as there are matrices


def test_what_brings_most_comes_first():
    assert len({variant["op"] for variant in chosen(True, most=3)}) == 3
    assert chosen(True) == chosen(True)


class Item:
    def __init__(self, name, params, folder="nn", **marks):
        file = f"tests/{folder}/test_x.py"
        self.nodeid, self.name = f"{file}::{name}", name
        self.originalname = name.partition("[")[0]
        self.path = pathlib.Path(file)
        self.callspec = types.SimpleNamespace(params=params)
        self._marks = marks

    def get_closest_marker(self, name):
        return self._marks.get(name)


def kept(named, monkeypatch, each, **about):
    """How many of the variants of a function a tier runs, if each takes so long."""
    monkeypatch.setattr(tiers, "BUDGET", {"check": 0.7, "test": 2.0, "all": 20})
    monkeypatch.setattr(tiers, "VALUES", 36)
    monkeypatch.setattr(tiers, "ALONE", {"check": 0.9, "test": 5.0})
    items = [
        Item(f"test_a[{label}]", params, **about)
        for label, params in zip(LABELS, VARIANTS, strict=True)
    ]
    monkeypatch.setattr(tiers, "seconds", lambda: {tiers.function_id(items[0].nodeid): each})
    return len(items) - len(tiers.left_out(items, named))


PAIRS = len(tiers.covering(VARIANTS, LABELS, True))


@pytest.mark.parametrize(
    ("each", "seconds", "tier", "count"),
    [
        (0.09, None, "check", 7),
        (0.3, None, "check", 2),
        (0.8, None, "check", 1),
        (1.0, None, "check", 0),
        (1.0, None, "test", 2),
        (4.0, None, "test", 1),
        (6.0, None, "test", 0),
        (2.0, None, "all", 10),
        (5.0, None, "all", 7),
        (6.0, None, "all", 6),
        (40.0, None, "all", 1),
        (0.5, None, "all", 40),
        (0.4, None, "all", 42),
        (6.0, None, "every", 42),
        (1.0, {"check": 3}, "check", 3),
        (9.0, {"check": 3}, "check", 1),
        (6.0, {"test": 60}, "all", 10),
        (6.0, {"all": 90}, "all", 15),
    ],
)
def test_the_time_of_a_function_limits_its_variants(monkeypatch, each, seconds, tier, count):
    marks = {"seconds": types.SimpleNamespace(kwargs=seconds)} if seconds else {}
    assert kept(tier, monkeypatch, each, **marks) == count


@pytest.mark.parametrize("folder", [*tiers.CORE, "nn"])
def test_make_test_has_a_variant_of_each_core_function_and_of_those_that_name_it(
    monkeypatch, folder
):
    mark = lambda tier: {"tier": types.SimpleNamespace(args=(tier,))}
    most = 6  # in 36 seconds
    slow = lambda name, **marks: kept(name, monkeypatch, 6.0, folder=folder, **marks)
    assert (slow("check"), slow("test")) == (0, folder in tiers.CORE)
    assert [slow(tier, **mark("test")) for tier in tiers.TIERS] == [0, 1, most, 42]
    assert [slow(tier, **mark("all")) for tier in tiers.TIERS] == [0, 0, most, 42]


def test_functions_are_told_from_variants():
    of = tiers.function_id
    assert of("tests/a.py::test_b[x-{<1/8 row, 4 col>, 8}]") == "tests/a.py::test_b"
    assert of("tests/a.py::test_b@packaging") == of("tests/a.py::test_b") == "tests/a.py::test_b"


def test_one_variant_of_each_function_comes_before_others():
    items = [Item(name, {}) for name in ("test_a[x]", "test_a[y]", "test_b[x]", "test_b[y]")]
    assert tiers.further(items, set(items[1:])) == {items[1], items[3]}


def test_times_that_are_written(monkeypatch, tmp_path):
    """Means of what ran, as on the machine of the file, which here takes half as long; what did not
    run and is still defined stays as it was."""
    folder, file = "tests/nn/test_x.py", tmp_path / "tests" / "helpers" / "seconds.txt"
    for path in (file, tmp_path / folder):
        path.parent.mkdir(parents=True)
    (tmp_path / folder).write_text("def test_all():\n    pass\n")
    listed = {"test_a": 0.25, "test_all": 1.5, "test_gone": 2.0, "test_quicker": 0.5}
    listed = {f"{folder}::{name}": value for name, value in listed.items()}
    monkeypatch.setattr(tiers, "FILE", file)
    monkeypatch.setattr(tiers, "seconds", lambda: listed)
    timing = tiers.Timing()
    for name, spent in {"a[x]": 0.4, "a[y]": 0.6, "b": 0.1, "new": 1.2, "quicker": 0.2}.items():
        for phase in (spent / 4, spent * 3 / 4):
            report = types.SimpleNamespace(nodeid=f"{folder}::test_{name}", processor_seconds=phase)
            timing.pytest_runtest_logreport(report)
    timing.pytest_sessionfinish(types.SimpleNamespace(config=types.SimpleNamespace()))
    expected = ["0.25 test_a", "1.5 test_all", "0.6 test_new", "0.1 test_quicker"]
    assert file.read_text().splitlines() == [line.replace(" ", f" {folder}::") for line in expected]


def test_processor_time_is_that_of_children_too():
    begun = tiers._processor_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.2: pass"])
    assert 0.15 < tiers._processor_seconds() - begun < 2
