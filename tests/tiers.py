"""The tiers of the suite: which tests `make check`, `make test` and `make test-all` run.

    all     every test
    test    of a test with many variants those in which each pair of parameter values occurs
            together once: every op with every dtype, every dtype with every backend, ...
    check   those in which each value occurs once, without the kinds of tests that are slow

A test that needs its every variant, or that is slow, says so: `@pytest.mark.tier("all")` runs it in
`make test-all` alone, and so on. Which variants stay depends on their names only, so it is the same
on every machine, and a new parameter value is in each tier at once.
"""

import itertools
import zlib

TIERS = ("check", "test", "all")

# What one does not run after every edit: the emulator (minutes), builds, trained models.
NOT_IN_CHECK = ("benchmarks", "emulated", "examples", "launch", "packaging", "peer")


def least_tier(item) -> str:
    """The quickest tier that may hold a test, by its marks and its folder."""
    mark = item.get_closest_marker("tier")
    if mark:
        (tier,) = mark.args
        assert tier in TIERS, f"{item.nodeid}: unknown tier {tier!r}"
        return tier
    return "test" if item.path.parent.name in NOT_IN_CHECK else "check"


def covering(variants: list[dict], names: list[str], together: int) -> list[int]:
    """Positions of variants that hold all combinations of `together` parameter values that occur.

    Variants are taken in an order drawn from their names, each that has a combination not seen yet:
    neighbouring tests then keep different variants.
    """
    seen, kept = set(), []
    for i in sorted(range(len(variants)), key=lambda i: zlib.crc32(names[i].encode())):
        values = sorted(variants[i].items())
        found = set(itertools.combinations(values, min(together, len(values))))
        if not found <= seen or not values:
            seen |= found
            kept.append(i)
    return sorted(kept)


def left_out(items: list, tier: str) -> set:
    """The tests that a tier does not run."""
    out = {item for item in items if TIERS.index(least_tier(item)) > TIERS.index(tier)}
    if tier == "all":
        return out
    functions = {}
    for item in items:
        if item not in out and hasattr(item, "callspec"):
            key = (item.path, getattr(item, "cls", None), item.originalname)
            functions.setdefault(key, []).append(item)
    for variants in functions.values():
        values = [item.callspec.indices for item in variants]
        names = [item.name for item in variants]
        kept = covering(values, names, together=1 if tier == "check" else 2)
        out.update(item for i, item in enumerate(variants) if i not in set(kept))
    return out
