"""Whether two plans make the same update of one model."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from ..config.schema import differing
from ..config.units import counted
from ..ir import BATCH, MICROBATCHES, Init, Program
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from ..syntax.source import Span
from .inputs import scene
from .interpreter import Outcome, Where
from .interpreter import differing as unequal
from .locate import differences, iterations
from .prime_field import Field
from .reference import Reference, bare, forwards_apart
from .small_sizes import made, resized, small

TRIALS = 4

T = TypeVar("T")


def hold_alike(first: Program, second: Program) -> None:
    """Checks that two models, before any placement, make the same update.

    Raises PlanError where they part.
    """
    if found := [*_sizes(first, second), *_parameters(first, second)]:
        raise PlanError(found)
    ones = [{axis.name: 1 for axis in program.axes} for program in (first, second)]
    dims = small(second, ones[1]) | small(first, ones[0])
    a, b = (
        resized(program, axes, dims) for program, axes in zip((first, second), ones, strict=True)
    )
    start = scene(a, Field(TRIALS, 0))
    ours, theirs = (
        Reference(program, Field(TRIALS, len(program.axes))).run(start) for program in (a, b)
    )
    if wrong := _apart(ours, theirs):
        raise PlanError([_diagnostic(a, b, forwards_apart(a, b, start, TRIALS), wrong)])


COMPARED = (
    "one step from the same parameters, tokens and labels: loss, gradient norm, count of"
    " labels, every gradient, every"
    " updated parameter; the optimizer's settings, among them the learning rate's peak,"
    " warm-up and floor"
)
NOT_COMPARED = (
    "how parameters begin; data and their order; the number of steps, over which a cosine"
    " falls; rounding"
)


def unlike(first: Program, second: Program) -> list[str]:
    """Differences between two plans that make the same update."""
    settings = [
        f"`{key}` {own} and {other}" for key, own, other in differing(first.train, second.train)
    ]
    begun = [{param.name: param.init for param in program.params} for program in (first, second)]
    inits = [
        f"`{name}` begins {_init(a)} and {_init(b)}"
        for name, a, b in _both(*begun)
        if a and b and a != b
    ]
    return settings + inits


def _init(init: Init) -> str:
    return f"{init.kind}({', '.join(map(str, init.args))})"


def _both(
    first: Mapping[str, T], second: Mapping[str, T]
) -> Iterator[tuple[str, T | None, T | None]]:
    for name in dict.fromkeys((*first, *second)):
        yield name, first.get(name), second.get(name)


def _sizes(first: Program, second: Program) -> Iterator[Diagnostic]:
    """Dims that the models do not share, or whose sizes differ; the sequences of a step in all."""
    ours, theirs = (
        {d.name: d for d in p.dims if d.name not in _without(p)} for p in (first, second)
    )
    for name, a, b in _both(ours, theirs):
        if a and b and a.size == b.size:
            continue
        span = a.span if a else b.span if b else first.region.span
        sizes = [str(dim.size) if dim else "not there" for dim in (a, b)]
        notes = [Note(b.span, sizes[1])] if a and b else []
        yield _error(
            f"dim `{name}` is {sizes[0]} in the first plan, {sizes[1]} in the second",
            span,
            sizes[0],
            notes,
        )
    if first.train.global_batch != second.train.global_batch:
        spans = [
            program.train.spans.get("global_batch", program.region.span)
            for program in (first, second)
        ]
        counts = [counted(program.train.global_batch, "sequence") for program in (first, second)]
        yield _error(
            "the plans have different numbers of sequences per step",
            spans[0],
            counts[0],
            [Note(spans[1], counts[1])],
        )


def _without(program: Program) -> set[str]:
    """The dims in which programs of one model may differ."""
    return {BATCH, MICROBATCHES, *made(program)}


def _parameters(first: Program, second: Program) -> Iterator[Diagnostic]:
    ours, theirs = ({p.name: p for p in program.params} for program in (first, second))
    for name, a, b in _both(ours, theirs):
        if not a or not b:
            there = a or b
            assert there, "verify: a parameter of neither plan"
            yield _error(
                f"parameter `{name}` is in the {'first' if a else 'second'} plan alone", there.span
            )
        elif {*a.type.dims} != {*b.type.dims}:
            notes = [Note(b.span, ", ".join(b.type.dims))]
            yield _error(
                f"parameter `{name}` does not have the same dims in both plans",
                a.span,
                ", ".join(a.type.dims),
                notes,
            )


def _apart(ours: Outcome, theirs: Outcome) -> list[str]:
    """The results that differ."""
    numbers = Field(TRIALS, 0)
    pairs = zip(ours.results(), theirs.results(), strict=True)
    return [name for (name, _, a), (_, _, b) in pairs if unequal(numbers, bare(a), bare(b, a.dims))]


def _diagnostic(
    a: Program, b: Program, forward: tuple[str, Where] | None, wrong: list[str]
) -> Diagnostic:
    count = differences(a, wrong)
    if forward:
        name, where = forward
        lines = (
            {value.name: op.span for op in program.ops for value in op.outputs}
            for program in (a, b)
        )
        spans = [
            of.get(name, program.region.span) for of, program in zip(lines, (a, b), strict=True)
        ]
        message = f"the plans first differ at `{name}`{iterations(where)}"
        return Diagnostic(
            "E0702", message, spans[0], "here", (Note(spans[1], "and here in the second"), count)
        )
    if a.watch.limited != b.watch.limited:
        spans = [program.watch.spans.get("spikes", program.region.span) for program in (a, b)]
        rules = (
            f"`spikes = {it.watch.spikes}`" if it.watch.limited else "no rule" for it in (a, b)
        )
        message = f"the plans skip different steps: {' and '.join(rules)}"
        return Diagnostic(
            "E0702", message, spans[0], notes=(Note(spans[1], "and of the second"), count)
        )
    spans = [program.train.spans.get("optimizer", program.region.span) for program in (a, b)]
    notes = (
        Note(spans[1], "and of the second"),
        Note(None, "forward and loss are the same"),
        count,
    )
    return Diagnostic(
        "E0702",
        "the plans first differ at the update",
        spans[0],
        "the optimizer of the first",
        notes,
    )


def _error(
    message: str, span: Span, label: str = "", notes: list[Note] | None = None
) -> Diagnostic:
    return Diagnostic("E0702", message, span, label, tuple(notes or ()))
