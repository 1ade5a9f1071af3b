"""Schedules for tests: two of the classical ones in a few lines, and random ones."""

import random

from hypothesis import strategies as st

from scalec.compiler.schedules.actions import Action, Schedule, Work
from scalec.compiler.schedules.dependencies import Value, get_inputs, get_result
from scalec.compiler.schedules.timeline import Times

F, B = Work.FORWARD, Work.BACKWARD


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    rows = (
        tuple(Action(rank, work, m) for work in (F, B) for m in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule(tuple(range(ranks)), microbatches, tuple(rows))


def one_f_one_b(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Each rank's warm-up, then one forward and one backward in turn; with chunks, those of
    Megatron's interleaving.
    """
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        layers = sorted(
            range(microbatches * chunks),
            key=lambda i: (i // chunks // ranks, i % chunks, i // chunks % ranks),
        )
        forward = [Action(i % chunks * ranks + rank, F, i // chunks) for i in layers]
        backward = [
            Action((chunks - 1 - i % chunks) * ranks + rank, B, i // chunks) for i in layers
        ]
        ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        ahead = min(ahead, len(forward))
        row = forward[:ahead]
        for f, b in zip(forward[ahead:], backward, strict=False):
            row += (f, b)
        rows.append((*row, *backward[len(forward) - ahead :]))
    return Schedule(tuple(range(ranks)) * chunks, microbatches, tuple(rows))


def parsed(stage_to_rank: tuple[int, ...], microbatches: int, *rows: str) -> Schedule:
    """A schedule from its rows as text."""
    return Schedule(
        stage_to_rank, microbatches, tuple(tuple(map(_action, row.split())) for row in rows)
    )


def _action(text: str) -> Action:
    at = next(i for i, c in enumerate(text) if not c.isdigit())
    end = max(i for i, c in enumerate(text) if not c.isdigit()) + 1
    return Action(int(text[:at]), Work(text[at:end]), int(text[end:]))


def shuffled(stage_to_rank: tuple[int, ...], ranks: int, microbatches: int, seed: int) -> Schedule:
    """A random order that can be done, with random backwards in two parts."""
    draw = random.Random(seed)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    left = [Action(s, F, m) for s in range(len(stage_to_rank)) for m in range(microbatches)]
    for action in list(left):
        left += [
            Action(action.stage, work, action.microbatch)
            for work in draw.choice(((B,), (Work.INPUT, Work.WEIGHT)))
        ]
    made: set[Value] = set()
    while left:
        able = [
            action for action in left if made.issuperset(get_inputs(action, len(stage_to_rank)))
        ]
        action = draw.choice(able)
        left.remove(action)
        rows[stage_to_rank[action.stage]].append(action)
        if value := get_result(action):
            made.add(value)
    return Schedule(stage_to_rank, microbatches, tuple(map(tuple, rows)))


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Random stages on random ranks, random microbatches, a random order that can be done."""
    ranks = draw(st.integers(1, 4))
    stage_to_rank = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=6))
    return shuffled(
        tuple(stage_to_rank), ranks, draw(st.integers(1, 4)), draw(st.integers(0, 2**32))
    )


@st.composite
def durations(draw: st.DrawFn, stages: int) -> Times:
    """Random times, of which some are nothing."""
    row = st.lists(st.sampled_from((0.0, 0.1, 1.0, 2.5)), min_size=stages, max_size=stages).map(
        tuple
    )
    return Times(draw(row), draw(row), draw(row), draw(st.sampled_from((0.0, 0.3, 2.0))))
