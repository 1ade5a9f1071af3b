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
"""The part of a GPU's memory from which on steps run slower than any account of them says."""

COMPUTED = ("products", "attention", "memory-bound")
"""The kinds of time in which a rank computes for the model."""


@frozen
class Room:
    """The bytes that a rank needs, those of its GPU, None where not known, and the ends of the
    need's range.
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
    told: str
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
        return (
            self.program.train.global_batch
            * self.program.train.seq
            / self.ranks
            / self.step.seconds
        )

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
    def sent(self) -> dict[str, tuple[float, float]]:
        """By axes, the seconds of all collectives over them, and those in which the GPU waits
        for them.
        """
        sent = {" × ".join(axes): seconds for axes, seconds in self.step.sent.items()}
        kinds = self.step.kinds
        waited = {
            kind.removeprefix(EXPOSED): kinds[kind] for kind in kinds if kind.startswith(EXPOSED)
        }
        return {axes: (sent.get(axes, 0.0), waited.get(axes, 0.0)) for axes in (sent | waited)}

    @property
    def computed(self) -> float:
        """The seconds in which a rank computes for the model: what communication can hide
        behind.
        """
        return sum(self.step.kinds.get(kind, 0.0) for kind in COMPUTED)

    @property
    def ratios(self) -> dict[str, float]:
        """By axes, the seconds of computation for each second of collectives over them."""
        return {
            axes: self.computed / seconds for axes, (seconds, _) in self.sent.items() if seconds
        }

    @property
    def pace(self) -> Pace:
        """How fast the host issues what the GPU computes."""
        return pace(self.program, self.ops, self.step.rank)

    def held(self, kind: str) -> float | None:
        """The part of the GPU's rate that ops of a kind hold, of operations or of bytes; None where
        none are known.

        The memory-bound ops that count are those which do nothing else.
        """
        rows, is_counted = (
            [row for row in self.ops if kind in row.computes],
            kind in ("products", "attention"),
        )
        rows = rows if is_counted else [row for row in rows if len(row.computes) == 1]
        done = sum(row.operations if is_counted else row.bytes for row in rows)
        seconds = sum(row.computes[kind] for row in rows)
        return done / (seconds * (self.peak if is_counted else self.on.memory)) if seconds else None


def with_ops(it: Report) -> Report:
    """The report with the step's ops."""
    ops = tuple(op_rows(it.program, it.on, it.step.rank))
    return evolve(it, ops=ops, measured=_measured(it, ops))


def _measured(it: Report, ops: Sequence[OpRow]) -> float:
    """The part of the seconds of ops that come from figures of one's own, not from formulas or
    published rates.
    """
    published = tuple(row for row in it.on.measured.attention if row.kernel in KERNELS)
    shipped = Measured(attention=published)
    if it.on.measured == shipped:
        return 0.0
    formulas = op_rows(it.program, evolve(it.on, measured=shipped), it.step.rank)
    pairs = [(row.taken, other.taken) for row, other in zip(ops, formulas, strict=True)]
    own = sum(
        seconds for row, other in pairs for key, seconds in row.items() if seconds != other[key]
    )
    return own / sum(seconds for row, _ in pairs for seconds in row.values())


def report(program: Program, on: Hardware, *, by_load: bool = True) -> Report:
    """The time of a step of a program after the last pass; `by_load` at other loads of experts
    too.
    """
    loads = times_by_load(program, on) if by_load else {}
    return Report(
        program,
        on,
        step_time(program, on),
        program.ranks,
        operations.needed(program) / program.ranks,
        operations.done(program),
        on.peak_rate(PRECISIONS[program.train.precision]),
        room(program),
        {name: it.seconds for name, it in loads.items()},
    )


def room(program: Program) -> Room:
    """The memory of a rank of a program after the last pass."""
    found = account(program)
    of = need_range(program, found)
    return Room(found.needs, capacity(program), (of.low, of.high))


def as_json(it: Report) -> dict[str, Any]:
    """The report as plain values: seconds, bytes, operations of one rank; docs/time.md says
    what each is.
    """
    spent = sorted(it.step.spent.items(), key=lambda pair: -pair[1])
    return {
        "gpu": it.on.name,
        "ranks": it.ranks,
        "source": it.on.source,
        "error": it.on.error,
        "seconds": it.step.seconds,
        "tokens_per_second_per_gpu": it.tokens,
        "mfu": it.mfu,
        "hfu": it.hfu,
        "operations": {"needed": it.needed, "done": it.done, "peak": it.peak},
        "memory": _memory(it.room),
        **({"loads": it.loads} if it.loads else {}),
        "rank": it.step.rank,
        "kinds": it.step.kinds,
        "lines": [
            {"kind": kind, "line": line, "seconds": seconds} for (kind, line), seconds in spent
        ],
        "collectives": [
            {"axes": axes, "seconds": seconds, "exposed": exposed}
            for axes, (seconds, exposed) in it.sent.items()
        ],
        **(_of_ops(it) if it.ops else {}),
        **(
            {}
            if it.neighbours is None
            else {"neighbours": [_neighbour(it, each) for each in it.neighbours]}
        ),
    }


def _of_ops(it: Report) -> dict[str, Any]:
    """The part of the GPU's rates that is held, the pace of the host, and each op."""
    pace, held = it.pace, {kind: it.held(kind) for kind in it.step.kinds}
    return {
        "measured": it.measured,
        "limited_by": max(it.step.kinds, key=lambda kind: it.step.kinds[kind]),
        "held": {kind: part for kind, part in held.items() if part is not None},
        "host": {"layers": pace.layers, "issues": pace.issues, "computes": pace.computes},
        "ops": [_op(row) for row in it.ops],
    }


def _op(row: OpRow) -> dict[str, Any]:
    return asdict(row) | {
        "sends": {" × ".join(axes): seconds for axes, seconds in row.sends.items()}
    }


def _memory(room: Room) -> dict[str, Any]:
    return {
        "needs": room.needs,
        "capacity": room.capacity,
        "fits": room.fits,
        "close_to_full": room.close_to_full,
    }


def _neighbour(it: Report, other: Neighbour) -> dict[str, Any]:
    return {
        "changes": other.sections,
        "seconds": other.seconds,
        "gain": 1 - other.seconds / it.step.seconds,
        "memory": _memory(other.room),
    }


BLOCK, MOVED, OPS = 1 << 20, 13, 4
"""Bytes that are hashed at a time, bytes moved for each of them, and ops: each word of 4 bytes
meets two keys of 8.
"""

LIMIT_OPS = 25
"""Ops by which the limit on a loss is made of the losses before."""


@frozen
class Look:
    """A look as the plan asks for it, its seconds, and the steps between two."""

    said: str
    seconds: float
    every: int

    @property
    def of_a_step(self) -> float:
        """Seconds of a step, on the average."""
        return self.seconds / self.every


def looks(program: Program, step: float, on: Hardware) -> Iterator[Look]:
    """The looks that cost anything; `step` is the seconds of a step."""
    asked, it = program.watch, account(program)
    if asked.copies:
        at_rest = sum(bucket.saved for bucket in it.buckets)
        yield Look(
            f"copies every {asked.copies}", _hashed(2 * at_rest + it.state, on), asked.copies
        )
    if asked.replay:
        yield Look(f"replay every {asked.replay}", step + _hashed(2 * it.state, on), asked.replay)
    if asked.spikes:
        yield Look(f"spikes = {asked.spikes}", LIMIT_OPS * max(on.op, on.kernel), 1)


def _hashed(size: int, on: Hardware) -> float:
    """Seconds in which as many bytes are hashed."""
    return max(MOVED * size / (on.memory * on.streamed), OPS * size / BLOCK * max(on.op, on.kernel))
