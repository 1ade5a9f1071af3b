"""Holds what the ranks of a run communicated against the plan, call for call and in its order.

Order is exact in backward too.  autograd runs, of the nodes that are ready, the one that was made
last; nodes are made in the order of the program, so backward is the program's exact reverse, as the
IR's backward is the reverse of the IR.  A collective that is awaited later is recorded, and is in
the plan, where it begins.

A record cannot show that two calls of one kind, group, shape and dtype changed places.  The plan
does not know how many rows of experts a rank sends: `order` compares their numbers with each other.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import fields, frozen

from ...config.units import count_words
from .files import Call, Record, Stretch, ranks, read_plan, read_records
from .order import as_planned, disorder, find_lost_rows
from .plan import Calls, Expected, get_expected_calls


@frozen
class Difference:
    """Where a rank first leaves the plan: call `position` (from 1) of `stretch`, as it should
    be and as it was.
    """

    rank: int
    stretch: Stretch
    position: int
    what: str
    expected: Expected | None
    recorded: Call | None

    def lines(self) -> str:
        """The place, then both calls."""
        plan, recorded = self.expected or "no further call", self.recorded or "no call"
        place = f"{self.stretch}, call {self.position}: {self.what}"
        return f"{place}\n    plan      {plan}\n    recorded  {recorded}"


@frozen
class Recorded:
    """A run against its plan.

    steps, evaluations  how many rank 0 went through
    calls               how many the plan has in a step, on the rank that has most
    uniform             whether it has as many on each
    differences         each rank's first, by rank
    disorder            what keeps ranks from meeting at their calls, in lines
    lost                where rows of experts are not exchanged as they should be, in lines
    """

    name: str
    ranks: int
    backend: str
    torch: str
    steps: int
    evaluations: int
    calls: int
    uniform: bool
    differences: tuple[Difference, ...]
    disorder: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether every rank did what the plan says, all of it and nothing else, and something
        was recorded.
        """
        return self.steps > 0 and not (self.differences or self.disorder or self.lost)

    def lines(self) -> str:
        """The text for the user."""
        run = f"{count_words(self.steps, 'step')} and {count_words(self.evaluations, 'evaluation')}"
        where = (
            f"{count_words(self.ranks, 'rank')}, {self.backend or 'no backend'}, torch {self.torch}"
        )
        return "\n".join((f"recorded: {self.name}, {run} on {where}", *self._verdict()))

    def _verdict(self) -> Iterator[str]:
        if self.equal:
            calls = f"{count_words(self.calls, 'call')} a step on"
            where = f"up to {calls} a rank"
            if self.uniform:
                where = f"{calls} each rank"
            yield f"equal to the plan, call for call: {where}, in its order"
            yield "all ranks of each group came to the same calls in one order"
        elif not self.steps:
            yield "no step was recorded"
        if self.differences:
            yield "not equal to the plan:"
        for first, same in _group_by_kind(self.differences):
            yield f"  {ranks(same)}, {first.lines()}"
        if self.disorder:
            yield "not one order on all ranks:"
            yield from (f"  {line}" for line in self.disorder)
        if self.lost:
            yield "rows of experts are lost:"
            yield from (f"  {line}" for line in self.lost)


def compare(folder: Path) -> Recorded:
    """Compares the record in `folder`, a run's `recorded/`, with the plan.json in it.

    Raises RecordError where files are missing or damaged, or are of another plan or run.
    """
    plan = read_plan(folder)
    records = read_records(folder, plan)
    first = records[0]
    calls = [get_expected_calls(plan, record.rank) for record in records]
    counts = {len(calls_of_rank["train"]) for calls_of_rank in calls}
    differences, unmet = tuple(_differences(calls, records)), disorder(records)
    # rows can be compared only where all calls are the plan's
    lost_rows = () if differences or unmet else find_lost_rows(calls, records)
    return Recorded(
        name=plan["name"],
        ranks=len(records),
        backend=first.backend,
        torch=first.torch,
        steps=sum(stretch.phase == "train" for stretch in first.stretches),
        evaluations=sum(stretch.phase == "evaluate" for stretch in first.stretches),
        calls=max(counts),
        uniform=len(counts) == 1,
        differences=differences,
        disorder=unmet,
        lost=lost_rows,
    )


def _differences(plan: Sequence[Calls], records: Sequence[Record]) -> Iterator[Difference]:
    longest = max((_stretches_to_compare(record) for record in records), key=len)
    for record, calls in zip(records, plan, strict=True):
        stretches = _stretches_to_compare(record)
        if difference := _first_difference(record.rank, stretches, calls):
            yield difference
        elif len(stretches) < len(longest):
            missing = longest[len(stretches)]
            yield Difference(record.rank, missing, 1, "the record ends before it", None, None)


def _first_difference(rank: int, stretches: Sequence[Stretch], calls: Calls) -> Difference | None:
    for stretch in stretches:
        if difference := _difference(rank, stretch, calls[stretch.phase]):
            return difference
    return None


def _stretches_to_compare(record: Record) -> list[Stretch]:
    """The recorded calls to compare with the plan."""
    return [stretch for stretch in record.stretches if stretch.phase != "loop"]


def _difference(rank: int, stretch: Stretch, plan: Sequence[Expected]) -> Difference | None:
    """The first call that is not the plan's; None where all are, and none is missing."""
    calls = [line.call for line in plan]
    recorded = as_planned(stretch.calls, calls)
    if stretch.whole and recorded == calls:
        return None
    index = min(len(calls), len(recorded))
    for i, (planned, call) in enumerate(zip(calls, recorded, strict=False)):
        if planned != call:
            index = i
            break
    return Difference(
        rank,
        stretch,
        index + 1,
        _what(calls, recorded, index, stretch.whole),
        plan[index] if index < len(plan) else None,
        stretch.calls[index] if index < len(stretch.calls) else None,
    )


def _what(plan: Sequence[Call], recorded: Sequence[Call], index: int, whole: bool) -> str:
    """How the record leaves the plan at call `index`."""
    if index == len(recorded):
        return "a call is missing" if whole else "the record ends here"
    if Counter(recorded) == Counter(plan):
        return "another order"
    following = recorded[index + 1 : index + _NEAR]
    if index == len(plan) or following == plan[index : index + _NEAR - 1]:
        return "a call too many"
    if recorded[index : index + _NEAR] == plan[index + 1 : index + _NEAR + 1]:
        return "a call is missing"
    names = list[str]()
    for field in fields(Call):
        if getattr(plan[index], field.name) != getattr(recorded[index], field.name):
            names.append(field.name)
    return "another " + ", ".join(names)


_NEAR = 3  # calls that must be the plan's for one to count as missing or as too many


def _group_by_kind(differences: Sequence[Difference]) -> Iterator[tuple[Difference, list[int]]]:
    """Differences of one kind in one place, by the first, with all their ranks."""
    kinds: dict[tuple[str, int, str], list[Difference]] = {}
    for difference in differences:
        kind = str(difference.stretch), difference.position, difference.what
        kinds.setdefault(kind, []).append(difference)
    for same in kinds.values():
        yield same[0], [difference.rank for difference in same]
