"""`make readability`: gauges of how densely the code and its English read, and ratchets that hold
them.

    .venv/bin/python benchmarks/readability.py [--lower] [--where GAUGE]

Prints each gauge of the compiler, the runtime and the libraries beside its ratchet and its goal,
which are in readability.toml.  The status is 1 where a gauge is above its ratchet.  A ratchet may
only fall: `--lower` writes the gauges that have fallen.  `--where` lists the places that a gauge
counts.

Lines of code are lines that are neither blank nor a comment nor part of a docstring.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATCHETS = Path(__file__).with_suffix(".toml")
FOLDERS = ("codegen_templates", "compiler", "entry", "formats", "runtime", "tools")
DOCUMENTS = ("README.md", "docs/*.md", "docs/decisions/*.md")

WIDEST = 100
"""Columns of a line."""

LONGEST, MOST_BRANCHES = 50, 10
"""Lines and branches of a function."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)

VAGUE = frozenset("it each found at own of given made held".split())
"""Names that say nothing of a value."""

PARTICIPLE = re.compile(
    r"^_*(?!need|feed|speed|seed|embed|bucket|sharded)"
    r"([a-z]+ed|told|sent|held|made|given|found|kept|said|known|taken|written|drawn|left|lost|built"
    r"|meant|shown|begun|chosen|read)(_|$)"
)
"""The first word of a name; nouns and verbs that end in `ed` are none."""

CLAUSE = re.compile(r"\b(that|those) of\b|\b(of|by|from|in|to) which\b", re.IGNORECASE)
THOSE = re.compile(r"\bthose\b", re.IGNORECASE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Place:
    """A thing that a gauge counts: its gauge, its file and its line."""

    gauge: str
    path: str
    line: int


@dataclass(frozen=True)
class Base:
    """The sizes that counts are divided by."""

    code_lines: int = 0
    functions: int = 0
    docstring_words: int = 0
    document_words: int = 0

    def __add__(self, other: "Base") -> "Base":
        return Base(
            self.code_lines + other.code_lines,
            self.functions + other.functions,
            self.docstring_words + other.docstring_words,
            self.document_words + other.document_words,
        )


@dataclass(frozen=True)
class Gauge:
    """A row of the table: `per` so many units of a field of `Base`; a plain count where `unit`
    is empty.
    """

    name: str
    unit: str = ""
    per: int = 1


GAUGES = (
    Gauge("comprehensions per 1,000 lines", "code_lines", 1000),
    Gauge("comprehensions inside others per 1,000 lines", "code_lines", 1000),
    Gauge("conditional expressions per 1,000 lines", "code_lines", 1000),
    Gauge("conditional expressions in f-strings"),
    Gauge("vague names of values per 1,000 lines", "code_lines", 1000),
    Gauge("lines over 100 columns, %", "code_lines", 100),
    Gauge("functions over 50 lines"),
    Gauge("functions over 10 branches"),
    Gauge("functions named by participles, %", "functions", 100),
    Gauge("those per 1,000 words of docstrings", "docstring_words", 1000),
    Gauge("that of, of which … per 1,000 words of docstrings", "docstring_words", 1000),
    Gauge("those per 1,000 words of documents", "document_words", 1000),
    Gauge("that of, of which … per 1,000 words of documents", "document_words", 1000),
)


class Module:
    """A module's text, its syntax tree and its docstrings."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self._lines = text.splitlines()
        self._tree = ast.parse(text)
        self._docstrings: list[tuple[int, str]] = []
        self._docstring_lines: set[int] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
                expression = node.body[0]
                last_line = expression.end_lineno or expression.lineno
                self._docstrings.append((expression.lineno, docstring))
                self._docstring_lines.update(range(expression.lineno, last_line + 1))

    @property
    def base(self) -> Base:
        """Its lines of code, its functions, the words of its docstrings."""
        code_lines = sum(1 for _ in self._code_lines())
        functions = sum(1 for _ in self._named_functions())
        words = sum(len(docstring.split()) for _, docstring in self._docstrings)
        return Base(code_lines=code_lines, functions=functions, docstring_words=words)

    def places(self) -> Iterator[Place]:
        """All that the gauges count."""
        for node in ast.walk(self._tree):
            for gauge in _gauges_of(node):
                yield Place(gauge, self.path, getattr(node, "lineno", 1))
        for number, line in self._code_lines():
            if len(line) > WIDEST:
                yield Place("lines over 100 columns, %", self.path, number)
        for function in self._named_functions():
            if PARTICIPLE.match(function.name):
                yield Place("functions named by participles, %", self.path, function.lineno)
        for number, docstring in self._docstrings:
            yield from _words(docstring, "docstrings", self.path, number)

    def _code_lines(self) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(self._lines, start=1):
            is_comment = line.lstrip().startswith("#")
            if line.strip() and not is_comment and number not in self._docstring_lines:
                yield number, line

    def _named_functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self._tree):
            if isinstance(node, FUNCTIONS) and not node.name.startswith("__"):
                yield node


def _gauges_of(node: ast.AST) -> Iterator[str]:
    """The gauges that count a node of a syntax tree."""
    if isinstance(node, COMPREHENSIONS):
        yield "comprehensions per 1,000 lines"
        if _contains(node, COMPREHENSIONS):
            yield "comprehensions inside others per 1,000 lines"
    if isinstance(node, ast.IfExp):
        yield "conditional expressions per 1,000 lines"
    if isinstance(node, ast.FormattedValue) and _contains(node, (ast.IfExp,)):
        yield "conditional expressions in f-strings"
    if _is_vague_name(node):
        yield "vague names of values per 1,000 lines"
    if isinstance(node, FUNCTIONS):
        if (node.end_lineno or node.lineno) - node.lineno >= LONGEST:
            yield "functions over 50 lines"
        if sum(isinstance(inner, BRANCHES) for inner in ast.walk(node)) > MOST_BRANCHES:
            yield "functions over 10 branches"


def _contains(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Whether a node has others of some kinds below it."""
    return any(isinstance(inner, kinds) for inner in ast.walk(node) if inner is not node)


def _is_vague_name(node: ast.AST) -> bool:
    """Whether a node binds a name that says nothing: a variable or a parameter."""
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) and node.id in VAGUE
    return isinstance(node, ast.arg) and node.arg in VAGUE


def _words(text: str, of: str, path: str, line: int) -> Iterator[Place]:
    for _ in THOSE.finditer(text):
        yield Place(f"those per 1,000 words of {of}", path, line)
    for _ in CLAUSE.finditer(text):
        yield Place(f"that of, of which … per 1,000 words of {of}", path, line)


def modules() -> Iterator[Module]:
    """The modules of the product."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield Module(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def documents() -> Iterator[tuple[str, str]]:
    """The documents, without their blocks of code: path and text."""
    for pattern in DOCUMENTS:
        for path in sorted(ROOT.glob(pattern)):
            text = CODE_BLOCK.sub("", path.read_text(encoding="utf-8"))
            yield path.relative_to(ROOT).as_posix(), text


def measured() -> tuple[dict[str, float], list[Place]]:
    """The value of each gauge, and the places that they count."""
    base, places = Base(), list[Place]()
    for module in modules():
        base += module.base
        places.extend(module.places())
    for path, text in documents():
        base += Base(document_words=len(text.split()))
        places.extend(_words(text, "documents", path, 1))
    counts: defaultdict[str, int] = defaultdict(int)
    for place in places:
        counts[place.gauge] += 1
    return {gauge.name: _value(gauge, counts[gauge.name], base) for gauge in GAUGES}, places


def _value(gauge: Gauge, count: int, base: Base) -> float:
    if not gauge.unit:
        return float(count)
    return round(gauge.per * count / max(getattr(base, gauge.unit), 1), 2)


def ratchets(file: Path = RATCHETS) -> dict[str, dict[str, float]]:
    """By gauge its ratchet, `most`, and its `goal`."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def table(values: Mapping[str, float], held: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """A line for each gauge."""
    yield f"{'':50}{'now':>9}{'at most':>9}{'goal':>9}"
    for name, value in values.items():
        note = "   above its ratchet" if value > held[name]["most"] else ""
        yield f"{name:50}{value:9,.2f}{held[name]['most']:9,.2f}{held[name]['goal']:9,.2f}{note}"


def lower(values: Mapping[str, float], file: Path = RATCHETS) -> None:
    """Writes the ratchets of gauges that have fallen; no ratchet rises."""
    blocks = list[str]()
    for name, ratchet in ratchets(file).items():
        most = min(values[name], ratchet["most"])
        blocks.append(f'["{name}"]\nmost = {most:g}\ngoal = {ratchet["goal"]:g}\n')
    file.write_text("\n".join(blocks), encoding="utf-8")


def _print_places(places: Iterable[Place], gauge: str) -> None:
    for place in places:
        if gauge in place.gauge:
            print(f"{place.path}:{place.line}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; the status is 1 where a gauge is above its ratchet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="write the ratchets that have fallen")
    parser.add_argument(
        "--where", metavar="GAUGE", help="list the places of a gauge, by a part of its name"
    )
    options = parser.parse_args(arguments)
    values, places = measured()
    if options.where:
        _print_places(places, options.where)
        return 0
    if options.lower:
        lower(values)
    held = ratchets()
    print("\n".join(table(values, held)))
    return int(any(value > held[name]["most"] for name, value in values.items()))


if __name__ == "__main__":
    sys.exit(main())
