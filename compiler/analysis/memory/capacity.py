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
    if program.cluster.memory:
        return program.cluster.memory
    known_gpu = gpu(program.cluster)
    return known_gpu.memory * GIB if known_gpu else None


def place(program: Program, account: Account) -> str:
    """The rank that an account is for, in words."""
    if account.rank is not None and program.pipeline:
        return f"rank {account.rank} of {program.pipeline.axis}, which needs most"
    axis = elastic_axis(program)
    return f"each rank with {axis.name} = {axis.size}" if axis else "each rank"


def fits(program: Program, account: Account) -> bool | None:
    """Whether a rank's GPU holds what the rank needs; None where it is not known how much it
    has.
    """
    room = capacity(program)
    if room is None:
        return None
    return account.needs <= room


SAID = "memory = 16GiB"
"""How a plan says what a GPU has."""


def why_unknown(program: Program) -> str:
    """Why the capacity is not known, in words."""
    gpu = program.cluster.gpu
    return f"the memory of `{gpu}` is not known" if gpu else "the plan names no GPU"


def unknown(program: Program) -> Diagnostic:
    """The warning that it is not known whether a plan fits."""
    message = why_unknown(program)
    if program.cluster.gpu:
        help = f"say it in `cluster`: `{SAID}`"
    else:
        message += ", so whether it fits is not known"
        help = f"name one in `cluster`: {listing(GPUS)}"
    span = program.cluster.spans.get("gpu", program.region.span)
    return Diagnostic("W0915", message, span, help=help)


def too_large(program: Program, account: Account, help: str) -> Diagnostic:
    """The warning that a rank needs more than its GPU has, with what to do."""
    room, peak = capacity(program), account.peak
    assert room is not None, "memory: a GPU that is not known"
    parts = {
        "state": account.state,
        "inputs and tables": account.always - account.state,
        "saved activations": peak.kept,
        "unsharded": peak.weights + peak.gradients,
        "temporaries": peak.other,
        "reserve": account.reserve,
    }
    sizes = list[str]()
    for what, size in parts.items():
        if size >= GIB / 20:
            sizes.append(f"{size / GIB:,.1f} {what}")
    notes = [Note(None, f"{' + '.join(sizes)} (GiB); `scalec explain memory` shows all")]
    needs = list[str]()
    for load, accounts in at_loads(program):
        most = max(account.needs for account in accounts)
        needs.append(f"{load.name} {most / GIB:,.1f}")
    if needs:
        text = f"by the rows that a rank's experts get: {', '.join(needs)} (GiB)"
        notes.append(Note(None, text))
    return Diagnostic(
        "W0901",
        f"{_too_large(program, account)} on {place(program, account)}; {program.cluster.gpu}"
        f" has {room / GIB:,.1f} GiB",
        program.cluster.spans.get("gpu", program.region.span),
        f"has {room / GIB:,.0f} GiB",
        tuple(notes),
        help,
    )


def _too_large(program: Program, account: Account) -> str:
    """The need in words; where only a part of its range is too large, the range."""
    needs = need_range(program, account)
    if needs.lacks(capacity(program)):
        return f"does not fit: needs {account.needs / GIB:,.1f} GiB"
    return (
        f"may not fit: needs {account.needs / GIB:,.1f} GiB ({needs.low / GIB:,.1f} to"
        f" {needs.high / GIB:,.1f})"
    )


def memory_budget(program: Program, most: int) -> MemoryBudget:
    """Memory that microbatches may take where a rank holds no more than `most` bytes in all.

    Each action is taken to need as much besides as the rank's action that needs most, since it is
    not known which runs when.  Raises ScheduleError where a single microbatch is too much.
    """
    program = with_room(program)
    assert program.pipeline, "memory: no pipeline"
    stages = stages_of(program)
    sizes = keeps(program, stages)
    left: list[float] = []
    for rank, account in enumerate(idle(program, stages)):
        numbers = program.pipeline.stages_of(rank)
        passing = max(_passing(stages[number]) for number in numbers)
        passing += Chunks(program, program.pipeline, rank).most
        microbatch = int(least(program.pipeline.stage_to_rank, rank, sizes))
        _check_needs(account, passing, microbatch, most)
        left.append(most - account.always - passing)
    return MemoryBudget(tuple(left), sizes)


def _passing(stage: Stage) -> int:
    """Bytes that actions of a stage take for themselves, beyond what is in memory before or after
    them.
    """
    around = {
        Work.FORWARD: stage.microbatch_bytes,
        Work.BACKWARD: stage.microbatch_bytes,
        Work.INPUT: max(stage.microbatch_bytes, stage.later),
        Work.WEIGHT: stage.later,
    }
    passing = 0
    for work, size in around.items():
        passing = max(passing, stage.during(work).bytes - size)
    return passing


def _check_needs(account: Account, passing: int, microbatch: int, most: int) -> None:
    """Raises ScheduleError unless state and a microbatch fit, and the update too."""
    update = account.always + account.peak.bytes
    needs = max(account.always + passing + microbatch, update)
    if needs <= most:
        return
    sizes = {"of state and inputs": account.always}
    if needs > update:
        sizes |= {"of one microbatch": microbatch, "while it is done": passing}
    else:
        sizes |= {"of the update": account.peak.bytes}
    sum_words = " + ".join(f"{amount(size)} {what}" for what, size in sizes.items() if size)
    raise ScheduleError(
        f"rank {account.rank} needs {sum_words} = {amount(needs)}, but its memory budget is"
        f" {amount(most)}",
        "raise the memory budget, use smaller microbatches, or shard its state",
    )
