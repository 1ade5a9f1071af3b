"""The space of choices as columns of numbers, thinned by arithmetic; each step says how many it
leaves.

Purpose: meshes first, which few rules thin, then the settings of each.
Non-goals: figures that need a program (`cells`), seconds and bytes (`estimate`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from attrs import evolve, fields, frozen

from ...compiler.analysis.context_parallel import STRATEGIES
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
"""The least tokens of a sequence on a rank of cp: for fewer, smaller microbatches serve."""

PREFETCH = (1, 2)

SETTINGS = ("zero", "microbatch", "recompute", "schedule", "chunks", "prefetch")
"""The fields of `Choice` besides the mesh and how axes of the mesh are used."""

Row = tuple[object, ...]
"""Values by `SETTINGS`."""


@frozen
class Space:
    """Choices, in columns by the fields of `Choice`; `left` says after each step of thinning
    how many there are.
    """

    columns: Mapping[str, Column]
    left: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.columns["dp"])

    def choice(self, row: int) -> Choice:
        """The choice in a row of the columns."""
        return to_choice({name: int(column[row]) for name, column in self.columns.items()})

    def where(self, mask: Column, step: str = "") -> "Space":
        """The choices of a mask; `left` counts a step that has a name."""
        columns = {name: column[mask] for name, column in self.columns.items()}
        left = (*self.left, (step, len(columns["dp"]))) if step else self.left
        return Space(columns, left)


where: Callable[[Column, Column, Column], Column] = np.where
"""The numbers of one column where a mask is true, those of another where it is not."""


def to_choice(values: Mapping[str, int]) -> Choice:
    """The choice of some columns' numbers; other fields have their defaults."""
    arguments: dict[str, Any] = {**values}
    for name, value in values.items():
        if name in WORDS:
            arguments[name] = WORDS[name][value]
        elif name in FLAGS:
            arguments[name] = bool(value)
    return Choice(**arguments)


def space(facts: Facts, goal: Goal, kept: Mapping[str, object]) -> Space:
    """All choices with the values of `kept` that can be compiled, as far as arithmetic tells."""
    settings = {
        pipelined: [*_settings(facts, goal, kept, pipelined)] for pipelined in (False, True)
    }

    def count(meshes: Sequence[Choice]) -> int:
        return sum(len(settings[mesh.pp > 1]) for mesh in meshes)

    meshes = [mesh for mesh in _meshes(facts, goal) if _matches(mesh, kept)]
    divided = [mesh for mesh in meshes if _divides(facts, goal, mesh)]
    near = [mesh for mesh in divided if is_near(goal, mesh) or _is_asked_for(goal, mesh, kept)]
    left = (
        ("choices", count(meshes)),
        (
            "with degrees that divide heads, vocabulary, MLPs, experts, sequence, layers",
            count(divided),
        ),
        ("with tensor and expert parallelism within a node", count(near)),
    )
    columns = _columns(near, settings)
    return Space(columns, left).where(
        _batches(facts, goal, columns), "whose microbatches are whole and enough for their schedule"
    )


def _columns(meshes: Sequence[Choice], settings: Mapping[bool, Sequence[Row]]) -> dict[str, Column]:
    """Columns of all meshes, each with all settings, by whether it is a pipeline."""
    columns = dict[str, Column]()
    for field in fields(Choice):
        name, parts = field.name, list[Column]()
        if name in SETTINGS:
            place = SETTINGS.index(name)
            tables = dict[bool, Column]()
            for pipelined, rows in settings.items():
                numbers = [_number(name, row[place]) for row in rows]
                tables[pipelined] = np.array(numbers, np.int32)
            parts = [tables[mesh.pp > 1] for mesh in meshes]
        else:
            for mesh in meshes:
                number = _number(name, getattr(mesh, name))
                parts.append(np.full(len(settings[mesh.pp > 1]), number, np.int32))
        columns[name] = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    return columns


def _number(name: str, value: object) -> int:
    if name in WORDS:
        return WORDS[name].index(str(value))
    return int(value) if isinstance(value, bool) else int(str(value))


def _matches(mesh: Choice, kept: Mapping[str, object]) -> bool:
    names = ("pp", "dp", "cp", "ep", "tp", "sp", "via", "fold")
    return all(getattr(mesh, name) == value for name, value in kept.items() if name in names)


def _meshes(facts: Facts, goal: Goal) -> Iterator[Choice]:
    """Factorizations of the GPUs over the axes, with all settings of each axis."""
    is_long = goal.seq >= 2 * LEAST_TOKENS
    for pp in divisors(goal.gpus):
        for tp in divisors(goal.gpus // pp):
            others = goal.gpus // pp // tp
            for cp in divisors(others) if is_long else (1,):
                replicas = others // cp
                for ep in divisors(replicas) if facts.experts else (1,):
                    mesh = Choice(pp=pp, dp=replicas // ep, cp=cp, ep=ep, tp=tp)
                    yield from _mesh_variants(facts, mesh)


def _mesh_variants(facts: Facts, mesh: Choice) -> Iterator[Choice]:
    """A mesh with each `sp`, `via` and `fold` that it can have."""
    routed = facts.experts > 0
    flags, ways, folds = (False,), ("",), (False,)
    if mesh.tp > 1:
        flags = (True,) if routed else (False, True)
    if mesh.cp > 1:
        ways = VIA[1:]
    if routed and mesh.tp > 1 and mesh.ep > 1:
        folds = (False, True)
    for sp, via, fold in product(flags, ways, folds):
        yield evolve(mesh, sp=sp, via=via, fold=fold)


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def _divides(facts: Facts, goal: Goal, mesh: Choice) -> bool:
    """Whether the degrees divide the batch and the sequence, and the dims that they split."""
    size, tp = facts.program.size, mesh.tp
    if mesh.pp > facts.layers or goal.global_batch % mesh.replicas:
        return False
    if not _divides_sequence(goal, mesh):
        return False
    # ranks share key/value heads where there are fewer of them than ranks
    shared_heads = {kv_heads for heads, kv_heads in facts.heads if kv_heads != heads}
    for dim in facts.tensor_dims:
        is_shared = dim in shared_heads and tp % size(dim) == 0
        if size(dim) % tp and not is_shared:
            return False
        has_padding_only = facts.program.valid(dim) <= size(dim) - size(dim) // tp
        if size(dim) >= tp and has_padding_only:
            return False
    if mesh.via == "ulysses" and any(size(heads) % (tp * mesh.cp) for heads, _ in facts.heads):
        return False
    expert_ranks = mesh.ep * (tp if mesh.fold else 1)
    return all(size(dim) % expert_ranks == 0 for dim in facts.program.choices)


def _divides_sequence(goal: Goal, mesh: Choice) -> bool:
    """Whether each rank has a whole part of the sequence, and a long enough one."""
    pieces = mesh.tp if mesh.sp else 1
    if mesh.cp > 1:
        if goal.seq // mesh.cp < LEAST_TOKENS:
            return False
        pieces *= 2 * mesh.cp  # zigzag gives each rank two
    return goal.seq % pieces == 0


def is_near(goal: Goal, mesh: Choice) -> bool:
    """Whether axes of weights are within a node; experts may lie over several if no node can hold
    them.
    """
    node, expert_ranks = goal.per_node, mesh.ep * (mesh.tp if mesh.fold else 1)
    if not _is_tensor_parallelism_near(goal, mesh):
        return False
    return mesh.ep * mesh.tp <= node or expert_ranks > node


def _is_tensor_parallelism_near(goal: Goal, mesh: Choice) -> bool:
    return mesh.tp <= goal.per_node and goal.per_node % mesh.tp == 0


def _is_asked_for(goal: Goal, mesh: Choice, kept: Mapping[str, object]) -> bool:
    """Whether the user names the degree that leaves a node."""
    return "ep" in kept if _is_tensor_parallelism_near(goal, mesh) else "tp" in kept


def _settings(
    facts: Facts, goal: Goal, kept: Mapping[str, object], pipelined: bool
) -> Iterator[Row]:
    """Values in the order of `SETTINGS`.

    A pipeline moves state once a step, so that ZeRO's stages 2 and 3 do the same as 1.
    """
    orders, stages = [("", 1)], (0, 1, 2, 3)
    if pipelined:
        orders = [(name, chunks) for name in SCHEDULES[1:] for chunks in _chunks(name)]
        stages = (0, 1)
    words = [word for word in RECOMPUTE if word != SELECTIVE or facts.selective]
    sizes = [size for size in MICROBATCHES if size == 1 or size * goal.seq <= MOST_TOKENS]
    microbatch = kept.get("microbatch")
    if isinstance(microbatch, int):
        sizes = [microbatch]
    for zero, size, word, (schedule, chunks) in product(stages, sizes, words, orders):
        for prefetch in PREFETCH if zero == 3 else (1,):
            row = (zero, size, word, schedule, chunks, prefetch)
            values = dict(zip(SETTINGS, row, strict=True))
            if all(values[name] == value for name, value in kept.items() if name in values):
                yield row


def _chunks(schedule: str) -> Sequence[int]:
    if schedule in CHUNKED:
        return CHUNKS
    return (2,) if schedule in TWO else (1,)


def _batches(facts: Facts, goal: Goal, columns: Mapping[str, Column]) -> Column:
    """Whether there are whole microbatches, as many as the schedule needs, and layers for all
    stages.

    State is shared over data, if there is any.
    """
    pp, schedule = columns["pp"], columns["schedule"]
    batch = columns["microbatch"] * columns["dp"] * columns["ep"]
    count = np.maximum(goal.global_batch // batch, 1)
    rounds = np.maximum(count // pp, 1)
    chunked = np.isin(schedule, [SCHEDULES.index(name) for name in CHUNKED])
    whole = (goal.global_batch % batch == 0) & (~chunked | (count % rounds == 0))
    enough = (schedule != SCHEDULES.index("dualpipev")) | (count >= 2 * pp)
    shares = columns["dp"] * columns["cp"] * columns["ep"]
    shared = (columns["zero"] == 0) | (shares > 1)
    gathers = (
        (columns["recompute"] != RECOMPUTE.index(REGATHER))
        | (columns["sp"] > 0)
        | (columns["via"] == VIA.index("gather"))
    )
    return whole & enough & shared & gathers & (pp * columns["chunks"] <= facts.layers)
