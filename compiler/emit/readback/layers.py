"""Compares what a loop of a text goes over with the IR, and says what each layer has of its own.

Purpose: `Forward` asks its `Layers`, so that a stage of a pipeline can have the layers of the stage
where other models have all.  Non-goals: what a layer does (`forward`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from ...ir import Arg, Program, Region
from .machine import Machine
from .terms import Loop, demand, frozen_key
from .values import Modules


class Layers(Protocol):
    """The layers of repeats that a run goes through."""

    def received(self, arg: Arg) -> object | None:
        """The value that enters the first layer by this argument, if another stage has made it."""
        ...

    def demand_domains(self, region: Region, loop: Loop, others: Sequence[object]) -> None:
        """Raises where a loop goes over other modules than the repeat's, or over more or fewer, or
        over anything else than `others`.
        """
        ...

    def draws(self, loop: Loop, all_: object) -> object:
        """The draws of one layer, out of the draws of all layers."""
        ...

    def recompute(self, loop: Loop, interval: int) -> object:
        """Whether backward recomputes this layer; it does so with the first of each interval."""
        ...


class AllLayers:
    """All layers of each repeat, by their modules."""

    def __init__(self, machine: Machine, program: Program) -> None:
        self._machine, self._program = machine, program

    def received(self, arg: Arg) -> object | None:
        """None, for there are no other stages."""
        return None

    def demand_domains(self, region: Region, loop: Loop, others: Sequence[object]) -> None:
        """Raises unless a loop goes over the modules and over `others`."""
        size = self._program.size(region.dim)
        modules, found = list[Modules](), Counter[object]()
        for domain in loop.domains:
            if isinstance(domain, Modules):
                modules.append(domain)
            else:
                found[frozen_key(domain)] += 1
        count = len(modules[0].by_key) if modules else 0
        has_modules = len(modules) == 1 and count == size
        demand(loop.node, has_modules, f"has {count} modules for the {size} {region.dim}")
        wanted = Counter(map(frozen_key, others))
        if (interval := get_recompute_interval(self._program, region)) > 1:
            wanted[frozen_key(_first_of_each(interval, size))] += 1
        demand(loop.node, found == wanted, f"goes over {_to_text(found)}, not {_to_text(wanted)}")

    def draws(self, loop: Loop, all_: object) -> object:
        """The draws that the loop has for the layer."""
        return self._machine.terms("each", all_, loop.symbol)

    def recompute(self, loop: Loop, interval: int) -> object:
        """Whether backward recomputes this layer, by what the loop has for it."""
        if interval < 2:
            return True if interval else None
        size = next(len(modules.by_key) for modules in loop.domains if isinstance(modules, Modules))
        return self._machine.terms("each", _first_of_each(interval, size), loop.symbol)


def get_recompute_interval(program: Program, region: Region) -> int:
    """The interval of wholly recomputed layers: the first layer of each interval is; 0 for none."""
    recompute = program.train.recompute
    if any(isinstance(inner, Region) for inner in region.body):
        return 0
    if recompute.word == "every" and region.dim in recompute.names:
        return recompute.number
    return int(recompute.word == "full" or region.dim in program.recomputed)


def _first_of_each(interval: int, size: int) -> tuple[bool, ...]:
    """For each layer, whether it is the first of its interval."""
    return tuple(i % interval == 0 for i in range(size))


def _to_text(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "nothing else"
