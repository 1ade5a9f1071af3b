"""What GPUs hold, and the warning that a plan does not fit.

A warning and no error: the account does not know what a user means to change in the program, and CUDA is not measured.
Non-goals: what a driver and communication libraries keep for themselves.
"""

from ..diagnostics import Diagnostic, Note
from ..gpus import gpu
from ..ir import Program
from .account import Account

GIB = 2**30

SHARED = (
    "masters and optimizer state",
    "gradients, masters and optimizer state",
    "parameters and all that belongs to them",
)
"""What the stages of ZeRO share out."""


def capacity(program: Program) -> int | None:
    """The bytes of a GPU of the plan's cluster; None where it names none."""
    found = gpu(program)
    return program.cluster.memory or (found.memory * GIB if found else None)


def place(program: Program, account: Account) -> str:
    """Of which rank an account is."""
    if account.rank is None or not program.pipeline:
        return "each rank"
    return f"rank {account.rank} of {program.pipeline.axis}, which needs most"


def too_large(program: Program, account: Account) -> Diagnostic | None:
    """The warning that a rank holds more than its GPU, if it does."""
    room = capacity(program)
    if room is None or account.total <= room:
        return None
    peak = account.peak
    parts = {"state": account.state, "inputs and tables": account.always - account.state}
    parts |= {"kept for backward": peak.kept, "of turns": peak.weights + peak.gradients, "on its way": peak.other}
    sizes = " + ".join(f"{size / GIB:,.1f} {what}" for what, size in parts.items() if size >= GIB / 20)
    return Diagnostic(
        "W0901",
        f"does not fit: needs {account.total / GIB:,.1f} GiB of {room / GIB:,.1f} GiB on {place(program, account)}",
        program.cluster.spans.get("gpu", program.region.span),
        f"has {room / GIB:,.0f} GiB",
        (Note(None, f"{sizes} (GiB); `scalec explain memory` shows all"),),
        _help(program, account, room),
    )


def _help(program: Program, account: Account, room: int) -> str:
    """What makes the larger part smaller."""
    data = tuple(dict.fromkeys(claim.axis for claim in program.claims if claim.dim == "batch"))
    if data and account.state > account.activations and (stage := _stage(program, account, room, data)):
        return f"share out {SHARED[stage - 1]}: `state {{ zero {stage} over {', '.join(data)} }}`"
    if account.state > room:
        return "put dims of parameters over more ranks, as `vocab, heads, ffn over tp` does"
    ways = ["`recompute = full`"] if program.train.recompute.word == "none" else []
    ways += [f"`microbatch` below {program.train.microbatch}"] if program.train.microbatch > 1 else []
    ways += ["a shorter `seq`", "a larger degree of the axes that shard activations"]
    return f"try {', '.join(ways[:-1])} or {ways[-1]}"


def _stage(program: Program, account: Account, room: int, data: tuple[str, ...]) -> int:
    """The first stage of ZeRO over these axes that is not taken and may make it fit, or else the last; 0 if all are."""
    buckets, needs, found = account.buckets, account.total, 0
    sizes = {
        "optimizer": sum(bucket.masters + bucket.optimizer for bucket in buckets),
        "gradients": sum(bucket.gradients for bucket in buckets),
        "parameters": sum(bucket.parameters for bucket in buckets),
    }
    for stage, (kind, size) in enumerate(sizes.items(), start=1):
        if needs > room and not any(getattr(state, kind) for state in program.state):
            needs, found = needs - size + size // program.degree(data), stage
    return found
