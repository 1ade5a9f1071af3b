"""Plans compiled in a Python session, and all that the compiler knows of them.

Non-goals: the command line, and the analyses themselves, which are the compiler's.
"""

from functools import cached_property
from pathlib import Path
from typing import Literal

from attrs import frozen

from scalec.compiler.analysis.certificate import Proof
from scalec.compiler.analysis.collective import Collective
from scalec.compiler.analysis.memory import Account
from scalec.compiler.analysis.time.report import Report
from scalec.compiler.cli import compile as compiled
from scalec.compiler.cli.op_trials import trials
from scalec.compiler.emit.write_files import OutputError
from scalec.compiler.ir import Program
from scalec.compiler.syntax.diagnostics import Diagnostic, PlanError
from scalec.compiler.syntax.package_data import SHIPPED, package_file
from scalec.compiler.syntax.source import Source

__all__ = ["Diagnostic", "OutputError", "Page", "Plan", "PlanError", "compile", "plan"]


@frozen(slots=False, repr=False)
class Plan:
    """A compiled plan."""

    _compiled: compiled.Plan

    def __repr__(self) -> str:
        from scalec.compiler.reports.summary import headline

        return f"<scalec.Plan {headline(self.program)}>"

    @property
    def text(self) -> str:
        """The plan as it was read."""
        return self._compiled.source.text

    @property
    def program(self) -> Program:
        """The IR after the last pass: its axes, dims, parameters, buckets and ops."""
        return self._compiled.program

    @property
    def ir(self) -> str:
        """The IR after the last pass, as `scalec ir` prints it."""
        from scalec.compiler.ir.printer import print_ir

        return print_ir(self.program)

    @property
    def memory(self) -> Account:
        """The memory of a rank, in bytes; for a pipeline, of the rank that needs most."""
        from scalec.compiler.analysis.memory import account

        return account(self.program)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of a step in their order; for a pipeline, rank by rank."""
        from scalec.compiler.analysis.communication import collectives, places

        all_collectives = list[Collective]()
        for rank in places(self.program):
            all_collectives += collectives(self.program, rank)
        return tuple(all_collectives)

    @property
    def time(self) -> Report | None:
        """The predicted time of a step; None where the plan's cluster names no known GPU."""
        from scalec.compiler.analysis.time import get_expected_report

        return get_expected_report(self.program)

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The warnings; a plan with errors does not compile."""
        return compiled.warnings(self._compiled)

    def verify(self) -> Proof:
        """Proves that the step is the step of a single device, once.  Raises PlanError."""
        return self._proof

    @cached_property
    def _proof(self) -> Proof:
        return self._compiled.get_proof()

    def explain(self, topic: Literal["memory", "collectives", "time"]) -> str:
        """The tables of `scalec explain`.  Raises ValueError for the time on an unknown GPU."""
        from scalec.compiler.reports import explain
        from scalec.compiler.reports.time import time

        if topic == "time":
            if self.time is None:
                raise ValueError("the time of a step needs `cluster { gpu = … }`")
            return time(self.time)
        tables = {"memory": explain.memory, "collectives": explain.explain_collectives}
        return tables[topic](self.program)

    def report(
        self, other: "Plan | None" = None, *, verify: bool = True, tokens: float | None = None
    ) -> "Page":
        """The page of `scalec report`, of this plan or of it beside another; a notebook shows it.

        tokens: how many to train on, by default the tokens of the plan's steps.  Raises PlanError
        where the proof fails.
        """
        from scalec.tools.report import Subject, report

        subjects = list[Subject]()
        for plan in (self, other) if other else (self,):
            proof = plan.verify() if verify else None
            subjects.append(Subject(*plan._compiled, proof))
        return Page(report(*subjects, tokens=tokens))

    def write(self, folder: str | Path, *, verify: bool = True, try_functions: bool = True) -> Path:
        """Writes train.py, the files that it reads, and plan.json; returns the path of train.py.

        verify: proves the step first.  try_functions: tries the functions of the plan's own ops
        first.  Raises PlanError, and OutputError where files that scalec did not write would be
        lost.
        """
        proof = self.verify() if verify else None
        with trials(Path(self._compiled.source.path), try_functions) as trial:
            tried = trial.try_functions(self._compiled.model, self._compiled.source).tried
        compiled.write(self._compiled, proof, Path(folder), tried)
        return Path(folder) / "train.py"


@frozen
class Page:
    """A page of HTML that needs nothing else."""

    html: str

    def __repr__(self) -> str:
        return f"<scalec.Page of {len(self.html):,} characters>"

    def _repr_html_(self) -> str:
        from scalec.tools.report import notebook

        return notebook(self.html)

    def save(self, path: str | Path) -> None:
        """Writes the page to a file."""
        Path(path).write_text(self.html, encoding="utf-8")


def compile(text: str, path: str | Path = "plan.scale") -> Plan:
    """The plan of a text, or of IR text.  Raises PlanError.

    Messages call it `path`; files that it uses are searched for in the folder of `path`.
    """
    return Plan(compiled.compile_source(Source(str(path), text)))


def plan(given: str | Path) -> Plan:
    """The plan of a file; a string with a brace or a line break is a plan's text.  Raises
    PlanError.

    `scalec:llama3_8b` is a plan that comes with scalec.
    """
    if isinstance(given, str) and not {"{", "\n"}.isdisjoint(given):
        return compile(given)
    file = package_file(str(given)) if str(given).startswith(SHIPPED) else None
    return Plan(compiled.load(file or Path(given)))
