"""The tiers of the suite: which tests `make check`, `make test` and `make test-all` run.

    all     every test
    test    of a test with many variants those in which each parameter value occurs, and each pair
            of values but for the parameter that has most of them: every dtype with every backend,
            while the matrices of the battery take turns
    check   those in which each value occurs, without the kinds of tests that are slow

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


def _identity(value):
    """Equal for parameter values that are the same."""
    try:
        hash(value)
        return value
    except TypeError:  # a list, an array
        return id(value)


def covering(variants: list[dict], names: list[str], pairs: bool) -> list[int]:
    """Positions of variants in which each parameter value occurs; with `pairs`, also each pair of
    values that occurs together, but for the parameter that has most values: the matrices of a
    battery take turns.

    Variants are taken in an order drawn from their names, each that has something not seen yet:
    neighbouring tests then keep different variants.
    """
    counts = {key: len({v[key] for v in variants if key in v}) for key in set().union(*variants)}
    widest = max(sorted(counts), key=counts.__getitem__, default=None)
    seen, kept = set(), []
    for i in sorted(range(len(variants)), key=lambda i: zlib.crc32(names[i].encode())):
        values = sorted(variants[i].items(), key=lambda item: item[0])
        found = set(values)
        if pairs:
            found |= set(itertools.combinations([v for v in values if v[0] != widest], 2))
        if not found <= seen:
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
        values = [
            {name: _identity(value) for name, value in item.callspec.params.items()}
            for item in variants
        ]
        names = [item.name for item in variants]
        kept = covering(values, names, pairs=tier == "test")
        out.update(item for i, item in enumerate(variants) if i not in set(kept))
    return out
