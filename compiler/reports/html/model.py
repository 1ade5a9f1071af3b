"""The model as its ranks compute it: forward's ops, their parameters' shards, and each collective
at its place.

It is drawn with forward from top to bottom, backward's calls at its side, layers of a repeat once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from math import ceil

from attrs import evolve, frozen

from ...config.units import amount
from ...ir import ITEM_BYTES, PRECISIONS, Op, Program, Region, Stmt, Type, base
from ...ops import OPS
from ..drawing import LETTER, Canvas, fit, wide
from ..summary import factors
from ..time import seconds
from .calls import Call, added

HIDDEN = ("pack", "unpack", "cast", "leaf", "begin", "wait")
"""Ops that move nothing between ranks and compute nothing that a model says."""


@frozen
class Shard:
    """A parameter's part on a rank: dims with their axes, those that shard its state besides,
    bytes of it.
    """

    name: str
    type: str
    axes: tuple[str, ...]
    degree: int
    at: float
    """Where the first sharded dim is among its dims, from 0, rows, to 1, columns."""
    state: tuple[str, ...]
    bytes: int


@frozen
class Row:
    """An op, or a coercion, which is nothing but its calls.

    made   what comes out, with dims and axes, sums that are pending as `pending over tp`
    calls  in forward, and `back` in backward at the same line
    """

    line: str
    op: str
    made: str
    shards: tuple[Shard, ...]
    calls: tuple[Call, ...]
    back: tuple[Call, ...]


@frozen
class Stretch:
    """Rows that run `times` times a microbatch, as layers of `dim`; once where that is "".

    stages  in words, the layers of each stage, where they are cut; else ""
    """

    dim: str
    times: int
    rows: tuple[Row, ...]
    stages: str


@frozen
class Model:
    """Forward from top to bottom; `state` are the calls for parameters, gradients and stages."""

    stretches: tuple[Stretch, ...]
    state: tuple[Call, ...]


def model(program: Program, calls: Sequence[Call], ranks: Sequence[Sequence[Call]]) -> Model:
    """The drawing's content: `calls`, and those of other ranks of a pipeline at places where
    these have none.
    """
    merged: dict[object, Call] = {}
    for it in calls:
        if it.use in ("parameters", "gradients", "stages") and it.sent:
            key = (it.use, it.op, it.whole)
            merged[key] = added(merged[key], it) if key in merged else it
    state = tuple(merged.values())
    here = {(it.value, it.where) for it in calls}
    others = [it for own in ranks for it in own if (it.value, it.where) not in here]
    rows = _Rows(program, [*calls, *dict.fromkeys(others)])
    stretches = tuple(rows.stretches(program.forward.body, "", 1))
    return Model(
        tuple(evolve(it, rows=tuple(map(rows.with_others, it.rows))) for it in stretches), state
    )


class _Rows:
    def __init__(self, program: Program, calls: Sequence[Call]) -> None:
        self._program = program
        self._params = {param.name: param for param in program.params}
        self._shown: set[str] = set()
        activations = [it for it in calls if it.use == "activations"]
        self._forward = _by(activations, "forward", lambda it: it.value)
        self._back = _by(activations, "backward", lambda it: it.line)

    def stretches(self, body: Sequence[Stmt], dim: str, times: int) -> Iterator[Stretch]:
        """Repeats, and what is between them."""
        rows: list[Row] = []
        for stmt in body:
            if isinstance(stmt, Region):
                if rows:
                    yield Stretch(dim, times, tuple(rows), self._stages(dim))
                    rows = []
                yield from self.stretches(
                    stmt.body, stmt.dim or "", times * self._program.size(stmt.dim)
                )
            elif row := self._row(stmt):
                rows.append(row)
        if rows:
            yield Stretch(dim, times, tuple(rows), self._stages(dim))

    def _stages(self, dim: str) -> str:
        pipeline = self._program.pipeline
        if not pipeline or dim not in pipeline.dims:
            return ""
        cuts = zip(pipeline.layers, pipeline.stage_to_rank, strict=True)
        parts = [f"{layers} on rank {rank}" for layers, rank in cuts]
        others = [each for each in pipeline.dims if each != dim]
        cut = f"; cut, with {', '.join(others)}, into" if others else "; cut into"
        return (
            f"{cut} stages of {', '.join(parts)}"
            if len(parts) <= 4
            else f"{cut} {len(parts)} stages"
        )

    def with_others(self, row: Row) -> Row:
        """With calls of backward at its line which no row has yet, as no coercion of forward is
        there.
        """
        return evolve(row, back=(*row.back, *self._back.pop(row.line, ())))

    def _row(self, op: Op) -> Row | None:
        calls = tuple(call for value in op.outputs for call in self._forward.pop(value.name, ()))
        if op.kind in HIDDEN and not calls:
            return None
        line = str(op.span)
        asks = op.kind == "coerce" or bool(calls)
        back = tuple(self._back.pop(line, ())) if asks else ()
        if op.kind == "coerce" and not calls and not back:
            return None
        shards = tuple(
            self._shard(name)
            for name in dict.fromkeys(map(base, op.inputs))
            if name in self._params
        )
        made = "; ".join(dict.fromkeys(self.typed(value.type) for value in op.outputs[:1]))
        return Row(line, "" if op.kind == "coerce" else self._said(op), made, shards, calls, back)

    def _said(self, op: Op) -> str:
        """For instance `v = contracts(a, wq, wk, wv)`; values without a name in the plan are
        `·`.
        """
        named = dict.fromkeys(
            base(value.name) for value in op.outputs if not value.name.startswith("_")
        )
        operands = ("·" if name.startswith("_") else base(name) for name in op.inputs)
        made = f"{', '.join(named)} = " if named else ""
        return f"{made}{OPS[op.kind].plan_name}({', '.join(operands)})"

    def typed(self, type: Type) -> str:
        """For instance `[seq/tp, batch/dp, hidden]`, with what is pending."""
        dims = ", ".join(
            f"{dim}/{'·'.join(self._named(axes))}" if (axes := type.axes_of(dim)) else dim
            for dim in type.dims
        )
        pending = [axis for axis, place in type.places if place.kind.value == "P"]
        return f"[{dims}]" + (f" pending over {', '.join(self._named(pending))}" if pending else "")

    def _named(self, axes: Sequence[str]) -> list[str]:
        """The plan's axis in place of all of its factors."""
        found: list[str] = []
        for axis in axes:
            parent = self._program.axis(axis).parent
            found.append(parent if {*factors(self._program, parent)} <= {*axes} else axis)
        return list(dict.fromkeys(found))

    def _shard(self, name: str) -> Shard:
        program, param = self._program, self._params[name]
        type = param.type
        for dim in type.dims[: param.stacked]:
            type = type.inside(dim)
        sharded = [(at, axes) for at, dim in enumerate(type.dims) if (axes := type.axes_of(dim))]
        axes = tuple(axis for _, each in sharded for axis in each)
        bucket = next((it for it in program.buckets if name in it.params), None)
        return Shard(
            name,
            self.typed(type),
            tuple(self._named(axes)),
            program.degree(axes),
            sharded[0][0] / max(len(type.dims) - 1, 1) if sharded else 0.0,
            tuple(self._named(bucket.shard_axes)) if bucket else (),
            program.elements(type) * ITEM_BYTES[PRECISIONS[program.train.precision]],
        )


def _by(calls: Sequence[Call], where: str, key: Callable[[Call], str]) -> dict[str, list[Call]]:
    """Calls of forward or backward by what `key` says; those of several stages at one place are
    one.
    """
    found: dict[str, dict[object, Call]] = {}
    for each in calls:
        if each.where == where:
            alike = found.setdefault(key(each), {})
            place = (each.value, each.op, each.whole)
            alike[place] = added(alike[place], each) if place in alike else each
    return {name: [*alike.values()] for name, alike in found.items()}


WIDTH, BOX, MADE, BACK = 1080, 118, 430, 691
"""The width; where ops begin, what comes out of them, and the calls of backward."""

STEP = 25
SHEET = 860
"""The height of which a sheet of paper takes a picture without much loss of size."""

CELLS = 8
"""The most parts that a shard is drawn in."""


def drawings(it: Model, colours: Mapping[str, int]) -> list[str]:
    """The pictures of a page: each stretch by itself, a long one in parts, so that paper has
    places to break.
    """
    parts = [part for each in it.stretches for part in _sheets(each)]
    said = [f"{each.dim or 'ops'} with their collectives" for each in parts]
    return [
        drawn(evolve(it, stretches=(part,)), colours, heads=not at).svg(said[at])
        for at, part in enumerate(parts)
    ]


def _sheets(it: Stretch) -> Iterator[Stretch]:
    """A stretch in parts of about one height, each legible on a sheet of paper."""
    feet = [*accumulate(map(_height, it.rows))]
    most = feet[-1] / ceil(feet[-1] / SHEET)
    for at, group in groupby(
        zip(it.rows, feet, strict=True), key=lambda each: ceil(each[1] / most - 1e-9)
    ):
        rows = tuple(row for row, _ in group)
        yield evolve(it, rows=rows, stages=it.stages if at == 1 else "; continued")


def _height(it: Row) -> int:
    return len(it.shards) * (STEP - 4) + STEP * max(bool(it.op) + len(it.calls), len(it.back))


def drawn(it: Model, colours: Mapping[str, int], *, heads: bool = True) -> Canvas:
    """The picture, with heads of columns; `colours` are the numbers of series of axes."""
    draw = _Drawing(colours)
    if heads:
        draw.heads()
    for stretch in it.stretches:
        draw.stretch(stretch)
    return draw.canvas


class _Drawing:
    def __init__(self, colours: Mapping[str, int]) -> None:
        self.canvas, self._colours, self._y, self._line = Canvas(WIDTH), colours, 1.0, ""

    def heads(self) -> None:
        """The heads of columns."""
        for x, text in (
            (0, "line"),
            (BOX, "forward ↓"),
            (MADE, "what comes out, on a rank"),
            (BACK, "backward ↑"),
        ):
            self.canvas.words(x, 12, text, "muted")
        self._y = 24

    def stretch(self, it: Stretch) -> None:
        """A stretch; layers are in a frame, with how many there are."""
        top = self._y
        if it.dim:
            self._y += 24
        for row in it.rows:
            self._row(row)
        if it.dim:
            self.canvas.box(BOX - 10, top + 2, WIDTH - BOX + 10, self._y - top, "edge", round=6)
            said = f"{it.dim} × {it.times:,}, drawn once{it.stages}"
            self.canvas.words(BOX, top + 18, said, "head")
        self._y += 10

    def _row(self, it: Row) -> None:
        if it.line != self._line:
            self.canvas.words(0, self._y + 15, _ending(it.line), "muted")
            self._line = it.line
        for shard in it.shards:
            self._shard(shard)
        top = self._y
        if it.op:
            self.canvas.box(BOX, top, MADE - BOX - 16, 20, "card", round=4)
            self.canvas.words(BOX + 8, top + 14, fit(it.op, MADE - BOX - 32))
            self.canvas.words(
                MADE, top + 14, fit(it.made, (BACK if it.back else WIDTH - 8) - MADE - 10), "muted"
            )
            self._y += STEP
        for call in it.calls:
            self._call(call, BOX, self._y, BACK - BOX - 14, f"{call.op}: {call.cost}, {call.links}")
            self._y += STEP
        for at, call in enumerate(it.back):
            self._call(call, BACK, top + at * STEP, WIDTH - BACK - 8, _short(call))
        self._y = max(self._y, top + len(it.back) * STEP)

    def _call(self, it: Call, x: float, y: float, width: float, text: str) -> None:
        """A bar in the colour of its axis."""
        colour = self._colours.get(it.axes[0], 7)
        self.canvas.box(x, y, width, 20, f"p{colour}", it.note, 10)
        self.canvas.words(x + 10, y + 14, fit(text, width - 16))

    def _shard(self, it: Shard) -> None:
        """A parameter: the part of a rank among those of the others, its dims, its size."""
        x, y, wide_, high = BOX + 8, self._y + 3, 30, 14
        cells = min(it.degree, CELLS)
        colour = self._colours.get(it.axes[0], 7) if it.axes else 7
        self.canvas.box(
            x,
            y,
            wide_,
            high,
            "blank",
            "one box: what a rank has of it" if it.axes else "whole on each rank",
            0,
        )
        part = (wide_, high / cells) if it.at < 0.5 else (wide_ / cells, high)
        self.canvas.box(x, y, *part, f"s{colour}", round=0)
        said = f"{it.name} {it.type}"
        self.canvas.words(x + 38, self._y + 14, said)
        more = f"{amount(it.bytes)} on a rank" + (
            f", state over {', '.join(it.state)}" if it.state else ""
        )
        self.canvas.words(max(MADE, x + 50 + wide(said)), self._y + 14, more, "muted")
        self._y += STEP - 4


def _ending(line: str) -> str:
    """A plan line whose number is whole."""
    most = int((BOX - 14) / LETTER)
    return line if len(line) <= most else f"…{line[1 - most :]}"


def _short(it: Call) -> str:
    """For instance `all_gather over tp: 560.0 GiB, 5.11 s`."""
    op = it.op.rpartition(", ")[0] if it.op.endswith("ranks") else it.op
    time = f", {seconds(it.seconds)}" if it.seconds is not None else ""
    return f"{op}{', recomputed' * it.recomputed}: {amount(it.sent)}{time}"
