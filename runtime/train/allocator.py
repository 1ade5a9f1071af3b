"""Sets up torch's GPU allocator, and compares its peak memory with the compiler's account."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from ..config.plan import Account

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that set it up; torch reads the first that is set; the second is the older name."""

NEAR = 0.03
"""The part of the account by which a step may differ from it, as `tests/analysis/memory` hold
it on the CPU.
"""


@dataclass(frozen=True)
class Peak:
    """The most bytes that tensors took at once, and that the allocator reserved for them."""

    allocated: int
    reserved: int

    def differs(self, account: tuple[int, int], reserve: int) -> bool:
        """Whether it is further from the account, the least and the most, than may be explained."""
        least, most = account
        return not (1 - NEAR) * least - reserve <= self.allocated <= (1 + NEAR) * most + reserve


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Lets segments of memory grow, so that blocks which come and go leave no gaps that fit
    nothing.

    Not where the user's own settings say whether they do, or take another allocator.  Before CUDA's
    first tensor.
    """
    name = next((name for name in SETTINGS if environment.get(name)), SETTINGS[0])
    given = environment.get(name, "")
    if "expandable_segments" not in given and "MallocAsync" not in given:
        environment[name] = f"{given},expandable_segments:True".removeprefix(",")


def forget(device: torch.device) -> None:
    """Forgets the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak | None:
    """The peak of this process since `forget`; None on a CPU.

    It waits for nothing: the host knows its allocations.
    """
    if device.type != "cuda":
        return None
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def line(account: tuple[int, int], of: Account, found: Peak | None) -> str:
    """The line that compares both."""
    least, most = account
    said = f"the account for {of.device} says {_amount(least)}"
    said += f" to {_amount(most)}, as experts are chosen" if most > least else ""
    if found is None:
        return f"memory: {said}; torch knows no peak of a CPU's memory"
    held = (
        f"memory: tensors took {_amount(found.allocated)}, the allocator"
        f" {_amount(found.reserved)}; {said}"
    )
    if not found.differs(account, of.reserve):
        return held
    return f"{held}: they differ by more than {NEAR:.0%} and the reserve of {_amount(of.reserve)}"


def _amount(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"
