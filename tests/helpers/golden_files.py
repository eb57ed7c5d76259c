"""Golden files: expected results as text, in the folder `golden` beside the test.

A test takes the fixture `golden` and passes its result. A difference fails the test and is shown
line by line. Where the change is intended,

    python -m pytest --write-golden

runs the tests that have golden files, and no others, and writes the files instead of comparing.
Then read `git diff`: each line of it is a change that a user may notice.
"""

import difflib
import json

MOST_LINES = 60  # longest difference that is shown


class Golden:
    """The golden files of one folder; with `write` they are written and nothing is compared."""

    def __init__(self, folder, write=False):
        self.folder, self.write = folder, write

    def text(self, name, found):
        """Checks that `found` is the text of the file `name`."""
        path = self.folder / name
        if self.write:
            self._save(path, found)
            return
        assert path.exists(), f"no golden file {name}; {HOW}"
        _same(name, path.read_text(encoding="utf-8"), found)

    def keys(self, name):
        """The keys of the JSON file `name`."""
        return self._entries(name).keys()

    def entry(self, name, key, found):
        """Checks that `found`, a dictionary of strings, is the entry `key` of the JSON file
        `name`."""
        entries = self._entries(name)
        if self.write:
            entries[key] = found
            self._save(self.folder / name, _json(dict(sorted(entries.items()))))
            return
        assert key in entries, f"{name} has no entry {key!r}; {HOW}"
        _same(f"{name}, {key}", _json(entries[key]), _json(found))

    def numbers(self, name, key, found, allowed):
        """Checks that `found`, {label: number}, has the labels of the entry `key` of the JSON file
        `name`, and numbers that differ from those there by `allowed(number there)` at most."""
        entries = self._entries(name)
        if self.write:
            entries[key] = found
            self._save(self.folder / name, _json(dict(sorted(entries.items()))))
            return
        assert key in entries, f"{name} has no entry {key!r}; {HOW}"
        kept = entries[key]
        near = {
            label: kept[label]
            if label in kept and abs(number - kept[label]) <= allowed(kept[label])
            else number
            for label, number in found.items()
        }
        _same(f"{name}, {key}", _json(kept), _json(near))

    def _entries(self, name):
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _save(self, path, text):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


HOW = "`python -m pytest --write-golden` writes the golden files"


def _json(value):
    return json.dumps(value, indent=1) + "\n"


def _same(name, expected, found):
    """Fails with a short difference: pytest's own takes minutes for long texts."""
    if expected == found:
        return
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "golden", "now", n=2, lineterm=""
    )
    shown = list(lines)
    more = [f"... {len(shown) - MOST_LINES} lines more"] if len(shown) > MOST_LINES else []
    difference = "\n".join([*shown[:MOST_LINES], *more])
    raise AssertionError(f"{name} is not what it was; if that is meant, {HOW}.\n{difference}")


def left_out(items):
    """The tests without golden files, which --write-golden does not run."""
    return {item for item in items if "golden" not in getattr(item, "fixturenames", ())}
