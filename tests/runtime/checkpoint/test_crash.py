"""A save that is killed, at every write, fsync, rename and removal: what was whole stays, or
the new one is.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from math import prod
from pathlib import Path

import pytest
import torch

from helpers.small_state import made
from scalec.runtime import TrainState
from scalec.runtime.checkpoint import saver
from scalec.runtime.checkpoint.background import Saver
from scalec.runtime.checkpoint.saver import Keep
from scalec.runtime.comm import c10d
from scalec.runtime.comm.store import leave_store
from scalec.testing.faults import (
    Action,
    Event,
    Fault,
    Point,
    Program,
    Remove,
    Scene,
    Truncate,
    fork,
    kill,
)

NEW = 3
PARTS = "checkpoints/step-*.tmp/*"
EVENTS: tuple[Event, ...] = ("write", "sync", "publish", "remove")
Axes = dict[str, int]


@dataclass(frozen=True)
class Torn:
    """A file of an unfinished save cut or gone, as one that the disk had not taken; then an end
    of all ranks.
    """

    tear: Action
    kill: Action

    def strike(self, scene: Scene) -> None:
        """Does both."""
        self.tear.strike(scene)
        self.kill.strike(scene)


def _save(axes: Axes, beside: bool) -> None:
    """In a forked process: what may not come to its end."""
    if prod(axes.values()) > 1:
        c10d.join(torch.device("cpu"), c10d.timedelta(seconds=60))
    state, folder = made(axes, seed=NEW), Path("checkpoints")
    if beside:
        thread = Saver(folder, state, {}, Keep())
        thread.begin(NEW)
        state.initialise(0)  # which the copy does not see
        thread.wait()
    else:
        saver.save(folder, NEW, state)
    leave_store()
    os._exit(0)


def _loaded(path: Path) -> TrainState:
    state = made({}, seed=NEW + 1)
    saver.load(path, state)
    return state


def _same(ours: TrainState, theirs: TrainState) -> bool:
    mine, others = ours.state_dict(), theirs.state_dict()
    return all(torch.equal(mine[key], others[key]) for key in others)


def _killed(before: Path, axes: Axes, rank: int, beside: bool) -> Iterator[Path]:
    """The checkpoints after a save that was killed: at each event of this rank, whole or with a
    torn file.
    """
    dead = kill(*range(prod(axes.values())))
    tears: dict[Event, Action] = {"sync": Truncate(PARTS), "remove": Remove(PARTS)}
    for event, torn in product(EVENTS, (False, True)):
        if torn and event not in tears:
            continue
        for nth in count():
            folder = shutil.copytree(before, before.with_name(f"{event}-{torn}-{nth}"))
            fault = Fault(Point(event, None, rank, nth), Torn(tears[event], dead) if torn else dead)
            ended = fork(
                Program(folder, prod(axes.values())), fault, main=partial(_save, axes, beside)
            ).wait(60)
            if not ended.strikes:
                assert ended.succeeded, ended.err
                break
            assert {*ended.statuses} == {-signal.SIGKILL}
            yield folder / "checkpoints"


@pytest.mark.sample(1)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(("axes", "victim"), [({}, 0), ({"tp": 2}, 0), ({"tp": 2}, 1)])
def test_a_save_killed_anywhere_leaves_the_old_or_the_new_state(
    tmp_path: Path, axes: Axes, victim: int, beside: bool
) -> None:
    """Beside training or not."""
    states = [made({}, seed=steps) for steps in range(NEW + 1)]
    for steps in range(NEW):
        saver.save(tmp_path / "before" / "checkpoints", steps, states[steps])
    newest = list[int]()
    for folder in _killed(tmp_path / "before", axes, victim, beside):
        path = saver.newest(folder)
        assert path is not None
        newest.append(saver.get_finished_steps(path))
        assert _same(_loaded(path), states[newest[-1]])
        saver.save(folder, NEW + 1, states[0])
        assert sorted(each.name for each in folder.iterdir()) == [path.name, f"step-{NEW + 1:06d}"]
    assert {*newest} == ({NEW - 1, NEW} if victim == 0 else {NEW - 1})
    assert len(newest) > (18 if victim == 0 else 10)
