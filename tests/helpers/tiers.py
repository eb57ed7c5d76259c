"""The tiers of the suite: which tests `make check`, `make test` and `make test-all` run.

    every   every variant of every test
    all     every test; where its variants take long, those that bring each parameter value up to
            VALUES seconds of one function, and more up to the budget of the tier
    test    of a test with many variants only some: each parameter value occurs, and each pair of
            values (except for the parameter with most values), as far as the time budget of one
            test function in this tier allows
    check   likewise, but only each value occurs, and slow kinds of tests are left out

The time of a variant is in seconds.txt: processor time, that of child processes included, measured
by `pytest --write-seconds` without cached results (SGAP_TEST_RESULTS= an empty folder); a test that
is not listed is quick. `test` runs at least one variant of each function of CORE, of
others one that takes up to a second. A test with a larger budget in a tier, or one that belongs to
a tier, has a mark:

    @pytest.mark.seconds(check=5, test=60)      the time of this function's variants in a tier
    @pytest.mark.tier("test")                   the quickest tier that runs it, whatever it takes

Which variants run depends on names, values and that file only, so it is the same on every machine,
and a new parameter value is in every tier at once. One exception: with SGAP_TEST_UNTIL, seconds
since 1970, which `.ci/run` sets, `all` runs the tests of `check` first, then those of `test`, then
one variant of each other function, then others, and skips what has not begun by then and is not in
`check`: the slowest machine ends in time and says how much it has left out.
"""

import collections
import functools
import itertools
import pathlib
import re
import resource
import statistics
import time
import zlib

import pytest

TIERS = ("check", "test", "all", "every")

# Not run after every edit: the emulator (minutes), builds, trained models.
NOT_IN_CHECK = ("benchmarks", "emulated", "examples", "gpu", "launch", "packaging", "peer")

# What the package promises: results, derivatives, and what must not change from version to version.
CORE = ("freeze", "grad", "oracle")

# Budgets in seconds: of all variants of one function in a tier, and of one variant if only one
# runs; in `all`, of the variants that bring each value.
BUDGET = {"check": 0.5, "test": 0.5, "all": 2}
ALONE = {"check": 0.7, "test": 0.7}
VALUES = 6

FILE = pathlib.Path(__file__).with_name("seconds.txt")
_QUICK = 0.5  # functions quicker than this are not listed


def function_id(nodeid: str) -> str:
    """A test's id without its variant, and without the group that pytest-xdist appends."""
    return re.sub(r"(\[.*)?(@\w+)?$", "", nodeid, flags=re.DOTALL)


@functools.cache
def seconds() -> dict[str, float]:
    """The seconds of one variant of each slow function, from the file."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {name: float(value) for value, name in (line.split(" ", 1) for line in lines)}


def _processor_seconds() -> float:
    """What this process has computed so far, and those that it has started and that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _is_defined(name: str) -> bool:
    file, _, function = name.partition("::")
    path = FILE.parents[2] / file
    return path.exists() and f"def {function.rpartition('::')[2]}(" in path.read_text()


class Timing:
    """A plugin that writes the processor time of each function, which other programs on the machine
    hardly change. Each worker measures its tests; the controller sees the reports of all.

    Times are as on the machine of the file, and so are budgets: a quicker machine puts no more
    tests into a tier. What was measured is divided by its median ratio to what the file has, which
    is the machine's where many functions ran whose tests are as before. What the file lists stays
    there, since other variants may run in another tier.
    """

    def __init__(self) -> None:
        self._times = collections.defaultdict(lambda: collections.defaultdict(float))
        self._begun = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._begun = _processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        ended = _processor_seconds()
        report.processor_seconds, self._begun = ended - self._begun, ended
        return report

    def pytest_runtest_logreport(self, report) -> None:
        spent = getattr(report, "processor_seconds", 0.0)  # a crashed worker's report has none
        self._times[function_id(report.nodeid)][report.nodeid] += spent

    def pytest_sessionfinish(self, session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        mean = {name: sum(of.values()) / len(of) for name, of in self._times.items()}
        slow = {name for name, of in self._times.items() if sum(of.values()) >= _QUICK}
        both = [mean[name] / seconds()[name] for name in slow & seconds().keys()]
        scale = statistics.median(both) if both else 1.0
        listed = {name: of for name, of in seconds().items() if _is_defined(name)}
        for name in slow | (seconds().keys() & mean.keys()):
            listed[name] = mean[name] / scale
        FILE.write_text("".join(f"{listed[name]:.2g} {name}\n" for name in sorted(listed)))


def least_tier(item) -> str:
    """The quickest tier that may hold a test, by its marks and its folder."""
    mark = item.get_closest_marker("tier")
    if mark:
        (tier,) = mark.args
        assert tier in TIERS, f"{item.nodeid}: unknown tier {tier!r}"
        return tier
    return "test" if item.path.parent.name in NOT_IN_CHECK else "check"


def _identity(value):
    """A hashable key that is equal for equal parameter values."""
    try:
        hash(value)
        return value
    except TypeError:  # a list, an array
        return id(value)


def covering(variants: list[dict], names: list[str], pairs: bool) -> list[int]:
    """Positions of variants in which each parameter value occurs; with `pairs`, also each pair of
    values that occurs together, except for the parameter with most values: the matrices of a
    battery take turns. Greedy: variants that add most values come first.
    """
    counts = {key: len({v[key] for v in variants if key in v}) for key in set().union(*variants)}
    widest = max(sorted(counts), key=counts.__getitem__, default=None)
    # Ordered by a hash of their names, so that neighbouring tests keep different variants.
    left = sorted(range(len(variants)), key=lambda i: zlib.crc32(names[i].encode()))
    found = {i: set(sorted(variants[i].items(), key=lambda item: item[0])) for i in left}
    kept = []

    def cover(found: dict[int, set]) -> None:
        seen = set().union(*(found[i] for i in kept))
        rest = [i for i in left if i not in kept]
        while rest:
            best = max(rest, key=lambda i: len(found[i] - seen))
            if found[best] <= seen:
                return
            seen |= found[best]
            kept.append(best)
            rest.remove(best)

    cover(found)
    if pairs:
        for i, values in found.items():
            ordered = sorted((v for v in values if v[0] != widest), key=lambda v: v[0])
            found[i] = values | set(itertools.combinations(ordered, 2))
        cover(found)
    return kept


def _most(item, tier: str) -> int | None:
    """How many variants of a function fit in its time in a tier; None: any number."""
    each = seconds().get(function_id(item.nodeid))
    if each is None:
        return None
    mark = item.get_closest_marker("seconds")
    marked = mark.kwargs if mark else {}
    if tier in marked:
        return max(int(marked[tier] / each), 1)
    if tier == "all":  # never less than a quicker tier
        return max(int(max(BUDGET[tier], *marked.values(), 0) / each), 1)
    named = item.get_closest_marker("tier") or (tier == "test" and item.path.parent.name in CORE)
    return max(int(BUDGET[tier] / each), each <= ALONE[tier] or bool(named))


def left_out(items: list, tier: str) -> set:
    """The tests that a tier does not run."""
    out = {item for item in items if TIERS.index(least_tier(item)) > TIERS.index(tier)}
    if tier == "every":
        return out
    functions = collections.defaultdict(list)
    for item in items:
        if item not in out:
            key = (item.path, getattr(item, "cls", None), item.originalname)
            functions[key].append(item)
    for variants in functions.values():
        most = _most(variants[0], tier)
        if not hasattr(variants[0], "callspec"):
            out.update(variants if most == 0 else ())
            continue
        values = [
            {name: _identity(value) for name, value in item.callspec.params.items()}
            for item in variants
        ]
        names = [item.name for item in variants]
        if tier == "all" and most is None:
            continue
        kept = covering(values, names, pairs=tier != "check")
        if tier == "all":
            each = seconds()[function_id(variants[0].nodeid)]
            values_alone = len(covering(values, names, pairs=False))
            most = max(most, min(values_alone, int(VALUES / each)))
            rest = [i for i in range(len(names)) if i not in kept]
            kept += sorted(rest, key=lambda i: zlib.crc32(names[i].encode()))
        out.update(item for i, item in enumerate(variants) if i not in kept[:most])
    return out


def further(items: list, later: set) -> set:
    """Of the tests in `later` those whose function has a variant before: elsewhere or earlier."""
    seen = {function_id(item.nodeid) for item in items if item not in later}
    found = set()
    for item in items:
        if item in later:
            function = function_id(item.nodeid)
            if function in seen:
                found.add(item)
            seen.add(function)
    return found
