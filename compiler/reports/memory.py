"""The report of the memory account: peak memory and saved activations.

Non-goals: the account itself (`memory`), and JSON (`emit.plan_json`).
"""

from collections.abc import Iterator

from ..analysis.memory import Account, Kept, PeakSnapshot, account, capacity, fits, place
from ..config.units import amount
from ..ir import Program
from .summary import headline, table

SHOWN = 12
"""How many rows of what forward keeps are shown; the smaller ones are added up."""


def memory(program: Program) -> str:
    """The account of a program after the last pass, for people."""
    it = account(program)
    parts = ["\n".join(table(list(_always(it)))), *_padding(it), "\n".join(table(list(_kept(it))))]
    return "\n\n".join((headline(program), _verdict(program, it), *parts))


def _verdict(program: Program, it: Account) -> str:
    """Whether it fits."""
    needs = f"needs {amount(it.needs)} on {place(program, it)}"
    gpu, room = program.cluster.gpu, capacity(program)
    if room is None:
        return f"{needs}, counted for the CPU: the plan names no GPU"
    return f"{'fits' if fits(program, it) else 'does not fit'}: {needs}; {gpu} has {amount(room)}"


def _always(it: Account) -> Iterator[tuple[str, str, str]]:
    """What is in memory at the fullest moment: these add up."""
    buckets = it.buckets
    slots = ", ".join(dict.fromkeys(name for bucket in buckets for name, _ in bucket.slots))
    parts = "layers" if it.rank is None else "stages"
    held = [
        ("parameters", "", sum(bucket.parameters for bucket in buckets)),
        ("masters", "", sum(bucket.masters for bucket in buckets)),
        ("gradients", "", sum(bucket.gradients for bucket in buckets)),
        ("optimizer", slots, it.state - sum(b.parameters + b.masters + b.gradients for b in buckets)),
        ("inputs", "of all microbatches", it.inputs),
        ("tables", "rotary positions", it.tables),
        ("saved activations", "of one microbatch" if it.rank is None else "of microbatches in flight", it.peak.kept),
        ("unsharded weights", f"of {parts}, temporarily", it.peak.weights),
        ("unsharded gradients", f"of {parts}, temporarily", it.peak.gradients),
        ("temporaries", moment(it.peak), it.peak.other),
        ("reserve", "driver, CUDA, cuBLAS, NCCL", it.reserve),
        ("total", "at peak memory", it.needs),
    ]
    yield "per rank", "", "bytes"
    yield from ((what, detail, amount(size)) for what, detail, size in held if size)


def _padding(it: Account) -> Iterator[str]:
    """What of the state no parameter has, if that is anything."""
    if it.padding:
        share = f"{amount(it.padding)}, {it.padding / it.state:.1%}"
        yield f"padding of buckets, so that shards are equal and end between rows of tensors: {share} of state"


def moment(it: PeakSnapshot) -> str:
    """For instance `backward of w_down, layers 126 of 126, llama.scale:28`."""
    if it.op is None:
        return it.where
    turns = [f"{dim} {at:,} of {size:,}" for dim, at, size in it.turns]
    return ", ".join([f"{it.where} of {it.name}", *turns, str(it.op.span)])


def _kept(it: Account) -> Iterator[tuple[str, str, str]]:
    """What forward keeps, by op and plan line, the largest first."""
    rows: dict[tuple[str, str], list[Kept]] = {}
    for kept in it.kept:
        rows.setdefault((kept.op.kind, str(kept.op.span)), []).append(kept)
    sizes = sorted(((sum(k.total for k in all_), *row) for row, all_ in rows.items()), key=lambda row: -row[0])
    yield "saved activations" if it.rank is None else "saved activations of a microbatch", "line", "bytes"
    yield from ((kind, line, amount(size)) for size, kind, line in sizes[:SHOWN])
    if rest := sizes[SHOWN:]:
        yield f"{len(rest)} others", "", amount(sum(size for size, _, _ in rest))
    yield "total", "", amount(it.activations)
