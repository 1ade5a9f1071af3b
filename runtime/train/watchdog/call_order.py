"""The calls of a rank in a step, one after the other, as plan.json lists them folded: which is call
n of a group.

Read when a run hangs, and only then.  The compiler's own reading of the same lists is that of
`scalec verify --recorded`; a test compares the two.
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
"""Where loops are, outermost first: the loop, its iteration, and the layers that it goes
through in forward.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the plan has: what it makes, in which group, for which line.

    elements  of what goes in; None where that differs from step to step
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
        to = {"send": "to", "receive": "from"}.get(self.op)
        over = f"{to} rank {self.peer} of {self.group.split()[0]}" if to else f"over {self.group}"
        place = "" if self.where == "step" else f" in {self.where}"
        inside = (
            f", {self.layer}"
            if self.layer
            else f", stage {self.stage}"
            if self.stage is not None
            else ""
        )
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch + 1}"
        return f"{self.op} of `{self.value}` {over}{place}{inside}{microbatch}, {self.line}"


def planned(plan: Mapping[str, Any], evaluates: bool, place: int | None) -> Iterator[Call]:
    """The calls of one step, or one evaluation, in order.

    `place` is the rank's along a pipeline's axis, if any.
    """
    listed: list[dict[str, Any]] = plan["evaluation" if evaluates else "collectives"]
    layers = {dim: range(size) for dim, size in plan["dims"].items()}
    layers |= {each["hops"]: range(each["times"]) for each in listed if each.get("hops")}
    if "pipeline" not in plan:
        return _in_order(plan, listed, layers)
    return _in_row(plan, [each for each in listed if each["rank"] == place], layers)


def _in_row(
    plan: Mapping[str, Any], listed: Sequence[dict[str, Any]], layers: Mapping[str, range]
) -> Iterator[Call]:
    """The calls around a row, and those of each action; gradients of stages are reduced when
    these have ended.
    """
    pipeline = plan["pipeline"]
    around = [[*own] for staged, own in groupby(listed, lambda each: "stage" in each) if not staged]
    before, after = around if len(around) > 1 else ([], around[0])
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in listed:
        # the action that makes it
        work = _MESSAGES.get(each["op"], "") + ("F" if each["where"] == "forward" else "B")
        parts.setdefault((str(each.get("stage")), work), []).append(each)
    row = [
        match.groups()
        for match in map(_ACTION.fullmatch, pipeline["rows"][listed[0]["rank"]].split())
        if match
    ]
    ends = _ends(row)
    yield from _in_order(plan, before, layers)
    for at, (stage, work, microbatch) in enumerate([*row, ("", "", "")]):
        ended = [
            each
            for each in after
            if "chunk" in each and max(ends[own] for own in each["chunk"]) == at
        ]
        yield from _in_order(plan, ended, layers)
        if own := parts.get((stage, _PARTS.get(work, work))):
            cuts = _layers_of(pipeline["stages"][int(stage)]).items()
            of_stage = {
                **layers,
                "microbatches": range(1),
                **{dim: range(*cut) for dim, cut in cuts},
            }
            yield from (
                replace(each, microbatch=int(microbatch)) for each in _in_order(plan, own, of_stage)
            )
    yield from _in_order(plan, [each for each in after if "chunk" not in each], layers)


def _layers_of(stage: Mapping[str, Any]) -> dict[str, list[int]]:
    """The first layer of each repeat in a stage, and the one after its last; `turns` in files
    of schema 1.
    """
    return stage["layers"] if "layers" in stage else stage["turns"]


def _ends(row: Sequence[tuple[str, ...]]) -> dict[int, int]:
    """For each stage the cell of a row where it has ended: that of the next action that
    computes.
    """
    computing = [(at, int(stage)) for at, (stage, work, _) in enumerate(row) if "_" not in work]
    following = [at for at, _ in computing[1:]] + [len(row)]
    return {stage: end for (_, stage), end in zip(computing, following, strict=True)}


def _in_order(
    plan: Mapping[str, Any], listed: Iterable[dict[str, Any]], layers: Mapping[str, range]
) -> Iterator[Call]:
    loops = [
        (each, (*each["loops"], *filter(None, [each.get("hops")])))
        for each in listed
        if each["ranks"] > 1
    ]
    return (_call(plan, each, iterations) for each, iterations in _unrolled(loops, layers, ()))


def _unrolled(
    listed: Iterable[tuple[dict[str, Any], tuple[str, ...]]],
    layers: Mapping[str, range],
    iterations: _Iterations,
) -> Iterator[tuple[dict[str, Any], _Iterations]]:
    """Each as often as it begins in the loops around it; neighbours in one loop are done in
    each iteration.
    """
    for loop, inside in groupby(listed, key=lambda it: it[1][:1]):
        if not loop:
            yield from ((each, begun) for each, _ in inside for begun in _begun(each, iterations))
            continue
        body, own = (
            [(each, loops[1:]) for each, loops in inside],
            layers.get(loop[0]) or layers[_dim(loop[0])],
        )
        for index in range(len(own)):
            yield from _unrolled(body, layers, (*iterations, (loop[0], index, own)))


def _begun(each: Mapping[str, Any], iterations: _Iterations) -> Iterator[_Iterations]:
    """The iterations whose call begins in these: none, these, or later ones of a call that
    begins ahead.
    """
    if each["last"] and iterations[0][1] < len(iterations[0][2]) - 1:
        return
    if each["every"] > 1 and each["loops"]:
        _, index, own = iterations[len(each["loops"]) - 1]
        if own[-1 - index] % each["every"]:
            return
    if not each["ahead"]:
        yield iterations
        return
    inner, at, size = iterations[1:], 0, 1
    for _, index, own in inner:
        at, size = at * len(own) + index, size * len(own)
    for begun in range(at + each["ahead"] if at else 0, min(at + each["ahead"] + 1, size)):
        yield (*iterations[:1], *_numbered(inner, begun))


def _numbered(iterations: _Iterations, number: int) -> _Iterations:
    """Iteration `number` of nested loops."""
    found: list[tuple[str, int, range]] = []
    for loop, _, own in reversed(iterations):
        number, index = divmod(number, len(own))
        found.append((loop, index, own))
    return tuple(reversed(found))


def _call(plan: Mapping[str, Any], each: Mapping[str, Any], iterations: _Iterations) -> Call:
    backward = each["where"] == "backward"
    places = [
        (_dim(loop), own[-1 - at] if backward else own[at])
        for loop, at, own in iterations
        if loop in each["loops"]
    ]
    layer = ".".join(f"{dim}.{at}" for dim, at in places if dim != "microbatches")
    microbatch = next((it[1] for it in iterations if _dim(it[0]) == "microbatches"), None)
    group = "*".join(
        axis for axis in plan["mesh"] if axis in each["axes"] and plan["mesh"][axis] > 1
    )
    if each["op"] in _MESSAGES:
        group += MESSAGES
    elif each.get("among"):
        group += f"[{', '.join(map(str, each['among']))}]"
    return Call(
        group,
        each["op"],
        each["value"],
        each["where"],
        each["line"],
        None if each.get("ragged") else prod(each["shape"]),
        layer,
        microbatch,
        each.get("stage"),
        each.get("peer"),
    )


def _dim(loop: str) -> str:
    return loop.partition(".")[0]
