"""Operations on a matrix in eight parts: values and gradients against those of the whole matrix."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parts_calls import ATTENTION, SIZES, cases, cuts_of

# Their sums have the order of the parts, or of the devices that divide the features.
SUMMED_OVER_PARTS = (
    *("spmm", "spmm, transposed", "spmm of a column, both ways", "gspmm, copy, sum"),
    *("gspmm, transposed, sub, mean", "gspmm, transposed, mul, sum"),
    *("sddmm, weighted", "scores, softmax, sum"),
)
# Queries that travel, and rows of keys and of values that each part sends for all others.
SEE_ALL = {
    "attention, queries that see all keys": (2, [6, *[8] * 6, 6]),
    "attention, vectors that see all keys": (4, [3, *[6] * 6, 3]),
    "attention, blocks that see all keys, reordered": (2, [4, 8, 8, 8, 8, 0, 8, 4]),
}
SCRIPT = Path(__file__).parents[1] / "helpers" / "parts_calls.py"
# One worker has all tests of the script, which so runs once.
pytestmark = pytest.mark.xdist_group("parts_of_eight")


@pytest.fixture(scope="module")
def rows(request):
    """What the script prints for the cases that this session runs."""
    tests = test_values_and_gradients, test_a_split_sequence, test_sizes
    items = [item for item in request.session.items if item.function in tests]
    mine = dict.fromkeys(item.callspec.params["case"] for item in items)
    found = subprocess.run(
        [sys.executable, SCRIPT, *mine],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.mark.tier("test")
@pytest.mark.parametrize("case", cases())
@pytest.mark.seconds(all=60)
def test_values_and_gradients(case, rows):
    mine = [row for row in rows if row["name"] == case]
    assert [row["cut"] for row in mine] == list(cuts_of(case))
    assert [row["order"] for row in mine] == [1, 2]
    for row in mine:
        assert row["difference"] < 1e-12 and row["second"] < 1e-12, row
        # A sum of single entries may run by the schedule of a part.
        scheduled = row["cut"] == "blocks" and case == "gspmm, add, sum"
        if case not in SUMMED_OVER_PARTS and row["cut"] != "reordered" and not scheduled:
            assert row["same"], row  # the bits of one device
        if row["cut"] != "second axis":
            assert row["covered"][1] == (row["cut"] not in ("vectors", "blocks"))
            continue
        alone, covered, shared, rows = row["rows"]
        assert row["costs"] == {  # in bytes: not used, columns, copies
            "1": [alone * 8, alone * 8, (shared + 2 * -(-rows // 2)) * 8],
            "19": [covered * 19 * 8, covered * 10 * 8, (shared * 19 + 2 * -(-rows * 19 // 2)) * 8],
        }
        sent = (shape.split(",") for shape, how in row["sent"] if how != "all-reduce")
        widths = {shape[-1] for shape in sent if len(shape) > 1}  # of rows, not of values
        if case == "spmm":  # ten columns on each device; twenty where the result is put together
            assert widths == {"10", "20"} and row["costs"]["1"][2] < row["costs"]["1"][1]


@pytest.mark.tier("test")
@pytest.mark.parametrize("case", ATTENTION)
def test_a_split_sequence(case, rows):
    """Attention, and what it sends: keys and values forward and their gradients back, no more rows
    than the plan says, and gradients of what all devices share."""
    (row,) = (row for row in rows if row["name"] == case)
    assert row["difference"] < 1e-12, row
    moved = [shape for shape, how in row["sent"] if how == "collective-permute"]
    if "mesh" in ATTENTION[case][3]:  # a device has its sequences and heads alone
        assert row["long"] == [] and not any(how == "all-gather" for _, how in row["sent"])
        return
    if "band" in case:  # its neighbours alone, and nothing of the length of the sequence
        assert row["rows"] == [3, *[6] * 6, 3] and row["long"] == []
        heads = ATTENTION[case][2][1]
        assert sorted(moved) == [f"2,3,{heads},4"] * 4 + [f"2,3,{heads},5"] * 4
    else:
        assert moved
    shared = [shape for shape, how in row["sent"] if how == "all-reduce"]
    if "global" in case:  # once to all, their gradients once back, and their neighbours
        assert {x: shared.count(x) for x in ("2,2,2,4", "2,2,2,5")} == {"2,2,2,4": 2, "2,2,2,5": 2}
        assert row["rows"] == [2 + 4, *[4 + 4] * 6, 2 + 4] and row["long"] == []
        assert len(moved) == 8 and len(moved) + len(shared) == len(row["sent"])
        return
    if case in SEE_ALL:  # their queries travel, and of keys what the others see
        assert (row["queries"], row["rows"]) == SEE_ALL[case]
        assert not any(how == "all-gather" for _, how in row["sent"])
        assert ATTENTION[case][1].get("rows") != "even" or row["long"] == []
        return
    if ATTENTION[case][1].get("rows") == "even":
        assert len(moved) + len(shared) == len(row["sent"]) and max(map(len, shared), default=0) < 4


@pytest.mark.tier("all")
@pytest.mark.parametrize("case", SIZES)
def test_sizes(case, rows):
    """Of compiled programs: memory per device falls as the devices, forward and backward; entries
    of all parts together may be more than int32 counts."""
    mine = [row for row in rows if row["name"] == case]
    if case == "memory":
        band, tokens = ([row for row in mine if row["kind"] == x] for x in ("band", "tokens"))
        assert [row["devices"] for row in band] == [2, 8]
        assert [row["devices"] for row in tokens] == [2, 4, 8]
        for way in ("forward", "backward"):
            assert band[1][way] < 0.3 * band[0][way], mine
            for fewer, more in zip(tokens, tokens[1:], strict=False):
                assert more[way] < 0.6 * fewer[way], mine
    elif case == "star":
        (row,) = mine
        assert (sum(row["rows"]), row["cover"], row["difference"]) == (1, False, 0)
    else:
        (row,) = mine
        assert row["entries"] > 2**31 and row["argument"] > 8 * 500_000_000
