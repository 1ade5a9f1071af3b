"""The ops of a step on one rank: seconds, operations and bytes over the whole step; and seconds
where each op runs.

The latter are the walk of a step without a pipeline, written down, with what the GPU waits for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from attrs import evolve, frozen

from ...ir import ITEM_BYTES, MICROBATCHES, Op, Pipeline, Program, Region, Stmt, Type
from ...ops import OPS, Message, messages
from ...ops.saved_tensors import Local
from ..communication import ChunkMoves
from ..hardware import Hardware
from ..stage_program import rank_programs, stage_programs
from .prices import Prices, prices
from .seconds import of_message
from .timeline import UPDATE, Walk


@frozen
class OpRow:
    """An op: how often it runs in a step, and the sums over these runs.

    where       `forward`, `backward` or `step`
    layers      the dim of the innermost repeat around it, "" for none
    computes    seconds on the GPU, by kind
    sends       seconds on links, by axes
    issued      seconds that the host takes
    operations  multiplications and additions of products and attention
    bytes       read and written in memory, by products too
    sent        bytes that go into collectives
    """

    kind: str
    name: str
    line: str
    where: str
    layers: str
    count: int
    computes: Mapping[str, float]
    sends: Mapping[tuple[str, ...], float]
    issued: float
    operations: int
    bytes: int
    sent: int

    @property
    def taken(self) -> dict[object, float]:
        """All seconds, by kind and by axes."""
        return {**self.computes, **self.sends}


def op_rows(program: Program, on: Hardware, rank: int | None = None) -> list[OpRow]:
    """The ops in the order of the program that take time; of a pipeline, those of a rank along
    its axis.
    """
    return [row for row in _rows(program, on, rank) if row.count and (row.computes or row.sends)]


def _rows(program: Program, on: Hardware, rank: int | None) -> Iterator[OpRow]:
    if rank is None:
        yield from _Ops(program, on, program.types).of(program.region.body, 1, "step", "")
        return
    assert program.pipeline, "op rows: a rank without a pipeline"
    yield from _around(program, program.pipeline, on, rank)
    for number in program.pipeline.stages_of(rank):
        stage = stage_programs(program)[number]
        received = {
            value.name: value.type for value in (*stage.forward.inputs, *stage.backward.inputs)
        }
        ops, times = (
            _Ops(stage.program, on, {**program.types, **received}),
            program.size(MICROBATCHES),
        )
        yield from ops.of(stage.forward.body, times, "forward", "")
        yield from ops.of(stage.backward.body, times, "backward", "")


def _around(program: Program, pipeline: Pipeline, on: Hardware, rank: int) -> Iterator[OpRow]:
    """The work of a pipeline's rank around its row, its chunks moved one by one."""
    moves, ops = (
        ChunkMoves(program, pipeline, rank),
        _Ops(rank_programs(program)[rank], on, program.types),
    )
    around = [op for op in program.region.body if isinstance(op, Op) and op not in moves.ops]
    among = {op: [it.among for it in messages(program, op, program.types)] for op in around}
    yield from ops.of(
        [op for op in around if all(not it or rank in it for it in among[op])], 1, "step", ""
    )
    for chunk, op in (*moves.gathers(), *moves.reductions()):
        sent = moves.messages(chunk, op)
        calls = [(it.axes, of_message(program, it, on, prod(it.shape))) for it in sent]
        yield evolve(
            ops.row(op, 1, "step", ""), computes={}, sends=_summed(calls), sent=_bytes(sent)
        )


def _summed(calls: Iterable[tuple[tuple[str, ...], float]]) -> dict[tuple[str, ...], float]:
    """Seconds by axes."""
    found = dict[tuple[str, ...], float]()
    for axes, seconds in calls:
        found[axes] = found.get(axes, 0.0) + seconds
    return found


def _bytes(sent: Iterable[Message]) -> int:
    return sum(prod(it.shape) * ITEM_BYTES[it.dtype] * (it.hops or 1) for it in sent)


class _Ops:
    """Makes the rows of one program's ops; `types` are those of its values."""

    def __init__(self, program: Program, on: Hardware, types: Mapping[str, Type]) -> None:
        self._program, self._on, self._types, self._prices = (
            program,
            on,
            types,
            prices(program, on, types),
        )

    def of(self, body: Sequence[Stmt], times: int, where: str, repeat: str) -> Iterator[OpRow]:
        """The rows of a body that runs so often, in a repeat over this dim."""
        for stmt in body:
            if isinstance(stmt, Region):
                inside = stmt.kind if stmt.kind in ("forward", "backward") else where
                dim = stmt.dim if stmt.kind == "repeat" else repeat
                yield from self.of(
                    stmt.body,
                    times * (self._program.size(stmt.dim) if stmt.dim else 1),
                    inside,
                    dim,
                )
            elif stmt.kind != "begin":
                yield self.row(stmt, times, where, repeat)

    def row(self, op: Op, times: int, where: str, repeat: str) -> OpRow:
        """The row of an op that runs so often."""
        price, sent = self._prices(op), messages(self._program, op, self._types)
        layers = prod(map(self._program.size, price.layers))
        calls = [layers * (it.hops or 1) for it in sent]
        work = OPS[op.kind].work(
            Local(self._program, op, tuple(self._types[name] for name in op.inputs))
        )
        factors = sum(each.elements for each in work.products) * ITEM_BYTES.get(work.dtype, 0)
        sends = (
            (axes, times * each * seconds)
            for (axes, seconds), each in zip(price.sends, calls, strict=True)
        )
        return OpRow(
            op.kind,
            op.outputs[0].name if op.outputs else "",
            price.line,
            where,
            repeat,
            times,
            {
                UPDATE if where == "step" else kind: times * seconds
                for kind, seconds in price.computes
            },
            _summed(sends),
            times * (price.kernels * self._on.op + sum(calls) * self._on.collective),
            times * work.operations,
            times * (work.bytes + factors) if price.computes else 0,
            times * _bytes(sent),
        )


@frozen
class Pace:
    """The seconds in which the host issues a layer, forward and backward, and in which the GPU
    computes it.

    layers  the dim of the repeat that takes most; "" for a whole microbatch of a model without
            repeats
    """

    layers: str
    issues: float
    computes: float


def pace(program: Program, rows: Sequence[OpRow], rank: int | None = None) -> Pace:
    """The pace of a step, of these rows."""
    spent = dict[str, list[float]]()
    for row in rows:
        if row.where != "step":
            issues, computes = spent.get(row.layers, [0.0, 0.0])
            spent[row.layers] = [issues + row.issued, computes + sum(row.computes.values())]
    most = max(spent, key=lambda dim: (bool(dim), spent[dim][1]))
    own = program if rank is None else rank_programs(program)[rank]
    times = program.size(MICROBATCHES) * (own.size(most) if most else 1)
    return Pace(most, *(seconds / times for seconds in spent[most]))


@frozen
class OpSeconds:
    """Seconds of a microbatch, of all that is done once a step, and of each op by the name of its
    first result.

    The ops of a microbatch are those of one iteration of their repeats.
    """

    microbatch: float
    once: float
    ops: Mapping[str, float]


def op_seconds(program: Program, on: Hardware) -> OpSeconds:
    """The seconds of the ops of a program after the last pass that has no pipeline."""
    from statistics import median

    watch = _Stopwatch(program, on, prices(program, on))
    watch.step()
    took = {name: median(each) for name, each in watch.took.items()}
    once = sum(
        took[_name(stmt)]
        for stmt in program.region.body
        if isinstance(stmt, Op) and _name(stmt) in took
    )
    return OpSeconds((watch.clocks.gpu - once) / program.size(MICROBATCHES), once, took)


class _Stopwatch(Walk):
    """A walk that notes by how much each op moves the GPU's clock on."""

    def __init__(self, program: Program, on: Hardware, prices: Prices) -> None:
        super().__init__(program, on, prices)
        self.took: dict[str, list[float]] = {}
        self._runs = False

    def _op(self, op: Op, kind: str = "") -> None:
        before, self._runs = self.clocks.gpu, True
        super()._op(op, kind)
        self._runs = False
        self._note(op, before)

    def _await(self, op: Op, end: float) -> None:
        """A wait of an op that runs is a part of it; one for a layer's parameters is noted as
        the gather's.
        """
        before = self.clocks.gpu
        super()._await(op, end)
        if not self._runs:
            self._note(op, before)

    def _note(self, op: Op, before: float) -> None:
        self.took.setdefault(_name(op), []).append(self.clocks.gpu - before)


def _name(op: Op) -> str:
    return op.outputs[0].name if op.outputs else ""
