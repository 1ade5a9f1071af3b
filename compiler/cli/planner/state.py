"""The bytes of a rank's state, and the elements that its data axes move, in closed form for many choices at once."""

from collections.abc import Mapping
from functools import reduce
from math import prod

from attrs import frozen

from ...analysis.time.seconds import larger, smaller
from ...ir import ITEM_BYTES, PRECISIONS, Param
from .facts import Facts
from .space import SCHEDULES, Column, where

GATHERED = 2
"""Layers whose parameters are there besides those that are gathered ahead: one that computes, one that is freed."""


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
    layer = sum(_elements(facts, it, of) for it in stacked if not routed & {*it.type.dims}) / facts.layers
    experts = sum(_elements(facts, it, of) for it in stacked if routed & {*it.type.dims}) / facts.layers + 0 * of["tp"]
    outside = [_elements(facts, it, of) for it in params if not it.stacked]
    outer = where(of["pp"] == 1, sum(outside), reduce(larger, outside, 0))
    layers = -(-facts.layers // (of["pp"] * of["chunks"])) * of["chunks"]
    shares, few = of["dp"] * of["cp"] * of["ep"], of["dp"] * of["cp"]
    held = _held(facts, of, layers * layer, outer, shares) + _held(facts, of, layers * experts, 0, few)
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


def _held(facts: Facts, of: Mapping[str, Column], inner: Column, outer: Column, shares: Column) -> Column:
    """Bytes of elements in layers and outside; these are whole in all stages of ZeRO but for what the optimizer has."""
    train, item, wide = facts.program.train, _item(facts), wide_item(facts)
    optimizer = wide * (len(train.optimizer.slots) + (item < wide))
    by = [where(of["zero"] >= stage, shares, 1) for stage in (1, 2, 3)]
    layers = inner * (item / by[2] + wide / by[1] + optimizer / by[0])
    return layers + outer * (item + wide + optimizer / by[0])


def is_kind(of: Mapping[str, Column], *names: str) -> Column:
    """Whether the schedule is one of these."""
    import numpy as np

    return np.isin(of["schedule"], [SCHEDULES.index(name) for name in names])
