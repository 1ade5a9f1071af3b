"""The capacity of GPUs, the warning that a plan does not fit, and what of a budget is left for
microbatches.

A warning and no error: the account does not know what a user means to change in the program, and
CUDA is not measured.  Non-goals: what would make it fit (`remedies`).
"""

from ...config.gpus import GIB, GPUS, gpu
from ...config.units import amount
from ...ir import Program
from ...schedules.actions import ScheduleError, Work
from ...schedules.activation_memory import MemoryBudget, least
from ...syntax.diagnostics import Diagnostic, Note, listing
from ..elastic import elastic_axis
from ..expert_loads import with_room
from .account import Account, at_loads, idle
from .need_range import need_range
from .pipeline_peak import Chunks, Stage, keeps, stages_of


def capacity(program: Program) -> int | None:
    """The bytes of a GPU of the plan's cluster; None where it names none, or one whose memory
    is not known.
    """
    found = gpu(program.cluster)
    return program.cluster.memory or (found.memory * GIB if found else None)


def place(program: Program, account: Account) -> str:
    """The rank that an account is of, in words."""
    if account.rank is None or not program.pipeline:
        axis = elastic_axis(program)
        return f"each rank with {axis.name} = {axis.size}" if axis else "each rank"
    return f"rank {account.rank} of {program.pipeline.axis}, which needs most"


def fits(program: Program, account: Account) -> bool | None:
    """Whether a rank's GPU holds what the rank needs; None where it is not known how much it
    has.
    """
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
    message = (
        why_unknown(program)
        if named
        else f"{why_unknown(program)}, so whether it fits is not known"
    )
    help = f"say it in `cluster`: `{SAID}`" if named else f"name one in `cluster`: {listing(GPUS)}"
    return Diagnostic(
        "W0915", message, program.cluster.spans.get("gpu", program.region.span), help=help
    )


def too_large(program: Program, account: Account, help: str) -> Diagnostic:
    """The warning that a rank needs more than its GPU has, with what to do."""
    room, peak = capacity(program), account.peak
    assert room is not None, "memory: a GPU that is not known"
    parts = {"state": account.state, "inputs and tables": account.always - account.state}
    parts |= {
        "saved activations": peak.kept,
        "unsharded": peak.weights + peak.gradients,
        "temporaries": peak.other,
    }
    parts |= {"reserve": account.reserve}
    sizes = " + ".join(
        f"{size / GIB:,.1f} {what}" for what, size in parts.items() if size >= GIB / 20
    )
    needs = [
        f"{load.name} {max(it.needs for it in each) / GIB:,.1f}" for load, each in at_loads(program)
    ]
    loads = (
        [Note(None, f"by the rows that a rank's experts get: {', '.join(needs)} (GiB)")]
        if needs
        else []
    )
    return Diagnostic(
        "W0901",
        f"{_too_large(program, account)} on {place(program, account)}; {program.cluster.gpu}"
        f" has {room / GIB:,.1f} GiB",
        program.cluster.spans.get("gpu", program.region.span),
        f"has {room / GIB:,.0f} GiB",
        (Note(None, f"{sizes} (GiB); `scalec explain memory` shows all"), *loads),
        help,
    )


def _too_large(program: Program, account: Account) -> str:
    """The need in words; where only a part of its range is too large, the range."""
    of = need_range(program, account)
    if of.lacks(capacity(program)):
        return f"does not fit: needs {account.needs / GIB:,.1f} GiB"
    return (
        f"may not fit: needs {account.needs / GIB:,.1f} GiB ({of.low / GIB:,.1f} to"
        f" {of.high / GIB:,.1f})"
    )


def memory_budget(program: Program, most: int) -> MemoryBudget:
    """Memory that microbatches may take where a rank holds no more than `most` bytes in all.

    An action may take as much besides as that of its rank which takes most: which runs when is not
    known.  Raises ScheduleError where a single microbatch is too much.
    """
    program = with_room(program)
    assert program.pipeline, "memory: no pipeline"
    of = stages_of(program)
    sizes = keeps(program, of)
    left: list[float] = []
    for rank, it in enumerate(idle(program, of)):
        own = program.pipeline.stages_of(rank)
        passing = (
            max(_passing(of[stage]) for stage in own) + Chunks(program, program.pipeline, rank).most
        )
        _demand(it, passing, int(least(program.pipeline.stage_to_rank, rank, sizes)), most)
        left.append(most - it.always - passing)
    return MemoryBudget(tuple(left), sizes)


def _passing(stage: Stage) -> int:
    """Memory that actions of a stage take for themselves, beyond what is held before or after
    them.
    """
    held = {
        Work.FORWARD: stage.held,
        Work.BACKWARD: stage.held,
        Work.INPUT: max(stage.held, stage.later),
        Work.WEIGHT: stage.later,
    }
    return max(0, *(stage.during(work).bytes - size for work, size in held.items()))


def _demand(it: Account, passing: int, least: int, most: int) -> None:
    """State and a microbatch, or the update, must fit."""
    update = it.always + it.peak.bytes
    if (needs := max(it.always + passing + least, update)) <= most:
        return
    sizes = {"of state and inputs": it.always}
    if needs > update:
        sizes |= {"of one microbatch": least, "while it is done": passing}
    else:
        sizes |= {"of the update": it.peak.bytes}
    said = " + ".join(f"{amount(size)} {what}" for what, size in sizes.items() if size)
    raise ScheduleError(
        f"rank {it.rank} needs {said} = {amount(needs)}, but its memory budget is {amount(most)}",
        "raise the memory budget, use smaller microbatches, or shard its state",
    )
