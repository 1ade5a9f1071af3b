"""Sets up torch's GPU allocator, and compares its peak memory with the compiler's account."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from ..config.plan import Account

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables that set up the allocator.

Torch reads the first that is set; the second is the older name.
"""

NEAR = 0.03
"""The fraction of the account by which a step may differ from it; `tests/analysis/memory` hold the
account to the same on the CPU.
"""


@dataclass(frozen=True)
class Peak:
    """The most bytes that tensors took at once, and the most that the allocator reserved."""

    allocated: int
    reserved: int

    def differs(self, account: tuple[int, int], reserve: int) -> bool:
        """Whether it is further from the account than NEAR and the reserve explain.

        `account` has the least and the most bytes.
        """
        least, most = account
        return not (1 - NEAR) * least - reserve <= self.allocated <= (1 + NEAR) * most + reserve


def expand_segments(environment: MutableMapping[str, str]) -> None:
    """Lets segments of memory grow, so that blocks which come and go leave no gaps that fit
    nothing.

    Changes nothing where the user's settings decide this themselves, or choose another allocator.
    Call it before CUDA's first tensor.
    """
    name = next((name for name in SETTINGS if environment.get(name)), SETTINGS[0])
    setting = environment.get(name, "")
    if "expandable_segments" not in setting and "MallocAsync" not in setting:
        environment[name] = f"{setting},expandable_segments:True".removeprefix(",")


def forget(device: torch.device) -> None:
    """Forgets the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> Peak | None:
    """The peak of this process since `forget`; None on a CPU.

    Does not wait for the device: the host knows its allocations.
    """
    if device.type != "cuda":
        return None
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def line(account: tuple[int, int], plan_account: Account, measured: Peak | None) -> str:
    """The line that compares the account of this rank, the least and the most bytes, with the
    measured peak.
    """
    least, most = account
    expected = f"the account for {plan_account.device} says {_amount(least)}"
    if most > least:
        expected += f" to {_amount(most)}, as experts are chosen"
    if measured is None:
        return f"memory: {expected}; torch knows no peak of a CPU's memory"
    comparison = (
        f"memory: tensors took {_amount(measured.allocated)}, the allocator"
        f" {_amount(measured.reserved)}; {expected}"
    )
    if not measured.differs(account, plan_account.reserve):
        return comparison
    reserve = _amount(plan_account.reserve)
    return f"{comparison}: they differ by more than {NEAR:.0%} and the reserve of {reserve}"


def _amount(size: int) -> str:
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:,.2f} MiB"
