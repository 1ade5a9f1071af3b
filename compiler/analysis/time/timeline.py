"""The timeline of a step on one rank: a walk of its IR over streams, of the GPU, of each group of
ranks, of the host.

An op begins when the host has issued it, the GPU is free and its values are there.  A collective
begins where the program begins it: a gather of parameters ahead of its layer, the reduction of a
gradient as soon as that is made, any other at its place, and the GPU waits for it there.
Iterations are walked until one is like the one before; the rest are counted.  Non-goals: other
ranks, which are taken to be as fast.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from ...ir import MICROBATCHES, Op, Program, Region, Stmt, ops_in, walk
from ...ops.experts import begins
from ..hardware import Hardware
from .clocks import HOST, UPDATE, Clocks
from .prices import Price, Prices, Sent

COUNTED = 6
"""The host's work on counts of experts' rows that it has waited for, in ops that it issues: 37 us
of CPU time (benchmarks/routes.py), of which an op takes 6."""


def seconds_of(program: Program, on: Hardware, of: Prices, body: Sequence[Stmt]) -> float:
    """Seconds of ops and repeats alone."""
    walk = Walk(program, on, of)
    walk.body(body)
    return walk.clocks.gpu


class Walk:
    """Walks the step of a program without a pipeline, or parts of one stage."""

    def __init__(
        self, program: Program, on: Hardware, prices: Prices, record: bool = False
    ) -> None:
        self.clocks = Clocks(events=[] if record else None)
        self._program, self._on, self._prices = program, on, prices
        self._first, self._last = True, False
        self._reduced = 0.0  # when all reductions are done that have begun
        self._sums = dict[str, float]()  # by value, when a reduction has made it
        # by value, the exchange that brings it, and when it has
        self._under_way = dict[str, tuple[Op, float]]()
        # By dims of layers, when each has its parameters, and the kind of waiting for them.
        self._gathered = dict[tuple[str, ...], list[tuple[float, str]]]()
        # the dims of the repeats around, and which of their layers it is
        self._around, self._at = tuple[str, ...](), 0
        body = program.region.body
        begun = {str(op.get("bucket")) for op in walk(body) if op.kind == "begin"}
        ops = (op for op in body if begun and isinstance(op, Op))
        self._begins = [op for op in ops if prices(op).reduces and prices(op).bucket in begun]

    def step(self) -> None:
        """The whole step."""
        begun = {op.outputs[0].name for op in self._begins}
        for stmt in self._program.region.body:
            if isinstance(stmt, Region):
                self._iterate(
                    self._program.size(MICROBATCHES), partial(self._microbatch, stmt), deque()
                )
            elif stmt.outputs and stmt.outputs[0].name in begun:
                self._await(stmt, self._reduced)
            elif (layers := self._prices(stmt).layers) and self._prices(stmt).gathers:
                count, waiting = prod(map(self._program.size, layers)), self._prices(stmt).waiting
                ends = [(self._begin(stmt), waiting) for _ in range(count)]
                known = self._gathered.get(layers, ends)
                self._gathered[layers] = [*map(max, zip(ends, known, strict=True))]
            else:
                self._op(stmt, UPDATE)

    def update(self, ops: Sequence[Op]) -> None:
        """Ops that are done once a step."""
        for op in ops:
            self._op(op, UPDATE)

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

    def _iterate(
        self, count: int, do: Callable[[int], None], under_way: deque[float], ends: int = 1
    ) -> None:
        """Iterations; once they are steady, those up to the last `ends` are counted, not done.

        `under_way` are the times by which what they have begun for later ones is there.
        """
        at, took = 0, list[float]()
        while at < count:
            before, then, events = self.clocks.copy(), [*under_way], len(self.clocks.events or ())
            do(at)
            at += 1
            progress = self.clocks.since(before)
            earlier, took = (
                took,
                progress + [now - was for now, was in zip(under_way, then, strict=False)],
            )
            if at < count - ends and self.clocks.is_steady(took, earlier):
                times = count - ends - at
                self.clocks.repeat(before, times, events)
                under_way.extend(
                    [under_way.popleft() + times * progress[0] for _ in range(len(under_way))]
                )
                at += times

    def _microbatch(self, region: Region, at: int) -> None:
        self._first, self._last = at == 0, at == self._program.size(MICROBATCHES) - 1
        self.body(region.body)

    def _repeat(self, region: Region) -> None:
        """Layers: each gathers its parameters `prefetch` layers ahead, or waits for what the
        step has gathered.
        """
        count, prefetch = self._program.size(region.dim), self._program.flow.prefetch
        gathers = [
            op for op in ops_in(region.body) if self._prices(op).bucket and self._prices(op).gathers
        ]
        body, ready = [stmt for stmt in region.body if stmt not in gathers], deque[float]()
        outside, dims, line = (
            (self._around, self._at),
            (*self._around, region.dim),
            str(region.span),
        )
        gathered = self._gathered.get(dims, [])[self._at * count :] if self._first else []

        def layer(at: int) -> None:
            self._around, self._at = dims, outside[1] * count + at
            while gathers and len(ready) < min(1 + prefetch, count - at):
                ready.append(max(map(self._begin, gathers)))
            for op in gathers[-1:]:
                self._await(op, ready.popleft())
            if gathered:
                self.clocks.until(*gathered[at], line)
            self.body(body)

        self._iterate(count, layer, ready, count if gathered else 1 + prefetch)
        self._around, self._at = outside

    # ---- ops

    def _op(self, op: Op, kind: str = "") -> None:
        """An op at its place; `kind` in place of its own, but for waiting."""
        if op.kind == "begin":
            bucket = op.get("bucket")
            for each in (
                [it for it in self._begins if self._prices(it).bucket == bucket]
                if self._last
                else ()
            ):
                self._reduce(each)
            return
        it = self._prices(op)
        if it.blocks > 1:
            return self._ring(op, it)
        if it.reduces and it.bucket and not kind:
            self._reduce(op)
        elif it.sends:
            end = self._begin(op)
            if begins(op):
                self._under_way[op.outputs[0].name] = op, end
            else:
                self._await(op, end)
        if op.inputs and op.inputs[0] in self._under_way:
            self._await(*self._under_way.pop(op.inputs[0]))
        self._compute(it, kind)
        if it.counts:
            # nothing is issued ahead: all that is queued has to be done first
            self.clocks.host = max(self.clocks.host, self.clocks.gpu)
            self._issue(COUNTED * self._on.op, it.line)

    def _ring(self, op: Op, it: Price) -> None:
        """Attention to its own keys while the next ones come, then to these; gradients of keys
        follow them around.

        As `runtime.ops.ring_attention` does it: a hop of gradients begins when a block is done,
        beside the next block, and the hop that brings them to the rank of their keys after the last
        one, beside nothing.
        """
        keys, gradients, last = it.sends[0], it.sends[1:], int(it.blocks) - 1
        passed = self.clocks.gpu
        for block in range(last + 1):
            arrived = 0.0 if block == last else self.send(keys, it.sending, it.line)
            self._compute(it, part=(1 - it.own) / last if block else it.own)
            if gradients:
                self._await(op, passed)
                passed = self.send(gradients[block == last], it.sending, it.line)
            self._await(op, arrived)
        self._await(op, passed)

    def _compute(self, it: Price, kind: str = "", part: float = 1.0) -> None:
        """A part of what an op computes."""
        clocks = self.clocks
        if it.kernels:
            clocks.until(clocks.host, HOST, it.line)
            self._issue(it.kernels * self._on.op * part, it.line)
        for own, seconds in it.computes:
            clocks.until(clocks.gpu + self._beside(seconds * part), kind or own, it.line)

    def _issue(self, seconds: float, line: str) -> None:
        """The host issues something: ahead of the GPU, unless it computes itself."""
        clocks = self.clocks
        if self._on.synchronous:
            clocks.host = clocks.gpu
        clocks.issue(seconds, line)
        if self._on.synchronous:
            clocks.until(clocks.host, HOST, line)

    def _beside(self, seconds: float) -> float:
        """The seconds of computing beside what is sent meanwhile."""
        lost, clocks = self._on.contention, self.clocks
        if not lost or not clocks.groups:
            return seconds
        busy = max(max(clocks.groups.values()) - clocks.gpu, 0.0)
        return seconds + min(seconds * lost / (1 - lost), lost * busy)

    def _reduce(self, op: Op) -> None:
        """Begins to reduce a gradient, over some axes after others."""
        end = self._sums[op.outputs[0].name] = self._begin(op, self._sums.get(op.inputs[0], 0.0))
        self._reduced = max(self._reduced, end)

    def _begin(self, op: Op, due: float = 0.0) -> float:
        """Begins all that an op sends, for one layer, once that is there; when it is done."""
        price, end = self._prices(op), self.clocks.gpu
        for each in price.sends:
            end = max(end, self.send(each, price.sending, price.line, due))
        return end

    def send(self, call: Sent, kind: str, line: str, due: float = 0.0) -> float:
        """Begins a collective; when it is done."""
        self._issue(self._on.collective, line)
        return self.clocks.send(*call, kind, line, due)

    def _await(self, op: Op, end: float) -> None:
        price = self._prices(op)
        self.clocks.until(end, price.waiting, price.line)
