"""Reads IR text back: `read_ir(print_ir(p)) == p`.

Purpose: inspect, store and edit programs between passes.  Non-goals: plan text, and legality (`wellformed` checks it).
"""

import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from attrs import evolve, frozen
from lark import Token, Transformer
from lark.exceptions import UnexpectedInput

from ..config import settings
from ..config.gpus import check_gpu
from ..config.hf_names import HFWeight, read_names
from ..config.schema import read
from ..schedules.actions import Schedule
from ..schedules.csv_file import BadRows, read_csv
from ..syntax.diagnostics import Diagnostic, Diagnostics, PlanError
from ..syntax.lark_parser import parser
from ..syntax.parser import MAX_DIGITS, parse_plan
from ..syntax.source import Source, Span
from . import (
    STATES,
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
    Pipeline,
    Placement,
    Program,
    Region,
    StateAxes,
    Type,
    Value,
    Yield,
    sharded,
)


def read_ir(source: Source) -> Program:
    """The program that `source` shows.  Raises PlanError where it is not IR text."""
    head, _, rest = source.text.partition("\nprogram ")
    sections = {section.kind.name: section for section in parse_plan(Source(source.path, head)).sections()}
    if not {"cluster", "train"} <= set(sections):
        help = "sections `cluster` and `train` must come before `program`"
        raise PlanError([Diagnostic("E0190", "this IR has no settings", source.whole(), help=help)])
    found = Diagnostics()
    cluster = read(settings.Cluster, sections["cluster"], found)
    train = read(settings.Train, sections["train"], found)
    flow = read(settings.Flow, sections["state"], found) if "state" in sections else settings.Flow()
    order = read(settings.Pipelining, sections["pipeline"], found) if "pipeline" in sections else None
    names = read_names(sections["names"], found, {}) if "names" in sections else ()
    if cluster:
        check_gpu(cluster, found)
    found.check()
    assert cluster, "reader: settings that failed to read were not reported"
    assert train, "reader: settings that failed to read were not reported"
    assert flow, "reader: settings that failed to read were not reported"
    text = "\n" * (head.count("\n") + 1) + "program " + rest  # tokens then know their lines in the source
    reader: Any = parser("ir", _Builder(train, cluster, flow, order, names, source))
    try:
        return reader.parse(text)
    except UnexpectedInput as error:
        raise _unreadable("not expected here", source, error.line, error.column, error.column + 1) from None
    except BadRows as error:
        raise PlanError([Diagnostic("E0190", f"these are not rows: {error}", source.whole())]) from None


def _unreadable(label: str, source: Source, line: int, column: int, end: int) -> PlanError:
    span = Span(source.path, line, column, line, end, source.text)
    return PlanError([Diagnostic("E0190", "this is not IR text", span, label=label)])


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
class _Held:
    """The stages that hold a parameter."""

    param: str
    stages: tuple[int, ...]


@frozen
class _Row:
    """What a rank of a pipeline does, in order."""

    text: str


@frozen
class _Given:
    """What a rank computes in the rows of the plan's file."""

    text: str


def _schedule(rows: Iterable[_Row | _Given]) -> Schedule | None:
    text = "\n".join(row.text.replace(" ", ",") for row in rows)
    return read_csv(text) if text else None


@frozen
class _Yields:
    ends: tuple[Yield, ...]


@frozen
class _Sharded:
    """A dim of a type, and the axes that shard it."""

    dim: str
    axes: tuple[Token, ...]


@frozen
class _On:
    """A placement on an axis that shards no dim."""

    axis: Token
    place: Placement


class _Builder(Transformer[Token, Program]):
    """One method per rule of `ir.lark`, called while parsing."""

    def __init__(
        self,
        train: settings.Train,
        cluster: settings.Cluster,
        flow: settings.Flow,
        order: settings.Pipelining | None,
        names: tuple[HFWeight, ...],
        source: Source,
    ) -> None:
        super().__init__()
        self._order = order
        self._train, self._cluster, self._flow, self._names, self._source = train, cluster, flow, names, source
        self._axes: list[str] = []  # in mesh order: they are declared before the first type

    def start(self, parts: Parts) -> Program:
        name, after = _words(parts)
        (region,) = _all(Region, parts)
        return Program(
            name,
            after,
            _all(Axis, parts),
            _all(Dim, parts),
            _all(Claim, parts),
            _all(Param, parts),
            region,
            self._train,
            self._cluster,
            _all(Bucket, parts),
            self._names,
            _all(StateAxes, parts),
            self._flow,
            self._pipeline(parts),
        )

    def _pipeline(self, parts: Parts) -> Pipeline | None:
        """What stands in several lines."""
        found = next(iter(_all(Pipeline, parts)), None)
        if not found:
            return None
        held = tuple((each.param, each.stages) for each in _all(_Held, parts))
        return evolve(found, held=held, given=_schedule(_all(_Given, parts)), schedule=_schedule(_all(_Row, parts)))

    def pipeline(self, parts: Parts) -> Pipeline:
        axis, dims, *counts = parts
        assert self._order, "reader: a pipeline without settings"
        layers, stage_to_rank = counts or ((), ())
        return Pipeline(str(axis), dims, self._order, layers=layers, stage_to_rank=stage_to_rank)

    def held(self, parts: Parts) -> _Held:
        return _Held(str(parts[0]), parts[1])

    def given(self, parts: Parts) -> _Given:
        return _Given(parts[0])

    def row(self, parts: Parts) -> _Row:
        return _Row(parts[0])

    def numbers(self, parts: Parts) -> tuple[int, ...]:
        return tuple(map(self._count, _tokens(parts)))

    def axis(self, parts: Parts) -> Axis:
        name, size, parent = _tokens(parts)
        self._axes.append(str(name))
        return Axis(str(name), self._count(size), str(parent), span=parts[-1])

    def dim(self, parts: Parts) -> Dim:
        name, size, *valid = _tokens(parts)
        count = self._count(size)
        return Dim(str(name), count, self._count(valid[0]) if valid else count, span=parts[-1])

    def claim(self, parts: Parts) -> Claim:
        rank, dim, how, axis = _tokens(parts)
        return Claim(self._count(rank), str(dim), str(axis), how == "over", span=parts[-1])

    def param(self, parts: Parts) -> Param:
        value: Value = parts[0]
        kind, *args, stacked, inner = _tokens(parts)
        init = Init(str(kind), tuple(float(self._number(arg)) for arg in args))
        return Param(value.name, value.type, self._count(stacked), self._count(inner), init, span=parts[-1])

    def state(self, parts: Parts) -> StateAxes:
        return StateAxes(parts[-1], **dict(parts[:-1]))

    def kept(self, parts: Parts) -> tuple[str, tuple[str, ...]]:
        kind, axes = parts
        if kind not in STATES:
            raise self._wrong(f"`{kind}` is no state", kind)
        return str(kind), axes

    def bucket(self, parts: Parts) -> Bucket:
        name, type, params, *facts = parts
        return Bucket(str(name), params, type, **dict(facts))

    def over(self, parts: Parts) -> tuple[str, tuple[str, ...]]:
        return str(parts[0]), parts[1]

    def flag(self, parts: Parts) -> tuple[str, bool]:
        return str(parts[0]), True

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
        for axis, _ in at:
            if axis not in self._axes:
                raise self._wrong(f"axis `{axis}` is not declared", axis)
        places = sorted(((str(axis), place) for axis, place in at), key=lambda pair: self._axes.index(pair[0]))
        return Type(str(parts[0]), tuple(each.dim for each in dims), tuple(places))

    def tdim(self, parts: Parts) -> _Sharded:
        dim, *axes = _tokens(parts)
        return _Sharded(str(dim), tuple(axes))

    def place_on(self, parts: Parts) -> _On:
        return _On(parts[0], parts[1])

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
        return self._number(parts[0])

    def string(self, parts: Parts) -> str:
        return str(parts[0])[1:-1]

    def LOC(self, text: Token) -> Span:
        path, _, line = text[1:].rpartition(":")
        if len(line) > MAX_DIGITS:
            raise self._wrong(f"a number of more than {MAX_DIGITS} digits", text)
        return Span(path, int(line), 1, int(line), 1)

    def _count(self, text: Token) -> int:
        value = self._number(text)
        if not isinstance(value, int) or value < 0:
            raise self._wrong("not a count", text)
        return value

    def _number(self, text: Token) -> int | float:
        if max(map(len, re.findall("[0-9]+", text))) > MAX_DIGITS:
            raise self._wrong(f"a number of more than {MAX_DIGITS} digits", text)
        value = float(text) if set(text) & set(".eE") else int(text)
        if math.isinf(value):
            raise self._wrong("this number is too large", text)
        return value

    def _wrong(self, label: str, at: Token) -> PlanError:
        line, column = at.line or 0, at.column or 0
        return _unreadable(label, self._source, line, column, column + len(at))


def _all(kind: type[T], parts: Parts) -> tuple[T, ...]:
    return tuple(part for part in parts if isinstance(part, kind))


def _tokens(parts: Parts) -> tuple[Token, ...]:
    return _all(Token, parts)


def _words(parts: Parts) -> list[str]:
    return [str(part) for part in _tokens(parts)]


def _results(parts: Parts) -> tuple[Value, ...]:
    return next((part.values for part in _all(_Values, parts)), ())
