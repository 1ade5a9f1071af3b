"""The expected communication of each rank, written out from plan.json call for call."""

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


def expected(plan: dict[str, Any], rank: int) -> Calls:
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
    return _in_row(plan, [each for each in listed if each["rank"] == place], rank, layers)


def _in_row(
    plan: dict[str, Any], listed: Sequence[dict[str, Any]], rank: int, layers: dict[str, range]
) -> Iterator[Expected]:
    """The calls of a rank of a pipeline: its row takes the place of its stages in the list.

    Gradients of a chunk are reduced as soon as its stages have ended.
    """
    pipeline, parts = plan["pipeline"], dict[tuple[int, Work], list[dict[str, Any]]]()
    for each in listed:
        if "stage" in each:
            parts.setdefault((each["stage"], _work(each)), []).append(each)
    steps = [
        [*part] for is_stage, part in groupby(listed, lambda each: "stage" in each) if not is_stage
    ]
    before, after = steps if len(steps) > 1 else ([], steps[0])
    calls = {
        (stage, work): [*_in_order(plan, part, rank, layers | _own(pipeline["stages"][stage]))]
        for (stage, work), part in parts.items()
    }
    row = tuple(filter(None, map(Action.of, pipeline["rows"][listed[0]["rank"]].split())))
    own = spans(row)
    ended = [(each, needed(own, each["chunk"]).stop) for each in after if "chunk" in each]
    yield from _in_order(plan, before, rank, layers)
    for at, action in enumerate((*row, None)):
        yield from _in_order(plan, [each for each, end in ended if end == at], rank, layers)
        if action:  # the weights' part of backward communicates nothing
            work = Work.BACKWARD if action.work is Work.INPUT else action.work
            yield from calls.get((action.stage, work), ())
    yield from _in_order(plan, [each for each in after if "chunk" not in each], rank, layers)


def _work(each: dict[str, Any]) -> Work:
    """The action that does it."""
    message = next(
        (work for work, its in MESSAGES.items() if its == (each["op"], each["where"])), None
    )
    return message or (Work.FORWARD if each["where"] == "forward" else Work.BACKWARD)


def _own(stage: dict[str, Any]) -> dict[str, range]:
    """The layers of a stage in one action; `turns` is their name in files of schema 1."""
    layers: dict[str, list[int]] = stage["layers"] if "layers" in stage else stage["turns"]
    return {"microbatches": range(1)} | {dim: range(*ends) for dim, ends in layers.items()}


def _in_order(
    plan: dict[str, Any], listed: Sequence[dict[str, Any]], rank: int, layers: dict[str, range]
) -> Iterator[Expected]:
    """A list from its first to its last, those in loops as often as these layer."""
    calls = [_call(each, plan, rank) for each in listed]
    layers = layers | {each["hops"]: range(each["times"]) for each in listed if each.get("hops")}
    loops = [
        (i, (*each["loops"], *_hops(each))) for i, each in enumerate(listed) if each["ranks"] > 1
    ]
    for i, layer in _unrolled(loops, layers, ()):
        around = layer[: len(layer) - len(_hops(listed[i]))]
        if not around or _is_one_of(listed[i]["every"], *around[-1]):
            yield from [calls[i]] * _begin(listed[i]["last"], listed[i]["ahead"], layer)


def _hops(each: dict[str, Any]) -> list[str]:
    """The loop within the op that communicates, if there is one."""
    return [each["hops"]] if each.get("hops") else []


def _call(each: dict[str, Any], plan: dict[str, Any], rank: int) -> Expected:
    reduces = each["op"] in ("all_reduce", "reduce_scatter")
    reduction = ("max" if each["maximum"] else "sum") if reduces else ""
    group = peers(plan["mesh"], each["axes"], rank)
    peer = None if each.get("peer") is None else group[int(each["peer"])]
    if among := each.get("among"):
        group = tuple(group[int(place)] for place in among)
    call = Call(each["op"], reduction, group, tuple(each["shape"]), each["dtype"], peer)
    if each["op"] == "rotate":
        call = evolve(call, op="all_to_all", splits=_rotated(group.index(rank), len(group), each))
    if ragged := each.get("ragged"):
        call = evolve(call, shape=(None, *each["shape"][1:]))
        return Expected(
            call, each["where"], each["value"], each["line"], each["shape"][0], ragged == "some"
        )
    return Expected(call, each["where"], each["value"], each["line"])


def _rotated(
    place: int, ranks: int, each: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of what a rank sends to each rank of its group, and has from each, where all
    goes to one.
    """
    by, whole = each.get("by", 1), prod(each["shape"])
    to, source = (place + by) % ranks, (place - by) % ranks
    return tuple(whole * (i == to) for i in range(ranks)), tuple(
        whole * (i == source) for i in range(ranks)
    )


LayerIndex = tuple[tuple[int, range], ...]
"""Where loops are, outermost first: the layer, counted from 0, and forward's layers."""


def _unrolled(
    listed: Sequence[tuple[int, tuple[str, ...]]], layers: dict[str, range], layer: LayerIndex
) -> Iterator[tuple[int, LayerIndex]]:
    """The numbers of `listed`, each as often as the loops around it layer, neighbours in one
    loop turning together.
    """
    for loop, inside in groupby(listed, key=lambda it: it[1][:1]):
        if not loop:
            yield from ((i, layer) for i, _ in inside)
            continue
        body, own = (
            [(i, loops[1:]) for i, loops in inside],
            layers.get(loop[0]) or layers[loop[0].partition(".")[0]],
        )
        for index in range(len(own)):
            yield from _unrolled(body, layers, (*layer, (index, own)))


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
    at, layers = 0, 1
    for index, own in layer[1:]:
        at, layers = at * len(own) + index, layers * len(own)
    return int(at + ahead < layers) if at else min(1 + ahead, layers)


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
