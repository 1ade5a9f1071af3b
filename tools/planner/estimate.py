"""Seconds and bytes of all choices of a space in closed form, from their cells: good for
ranking, not for reporting.
"""

from collections.abc import Mapping
from functools import reduce
from math import prod

import numpy as np
from attrs import evolve, frozen

from ...compiler.analysis.time.collectives import larger, smaller
from ...compiler.analysis.time.seconds import get_message_seconds
from ...compiler.ir import ITEM_BYTES, PRECISIONS, Axis, Param
from ...compiler.ops import Message
from .choice import AXES
from .facts import Facts, Goal
from .space import SCHEDULES, Column, Space, where

GATHERED = 2
"""Layers whose parameters are there besides the ones that are gathered ahead: one that computes,
one that is freed.
"""


@frozen
class State:
    """A rank's part of a model's state; elements are counted on one rank before state is shared.

    layers         the most layers that a rank has
    layer          elements of a layer without experts
    routed         elements of a layer's experts
    outer          elements outside of layers
    shares         ranks that share a layer
    routed_shares  ranks that share experts
    bytes          parameters, gradients, masters and the optimizer's own
    """

    layers: Column
    layer: Column
    routed: Column
    outer: Column
    shares: Column
    routed_shares: Column
    bytes: Column

    @property
    def elements(self) -> Column:
        """The elements that a rank has, whether it updates them or not."""
        return self.layers * (self.layer + self.routed) + self.outer


def state(facts: Facts, columns: Mapping[str, Column]) -> State:
    """The state of all choices of a space."""
    pp, chunks, tp = columns["pp"], columns["chunks"], columns["tp"]
    experts = {*facts.program.choices}
    dense, routed, outside = list[Column](), list[Column](), list[Column]()
    for param in facts.program.params:
        elements = _elements(facts, param, columns)
        if not param.stacked:
            outside.append(elements)
        elif experts & {*param.type.dims}:
            routed.append(elements)
        else:
            dense.append(elements)
    layer = sum(dense) / facts.layers
    routed_layer = sum(routed) / facts.layers + 0 * tp
    outer = where(pp == 1, sum(outside), reduce(larger, outside, 0))
    layers = -(-facts.layers // (pp * chunks)) * chunks
    shares = columns["dp"] * columns["cp"] * columns["ep"]
    routed_shares = columns["dp"] * columns["cp"]
    bytes = _state_bytes(facts, columns, layers * layer, outer, shares) + _state_bytes(
        facts, columns, layers * routed_layer, 0, routed_shares
    )
    gathered = (columns["zero"] == 3) * (GATHERED + columns["prefetch"])
    ahead = gathered * (layer + routed_layer) * _item(facts)
    return State(layers, layer, routed_layer, outer, shares, routed_shares, bytes + ahead)


def _elements(facts: Facts, param: Param, columns: Mapping[str, Column]) -> Column:
    """Elements of a parameter of all layers, on one rank."""
    size, tp = facts.program.size, columns["tp"]
    whole = prod(size(dim) for dim in param.type.dims)
    if {*param.type.dims} & {*facts.program.choices}:
        return whole / (columns["ep"] * where(columns["fold"], tp, 1))
    for dim in param.type.dims:
        if dim in facts.tensor_dims:
            return whole / smaller(tp, size(dim))
    return whole + 0 * tp


def _item(facts: Facts) -> int:
    return ITEM_BYTES[PRECISIONS[facts.program.train.precision]]


def wide_item(facts: Facts) -> int:
    """Bytes of an element of masters and gradients."""
    train = facts.program.train
    return max(_item(facts), 4) if train.master is None else ITEM_BYTES[PRECISIONS[train.master]]


def _state_bytes(
    facts: Facts, columns: Mapping[str, Column], inner: Column, outer: Column, shares: Column
) -> Column:
    """Bytes of elements in layers and outside.

    Elements outside are whole in all stages of ZeRO, except the optimizer's.
    """
    train, item, wide = facts.program.train, _item(facts), wide_item(facts)
    optimizer = wide * (len(train.optimizer.slots) + (item < wide))
    first, second, third = (where(columns["zero"] >= stage, shares, 1) for stage in (1, 2, 3))
    layers = inner * (item / third + wide / second + optimizer / first)
    return layers + outer * (item + wide + optimizer / first)


def is_kind(columns: Mapping[str, Column], *names: str) -> Column:
    """Whether the schedule is one of these."""
    return np.isin(columns["schedule"], [SCHEDULES.index(name) for name in names])


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


def estimate(facts: Facts, goal: Goal, space: Space, cells: Mapping[str, Column]) -> Estimate:
    """The estimates of a space, by its cells in columns by the fields of `Cell`."""
    return _Estimate(facts, goal, space, cells).get_estimate()


def fill(goal: Goal, columns: Mapping[str, Column]) -> Column:
    """At least how much longer a pipeline takes than its busiest rank."""
    pp = columns["pp"]
    count = goal.global_batch // (columns["microbatch"] * columns["dp"] * columns["ep"])
    later = where(is_kind(columns, *SPLIT), 0, smaller(count, pp) - 1) / columns["chunks"]
    return (larger(count, pp) + later) / count


class _Estimate:
    def __init__(self, facts: Facts, goal: Goal, space: Space, cells: Mapping[str, Column]) -> None:
        columns = space.columns
        self._facts, self._goal, self._columns, self._cell = facts, goal, columns, cells
        span = facts.program.region.span
        axes = tuple(Axis(name, columns[name], name, span=span) for name in AXES)
        self._program = evolve(facts.program, axes=axes)
        self._state: State = state(facts, columns)
        batch = columns["microbatch"] * columns["dp"] * columns["ep"]
        self._count = goal.global_batch // batch

    def get_estimate(self) -> Estimate:
        seconds = where(self._columns["pp"] == 1, self._without_stages(), self._in_stages())
        return Estimate(seconds + self._update(), self._bytes())

    # ---- seconds

    def _without_stages(self) -> Column:
        cell, zero, layers = self._cell, self._columns["zero"], self._facts.layers
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
        columns, cell = self._columns, self._cell
        pp, chunks = columns["pp"], columns["chunks"]
        layer = cell["forward"] + cell["backward"] + cell["adds"]
        even = (self._facts.layers * layer + cell["first"] + cell["last"]) / pp
        busy = larger(self._state.layers * layer, even)
        weights = self._state.layers * cell["weights"]
        gap = where(is_kind(columns, *SPLIT), larger(busy - 2 * weights, 0), busy) / chunks
        first, later = larger(self._count, pp), smaller(self._count, pp) - 1
        send = get_message_seconds(
            self._program,
            Message("rotate", "", ("pp",), "f32", ()),
            self._goal.hardware,
            cell["crossing"] / 4,
        )
        sends = (2 * (pp * chunks - 1) + self._count) * send
        reduce = self._reduce(self._state.layer, self._state.routed)
        moved = self._state.layers * (reduce + self._gather() * (columns["zero"] > 0))
        return first * busy + later * gap + sends + moved + self._outside()

    def _reduce(self, dense: Column, routed: Column) -> Column:
        """Seconds to reduce gradients over the axes of data: all of them, or scattered."""
        whole = self._send("all_reduce", dense, routed)
        scattered = self._send("reduce_scatter", dense, routed)
        return where(self._columns["zero"] == 0, whole, scattered)

    def _gather(self) -> Column:
        """Seconds to gather a layer's parameters."""
        return self._send("all_gather", self._state.layer, self._state.routed)

    def _send(self, op: str, dense: Column, routed: Column) -> Column:
        """Seconds of a collective over the axes of data.

        Experts take part over the axes that do not hold different experts.
        """
        seconds, gathers = 0.0, op == "all_gather"
        item = "f32" if wide_item(self._facts) == 4 else "f64"
        if gathers:
            item = "bf16"
        for axes, elements, shares in (
            (DATA, dense, self._state.shares),
            (DATA[:2], routed, self._state.routed_shares),
        ):
            operand = elements / shares if gathers else elements
            seconds = seconds + (elements > 0) * get_message_seconds(
                self._program, Message(op, "", axes, item, ()), self._goal.hardware, operand
            )
        return seconds * (self._state.shares > 1)

    def _outside(self) -> Column:
        """Seconds of parameters outside of layers, which nothing hides."""
        outer, none = self._state.outer, 0 * self._state.outer
        gather = self._send("all_gather", outer, none)
        return self._reduce(outer, none) + (self._columns["zero"] > 0) * gather

    def _update(self) -> Column:
        shares = where(self._columns["zero"] > 0, self._state.shares, 1)
        updated = self._state.elements / shares
        return UPDATED * wide_item(self._facts) * updated / self._goal.hardware.memory_rate

    # ---- bytes

    def _bytes(self) -> Column:
        columns, cell = self._columns, self._cell
        pp, chunks, layers = columns["pp"], columns["chunks"], self._state.layers
        interleaved, dual = is_kind(columns, "interleaved_1f1b"), is_kind(columns, "dualpipev")
        more = where(interleaved, (pp - 1) / chunks, dual)
        # layers of microbatches between their forward and their backward
        pending = smaller(layers * (pp + more), self._count * layers)
        splits = is_kind(columns, *SPLIT[:-1])
        kept = where(splits, larger(cell["kept"], cell["later"]), cell["kept"])
        return self._state.bytes + kept * pending + cell["other"] + cell["always"] + cell["reserve"]
