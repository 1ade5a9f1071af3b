"""Reads IR text back: `read_ir(print_ir(p)) == p`.

Purpose: inspect, store and edit programs between passes.  Non-goals: plan text, and legality (`wellformed` checks it).
"""

from typing import Any, TypeVar

from attrs import frozen
from lark import Token, Transformer
from lark.exceptions import UnexpectedInput

from . import settings
from .diagnostics import Diagnostic, Diagnostics, PlanError
from .grammars import parser
from .ir import (
    Arg,
    Attr,
    Axis,
    Bucket,
    Claim,
    Dim,
    Enter,
    Init,
    Kind,
    Leave,
    Op,
    Param,
    Placement,
    Program,
    Region,
    Type,
    Value,
    Yield,
    sharded,
)
from .parser import parse_plan
from .source import Source, Span


def is_ir(text: str) -> bool:
    """Whether `text` is IR text and not a plan: a line begins `program NAME after PASS`."""
    return any(line.startswith("program ") for line in text.splitlines())


def read_ir(source: Source) -> Program:
    """The program that `source` shows.  Raises PlanError where it is not IR text."""
    head, separator, rest = source.text.partition("\nprogram ")
    sections = {section.kind.name: section for section in parse_plan(Source(source.path, head)).sections()}
    if not {"cluster", "train"} <= set(sections):
        help = "sections `cluster` and `train` stand before `program`"
        raise PlanError([Diagnostic("E0190", "this IR has no settings", source.whole(), help=help)])
    found = Diagnostics()
    cluster = settings.read(settings.Cluster, sections["cluster"], found)
    train = settings.read(settings.Train, sections["train"], found)
    found.check()
    assert cluster, "reader: settings that failed to read were not reported"
    assert train, "reader: settings that failed to read were not reported"
    reader: Any = parser("ir", _Builder(train, cluster))
    try:
        return reader.parse(separator.lstrip("\n") + rest)
    except UnexpectedInput as error:
        line, column = head.count("\n") + 1 + error.line, error.column
        span = Span(source.path, line, column, line, column + 1, source.text)
        raise PlanError([Diagnostic("E0190", "this is not IR text", span, label="not expected here")]) from None


Parts = list[Any]
"""Tokens and nodes of one rule, as written."""

T = TypeVar("T")


@frozen
class _Values:
    """The results of an op or a region."""

    values: tuple[Value, ...]


@frozen
class _Attrs:
    attrs: tuple[tuple[str, Attr], ...]


@frozen
class _Yields:
    ends: tuple[Yield, ...]


@frozen
class _Sharded:
    """A dim of a type, and the axes that shard it."""

    dim: str
    axes: tuple[str, ...]


@frozen
class _On:
    """A placement on an axis that shards no dim."""

    axis: str
    place: Placement


class _Builder(Transformer[Token, Program]):
    """One method per rule of `ir.lark`, called while parsing."""

    def __init__(self, train: settings.Train, cluster: settings.Cluster) -> None:
        super().__init__()
        self._train, self._cluster = train, cluster
        self._axes: list[str] = []  # in mesh order: they are declared before the first type

    def start(self, parts: Parts) -> Program:
        name, stage = _words(parts)
        (region,) = _all(Region, parts)
        return Program(
            name,
            stage,
            _all(Axis, parts),
            _all(Dim, parts),
            _all(Claim, parts),
            _all(Param, parts),
            region,
            self._train,
            self._cluster,
            _all(Bucket, parts),
        )

    def axis(self, parts: Parts) -> Axis:
        name, size, whole = _words(parts)
        self._axes.append(name)
        return Axis(name, int(size), whole, span=parts[-1])

    def dim(self, parts: Parts) -> Dim:
        name, size = _words(parts)
        return Dim(name, int(size), span=parts[-1])

    def claim(self, parts: Parts) -> Claim:
        rank, dim, how, axis = _words(parts)
        return Claim(int(rank), dim, axis, how == "over", span=parts[-1])

    def param(self, parts: Parts) -> Param:
        value: Value = parts[0]
        kind, *args, stacked, inner = _words(parts)
        init = Init(kind, tuple(map(float, args)))
        return Param(value.name, value.type, int(stacked), int(inner), init, span=parts[-1])

    def bucket(self, parts: Parts) -> Bucket:
        value: Value = parts[0]
        return Bucket(value.name, parts[1], value.type)

    def region(self, parts: Parts) -> Region:
        words: dict[str, Any] = {part.type: part.value for part in _all(Token, parts)}
        return Region(
            words["REGION"],
            tuple(part for part in parts if isinstance(part, Op | Region)),
            _all(Arg, parts),
            tuple(end for each in _all(_Yields, parts) for end in each.ends),
            _results(parts),
            words.get("NAME", ""),
            "REVERSE" in words,
            span=_all(Span, parts)[0],
        )

    def op(self, parts: Parts) -> Op:
        kind, *inputs = _words(parts)
        attrs = [pair for each in _all(_Attrs, parts) for pair in each.attrs]
        return Op(kind, tuple(inputs), _results(parts), tuple(attrs), span=parts[-1])

    def yields(self, parts: Parts) -> _Yields:
        return _Yields(tuple(parts))

    def leaving(self, parts: Parts) -> Yield:
        how, name = _words(parts)
        return Yield(name, Leave(how))

    def arg(self, parts: Parts) -> Arg:
        enter, source = _words(parts)
        return Arg(parts[0], source, Enter(enter))

    def values(self, parts: Parts) -> _Values:
        return _Values(tuple(parts))

    def value(self, parts: Parts) -> Value:
        return Value(str(parts[0]), parts[1])

    def type(self, parts: Parts) -> Type:
        dims = _all(_Sharded, parts)
        at = [(axis, sharded(each.dim)) for each in dims for axis in each.axes]
        at += [(each.axis, each.place) for each in _all(_On, parts)]
        at.sort(key=lambda pair: self._axes.index(pair[0]))
        return Type(str(parts[0]), tuple(each.dim for each in dims), tuple(at))

    def tdim(self, parts: Parts) -> _Sharded:
        dim, *axes = _words(parts)
        return _Sharded(dim, tuple(axes))

    def place_on(self, parts: Parts) -> _On:
        return _On(str(parts[0]), parts[1])

    def attrs(self, parts: Parts) -> _Attrs:
        return _Attrs(tuple(parts))

    def attr(self, parts: Parts) -> tuple[str, Attr]:
        return str(parts[0]), parts[1]

    def list(self, parts: Parts) -> tuple[str, ...]:
        return tuple(map(str, parts))

    def names(self, parts: Parts) -> tuple[str, ...]:
        return tuple(map(str, parts))

    def place(self, parts: Parts) -> Placement:
        kind, *dim = _words(parts)
        return Placement(Kind(kind), *dim)

    def number(self, parts: Parts) -> int | float:
        (text,) = _words(parts)
        return float(text) if set(text) & set(".eE") else int(text)

    def string(self, parts: Parts) -> str:
        return str(parts[0])[1:-1]

    def LOC(self, text: Token) -> Span:
        path, _, line = text[1:].rpartition(":")
        return Span(path, int(line), 1, int(line), 1)


def _all(kind: type[T], parts: Parts) -> tuple[T, ...]:
    return tuple(part for part in parts if isinstance(part, kind))


def _words(parts: Parts) -> list[str]:
    return [str(part) for part in _all(Token, parts)]


def _results(parts: Parts) -> tuple[Value, ...]:
    return next((part.values for part in _all(_Values, parts)), ())
