"""ListOps: nested lists of MIN, MAX, MED and SM over digits; the label is the value, 0 to 9.

The rules are those of the Long-Range-Arena generator (Tay et al. 2021), after Nangia and Bowman
(2018). An expression is a digit, or an operator with 2 to 10 arguments. Below depth 10 a node is an
operator with probability 1/4. The length of an expression is the number of its tokens, one for
`[MAX` and one for `]`, and must lie strictly between two bounds (LRA: 500 and 2000). Trees are
distinct. The model sees the tokens only: no parentheses.

Forests are drawn level by level in NumPy, without a Python loop over nodes. `evaluate` defines the
meaning: a stack machine over tokens that shares no code with the generator and is tested against
it.

    python listops.py --check listops_test_d20s.tsv.gz        # parse a file and compare every label
    python listops.py --count 1000 --write listops.tsv        # write one, in the layout of LRA
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = ("<pad>", *"0123456789", *OPERATORS, "]")
PADDING, DIGIT, OPERATOR, CLOSE = 0, 1, 11, 15  # a digit d is token DIGIT + d
CLASSES = 10
MAX_DEPTH, OPERATOR_PROBABILITY, MIN_ARGUMENTS, MAX_ARGUMENTS = 10, 0.25, 2, 10
_TOKEN = {word: token for token, word in enumerate(VOCABULARY)}


def parse(text: str) -> list[int]:
    """Tokens of an expression as written in ListOps files; parentheses are dropped."""
    words = [word for word in text.split() if word not in ("(", ")")]
    unknown = [word for word in words if word not in _TOKEN or word == "<pad>"]
    if unknown or not words:
        what = f"unknown token {unknown[0]!r}" if unknown else "no tokens"
        raise ValueError(f"listops.parse: {what}; expected {' '.join(VOCABULARY[1:])}")
    return [_TOKEN[word] for word in words]


def evaluate(tokens: Iterable[int]) -> int:
    """The value of one expression. Padding at the end is ignored. Malformed: ValueError."""
    stack: list[list[int]] = [
        []
    ]  # per open operator [operator, arguments ...]; the bottom is the answer
    for token in tokens:
        if DIGIT <= token < OPERATOR:
            stack[-1].append(token - DIGIT)
        elif OPERATOR <= token < CLOSE:
            stack.append([token - OPERATOR])
        elif token == CLOSE:
            if len(stack) == 1 or len(stack[-1]) == 1:
                raise ValueError(
                    "listops.evaluate: a ] that closes nothing, or an operator without arguments"
                )
            operator, *arguments = stack.pop()
            stack[-1].append(_apply(OPERATORS[operator], arguments))
        elif token != PADDING:
            raise ValueError(f"listops.evaluate: token {token} is outside the vocabulary")
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(
            f"listops.evaluate: {len(stack) - 1} brackets left open, {len(stack[0])} values"
        )
    return stack[0][0]


def _apply(operator: str, arguments: Sequence[int]) -> int:
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    middle = sorted(arguments)[(len(arguments) - 1) // 2 : len(arguments) // 2 + 1]
    return sum(middle) // len(middle)  # the median, truncated to an integer


def read(path: str | Path) -> tuple[list[list[int]], np.ndarray]:
    """(token lists, labels) of a ListOps TSV, plain or .gz.

    Either layout: `Source<TAB>Target` (LRA) or `label<TAB>expression` (the original samples).
    Raises ValueError naming file and line.
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    expressions, labels = [], []
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip("\n").split("\t")
            if fields == [""] or fields == ["Source", "Target"]:
                continue
            label = [field for field in fields if len(field) == 1 and field.isdigit()]
            if len(fields) != 2 or not label:
                raise ValueError(
                    f"{path}:{number}: expected label and expression, separated by a tab"
                )
            try:  # an expression may itself be one digit: then the first field is the label
                expressions.append(parse(fields[1] if fields[0] in label else fields[0]))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            labels.append(int(label[0]))
    return expressions, np.asarray(labels, np.int32)


@dataclasses.dataclass
class _Level:
    """All nodes of one depth, in order; `parent` indexes the level above and is sorted."""

    parent: np.ndarray
    operator: np.ndarray  # -1 for a digit
    digit: np.ndarray
    arguments: np.ndarray  # 0 for a digit
    length: np.ndarray  # tokens of the subtree, filled bottom up
    value: np.ndarray  # its value, filled bottom up
    start: np.ndarray  # position of its first token, filled top down


def _grow(rng: np.random.Generator, trees: int) -> list[_Level]:
    """A forest of `trees` expressions, as the levels of its trees."""
    levels: list[_Level] = []
    parent = np.arange(trees)
    while parent.size:
        n = parent.size
        leaf = rng.random(n) >= OPERATOR_PROBABILITY
        if len(levels) == MAX_DEPTH - 1:
            leaf[:] = True
        operator = np.where(leaf, -1, rng.integers(0, len(OPERATORS), n))
        arguments = np.where(leaf, 0, rng.integers(MIN_ARGUMENTS, MAX_ARGUMENTS + 1, n))
        digit = rng.integers(0, 10, n)
        zeros = np.zeros(n, np.int64)
        levels.append(_Level(parent, operator, digit, arguments, zeros + 1, zeros, zeros.copy()))
        parent = np.repeat(np.arange(n), arguments)
    return levels


def _measure(levels: list[_Level]) -> None:
    """Fills `length` of every node, the deepest level first."""
    for level, children in zip(levels[-2::-1], levels[:0:-1], strict=True):
        below = np.bincount(children.parent, weights=children.length, minlength=level.digit.size)
        level.length = np.where(level.operator < 0, 1, 2 + below.astype(np.int64))


def _keep(levels: list[_Level], wanted: np.ndarray) -> list[_Level]:
    """The forest of only those trees whose root is wanted."""
    kept, roots = [], wanted
    for level in levels:
        position = np.cumsum(roots) - 1  # new position of a kept node of the level above
        alive = roots[level.parent] if kept else roots
        parent = position[level.parent[alive]]
        fields = {f.name: getattr(level, f.name)[alive] for f in dataclasses.fields(_Level)}
        kept.append(_Level(**{**fields, "parent": parent}))
        roots = alive
    return [level for level in kept if level.parent.size]


def _value(levels: list[_Level]) -> None:
    """Fills `value` of every node, the deepest level first."""
    for depth in range(len(levels) - 1, -1, -1):
        level = levels[depth]
        level.value = level.digit.copy()
        inner = np.flatnonzero(level.operator >= 0)
        if not inner.size:
            continue
        children = levels[depth + 1]
        count = level.arguments[inner]
        first = np.cumsum(count) - count
        ordered = children.value[np.lexsort((children.value, children.parent))]
        low, high = ordered[first + (count - 1) // 2], ordered[first + count // 2]
        smallest, largest = ordered[first], ordered[first + count - 1]
        total = np.add.reduceat(children.value, first) % 10
        choices = [smallest, largest, (low + high) // 2, total]  # in the order of OPERATORS
        level.value[inner] = np.choose(level.operator[inner], choices)


def _write(levels: list[_Level]) -> np.ndarray:
    """tokens [trees, longest], padded: each node's position follows from the lengths before it."""
    trees, longest = levels[0].digit.size, int(levels[0].length.max(initial=0))
    tokens = np.zeros((trees, longest), np.int8)
    tree = np.arange(trees)
    for depth, level in enumerate(levels):
        if depth:
            above = levels[depth - 1]
            tree = tree[level.parent]
            before = (
                np.cumsum(level.length) - level.length
            )  # tokens of all nodes before, in this level
            first = np.searchsorted(level.parent, level.parent)  # this node's first sibling
            level.start = above.start[level.parent] + 1 + before - before[first]
        leaf = level.operator < 0
        tokens[tree, level.start] = np.where(leaf, DIGIT + level.digit, OPERATOR + level.operator)
        end = level.start + level.length - 1
        tokens[tree[~leaf], end[~leaf]] = CLOSE
    return tokens


def generate(
    count: int, *, min_length: int = 500, max_length: int = 2000, seed: int = 0, forest: int = 4096
) -> tuple[np.ndarray, np.ndarray]:
    """`count` distinct expressions with min_length < length < max_length: (tokens, labels).

    tokens [count, max_length - 1] is int8, zeros after the end; labels [count] is int32. The same
    seed gives the same expressions, and a larger count only appends to them. Raises ValueError
    where the range is empty or holds too few.
    """
    if not 0 <= min_length < max_length - 1:
        raise ValueError(f"listops.generate: no length lies between {min_length} and {max_length}")
    rng = np.random.default_rng(seed)
    tokens = np.zeros((count, max_length - 1), np.int8)
    labels = np.zeros(count, np.int32)
    seen: set[bytes] = set()
    barren = 0
    while len(seen) < count:
        levels = _grow(rng, forest)
        _measure(levels)
        length = levels[0].length
        levels = _keep(levels, (min_length < length) & (length < max_length))
        before = len(seen)
        if levels:
            _value(levels)
            for row, value in zip(_write(levels), levels[0].value, strict=True):
                key = row.tobytes().rstrip(b"\0")
                if len(seen) < count and key not in seen:
                    tokens[len(seen), : len(key)] = row[: len(key)]
                    labels[len(seen)] = value
                    seen.add(key)
        barren = barren + 1 if len(seen) == before else 0
        if barren == 50:
            raise ValueError(
                f"listops.generate: only {len(seen)} of {count} distinct expressions found between "
                f"lengths {min_length} and {max_length}: widen the range or lower the count"
            )
    return tokens, labels


def nested(tokens: Sequence[int]) -> str:
    """An expression as LRA writes it, parentheses showing the left-branching binary form."""
    stack: list[str] = []
    for token in tokens:
        if token == PADDING:
            break
        word = VOCABULARY[token]
        if OPERATOR <= token < CLOSE:
            stack.append(word)
            continue
        while True:  # a digit or a closed list joins the list that is open before it
            if token == CLOSE:
                word, token = f"( {stack.pop()} ] )", DIGIT
            if not stack:
                return word
            stack[-1] = f"( {stack[-1]} {word} )"
            break
    raise ValueError("listops.nested: the expression does not end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--check", type=Path, metavar="TSV", help="evaluate every expression of this file"
    )
    parser.add_argument(
        "--write", type=Path, metavar="TSV", help="write generated expressions to this file"
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--min-length", type=int, default=500)
    parser.add_argument("--max-length", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.check:
        expressions, labels = read(arguments.check)
        right = sum(evaluate(e) == label for e, label in zip(expressions, labels, strict=True))
        print(f"{arguments.check}: {right} of {len(labels)} labels agree")
    if arguments.write:
        lengths = {"min_length": arguments.min_length, "max_length": arguments.max_length}
        tokens, labels = generate(arguments.count, seed=arguments.seed, **lengths)
        rows = (f"{nested(t)}\t{label}\n" for t, label in zip(tokens, labels, strict=True))
        arguments.write.write_text("Source\tTarget\n" + "".join(rows))
        print(f"{arguments.write}: {len(labels)} expressions")
    if not (arguments.check or arguments.write):
        parser.error("nothing to do: give --check TSV or --write TSV")


if __name__ == "__main__":
    main()
