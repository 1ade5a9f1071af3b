"""Time of the looks at values that a plan's `watch` asks for."""

from collections.abc import Iterator

from attrs import frozen

from ...ir import Program
from ..hardware import Hardware
from ..memory import account

BLOCK, MOVED, OPS = 1 << 20, 13, 4
"""Bytes that are hashed at a time, bytes moved for each of them, and ops: each word of 4 bytes meets two keys of 8."""

LIMIT_OPS = 25
"""Ops by which the limit on a loss is made of the losses before."""


@frozen
class Look:
    """A look as the plan asks for it, its seconds, and the steps between two."""

    said: str
    seconds: float
    every: int

    @property
    def of_a_step(self) -> float:
        """Seconds of a step, on the average."""
        return self.seconds / self.every


def looks(program: Program, step: float, on: Hardware) -> Iterator[Look]:
    """The looks that cost anything; `step` is the seconds of a step."""
    asked, it = program.watch, account(program)
    if asked.copies:
        at_rest = sum(bucket.saved for bucket in it.buckets)
        yield Look(f"copies every {asked.copies}", _hashed(2 * at_rest + it.state, on), asked.copies)
    if asked.replay:
        yield Look(f"replay every {asked.replay}", step + _hashed(2 * it.state, on), asked.replay)
    if asked.spikes:
        yield Look(f"spikes = {asked.spikes}", LIMIT_OPS * max(on.op, on.kernel), 1)


def _hashed(size: int, on: Hardware) -> float:
    """Seconds in which as many bytes are hashed."""
    return max(MOVED * size / (on.memory * on.streamed), OPS * size / BLOCK * max(on.op, on.kernel))
