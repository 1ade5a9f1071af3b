"""An elastic run on the ranks that are left: the largest mesh that they make, and spare ranks that
stand by.

torchrun starts WORLD_SIZE ranks, as many as its nodes have.  Ranks for which the mesh has no place
wait until the run ends, or until their launcher, which notices that nodes go or come, starts all
ranks anew.
"""

import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch.distributed as dist

from ..config.plan import Plan
from ..errors import RunError, counted
from .launch import environment, warn
from .options import SEPARATE_STORES, Options, loses_nodes, mesh_words
from .stop import Stopped

_POLL = 0.5  # seconds between two looks at the store
_PARTING = 10.0  # seconds in which spare ranks can see that the run has ended
_ENDED, _LEFT = "elastic/ended", "elastic/left"


def fitted(plan: Plan, options: Options) -> tuple[Plan, int]:
    """The plan on the largest of its meshes for which there are ranks, and the number of spare
    ones.

    Spare ranks do not return; the others find WORLD_SIZE as if there were none.  RunError where a
    restart would not go on.
    """
    _check_restarts(plan, options)
    world = environment("WORLD_SIZE", 1)
    found = plan.on(world)
    if not plan.smaller or world < found.ranks:
        return plan, 0
    spare = range(found.ranks, world)
    if environment("RANK", 0) in spare:
        _stand_by()
    os.environ["WORLD_SIZE"] = str(found.ranks)
    if found is not plan:
        warn(
            f"on {mesh_words(found)}, {found.microbatches} microbatches a step, in place of"
            f" {mesh_words(plan)}"
        )
    if spare:
        last = spare[-1]
        ranks = (
            f"ranks {spare[0]} to {last} stand by" if len(spare) > 1 else f"rank {last} stands by"
        )
        warn(
            f"{ranks}: {mesh_words(found)} has no place for more than"
            f" {counted(found.ranks, 'rank')}"
        )
    return found, len(spare)


def _check_restarts(plan: Plan, options: Options) -> None:
    """RunError where torchrun's restarts, if there may be any, would not go on with the run."""
    restarts = loses_nodes(plan) or environment("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if not (_under_torchrun() and restarts):
        return
    if not options.resume:
        raise RunError("after a restart this run would begin anew: start it with --resume auto")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RunError(
            f"restarts would meet in the store of the first start: set {SEPARATE_STORES} for"
            " torchrun"
        )


@contextmanager
def releasing(spare: int) -> Generator[None]:
    """Has the spare ranks of a run that ends well, or is stopped, end likewise; the first rank
    tells them.
    """
    try:
        yield
    except Stopped as stopped:
        _release(spare, stopped.status)
        raise
    _release(spare, 0)


def _release(spare: int, status: int) -> None:
    """Waits a little for spare ranks to end with this status: the store may be gone after that."""
    if not spare or environment("RANK", 0) > 0:
        return
    store, until = _job_store(), time.monotonic() + _PARTING
    store.set(_ENDED, str(status))
    while store.add(_LEFT, 0) < spare and time.monotonic() < until:
        time.sleep(_POLL / 10)


def _stand_by() -> NoReturn:
    """Waits until the run ends, and ends with it: with its status, or 1 where it fails.

    A signal that stops the run reaches its ranks too.  This one is ended by none but torchrun's,
    which starts it anew.
    """
    for each in (signal.SIGUSR1, signal.SIGINT, *(() if _under_torchrun() else (signal.SIGTERM,))):
        signal.signal(each, signal.SIG_IGN)
    status = 1
    with suppress(RuntimeError):  # the store is gone with the rank that kept it
        store = _job_store()
        while not store.check([_ENDED]):
            time.sleep(_POLL)
        status = int(store.get(_ENDED))
        store.add(_LEFT, 1)
    sys.exit(status)


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _job_store() -> Any:
    """The store in which the ranks meet, to which spare ranks do not count."""
    address, port = os.environ["MASTER_ADDR"], environment("MASTER_PORT", 0)
    return cast(Any, dist).TCPStore(
        address, port, is_master=False, timeout=timedelta(minutes=10), wait_for_workers=False
    )
