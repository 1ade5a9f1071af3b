"""Two plans and a checkpoint: what ranks of one write, each element once, and what those of the
other read of it.
"""

from collections import Counter
from itertools import chain
from math import prod

from ..analysis.state_parts import Parts, fault, shape, written
from ..ir import Program


def between(one: Program, other: Program) -> str:
    """The lines for a checkpoint of one plan that the other goes on with, or why it cannot."""
    parts, read = written(one), written(other)
    if differing := sorted({name for name, _ in parts.keys() ^ read.keys()}):
        return f"no checkpoint goes from one to the other: only one has `{differing[0]}`"
    for name in dict.fromkeys(name for name, _ in parts):
        here, there = shape(one, name), shape(other, name)
        if prod(here) != prod(there):
            shapes = f"{[*here]} in one, {[*there]} in the other"
            help = "convert it with --names hf, which leaves padding out, and back"
            return f"no checkpoint goes from one to the other: `{name}` is {shapes}; {help}"
    _prove(one, parts)
    _prove(other, read)
    load = Counter[int]()
    for extent, rank in chain.from_iterable(parts.values()):
        load[rank] += prod(map(len, extent))
    (busiest, most), *_ = load.most_common(1)
    slots, total = one.train.optimizer.slots, load.total()
    state = f", each with {len(slots)} values of optimizer state" if slots else ""
    return (
        f"{len(parts):,} tensors, {total:,} elements{state}\n"
        f"written  each element once, by one rank: {_count(parts):,} parts by {len(load):,} ranks, "
        f"{most / total:.0%} by rank {busiest}\n"
        f"read     each element by every rank that keeps it, in {_count(read):,} parts"
    )


def _prove(program: Program, parts: Parts) -> None:
    for (name, _), pieces in parts.items():
        wrong = fault(shape(program, name), [extent for extent, _ in pieces])
        assert not wrong, f"checkpoint: `{name}`: {wrong}"


def _count(parts: Parts) -> int:
    return sum(map(len, parts.values()))
