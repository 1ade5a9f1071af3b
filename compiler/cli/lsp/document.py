"""A document as it is typed: its text now, the last text that was a plan, and the last one that
made a program.

Purpose: diagnostics at once, facts of the compiled step after a pause; facts that an edit leaves
true stay.  All functions are pure but for files that a plan uses.  Non-goals: the protocol.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from os.path import realpath

from attrs import evolve, frozen

from ...analysis.elastic import smallest
from ...analysis.hardware import Hardware, hardware
from ...analysis.memory import Account, account, fits, too_large
from ...analysis.time.clocks import StepTime
from ...analysis.time.op_rows import OpRow, op_rows
from ...analysis.time.step import step_time
from ...config.settings import Train
from ...frontend import resolve
from ...frontend.load_plan import opened
from ...frontend.validate import validate
from ...ir import Op, Program
from ...passes import lower
from ...passes.look_ahead import look_ahead
from ...reports.lints import advice
from ...syntax import tree
from ...syntax.diagnostics import Diagnostic, PlanError
from ...syntax.limits import Reader, load
from ...syntax.parser import read_plan
from ...syntax.source import Source, Span, is_ir
from .mentions import Mention, mentions
from .moved import Moved
from .sent import Ranks, of_ranks

PLACED = "insert_collectives"
"""The pass after which each value that a plan names has its placement."""

STAND_IN = Source(
    "the settings of a plan",
    "train { seq = 64  global_batch = 1  microbatch = 1  steps = 1  optimizer sgd { lr = 1 }"
    " data text { files = [python_stdlib] } }",
)
"""Settings by which a file that has a model alone is read."""


@frozen
class Syntax:
    """The last text that was a plan, with the files that it uses: its own comes first."""

    plans: tuple[tree.Plan, ...]

    @property
    def source(self) -> Source:
        """The document's own text."""
        return source_of(self.plans[0])

    @property
    def is_model(self) -> bool:
        """Whether the document has a model alone, which other files use."""
        kinds = {section.kind.name for section in self.plans[0].sections()}
        return any(isinstance(item, tree.Model) for item in self.plans[0].items) and not kinds & {
            "train",
            "mesh",
        }

    @cached_property
    def mentions(self) -> tuple[Mention, ...]:
        """All names, those of the document first."""
        return mentions(self.plans)


@frozen
class Facts:
    """The step of the last text that made a program.

    model    the program without placements
    placed   the program in which each value has its placement
    program  the program after the last pass
    timing   its time; None where the speed of the plan's GPU is not known
    warnings what the compiler advises
    """

    source: Source
    model: Program
    placed: Program
    program: Program
    sent: Ranks
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
    _on: Hardware

    @cached_property
    def step(self) -> StepTime:
        """The time of the step."""
        return step_time(self._program, self._on)

    @cached_property
    def rows(self) -> tuple[OpRow, ...]:
        """The time of each op."""
        return tuple(op_rows(self._program, self._on, self.step.rank))


@frozen
class Document:
    """A document: `syntax` and `facts` may be of earlier texts than `source`; `model` is None
    where this makes none.
    """

    source: Source
    syntax: Syntax | None = None
    facts: Facts | None = None
    model: Program | None = None
    mistakes: tuple[Diagnostic, ...] = ()
    last_compiled: tuple[Source, tuple[Diagnostic, ...]] | None = None
    """The text that was compiled last, and all that was found then."""

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
        """Whether it has a model alone, of which no sizes of data are known."""
        return self.syntax is not None and self.syntax.is_model

    @cached_property
    def _moved(self) -> "Moved":
        """From the text of the syntax to that of now."""
        assert self.syntax, "lsp: a place without syntax"
        return Moved(self.syntax.source, self.source)

    def mention(self, line: int, column: int) -> Mention | None:
        """The name at a place of the text as it is now, by the last text that was a plan."""
        if not self.syntax:
            return None
        if not (place := self._moved.before(line, column)):
            return None
        path = self.source.path
        return next(
            (mention for mention in self.syntax.mentions if mention.is_at(path, *place)), None
        )

    def of_file(self, source: Source) -> "Document | None":
        """This plan as seen from a file that it uses, with this text; None where it uses none
        such.
        """
        plans = self.syntax.plans if self.syntax else ()
        own = [
            plan
            for plan in plans
            if same_file(plan.span.path, source.path) and plan.span.text == source.text
        ]
        if not own:
            return None
        others = (plan for plan in plans if plan is not own[0])
        syntax = Syntax((own[0], *others))
        return evolve(
            self,
            source=source_of(own[0]),
            syntax=syntax,
            model=None,
            mistakes=(),
            last_compiled=None,
        )

    def here(self, span: Span) -> Span | None:
        """Where a span of the last syntax is in the text as it is now; None where that was
        edited away.
        """
        return span if span.path != self.source.path else self._moved.after(span)

    @property
    def later(self) -> Iterator[Diagnostic]:
        """The mistakes and warnings that compiling found, at their places now; without those
        that were edited away.
        """
        source, found = self.last_compiled or (self.source, ())
        moved = Moved(source, self.source)
        for it in found:
            own = it.span.path == source.path == self.source.path
            if span := moved.after(it.span) if own else it.span:
                yield evolve(it, span=span)

    def of_facts(self, span: Span) -> Span | None:
        """Where a span of the last syntax was in the text that the facts are of."""
        if not (self.facts and self.syntax) or span.path != self.facts.source.path:
            return span
        return Moved(self.facts.source, self.syntax.source).back(span)


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file."""
    return one == other or realpath(one) == realpath(other)


def source_of(plan: tree.Plan) -> Source:
    """The text of a file's syntax tree."""
    return Source(plan.span.path, plan.span.text)


# ---- at once


def typed(before: Document | None, source: Source, read: Reader = load) -> Document:
    """The document with this text: its syntax and its mistakes."""
    before = before or Document(source)
    if is_ir(source.text):
        return Document(source)
    mistakes, model, syntax = (), None, before.syntax
    try:
        found = syntax_of(source, read)
        syntax = found if is_whole(source) or not syntax else syntax
        model = validate(resolve(source, STAND_IN if found.is_model else None, read, look_ahead))
    except PlanError as error:
        mistakes = tuple(each for each in error.diagnostics if each.span.path != STAND_IN.path)
    return evolve(before, source=source, syntax=syntax, model=model, mistakes=mistakes)


def is_whole(source: Source) -> bool:
    """Whether a text has no mistakes of syntax.

    Raises PlanError where it is beyond the limits of a plan.
    """
    return not read_plan(source).mistakes


def syntax_of(source: Source, read: Reader) -> Syntax:
    """The syntax of a plan and of all files that it uses, as far as they can be read.

    Raises PlanError where the text is beyond the limits of a plan.
    """
    return Syntax(tuple(_files(source, read)))


def _files(source: Source, read: Reader) -> Iterator[tree.Plan]:
    seen, pending = {source.path}, [source]
    while pending:
        current = pending.pop(0)
        yield (plan := read_plan(current).plan)
        for use in plan.items:
            with suppress(PlanError):
                if (
                    isinstance(use, tree.Use)
                    and (found := opened(use, current, read)).path not in seen
                ):
                    seen.add(found.path)
                    read_plan(found)
                    pending.append(found)


# ---- after a pause


class Overtaken(Exception):
    """The text has changed: what was being found out is of no use."""


def compiled(document: Document, is_stale: Callable[[], bool] = lambda: False) -> Document:
    """The document with the facts of its step and all of its warnings, or with mistakes that the
    passes have found.

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

    def seen(program: Program) -> None:
        if is_stale():
            raise Overtaken
        if program.after == PLACED:
            placed.append(program)

    program = lower(model, seen=seen)
    on, memory = hardware(program), account(program)
    timing = Timing(program, on) if on else None
    warnings = tuple(_warnings(source, program, memory))
    return Facts(source, model, placed[-1], program, of_ranks(program), memory, timing, warnings)


def _warnings(source: Source, program: Program, memory: Account) -> Iterator[Diagnostic]:
    yield from advice(program)
    least = smallest(program)
    now = memory if least is program else account(least)
    if fits(least, now) is False:
        yield too_large(
            least, now, f"`scalec check {source.path}` finds changes with which it fits"
        )


def _facts_left_true(document: Document) -> Facts | None:
    """The facts of an earlier text, if they are true of the text as it is now, and each name and
    warning has its place.

    So they are after an edit in a comment, or of a setting that only the run reads: the warnings
    are made anew then.
    """
    facts, model = document.facts, document.model
    if (
        not facts
        or not model
        or document.source.path != facts.source.path
        or model.cluster.hardware
    ):
        return None  # a file of hardware may be another one by now
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
    mentions = document.syntax.mentions if document.syntax else ()
    if any(document.of_facts(mention.span) is None for mention in mentions):
        return False
    moved = Moved(facts.source, document.source)
    warned = [
        span for it in facts.warnings for span in (it.span, *(note.span for note in it.notes))
    ]
    return all(moved.after(span) == span for span in warned if span and span.path == path)


def with_run(train: Train, other: Train) -> Train:
    """The settings with the other's seed, steps and learning rate, which no fact of a step
    depends on.
    """
    optimizer = evolve(train.optimizer, lr=other.optimizer.lr)
    return evolve(train, seed=other.seed, steps=other.steps, optimizer=optimizer)
