"""What docs/compiled_loops.md says of the measured ratios."""

from benchmarks.compiler_table import table


def test_a_mean_does_not_hide_the_lowest_ratio():
    own = {"schedule": "spmm CSR", "n": "32", "first_ms": "30", "x_hand": "2", "x_taco": "3"}
    rows = [own, own | {"x_hand": "0.5", "x_taco": ""}]
    head, ((op, cases, hand, taco, scipy, *_),) = table(rows)
    assert (op, cases, head[2]) == ("spmm, n = 32", "2", "x our hand-written kernel")
    assert (hand, taco, scipy) == ("1.00 (0.50)", "3.00", "-")
