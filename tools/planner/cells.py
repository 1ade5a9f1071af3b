"""Cells: the time and memory of a microbatch in the layers of one program, without state, stages
and their messages.

Many choices have the same layers: they differ in data parallelism, stages and state, which
`estimate` adds in closed form.  A cell is compiled on as few ranks as have its layers.  Few cells
of a space are compiled; the others lie between them.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from attrs import astuple, evolve, fields, frozen

from ...compiler.analysis.memory.aliasing import Storages
from ...compiler.analysis.memory.liveness import get_put_off_sizes, is_put_off
from ...compiler.analysis.time.prices import Prices, prices
from ...compiler.analysis.time.timeline import seconds_of
from ...compiler.ir import ITEM_BYTES, Enter, Op, Program, Region, Stmt, walk
from ...compiler.syntax.diagnostics import PlanError
from ...compiler.tuning.variant import Variant
from .choice import FULL, HALF, NONE, RECOMPUTE, Choice
from .facts import Facts, Goal
from .plan_text import ModelFile, make_plan_variant
from .space import Column, Space, to_choice
from .two_processes import in_two

LAYER_FIELDS = ("cp", "ep", "tp", "sp", "via", "fold", "microbatch", "recompute")
"""The values of a choice that its layers depend on."""


@frozen
class Cell:
    """One microbatch on one rank, in seconds and bytes.

    forward, backward  of a layer, on average
    weights            the part of backward that makes gradients of weights, which may be put off
    adds               adding a layer's gradients to the gradients of earlier microbatches
    first, last        forward and backward before the layers, and after them
    kept, later        bytes that a layer keeps for backward, and for the gradients of weights alone
    other              the most bytes that there are besides
    always             bytes of inputs and tables
    reserve            bytes that no tensor gets
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


def cell(file: ModelFile, facts: Facts, goal: Goal, choice: Choice) -> Cell:
    """The cell of a choice.  Raises PlanError."""
    alone = evolve(choice, pp=1, dp=1, zero=0, schedule="", chunks=1, prefetch=1)
    small = evolve(goal, gpus=alone.gpus, global_batch=alone.replicas * alone.microbatch)
    return _to_cell(make_plan_variant(file, facts, small, alone), facts, goal)


def _to_cell(variant: Variant, facts: Facts, goal: Goal) -> Cell:
    program, memory = variant.last, variant.memory
    op_prices, layers = prices(program, goal.hardware), facts.layers
    seconds = partial(seconds_of, program, goal.hardware, op_prices)
    repeats, before, after = _sides(program.forward.body)
    sums, backward = list[Stmt](), list[Stmt]()
    for stmt in program.backward.body:
        if _is_of_layers(stmt, facts):
            sums.append(stmt)
        else:
            backward.append(stmt)
    backward_repeats, late, early = _sides(backward)
    layer_ops = {id(op) for region in repeats for op in walk(region.body)}
    kept = sum(tensor.total for tensor in memory.kept if id(tensor.op) in layer_ops)
    return Cell(
        forward=seconds(repeats) / layers,
        backward=seconds(backward_repeats) / layers,
        weights=_put_off(program, op_prices, backward_repeats) / layers,
        adds=seconds(sums) / layers,
        first=seconds(before) + seconds(early),
        last=seconds(after) + seconds(late),
        kept=kept / layers,
        later=sum(get_put_off_sizes(Storages(program), program.backward.body).values()) / layers,
        other=memory.peak.bytes - kept,
        always=memory.always - memory.state,
        reserve=memory.reserve,
        crossing=_crossing(program, repeats),
    )


def _sides(body: Sequence[Stmt]) -> tuple[list[Region], list[Stmt], list[Stmt]]:
    """Repeats, and the statements before the first of them and after it."""
    repeats, before, after = list[Region](), list[Stmt](), list[Stmt]()
    for stmt in body:
        if isinstance(stmt, Region):
            repeats.append(stmt)
        elif repeats:
            after.append(stmt)
        else:
            before.append(stmt)
    return repeats, before, after


def _is_of_layers(stmt: Stmt, facts: Facts) -> bool:
    """Whether an op outside of repeats is of all of their layers: it adds up gradients."""
    return isinstance(stmt, Op) and any(
        {*value.type.dims} & {*facts.outermost} for value in stmt.outputs
    )


def _put_off(program: Program, op_prices: Prices, body: Sequence[Stmt]) -> float:
    """Seconds of ops that make gradients of weights."""
    times = list[float]()
    for stmt in body:
        if isinstance(stmt, Region):
            iterations = program.size(stmt.dim) if stmt.dim else 1
            times.append(_put_off(program, op_prices, stmt.body) * iterations)
        elif is_put_off(stmt):
            times.append(sum(seconds for _, seconds in op_prices(stmt).computes))
    return sum(times)


def _crossing(program: Program, repeats: Sequence[Region]) -> float:
    """Bytes of the values that layers hand on."""
    args = repeats[0].args if repeats else ()
    types = [arg.value.type for arg in args if arg.enter is Enter.CARRY]
    return sum(program.elements(type) * ITEM_BYTES[type.dtype] for type in types)


ONE, SEVERAL = 1, 4
"""The microbatches of compiled cells: other cells are on the line through these two."""


Key = tuple[tuple[str, int], ...]
Cells = dict[Key, tuple[float, ...]]
"""The numbers of cells that were compiled, of one model, sequence and GPU."""


def cell_columns(
    file: ModelFile, facts: Facts, goal: Goal, space: Space, cells: Cells
) -> Mapping[str, Column]:
    """Columns by the fields of `Cell`; not a number where no cell can be compiled.

    Newly compiled cells are added to `cells`.
    """
    table = np.stack([space.columns[name] for name in LAYER_FIELDS], axis=1)
    rows, which = np.unique(table, axis=0, return_inverse=True)
    mixes = [_mix(dict(zip(LAYER_FIELDS, map(int, row), strict=True))) for row in rows]
    needed = dict[Key, None]()
    for mix in mixes:
        for key in mix:
            if key not in cells:
                needed[key] = None
    choices = [to_choice(dict(key)) for key in needed]
    compiled = in_two(partial(_numbers, file, facts, goal), choices)
    cells |= dict(zip(needed, compiled, strict=True))
    blends = list[Column]()
    for mix in mixes:
        blends.append(sum(share * np.array(cells[key]) for key, share in mix.items()))
    blended = np.stack(blends)
    return {field.name: blended[which.ravel(), number] for number, field in enumerate(fields(Cell))}


def _mix(values: Mapping[str, int]) -> dict[Key, float]:
    """The compiled cells that a cell lies between, and their shares, by the values in `OWN`."""
    size, word = values["microbatch"], values["recompute"]
    if size in (ONE, SEVERAL):
        sizes = {size: 1.0}
    else:
        share = (size - ONE) / (SEVERAL - ONE)
        sizes = {ONE: 1 - share, SEVERAL: share}
    words = {word: 1.0}
    if word == RECOMPUTE.index(HALF):
        words = {RECOMPUTE.index(NONE): 0.5, RECOMPUTE.index(FULL): 0.5}
    shares = dict[Key, float]()
    for batch, batch_share in sizes.items():
        for recompute, word_share in words.items():
            key = {**values, "microbatch": batch, "recompute": recompute}
            shares[tuple(key.items())] = batch_share * word_share
    return shares


def _numbers(file: ModelFile, facts: Facts, goal: Goal, choice: Choice) -> tuple[float, ...]:
    try:
        return astuple(cell(file, facts, goal, choice))
    except PlanError:
        return (float("nan"),) * len(fields(Cell))
