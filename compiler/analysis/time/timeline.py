"""The timeline of a step on one rank: a walk of its IR over streams, of the GPU, of each group of
ranks, of the host.

An op begins when the host has issued it, the GPU is free and its values are there.  A collective
begins where the program begins it: a gather of parameters ahead of its layer, the reduction of a
gradient as soon as the gradient is made, any other at its place, and the GPU waits for it there.
Iterations are walked until one is like the one before; the rest are counted.  Non-goals: other
ranks, which are taken to be as fast.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from ...ir import MICROBATCHES, Op, Program, Region, Stmt, ops_in, walk
from ...ops.protocol import begins
from ..hardware import Hardware
from .clocks import HOST, UPDATE, Clocks
from .prices import Price, Prices, Sent

COUNTED = 6
"""The host's work on counts of experts' rows that it has waited for, in ops that it issues: 37 us
of CPU time (benchmarks/routes.py), where an op takes 6."""


def seconds_of(program: Program, on: Hardware, prices: Prices, body: Sequence[Stmt]) -> float:
    """Seconds of ops and repeats alone."""
    walk = Walk(program, on, prices)
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
        self._begins = list[Op]()  # the reductions that begin in each layer
        if begun:
            for op in body:
                if isinstance(op, Op) and prices(op).reduces and prices(op).bucket in begun:
                    self._begins.append(op)

    def step(self) -> None:
        """Does the whole step."""
        begun = {op.outputs[0].name for op in self._begins}
        for stmt in self._program.region.body:
            if isinstance(stmt, Region):
                count = self._program.size(MICROBATCHES)
                self._iterate(count, partial(self._microbatch, stmt), deque())
            elif stmt.outputs and stmt.outputs[0].name in begun:
                self._await(stmt, self._reduced)
            elif self._prices(stmt).layers and self._prices(stmt).gathers:
                self._gather(stmt, self._prices(stmt))
            else:
                self._op(stmt, UPDATE)

    def _gather(self, op: Op, price: Price) -> None:
        """Begins to gather the parameters of each layer of a stack."""
        count = prod(map(self._program.size, price.layers))
        ends = [(self._begin(op), price.waiting) for _ in range(count)]
        earlier = self._gathered.get(price.layers, ends)
        self._gathered[price.layers] = [*map(max, zip(ends, earlier, strict=True))]

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
        """Does iterations; once they are steady, the iterations before the last `ends` are counted,
        not done.

        `under_way` has the times when what they have begun for later ones is there.
        """
        number, took = 0, list[float]()
        while number < count:
            before, then, events = self.clocks.copy(), [*under_way], len(self.clocks.events or ())
            do(number)
            number += 1
            earlier, took = took, self.clocks.since(before)
            progress = took[0]  # of the GPU
            took += [now - was for now, was in zip(under_way, then, strict=False)]
            if number < count - ends and self.clocks.is_steady(took, earlier):
                times = count - ends - number
                self.clocks.repeat(before, times, events)
                for _ in range(len(under_way)):
                    under_way.append(under_way.popleft() + times * progress)
                number += times

    def _microbatch(self, region: Region, number: int) -> None:
        self._first, self._last = number == 0, number == self._program.size(MICROBATCHES) - 1
        self.body(region.body)

    def _repeat(self, region: Region) -> None:
        """Does layers: each gathers its parameters `prefetch` layers ahead, or waits for what the
        step has gathered.
        """
        count, prefetch = self._program.size(region.dim), self._program.flow.prefetch
        gathers = list[Op]()
        for op in ops_in(region.body):
            if self._prices(op).bucket and self._prices(op).gathers:
                gathers.append(op)
        body, ready = [stmt for stmt in region.body if stmt not in gathers], deque[float]()
        outside, line = (self._around, self._at), str(region.span)
        dims, first_layer = (*self._around, region.dim), self._at * count
        gathered = list[tuple[float, str]]()
        if self._first:
            gathered = self._gathered.get(dims, [])[first_layer:]

        def do_layer(number: int) -> None:
            self._around, self._at = dims, first_layer + number
            while gathers and len(ready) < min(1 + prefetch, count - number):
                ready.append(max(map(self._begin, gathers)))
            for op in gathers[-1:]:
                self._await(op, ready.popleft())
            if gathered:
                self.clocks.until(*gathered[number], line)
            self.body(body)

        self._iterate(count, do_layer, ready, count if gathered else 1 + prefetch)
        self._around, self._at = outside

    # ---- ops

    def _op(self, op: Op, kind: str = "") -> None:
        """Does an op at its place; `kind` in place of its own, but for waiting."""
        if op.kind == "begin":
            if self._last:
                for reduction in self._begins:
                    if self._prices(reduction).bucket == op.get("bucket"):
                        self._reduce(reduction)
            return
        price = self._prices(op)
        if price.blocks > 1:
            return self._ring(op, price)
        if price.reduces and price.bucket and not kind:
            self._reduce(op)
        elif price.sends:
            end = self._begin(op)
            if begins(op):
                self._under_way[op.outputs[0].name] = op, end
            else:
                self._await(op, end)
        if op.inputs and op.inputs[0] in self._under_way:
            self._await(*self._under_way.pop(op.inputs[0]))
        self._compute(price, kind)
        if price.counts:
            # nothing is issued ahead: all that is queued has to be done first
            self.clocks.host = max(self.clocks.host, self.clocks.gpu)
            self._issue(COUNTED * self._on.op, price.line)

    def _ring(self, op: Op, price: Price) -> None:
        """Does attention to its own keys while the next ones come, then to these; gradients of keys
        follow them around.

        As `runtime.ops.ring_attention` does it: a hop of gradients begins when a block is done,
        beside the next block.  The hop that brings them to the rank of their keys begins after the
        last block, beside nothing.
        """
        keys, gradients, last = price.sends[0], price.sends[1:], int(price.blocks) - 1
        passed = self.clocks.gpu
        for block in range(last + 1):
            arrived = 0.0
            if block < last:
                arrived = self.send(keys, price.sending, price.line)
            self._compute(price, part=(1 - price.own_part) / last if block else price.own_part)
            if gradients:
                self._await(op, passed)
                passed = self.send(gradients[block == last], price.sending, price.line)
            self._await(op, arrived)
        self._await(op, passed)

    def _compute(self, price: Price, kind: str = "", part: float = 1.0) -> None:
        """Does a part of what an op computes."""
        clocks = self.clocks
        if price.kernels:
            clocks.until(clocks.host, HOST, price.line)
            self._issue(price.kernels * self._on.op * part, price.line)
        for own_kind, seconds in price.computes:
            clocks.until(clocks.gpu + self._beside(seconds * part), kind or own_kind, price.line)

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
        """Begins all that an op sends, for one layer, once the values are there at `due`; returns
        when it is done.
        """
        price, end = self._prices(op), self.clocks.gpu
        for call in price.sends:
            end = max(end, self.send(call, price.sending, price.line, due))
        return end

    def send(self, call: Sent, kind: str, line: str, due: float = 0.0) -> float:
        """Begins a collective; returns when it is done."""
        self._issue(self._on.collective, line)
        return self.clocks.send(*call, kind, line, due)

    def _await(self, op: Op, end: float) -> None:
        price = self._prices(op)
        self.clocks.until(end, price.waiting, price.line)
