"""Faults for programs that scalec emits: what is done to a rank at a point of its run, for tests of
one's own.

    job = fork(Program(folder, ranks=4, options="--steps=20"), Fault(Point("publish", step=10),
    kill())) assert job.wait().statuses[0] == -signal.SIGKILL

`fork` starts the ranks from a process that has imported torch, in a tenth of a second; `torchrun`
starts them as users do, launcher included.  `until_done` starts a program until it ends by itself,
as a scheduler would; `drawn` draws a fault from a seed.  A fault strikes at one point of one rank,
the same each time, and once over all restarts.  Non-goals: faults of the network below torch, of
GPUs and of power; more than one machine.
"""

from .actions import (
    LAUNCHER,
    Corrupt,
    Flip,
    Poison,
    Raise,
    Remove,
    Send,
    Slow,
    Truncate,
    disk_full,
    kill,
    stop,
)
from .drawn import drawn
from .fault import EVENTS, Action, Event, Fault, Point, Scene
from .jobs import Job, Outcome, Program, fork, torchrun, until_done
from .small_disk import small_disk

__all__ = [
    "EVENTS", "LAUNCHER", "Action", "Corrupt", "Event", "Fault", "Flip", "Job", "Outcome", "Point",
    "Poison",
    "Program", "Raise", "Remove", "Scene", "Send", "Slow", "Truncate", "disk_full", "drawn", "fork",
    "kill",
    "small_disk", "stop", "torchrun", "until_done",
]  # fmt: skip
