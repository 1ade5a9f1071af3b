"""The ops of a step on one rank: seconds, operations and bytes over the whole step; and seconds
where each op runs.

The seconds where each op runs are a record of the walk of a step without a pipeline, with what the
GPU waits for.
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
from .seconds import get_message_seconds
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
    def all_seconds(self) -> dict[object, float]:
        """All seconds, by kind and by axes."""
        return {**self.computes, **self.sends}


def op_rows(program: Program, on: Hardware, rank: int | None = None) -> list[OpRow]:
    """The ops that take time, in the order of the program; of a pipeline, the ops of a rank along
    its axis.
    """
    return [row for row in _rows(program, on, rank) if row.count and (row.computes or row.sends)]


def _rows(program: Program, on: Hardware, rank: int | None) -> Iterator[OpRow]:
    if rank is None:
        yield from _Ops(program, on, program.types).rows_of_body(program.region.body, 1, "step", "")
        return
    assert program.pipeline, "op rows: a rank without a pipeline"
    yield from _around(program, program.pipeline, on, rank)
    microbatches = program.size(MICROBATCHES)
    for number in program.pipeline.stages_of(rank):
        stage = stage_programs(program)[number]
        types = {**program.types}
        for value in (*stage.forward.inputs, *stage.backward.inputs):
            types[value.name] = value.type
        ops = _Ops(stage.program, on, types)
        yield from ops.rows_of_body(stage.forward.body, microbatches, "forward", "")
        yield from ops.rows_of_body(stage.backward.body, microbatches, "backward", "")


def _around(program: Program, pipeline: Pipeline, on: Hardware, rank: int) -> Iterator[OpRow]:
    """The work of a pipeline's rank around its row, its chunks moved one by one."""
    moves = ChunkMoves(program, pipeline, rank)
    ops = _Ops(rank_programs(program)[rank], on, program.types)
    step_ops = list[Op]()
    for op in program.region.body:
        if isinstance(op, Op) and op not in moves.ops and _takes_part(program, op, rank):
            step_ops.append(op)
    yield from ops.rows_of_body(step_ops, 1, "step", "")
    for chunk, op in (*moves.gathers(), *moves.reductions()):
        sent = moves.messages(chunk, op)
        calls = list[tuple[tuple[str, ...], float]]()
        for message in sent:
            seconds = get_message_seconds(program, message, on, prod(message.shape))
            calls.append((message.axes, seconds))
        row = ops.row(op, 1, "step", "")
        yield evolve(row, computes={}, sends=_sums_by_axes(calls), sent=_bytes(sent))


def _takes_part(program: Program, op: Op, rank: int) -> bool:
    """Whether a rank of a pipeline's axis is in the groups of all messages of an op."""
    for message in messages(program, op, program.types):
        if message.among and rank not in message.among:
            return False
    return True


def _sums_by_axes(calls: Iterable[tuple[tuple[str, ...], float]]) -> dict[tuple[str, ...], float]:
    """Seconds by axes."""
    seconds_by_axes = dict[tuple[str, ...], float]()
    for axes, seconds in calls:
        seconds_by_axes[axes] = seconds_by_axes.get(axes, 0.0) + seconds
    return seconds_by_axes


def _bytes(sent: Iterable[Message]) -> int:
    size = 0
    for message in sent:
        size += prod(message.shape) * ITEM_BYTES[message.dtype] * (message.hops or 1)
    return size


class _Ops:
    """Makes the rows of one program's ops; `types` are the types of its values."""

    def __init__(self, program: Program, on: Hardware, types: Mapping[str, Type]) -> None:
        self._program, self._on, self._types = program, on, types
        self._prices = prices(program, on, types)

    def rows_of_body(
        self, body: Sequence[Stmt], times: int, where: str, repeat: str
    ) -> Iterator[OpRow]:
        """The rows of a body that runs `times` times in a step, in a repeat over this dim."""
        for stmt in body:
            if isinstance(stmt, Region):
                inside = stmt.kind if stmt.kind in ("forward", "backward") else where
                dim = stmt.dim if stmt.kind == "repeat" else repeat
                inner_times = times
                if stmt.dim:
                    inner_times *= self._program.size(stmt.dim)
                yield from self.rows_of_body(stmt.body, inner_times, inside, dim)
            elif stmt.kind != "begin":
                yield self.row(stmt, times, where, repeat)

    def row(self, op: Op, times: int, where: str, repeat: str) -> OpRow:
        """The row of an op that runs `times` times in a step."""
        price, sent = self._prices(op), messages(self._program, op, self._types)
        layers = prod(map(self._program.size, price.layers))
        calls = [layers * (message.hops or 1) for message in sent]
        types = tuple(self._types[name] for name in op.inputs)
        work = OPS[op.kind].work(Local(self._program, op, types))
        size = 0  # of what it reads and writes
        if price.computes:
            factors = sum(product.elements for product in work.products)
            size = work.bytes + factors * ITEM_BYTES.get(work.dtype, 0)
        computes: dict[str, float] = {}
        for kind, seconds in price.computes:
            computes[UPDATE if where == "step" else kind] = times * seconds
        sends = list[tuple[tuple[str, ...], float]]()
        for (axes, seconds), count in zip(price.sends, calls, strict=True):
            sends.append((axes, times * count * seconds))
        return OpRow(
            op.kind,
            _name(op),
            price.line,
            where,
            repeat,
            times,
            computes,
            _sums_by_axes(sends),
            issued=times * (price.kernels * self._on.op + sum(calls) * self._on.collective),
            operations=times * work.operations,
            bytes=times * size,
            sent=times * _bytes(sent),
        )


@frozen
class Pace:
    """The seconds that the host takes to issue a layer, forward and backward, and that the GPU
    takes to compute it.

    layers  the dim of the repeat that takes most; "" for a whole microbatch of a model without
            repeats
    """

    layers: str
    issues: float
    computes: float


def pace(program: Program, rows: Sequence[OpRow], rank: int | None = None) -> Pace:
    """The pace of a step, of these rows."""
    spent = dict[str, tuple[float, float]]()
    for row in rows:
        if row.where != "step":
            issues, computes = spent.get(row.layers, (0.0, 0.0))
            spent[row.layers] = issues + row.issued, computes + sum(row.computes.values())
    most = max(spent, key=lambda dim: (bool(dim), spent[dim][1]))
    times = program.size(MICROBATCHES)
    if most:
        rank_program = program if rank is None else rank_programs(program)[rank]
        times *= rank_program.size(most)
    issues, computes = spent[most]
    return Pace(most, issues / times, computes / times)


@frozen
class OpSeconds:
    """Seconds of a microbatch, of all that is done once a step, and of each op by the name of its
    first result.

    The seconds of an op of a microbatch are of one iteration of its repeats.
    """

    microbatch: float
    once: float
    ops: Mapping[str, float]


def op_seconds(program: Program, on: Hardware) -> OpSeconds:
    """The seconds of the ops of a program after the last pass that has no pipeline."""
    from statistics import median

    watch = _Stopwatch(program, on, prices(program, on))
    watch.step()
    seconds_by_op = {name: median(seconds) for name, seconds in watch.took.items()}
    once = 0.0
    for stmt in program.region.body:
        if isinstance(stmt, Op):
            once += seconds_by_op.get(_name(stmt), 0.0)
    microbatch = (watch.clocks.gpu - once) / program.size(MICROBATCHES)
    return OpSeconds(microbatch, once, seconds_by_op)


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
        """Waits, and notes the time.

        A wait of an op that runs is a part of it; a wait for a layer's parameters is noted as the
        gather's.
        """
        before = self.clocks.gpu
        super()._await(op, end)
        if not self._runs:
            self._note(op, before)

    def _note(self, op: Op, before: float) -> None:
        self.took.setdefault(_name(op), []).append(self.clocks.gpu - before)


def _name(op: Op) -> str:
    return op.outputs[0].name if op.outputs else ""
