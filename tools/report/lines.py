"""The text of the plan and of the model it uses, with notes on each line: values, memory,
collectives.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from attrs import evolve, frozen

from ...compiler.analysis.memory import account, capacity
from ...compiler.config.units import amount, count_words
from ...compiler.ir import Program, Type, base, walk
from ...compiler.ir.printer import print_type
from ...compiler.reports.time import seconds
from ...compiler.syntax.source import Span
from .calls import Call
from .subject import Subject


@frozen
class Line:
    """A line of text, its notes, and what it costs in short."""

    number: int
    text: str
    notes: tuple[str, ...]
    badge: str


@frozen
class Text:
    """A file."""

    name: str
    lines: tuple[Line, ...]


def annotated_files(subject: Subject, calls: Sequence[Call]) -> list[Text]:
    """The plan, then other files that its ops are from."""
    spans = [subject.source.whole()]
    spans.extend(op.span for op in walk(subject.program.region.body))
    spans.extend(param.span for param in subject.program.params)
    files = {span.path: span for span in spans if span.text}
    notes = _notes(subject, calls)
    return [Text(span.file, tuple(_lines(span, notes, calls))) for span in files.values()]


def _lines(span: Span, notes: dict[str, list[str]], calls: Sequence[Call]) -> Iterator[Line]:
    for number, line in enumerate(span.text.rstrip("\n").split("\n"), 1):
        place = str(evolve(span, line=number))
        calls_of_line = [call for call in calls if call.line == place]
        badge = ""
        if calls_of_line:
            badge = f"sends {amount(sum(call.sent for call in calls_of_line))}"
        yield Line(number, line, tuple(notes.get(place, ())), badge)


def _notes(subject: Subject, calls: Sequence[Call]) -> dict[str, list[str]]:
    """Notes by line, in the words of spans, each once."""
    notes_by_line = dict[str, dict[str, None]]()
    settings, values = _settings(subject, calls), _values(subject.program)
    for line, note in chain(settings, values, _costs(subject, calls)):
        notes_by_line.setdefault(str(line), {})[note] = None
    return {line: [*notes] for line, notes in notes_by_line.items()}


def _values(program: Program) -> Iterator[tuple[Span, str]]:
    """The types of parameters and of the values that the plan names."""
    for param in program.params:
        yield param.span, f"parameter {param.name}: {print_type(param.type)}"
    for op in walk(program.forward.body):
        for value in op.outputs:
            if op.kind not in ("unpack", "pack") and not value.name.startswith("_"):
                yield op.span, f"{base(value.name)}: {print_type(value.type)}"


def _costs(subject: Subject, calls: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """The costs of each line: what it keeps, its collectives, and the seconds of a step that are
    spent on it, by kind.
    """
    bytes_by_line = Counter[str]()
    for saved in account(subject.program).kept:
        bytes_by_line[str(saved.op.span)] += saved.total
    for line, size in bytes_by_line.items():
        yield line, f"saved for backward: {amount(size)} of a microbatch"
    for call in calls:
        if call.use != "stages":
            yield call.line, f"{call.op}, {call.often}: {call.cost}, {call.links}"
    if time := subject.time:
        for (kind, line), spent in sorted(time.step.spent.items(), key=lambda item: -item[1]):
            if spent > 0.0005 * time.step.seconds:
                yield line, f"{kind}: {seconds(spent)} of a step of {seconds(time.step.seconds)}"


def _settings(subject: Subject, calls: Sequence[Call]) -> Iterator[tuple[Span, str]]:
    """Notes on a plan's own lines: its axes, its rules, its dims, its GPU."""
    program = subject.program
    for axis in program.axes:
        size = amount(sum(call.sent for call in calls if axis.name in call.axes))
        yield (
            axis.span,
            f"axis {axis.name}: {count_words(axis.size, 'rank')};"
            f" each sends {size} over it in a step",
        )
    for claim in program.claims:
        size, degree = program.size(claim.dim), program.axis(claim.axis).size
        part = "whole on each rank"
        if claim.split:
            part = f"{size:,} / {degree:,} = {size // degree:,} on a rank"
        yield (
            claim.span,
            f"{claim.dim} over {claim.axis}: {part}, unless an earlier rule has {claim.axis}",
        )
    for dim in program.dims:
        is_in_text = str(dim.size) in dim.span.words.replace("_", "")
        if not is_in_text and program.bucket_of(Type("f32", (dim.name,))) is None:
            yield dim.span, f"{dim.name} = {dim.size:,}"
    if (room := capacity(program)) and (span := program.cluster.spans.get("gpu")):
        yield span, f"a rank needs {amount(account(program).needs)} of {amount(room)}"
