"""The model as its ranks compute it: forward's ops, their parameters' shards, and each collective at its place.

Non-goals: how it is drawn (`model_svg`).
"""

from collections.abc import Callable, Iterator, Sequence

from attrs import evolve, frozen

from ...ir import ITEM_BYTES, PRECISIONS, Op, Program, Region, Stmt, Type, base
from ...ops import OPS
from ..summary import factors
from .calls import Call, added

HIDDEN = ("pack", "unpack", "cast", "leaf", "begin", "wait")
"""Ops that move nothing between ranks and compute nothing that a model says."""


@frozen
class Shard:
    """A parameter's part on a rank: dims with their axes, those that shard its state besides, bytes of it."""

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
    """The drawing's content: `calls`, and those of other ranks of a pipeline at places where these have none."""
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
    return Model(tuple(evolve(it, rows=tuple(map(rows.with_others, it.rows))) for it in stretches), state)


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
                yield from self.stretches(stmt.body, stmt.dim or "", times * self._program.size(stmt.dim))
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
        return f"{cut} stages of {', '.join(parts)}" if len(parts) <= 4 else f"{cut} {len(parts)} stages"

    def with_others(self, row: Row) -> Row:
        """With calls of backward at its line which no row has yet, as no coercion of forward is there."""
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
        shards = tuple(self._shard(name) for name in dict.fromkeys(map(base, op.inputs)) if name in self._params)
        made = "; ".join(dict.fromkeys(self.typed(value.type) for value in op.outputs[:1]))
        return Row(line, "" if op.kind == "coerce" else self._said(op), made, shards, calls, back)

    def _said(self, op: Op) -> str:
        """For instance `v = contracts(a, wq, wk, wv)`; values without a name in the plan are `·`."""
        named = dict.fromkeys(base(value.name) for value in op.outputs if not value.name.startswith("_"))
        operands = ("·" if name.startswith("_") else base(name) for name in op.inputs)
        made = f"{', '.join(named)} = " if named else ""
        return f"{made}{OPS[op.kind].plan_name}({', '.join(operands)})"

    def typed(self, type: Type) -> str:
        """For instance `[seq/tp, batch/dp, hidden]`, with what is pending."""
        dims = ", ".join(
            f"{dim}/{'·'.join(self._named(axes))}" if (axes := type.axes_of(dim)) else dim for dim in type.dims
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
    """Calls of forward or backward by what `key` says; those of several stages at one place are one."""
    found: dict[str, dict[object, Call]] = {}
    for each in calls:
        if each.where == where:
            alike = found.setdefault(key(each), {})
            place = (each.value, each.op, each.whole)
            alike[place] = added(alike[place], each) if place in alike else each
    return {name: [*alike.values()] for name, alike in found.items()}
