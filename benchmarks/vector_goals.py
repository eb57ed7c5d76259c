"""The goals for products of column vectors on a CPU, with the measured values of dlmc.csv."""

import re

from benchmarks.ratios import Row, mean, numbers

GOAL_LENGTHS = (2, 4, 8)
SPARSITIES = range(70, 99)  # percent; of the mean over all peers


def kind(row: Row) -> tuple[int, int]:
    """(V, percentage of zeros)"""
    length, percent = re.fullmatch(r"V=(\d+) (\d+)%", row["family"]).groups()
    return int(length), int(percent)


def over_peers(rows: list[Row]) -> list[list[str]]:
    ratios = {length: [] for length in GOAL_LENGTHS}
    for row in rows:
        length, percent = kind(row)
        if length in ratios and percent in SPARSITIES:
            ratios[length] += numbers([row], "x_best")
    if not (found := [x for own in ratios.values() for x in own]):
        return []
    each = ", ".join(f"V={length}: {mean(own):.2f}" for length, own in ratios.items() if own)
    what = "x best peer, V = 2, 4, 8, from 70% to 98% (mean)"
    return [[what, "3", str(len(found)), f"**{mean(found):.2f}** ({each}; least {min(found):.2f})"]]


def of_sgemm(rows: list[Row]) -> list[list[str]]:
    own = [row for row in rows if kind(row) == (8, 90)]
    if not own:
        return []
    shares = {}
    for row in own:
        shares.setdefault(int(row["n"]), []).append(100 * float(row["fraction_of_bound"]))
    each = ", ".join(f"n={n}: {mean(found):.0f}%" for n, found in sorted(shares.items()))
    every = [share for found in shares.values() for share in found]
    # Useful flops over the bound's time: the rate that sgemm reached in that run.
    rate = mean([2e-3 * int(x["nnz"]) * int(x["n"]) / float(x["bound_us"]) for x in own])
    what = f"of sgemm ({rate:.0f} GFLOP/s in that run), V = 8, 90% (mean)"
    value = f"**{mean(every):.0f}%** ({each}; least {min(every):.0f}%)"
    return [[what, "80%", str(len(own)), value]]


def over_dense(rows: list[Row], length: int) -> list[list[str]]:
    ratios = numbers([row for row in rows if kind(row) == (length, 50)], "x_jax_dense")
    if not ratios:
        return []
    value = f"**{min(ratios):.2f}** (mean {mean(ratios):.2f})"
    return [[f"x dense product, V = {length}, 50% (least)", "1", str(len(ratios)), value]]


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and body; goals without a row are left out."""
    body = over_peers(rows) + of_sgemm(rows) + over_dense(rows, 8) + over_dense(rows, 4)
    return ["products of column vectors", "goal", "cases", "measured"], body
