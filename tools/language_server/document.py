"""A document as it is typed: its text now, the last text that was a plan, and the last one that
made a program.

Purpose: diagnostics at once, facts of the compiled step after a pause.  Facts that an edit leaves
true stay.  All functions are pure, except that they read the files that a plan uses.  Non-goals:
the protocol.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from os.path import realpath

from attrs import evolve, frozen

from ...compiler.analysis.elastic import smallest
from ...compiler.analysis.hardware import Hardware, hardware
from ...compiler.analysis.memory import Account, account, fits, too_large
from ...compiler.analysis.time.clocks import StepTime
from ...compiler.analysis.time.op_rows import OpRow, op_rows
from ...compiler.analysis.time.step import step_time
from ...compiler.config.settings import Train
from ...compiler.frontend.load_plan import open_used_file
from ...compiler.frontend.validate import validate
from ...compiler.ir import Op, Program
from ...compiler.reports.lints import advice
from ...compiler.syntax import tree
from ...compiler.syntax.diagnostics import Diagnostic, PlanError
from ...compiler.syntax.limits import Reader, load
from ...compiler.syntax.parser import parse_with_mistakes
from ...compiler.syntax.source import Source, Span, is_ir
from ...compiler.tuning.lowering import lower, resolve_plan
from .mentions import Mention, mentions
from .moved import TextChange
from .sent import Ranks, get_collectives_by_rank

PLACED = "insert_collectives"
"""The pass after which each value that a plan names has its placement."""

STAND_IN = Source(
    "the settings of a plan",
    "train { seq = 64  global_batch = 1  microbatch = 1  steps = 1  optimizer sgd { lr = 1 }"
    " data text { files = [python_stdlib] } }",
)
"""Settings for reading a file that has a model alone."""


@frozen
class Syntax:
    """The last text that was a plan, with the files that it uses.

    plans  the syntax trees of all files; the tree of the document itself comes first
    """

    plans: tuple[tree.Plan, ...]

    @property
    def source(self) -> Source:
        """The document's own text."""
        return source_of(self.plans[0])

    @property
    def is_model(self) -> bool:
        """Whether the document has a model alone, which other files use."""
        document = self.plans[0]
        kinds = {section.kind.name for section in document.sections()}
        has_model = any(isinstance(item, tree.Model) for item in document.items)
        return has_model and not kinds & {"train", "mesh"}

    @cached_property
    def mentions(self) -> tuple[Mention, ...]:
        """All names; names in the document come first."""
        return mentions(self.plans)


@frozen
class Facts:
    """The step of the last text that made a program.

    model    the program without placements
    placed   the program where each value has its placement
    program  the program after the last pass
    timing   its time; None where the speed of the plan's GPU is not known
    warnings the compiler's advice
    """

    source: Source
    model: Program
    placed: Program
    program: Program
    collectives_by_rank: Ranks
    memory: Account
    timing: "Timing | None" = None
    warnings: tuple[Diagnostic, ...] = ()

    @property
    def step(self) -> StepTime | None:
        """The time of the step."""
        return self.timing.step if self.timing else None

    @property
    def rows(self) -> tuple[OpRow, ...]:
        """The time of each op."""
        return self.timing.rows if self.timing else ()

    @cached_property
    def makers(self) -> dict[str, Op]:
        """The op that makes each value."""
        return {value.name: op for op in self.program.ops for value in op.outputs}


@frozen
class Timing:
    """The time of a step on its GPU, computed when a hover asks for it."""

    _program: Program
    _gpu: Hardware

    @cached_property
    def step(self) -> StepTime:
        """The time of the step."""
        return step_time(self._program, self._gpu)

    @cached_property
    def rows(self) -> tuple[OpRow, ...]:
        """The time of each op."""
        return tuple(op_rows(self._program, self._gpu, self.step.rank))


@frozen
class Document:
    """A document.

    syntax  may be of an earlier text than `source`
    facts   may be of an earlier text than `source`
    model   None where `source` makes no model
    """

    source: Source
    syntax: Syntax | None = None
    facts: Facts | None = None
    model: Program | None = None
    mistakes: tuple[Diagnostic, ...] = ()
    last_compiled: tuple[Source, tuple[Diagnostic, ...]] | None = None
    """The text that was compiled last, and all diagnostics of that compile."""

    @property
    def is_current(self) -> bool:
        """Whether the text as it is now is a plan."""
        return (
            self.syntax is not None
            and self.syntax.source.text == self.source.text
            and is_whole(self.source)
        )

    @property
    def is_model(self) -> bool:
        """Whether it has a model alone, so that the sizes of its data are not known."""
        return self.syntax is not None and self.syntax.is_model

    @property
    def plans(self) -> tuple[tree.Plan, ...]:
        """The syntax trees of the document and of the files that it uses."""
        return self.syntax.plans if self.syntax else ()

    @property
    def mentions(self) -> tuple[Mention, ...]:
        """The names in the last text that was a plan, and in the files that it uses."""
        return self.syntax.mentions if self.syntax else ()

    @cached_property
    def _change(self) -> "TextChange":
        """From the text of the syntax to the text as it is now."""
        assert self.syntax, "lsp: a place without syntax"
        return TextChange(self.syntax.source, self.source)

    def mention(self, line: int, column: int) -> Mention | None:
        """The name at a place of the text as it is now, by the last text that was a plan."""
        if not self.syntax:
            return None
        place = self._change.before(line, column)
        if not place:
            return None
        for mention in self.syntax.mentions:
            if mention.is_at(self.source.path, *place):
                return mention
        return None

    def get_view_from_file(self, source: Source) -> "Document | None":
        """This plan as seen from a file that it uses; None where it uses no file with this text."""
        plans = self.plans
        for plan in plans:
            if same_file(plan.span.path, source.path) and plan.span.text == source.text:
                break
        else:
            return None
        others = (other for other in plans if other is not plan)
        return evolve(
            self,
            source=source_of(plan),
            syntax=Syntax((plan, *others)),
            model=None,
            mistakes=(),
            last_compiled=None,
        )

    def to_current_span(self, span: Span) -> Span | None:
        """Where a span of the last syntax is in the text as it is now.

        None where an edit removed it.
        """
        return span if span.path != self.source.path else self._change.after(span)

    @property
    def compile_diagnostics(self) -> Iterator[Diagnostic]:
        """The mistakes and warnings of the last compile, at their places now.

        A diagnostic whose place an edit removed is left out.
        """
        source, diagnostics = self.last_compiled or (self.source, ())
        moved = TextChange(source, self.source)
        for diagnostic in diagnostics:
            span: Span | None = diagnostic.span
            if diagnostic.span.path == source.path == self.source.path:
                span = moved.after(diagnostic.span)
            if span:
                yield evolve(diagnostic, span=span)

    def to_facts_span(self, span: Span) -> Span | None:
        """Where a span of the last syntax was in the text of the facts."""
        if not (self.facts and self.syntax) or span.path != self.facts.source.path:
            return span
        return TextChange(self.facts.source, self.syntax.source).back(span)


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file."""
    return one == other or realpath(one) == realpath(other)


def source_of(plan: tree.Plan) -> Source:
    """The text of a file's syntax tree."""
    return Source(plan.span.path, plan.span.text)


# ---- at once


def parse_document(before: Document | None, source: Source, read: Reader = load) -> Document:
    """The document with this text: its syntax and its mistakes."""
    before = before or Document(source)
    if is_ir(source.text):
        return Document(source)
    mistakes, model, syntax = (), None, before.syntax
    try:
        new_syntax = syntax_of(source, read)
        if is_whole(source) or not syntax:
            syntax = new_syntax
        settings = STAND_IN if new_syntax.is_model else None
        model = validate(resolve_plan(source, settings, read))
    except PlanError as error:
        # The author did not write STAND_IN, and cannot mend mistakes in it.
        mistakes = tuple(
            mistake for mistake in error.diagnostics if mistake.span.path != STAND_IN.path
        )
    return evolve(before, source=source, syntax=syntax, model=model, mistakes=mistakes)


def is_whole(source: Source) -> bool:
    """Whether a text has no mistakes of syntax.

    Raises PlanError where it is beyond the limits of a plan.
    """
    return not parse_with_mistakes(source).mistakes


def syntax_of(source: Source, read: Reader) -> Syntax:
    """The syntax of a plan and of all files that it uses, as far as they can be read.

    Raises PlanError where the text is beyond the limits of a plan.
    """
    return Syntax(tuple(_files(source, read)))


def _files(source: Source, read: Reader) -> Iterator[tree.Plan]:
    seen, pending = {source.path}, [source]
    while pending:
        current = pending.pop(0)
        plan = parse_with_mistakes(current).plan
        yield plan
        for use in plan.items:
            if not isinstance(use, tree.Use):
                continue
            with suppress(PlanError):
                used = open_used_file(use, current, read)
                if used.path not in seen:
                    seen.add(used.path)
                    parse_with_mistakes(used)
                    pending.append(used)


# ---- after a pause


class Overtaken(Exception):
    """The text has changed, so that the result of the compile is of no use."""


def compile_document(document: Document, is_stale: Callable[[], bool] = lambda: False) -> Document:
    """The document with the facts of its step and all of its warnings, or with the mistakes that
    the passes report.

    Raises Overtaken where it `is_stale` between two passes.
    """
    if not document.model or document.is_model:
        return document
    try:
        facts = _facts_left_true(document) or _facts(document.source, document.model, is_stale)
    except PlanError as error:
        return evolve(document, last_compiled=(document.source, error.diagnostics))
    return evolve(document, facts=facts, last_compiled=(facts.source, facts.warnings))


def _facts(source: Source, model: Program, is_stale: Callable[[], bool]) -> Facts:
    placed = [model]

    def observe(program: Program) -> None:
        if is_stale():
            raise Overtaken
        if program.after == PLACED:
            placed.append(program)

    program = lower(model, seen=observe)
    gpu, memory = hardware(program), account(program)
    timing = Timing(program, gpu) if gpu else None
    warnings = tuple(_warnings(source, program, memory))
    return Facts(
        source,
        model,
        placed[-1],
        program,
        get_collectives_by_rank(program),
        memory,
        timing,
        warnings,
    )


def _warnings(source: Source, program: Program, memory: Account) -> Iterator[Diagnostic]:
    yield from advice(program)
    least = smallest(program)
    least_memory = memory if least is program else account(least)
    if fits(least, least_memory) is False:
        yield too_large(
            least, least_memory, f"`scalec check {source.path}` finds changes with which it fits"
        )


def _facts_left_true(document: Document) -> Facts | None:
    """The facts of an earlier text, if they are true of the text as it is now, and each name and
    warning has its place.

    They are true after an edit in a comment, or of a setting that only the run reads: the warnings
    are made anew then.
    """
    facts, model = document.facts, document.model
    if not facts or not model or document.source.path != facts.source.path:
        return None
    if model.cluster.hardware:
        return None  # the hardware file may have changed since
    if evolve(model, train=with_run(model.train, facts.model.train)) != facts.model:
        return None
    if model.train != facts.model.train:
        program = evolve(facts.program, train=with_run(facts.program.train, model.train))
        warnings = tuple(_warnings(facts.source, program, facts.memory))
        facts = evolve(facts, model=model, program=program, warnings=warnings)
    return facts if _keep_their_places(document, facts) else None


def _keep_their_places(document: Document, facts: Facts) -> bool:
    """Whether all names are in the text of the facts too, and warnings at the same place in
    both texts.
    """
    path = document.source.path
    if any(document.to_facts_span(mention.span) is None for mention in document.mentions):
        return False
    moved = TextChange(facts.source, document.source)
    for warning in facts.warnings:
        for span in (warning.span, *(note.span for note in warning.notes)):
            if span and span.path == path and moved.after(span) != span:
                return False
    return True


def with_run(train: Train, other: Train) -> Train:
    """The settings with the other's seed, steps and learning rate, which no fact of a step
    depends on.
    """
    optimizer = evolve(train.optimizer, lr=other.optimizer.lr)
    return evolve(train, seed=other.seed, steps=other.steps, optimizer=optimizer)
