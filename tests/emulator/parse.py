"""Parses PTX text into entries of instructions (PTX ISA, sections 4 to 6)."""

import re
from dataclasses import dataclass, field
from functools import cached_property

from .values import WIDTHS


class Fault(Exception):
    """A kernel's error; the message names thread, block and instruction."""


@dataclass(frozen=True)
class Register:
    name: str
    negated: bool = False  # `!%p1`


@dataclass(frozen=True)
class Immediate:
    bits: int
    real: float | None = None  # a decimal floating-point literal


@dataclass(frozen=True)
class Symbol:
    name: str
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    parts: tuple


@dataclass(frozen=True)
class Pair:
    """`%p1|%p2`: two destinations."""

    parts: tuple


@dataclass(frozen=True)
class Address:
    base: object
    offset: int


@dataclass(frozen=True)
class Instruction:
    opcode: str
    modifiers: tuple
    operands: tuple
    guard: Register | None
    text: str
    source: str  # "file.cu:12", or "" where the module has no line information

    def __str__(self):
        return f"`{self.text}`" + (f" ({self.source})" if self.source else "")

    def allow(self, *modifiers):
        """Raises NotImplementedError for a modifier that is neither a type nor one of these."""
        for modifier in self.modifiers:
            if modifier not in modifiers and modifier not in WIDTHS and modifier != "pred":
                raise NotImplementedError(f"modifier .{modifier} of {self}")

    @cached_property
    def types(self):
        return [name for name in self.modifiers if name in WIDTHS or name == "pred"]


@dataclass(frozen=True)
class Variable:
    """A parameter, or an array in one of the state spaces."""

    name: str
    space: str
    kind: str
    count: int
    align: int
    initial: tuple = ()

    @property
    def nbytes(self):
        return WIDTHS[self.kind] * self.count


@dataclass
class Entry:
    name: str
    parameters: list
    variables: list = field(default_factory=list)
    registers: dict = field(default_factory=dict)  # name -> width in bytes, 0 for a predicate
    labels: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)  # jump tables of brx.idx: label -> labels
    instructions: list = field(default_factory=list)
    max_threads: int | None = None


VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?P<attributes>(?:\.ptr\s*|\.align\s+\d+\s*|"
    r"\.(?:global|const|shared|local)\s+)*)\.(?P<kind>\w+)\s+(?:\.ptr\s*)?(?P<more>(?:\.align\s+\d+"
    r"\s*|\.(?:global|const|shared|local)\s+)*)(?P<name>[\w$%]+)\s*(?P<extent>(?:\[\d*\])*)\s*"
    r"(?:=\s*(?P<initial>[^;]*))?"
)


def parse_variable(match):
    align = re.search(r"\.align\s+(\d+)", match["attributes"])
    kind, count = match["kind"], 1
    for extent in re.findall(r"\[(\d*)\]", match["extent"]):
        count *= int(extent or 0)
    literals = re.findall(r"[^{},\s]+", match["initial"] or "")
    initial = tuple(parse_literal(text) for text in literals)
    return Variable(
        match["name"],
        match["space"],
        kind,
        count,
        int(align[1]) if align else WIDTHS[kind],
        initial,
    )


def parse_literal(text):
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
        return Immediate(int(text[2:], 16))
    if re.fullmatch(r"-?0[xX][0-9a-fA-F]+U?", text):
        return Immediate(int(text.rstrip("U"), 16))
    if re.fullmatch(r"-?\d+U?", text):
        return Immediate(int(text.rstrip("U")))
    if re.fullmatch(r"-?\d*\.\d*(?:[eE][+-]?\d+)?", text):
        return Immediate(0, float(text))
    raise NotImplementedError(f"PTX literal {text!r}")


def parse_operand(text, scope):
    text = text.strip()
    if text.startswith("{"):
        return Vector(tuple(parse_operand(part, scope) for part in text[1:-1].split(",")))
    if text.startswith("["):
        match = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if match is None:
            raise NotImplementedError(f"PTX address {text!r}")
        offset = int(match[2], 0) if match[2] else 0
        return Address(parse_operand(match[1], scope), offset)
    if "|" in text:
        return Pair(tuple(parse_operand(part, scope) for part in text.split("|")))
    if text.startswith("!"):
        return Register(scope.resolve(text[1:].strip()), negated=True)
    if text[0].isdigit() or text[0] in "-.":
        return parse_literal(text)
    name = scope.resolve(text)
    if text == "_" or text.startswith("%") or name in scope.entry.registers:
        return Register(name)
    name, _, offset = name.partition("+")
    return Symbol(name, int(offset or "0", 0))


class Scope:
    """The scopes of inline assembly's braces: a name declared inside hides the same name
    outside."""

    def __init__(self, entry):
        self.entry, self.levels, self.opened = entry, [{}], 0

    def open(self):
        self.opened += 1
        self.levels.append({})

    def close(self):
        self.levels.pop()

    def declare(self, name):
        inner = name if len(self.levels) == 1 else f"{name}#{self.opened}"
        self.levels[-1][name] = inner
        return inner

    def resolve(self, name):
        for level in reversed(self.levels):
            if name in level:
                return level[name]
        return name


def parse_registers(statement, scope):
    kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
    width = 0 if kind == "pred" else WIDTHS[kind]
    for name in (name.strip() for name in names.split(",")):
        family = re.fullmatch(r"(.+)<(\d+)>", name)
        members = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
        for member in members:
            scope.entry.registers[scope.declare(member)] = width


def parse_instruction(statement, scope, source):
    text = " ".join(statement.split())
    guard, name, operands = re.fullmatch(r"(?:@(!?[\w%$]+)\s+)?([\w.:]+)\s*(.*)", text).groups()
    opcode, *modifiers = name.split(".")
    pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", operands)
    return Instruction(
        opcode,
        tuple(modifiers),
        tuple(parse_operand(piece, scope) for piece in pieces),
        parse_operand(guard, scope) if guard else None,
        text,
        source,
    )


STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$%]+)\s*:|(?P<statement>[^;]+);)")


def parse_location(statement, files):
    """`.loc file line column[, function_name name, inlined_at file line column]` as text."""
    numbers = re.findall(r"(?:\.loc|inlined_at)\s+(\d+)\s+(\d+)", statement)
    places = [f"{files.get(file, '?')}:{line}" for file, line in numbers]
    return ", inlined at ".join(places)


def parse_body(body, entry, files):
    scope, source, position = Scope(entry), "", 0
    while match := STATEMENT.match(body, position):
        position = match.end()
        statement = (match["statement"] or "").strip()
        if match["brace"]:
            scope.open() if match["brace"] == "{" else scope.close()
        elif match["label"]:
            label = match["label"]
            entry.labels[label] = len(entry.instructions)
        elif statement.split()[0] == ".loc":
            source = parse_location(statement, files)
        elif statement.startswith(".branchtargets"):
            # The label before it names the table.
            entry.tables[label] = re.findall(r"[\w$%]+", statement.removeprefix(".branchtargets"))
        elif statement.startswith(".reg"):
            parse_registers(statement, scope)
        elif variable := VARIABLE.match(statement):
            entry.variables.append(parse_variable(variable))
        elif not statement.startswith(".pragma"):
            entry.instructions.append(parse_instruction(statement, scope, source))
    if body[position:].strip():
        raise NotImplementedError(f"PTX text: {body[position:].strip()[:80]!r}")


def matching_brace(text, start):
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.end()
    raise ValueError("PTX text: a brace is not closed")


def parse_module(text):
    """(entries by name, module variables) of a PTX module."""
    files = dict(re.findall(r'(?m)^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text))
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"\.section\s+\.debug\w*\s*\{.*?\}", "", text, flags=re.S)
    text = re.sub(r"(?m)^(\s*\.loc\b[^\n]*)$", r"\1;", text)
    entries, outside, position = {}, "", 0
    for match in re.finditer(r"\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", text):
        if match.start() < position:
            continue
        brace, semicolon = text.find("{", match.end()), text.find(";", match.end())
        if brace < 0 or 0 <= semicolon < brace:  # only a declaration
            continue
        outside += text[position : match.start()]
        position = matching_brace(text, brace)
        if match[1] == "entry":
            header = text[match.end() : brace]
            entry = Entry(match[2], [parse_variable(v) for v in VARIABLE.finditer(header)])
            limit = re.search(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)", header)
            if limit:
                entry.max_threads = 1
                for extent in limit[1].split(","):
                    entry.max_threads *= int(extent)
            parse_body(text[brace + 1 : position - 1], entry, files)
            entries[entry.name] = entry
    return entries, [parse_variable(v) for v in VARIABLE.finditer(outside + text[position:])]
