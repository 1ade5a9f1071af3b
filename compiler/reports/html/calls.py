"""The calls of a step, of the rank that sends most, in the words of `scalec explain
collectives`, with seconds.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...analysis.collective import Collective, Use, Where
from ...analysis.communication import collectives, places
from ...analysis.hardware import Hardware
from ...analysis.link_traffic import sent
from ...analysis.stage_program import rank_programs
from ...analysis.time.seconds import of_message
from ...config.units import amount
from ...ir import Program
from ...ops import Message
from ..explain import ACROSS, described
from ..time import seconds
from .subject import Subject


@frozen
class Call:
    """A collective of a step.

    op       with its axes and ranks, for instance `all_gather over tp, 8 ranks`
    often    where and how often, for instance `forward, 32 microbatches x 80 layers`
    whole    elements and element type
    sent     bytes that the rank sends in all calls
    seconds  of all calls, links to itself; None where the speed of links is not known
    """

    use: Use
    where: Where
    value: str
    line: str
    bucket: str
    axes: tuple[str, ...]
    op: str
    often: str
    whole: str
    links: str
    count: int
    sent: int
    seconds: float | None

    @property
    def crosses(self) -> bool:
        """Whether it leaves the node."""
        return self.links == ACROSS

    @property
    def recomputed(self) -> bool:
        """Whether backward does it for a value of forward, not for a gradient."""
        return (
            self.where == "backward"
            and self.use == "activations"
            and not self.value.startswith("d_")
        )

    @property
    def cost(self) -> str:
        """For instance `560.0 GiB in 5,120 calls, 5.11 s`."""
        time = f", {seconds(self.seconds)}" if self.seconds is not None else ""
        return f"{amount(self.sent)} in {self.count:,} call{'s' * (self.count != 1)}{time}"

    @property
    def note(self) -> str:
        """All of it, a line each."""
        parts = (
            f"{self.op}, {self.links}",
            self.often,
            f"the whole: {self.whole}",
            f"sent in a step: {self.cost}",
        )
        return "\n".join((*parts, f"asked for at {self.line}"))


def busiest(ranks: Sequence[list[Call]]) -> list[Call]:
    """The calls of the rank that sends most."""
    return max(ranks, key=lambda each: sum(it.sent for it in each))


def by_rank(of: Subject) -> list[list[Call]]:
    """The calls of each rank along the pipeline's axis, or of all ranks, in the order in which
    they begin.
    """
    program, on = of.program, of.hardware
    own = rank_programs(program) if program.pipeline else [program]
    return [
        [_call(own[rank], it, on) for it in collectives(program, rank)] for rank in places(program)
    ]


PLACES = 3
"""How many places of calls that are alike are named."""


def added(first: Call, second: Call) -> Call:
    """Two alike calls as one."""
    took = (
        None if first.seconds is None or second.seconds is None else first.seconds + second.seconds
    )
    often = [*dict.fromkeys((*first.often.split("; "), second.often))]
    often = [*often[:PLACES], "…"] if len(often) > PLACES else often
    count, size = first.count + second.count, first.sent + second.sent
    return evolve(first, often="; ".join(often), count=count, sent=size, seconds=took)


def _call(program: Program, it: Collective, on: Hardware | None) -> Call:
    op, often, whole, links = described(program, it)
    took = (
        None if on is None else float(it.count * of_message(program, _message(it), on, it.elements))
    )
    words = (op, often, whole, links)
    return Call(
        it.use, it.where, it.value, it.line, it.bucket, it.axes, *words, it.count, sent(it), took
    )


def _message(it: Collective) -> Message:
    among = it.among if it.peer is None else tuple(sorted((it.rank or 0, it.peer)))
    op = "rotate" if it.peer is not None else it.op
    return Message(op, it.value, it.axes, it.dtype, it.shape, among=among)
