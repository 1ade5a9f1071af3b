"""The calls of a rank in a step, one after the other, so that call n of a group has a name.

plan.json lists the calls folded: once for all iterations of the loops around them.  They are
unfolded when a run hangs, and only then.  `scalec verify --recorded` reads the same lists in the
compiler; a test compares the two.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from .verdict import MESSAGES

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")
_MESSAGES = {"send": "SEND_", "receive": "RECV_"}
_PARTS = {"I": "B"}  # the part of backward that communicates goes by the name of the whole

_Iterations = tuple[tuple[str, int, range], ...]
"""The state of the loops around a call, outermost first: the loop, its iteration counted from 0,
and the layers that it goes through in forward.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the plan has: the value that it makes, its group and its line of the plan.

    elements  the number of elements that go in; None where it differs from step to step
    peer      the rank along the axis at a message's other end
    """

    group: str
    op: str
    value: str
    where: str
    line: str
    elements: int | None
    layer: str
    microbatch: int | None
    stage: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """For instance "all_gather of `a.1` over tp in forward, layers.3, microbatch 1,
        llama.scale:22".
        """
        over = f"over {self.group}"
        direction = {"send": "to", "receive": "from"}.get(self.op)
        if direction:
            over = f"{direction} rank {self.peer} of {self.group.split()[0]}"
        place = "" if self.where == "step" else f" in {self.where}"
        inside = ""
        if self.layer:
            inside = f", {self.layer}"
        elif self.stage is not None:
            inside = f", stage {self.stage}"
        microbatch = ""
        if self.microbatch is not None:
            microbatch = f", microbatch {self.microbatch + 1}"
        return f"{self.op} of `{self.value}` {over}{place}{inside}{microbatch}, {self.line}"


def get_planned_calls(
    plan: Mapping[str, Any], evaluates: bool, place: int | None
) -> Iterator[Call]:
    """The calls of one step, or one evaluation, in order.

    `place` is the rank's place along a pipeline's axis, if there is one.
    """
    collectives: list[dict[str, Any]] = plan["evaluation" if evaluates else "collectives"]
    layers = {dim: range(size) for dim, size in plan["dims"].items()}
    for collective in collectives:
        if collective.get("hops"):
            layers[collective["hops"]] = range(collective["times"])
    if "pipeline" not in plan:
        return _in_order(plan, collectives, layers)
    of_rank = [collective for collective in collectives if collective["rank"] == place]
    return _in_row(plan, of_rank, layers)


def _in_row(
    plan: Mapping[str, Any], collectives: Sequence[dict[str, Any]], layers: Mapping[str, range]
) -> Iterator[Call]:
    """The calls before, in and after a pipeline's row of actions.

    Gradients of a stage are reduced after its last action.
    """
    pipeline = plan["pipeline"]
    before, after = _around_stages(collectives)
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for collective in collectives:
        direction = "F" if collective["where"] == "forward" else "B"
        action = _MESSAGES.get(collective["op"], "") + direction
        parts.setdefault((str(collective.get("stage")), action), []).append(collective)
    row = list[tuple[str, ...]]()
    for word in pipeline["rows"][collectives[0]["rank"]].split():
        if match := _ACTION.fullmatch(word):
            row.append(match.groups())
    ends = _ends(row)
    yield from _in_order(plan, before, layers)
    for cell, (stage, action, microbatch) in enumerate([*row, ("", "", "")]):
        ended = list[dict[str, Any]]()
        for collective in after:
            if "chunk" in collective and max(ends[part] for part in collective["chunk"]) == cell:
                ended.append(collective)
        yield from _in_order(plan, ended, layers)
        if in_action := parts.get((stage, _PARTS.get(action, action))):
            layers_of_stage = {**layers, "microbatches": range(1)}
            for dim, cut in _layers_of(pipeline["stages"][int(stage)]).items():
                layers_of_stage[dim] = range(*cut)
            for call in _in_order(plan, in_action, layers_of_stage):
                yield replace(call, microbatch=int(microbatch))
    at_end = [collective for collective in after if "chunk" not in collective]
    yield from _in_order(plan, at_end, layers)


def _around_stages(
    collectives: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The collectives of no stage: before all stages, and after them."""
    runs = list[list[dict[str, Any]]]()
    for is_in_stage, run in groupby(collectives, lambda collective: "stage" in collective):
        if not is_in_stage:
            runs.append([*run])
    if len(runs) > 1:
        return runs[0], runs[1]
    return [], runs[0]


def _layers_of(stage: Mapping[str, Any]) -> dict[str, list[int]]:
    """The first layer of each repeat in a stage, and the one after its last.

    Files of schema 1 call them `turns`.
    """
    return stage["layers"] if "layers" in stage else stage["turns"]


def _ends(row: Sequence[tuple[str, ...]]) -> dict[int, int]:
    """For each stage the cell of a row where it has ended: the next action that computes."""
    ends = dict[int, int]()
    last_stage: int | None = None
    for cell, (stage, action, _) in enumerate(row):
        if "_" in action:  # a message computes nothing
            continue
        if last_stage is not None:
            ends[last_stage] = cell
        last_stage = int(stage)
    if last_stage is not None:
        ends[last_stage] = len(row)
    return ends


def _in_order(
    plan: Mapping[str, Any], collectives: Iterable[dict[str, Any]], layers: Mapping[str, range]
) -> Iterator[Call]:
    """The calls that these collectives make, in order; none for groups of one rank."""
    with_loops = list[tuple[dict[str, Any], tuple[str, ...]]]()
    for collective in collectives:
        if collective["ranks"] > 1:
            loops = tuple(collective["loops"])
            if collective.get("hops"):
                loops = (*loops, collective["hops"])
            with_loops.append((collective, loops))
    unrolled = _unroll(with_loops, layers, ())
    return (_call(plan, collective, iterations) for collective, iterations in unrolled)


def _unroll(
    with_loops: Iterable[tuple[dict[str, Any], tuple[str, ...]]],
    layers: Mapping[str, range],
    iterations: _Iterations,
) -> Iterator[tuple[dict[str, Any], _Iterations]]:
    """Each collective, with its loops' iterations, as often as it begins in the loops around it.

    Neighbours in one loop are called one after the other in each iteration.
    """
    for outer_loop, run in groupby(with_loops, key=lambda pair: pair[1][:1]):
        if not outer_loop:
            for collective, _ in run:
                for beginning in _iterations_to_begin(collective, iterations):
                    yield collective, beginning
            continue
        loop = outer_loop[0]
        body = [(collective, loops[1:]) for collective, loops in run]
        layers_of_loop = layers.get(loop) or layers[_dim(loop)]
        for index in range(len(layers_of_loop)):
            inner = (*iterations, (loop, index, layers_of_loop))
            yield from _unroll(body, layers, inner)


def _iterations_to_begin(
    collective: Mapping[str, Any], iterations: _Iterations
) -> Iterator[_Iterations]:
    """The iterations whose call begins in these ones: none, these, or later ones of a call that
    begins ahead.
    """
    if collective["last"] and iterations[0][1] < len(iterations[0][2]) - 1:
        return
    if collective["every"] > 1 and collective["loops"]:
        _, index, layers = iterations[len(collective["loops"]) - 1]
        if layers[-1 - index] % collective["every"]:
            return
    ahead = collective["ahead"]
    if not ahead:
        yield iterations
        return
    inner, number, count = iterations[1:], 0, 1
    for _, index, layers in inner:
        number = number * len(layers) + index
        count *= len(layers)
    # the first iteration begins the calls of all that have no earlier one to begin them
    first = number + ahead if number else 0
    for iteration in range(first, min(number + ahead + 1, count)):
        yield (*iterations[:1], *_get_iteration(inner, iteration))


def _get_iteration(iterations: _Iterations, number: int) -> _Iterations:
    """Iteration `number` of nested loops."""
    inner_first: list[tuple[str, int, range]] = []
    for loop, _, layers in reversed(iterations):
        number, index = divmod(number, len(layers))
        inner_first.append((loop, index, layers))
    return tuple(reversed(inner_first))


def _call(plan: Mapping[str, Any], collective: Mapping[str, Any], iterations: _Iterations) -> Call:
    is_backward = collective["where"] == "backward"
    places, microbatch = list[str](), None
    for loop, index, layers in iterations:
        dim = _dim(loop)
        if dim == "microbatches":
            microbatch = index if microbatch is None else microbatch
        elif loop in collective["loops"]:
            layer = layers[-1 - index] if is_backward else layers[index]
            places.append(f"{dim}.{layer}")
    axes = [axis for axis in plan["mesh"] if axis in collective["axes"] and plan["mesh"][axis] > 1]
    group = "*".join(axes)
    if collective["op"] in _MESSAGES:
        group += MESSAGES
    elif collective.get("among"):
        group += f"[{', '.join(map(str, collective['among']))}]"
    return Call(
        group,
        collective["op"],
        collective["value"],
        collective["where"],
        collective["line"],
        None if collective.get("ragged") else prod(collective["shape"]),
        ".".join(places),
        microbatch,
        collective.get("stage"),
        collective.get("peer"),
    )


def _dim(loop: str) -> str:
    return loop.partition(".")[0]
