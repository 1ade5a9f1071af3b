"""Whether two plans make the same update of one model."""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from ..config.schema import find_differences
from ..config.units import count_words
from ..ir import BATCH, MICROBATCHES, Dim, Init, Program
from ..syntax.diagnostics import Diagnostic, Note, PlanError
from ..syntax.source import Span
from .inputs import scene
from .interpreter import Outcome, Where
from .interpreter import differing as unequal
from .locate import differences, iterations
from .prime_field import Field
from .reference import Reference, bare, forwards_apart
from .small_sizes import bucket_dims, resize, small

TRIALS = 4

T = TypeVar("T")


def hold_alike(first: Program, second: Program) -> None:
    """Checks that two models, before any placement, make the same update.

    Raises PlanError where they part.
    """
    if diagnostics := [*_sizes(first, second), *_parameters(first, second)]:
        raise PlanError(diagnostics)
    first_axes = {axis.name: 1 for axis in first.axes}
    second_axes = {axis.name: 1 for axis in second.axes}
    dims = small(second, second_axes) | small(first, first_axes)
    a, b = resize(first, first_axes, dims), resize(second, second_axes, dims)
    start = scene(a, Field(TRIALS, 0))
    ours = Reference(a, Field(TRIALS, len(a.axes))).run(start)
    theirs = Reference(b, Field(TRIALS, len(b.axes))).run(start)
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
    lines = list[str]()
    for key, ours, theirs in find_differences(first.train, second.train):
        lines.append(f"`{key}` {ours} and {theirs}")
    first_inits = {param.name: param.init for param in first.params}
    second_inits = {param.name: param.init for param in second.params}
    for name, a, b in _both(first_inits, second_inits):
        if a and b and a != b:
            lines.append(f"`{name}` begins {_init(a)} and {_init(b)}")
    return lines


def _init(init: Init) -> str:
    return f"{init.kind}({', '.join(map(str, init.args))})"


def _both(
    first: Mapping[str, T], second: Mapping[str, T]
) -> Iterator[tuple[str, T | None, T | None]]:
    for name in dict.fromkeys((*first, *second)):
        yield name, first.get(name), second.get(name)


def _sizes(first: Program, second: Program) -> Iterator[Diagnostic]:
    """Dims that the models do not share, or whose sizes differ; the sequences of a step in all."""
    for name, a, b in _both(_dims_to_compare(first), _dims_to_compare(second)):
        if a and b and a.size == b.size:
            continue
        span = first.region.span
        if here := a or b:
            span = here.span
        sizes = [str(dim.size) if dim else "not there" for dim in (a, b)]
        notes = [Note(b.span, sizes[1])] if a and b else []
        message = f"dim `{name}` is {sizes[0]} in the first plan, {sizes[1]} in the second"
        yield _error(message, span, sizes[0], notes)
    if first.train.global_batch != second.train.global_batch:
        spans, counts = list[Span](), list[str]()
        for program in (first, second):
            spans.append(program.train.spans.get("global_batch", program.region.span))
            counts.append(count_words(program.train.global_batch, "sequence"))
        message = "the plans have different numbers of sequences per step"
        yield _error(message, spans[0], counts[0], [Note(spans[1], counts[1])])


def _dims_to_compare(program: Program) -> dict[str, Dim]:
    """By name the dims that programs of one model share."""
    without = _without(program)
    return {dim.name: dim for dim in program.dims if dim.name not in without}


def _without(program: Program) -> set[str]:
    """The dims that may differ between programs of one model."""
    return {BATCH, MICROBATCHES, *bucket_dims(program)}


def _parameters(first: Program, second: Program) -> Iterator[Diagnostic]:
    ours = {param.name: param for param in first.params}
    theirs = {param.name: param for param in second.params}
    for name, a, b in _both(ours, theirs):
        if not a or not b:
            only = a or b
            assert only, "verify: a parameter of neither plan"
            plan = "first" if a else "second"
            yield _error(f"parameter `{name}` is in the {plan} plan alone", only.span)
        elif {*a.type.dims} != {*b.type.dims}:
            notes = [Note(b.span, ", ".join(b.type.dims))]
            message = f"parameter `{name}` does not have the same dims in both plans"
            yield _error(message, a.span, ", ".join(a.type.dims), notes)


def _apart(ours: Outcome, theirs: Outcome) -> list[str]:
    """The results that differ."""
    numbers = Field(TRIALS, 0)
    names = list[str]()
    for (name, _, a), (_, _, b) in zip(ours.results(), theirs.results(), strict=True):
        if unequal(numbers, bare(a), bare(b, a.dims)):
            names.append(name)
    return names


def _diagnostic(
    a: Program, b: Program, forward: tuple[str, Where] | None, wrong: list[str]
) -> Diagnostic:
    count = differences(a, wrong)
    if forward:
        name, where = forward
        message = f"the plans first differ at `{name}`{iterations(where)}"
        notes = (Note(_span_of(b, name), "and here in the second"), count)
        return Diagnostic("E0702", message, _span_of(a, name), "here", notes)
    if a.watch.get_loss_limit != b.watch.get_loss_limit:
        spans, rules = list[Span](), list[str]()
        for program in (a, b):
            spans.append(program.watch.spans.get("spikes", program.region.span))
            is_limited = program.watch.get_loss_limit
            rules.append(f"`spikes = {program.watch.spikes}`" if is_limited else "no rule")
        message = f"the plans skip different steps: {' and '.join(rules)}"
        notes = (Note(spans[1], "and of the second"), count)
        return Diagnostic("E0702", message, spans[0], notes=notes)
    spans = [program.train.spans.get("optimizer", program.region.span) for program in (a, b)]
    notes = (
        Note(spans[1], "and of the second"),
        Note(None, "forward and loss are the same"),
        count,
    )
    message = "the plans first differ at the update"
    return Diagnostic("E0702", message, spans[0], "the optimizer of the first", notes)


def _span_of(program: Program, name: str) -> Span:
    """The place of the op that makes a value, or else of the whole program."""
    span = program.region.span
    for op in program.ops:
        if any(value.name == name for value in op.outputs):
            span = op.span
    return span


def _error(
    message: str, span: Span, label: str = "", notes: list[Note] | None = None
) -> Diagnostic:
    return Diagnostic("E0702", message, span, label, tuple(notes or ()))
