"""Two plans and a checkpoint: which elements the ranks of one plan write, each element once, and
which elements the ranks of the other plan read.
"""

from collections import Counter
from itertools import chain
from math import prod

from ...compiler.ir import Program
from .state_parts import Parts, fault, get_written_parts, shape


def explain_handover(one: Program, other: Program) -> str:
    """The lines for a checkpoint of one plan that the other goes on with, or why it cannot."""
    parts, parts_read = get_written_parts(one), get_written_parts(other)
    names_of_one_plan = {name for name, _ in parts.keys() ^ parts_read.keys()}
    if names_of_one_plan:
        first = min(names_of_one_plan)
        return f"no checkpoint goes from one to the other: only one has `{first}`"
    for name in dict.fromkeys(name for name, _ in parts):
        here, there = shape(one, name), shape(other, name)
        if prod(here) != prod(there):
            shapes = f"{[*here]} in one, {[*there]} in the other"
            help = "convert it with --names hf, which leaves padding out, and back"
            return f"no checkpoint goes from one to the other: `{name}` is {shapes}; {help}"
    _prove(one, parts)
    _prove(other, parts_read)
    elements_by_rank = Counter[int]()
    for extent, rank in chain.from_iterable(parts.values()):
        elements_by_rank[rank] += prod(map(len, extent))
    (busiest, most), *_ = elements_by_rank.most_common(1)
    slots, total = one.train.optimizer.slots, elements_by_rank.total()
    state = ""
    if slots:
        state = f", each with {len(slots)} values of optimizer state"
    return (
        f"{len(parts):,} tensors, {total:,} elements{state}\n"
        f"written  each element once, by one rank: {_count(parts):,} parts by"
        f" {len(elements_by_rank):,} ranks, {most / total:.0%} by rank {busiest}\n"
        f"read     each element by every rank that keeps it, in {_count(parts_read):,} parts"
    )


def _prove(program: Program, parts: Parts) -> None:
    for (name, _), pieces in parts.items():
        wrong = fault(shape(program, name), [extent for extent, _ in pieces])
        assert not wrong, f"checkpoint: `{name}`: {wrong}"


def _count(parts: Parts) -> int:
    return sum(map(len, parts.values()))
