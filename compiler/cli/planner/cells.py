"""Layers of one program each: what a microbatch takes in time and memory, without state, stages and
their messages.

Many choices have the same layers: they differ in data parallelism, stages and state, which
`estimate` adds in closed form.  A cell is compiled on as few ranks as have its layers.  Few of a
space are compiled; the others lie between them.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from attrs import astuple, evolve, fields, frozen

from ...analysis.memory import account
from ...analysis.memory.aliasing import Storages
from ...analysis.memory.liveness import is_put_off, put_off
from ...analysis.time.prices import Prices, prices
from ...analysis.time.timeline import seconds_of
from ...frontend import resolve
from ...ir import ITEM_BYTES, Enter, Op, Program, Region, Stmt, walk
from ...passes import passed
from ...syntax.diagnostics import PlanError
from .choice import FULL, HALF, NONE, RECOMPUTE, Choice
from .facts import Facts, Goal
from .plan_text import ModelFile, plan
from .space import Column, Space, decoded
from .two_processes import in_two

OWN = ("cp", "ep", "tp", "sp", "via", "fold", "microbatch", "recompute")
"""The values of a choice that its layers depend on."""


@frozen
class Cell:
    """One microbatch on one rank, in seconds and bytes.

    forward, backward  of a layer, on average
    weights            the part of backward that makes gradients of weights, which may be put off
    adds               of a layer's gradients to those of earlier microbatches
    first, last        forward and backward before the layers, and after them
    kept, later        bytes that a layer keeps for backward, and for the gradients of weights alone
    other              bytes that there are at most besides
    always             bytes of inputs and tables
    reserve            that no tensor gets
    crossing           bytes that a stage would send to the next
    """

    forward: float
    backward: float
    weights: float
    adds: float
    first: float
    last: float
    kept: float
    later: float
    other: float
    always: float
    reserve: float
    crossing: float


def cell(file: ModelFile, facts: Facts, goal: Goal, of: Choice) -> Cell:
    """The cell of a choice.  Raises PlanError."""
    alone = evolve(of, pp=1, dp=1, zero=0, schedule="", chunks=1, prefetch=1)
    small = evolve(goal, gpus=alone.gpus, global_batch=alone.replicas * alone.microbatch)
    *_, program = passed(resolve(plan(file, facts, small, alone)))
    return _measured(program, facts, goal)


def _measured(program: Program, facts: Facts, goal: Goal) -> Cell:
    of, layers = prices(program, goal.hardware), facts.layers
    seconds = partial(seconds_of, program, goal.hardware, of)
    repeats, before, after = _sides(program.forward.body)
    again, late, early = _sides(
        [stmt for stmt in program.backward.body if not _is_of_layers(stmt, facts)]
    )
    sums = [stmt for stmt in program.backward.body if _is_of_layers(stmt, facts)]
    inside = {id(op) for region in repeats for op in walk(region.body)}
    memory = account(program)
    kept = sum(it.total for it in memory.kept if id(it.op) in inside)
    return Cell(
        forward=seconds(repeats) / layers,
        backward=seconds(again) / layers,
        weights=_put_off(program, of, again) / layers,
        adds=seconds(sums) / layers,
        first=seconds(before) + seconds(early),
        last=seconds(after) + seconds(late),
        kept=kept / layers,
        later=sum(put_off(Storages(program), program.backward.body).values()) / layers,
        other=memory.peak.bytes - kept,
        always=memory.always - memory.state,
        reserve=memory.reserve,
        crossing=_crossing(program, repeats),
    )


def _sides(body: Sequence[Stmt]) -> tuple[list[Region], list[Stmt], list[Stmt]]:
    """Repeats, and what is before the first of them and after it."""
    repeats = [stmt for stmt in body if isinstance(stmt, Region)]
    at = next((at for at, stmt in enumerate(body) if isinstance(stmt, Region)), len(body))
    return repeats, [*body[:at]], [stmt for stmt in body[at:] if isinstance(stmt, Op)]


def _is_of_layers(stmt: Stmt, facts: Facts) -> bool:
    """Whether an op outside of repeats is of all of their layers: it adds up gradients."""
    return isinstance(stmt, Op) and any(
        {*value.type.dims} & {*facts.outermost} for value in stmt.outputs
    )


def _put_off(program: Program, of: Prices, body: Sequence[Stmt]) -> float:
    """Seconds of what makes gradients of weights."""
    inner = (
        _put_off(program, of, stmt.body) * (program.size(stmt.dim) if stmt.dim else 1)
        if isinstance(stmt, Region)
        else sum(seconds for _, seconds in of(stmt).computes) * is_put_off(stmt)
        for stmt in body
    )
    return sum(inner)


def _crossing(program: Program, repeats: Sequence[Region]) -> float:
    """Bytes of what layers hand on."""
    carried = (
        (arg.value.type for arg in repeats[0].args if arg.enter is Enter.CARRY) if repeats else ()
    )
    return sum(program.elements(type) * ITEM_BYTES[type.dtype] for type in carried)


ONE, SEVERAL = 1, 4
"""Microbatches whose cells are compiled: others are on the line through these."""


Key = tuple[tuple[str, int], ...]
Cells = dict[Key, tuple[float, ...]]
"""The numbers of cells that were compiled, of one model, sequence and GPU."""


def cell_columns(
    file: ModelFile, facts: Facts, goal: Goal, found: Space, cells: Cells
) -> Mapping[str, Column]:
    """Columns by the fields of `Cell`; not a number where no cell can be compiled.

    New `cells` are added.
    """
    table = np.stack([found.columns[name] for name in OWN], axis=1)
    rows, which = np.unique(table, axis=0, return_inverse=True)
    mixes = [_mix(dict(zip(OWN, map(int, row), strict=True))) for row in rows]
    needed = [key for key in dict.fromkeys(key for mix in mixes for key in mix) if key not in cells]
    made = in_two(partial(_numbers, file, facts, goal), [decoded(dict(key)) for key in needed])
    cells |= dict(zip(needed, made, strict=True))
    blended = np.stack(
        [sum(share * np.array(cells[key]) for key, share in mix.items()) for mix in mixes]
    )
    return {it.name: blended[which.ravel(), at] for at, it in enumerate(fields(Cell))}


def _mix(own: Mapping[str, int]) -> dict[Key, float]:
    """The cells that are compiled for one that is between them, and their shares."""
    size, shares = own["microbatch"], dict[Key, float]()
    far = (size - ONE) / (SEVERAL - ONE)
    sizes = (
        {ONE: 1.0}
        if size == ONE
        else {SEVERAL: 1.0}
        if size == SEVERAL
        else {ONE: 1 - far, SEVERAL: far}
    )
    half = own["recompute"] == RECOMPUTE.index(HALF)
    words = (
        {RECOMPUTE.index(NONE): 0.5, RECOMPUTE.index(FULL): 0.5}
        if half
        else {own["recompute"]: 1.0}
    )
    for batch, by in sizes.items():
        for word, share in words.items():
            shares[tuple({**own, "microbatch": batch, "recompute": word}.items())] = by * share
    return shares


def _numbers(file: ModelFile, facts: Facts, goal: Goal, of: Choice) -> tuple[float, ...]:
    try:
        return astuple(cell(file, facts, goal, of))
    except PlanError:
        return (float("nan"),) * len(fields(Cell))
