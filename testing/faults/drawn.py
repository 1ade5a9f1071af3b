"""Faults from a seed."""

import random
import signal

from .actions import LAUNCHER, Raise, Send, Slow, disk_full, kill, stop
from .fault import Action, Event, Fault, Point

_OF_SAVES: tuple[Event, ...] = ("prepare", "write", "sync", "publish", "remove")
_ANYWHERE: tuple[Event, ...] = ("data", "step", "collective")


def drawn(seed: int, ranks: int, steps: range, save_every: int, launcher: bool = False) -> Fault:
    """A fault in one of these steps, or in a save of one: the same for the same arguments.

    `launcher` says that there is one, which may be killed too.
    """
    draw = random.Random(f"{seed}/{ranks}/{steps}/{save_every}")
    saves = [step for step in steps if step % save_every == 0]
    event = draw.choice(_OF_SAVES if saves and draw.random() < 0.5 else _ANYWHERE)
    of_save = event in _OF_SAVES
    step = draw.choice(saves) if of_save else draw.choice(steps)
    rank = draw.randrange(ranks) if event in (*_ANYWHERE, "write") else 0
    nth = draw.randrange(3) if event in ("collective", "write", "sync") else 0
    return Fault(Point(event, step, rank, nth), _action(draw, ranks, event, launcher))


def _action(draw: random.Random, ranks: int, event: Event, launcher: bool) -> Action:
    some = tuple(sorted(draw.sample(range(ranks), draw.randint(1, ranks))))
    actions: list[Action] = [
        kill(),
        kill(*range(ranks)),
        kill(*some),
        Send(signal.SIGTERM, some),
        stop(0.5),
        Slow(0.5),
        disk_full() if event in _OF_SAVES else Raise(RuntimeError, ("planted",)),
    ]
    return draw.choice([*actions, kill(LAUNCHER)] if launcher else actions)
