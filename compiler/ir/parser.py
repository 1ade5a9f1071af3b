"""Reads IR text back: `read_ir(print_ir(p)) == p`.

Purpose: inspect, store and edit programs between passes.  Non-goals: plan text, legality
(`analysis.verifier`).
"""

import math
import re
from collections import defaultdict
from typing import Any, cast

from attrs import evolve
from lark import Token, Transformer, v_args  # pyright: ignore[reportUnknownVariableType]
from lark.exceptions import UnexpectedInput

from ..config import settings
from ..config.gpus import check_gpu
from ..config.hf_names import read_names
from ..config.schema import read
from ..schedules.actions import Action, Schedule
from ..schedules.csv_file import BadRows, read_csv
from ..syntax.diagnostics import Diagnostics, PlanError, wrong
from ..syntax.lark_parser import parser
from ..syntax.parser import MAX_DIGITS, parse_plan
from ..syntax.source import Source, Span
from .declarations import STATES, Axis, Bucket, Buffer, Claim, Dim, Init, Param, Pipeline, StateAxes
from .program import Program
from .regions import Arg, Enter, Leave, Op, Region, Yield
from .types import Attr, Kind, Placement, Places, Type, Value, sharded

FIELDS = ("axes", "dims", "claims", "params", "buffers", "buckets", "state", "recomputed")
"""The fields of a program whose entries have a line each."""

Parts = list[Any]
"""The children of a rule."""

Header = tuple[str, Any]
"""An entry of a line before the region, and the name of the list that it goes to: mostly a
field of the program.
"""


def read_ir(source: Source) -> Program:
    """The program that `source` shows.  Raises PlanError where it is not IR text."""
    head, _, rest = source.text.partition("\nprogram ")
    sections = {
        section.kind.name: section for section in parse_plan(Source(source.path, head)).sections()
    }
    if not {"cluster", "train"} <= set(sections):
        help = "sections `cluster` and `train` must come before `program`"
        raise wrong("E0190", "this IR has no settings", source.whole(), help=help)
    found = Diagnostics()
    given: dict[str, Any] = {
        "cluster": read(settings.Cluster, sections["cluster"], found),
        "train": read(settings.Train, sections["train"], found),
        "flow": read(settings.Flow, sections["state"], found)
        if "state" in sections
        else settings.Flow(),
        "watch": read(settings.Watch, sections["watch"], found)
        if "watch" in sections
        else settings.Watch(),
        "names": read_names(sections["names"], found, {}) if "names" in sections else (),
    }
    order = (
        read(settings.Pipelining, sections["pipeline"], found) if "pipeline" in sections else None
    )
    if given["cluster"]:
        check_gpu(given["cluster"], found)
    found.check()
    # tokens then know their lines in the source
    text = "\n" * (head.count("\n") + 1) + "program " + rest
    # its methods take what a rule is made of by position
    by_position = cast(Any, v_args(inline=True)(_Builder))
    reader: Any = parser("ir", by_position(given, order, source), placeholders=True)
    try:
        return reader.parse(text)
    except UnexpectedInput as error:
        raise _unreadable(
            "not expected here", source, error.line, error.column, error.column + 1
        ) from None
    except BadRows as error:
        raise wrong("E0190", f"these are not rows: {error}", source.whole()) from None


def _unreadable(label: str, source: Source, line: int, column: int, end: int) -> PlanError:
    span = Span(source.path, line, column, line, end, source.text)
    return wrong("E0190", "this is not IR text", span, label=label)


class _Builder(Transformer[Token, Program]):
    """One method per rule of `ir.lark`, called while parsing with its parts, None for what is
    left out.
    """

    def __init__(
        self, given: dict[str, Any], order: settings.Pipelining | None, source: Source
    ) -> None:
        """`given` are the program's fields that have sections."""
        super().__init__()
        self._given, self._order, self._source = given, order, source
        self._axes: list[str] = []  # in mesh order: they are declared before the first type
        # the dims and axes of claims within an op, declared before it too
        self._inner = set[tuple[str, str]]()

    def start(self, name: Token, after: Token, sees: tuple[str, ...], *parts: Any) -> Program:
        lists = defaultdict[str, Parts](list)
        *headers, region = parts
        for field, entry in headers:
            lists[field].append(entry)
        pipeline = None
        for each in lists["pipeline"]:
            rows = {field: _schedule(lists[field]) for field in ("given", "schedule")}
            pipeline = evolve(each, param_stages=tuple(lists["held"]), **rows)
        fields: dict[str, Any] = {field: tuple(lists[field]) for field in FIELDS} | self._given
        return Program(str(name), str(after), region=region, pipeline=pipeline, sees=sees, **fields)

    def sees(self, *words: Token) -> tuple[str, ...]:
        return tuple(map(str, words))

    # ---- what is declared

    def axis(self, name: Token, size: Token, parent: Token, *rest: Any) -> Header:
        least, most, span = rest
        self._axes.append(str(name))
        within = (self._count(least), self._count(most)) if least else None
        return "axes", Axis(str(name), self._count(size), str(parent), within, span=span)

    def dim(self, name: Token, size: Token, valid: Token | None, *rest: Any) -> Header:
        *words, padded, span = rest
        twin, chosen = (word.split()[1] if word else "" for word in words)
        sizes = self._count(size), self._count(valid or size)
        return "dims", Dim(
            str(name), *sizes, twin, chosen, self._count(padded) if padded else 0, span=span
        )

    def claim(
        self, rank: Token, dim: Token, how: Token, axis: Token, layout: Token | None, *rest: Any
    ) -> Header:
        *words, span = rest
        via, within = (word.split()[1] if word else "" for word in words)
        if within:
            self._inner.add((str(dim), str(axis)))
        known = self._count(rank), str(dim), str(axis), how == "over", layout is not None
        return "claims", Claim(*known, via, within, span=span)

    def param(self, value: Value, init: Init, stacked: Token, inner: Token, span: Span) -> Header:
        return "params", Param(
            value.name, value.type, self._count(stacked), self._count(inner), init, span=span
        )

    def buffer(self, value: Value, rate: Token, route: Token, stacked: Token, span: Span) -> Header:
        known = value.name, value.type, self._count(stacked), 0, Init("zeros")
        return "buffers", Buffer(
            *known, rate=float(self.number(rate)), route=self._count(route), span=span
        )

    def init(self, kind: Token, *args: Token | None) -> Init:
        return Init(str(kind), tuple(float(self.number(arg)) for arg in args if arg))

    def state(self, *parts: Any) -> Header:
        *kept, of = parts
        return "state", StateAxes(of, **dict(kept))

    def kept(self, kind: Token, axes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        if kind not in STATES:
            raise self._wrong(f"`{kind}` is no state", kind)
        return str(kind), axes

    def bucket(self, name: Token, type: Type, params: tuple[str, ...], *facts: Any) -> Header:
        return "buckets", Bucket(str(name), params, type, **dict(facts))

    def recomputed(self, name: Token) -> Header:
        return "recomputed", str(name)

    def fact(self, word: Token, said: Any = True) -> tuple[str, Any]:
        return str(word), said

    def pipeline(
        self, axis: Token, dims: tuple[str, ...], *placed: tuple[int, ...] | None
    ) -> Header:
        assert self._order, "reader: a pipeline without settings"
        layers, stage_to_rank = (each or () for each in placed)
        return "pipeline", Pipeline(
            str(axis), dims, self._order, layers=layers, stage_to_rank=stage_to_rank
        )

    def held(self, param: Token, stages: tuple[int, ...]) -> Header:
        return "held", (str(param), stages)

    def given(self, row: str) -> Header:
        return "given", row

    def row(self, row: str) -> Header:
        return "schedule", row

    # ---- what is computed

    def region(
        self,
        results: tuple[Value, ...] | None,
        kind: Any,
        dim: Token | None,
        reverse: Token | None,
        args: tuple[Arg, ...],
        span: Span,
        *body: Any,
    ) -> Region:
        *stmts, yields = body
        return Region(
            kind.value,
            tuple(stmts),
            args,
            yields or (),
            results or (),
            str(dim or ""),
            reverse is not None,
            span=span,
        )

    def op(
        self,
        results: tuple[Value, ...] | None,
        kind: Token,
        inputs: tuple[str, ...],
        attrs: tuple[tuple[str, Attr], ...] | None,
        span: Span,
    ) -> Op:
        return Op(str(kind), inputs, results or (), attrs or (), span=span)

    def leaving(self, how: Token, name: Token) -> Yield:
        return Yield(str(name), Leave(how))

    def arg(self, value: Value, how: Token, source: Token) -> Arg:
        return Arg(value, str(source), Enter(how))

    def value(self, name: Token, type: Type) -> Value:
        return Value(str(name), type)

    def type(self, dtype: Token, dims: tuple[Any, ...], others: tuple[Any, ...] | None) -> Type:
        at = [
            (axis, sharded(dim, int((dim, axis) in self._inner)))
            for dim, axes in dims
            for axis in axes
        ]
        at += others or ()
        for axis, _ in at:
            if axis not in self._axes:
                raise self._wrong(f"axis `{axis}` is not declared", axis)
        places: Places = tuple(
            (str(axis), place) for axis, place in sorted(at, key=lambda it: self._axes.index(it[0]))
        )
        return Type(str(dtype), tuple(dim for dim, _ in dims), places)

    def tdim(self, dim: Token, *axes: Token | None) -> tuple[str, tuple[Token, ...]]:
        return str(dim), tuple(filter(None, axes))

    def place_on(self, axis: Token, place: Placement) -> tuple[Token, Placement]:
        return axis, place

    def place(self, kind: Token, dim: Token | None) -> Placement:
        return Placement(Kind(kind), str(dim or ""))

    def attr(self, key: Token, value: Attr) -> tuple[str, Attr]:
        return str(key), value

    # ---- lists and words

    def many(self, *parts: Any) -> tuple[Any, ...]:
        """All that there are, names as plain strings."""
        return tuple(
            str(part) if isinstance(part, Token) else part for part in parts if part is not None
        )

    args = inputs = attrs = yields = values = tdims = places_on = list = names = many

    def numbers(self, *counts: Token) -> tuple[int, ...]:
        return tuple(map(self._count, counts))

    def string(self, text: Token) -> str:
        return str(text)[1:-1]

    def number(self, text: Token) -> int | float:
        if max(map(len, re.findall("[0-9]+", text))) > MAX_DIGITS:
            raise self._wrong(f"a number of more than {MAX_DIGITS} digits", text)
        value = float(text) if set(text) & set(".eE") else int(text)
        if math.isinf(value):
            raise self._wrong("this number is too large", text)
        return value

    def LOC(self, text: Token) -> Span:
        path, _, line = text[1:].rpartition(":")
        if len(line) > MAX_DIGITS:
            raise self._wrong(f"a number of more than {MAX_DIGITS} digits", text)
        return Span(path, int(line), 1, int(line), 1, shown=path)

    def _count(self, text: Token) -> int:
        value = self.number(text)
        if not isinstance(value, int) or value < 0:
            raise self._wrong("not a count", text)
        return value

    def _wrong(self, label: str, at: Token) -> PlanError:
        line, column = at.line or 0, at.column or 0
        return _unreadable(label, self._source, line, column, column + len(at))


def _schedule(rows: Parts) -> Schedule | None:
    """Rows as they are printed, with groups of messages between brackets."""
    if not rows:
        return None
    schedule = read_csv("\n".join(_GROUP.sub(r"\1", row).replace(" ", ",") for row in rows))
    groups = (
        tuple(filter(None, map(Action.of, each.split())))
        for row in rows
        for each in _GROUP.findall(row)
    )
    return evolve(schedule, groups=tuple(groups))


_GROUP = re.compile(r"\[([^\[\] ][^\[\]]*)\]")
