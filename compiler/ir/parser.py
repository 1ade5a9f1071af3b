"""Reads IR text back: `read_ir(print_ir(p)) == p`.

Purpose: inspect, store and edit programs between passes.  Non-goals: plan text, legality
(`analysis.verifier`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

from attrs import evolve
from lark import Token, Transformer, v_args  # pyright: ignore[reportUnknownVariableType]
from lark.exceptions import UnexpectedInput

from ..config import settings
from ..config.gpus import check_gpu
from ..config.hf_names import parse_names
from ..config.schema import parse_section
from ..schedules.actions import Action, Schedule
from ..schedules.csv_file import BadRows, parse_csv
from ..syntax.diagnostics import Diagnostics, PlanError, wrong
from ..syntax.lark_parser import parser
from ..syntax.parser import MAX_DIGITS, parse_plan
from ..syntax.source import Source, Span
from ..syntax.tree import Section
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
    head, _, body = source.text.partition("\nprogram ")
    plan = parse_plan(Source(source.path, head))
    sections = {section.kind.name: section for section in plan.sections()}
    if not {"cluster", "train"} <= set(sections):
        help = "sections `cluster` and `train` must come before `program`"
        raise wrong("E0190", "this IR has no settings", source.whole(), help=help)
    diagnostics = Diagnostics()
    fields = _read_settings(sections, diagnostics)
    pipelining = None
    if "pipeline" in sections:
        pipelining = parse_section(settings.Pipelining, sections["pipeline"], diagnostics)
    if fields["cluster"]:
        check_gpu(fields["cluster"], diagnostics)
    diagnostics.check()
    # tokens then know their lines in the source
    text = "\n" * (head.count("\n") + 1) + "program " + body
    # the builder's methods take the parts of a rule by position
    by_position = cast(Any, v_args(inline=True)(_Builder))
    reader: Any = parser("ir", by_position(fields, pipelining, source), placeholders=True)
    try:
        return reader.parse(text)
    except UnexpectedInput as error:
        raise _unreadable(
            "not expected here", source, error.line, error.column, error.column + 1
        ) from None
    except BadRows as error:
        raise wrong("E0190", f"these are not rows: {error}", source.whole()) from None


def _read_settings(sections: Mapping[str, Section], diagnostics: Diagnostics) -> dict[str, Any]:
    """The fields of a program that have sections of their own, with defaults for absent ones."""
    fields: dict[str, Any] = {
        "cluster": parse_section(settings.Cluster, sections["cluster"], diagnostics),
        "train": parse_section(settings.Train, sections["train"], diagnostics),
        "flow": settings.Flow(),
        "watch": settings.Watch(),
        "names": (),
    }
    if "state" in sections:
        fields["flow"] = parse_section(settings.Flow, sections["state"], diagnostics)
    if "watch" in sections:
        fields["watch"] = parse_section(settings.Watch, sections["watch"], diagnostics)
    if "names" in sections:
        fields["names"] = parse_names(sections["names"], diagnostics, {})
    return fields


def _unreadable(label: str, source: Source, line: int, column: int, end: int) -> PlanError:
    span = Span(source.path, line, column, line, end, source.text)
    return wrong("E0190", "this is not IR text", span, label=label)


class _Builder(Transformer[Token, Program]):
    """One method per rule of `ir.lark`: the parser calls it with the rule's parts, None for parts
    that are left out.
    """

    def __init__(
        self, fields: dict[str, Any], pipelining: settings.Pipelining | None, source: Source
    ) -> None:
        """`fields` are the program's fields that have sections."""
        super().__init__()
        self._fields, self._pipelining, self._source = fields, pipelining, source
        self._axes: list[str] = []  # in mesh order: they are declared before the first type
        # the dims and axes of claims within an op, declared before it too
        self._inner = set[tuple[str, str]]()

    def start(self, name: Token, after: Token, sees: tuple[str, ...], *parts: Any) -> Program:
        lists = defaultdict[str, Parts](list)
        *headers, region = parts
        for field, entry in headers:
            lists[field].append(entry)
        pipeline = None
        for declared in lists["pipeline"]:
            pipeline = evolve(
                declared,
                param_stages=tuple(lists["held"]),
                rows=_schedule(lists["given"]),
                schedule=_schedule(lists["schedule"]),
            )
        fields: dict[str, Any] = {field: tuple(lists[field]) for field in FIELDS} | self._fields
        return Program(str(name), str(after), region=region, pipeline=pipeline, sees=sees, **fields)

    def sees(self, *words: Token) -> tuple[str, ...]:
        return tuple(map(str, words))

    # ---- what is declared

    def axis(self, name: Token, size: Token, parent: Token, *parts: Any) -> Header:
        least, most, span = parts
        self._axes.append(str(name))
        within = None
        if least:
            within = self._count(least), self._count(most)
        return "axes", Axis(str(name), self._count(size), str(parent), within, span=span)

    def dim(self, name: Token, size: Token, valid: Token | None, *parts: Any) -> Header:
        *words, padded, span = parts
        twin, chosen = map(_name_after_word, words)
        sizes = self._count(size), self._count(valid or size)
        padded_rows = 0
        if padded:
            padded_rows = self._count(padded)
        return "dims", Dim(str(name), *sizes, twin, chosen, padded_rows, span=span)

    def claim(
        self, rank: Token, dim: Token, how: Token, axis: Token, layout: Token | None, *parts: Any
    ) -> Header:
        *words, span = parts
        via, within = map(_name_after_word, words)
        if within:
            self._inner.add((str(dim), str(axis)))
        leading = self._count(rank), str(dim), str(axis), how == "over", layout is not None
        return "claims", Claim(*leading, via, within, span=span)

    def param(self, value: Value, init: Init, stacked: Token, inner: Token, span: Span) -> Header:
        return "params", Param(
            value.name, value.type, self._count(stacked), self._count(inner), init, span=span
        )

    def buffer(self, value: Value, rate: Token, route: Token, stacked: Token, span: Span) -> Header:
        leading = value.name, value.type, self._count(stacked), 0, Init("zeros")
        return "buffers", Buffer(
            *leading, rate=float(self.number(rate)), route=self._count(route), span=span
        )

    def init(self, kind: Token, *args: Token | None) -> Init:
        return Init(str(kind), tuple(float(self.number(arg)) for arg in args if arg))

    def state(self, *parts: Any) -> Header:
        *axes_by_kind, patterns = parts
        return "state", StateAxes(patterns, **dict(axes_by_kind))

    def kept(self, kind: Token, axes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        if kind not in STATES:
            raise self._wrong(f"`{kind}` is no state", kind)
        return str(kind), axes

    def bucket(self, name: Token, type: Type, params: tuple[str, ...], *facts: Any) -> Header:
        return "buckets", Bucket(str(name), params, type, **dict(facts))

    def recomputed(self, name: Token) -> Header:
        return "recomputed", str(name)

    def fact(self, word: Token, value: Any = True) -> tuple[str, Any]:
        return str(word), value

    def pipeline(
        self, axis: Token, dims: tuple[str, ...], *numbers: tuple[int, ...] | None
    ) -> Header:
        assert self._pipelining, "reader: a pipeline without settings"
        layers, stage_to_rank = numbers
        return "pipeline", Pipeline(
            str(axis),
            dims,
            self._pipelining,
            layers=layers or (),
            stage_to_rank=stage_to_rank or (),
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
        placed: list[tuple[Token, Placement]] = []
        for dim, axes in dims:
            for axis in axes:
                level = int((dim, axis) in self._inner)
                placed.append((axis, sharded(dim, level)))
        placed += others or ()
        for axis, _ in placed:
            if axis not in self._axes:
                raise self._wrong(f"axis `{axis}` is not declared", axis)
        placed.sort(key=lambda entry: self._axes.index(entry[0]))
        places: Places = tuple((str(axis), place) for axis, place in placed)
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
        """All parts that are present; names become plain strings."""
        present = list[Any]()
        for part in parts:
            if isinstance(part, Token):
                present.append(str(part))
            elif part is not None:
                present.append(part)
        return tuple(present)

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

    def _wrong(self, label: str, token: Token) -> PlanError:
        line, column = token.line or 0, token.column or 0
        return _unreadable(label, self._source, line, column, column + len(token))


def _name_after_word(part: Any) -> str:
    """The name after a keyword, as in `twin seq_k`; "" where the part is left out."""
    if not part:
        return ""
    return part.split()[1]


def _schedule(rows: Parts) -> Schedule | None:
    """The schedule of rows as they are printed, with groups of messages between brackets."""
    if not rows:
        return None
    lines = list[str]()
    for row in rows:
        lines.append(_GROUP.sub(r"\1", row).replace(" ", ","))
    schedule = parse_csv("\n".join(lines))
    groups = list[tuple[Action, ...]]()
    for row in rows:
        for group in _GROUP.findall(row):
            groups.append(tuple(filter(None, map(Action.parse, group.split()))))
    return evolve(schedule, groups=tuple(groups))


_GROUP = re.compile(r"\[([^\[\] ][^\[\]]*)\]")
