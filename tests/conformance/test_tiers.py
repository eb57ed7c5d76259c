"""The tiers' choice of variants: every value, pairs of values, within a time budget."""

import itertools
import pathlib
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
    def __init__(self, name, params, mark):
        self.nodeid, self.name = f"tests/oracle/test_x.py::{name}", name
        self.originalname = name.partition("[")[0]
        self.path = pathlib.Path("tests/oracle/test_x.py")
        self.callspec = types.SimpleNamespace(params=params)
        self._mark = mark

    def get_closest_marker(self, name):
        return self._mark if name == "seconds" else None


@pytest.mark.parametrize(
    ("each", "mark", "tier", "kept"),
    [
        (0.09, None, "check", 7),
        (0.3, None, "check", 2),
        (0.8, None, "check", 1),
        (1.0, None, "check", 0),
        (1.0, None, "test", 2),
        (4.0, None, "test", 1),
        (6.0, None, "test", 0),
        (6.0, None, "all", 42),
        (1.0, {"check": 3}, "check", 3),
        (9.0, {"check": 3}, "check", 1),
    ],
)
def test_the_time_of_a_function_limits_its_variants(monkeypatch, each, mark, tier, kept):
    monkeypatch.setattr(tiers, "BUDGET", {"check": 0.7, "test": 2.0})
    monkeypatch.setattr(tiers, "ALONE", {"check": 0.9, "test": 5.0})
    monkeypatch.setattr(tiers, "seconds", lambda: {"tests/oracle/test_x.py::test_a": each})
    mark = mark and types.SimpleNamespace(kwargs=mark)
    items = [
        Item(f"test_a[{label}]", params, mark)
        for label, params in zip(LABELS, VARIANTS, strict=True)
    ]
    assert len(items) - len(tiers.left_out(items, tier)) == kept


def test_functions_are_told_from_variants():
    of = tiers.function_id
    assert of("tests/a.py::test_b[x-{<1/8 row, 4 col>, 8}]") == "tests/a.py::test_b"
    assert of("tests/a.py::test_b@packaging") == of("tests/a.py::test_b") == "tests/a.py::test_b"
