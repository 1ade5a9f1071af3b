"""The space of choices as columns of numbers, thinned by arithmetic; each step says how many it
leaves.

Purpose: meshes first, which few rules thin, then the settings of each.
Non-goals: what needs a program (`cells`), seconds and bytes (`estimate`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from attrs import evolve, fields, frozen

from ...analysis.context_parallel import STRATEGIES
from .choice import CHUNKED, RECOMPUTE, REGATHER, SELECTIVE, Choice
from .facts import Facts, Goal

Column = Any
"""A numpy array with a number for each choice."""

VIA = ("", *STRATEGIES)
SCHEDULES = ("", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zero_bubble", "zbv", "dualpipev")
WORDS: Mapping[str, Sequence[str]] = {"recompute": RECOMPUTE, "via": VIA, "schedule": SCHEDULES}
"""Settings that are words; a column has their place."""

FLAGS = ("sp", "fold")

CHUNKS = (2, 4, 8)
TWO = ("zbv", "dualpipev")
"""Schedules with two stages on each rank."""

MICROBATCHES = (1, 2, 4, 8, 16)
MOST_TOKENS = 2**16
"""Tokens of a microbatch on a rank of data, if it is more than one sequence: more fill no GPU
better.
"""

LEAST_TOKENS = 8192
"""Tokens of a sequence that a rank of cp has at least: fewer are what microbatches are for."""

PREFETCH = (1, 2)


@frozen
class Space:
    """Choices, in columns by the fields of `Choice`; `left` says after each step of thinning
    how many there are.
    """

    columns: Mapping[str, Column]
    left: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.columns["dp"])

    def choice(self, at: int) -> Choice:
        """One of them."""
        return decoded({name: int(column[at]) for name, column in self.columns.items()})

    def where(self, mask: Column, step: str = "") -> "Space":
        """The candidates of a mask; a step that is named is counted."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        left = (*self.left, (step, len(columns["dp"]))) if step else self.left
        return Space(columns, left)


where: Callable[[Column, Column, Column], Column] = np.where
"""The numbers of one column where a mask is true, those of another where it is not."""


def decoded(values: Mapping[str, int]) -> Choice:
    """The choice of some columns' numbers; others have the values that say nothing."""
    words = {name: own[values[name]] for name, own in WORDS.items() if name in values}
    flags = {name: bool(values[name]) for name in FLAGS if name in values}
    given: dict[str, Any] = {**values, **words, **flags}
    return Choice(**given)


def space(facts: Facts, goal: Goal, kept: Mapping[str, object]) -> Space:
    """All choices with the values of `kept` that can be compiled, as far as arithmetic tells."""
    options = {pipelined: [*_settings(facts, goal, kept, pipelined)] for pipelined in (False, True)}
    sizes = {pipelined: len(own) for pipelined, own in options.items()}
    meshes = [it for it in _meshes(facts, goal) if _matches(it, kept)]
    all_of = sum(sizes[it.pp > 1] for it in meshes)
    divided = [it for it in meshes if _divides(facts, goal, it)]
    near = [mesh for mesh in divided if is_near(goal, mesh) or _is_asked_for(goal, mesh, kept)]
    by_mesh = [(it, options[it.pp > 1]) for it in near if options[it.pp > 1]]
    names = [it.name for it in fields(Choice)]
    own = ("zero", "microbatch", "recompute", "schedule", "chunks", "prefetch")
    columns = dict[str, Column]()
    for name in names:
        if name in own:
            tables = {
                key: np.array([_number(name, it[own.index(name)]) for it in rows], np.int32)
                for key, rows in options.items()
            }
            parts = [tables[it.pp > 1] for it, _ in by_mesh]
        else:
            parts = [
                np.full(len(rows), _number(name, getattr(it, name)), np.int32)
                for it, rows in by_mesh
            ]
        columns[name] = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    left = (
        ("choices", all_of),
        (
            "with degrees that divide heads, vocabulary, MLPs, experts, sequence, layers",
            sum(sizes[it.pp > 1] for it in divided),
        ),
        ("with tensor and expert parallelism within a node", sum(sizes[it.pp > 1] for it in near)),
    )
    found = Space(columns, left)
    return found.where(
        _batches(facts, goal, columns), "whose microbatches are whole and enough for their schedule"
    )


def _number(name: str, value: object) -> int:
    return (
        WORDS[name].index(str(value))
        if name in WORDS
        else int(str(int(value)) if isinstance(value, bool) else str(value))
    )


def _matches(mesh: Choice, kept: Mapping[str, object]) -> bool:
    own = ("pp", "dp", "cp", "ep", "tp", "sp", "via", "fold")
    return all(getattr(mesh, name) == value for name, value in kept.items() if name in own)


def _meshes(facts: Facts, goal: Goal) -> Iterator[Choice]:
    """Factorizations of the GPUs over the axes, with what is said of each axis."""
    for pp in divisors(goal.gpus):
        for tp in divisors(goal.gpus // pp):
            for cp in divisors(goal.gpus // pp // tp) if goal.seq >= 2 * LEAST_TOKENS else (1,):
                rest = goal.gpus // pp // tp // cp
                for ep in divisors(rest) if facts.experts else (1,):
                    mesh = Choice(pp=pp, dp=rest // ep, cp=cp, ep=ep, tp=tp)
                    yield from _said(facts, mesh)


def _said(facts: Facts, mesh: Choice) -> Iterator[Choice]:
    """A mesh with `sp`, `via` and `fold`."""
    routed = facts.experts > 0
    for sp in ((True,) if routed else (False, True)) if mesh.tp > 1 else (False,):
        for via in VIA[1:] if mesh.cp > 1 else ("",):
            for fold in (False, True) if routed and mesh.tp > 1 and mesh.ep > 1 else (False,):
                yield evolve(mesh, sp=sp, via=via, fold=fold)


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    low = [it for it in range(1, int(number**0.5) + 1) if number % it == 0]
    return sorted({*low, *(number // it for it in low)})


def _divides(facts: Facts, goal: Goal, it: Choice) -> bool:
    size, few = facts.program.size, {kv for heads, kv in facts.heads if kv != heads}
    if (
        it.pp > facts.layers
        or goal.seq % (it.tp if it.sp else 1)
        or goal.global_batch % it.replicas
    ):
        return False
    if any(
        (size(dim) % it.tp and not (dim in few and it.tp % size(dim) == 0))
        for dim in facts.tensor_dims
    ):
        return False
    # ranks share what there is less of
    split = [dim for dim in facts.tensor_dims if size(dim) >= it.tp]
    if any(facts.program.valid(dim) <= size(dim) - size(dim) // it.tp for dim in split):
        return False  # a rank would have only padding
    if it.cp > 1 and (
        goal.seq % (2 * it.cp * (it.tp if it.sp else 1)) or goal.seq // it.cp < LEAST_TOKENS
    ):
        return False
    if it.via == "ulysses" and any(size(heads) % (it.tp * it.cp) for heads, _ in facts.heads):
        return False
    of_experts = it.ep * (it.tp if it.fold else 1)
    return all(size(dim) % of_experts == 0 for dim in facts.program.choices)


def is_near(goal: Goal, it: Choice) -> bool:
    """Axes of weights are within a node; experts may lie over several if no node can hold them."""
    node = goal.per_node
    if not _is_tensor_parallelism_near(goal, it):
        return False
    return it.ep * it.tp <= node or it.ep * (it.tp if it.fold else 1) > node


def _is_tensor_parallelism_near(goal: Goal, mesh: Choice) -> bool:
    return mesh.tp <= goal.per_node and goal.per_node % mesh.tp == 0


def _is_asked_for(goal: Goal, mesh: Choice, kept: Mapping[str, object]) -> bool:
    """Whether the degree that leaves a node is one that the user names."""
    return "ep" in kept if _is_tensor_parallelism_near(goal, mesh) else "tp" in kept


def _settings(
    facts: Facts, goal: Goal, kept: Mapping[str, object], pipelined: bool
) -> Iterator[tuple[object, ...]]:
    """ZeRO's stage, microbatch, recomputation, schedule, chunks, prefetch.

    A pipeline moves state once a step, so that its stages 2 and 3 are no others than 1.
    """
    orders = [("", 1)]
    if pipelined:
        orders = [(name, chunks) for name in SCHEDULES[1:] for chunks in _chunks(name)]
    again = [word for word in RECOMPUTE if word != SELECTIVE or facts.selective]
    sizes = [it for it in MICROBATCHES if it == 1 or it * goal.seq <= MOST_TOKENS]
    if isinstance(own := kept.get("microbatch"), int):
        sizes = [own]
    for zero, size, word, (schedule, chunks) in product(
        (0, 1) if pipelined else (0, 1, 2, 3), sizes, again, orders
    ):
        for prefetch in PREFETCH if zero == 3 else (1,):
            row = {
                "zero": zero,
                "microbatch": size,
                "recompute": word,
                "schedule": schedule,
                "chunks": chunks,
                "prefetch": prefetch,
            }
            if all(row[name] == value for name, value in kept.items() if name in row):
                yield tuple(row.values())


def _chunks(schedule: str) -> Sequence[int]:
    return CHUNKS if schedule in CHUNKED else (2,) if schedule in TWO else (1,)


def _batches(facts: Facts, goal: Goal, of: Mapping[str, Column]) -> Column:
    """Whether there are whole microbatches, as many as the schedule needs, and layers for all
    stages.

    State is shared over data, if there is any.
    """
    batch = of["microbatch"] * of["dp"] * of["ep"]
    count = np.maximum(goal.global_batch // batch, 1)
    rounds = np.maximum(count // of["pp"], 1)
    chunked = np.isin(of["schedule"], [SCHEDULES.index(name) for name in CHUNKED])
    whole = (goal.global_batch % batch == 0) & (~chunked | (count % rounds == 0))
    enough = (of["schedule"] != SCHEDULES.index("dualpipev")) | (count >= 2 * of["pp"])
    shared = (of["zero"] == 0) | (of["dp"] * of["cp"] * of["ep"] > 1)
    gathers = (
        (of["recompute"] != RECOMPUTE.index(REGATHER))
        | (of["sp"] > 0)
        | (of["via"] == VIA.index("gather"))
    )
    return whole & enough & shared & gathers & (of["pp"] * of["chunks"] <= facts.layers)
