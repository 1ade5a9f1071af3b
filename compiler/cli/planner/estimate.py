"""Seconds and bytes of all choices of a space in closed form, from their cells: good for
ranking, not for reporting.
"""

from collections.abc import Mapping
from functools import reduce
from math import prod

import numpy as np
from attrs import evolve, frozen

from ...analysis.time.collectives import larger, smaller
from ...analysis.time.seconds import of_message
from ...ir import ITEM_BYTES, PRECISIONS, Axis, Param
from ...ops import Message
from .choice import AXES
from .facts import Facts, Goal
from .space import SCHEDULES, Column, Space, where

GATHERED = 2
"""Layers whose parameters are there besides those that are gathered ahead: one that computes,
one that is freed.
"""


@frozen
class State:
    """A rank's part of a model's state; elements are those on one rank before state is shared.

    layers   of its layers at most
    layer    elements of a layer, but for experts; routed: those of experts
    outer    elements outside of layers
    shares   the ranks that share a layer; routed_shares: that share experts
    bytes    parameters, gradients, masters and the optimizer's own
    """

    layers: Column
    layer: Column
    routed: Column
    outer: Column
    shares: Column
    routed_shares: Column
    bytes: Column

    @property
    def own(self) -> Column:
        """The elements that a rank has, whether it updates them or not."""
        return self.layers * (self.layer + self.routed) + self.outer


def state(facts: Facts, of: Mapping[str, Column]) -> State:
    """The state of all choices of a space."""
    params, routed = facts.program.params, {*facts.program.choices}
    stacked = [it for it in params if it.stacked]
    layer = (
        sum(_elements(facts, it, of) for it in stacked if not routed & {*it.type.dims})
        / facts.layers
    )
    experts = (
        sum(_elements(facts, it, of) for it in stacked if routed & {*it.type.dims}) / facts.layers
        + 0 * of["tp"]
    )
    outside = [_elements(facts, it, of) for it in params if not it.stacked]
    outer = where(of["pp"] == 1, sum(outside), reduce(larger, outside, 0))
    layers = -(-facts.layers // (of["pp"] * of["chunks"])) * of["chunks"]
    shares, few = of["dp"] * of["cp"] * of["ep"], of["dp"] * of["cp"]
    held = _held(facts, of, layers * layer, outer, shares) + _held(
        facts, of, layers * experts, 0, few
    )
    ahead = (of["zero"] == 3) * (GATHERED + of["prefetch"]) * (layer + experts) * _item(facts)
    return State(layers, layer, experts, outer, shares, few, held + ahead)


def _elements(facts: Facts, param: Param, of: Mapping[str, Column]) -> Column:
    """Elements of a parameter of all layers, on one rank."""
    size = facts.program.size
    whole = prod(size(dim) for dim in param.type.dims)
    if {*param.type.dims} & {*facts.program.choices}:
        return whole / (of["ep"] * where(of["fold"], of["tp"], 1))
    split = [dim for dim in param.type.dims if dim in facts.tensor_dims]
    return whole / smaller(of["tp"], size(split[0])) if split else whole + 0 * of["tp"]


def _item(facts: Facts) -> int:
    return ITEM_BYTES[PRECISIONS[facts.program.train.precision]]


def wide_item(facts: Facts) -> int:
    """Bytes of an element of masters and gradients."""
    train = facts.program.train
    return max(_item(facts), 4) if train.master is None else ITEM_BYTES[PRECISIONS[train.master]]


def _held(
    facts: Facts, of: Mapping[str, Column], inner: Column, outer: Column, shares: Column
) -> Column:
    """Bytes of elements in layers and outside; these are whole in all stages of ZeRO but for
    what the optimizer has.
    """
    train, item, wide = facts.program.train, _item(facts), wide_item(facts)
    optimizer = wide * (len(train.optimizer.slots) + (item < wide))
    by = [where(of["zero"] >= stage, shares, 1) for stage in (1, 2, 3)]
    layers = inner * (item / by[2] + wide / by[1] + optimizer / by[0])
    return layers + outer * (item + wide + optimizer / by[0])


def is_kind(of: Mapping[str, Column], *names: str) -> Column:
    """Whether the schedule is one of these."""
    return np.isin(of["schedule"], [SCHEDULES.index(name) for name in names])


DATA = ("dp", "cp", "ep")
"""The axes over which gradients are reduced."""

SPLIT = ("zb_h1", "interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that put off gradients of weights."""

UPDATED = 7
"""How many times an update reads or writes an element of the masters' type: norm, gradient,
master, two averages.
"""


@frozen
class Estimate:
    """By choice: seconds of a step, and bytes of the rank that needs most."""

    seconds: Column
    bytes: Column


def estimate(facts: Facts, goal: Goal, found: Space, cells: Mapping[str, Column]) -> Estimate:
    """The estimates of a space whose cells are columns by the fields of `Cell`."""
    return _Estimate(facts, goal, found, cells).made()


def fill(goal: Goal, of: Mapping[str, Column]) -> Column:
    """At least how much longer a pipeline takes than its busiest rank."""
    count = goal.global_batch // (of["microbatch"] * of["dp"] * of["ep"])
    later = where(is_kind(of, *SPLIT), 0, smaller(count, of["pp"]) - 1) / of["chunks"]
    return (larger(count, of["pp"]) + later) / count


class _Estimate:
    def __init__(self, facts: Facts, goal: Goal, found: Space, cells: Mapping[str, Column]) -> None:
        self._facts, self._goal, self._of, self._cell = facts, goal, found.columns, cells
        span = facts.program.region.span
        axes = tuple(Axis(name, found.columns[name], name, span=span) for name in AXES)
        self._program = evolve(facts.program, axes=axes)
        self._state: State = state(facts, found.columns)
        self._count = goal.global_batch // (
            found.columns["microbatch"] * found.columns["dp"] * found.columns["ep"]
        )

    def made(self) -> Estimate:
        seconds = where(self._of["pp"] == 1, self._without_stages(), self._in_stages())
        return Estimate(seconds + self._update(), self._bytes())

    # ---- seconds

    def _without_stages(self) -> Column:
        cell, zero, layers = self._cell, self._of["zero"], self._facts.layers
        reduce, gather = self._reduce(self._state.layer, self._state.routed), self._gather()
        adds = cell["adds"] / where(zero >= 2, self._state.shares, 1)
        forward = where(zero == 3, larger(cell["forward"], gather), cell["forward"])
        moved = where(zero == 3, gather, 0) + where(zero >= 2, reduce, 0)
        backward = larger(cell["backward"] + adds, moved)
        once = self._count * (layers * (forward + backward) + cell["first"] + cell["last"])
        late = where(zero < 2, larger(layers * (reduce - backward), 0), 0) + reduce
        early = where((zero == 1) | (zero == 2), larger(layers * (gather - forward), 0) + gather, 0)
        return once + late + early + self._outside()

    def _in_stages(self) -> Column:
        of, cell, pp, chunks = self._of, self._cell, self._of["pp"], self._of["chunks"]
        layer = cell["forward"] + cell["backward"] + cell["adds"]
        even = (self._facts.layers * layer + cell["first"] + cell["last"]) / pp
        busy = larger(self._state.layers * layer, even)
        weights = self._state.layers * cell["weights"]
        gap = where(is_kind(of, *SPLIT), larger(busy - 2 * weights, 0), busy) / chunks
        first, later = larger(self._count, pp), smaller(self._count, pp) - 1
        send = of_message(
            self._program,
            Message("rotate", "", ("pp",), "f32", ()),
            self._goal.hardware,
            cell["crossing"] / 4,
        )
        moved = self._state.layers * (
            self._reduce(self._state.layer, self._state.routed) + self._gather() * (of["zero"] > 0)
        )
        return (
            first * busy
            + later * gap
            + (2 * (pp * chunks - 1) + self._count) * send
            + moved
            + self._outside()
        )

    def _reduce(self, dense: Column, routed: Column) -> Column:
        """Seconds to reduce gradients over the axes of data: all of them, or scattered."""
        whole, parts = (self._send(op, dense, routed) for op in ("all_reduce", "reduce_scatter"))
        return where(self._of["zero"] == 0, whole, parts)

    def _gather(self) -> Column:
        """Seconds to gather a layer's parameters."""
        return self._send("all_gather", self._state.layer, self._state.routed)

    def _send(self, op: str, dense: Column, routed: Column) -> Column:
        """Seconds of a collective over the axes of data, of experts over those that do not have
        them.
        """
        found = 0.0
        item = "bf16" if op == "all_gather" else "f32" if wide_item(self._facts) == 4 else "f64"
        for axes, elements in ((DATA, dense), (DATA[:2], routed)):
            ranks = self._state.shares if axes == DATA else self._state.routed_shares
            own = elements / ranks if op == "all_gather" else elements
            found = found + (elements > 0) * of_message(
                self._program, Message(op, "", axes, item, ()), self._goal.hardware, own
            )
        return found * (self._state.shares > 1)

    def _outside(self) -> Column:
        """Seconds of parameters outside of layers, which nothing hides."""
        outer, none = self._state.outer, 0 * self._state.outer
        return self._reduce(outer, none) + (self._of["zero"] > 0) * self._send(
            "all_gather", outer, none
        )

    def _update(self) -> Column:
        kept = self._state.own / where(self._of["zero"] > 0, self._state.shares, 1)
        return UPDATED * wide_item(self._facts) * kept / self._goal.hardware.memory_rate

    # ---- bytes

    def _bytes(self) -> Column:
        of, cell, pp, chunks = self._of, self._cell, self._of["pp"], self._of["chunks"]
        more = where(is_kind(of, "interleaved_1f1b"), (pp - 1) / chunks, is_kind(of, "dualpipev"))
        held = self._state.layers * (pp + more)
        held = smaller(held, self._count * self._state.layers)
        kept = where(is_kind(of, *SPLIT[:-1]), larger(cell["kept"], cell["later"]), cell["kept"])
        return self._state.bytes + kept * held + cell["other"] + cell["always"] + cell["reserve"]
