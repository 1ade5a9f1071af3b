"""An elastic run: it takes the largest mesh that there are ranks for; spare ranks stand by.

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
from ..errors import RunError, count_with_noun
from .launch import environment, warn
from .options import SEPARATE_STORES, Options, loses_nodes, mesh_words
from .stop import Stopped

_POLL = 0.5  # seconds between two looks at the store
_PARTING = 10.0  # seconds in which spare ranks can see that the run has ended
_ENDED, _LEFT = "elastic/ended", "elastic/left"


def fit_to_ranks(plan: Plan, options: Options) -> tuple[Plan, int]:
    """The plan on the largest of its meshes for which there are ranks, and the number of spare
    ones.

    Does not return on spare ranks; the others then see a WORLD_SIZE without them.  RunError where a
    restart would not go on with the run.
    """
    _check_restarts(plan, options)
    world = environment("WORLD_SIZE", 1)
    fitting_plan = plan.shrink_to(world)
    if not plan.smaller or world < fitting_plan.ranks:
        return plan, 0
    spare = range(fitting_plan.ranks, world)
    if environment("RANK", 0) in spare:
        _stand_by()
    os.environ["WORLD_SIZE"] = str(fitting_plan.ranks)
    if fitting_plan is not plan:
        warn(
            f"on {mesh_words(fitting_plan)}, {fitting_plan.microbatches} microbatches a step, in"
            f" place of {mesh_words(plan)}"
        )
    if spare:
        last = spare[-1]
        ranks = f"rank {last} stands by"
        if len(spare) > 1:
            ranks = f"ranks {spare[0]} to {last} stand by"
        warn(
            f"{ranks}: {mesh_words(fitting_plan)} has no place for more than"
            f" {count_with_noun(fitting_plan.ranks, 'rank')}"
        )
    return fitting_plan, len(spare)


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
    """Ends the spare ranks of a run that ends well, or is stopped, with the same status; the first
    rank tells them.
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

    A signal that stops the run reaches the run's ranks too.  Only torchrun's SIGTERM ends this
    rank; torchrun then starts it anew.
    """
    ignored = [signal.SIGUSR1, signal.SIGINT]
    if not _under_torchrun():
        ignored.append(signal.SIGTERM)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
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
    """The store where the ranks meet; it does not count spare ranks."""
    address, port = os.environ["MASTER_ADDR"], environment("MASTER_PORT", 0)
    return cast(Any, dist).TCPStore(
        address, port, is_master=False, timeout=timedelta(minutes=10), wait_for_workers=False
    )
