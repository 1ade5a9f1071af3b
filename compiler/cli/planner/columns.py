"""The cells of a space as columns: few are compiled, the others lie between them."""

from collections.abc import Mapping
from functools import partial

from attrs import astuple, fields

from ...syntax.diagnostics import PlanError
from .cells import OWN, Cell, cell
from .choice import FULL, HALF, NONE, RECOMPUTE, Choice
from .facts import Facts
from .goal import Goal
from .model_file import ModelFile
from .space import Column, Space, decoded
from .two_processes import in_two

ONE, SEVERAL = 1, 4
"""Microbatches whose cells are compiled: others are on the line through these."""


Key = tuple[tuple[str, int], ...]
Cells = dict[Key, tuple[float, ...]]
"""The numbers of cells that were compiled, of one model, sequence and GPU."""


def cell_columns(file: ModelFile, facts: Facts, goal: Goal, found: Space, cells: Cells) -> Mapping[str, Column]:
    """Columns by the fields of `Cell`; not a number where no cell can be compiled.  New `cells` are added."""
    import numpy as np

    table = np.stack([found.columns[name] for name in OWN], axis=1)
    rows, which = np.unique(table, axis=0, return_inverse=True)
    mixes = [_mix(dict(zip(OWN, map(int, row), strict=True))) for row in rows]
    needed = [key for key in dict.fromkeys(key for mix in mixes for key in mix) if key not in cells]
    made = in_two(partial(_numbers, file, facts, goal), [decoded(dict(key)) for key in needed])
    cells |= dict(zip(needed, made, strict=True))
    blended = np.stack([sum(share * np.array(cells[key]) for key, share in mix.items()) for mix in mixes])
    return {it.name: blended[which.ravel(), at] for at, it in enumerate(fields(Cell))}


def _mix(own: Mapping[str, int]) -> dict[Key, float]:
    """The cells that are compiled for one that is between them, and their shares."""
    size, shares = own["microbatch"], dict[Key, float]()
    far = (size - ONE) / (SEVERAL - ONE)
    sizes = {ONE: 1.0} if size == ONE else {SEVERAL: 1.0} if size == SEVERAL else {ONE: 1 - far, SEVERAL: far}
    half = own["recompute"] == RECOMPUTE.index(HALF)
    words = {RECOMPUTE.index(NONE): 0.5, RECOMPUTE.index(FULL): 0.5} if half else {own["recompute"]: 1.0}
    for batch, by in sizes.items():
        for word, share in words.items():
            shares[tuple({**own, "microbatch": batch, "recompute": word}.items())] = by * share
    return shares


def _numbers(file: ModelFile, facts: Facts, goal: Goal, of: Choice) -> tuple[float, ...]:
    try:
        return astuple(cell(file, facts, goal, of))
    except PlanError:
        return (float("nan"),) * len(fields(Cell))
