"""The range of the memory that a rank needs on a GPU, with the reasons for it: nobody has measured
some parts of the need.

Purpose: a plan whose range ends above the GPU's memory and begins below it may fit; it is not
refused.  Non-goals: the account itself, which is the likely value.
"""

from attrs import frozen

from ...config.gpus import gpu
from ...ir import Program
from ..expert_loads import loads
from .account import Account, accounts_of
from .reserve import communicators

ACCOUNT = 0.03
"""How far the account may be off, as a part of its tensors: tests check the peak against it
(docs/memory.md).
"""

FRAGMENTS = 0.03
"""The part of its tensors that an allocator with expandable segments reserves besides:
torchtitan's, which sets them too, by published rows (benchmarks/RESULTS.md)."""


@frozen
class Reason:
    """A part of the account that is not known: how many bytes it may be less, and how many more."""

    what: str
    less: int
    more: int


@frozen
class NeedRange:
    """The bytes that a rank needs: the account's, and the ends of the range."""

    likely: int
    reasons: tuple[Reason, ...] = ()

    @property
    def low(self) -> int:
        """The least that it may be."""
        return self.likely - sum(reason.less for reason in self.reasons)

    @property
    def high(self) -> int:
        """The most that it may be."""
        return self.likely + sum(reason.more for reason in self.reasons)

    def fits(self, room: int | None) -> bool | None:
        """Whether all of the range fits in a GPU's memory; None where only a part does, or
        nothing is known.
        """
        if room is None:
            return None
        if self.high <= room:
            return True
        if self.low <= room:
            return None
        return False

    def lacks(self, room: int | None) -> bool:
        """Whether even the lower end is more than a GPU has."""
        return room is not None and self.low > room


def need_range(program: Program, counted: Account) -> NeedRange:
    """The range of an account's need; on the CPU, whose allocator reserves nothing, the account
    alone.
    """
    if counted.device == "cpu":
        return NeedRange(counted.needs)
    error = round(ACCOUNT * counted.total)
    reasons = [
        Reason("the account of tensors", error, error),
        Reason("fragments of the allocator", 0, round(FRAGMENTS * counted.total)),
        *_reserve(program, counted),
        *_loads(program, counted),
    ]
    return NeedRange(counted.needs, tuple(reasons))


def _reserve(program: Program, counted: Account) -> list[Reason]:
    """The estimates in the reserve of a GPU that is known; a plan that says its reserve knows
    it.
    """
    known = gpu(program.cluster)
    if known is None or program.cluster.reserve is not None:
        return []
    groups = communicators(program)
    low, high = known.reserve_range(groups)
    return [
        Reason("CUDA's context, NCCL's channels", counted.reserve - low, high - counted.reserve)
    ]


def _loads(program: Program, counted: Account) -> list[Reason]:
    """The memory for rows of experts that an equal load leaves free."""
    for load in loads(program):
        if load.name == BALANCED:  # the accounts at other loads would be made for nothing
            least = max(account.needs for account in accounts_of(load.program))
            return [Reason("rows of experts, at an equal load", max(counted.needs - least, 0), 0)]
    return []


VERDICTS = {True: "fits", None: "may not fit", False: "does not fit"}
"""The verdict of `NeedRange.fits` in words, where a GPU's memory is known."""

BALANCED = "balanced"
"""The name of the equal load among `loads`."""
