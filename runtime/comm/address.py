"""The address of the machine of rank 0: whether this one can look it up, before torch tries for
half an hour.

A name may appear late, as a pod's does, so that a first failure is no error yet.
"""

import socket
import sys
from threading import Event, Thread
from time import sleep

from ..errors import RunError

WARNING_AFTER = 8.0
"""Seconds after which a rank says that it cannot look the address up."""

LONGEST = 120.0
"""Seconds after which it gives up."""

_BETWEEN = 1.0  # seconds between two tries


def await_address(
    host: str, says: bool, said_after: float = WARNING_AFTER, longest: float = LONGEST
) -> None:
    """Returns when the name of a host has an address.  RunError after `longest` seconds.

    A rank that `says` so writes a line on standard error after `said_after` seconds.
    """
    lookup = _Lookup(host)
    if lookup.is_done(said_after):
        return
    if says:
        line = f"warning: MASTER_ADDR is `{host}`, {lookup.why}: waiting up to {longest:g} s"
        print(line, file=sys.stderr, flush=True)
    if not lookup.is_done(longest - said_after):
        lookup.is_given_up = True
        remedy = "give every rank the name or the IP address of rank 0's machine"
        raise RunError(f"MASTER_ADDR is `{host}`, {lookup.why}: {remedy}")


class _Lookup:
    """Looks a host up in a thread of its own: a resolver may take minutes to answer."""

    def __init__(self, host: str) -> None:
        self.why = "for which no resolver has answered"
        self.is_given_up = False
        self._host, self._done = host, Event()
        Thread(target=self._look, name="address", daemon=True).start()

    def is_done(self, seconds: float) -> bool:
        """Whether the host has an address, which it may get within so many seconds."""
        return self._done.wait(seconds)

    def _look(self) -> None:
        while not self.is_given_up:
            try:
                socket.getaddrinfo(self._host, None)
            except OSError as error:
                self.why = f"which this machine cannot resolve ({error.strerror})"
            else:
                self._done.set()
                return
            sleep(_BETWEEN)
