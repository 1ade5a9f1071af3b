"""The time of a step with all that follows from it, as `explain time` prints it and `plan.json`
has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict, evolve, frozen

from ...ir import PRECISIONS, Program
from ..hardware import KERNELS, Hardware, Measured
from ..memory import account, capacity, need_range
from . import operations
from .clocks import StepTime
from .op_rows import OpRow, Pace, op_rows, pace
from .prices import EXPOSED
from .step import step_time, times_by_load

FULL = 0.9
"""Where more than this part of a GPU's memory is in use, steps run slower than any account says."""

COMPUTED = ("products", "attention", "memory-bound")
"""The kinds of time that a rank computes for the model."""


@frozen
class Room:
    """The bytes that a rank needs, the bytes of its GPU (None where they are not known), and the
    ends of the need's range.
    """

    needs: int
    capacity: int | None
    ends: tuple[int, int] | None = None

    @property
    def fits(self) -> bool:
        """Whether they are known to be enough."""
        return self.capacity is not None and self.needs <= self.capacity

    @property
    def lacks(self) -> bool:
        """Whether they are known to be too few."""
        return self.capacity is not None and self.needs > self.capacity

    @property
    def close_to_full(self) -> bool:
        """Whether memory is so full that the time cannot be told."""
        return self.capacity is not None and self.needs > FULL * self.capacity


@frozen
class Neighbour:
    """Another plan, with these sections over its own; `told` says in short how it differs."""

    sections: Mapping[str, str]
    words: str
    seconds: float
    room: Room


@frozen
class Report:
    """The time of a step of a program after the last pass.

    needed      operations that the model needs, on a rank
    done        operations that a rank does
    peak        operations a second that the GPU is able to do, in the element type of the plan
    loads       by name, the seconds of the step at other loads of experts; none where all ranks get
                the same
    ops         the step's ops, in the program's order; none where they were not asked for
    measured    the part of the seconds of all ops that comes from measured ones, not from formulas
    neighbours  other plans that are worth a look, the fastest first; None where none was looked for
    """

    program: Program
    on: Hardware
    step: StepTime
    ranks: int
    needed: float
    done: int
    peak: float
    room: Room
    loads: Mapping[str, float]
    ops: tuple[OpRow, ...] = ()
    measured: float = 0.0
    neighbours: tuple[Neighbour, ...] | None = None

    @property
    def tokens(self) -> float:
        """Tokens a second and GPU."""
        train = self.program.train
        return train.global_batch * train.seq / self.ranks / self.step.seconds

    @property
    def per_token(self) -> int:
        """The operations that the model needs for a token."""
        train = self.program.train
        return round(self.needed * self.ranks / (train.global_batch * train.seq))

    @property
    def mfu(self) -> float:
        """The part of the peak that does what the model needs."""
        return self.needed / (self.peak * self.step.seconds)

    @property
    def hfu(self) -> float:
        """The part of the peak that does anything."""
        return self.done / (self.peak * self.step.seconds)

    @property
    def sends_by_axes(self) -> dict[str, tuple[float, float]]:
        """By axes, the seconds of all collectives over them, and the seconds that the GPU waits
        for them.
        """
        sent = {" × ".join(axes): seconds for axes, seconds in self.step.sent.items()}
        waited: dict[str, float] = {}
        for kind, seconds in self.step.kinds.items():
            if kind.startswith(EXPOSED):
                waited[kind.removeprefix(EXPOSED)] = seconds
        return {axes: (sent.get(axes, 0.0), waited.get(axes, 0.0)) for axes in (sent | waited)}

    @property
    def compute_seconds(self) -> float:
        """The seconds that a rank computes for the model: communication can hide behind them."""
        return sum(self.step.kinds.get(kind, 0.0) for kind in COMPUTED)

    @property
    def ratios(self) -> dict[str, float]:
        """By axes, the seconds of computation for each second of collectives over them."""
        ratios: dict[str, float] = {}
        for axes, (seconds, _) in self.sends_by_axes.items():
            if seconds:
                ratios[axes] = self.compute_seconds / seconds
        return ratios

    @property
    def pace(self) -> Pace:
        """How fast the host issues what the GPU computes."""
        return pace(self.program, self.ops, self.step.rank)

    def get_rate_part(self, kind: str) -> float | None:
        """The part of the GPU's rate that ops of a kind hold, of operations or of bytes; None where
        none are known.

        Memory-bound ops count only if they do nothing else.
        """
        rows = [row for row in self.ops if kind in row.computes]
        if kind in ("products", "attention"):
            done, rate = sum(row.operations for row in rows), self.peak
        else:
            rows = [row for row in rows if len(row.computes) == 1]
            done, rate = sum(row.bytes for row in rows), self.on.memory
        seconds = sum(row.computes[kind] for row in rows)
        if not seconds:
            return None
        return done / (seconds * rate)


def with_ops(report: Report) -> Report:
    """The report with the step's ops."""
    ops = tuple(op_rows(report.program, report.on, report.step.rank))
    return evolve(report, ops=ops, measured=_get_measured_part(report, ops))


def _get_measured_part(report: Report, ops: Sequence[OpRow]) -> float:
    """The part of the seconds of ops that comes from the hardware file's own measurements, not from
    formulas or published rates.
    """
    published = tuple(row for row in report.on.measured.attention if row.kernel in KERNELS)
    shipped = Measured(attention=published)
    if report.on.measured == shipped:
        return 0.0
    hardware = evolve(report.on, measured=shipped)
    formulas = op_rows(report.program, hardware, report.step.rank)
    measured = total = 0.0
    for row, formula_row in zip(ops, formulas, strict=True):
        by_formula = formula_row.all_seconds
        for key, seconds in row.all_seconds.items():
            total += seconds
            if seconds != by_formula[key]:
                measured += seconds
    return measured / total


def report(program: Program, on: Hardware, *, by_load: bool = True) -> Report:
    """The time of a step of a program after the last pass; `by_load` at other loads of experts
    too.
    """
    loads: dict[str, float] = {}
    if by_load:
        loads = {name: time.seconds for name, time in times_by_load(program, on).items()}
    return Report(
        program,
        on,
        step_time(program, on),
        program.ranks,
        operations.needed(program) / program.ranks,
        operations.done(program),
        on.peak_rate(PRECISIONS[program.train.precision]),
        room(program),
        loads,
    )


def room(program: Program) -> Room:
    """The memory of a rank of a program after the last pass."""
    counted = account(program)
    needs = need_range(program, counted)
    return Room(counted.needs, capacity(program), (needs.low, needs.high))


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values: seconds, bytes, operations of one rank; docs/time.md says
    what each is.
    """
    fields: dict[str, Any] = {
        "gpu": report.on.name,
        "ranks": report.ranks,
        "source": report.on.source,
        "error": report.on.error,
        "seconds": report.step.seconds,
        "tokens_per_second_per_gpu": report.tokens,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "operations": {"needed": report.needed, "done": report.done, "peak": report.peak},
        "memory": _memory(report.room),
    }
    if report.loads:
        fields["loads"] = report.loads
    fields["rank"] = report.step.rank
    fields["kinds"] = report.step.kinds
    fields["lines"] = list[dict[str, Any]]()
    for (kind, line), seconds in sorted(report.step.spent.items(), key=lambda pair: -pair[1]):
        fields["lines"].append({"kind": kind, "line": line, "seconds": seconds})
    fields["collectives"] = list[dict[str, Any]]()
    for axes, (seconds, exposed) in report.sends_by_axes.items():
        fields["collectives"].append({"axes": axes, "seconds": seconds, "exposed": exposed})
    if report.ops:
        fields |= _make_ops_fields(report)
    if report.neighbours is not None:
        fields["neighbours"] = [_neighbour(report, other) for other in report.neighbours]
    return fields


def _make_ops_fields(report: Report) -> dict[str, Any]:
    """The part of the GPU's rates that is held, the pace of the host, and each op."""
    pace, kinds = report.pace, report.step.kinds
    rate_parts: dict[str, float] = {}
    for kind in kinds:
        part = report.get_rate_part(kind)
        if part is not None:
            rate_parts[kind] = part
    return {
        "measured": report.measured,
        "limited_by": max(kinds, key=lambda kind: kinds[kind]),
        "held": rate_parts,
        "host": {"layers": pace.layers, "issues": pace.issues, "computes": pace.computes},
        "ops": [_op(row) for row in report.ops],
    }


def _op(row: OpRow) -> dict[str, Any]:
    sends = {" × ".join(axes): seconds for axes, seconds in row.sends.items()}
    return asdict(row) | {"sends": sends}


def _memory(room: Room) -> dict[str, Any]:
    return {
        "needs": room.needs,
        "capacity": room.capacity,
        "fits": room.fits,
        "close_to_full": room.close_to_full,
    }


def _neighbour(report: Report, other: Neighbour) -> dict[str, Any]:
    return {
        "changes": other.sections,
        "seconds": other.seconds,
        "gain": 1 - other.seconds / report.step.seconds,
        "memory": _memory(other.room),
    }


BLOCK, MOVED, OPS = 1 << 20, 13, 4
"""Bytes that are hashed at a time, bytes moved for each of them, and ops: each word of 4 bytes
meets two keys of 8.
"""

LIMIT_OPS = 25
"""Ops that compute the limit on a loss from the losses before."""


@frozen
class Look:
    """A look as the plan asks for it, its seconds, and the steps between two."""

    words: str
    seconds: float
    every: int

    @property
    def of_a_step(self) -> float:
        """Seconds of a step, on the average."""
        return self.seconds / self.every


def looks(program: Program, step: float, on: Hardware) -> Iterator[Look]:
    """The looks that cost anything; `step` is the seconds of a step."""
    watch, counted = program.watch, account(program)
    if watch.copies:
        at_rest = sum(bucket.saved for bucket in counted.buckets)
        seconds = _get_hash_seconds(2 * at_rest + counted.state, on)
        yield Look(f"copies every {watch.copies}", seconds, watch.copies)
    if watch.replay:
        seconds = step + _get_hash_seconds(2 * counted.state, on)
        yield Look(f"replay every {watch.replay}", seconds, watch.replay)
    if watch.spikes:
        yield Look(f"spikes = {watch.spikes}", LIMIT_OPS * max(on.op, on.kernel), 1)


def _get_hash_seconds(size: int, on: Hardware) -> float:
    """Seconds that hashing `size` bytes takes."""
    return max(MOVED * size / (on.memory * on.streamed), OPS * size / BLOCK * max(on.op, on.kernel))
