"""The calls of a step, of the rank that sends most, in the words of `scalec explain
collectives`, with seconds.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...compiler.analysis.collective import Collective, Use, Where
from ...compiler.analysis.communication import collectives, places
from ...compiler.analysis.hardware import Hardware
from ...compiler.analysis.link_traffic import get_sent_bytes
from ...compiler.analysis.stage_program import rank_programs
from ...compiler.analysis.time.seconds import get_message_seconds
from ...compiler.config.units import amount
from ...compiler.ir import Program
from ...compiler.ops import Message
from ...compiler.reports.explain import ACROSS, describe_collective
from ...compiler.reports.time import seconds
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
        """Whether the call leaves the node."""
        return self.links == ACROSS

    @property
    def is_recomputed(self) -> bool:
        """Whether backward makes the call for a value of forward, not for a gradient."""
        return (
            self.where == "backward"
            and self.use == "activations"
            and not self.value.startswith("d_")
        )

    @property
    def cost(self) -> str:
        """For instance `560.0 GiB in 5,120 calls, 5.11 s`."""
        words = f"{amount(self.sent)} in {self.count:,} call{'s' * (self.count != 1)}"
        if self.seconds is not None:
            words += f", {seconds(self.seconds)}"
        return words

    @property
    def note(self) -> str:
        """All of the call in words, on several lines."""
        parts = (
            f"{self.op}, {self.links}",
            self.often,
            f"the whole: {self.whole}",
            f"sent in a step: {self.cost}",
        )
        return "\n".join((*parts, f"asked for at {self.line}"))


def busiest(ranks: Sequence[list[Call]]) -> list[Call]:
    """The calls of the rank that sends most."""
    return max(ranks, key=lambda calls: sum(call.sent for call in calls))


def by_rank(subject: Subject) -> list[list[Call]]:
    """The calls of each rank along the pipeline's axis, or of all ranks, in the order of their
    beginnings.
    """
    program, on = subject.program, subject.hardware
    programs = rank_programs(program) if program.pipeline else [program]
    calls_by_rank: list[list[Call]] = []
    for rank in places(program):
        calls: list[Call] = []
        for collective in collectives(program, rank):
            calls.append(_call(programs[rank], collective, on))
        calls_by_rank.append(calls)
    return calls_by_rank


PLACES = 3
"""How many places of calls that are alike are named."""


def merge_calls(first: Call, second: Call) -> Call:
    """Two alike calls as one."""
    seconds_of_both = None
    if first.seconds is not None and second.seconds is not None:
        seconds_of_both = first.seconds + second.seconds
    often = [*dict.fromkeys((*first.often.split("; "), second.often))]
    if len(often) > PLACES:
        often = [*often[:PLACES], "…"]
    count, size = first.count + second.count, first.sent + second.sent
    return evolve(first, often="; ".join(often), count=count, sent=size, seconds=seconds_of_both)


def _call(program: Program, collective: Collective, on: Hardware | None) -> Call:
    op, often, whole, links = describe_collective(program, collective)
    seconds_of_calls = None
    if on is not None:
        message = _message(collective)
        seconds_of_call = get_message_seconds(program, message, on, collective.elements)
        seconds_of_calls = float(collective.count * seconds_of_call)
    return Call(
        use=collective.use,
        where=collective.where,
        value=collective.value,
        line=collective.line,
        bucket=collective.bucket,
        axes=collective.axes,
        op=op,
        often=often,
        whole=whole,
        links=links,
        count=collective.count,
        sent=get_sent_bytes(collective),
        seconds=seconds_of_calls,
    )


def _message(collective: Collective) -> Message:
    """A collective as its seconds are counted: a message between two ranks is a rotation."""
    op, among = collective.op, collective.among
    if collective.peer is not None:
        op = "rotate"
        among = tuple(sorted((collective.rank or 0, collective.peer)))
    return Message(
        op, collective.value, collective.axes, collective.dtype, collective.shape, among=among
    )
