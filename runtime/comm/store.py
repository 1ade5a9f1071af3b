"""The job's store: words between ranks, beside the plan's collectives, without GPUs or groups.

A rank makes as many requests whatever the number of ranks: a meeting takes six.  The keys of a
meeting are gone when the next one is over, so that the store is as small after a million meetings.
"""

from collections.abc import Mapping
from hashlib import blake2b
from time import monotonic, sleep
from typing import Any, cast

import torch.distributed as dist

from ..errors import RunError
from . import c10d

FAILED = "failed"
"""The key of the first cause that ends the job, as the watchdog writes it."""
READS = 4000
"""Reads of the store in a second, of all ranks that look at it as a run goes; each takes it
some 10 µs.
"""
LONGEST = 1800.0
"""Seconds that a rank waits for the others at a meeting."""

_PARTING = 10.0  # seconds
_RAREST = 0.05  # seconds between looks of few ranks
_Store = Any  # the stubs of torch's stores are partial


def job_store() -> _Store:
    """The job's own part of the store that its ranks found each other with; None for a process
    alone.

    A client that waits holds up all requests of other threads: each thread has its own, by
    `clone()`.
    """
    if not dist.is_initialized():
        return None
    return cast(Any, dist).PrefixStore("scalec", c10d.default_store())


def meet(name: str, word: str, store: _Store = None) -> Mapping[str, list[int]]:
    """The ranks that brought each word to a meeting of all ranks.  All ranks come to the meetings
    of a name in one order.

    Words are in the order of their first ranks.  Where all ranks bring the same word, the list of
    ranks is not asked for: it is empty.  `store` is the thread's own, by default `job_store()`.
    RunError where another rank has failed or is missing after LONGEST seconds.
    """
    store = store or job_store()
    if store is None:
        return {word: []}
    try:
        return _meet_all(store, name, word)
    except dist.DistNetworkError:
        raise RunError(
            "the job's store is gone, with rank 0 or the launcher that kept it"
        ) from None


def _meet_all(store: _Store, name: str, word: str) -> Mapping[str, list[int]]:
    world = dist.get_world_size()
    number = (store.add(f"{name}/tickets", 1) - 1) // world
    meeting = f"{name}/{number}"
    word_hash = blake2b(word.encode(), digest_size=16).hexdigest()
    if store.add(f"{meeting}/count/{word_hash}", 1) == 1:
        store.set(f"{meeting}/word/{word_hash}", word)
        store.append(f"{meeting}/words", f"{word_hash} ")
    store.append(f"{meeting}/ranks/{word_hash}", f"{dist.get_rank()} ")
    if store.add(f"{meeting}/arrived", 1) == world:
        _forget(store, f"{name}/{number - 1}")
        store.set(f"{meeting}/all", store.get(f"{meeting}/words"))
    _wait(store, f"{meeting}/all")
    kinds = _text(store, f"{meeting}/all").split()
    if len(kinds) == 1:
        return {word: []}
    ranks_by_word: dict[str, list[int]] = {}
    for kind in kinds:
        kind_word = _text(store, f"{meeting}/word/{kind}")
        ranks_by_word[kind_word] = _ranks(store, f"{meeting}/ranks/{kind}")
    return dict(sorted(ranks_by_word.items(), key=lambda item: item[1][0]))


def leave_store() -> None:
    """Ends this rank's use of the store; the rank that may keep it waits for the others, some
    seconds at most.
    """
    if (store := job_store()) is None:
        return
    left, until = store.add("left", 1), monotonic() + _PARTING
    while dist.get_rank() == 0 and left < dist.get_world_size() and monotonic() < until:
        sleep(0.01)
        left = store.add("left", 0)


def _wait(store: _Store, key: str) -> None:
    """Waits for a key by looking for it, less and less often.  torch's own wait prints a message on
    the terminal each time that it ends without the key.

    Between looks, signals are taken and failed ranks are seen.  RunError.
    """
    until, most = monotonic() + LONGEST, max(_RAREST, dist.get_world_size() / READS)
    pause = most / 64
    while not store.check([key]):
        if store.check([FAILED]):
            raise RunError("another rank has failed")
        if monotonic() > until:
            raise RunError(f"waited {LONGEST:.0f} s for other ranks")
        sleep(pause)
        pause = min(2 * pause, most)


def _forget(store: _Store, meeting: str) -> None:
    """Removes the keys of a meeting that all ranks have left."""
    if not store.check([f"{meeting}/all"]):
        return
    for kind in _text(store, f"{meeting}/all").split():
        for key in ("count", "word", "ranks"):
            store.delete_key(f"{meeting}/{key}/{kind}")
    for key in ("words", "arrived", "all"):
        store.delete_key(f"{meeting}/{key}")


def _text(store: _Store, key: str) -> str:
    return store.get(key).decode()


def _ranks(store: _Store, key: str) -> list[int]:
    return sorted(map(int, _text(store, key).split()))
