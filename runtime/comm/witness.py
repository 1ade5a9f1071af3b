"""Values that several ranks must have alike, compared by their hashes in the job's store; no group
takes part.

The first rank that comes to a key leaves its hashes there.  Each later rank makes one request, and
reads these hashes only where its own differ.
"""

import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from socket import gethostname
from typing import Any

from . import c10d

_KEPT = 8  # keys that a rank leaves in the store, in each of which it was first


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that is not the same on two ranks."""

    name: str
    ranks: str
    """For instance `rank 3 on node-1 and rank 0 on node-0`."""


class Witness:
    """Compares this rank's values with the same values of other ranks."""

    def __init__(self, store: Any) -> None:
        """`store` is the thread's own."""
        self._store = store
        self._first_at = deque[str]()

    def difference(self, key: str, values: Mapping[str, str | int]) -> Difference | None:
        """The first difference from the rank that came first to this key, which has values of
        the same names.
        """
        text = json.dumps(values)
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        rank, _ = c10d.place()
        mine = json.dumps([digest, f"rank {rank} on {gethostname()}"])
        first = self._store.compare_set(key, "", mine).decode()
        if first == mine:
            self._store.set(f"{key}/values", text)
            self._keep(key)
            return None
        first_digest, first_rank = json.loads(first)
        if first_digest == digest:
            return None
        theirs: dict[str, str | int] = json.loads(self._store.get(f"{key}/values"))
        names = [*values, *theirs]
        name = next(name for name in names if values.get(name) != theirs.get(name))
        return Difference(name, f"rank {rank} on {gethostname()} and {first_rank}")

    def _keep(self, key: str) -> None:
        """Removes the oldest key but a few: ranks are never so many comparisons apart."""
        self._first_at.append(key)
        if len(self._first_at) > _KEPT:
            self._forget(self._first_at.popleft())

    def forget(self) -> None:
        """Removes all keys at which this rank was first.  No rank compares at these any more."""
        while self._first_at:
            self._forget(self._first_at.popleft())

    def _forget(self, key: str) -> None:
        self._store.delete_key(key)
        self._store.delete_key(f"{key}/values")


def rank_of_previous_node() -> int | None:
    """The rank at this rank's place on the node before, of all nodes in a ring; None where there is
    one node.

    Ranks of one machine read the same files, so that they need not look at what another of them has
    read.
    """
    rank, world = c10d.place()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks_per_node >= world:
        return None
    return (rank - ranks_per_node) % world
