"""The list of planted bugs fits the checkout; what notices them says `make mutants`."""

import collections
import dataclasses

import pytest
from bug import ROOT, Moved, planted
from bugs import BUGS, ROOMS


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_bug_can_be_planted(bug):
    content = (ROOT / bug.file).read_text()
    assert planted(bug, content) != content
    assert bug.focus and all((ROOT / path).exists() for path in bug.focus)


def test_there_are_bugs_in_all_rooms():
    counts = collections.Counter(bug.language for bug in BUGS)
    assert counts == {"Python": 22, "C++": 35, "CUDA": 12}
    assert {bug.room for bug in BUGS} == set(ROOMS)
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_a_bug_whose_text_has_moved_says_where_it_is_now():
    bug = dataclasses.replace(BUGS[0], file="sgap_jax/__init__.py")
    with pytest.raises(Moved, match="found it 0 times") as raised:
        planted(bug, (ROOT / bug.file).read_text())
    assert BUGS[0].file in str(raised.value)
