"""The model as its ranks compute it: forward's ops, their parameters' shards, and each collective
at its place.

It is drawn with forward from top to bottom, backward's calls at its side, layers of a repeat once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from math import ceil

from attrs import evolve, frozen

from ...compiler.config.units import amount
from ...compiler.ir import ITEM_BYTES, PRECISIONS, Op, Program, Region, Stmt, Type, base
from ...compiler.ops import OPS
from ...compiler.reports.summary import factors
from ...compiler.reports.time import seconds
from ..drawing import LETTER, Canvas, fit, text_width
from .calls import Call, merge_calls

HIDDEN = ("pack", "unpack", "cast", "leaf", "begin", "wait")
"""Ops that move nothing between ranks and compute nothing that a model says."""


@frozen
class Shard:
    """A parameter's part on a rank: its dims with their axes, the axes that shard its state too,
    its bytes.
    """

    name: str
    type: str
    axes: tuple[str, ...]
    degree: int
    first_sharded_place: float
    """The place of the first sharded dim among the dims, from 0, rows, to 1, columns."""
    state: tuple[str, ...]
    bytes: int


@frozen
class Row:
    """An op, or a coercion, which is nothing but its calls.

    made   the type of the result, with dims and axes, sums that are pending as `pending over tp`
    calls  in forward, and `back` in backward at the same line
    """

    line: str
    op: str
    result_type: str
    shards: tuple[Shard, ...]
    calls: tuple[Call, ...]
    back: tuple[Call, ...]


@frozen
class Stretch:
    """Rows that run `times` times a microbatch, as layers of `dim`; once where `dim` is "".

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
    """The drawing's content: `calls`, and the calls of other ranks of a pipeline at places where
    `calls` has none.
    """
    merged: dict[object, Call] = {}
    for call in calls:
        if call.use in ("parameters", "gradients", "stages") and call.sent:
            _add(merged, (call.use, call.op, call.whole), call)
    state = tuple(merged.values())
    here = {(call.value, call.where) for call in calls}
    others: dict[Call, None] = {}
    for call in chain.from_iterable(ranks):
        if (call.value, call.where) not in here:
            others[call] = None
    rows = _Rows(program, [*calls, *others])
    # all rows have their calls before the calls without a row are shared out
    stretches = tuple(rows.stretches(program.forward.body, "", 1))
    complete: list[Stretch] = []
    for stretch in stretches:
        complete.append(evolve(stretch, rows=tuple(map(rows.with_others, stretch.rows))))
    return Model(tuple(complete), state)


def _add(calls: dict[object, Call], key: object, call: Call) -> None:
    """Adds a call to the alike one with this key, if there is one."""
    calls[key] = merge_calls(calls[key], call) if key in calls else call


class _Rows:
    def __init__(self, program: Program, calls: Sequence[Call]) -> None:
        self._program = program
        self._params = {param.name: param for param in program.params}
        self._shown: set[str] = set()
        activations = [call for call in calls if call.use == "activations"]
        self._forward = _by(activations, "forward", lambda call: call.value)
        self._back = _by(activations, "backward", lambda call: call.line)

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
        others = [other for other in pipeline.dims if other != dim]
        cut = f"; cut, with {', '.join(others)}, into" if others else "; cut into"
        if len(parts) > 4:
            return f"{cut} {len(parts)} stages"
        return f"{cut} stages of {', '.join(parts)}"

    def with_others(self, row: Row) -> Row:
        """A row with the calls of backward at its line that no row has yet, since no coercion of
        forward is there.
        """
        return evolve(row, back=(*row.back, *self._back.pop(row.line, ())))

    def _row(self, op: Op) -> Row | None:
        """The row of an op; None for an op that is not drawn."""
        calls: list[Call] = []
        for value in op.outputs:
            calls.extend(self._forward.pop(value.name, ()))
        if op.kind in HIDDEN and not calls:
            return None
        line, is_coercion = str(op.span), op.kind == "coerce"
        back: list[Call] = []
        if is_coercion or calls:
            back = self._back.pop(line, [])
        if is_coercion and not calls and not back:
            return None
        shards: list[Shard] = []
        for name in dict.fromkeys(map(base, op.inputs)):
            if name in self._params:
                shards.append(self._shard(name))
        result_type = self.type_words(op.outputs[0].type) if op.outputs else ""
        words = "" if is_coercion else self._op_words(op)
        return Row(line, words, result_type, tuple(shards), tuple(calls), tuple(back))

    def _op_words(self, op: Op) -> str:
        """For instance `v = contracts(a, wq, wk, wv)`; values without a name in the plan are
        `·`.
        """
        operands = ("·" if name.startswith("_") else base(name) for name in op.inputs)
        words = f"{OPS[op.kind].plan_name}({', '.join(operands)})"
        results: dict[str, None] = {}
        for value in op.outputs:
            if not value.name.startswith("_"):
                results[base(value.name)] = None
        if results:
            return f"{', '.join(results)} = {words}"
        return words

    def type_words(self, type: Type) -> str:
        """For instance `[seq/tp, batch/dp, hidden]`, and the axes that sums are pending over."""
        dims: list[str] = []
        for dim in type.dims:
            if axes := type.axes_of(dim):
                dims.append(f"{dim}/{'·'.join(self._plan_axes(axes))}")
            else:
                dims.append(dim)
        words = f"[{', '.join(dims)}]"
        pending = [axis for axis, place in type.places if place.kind.value == "P"]
        if pending:
            words += f" pending over {', '.join(self._plan_axes(pending))}"
        return words

    def _plan_axes(self, axes: Sequence[str]) -> list[str]:
        """The axes, with an axis of the plan in place of all of its factors."""
        names: dict[str, None] = {}
        for axis in axes:
            parent = self._program.axis(axis).parent
            has_all_factors = {*factors(self._program, parent)} <= {*axes}
            names[parent if has_all_factors else axis] = None
        return list(names)

    def _shard(self, name: str) -> Shard:
        program, param = self._program, self._params[name]
        type = param.type
        for dim in type.dims[: param.stacked]:
            type = type.inside(dim)
        axes: list[str] = []
        sharded_dims: list[int] = []
        for number, dim in enumerate(type.dims):
            if axes_of_dim := type.axes_of(dim):
                sharded_dims.append(number)
                axes.extend(axes_of_dim)
        place = 0.0
        if sharded_dims:
            place = sharded_dims[0] / max(len(type.dims) - 1, 1)
        state_axes: list[str] = []
        for bucket in program.buckets:
            if name in bucket.params:
                state_axes = self._plan_axes(bucket.shard_axes)
                break
        return Shard(
            name,
            self.type_words(type),
            tuple(self._plan_axes(axes)),
            program.degree(tuple(axes)),
            place,
            tuple(state_axes),
            program.elements(type) * ITEM_BYTES[PRECISIONS[program.train.precision]],
        )


def _by(calls: Sequence[Call], where: str, key: Callable[[Call], str]) -> dict[str, list[Call]]:
    """Calls of forward or backward by their `key`; the calls of several stages at one place are
    one.
    """
    calls_by_key: dict[str, dict[object, Call]] = {}
    for call in calls:
        if call.where == where:
            alike = calls_by_key.setdefault(key(call), {})
            _add(alike, (call.value, call.op, call.whole), call)
    return {name: [*alike.values()] for name, alike in calls_by_key.items()}


WIDTH, BOX, MADE, BACK = 1080, 118, 430, 691
"""The width; then the columns where ops begin, their results, and the calls of backward."""

STEP = 25
SHEET = 860
"""A sheet of paper takes a picture of this height without much loss of size."""

CELLS = 8
"""The most parts that a shard is drawn in."""


def drawings(model: Model, colours: Mapping[str, int]) -> list[str]:
    """The pictures of a page: each stretch by itself, a long one in parts, so that paper has
    places to break.
    """
    pictures: list[str] = []
    for part in chain.from_iterable(map(_sheets, model.stretches)):
        # the first picture alone has heads of columns
        canvas = draw_model(evolve(model, stretches=(part,)), colours, heads=not pictures)
        pictures.append(canvas.svg(f"{part.dim or 'ops'} with their collectives"))
    return pictures


def _sheets(stretch: Stretch) -> Iterator[Stretch]:
    """A stretch in parts of about one height, each legible on a sheet of paper."""
    feet = [*accumulate(map(_height, stretch.rows))]
    most = feet[-1] / ceil(feet[-1] / SHEET)
    sheets: dict[int, list[Row]] = {}
    for row, foot in zip(stretch.rows, feet, strict=True):
        sheets.setdefault(ceil(foot / most - 1e-9), []).append(row)
    for number, rows in sheets.items():
        stages = stretch.stages if number == 1 else "; continued"
        yield evolve(stretch, rows=tuple(rows), stages=stages)


def _height(row: Row) -> int:
    """The pixels that a row takes."""
    lines = max(bool(row.op) + len(row.calls), len(row.back))
    return len(row.shards) * (STEP - 4) + STEP * lines


def draw_model(model: Model, colours: Mapping[str, int], *, heads: bool = True) -> Canvas:
    """The picture, with heads of columns; `colours` are the numbers of series of axes."""
    draw = _Drawing(colours)
    if heads:
        draw.heads()
    for stretch in model.stretches:
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

    def stretch(self, stretch: Stretch) -> None:
        """Draws a stretch; layers are in a frame, with how many there are."""
        top = self._y
        if stretch.dim:
            self._y += 24
        for row in stretch.rows:
            self._row(row)
        if stretch.dim:
            self.canvas.box(BOX - 10, top + 2, WIDTH - BOX + 10, self._y - top, "edge", round=6)
            head = f"{stretch.dim} × {stretch.times:,}, drawn once{stretch.stages}"
            self.canvas.words(BOX, top + 18, head, "head")
        self._y += 10

    def _row(self, row: Row) -> None:
        if row.line != self._line:
            self.canvas.words(0, self._y + 15, _ending(row.line), "muted")
            self._line = row.line
        for shard in row.shards:
            self._shard(shard)
        top = self._y
        if row.op:
            self.canvas.box(BOX, top, MADE - BOX - 16, 20, "card", round=4)
            self.canvas.words(BOX + 8, top + 14, fit(row.op, MADE - BOX - 32))
            right = BACK if row.back else WIDTH - 8
            self.canvas.words(MADE, top + 14, fit(row.result_type, right - MADE - 10), "muted")
            self._y += STEP
        for call in row.calls:
            self._call(call, BOX, self._y, BACK - BOX - 14, f"{call.op}: {call.cost}, {call.links}")
            self._y += STEP
        for number, call in enumerate(row.back):
            self._call(call, BACK, top + number * STEP, WIDTH - BACK - 8, _short(call))
        self._y = max(self._y, top + len(row.back) * STEP)

    def _call(self, call: Call, x: float, y: float, width: float, text: str) -> None:
        """Draws a bar in the colour of the call's first axis."""
        colour = self._colours.get(call.axes[0], 7)
        self.canvas.box(x, y, width, 20, f"p{colour}", call.note, 10)
        self.canvas.words(x + 10, y + 14, fit(text, width - 16))

    def _shard(self, shard: Shard) -> None:
        """Draws a parameter: the part of a rank among the parts of all, its dims, its size."""
        x, y, width, height = BOX + 8, self._y + 3, 30, 14
        colour, note = 7, "whole on each rank"
        if shard.axes:
            colour = self._colours.get(shard.axes[0], 7)
            note = "one box: what a rank has of it"
        self.canvas.box(x, y, width, height, "blank", note, 0)
        # a part is some of the rows, or some of the columns
        cells = min(shard.degree, CELLS)
        part = (
            (width, height / cells) if shard.first_sharded_place < 0.5 else (width / cells, height)
        )
        self.canvas.box(x, y, *part, f"s{colour}", round=0)
        name = f"{shard.name} {shard.type}"
        self.canvas.words(x + 38, self._y + 14, name)
        size = f"{amount(shard.bytes)} on a rank"
        if shard.state:
            size += f", state over {', '.join(shard.state)}"
        self.canvas.words(max(MADE, x + 50 + text_width(name)), self._y + 14, size, "muted")
        self._y += STEP - 4


def _ending(line: str) -> str:
    """A plan line, cut at its beginning so that its number is whole."""
    most = int((BOX - 14) / LETTER)
    return line if len(line) <= most else f"…{line[1 - most :]}"


def _short(call: Call) -> str:
    """For instance `all_gather over tp: 560.0 GiB, 5.11 s`."""
    op = call.op
    if op.endswith("ranks"):
        op = op.rpartition(", ")[0]
    words = f"{op}{', recomputed' * call.is_recomputed}: {amount(call.sent)}"
    if call.seconds is not None:
        words += f", {seconds(call.seconds)}"
    return words
