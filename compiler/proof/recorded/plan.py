"""The expected communication of each rank, written out from plan.json call for call."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Any

from attrs import evolve, frozen

from ...analysis.communication import MESSAGES
from ...analysis.stage_buckets import needed
from ...schedules.actions import Action, Work, spans
from .files import Call


@frozen
class Expected:
    """A call of the plan: the value it makes, and the plan's line that asks for it.

    Where rows of experts are sent, each rank sends `rows` on average, or, if `drops`, at most.
    """

    call: Call
    where: str  # forward, backward or step
    value: str
    line: str
    rows: int = 0
    drops: bool = False

    def __str__(self) -> str:
        """The call, and where it comes from."""
        around = f" in {self.where}" if self.where != "step" else ""
        return f"{self.call}{around}: `{self.value}`, {self.line}"


Calls = dict[str, tuple[Expected, ...]]
"""Calls of a rank in each `train` step and each `evaluate`, in order."""


def get_expected_calls(plan: dict[str, Any], rank: int) -> Calls:
    """The calls of `rank` in each `train` step and each `evaluate`, in order; a group of one
    rank does not call.
    """
    phases = (("train", "collectives"), ("evaluate", "evaluation"))
    return {phase: tuple(_calls(plan, plan[key], rank)) for phase, key in phases}


def _calls(plan: dict[str, Any], listed: Sequence[dict[str, Any]], rank: int) -> Iterator[Expected]:
    layers = {dim: range(size) for dim, size in plan["dims"].items()}
    if "pipeline" not in plan:
        return _in_order(plan, listed, rank, layers)
    place = peers(plan["mesh"], [plan["pipeline"]["axis"]], rank).index(rank)
    of_place = [collective for collective in listed if collective["rank"] == place]
    return _in_row(plan, of_place, rank, layers)


def _in_row(
    plan: dict[str, Any], listed: Sequence[dict[str, Any]], rank: int, layers: dict[str, range]
) -> Iterator[Expected]:
    """The calls of a rank of a pipeline: its row takes the place of its stages in the list.

    Gradients of a chunk are reduced as soon as its stages have ended.
    """
    pipeline, parts = plan["pipeline"], dict[tuple[int, Work], list[dict[str, Any]]]()
    for collective in listed:
        if "stage" in collective:
            key = collective["stage"], _work(collective)
            parts.setdefault(key, []).append(collective)
    before, after = _around_stages(listed)
    calls = dict[tuple[int, Work], list[Expected]]()
    for (stage, work), part in parts.items():
        stage_layers = layers | _own(pipeline["stages"][stage])
        calls[stage, work] = [*_in_order(plan, part, rank, stage_layers)]
    row = tuple(filter(None, map(Action.parse, pipeline["rows"][listed[0]["rank"]].split())))
    stage_spans = spans(row)
    of_chunks, of_step = defaultdict[int, list[dict[str, Any]]](list), list[dict[str, Any]]()
    for collective in after:
        if "chunk" in collective:
            of_chunks[needed(stage_spans, collective["chunk"]).stop].append(collective)
        else:
            of_step.append(collective)
    yield from _in_order(plan, before, rank, layers)
    for index, action in enumerate((*row, None)):
        yield from _in_order(plan, of_chunks.get(index, []), rank, layers)
        if action:  # the weights' part of backward communicates nothing
            work = Work.BACKWARD if action.work is Work.INPUT else action.work
            yield from calls.get((action.stage, work), ())
    yield from _in_order(plan, of_step, rank, layers)


def _around_stages(
    listed: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The collectives of the step before the work of its stages, and after it."""
    steps = list[list[dict[str, Any]]]()
    for is_stage, part in groupby(listed, lambda collective: "stage" in collective):
        if not is_stage:
            steps.append([*part])
    if len(steps) == 1:
        return [], steps[0]
    before, after = steps
    return before, after


def _work(collective: dict[str, Any]) -> Work:
    """The action that does a collective."""
    for work, message in MESSAGES.items():
        if message == (collective["op"], collective["where"]):
            return work
    return Work.FORWARD if collective["where"] == "forward" else Work.BACKWARD


def _own(stage: dict[str, Any]) -> dict[str, range]:
    """The layers of a stage in one action; `turns` is their name in files of schema 1."""
    layers: dict[str, list[int]] = stage["layers"] if "layers" in stage else stage["turns"]
    return {"microbatches": range(1)} | {dim: range(*ends) for dim, ends in layers.items()}


def _in_order(
    plan: dict[str, Any], listed: Sequence[dict[str, Any]], rank: int, layers: dict[str, range]
) -> Iterator[Expected]:
    """A list from its first to its last, collectives in loops as often as their layers."""
    calls = [_call(collective, plan, rank) for collective in listed]
    loops, hops = list[tuple[int, tuple[str, ...]]](), dict[str, range]()
    for i, collective in enumerate(listed):
        if collective.get("hops"):
            hops[collective["hops"]] = range(collective["times"])
        if collective["ranks"] > 1:
            loops.append((i, (*collective["loops"], *_hops(collective))))
    for i, layer in _unroll(loops, layers | hops, ()):
        collective = listed[i]
        around = layer[: len(layer) - len(_hops(collective))]
        if not around or _is_one_of(collective["every"], *around[-1]):
            count = _begin(collective["last"], collective["ahead"], layer)
            yield from [calls[i]] * count


def _hops(collective: dict[str, Any]) -> list[str]:
    """The loop within the op that communicates, if there is one."""
    if not collective.get("hops"):
        return []
    return [collective["hops"]]


def _call(collective: dict[str, Any], plan: dict[str, Any], rank: int) -> Expected:
    op, shape = collective["op"], collective["shape"]
    reduction = ""
    if op in ("all_reduce", "reduce_scatter"):
        reduction = "max" if collective["maximum"] else "sum"
    group, peer = peers(plan["mesh"], collective["axes"], rank), None
    if collective.get("peer") is not None:
        peer = group[int(collective["peer"])]
    if among := collective.get("among"):
        group = tuple(group[int(place)] for place in among)
    call = Call(op, reduction, group, tuple(shape), collective["dtype"], peer)
    if op == "rotate":
        splits = _rotation_splits(group.index(rank), len(group), collective)
        call = evolve(call, op="all_to_all", splits=splits)
    where, value, line = collective["where"], collective["value"], collective["line"]
    ragged = collective.get("ragged")
    if not ragged:
        return Expected(call, where, value, line)
    call = evolve(call, shape=(None, *shape[1:]))
    return Expected(call, where, value, line, shape[0], ragged == "some")


def _rotation_splits(
    place: int, ranks: int, collective: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of what a rank sends to each rank of its group, and has from each, where all
    goes to one.
    """
    by, whole = collective.get("by", 1), prod(collective["shape"])
    target, source = (place + by) % ranks, (place - by) % ranks
    sent = tuple(whole * (i == target) for i in range(ranks))
    received = tuple(whole * (i == source) for i in range(ranks))
    return sent, received


LayerIndex = tuple[tuple[int, range], ...]
"""Where loops are, outermost first: the layer, counted from 0, and forward's layers."""


def _unroll(
    listed: Sequence[tuple[int, tuple[str, ...]]], layers: dict[str, range], layer: LayerIndex
) -> Iterator[tuple[int, LayerIndex]]:
    """The numbers of `listed`, each as often as the loops around it layer, neighbours in one
    loop turning together.
    """
    for loop, inside in groupby(listed, key=lambda entry: entry[1][:1]):
        if not loop:
            yield from ((i, layer) for i, _ in inside)
            continue
        body = [(i, loops[1:]) for i, loops in inside]
        indices = layers.get(loop[0]) or layers[loop[0].partition(".")[0]]
        for index in range(len(indices)):
            yield from _unroll(body, layers, (*layer, (index, indices)))


def _is_one_of(every: int, index: int, layers: range) -> bool:
    """Whether a layer of backward's loops, which run from the last layer to the first, is the
    first of `every`.
    """
    return layers[-1 - index] % every == 0


def _begin(last: bool, ahead: int, layer: LayerIndex) -> int:
    """How many calls of a collective begin in a layer.

    A call that begins in the `last` microbatch, an iteration of the outermost loop, begins in no
    other.  If calls begin `ahead` layers early: the first layer of the loops inside begins 1 +
    `ahead` of them, and each after it one.
    """
    if last and layer[0][0] < len(layer[0][1]) - 1:
        return 0
    position, count = 0, 1
    for index, layers in layer[1:]:
        position, count = position * len(layers) + index, count * len(layers)
    if position == 0:
        return min(1 + ahead, count)
    return int(position + ahead < count)


def peers(mesh: dict[str, int], axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` on `axes` only; ranks count the mesh's places, its last
    axis innermost.
    """
    group, inside = [0], prod(mesh.values())
    for name, size in mesh.items():
        inside //= size
        places = range(size) if name in axes else [rank // inside % size]
        group = [outer * size + place for outer in group for place in places]
    return tuple(group)
