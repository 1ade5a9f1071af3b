"""Whether the verifier finds mistakes: every mutant of a program is evaluated as the program itself
is.

Purpose: `audit`: of all mutants, which are found, by what and where; those that are not are
executed in float64, which says whether they compute something else (missed: a defect of the
verifier) or the same (equivalent).  Non-goals: making mutants (`mutants`); types and the emitted
program, which find mistakes by other means.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property, partial
from itertools import chain

from attrs import evolve, frozen

from ...compiler.ir import Program
from ...compiler.proof.interpreter import (
    Outcome,
    Rows,
    ShapeError,
    Watch,
    Where,
    differing,
    nothing,
)
from ...compiler.proof.pipeline.rows import LossError, RowsError, run_rows
from ...compiler.proof.pipeline.shrink import renumber_ranks
from ...compiler.proof.prime_field import Field
from ...compiler.proof.proof import TRIALS, Case, case_of, on_ranks
from ...compiler.proof.reference import Reference
from ...compiler.proof.semantics import MEANINGS
from ...compiler.proof.simulated_mesh import SimulatedMesh
from ...compiler.proof.small_sizes import Sizes, meshes
from ...compiler.proof.tensors import Numbers, Tensor
from ...compiler.schedules.check import problems
from ...compiler.schedules.rendezvous import rendezvous
from ..float64 import Reals
from .mutants import Mutant, chunk_mutants, mutants, row_mutants
from .mutants.faults import FAULTS
from .replay import Memory, Replay, forward


class Fate(Enum):
    """The outcome of a mutant."""

    # killed: a value cannot be made, is not there, or has not the shape that is declared
    SHAPES = "by shapes"
    VALUES = "by values"  # killed: a result of the step differs
    EQUIVALENT = "equivalent"  # not killed, and in float64 it computes what the program computes
    MISSED = "missed"  # not killed, and in float64 it computes something else


KILLED = (Fate.SHAPES, Fate.VALUES)


@frozen
class Verdict:
    """A mutant's fate, and the mesh that showed it."""

    mutant: Mutant
    fate: Fate
    mesh: Sizes


@frozen
class Audit:
    """The fate of every mutant of a program."""

    verdicts: tuple[Verdict, ...]

    def of(self, *fates: Fate) -> list[Verdict]:
        """The verdicts with one of these fates."""
        return [verdict for verdict in self.verdicts if verdict.fate in fates]

    @property
    def passed(self) -> bool:
        """Whether nothing was missed, and at most 2% were equivalent."""
        return not self.of(Fate.MISSED) and 50 * len(self.of(Fate.EQUIVALENT)) <= len(self.verdicts)

    def lines(self) -> Iterator[str]:
        """A table of the fates by family, and every mutant that was not killed with its plan
        line.
        """
        families = dict.fromkeys(verdict.mutant.family for verdict in self.verdicts)
        rows = [
            _row(name, [v for v in self.verdicts if v.mutant.family == name]) for name in families
        ]
        yield from _table(
            [("mutants", "made", *(fate.value for fate in Fate)), *rows, _row("all", self.verdicts)]
        )
        yield f"{len(self.of(*KILLED))} killed of {len(self.verdicts)}"
        for verdict in self.of(Fate.EQUIVALENT, Fate.MISSED):
            yield f"{verdict.fate.value}: {verdict.mutant.what} ({verdict.mutant.line})"


def _row(name: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    count = Counter(verdict.fate for verdict in verdicts)
    return name, str(len(verdicts)), *(str(count[fate]) for fate in Fate)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with the first column flush left and the others, which are numbers, flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers in rows:
        cells = [
            first.ljust(widths[0]),
            *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)),
        ]
        yield "  ".join(cells)


FEW = 2
"""Trials that tell most mutants apart; the others are evaluated in as many as the proof begins
with.
"""


def audit(program: Program, model: Program) -> Audit:
    """Evaluates every mutant of `program` after the last pass, whose step is that of `model`
    (`proof.prove`).
    """
    cases = sorted((case_of(program, model, axes) for axes in meshes(program)), key=_ranks)
    benches = [Benches(case) for case in cases]
    found = [_verdict(mutant, benches) for mutant in mutants(program)]
    for each in benches:  # rows are those of its sizes
        own = chain(row_mutants(each.case.program), chunk_mutants(each.case.program))
        found += [_verdict(mutant, [each]) for mutant in own]
    return Audit(tuple(found))


def _ranks(case: Case) -> int:
    return case.program.degree(tuple(case.mesh))


class Bench:
    """A case on which mutants are evaluated, with what they begin with and what they should
    compute.
    """

    def __init__(self, case: Case, numbers: Numbers) -> None:
        self.case, self._numbers = case, numbers
        self._world = SimulatedMesh.of_program(case.program)
        start = case.scene(numbers)
        self._env = start.on(case.program, self._world, numbers)
        self._due = on_ranks(case.program, self._world, Reference(case.single, numbers).run(start))
        self._forward = forward(case.program)
        self._memory = Memory()
        own = self._machine(case.program, run_rows, learning=True).run(self._env)
        apart = [*self._differences(own)]
        assert not apart, f"verify: what is audited is not the single-device step: {apart}"

    def _machine(self, program: Program, rows: Rows, learning: bool = False) -> Replay:
        return Replay(
            program,
            self._world,
            self._numbers,
            meanings=MEANINGS | FAULTS,
            rows=rows,
            watch=nothing if learning else self._stop(program),
            memory=self._memory,
            learning=learning,
        )

    def _stop(self, program: Program) -> Watch:
        """Ends an evaluation as soon as the loss, the norm or the count is not what it should
        be.
        """
        due = dict(
            zip(
                (end.name for end in program.region.yields),
                self._due.metrics.values(),
                strict=False,
            )
        )

        def watch(name: str, where: Where, value: Tensor) -> None:
            if not where and name in due and differing(self._numbers, value, due[name]):
                raise _UnequalError(name)

        return watch

    def _differences(self, found: Outcome) -> Iterator[str]:
        """The results that differ."""
        pairs = zip(found.results(), self._due.results(), strict=True)
        return (name for (name, _, own), (_, _, due) in pairs if differing(self._numbers, own, due))

    def wrong(self, mutant: Mutant) -> Fate | None:
        """Whether a mutant differs from the single-device step, or its ranks wait for each
        other, and by what.
        """
        return self.runs(mutant) or (Fate.SHAPES if _blocks(mutant) else None)

    def runs(self, mutant: Mutant) -> Fate | None:
        """Whether a mutant differs from the single-device step, and by what."""
        program = self._small(mutant.program)
        rows = partial(
            run_rows, freed=mutant.freed, moved=mutant.moved, evaluation=mutant.evaluation
        )
        machine = self._machine(program, rows)
        try:
            if not program.pipeline and (ahead := forward(program)) != self._forward:
                machine.body(ahead, self._env, ())
            found = machine.run(self._env)
        except (LossError, _UnequalError):
            return Fate.VALUES
        except (ShapeError, RowsError, AssertionError):
            return Fate.SHAPES
        return Fate.VALUES if any(self._differences(found)) else None

    def _small(self, program: Program) -> Program:
        """A mutant at the sizes of the case, which it may have already."""
        small = self.case.program
        if (program.axes, program.dims) == (small.axes, small.dims):
            return program
        region = (
            renumber_ranks(program.region, program.pipeline, small)
            if program.pipeline
            else program.region
        )
        return evolve(small, region=region)


class _UnequalError(Exception):
    """A result of the step is not what it should be."""


@frozen(slots=False)
class Benches:
    """The benches of a case, each made when it is asked for: few trials, those of the proof,
    and float64.
    """

    case: Case

    @cached_property
    def few(self) -> Bench:
        """Where mutants are evaluated first."""
        return Bench(self.case, Field(FEW, len(self.case.program.axes)))

    @cached_property
    def exact(self) -> Bench:
        """As the proof evaluates."""
        return Bench(self.case, Field(TRIALS, len(self.case.program.axes)))

    @cached_property
    def floats(self) -> Bench:
        """Where numbers are rounded."""
        return Bench(self.case, Reals(len(self.case.program.axes)))


def _blocks(mutant: Mutant) -> bool:
    """Whether rows, although what they compute is right, wait for each other where a send
    blocks until received.
    """
    if mutant.evaluation:
        return bool(rendezvous(mutant.evaluation))
    pipeline = mutant.program.pipeline
    return bool(pipeline and pipeline.schedule and problems(pipeline.schedule))


def _verdict(mutant: Mutant, benches: Sequence[Benches]) -> Verdict:
    for each in benches:
        if fate := each.few.wrong(mutant) or each.exact.wrong(mutant):
            return Verdict(mutant, fate, each.case.mesh)
    for each in benches:
        if each.floats.wrong(mutant):
            return Verdict(mutant, Fate.MISSED, each.case.mesh)
    return Verdict(mutant, Fate.EQUIVALENT, benches[-1].case.mesh)
