"""Reads IR text back: `read_ir(print_ir(p)) == p`.

Purpose: inspect, store and edit programs between passes.  Non-goals: plan text, and legality (`wellformed` checks it).
"""

from typing import Any

from lark import Token, Transformer, v_args
from lark.exceptions import UnexpectedInput

from . import settings
from .diagnostics import Diagnostic, Diagnostics, PlanError
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
    Places,
    Program,
    Region,
    Type,
    Value,
    Yield,
    sharded,
)
from .grammars import parser
from .parser import parse_plan
from .source import Source, Span


def is_ir(text: str) -> bool:
    """Whether `text` is IR text and not a plan: a line begins `program NAME after PASS`."""
    return any(line.startswith("program ") for line in text.splitlines())


def read_ir(source: Source) -> Program:
    """The program that `source` shows.  Raises PlanError where it is not IR text."""
    head, separator, rest = source.text.partition("\nprogram ")
    sections = {section.kind.name: section for section in parse_plan(Source(source.path, head)).sections()}
    found = Diagnostics()
    cluster = settings.read(settings.Cluster, sections["cluster"], found)
    train = settings.read(settings.Train, sections["train"], found)
    found.check()
    assert cluster and train, "reader: settings that failed to read were not reported"
    try:
        return parser("ir", _Builder(train, cluster)).parse(separator.lstrip("\n") + rest)  # type: ignore[return-value]
    except UnexpectedInput as error:
        line = head.count("\n") + 1 + error.line
        span = Span(source.path, line, error.column, line, error.column + 1)
        raise PlanError([Diagnostic("E0190", "this is not IR text", span, label="not expected here")]) from None


@v_args(inline=True)
class _Builder(Transformer[Token, Program]):
    """One method per rule of `ir.lark`."""

    def __init__(self, train: settings.Train, cluster: settings.Cluster) -> None:
        super().__init__()
        self._settings = {"train": train, "cluster": cluster}
        self._axes: list[str] = []  # in mesh order: they are declared before the first type

    def start(self, name: Token, stage: Token, *rest: Any) -> Program:
        of = {kind: tuple(x for x in rest if isinstance(x, kind)) for kind in (Axis, Dim, Claim, Param, Bucket)}
        return Program(
            str(name),
            str(stage),
            of[Axis],
            of[Dim],
            of[Claim],
            of[Param],
            rest[-1],
            buckets=of[Bucket],
            **self._settings,
        )

    def axis(self, name: Token, size: Token, whole: Token) -> Axis:
        self._axes.append(str(name))
        return Axis(str(name), int(size), str(whole))

    def dim(self, name: Token, size: Token) -> Dim:
        return Dim(str(name), int(size))

    def claim(self, rank: Token, dim: Token, how: Token, axis: Token, loc: Span) -> Claim:
        return Claim(int(rank), str(dim), str(axis), how == "over", span=loc)

    def param(self, value: Value, kind: Token, *rest: Any) -> Param:
        *args, stacked, inner, span = rest
        numbers = tuple(map(float, args))
        return Param(value.name, value.type, int(stacked), int(inner), Init(str(kind), numbers), span=span)

    def bucket(self, value: Value, params: tuple[str, ...]) -> Bucket:
        return Bucket(value.name, params, value.type)

    def region(self, *parts: Any) -> Region:
        words = {part.type: part.value for part in parts if isinstance(part, Token)}
        return Region(
            words["REGION"],
            tuple(part for part in parts if isinstance(part, Op | Region)),
            tuple(part for part in parts if isinstance(part, Arg)),
            next((tuple(part) for part in parts if isinstance(part, list)), ()),
            next((part for part in parts if isinstance(part, tuple)), ()),
            words.get("NAME", ""),
            "REVERSE" in words,
            span=next(part for part in parts if isinstance(part, Span)),
        )

    def op(self, *parts: Any) -> Op:
        kind, *inputs = (str(part) for part in parts if isinstance(part, Token))
        results = next((part for part in parts if isinstance(part, tuple)), ())
        attrs = next((tuple(part) for part in parts if isinstance(part, list)), ())
        return Op(kind, tuple(inputs), results, attrs, span=parts[-1])

    def yields(self, *parts: Yield) -> list[Yield]:
        return list(parts)

    def leaving(self, how: Token, name: Token) -> Yield:
        return Yield(str(name), Leave(how.value))

    def arg(self, value: Value, enter: Token, source: Token) -> Arg:
        return Arg(value, str(source), Enter(enter.value))

    def values(self, *values: Value) -> tuple[Value, ...]:
        return values

    def value(self, name: Token, type: Type) -> Value:
        return Value(str(name), type)

    def type(self, dtype: Token, *parts: Any) -> Type:
        dims = [part for part in parts if isinstance(part, list)]
        at: Places = tuple((axis, sharded(dim)) for dim, *axes in dims for axis in axes)
        at += tuple(part for part in parts if isinstance(part, tuple))
        return Type(str(dtype), tuple(dim for dim, *_ in dims), tuple(sorted(at, key=lambda p: self._axes.index(p[0]))))

    def tdim(self, dim: Token, *axes: Token) -> list[str]:
        return [str(name) for name in (dim, *axes)]

    def place_on(self, axis: Token, place: Placement) -> tuple[str, Placement]:
        return str(axis), place

    def attrs(self, *attrs: tuple[str, Attr]) -> list[tuple[str, Attr]]:
        return list(attrs)

    def attr(self, key: Token, value: Attr) -> tuple[str, Attr]:
        return str(key), value

    def list(self, *words: Token | str) -> tuple[str, ...]:
        return tuple(map(str, words))

    def names(self, *names: Token) -> tuple[str, ...]:
        return tuple(map(str, names))

    def place(self, kind: Token, *dim: Token) -> Placement:
        return Placement(Kind(kind.value), *map(str, dim))

    def number(self, text: Token) -> int | float:
        return float(text) if set(text) & set(".eE") else int(text)

    def string(self, text: Token) -> str:
        return text[1:-1]

    def LOC(self, text: Token) -> Span:  # noqa: N802
        path, _, line = text[1:].rpartition(":")
        return Span(path, int(line), 1, int(line), 1)
