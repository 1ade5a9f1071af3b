"""The timeline of a step on one rank: a walk of its IR over streams, of the GPU, of each group of ranks, of the host.

An op begins when the host has issued it, the GPU is free and its values are there.  A collective begins where the
program begins it: a gather of parameters ahead of its layer, the reduction of a gradient as soon as that is made, any
other where it stands, and the GPU waits for it there.  Iterations are walked until one is like the one before; the
rest are counted.  Non-goals: other ranks, which are taken to be as fast.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod

from attrs import define, field, frozen

from ...ir import MICROBATCHES, Op, Program, Region, Stmt, Type, ops_in, walk
from ...ops import OPS, messages
from ...ops.experts import begins
from ...ops.saved_tensors import Local
from .hardware import Hardware
from .seconds import of_message, of_work

EXPOSED = "exposed: "
"""Before the axes of collectives, the kind of time in which the GPU waits for them."""

HOST, UPDATE = "host", "update"
"""The kinds of time in which the GPU waits for the host, and of what is done once a step."""

Seconds = defaultdict[tuple[str, ...], float]
"""Seconds by kind and line of the plan, or by the axes of a group."""


def nothing() -> Seconds:
    """No seconds yet."""
    return Seconds(float)


def add(to: Seconds, seconds: Mapping[tuple[str, ...], float], times: int = 1) -> None:
    """Adds seconds, `times` times."""
    for key, each in seconds.items():
        to[key] += each * times


@define
class Clocks:
    """By when each stream is free, in seconds from the step's begin, and for how long each was busy with what.

    groups  by the axes of a group of ranks, its collectives
    spent   the GPU's time, by kind and line
    sent    that of groups, by axes
    """

    gpu: float = 0.0
    host: float = 0.0
    groups: Seconds = field(factory=nothing)
    spent: Seconds = field(factory=nothing)
    sent: Seconds = field(factory=nothing)

    def until(self, time: float, kind: str, line: str) -> None:
        """The GPU is busy, or waits."""
        if time > self.gpu:
            self.spent[kind, line] += time - self.gpu
            self.gpu = time

    def ahead(self) -> tuple[float, ...]:
        """How far streams are ahead of the GPU: two iterations that leave the same are alike."""
        return tuple(max(0.0, round(time - self.gpu, 12)) for time in (self.host, *self.groups.values()))

    def copy(self) -> "Clocks":
        """As they are now."""
        return Clocks(self.gpu, self.host, *(Seconds(float, it) for it in (self.groups, self.spent, self.sent)))

    def repeat(self, before: "Clocks", times: int) -> None:
        """As if what has happened since `before` happened `times` times more."""
        self.gpu += (self.gpu - before.gpu) * times
        self.host += (self.host - before.host) * times
        for now, then in ((self.groups, before.groups), (self.spent, before.spent), (self.sent, before.sent)):
            add(now, {key: now[key] - then[key] for key in now}, times)


@frozen
class _Timed:
    """An op: what it sends, by axes and seconds; whom the GPU then waits for; what it computes, by kind."""

    sends: tuple[tuple[tuple[str, ...], float], ...]
    waiting: str
    computes: tuple[tuple[str, float], ...]
    kernels: int
    reduces: bool
    gathers: bool


class Walk:
    """Walks the step of a program without a pipeline, or parts of one stage; `types` are those of all values."""

    def __init__(self, program: Program, on: Hardware, types: Mapping[str, Type] | None = None) -> None:
        self.clocks = Clocks()
        self._program, self._on, self._types = program, on, types or program.types
        self._flats = {bucket.dim for bucket in program.buckets}
        self._known = dict[int, _Timed]()
        self._first, self._last = True, False
        self._reduced = 0.0  # when all reductions are done that have begun
        self._under_way = dict[str, tuple[Op, float]]()  # by value, the exchange that brings it, and when it has
        self._gathered = dict[str, list[float]]()  # by dim of layers, when each has its parameters in the first forward
        body = program.region.body
        begun = {str(op.get("bucket")) for op in walk(body) if op.kind == "begin"}
        sums = (op for op in body if isinstance(op, Op) and self._timed(op).reduces)
        self._begins = [(op, bucket) for op in sums if (bucket := self._bucket(op)) in begun]

    def step(self, *, microbatches: bool = True) -> None:
        """The whole step, or all but its microbatches."""
        begun = {op.outputs[0].name for op, _ in self._begins} if microbatches else set[str]()
        for stmt in self._program.region.body:
            if isinstance(stmt, Region):
                if microbatches:
                    self._iterate(self._program.size(MICROBATCHES), lambda at, of=stmt: self._microbatch(of, at))
            elif stmt.outputs and stmt.outputs[0].name in begun:
                self._await(stmt, self._reduced)
            elif (layers := self._layers(stmt)) and self._timed(stmt).gathers:
                ends = [self._begin(stmt) for _ in range(prod(map(self._program.size, layers)))]
                known = self._gathered.get(layers[-1], ends)
                self._gathered[layers[-1]] = [*map(max, zip(ends, known, strict=True))]
            else:
                self._op(stmt, UPDATE)

    def body(self, body: Sequence[Stmt]) -> None:
        """Ops and repeats, one after the other."""
        for stmt in body:
            if isinstance(stmt, Op):
                self._op(stmt)
            elif stmt.kind == "repeat":
                self._repeat(stmt)
            else:
                self.body(stmt.body)

    # ---- loops

    def _iterate(self, count: int, do: Callable[[int], None]) -> None:
        """Iterations; once two are alike, those up to the last are counted, not done."""
        at, took, ahead = 0, 0.0, ()
        while at < count:
            before = self.clocks.copy()
            do(at)
            at += 1
            like, now = (took, ahead), (self.clocks.gpu - before.gpu, self.clocks.ahead())
            if abs(like[0] - now[0]) < 1e-12 and like[1] == now[1] and at < count - 1:
                self.clocks.repeat(before, count - 1 - at)
                at = count - 1
            took, ahead = now

    def _microbatch(self, region: Region, at: int) -> None:
        self._first, self._last = at == 0, at == self._program.size(MICROBATCHES) - 1
        self.body(region.body)

    def _repeat(self, region: Region) -> None:
        count, gathers = self._program.size(region.dim), [op for op in ops_in(region.body) if self._gathers_layer(op)]
        body, ready = [stmt for stmt in region.body if stmt not in gathers], list[float]()
        gathered = self._gathered.get(region.dim, []) if self._first else []

        def layer(at: int) -> None:
            while len(ready) < min(at + 1 + self._program.flow.prefetch, count):
                ready.append(max(map(self._begin, gathers), default=0.0))
            for op in gathers[-1:]:
                self._await(op, ready[at])
            if gathered:
                self.clocks.until(gathered[at], f"{EXPOSED}parameters", str(region.span))
            self.body(body)

        def alike(at: int) -> None:
            self.body(body)

        if gathers or gathered:
            for at in range(count):
                layer(at)
        else:
            self._iterate(count, alike)

    # ---- ops

    def _op(self, op: Op, kind: str = "") -> None:
        """An op where it stands; `kind` in place of its own, but for waiting."""
        if op.kind == "begin":
            bucket = op.get("bucket")
            for each in [it for it, of in self._begins if of == bucket] if self._last else ():
                self._reduced = max(self._reduced, self._begin(each))
            return
        it, clocks = self._timed(op), self.clocks
        if it.sends:
            end = self._begin(op)
            if it.reduces and self._bucket(op) and not kind:
                self._reduced = max(self._reduced, end)
            elif begins(op):
                self._under_way[op.outputs[0].name] = op, end
            else:
                self._await(op, end)
        if op.inputs and op.inputs[0] in self._under_way:
            self._await(*self._under_way.pop(op.inputs[0]))
        if it.kernels:
            clocks.until(clocks.host, HOST, str(op.span))
            clocks.host += it.kernels * self._on.op
        for own, seconds in it.computes:
            clocks.until(clocks.gpu + seconds, kind or own, str(op.span))

    def _begin(self, op: Op) -> float:
        """Begins all that an op sends, for one layer; when it is done."""
        clocks = self.clocks
        end = clocks.gpu
        for axes, seconds in self._timed(op).sends:
            clocks.host += self._on.collective
            end = max(clocks.host, clocks.gpu, clocks.groups[axes]) + seconds
            clocks.groups[axes] = end
            clocks.sent[axes] += seconds
        return end

    def _await(self, op: Op, end: float) -> None:
        self.clocks.until(end, self._timed(op).waiting, str(op.span))

    def _timed(self, op: Op) -> _Timed:
        if id(op) not in self._known:
            self._known[id(op)] = self._time(op)
        return self._known[id(op)]

    def _time(self, op: Op) -> _Timed:
        program, entry, types = self._program, OPS[op.kind], tuple(self._types[name] for name in op.inputs)
        sent, layers = messages(program, op, self._types), len(self._layers(op))
        sends = tuple((it.axes, of_message(program, it, self._on, prod(it.shape[layers:]))) for it in sent)
        axes = dict.fromkeys(chain.from_iterable(it.axes for it in sent))
        local = Local(program, op, types, (True,) * len(types), "cuda")
        work = None if entry.views(program, op) else entry.work(local)
        return _Timed(
            sends,
            EXPOSED + " × ".join(axes),
            tuple(of_work(work, self._on).items()) if work else (),
            work.kernels if work else 0,
            any(it.op in ("all_reduce", "reduce_scatter") and not it.maximum for it in sent),
            any(it.op == "all_gather" for it in sent),
        )

    def _bucket(self, op: Op) -> str:
        """The bucket whose flat buffer an op takes, "" for none."""
        last = "".join(self._types[op.inputs[0]].dims[-1:]) if op.inputs else ""
        return next((it.name for it in self._program.buckets if it.dim == last), "") if last in self._flats else ""

    def _layers(self, op: Op) -> tuple[str, ...]:
        """The dims of the layers whose flat buffers an op takes as a stack, and sends one by one."""
        return self._types[op.inputs[0]].dims[:-1] if self._bucket(op) else ()

    def _gathers_layer(self, op: Op) -> bool:
        return bool(self._bucket(op)) and self._timed(op).gathers
