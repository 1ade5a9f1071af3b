"""The capacity of GPUs, and the warning that a plan does not fit.

A warning and no error: the account does not know what a user means to change in the program, and CUDA is not measured.
Non-goals: what would make it fit (`remedies`).
"""

from collections.abc import Iterator

from ...config.gpus import GIB, GPUS, gpu
from ...ir import Program
from ...syntax.diagnostics import Diagnostic, Note, listing
from ..elastic import elastic_axis
from .account import Account, at_loads


def capacity(program: Program) -> int | None:
    """The bytes of a GPU of the plan's cluster; None where it names none, or one whose memory is not known."""
    found = gpu(program.cluster)
    return program.cluster.memory or (found.memory * GIB if found else None)


def place(program: Program, account: Account) -> str:
    """The rank that an account is of, in words."""
    if account.rank is None or not program.pipeline:
        axis = elastic_axis(program)
        return f"each rank with {axis.name} = {axis.size}" if axis else "each rank"
    return f"rank {account.rank} of {program.pipeline.axis}, which needs most"


def fits(program: Program, account: Account) -> bool | None:
    """Whether a rank's GPU holds what the rank needs; None where it is not known how much it has."""
    room = capacity(program)
    return None if room is None else account.needs <= room


SAID = "memory = 16GiB"
"""How a plan says what a GPU has."""


def why_unknown(program: Program) -> str:
    """Why the capacity is not known, in words."""
    gpu = program.cluster.gpu
    return f"the memory of `{gpu}` is not known" if gpu else "the plan names no GPU"


def unknown(program: Program) -> Diagnostic:
    """The warning that it is not known whether a plan fits."""
    named = program.cluster.gpu
    message = why_unknown(program) if named else f"{why_unknown(program)}, so whether it fits is not known"
    help = f"say it in `cluster`: `{SAID}`" if named else f"name one in `cluster`: {listing(GPUS)}"
    return Diagnostic("W0915", message, program.cluster.spans.get("gpu", program.region.span), help=help)


def _of_loads(program: Program) -> Iterator[Note]:
    """Notes on needs with other loads of experts than that which is counted."""
    if found := at_loads(program):
        needs = [f"{load.name} {max(it.needs for it in each) / GIB:,.1f}" for load, each in found]
        yield Note(None, f"by the rows that a rank's experts get: {', '.join(needs)} (GiB)")


def too_large(program: Program, account: Account, help: str) -> Diagnostic:
    """The warning that a rank needs more than its GPU has, with what to do."""
    room, peak = capacity(program), account.peak
    assert room is not None, "memory: a GPU that is not known"
    parts = {"state": account.state, "inputs and tables": account.always - account.state}
    parts |= {"saved activations": peak.kept, "unsharded": peak.weights + peak.gradients, "temporaries": peak.other}
    parts |= {"reserve": account.reserve}
    sizes = " + ".join(f"{size / GIB:,.1f} {what}" for what, size in parts.items() if size >= GIB / 20)
    return Diagnostic(
        "W0901",
        f"does not fit: needs {account.needs / GIB:,.1f} GiB on {place(program, account)}; "
        f"{program.cluster.gpu} has {room / GIB:,.1f} GiB",
        program.cluster.spans.get("gpu", program.region.span),
        f"has {room / GIB:,.0f} GiB",
        (Note(None, f"{sizes} (GiB); `scalec explain memory` shows all"), *_of_loads(program)),
        help,
    )
